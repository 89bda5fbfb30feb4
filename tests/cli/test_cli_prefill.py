"""The progress of a long prompt: shown while the prompt is computed, and wiped before the text begins."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import llamac
from commands import GREEDY, Command
from llamac.cli import prefill
from llamac.cli.prefill import prefill_progress
from processes import TIMEOUT, heed_signals


def test_progress_follows_the_session(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token counts only when its logits are there, so the progress ends with the block."""
    monkeypatch.setattr(prefill, "POLL_INTERVAL", 0.001)
    calls: list[tuple[str, int, int]] = []
    seen = {4: threading.Event(), 9: threading.Event()}

    def report(phase: str, done: int, total: int) -> None:
        calls.append((phase, done, total))
        if done in seen:
            seen[done].set()

    with llamac.load(tiny_llama) as model, model.session() as session, prefill_progress(session, 10, report):
        session.prefill([1] * 4)
        assert seen[4].wait(TIMEOUT)
        session.prefill([1] * 6)
        assert seen[9].wait(TIMEOUT)
    assert {(phase, total) for phase, _, total in calls} == {("reading the prompt", 10)}
    reported = [done for _, done, _ in calls]
    assert reported == sorted(reported)
    assert reported[-1] == 9


def test_a_closed_session_ends_the_progress(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model:
        session = model.session()
        session.close()
        with prefill_progress(session, 10, lambda *call: None):
            pass


def test_the_progress_thread_ends_with_the_prompt(llamac_command: Command, script: Path) -> None:
    assert llamac_command("run", script, "-i", "h", *GREEDY, "-n", 2).code == 0
    assert not any("prefill" in thread.name for thread in threading.enumerate())


def test_lines_are_logged_while_the_prompt_is_computed(
    llamac_command: Command, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "POLL_INTERVAL", 0.001)
    monkeypatch.setattr("llamac.progress.LINE_INTERVAL", 0.0)
    original = llamac.Session.prefill
    asked = threading.Event()
    length = llamac.Session.length

    def slow(session: llamac.Session, *arguments: Any) -> None:
        assert asked.wait(TIMEOUT)
        original(session, *arguments)

    def counted(session: llamac.Session, *arguments: Any) -> int:
        counted.calls += 1  # type: ignore[attr-defined]
        if counted.calls > 3:  # type: ignore[attr-defined]
            asked.set()
        return length(session, *arguments)

    counted.calls = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(llamac.Session, "prefill", slow)
    monkeypatch.setattr(llamac.Session, "length", counted)
    run = ("run", script, "-i", "hello", *GREEDY, "-n", 3)
    done = llamac_command(*run)
    assert done.code == 0
    lines = done.err.splitlines()
    assert re.match(r"llamac: reading the prompt: 0%, 0/3, ", lines[0])
    assert lines[-1].startswith("prompt 3 tokens")
    asked.clear()
    counted.calls = 0  # type: ignore[attr-defined]
    assert llamac_command(*run, "-q").err == ""


def test_ctrl_c_during_a_long_prompt_ends_quietly(big_llama: Path, tmp_path: Path) -> None:
    """The bar is wiped and nothing else is printed."""
    (tmp_path / "prompt.txt").write_text("hello world " * 900)
    program = "from llamac.cli import prefill; prefill.BAR_DELAY = 0; from llamac import __main__; __main__.main()"
    command = [sys.executable, "-c", program, "run", str(big_llama), "-f", str(tmp_path / "prompt.txt"), "-n", "3"]
    controller, terminal = pty.openpty()
    environment = {**os.environ, "COLUMNS": "40", "TERM": "xterm"}
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=terminal,
        env=environment,
        preexec_fn=heed_signals,
    ) as process:
        os.close(terminal)
        shown = b""
        while b"reading the prompt" not in shown:
            shown += os.read(controller, 4096)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=TIMEOUT)
        try:
            while data := os.read(controller, 4096):
                shown += data
        except OSError:  # end of file: the other side of the terminal is closed
            pass
    os.close(controller)
    assert (process.returncode, out) == (130, b"")
    assert b"\n" not in shown
    assert shown.endswith(b"\r")
