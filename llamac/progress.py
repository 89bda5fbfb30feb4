"""Progress of long operations: the callback that reports it, and bars that show it.

tqdm draws the bars: a redrawn line on a terminal, a widget in a notebook. A log file or a pipe gets a plain line at
intervals instead.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from llamac.errors import ArgumentTypeError

Progress = Callable[[str, int, int], None]
"""Called as (phase, done, total). Each phase begins with done = 0 and ends with done = total.

The phases in `BYTE_PHASES` count bytes; every other phase counts its own steps.
"""

BYTE_PHASES = frozenset(("downloading", "reading", "verifying", "writing"))

LINE_INTERVAL = 10.0  # seconds between plain lines
ROWS = 24  # tqdm hides bars below this row; llamac's is the first unless the caller draws others

BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}{unit}/{total_fmt}{unit} [{remaining}]"
LINE = "llamac: {desc}: {percentage:.0f}%, {n_fmt}{unit}/{total_fmt}{unit}, {elapsed} elapsed, {remaining} left"


def silent(phase: str, done: int, total: int) -> None:
    """Ignore a progress report."""


@contextlib.contextmanager
def shown(progress: bool | Progress) -> Iterator[Progress]:
    """The callback for an argument `progress`: bars for True, nothing for False, or the callback itself."""
    if progress is True:
        with bars() as report:
            yield report
    elif progress and not callable(progress):
        raise ArgumentTypeError(f"progress must be a bool or a function, not {type(progress).__name__}")
    else:
        yield progress or silent


@contextlib.contextmanager
def bars(stream: TextIO | None = None, *, delay: float = 0.0) -> Iterator[Progress]:
    """Show progress on a stream while the block runs, one phase at a time.

    Args:
        stream: Where to draw; standard error by default.
        delay: Seconds before a phase gets a bar. Most phases of a prompt end sooner, and importing tqdm takes 70 ms.

    Yields:
        The callback to report to. Any thread may call it.
    """
    stream = sys.stderr if stream is None else stream
    if stream is None:  # a process without standard error
        yield silent
        return
    display = _Display(stream, delay)
    try:
        yield display.report
    finally:
        display.close()


@contextlib.contextmanager
def reporter(progress: Progress | bool | None) -> Iterator[Progress]:
    """Convert a `progress=` argument to a callback: True shows bars, False and None show nothing.

    Yields:
        The callback to report to.

    Raises:
        ArgumentTypeError: If the argument is something else and not callable.
    """
    if progress is None or progress is False:
        yield silent
    elif progress is True:
        with bars() as report:
            yield report
    elif callable(progress):
        yield progress
    else:
        raise ArgumentTypeError(
            f"progress must be True, False, None or a function of (phase, done, total), not {type(progress).__name__}"
        )


class _Display:
    """Draws the current phase: as a bar after the delay, or as plain lines every `LINE_INTERVAL` seconds."""

    def __init__(self, stream: TextIO, delay: float) -> None:
        self._stream = stream
        self._delay = delay
        self._is_notebook = "ipykernel" in sys.modules
        self._is_live = stream.isatty() or self._is_notebook
        self._lock = threading.Lock()
        self._phase: str | None = None
        self._started = self._due = 0.0  # seconds of time.monotonic
        self._bar: Any = None

    def report(self, phase: str, done: int, total: int) -> None:
        with self._lock:
            now = time.monotonic()
            if phase != self._phase:
                self._end_phase()
                self._phase, self._started = phase, now
                self._due = now + (self._delay if self._is_live else LINE_INTERVAL)
            if done >= total:  # clear the line, because the caller may write to the same terminal next
                self._end_phase()
            elif self._bar is not None:
                self._bar.ncols = self._width()
                self._bar.update(done - self._bar.n)
            elif now >= self._due and self._is_live:
                self._bar = self._make_bar(phase, done, total)
            elif now >= self._due:
                self._due = now + LINE_INTERVAL
                self._write_line(phase, done, total, now - self._started)

    def close(self) -> None:
        """Remove the bar. An interrupted block leaves its phase unfinished."""
        with self._lock:
            self._end_phase()

    def _end_phase(self) -> None:
        self._phase = None
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _make_bar(self, phase: str, done: int, total: int) -> Any:
        from tqdm.auto import tqdm

        class Bar(tqdm):  # type: ignore[misc, unused-ignore]  # tqdm has no types
            monitor_interval = 0  # no thread that watches bars

        return Bar(
            desc=phase,
            total=total,
            initial=done,
            file=self._stream,
            leave=False,
            miniters=1,
            ncols=self._width(),
            nrows=ROWS,
            bar_format=BAR,
            **_units(phase),
        )

    def _width(self) -> int | None:
        """Columns for the bar. None in a notebook, where a widget sizes itself.

        The terminal's last three stay free, so that the ^C that Ctrl-C echoes does not wrap the line.
        """
        if self._is_notebook:
            return None
        named = os.environ.get("COLUMNS", "")
        columns = int(named) if named.isdecimal() else 0
        if not columns:
            with contextlib.suppress(OSError, ValueError):  # tqdm itself draws nothing on a terminal of unknown size
                columns = os.get_terminal_size(self._stream.fileno()).columns
        return max(1, (columns or 80) - 3)

    def _write_line(self, phase: str, done: int, total: int, elapsed: float) -> None:
        from tqdm.std import tqdm

        line = tqdm.format_meter(done, total, elapsed, prefix=phase, bar_format=LINE, **_units(phase))
        with contextlib.suppress(OSError):  # a broken pipe must not stop the operation
            self._stream.write(f"{line}\n")
            self._stream.flush()


def _units(phase: str) -> dict[str, Any]:
    return {"unit": "B", "unit_scale": True, "unit_divisor": 1000} if phase in BYTE_PHASES else {"unit": ""}
