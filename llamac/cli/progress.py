"""Progress bars on stderr for long work; nothing where stderr is no terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from llamac.progress import Progress, silent


@contextlib.contextmanager
def progress_bars() -> Iterator[Progress]:
    """The block gets what long work tells its progress to: each phase is a bar that takes the place of the last one."""
    if not sys.stderr.isatty():
        yield silent
        return
    from rich import progress as rich
    from rich.console import Console
    from rich.filesize import decimal

    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.TextColumn("{task.fields[count]}"))
    with rich.Progress(*columns, rich.TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bars:

        def show(phase: str, done: int, total: int) -> None:
            shown = decimal if phase in ("verifying", "writing") else str
            count = f"{shown(done)} / {shown(total)}"
            if not bars.tasks or bars.tasks[0].description != phase:
                for task in bars.task_ids:
                    bars.remove_task(task)
                bars.add_task(phase, total=total, count=count)
            bars.update(bars.task_ids[0], completed=done, count=count)

        yield show
