"""Keeps engines from computing until a test has done what it needs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import llamac
from processes import TIMEOUT


@contextlib.contextmanager
def held(engine: llamac.Engine, after: int = 0) -> Iterator[threading.Event]:
    """Keep the engine from computing until the end of the block, once it has done this many steps in it.

    Yields:
        An event that is set when the engine is held.
    """
    release, reached, compute = threading.Event(), threading.Event(), engine._batch.step
    done = 0

    def step() -> None:
        nonlocal done
        if done == after:
            reached.set()
            assert release.wait(TIMEOUT)
        done += 1
        compute()

    engine._batch.step = step  # type: ignore[method-assign]
    try:
        yield reached
    finally:
        engine._batch.step = compute  # type: ignore[method-assign]
        release.set()
