"""Run the C tests as shipped and under sanitizers, and those of threads under ThreadSanitizer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

THREADS = ["--only", "test_pool", "--only", "test_pool_portable", "--only", "test_session_reads"]


@pytest.mark.parametrize(
    "options",
    [[], ["--sanitize", "address,undefined"], ["--sanitize", "thread", *THREADS]],
    ids=["plain", "sanitized", "thread-sanitized"],
)
def test_c_tests_pass(options: list[str]) -> None:
    build = Path(__file__).parents[1] / "c" / "build.py"
    done = subprocess.run([sys.executable, build, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed" in done.stdout
