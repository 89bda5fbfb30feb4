"""Progress bars on stderr for long work; nothing where stderr is no terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from llamac.progress import Progress, silent

BYTES = ("verifying", "writing", "reading", "downloading")  # phases that count bytes


@contextlib.contextmanager
def progress_bars() -> Iterator[Progress]:
    """The block gets what long work tells its progress to: each phase is a bar that takes the place of the last one.

    What draws them is imported with the first thing that is told: most models are opened without."""
    if not sys.stderr.isatty():
        yield silent
        return
    with contextlib.ExitStack() as stack:
        show: Progress | None = None

        def tell(phase: str, done: int, total: int) -> None:
            nonlocal show
            show = show or stack.enter_context(_bars())
            show(phase, done, total)

        yield tell


@contextlib.contextmanager
def _bars() -> Iterator[Progress]:
    from rich import progress as rich
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Column

    # on a narrow terminal the bar becomes shorter, then the texts are cut; a second line would stay behind
    columns = (
        rich.TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        rich.BarColumn(bar_width=None, table_column=Column(ratio=1, max_width=40)),
        rich.TextColumn("{task.fields[count]}", table_column=Column(no_wrap=True)),
        rich.TimeRemainingColumn(table_column=Column(no_wrap=True)),
    )
    with rich.Progress(*columns, console=Console(stderr=True), transient=True, expand=True) as bars:

        def show(phase: str, done: int, total: int) -> None:
            shown = decimal if phase in BYTES else str
            count = f"{shown(done)} / {shown(total)}"
            if not bars.tasks or bars.tasks[0].description != phase:
                for task in bars.task_ids:
                    bars.remove_task(task)
                bars.add_task(phase, total=total, count=count)
            bars.update(bars.task_ids[0], completed=done, count=count)

        yield show
