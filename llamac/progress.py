"""What long work tells of its way, for whoever draws a bar of it."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, all there is to do in this phase), first with 0 done.

"verifying" and "writing" count bytes, every other phase counts its steps. Each has a rate of its own, thus its own bar.
"""


def silent(phase: str, done: int, total: int) -> None:
    """The progress of work that nobody watches."""
