"""Runs the C tests: compiled with the shipped flags, once as they are and once under the sanitizers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("options", [[], ["--sanitize", "address,undefined"]], ids=["plain", "sanitized"])
def test_c_tests_pass(options: list[str]) -> None:
    build = Path(__file__).parent / "c" / "build.py"
    done = subprocess.run([sys.executable, build, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed" in done.stdout
