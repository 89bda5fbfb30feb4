"""Progress: bars on terminals, plain lines elsewhere, and the values of a `progress=` argument."""

from __future__ import annotations

import io
import itertools
import os
import pty
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from llamac.errors import ArgumentTypeError
from llamac.progress import bars, reporter, silent


class Terminal(io.StringIO):
    """A terminal whose width is COLUMNS."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> itertools.count[int]:
    """A clock that advances by one second per reading."""
    clock = itertools.count()
    monkeypatch.setattr("llamac.progress.time.monotonic", lambda: float(next(clock)))
    return clock


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_a_bar_stays_on_one_line_and_is_wiped(seconds: object, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = Terminal()
    with bars(terminal) as report:
        for done in range(3):
            report("reference logits", done, 23)
        for gigabytes in range(3):
            report("writing", gigabytes * 10**9, 12_345_678_901)
    drawn = terminal.getvalue().split("\r")
    assert any(line.startswith("reference lo") for line in drawn)
    assert any(line.startswith("writing: ") for line in drawn)
    assert max(map(len, drawn)) < columns
    assert "\n" not in terminal.getvalue()
    assert drawn[-2].strip() == drawn[-1] == ""


def test_a_bar_counts_bytes_or_steps(seconds: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    terminal = Terminal()
    with bars(terminal, delay=1) as report:
        report("writing", 0, 12_345_678_901)
        report("writing", 2 * 10**9, 12_345_678_901)
        report("probes", 0, 8)
        report("probes", 3, 8)
    assert "| 2.00GB/12.3GB [" in terminal.getvalue()
    assert "| 3/8 [" in terminal.getvalue()


def test_a_phase_shorter_than_the_delay_neither_draws_nor_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)  # an import would fail
    terminal = Terminal()
    with bars(terminal, delay=60) as report:
        for phase in ("reading", "prompt"):
            for done in range(3):
                report(phase, done, 2)
    assert terminal.getvalue() == ""


def test_a_phase_longer_than_the_delay_gets_a_bar(seconds: object) -> None:
    terminal = Terminal()
    with bars(terminal, delay=5) as report:
        for done in range(10):
            report("prompt", done, 20)
    assert "prompt:  25%|" in terminal.getvalue()
    assert "prompt:  20%|" not in terminal.getvalue()


def test_a_finished_phase_is_wiped_at_once(seconds: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller may print its result to the same terminal."""
    monkeypatch.setenv("COLUMNS", "40")
    terminal = Terminal()
    with bars(terminal) as report:
        for done in range(3):
            report("prompt", done, 2)
        assert terminal.getvalue().endswith("\r")


def test_the_bar_of_an_interrupted_block_is_wiped(seconds: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    terminal = Terminal()

    def work() -> None:
        with bars(terminal) as report:
            report("prompt", 0, 9)
            report("prompt", 1, 9)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert terminal.getvalue().endswith("\r")


def test_a_plain_line_is_logged_every_ten_seconds(seconds: object) -> None:
    log = io.StringIO()
    with bars(log) as report:
        for done in range(26):  # one report per second
            report("writing", done * 10**8, 4 * 10**9)
    assert log.getvalue() == (
        "llamac: writing: 25%, 1.00GB/4.00GB, 00:10 elapsed, 00:30 left\n"
        "llamac: writing: 50%, 2.00GB/4.00GB, 00:20 elapsed, 00:20 left\n"
    )


def test_errors_of_the_log_are_ignored(seconds: object) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    with bars(Full()) as report:
        for done in range(12):
            report("writing", done, 12)


def test_threads_can_report_concurrently(seconds: object) -> None:
    log = io.StringIO()
    with bars(log) as report:
        threads = [threading.Thread(target=report, args=("downloading", n, 100)) for n in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert log.getvalue().count("\n") == 4


def test_a_terminal_of_unknown_size_gets_a_bar(seconds: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new pseudo-terminal has no size."""
    monkeypatch.delenv("COLUMNS", raising=False)
    controller, terminal = pty.openpty()
    with open(terminal, "w") as stream, bars(stream) as report:
        report("verifying", 0, 10**9)
        report("verifying", 10**8, 10**9)
        shown = os.read(controller, 10_000).decode()
    os.close(controller)
    assert 70 < max(map(len, shown.split("\r"))) < 80


def test_a_process_without_standard_error_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with bars() as report:
        assert report is silent


# ---- the argument `progress=`


def test_false_and_none_are_silent() -> None:
    for value in (False, None):
        with reporter(value) as report:
            assert report is silent


def test_a_function_receives_every_report() -> None:
    calls: list[Any] = []

    def record(phase: str, done: int, total: int) -> None:
        calls.append((phase, done, total))

    with reporter(record) as report:
        report("probes", 1, 2)
    assert calls == [("probes", 1, 2)]


def test_true_shows_bars(seconds: object, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with reporter(True) as report:
        report("probes", 1, 8)
        report("probes", 2, 8)
    assert "probes: " in terminal.getvalue()


def test_anything_else_is_a_type_error() -> None:
    wrong: Any = Path("bar")
    with pytest.raises(ArgumentTypeError, match="progress must be True, False, None or a function"), reporter(wrong):
        pass
