"""Python programs that tests run in a process of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from typing import Any

TIMEOUT = 300  # seconds; only what hangs takes so long, on busy machines, too


def heed_signals() -> None:
    """For preexec_fn: what a shell started in the background ignores SIGINT, what stands behind nohup SIGHUP, and so do
    their children."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def run_python(code: str, *arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program and returns what it printed and its exit code. environment: variables added to this process's."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


def output_of(code: str, *arguments: Any, **environment: str) -> str:
    """What a program prints that must end well and must not complain."""
    done = run_python(code, *arguments, **environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout
