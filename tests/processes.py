"""Runs Python programs in separate processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from typing import Any

# The environment of a process that does not count the branches that it takes (tests/measure_coverage.py).
UNCOUNTED = {"COVERAGE_PROCESS_START": "", "COVERAGE_PROCESS_CONFIG": ""}
TIMEOUT = 300  # seconds; only a hang takes so long, even on a busy machine


def heed_signals() -> None:
    """Restore default signal handlers, as a preexec_fn.

    Children inherit ignored signals: shells ignore SIGINT in background jobs, and nohup ignores SIGHUP.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def run_python(code: str, *arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end. environment: added to this process's variables."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


def output_of(code: str, *arguments: Any, **environment: str) -> str:
    """Run a program that must succeed and print nothing on stderr, and return its output."""
    done = run_python(code, *arguments, **environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout
