"""Run the C tests as shipped. `.ci/run` runs them under sanitizers and with other compilers and processors, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_c_tests_pass() -> None:
    build = Path(__file__).parents[1] / "c" / "build.py"
    done = subprocess.run([sys.executable, build], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed" in done.stdout
