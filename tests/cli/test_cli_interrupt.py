"""Ctrl-C at the start and the end of a command, and signals during destructors, are as quiet as anywhere else."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from processes import TIMEOUT, heed_signals


def run_command(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program and then llamac's command in one process."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program) + "\nllamac.__main__.main()", *map(str, arguments)],
        preexec_fn=heed_signals,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


@pytest.mark.parametrize("module", ["llamac._core", "llamac.cli", "llamac.sources.names", "argparse", "llamac.cli.run"])
def test_ctrl_c_during_an_import_ends_quietly(script: Path, module: str) -> None:
    """The imported code may swallow the KeyboardInterrupt."""
    program = f"""
        import os, signal, sys
        import llamac.__main__
        class Interrupt:
            def find_spec(self, name, path, target=None):
                if name == {module!r}:
                    try:
                        os.kill(os.getpid(), signal.SIGINT)
                        for _ in range(100):
                            pass
                    except KeyboardInterrupt:
                        pass
        sys.meta_path.insert(0, Interrupt())
    """
    done = run_command(program, "run", script, "-i", "a", "-n", 5)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_at_the_end_of_the_process_is_ignored(script: Path) -> None:
    program = """
        import atexit, os, signal
        import llamac.__main__
        atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
    """
    done = run_command(program, "run", script, "-i", "", "-n", 5, "-t", 0, "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "abcde\n", "")


def test_a_second_ctrl_c_ends_quietly(script: Path) -> None:
    program = """
        import os, signal, sys
        import llamac.__main__, llamac.cli, llamac.cli.run
        def run(options):
            os.kill(os.getpid(), signal.SIGINT)
        def end(code):
            os.kill(os.getpid(), signal.SIGINT)
        llamac.cli.run.run, llamac.cli._end_of_output = run, end
    """
    done = run_command(program, "run", script)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_job_started_with_ignored_ctrl_c_keeps_ignoring_it(script: Path) -> None:
    """Ctrl-C comes once during the imports and once when the command runs."""
    program = """
        import os, signal, sys
        import llamac.__main__
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        class Interrupt:
            def find_spec(self, name, path, target=None):
                if name == "llamac.cli":
                    os.kill(os.getpid(), signal.SIGINT)
                if name == "llamac.cli.prefill":
                    os.kill(os.getpid(), signal.SIGINT)
                    print("interrupted")
        sys.meta_path.insert(0, Interrupt())
    """
    done = run_command(program, "run", script, "-i", "", "-n", 5, "-t", 0, "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\nabcde\n", "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_signal_during_a_destructor_ends_the_command(script: Path, number: int, code: int) -> None:
    """Python drops what a destructor raises."""
    program = f"""
        import os, time
        import llamac.__main__, llamac.cli, llamac.cli.run
        class Busy:
            def __del__(self):
                os.kill(os.getpid(), {int(number)})
                for _ in range(100):
                    pass
        def run(options):
            Busy()
            time.sleep(30)
        llamac.cli.run.run = run
    """
    done = run_command(program, "run", script)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")
