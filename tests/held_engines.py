"""Keeps engines from computing until a test has submitted what it needs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import llamac
from processes import TIMEOUT


@contextlib.contextmanager
def held(engine: llamac.Engine) -> Iterator[None]:
    """Keep the engine from computing until the end of the block."""
    release, compute = threading.Event(), engine._batch.step

    def step() -> None:
        assert release.wait(TIMEOUT)
        compute()

    engine._batch.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine._batch.step = compute  # type: ignore[method-assign]
        release.set()
