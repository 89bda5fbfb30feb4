"""Wakes asyncio tasks from the engine's thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Iterator


class Waker:
    """Sets asyncio events from other threads, with one call to an event loop for many events.

    Each such call writes to a socket of the loop, which takes longer than all other work for a token of a stream.
    """

    def __init__(self) -> None:
        self._waiting: dict[asyncio.AbstractEventLoop, deque[asyncio.Event]] = {}
        self._holder: int | None = None  # the thread whose events are delayed until the end of `holding`
        self._delayed: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Delay this thread's events to the end of the block, so that a step sets all of its events together."""
        self._holder = threading.get_ident()
        try:
            yield
        finally:
            self._holder = None
            delayed, self._delayed = self._delayed, []
            for loop, changed in delayed:
                with contextlib.suppress(RuntimeError):  # the loop has been closed, so nothing waits in it
                    self.wake(loop, changed)

    def wake(self, loop: asyncio.AbstractEventLoop, changed: asyncio.Event) -> None:
        """Set an event soon.

        Raises:
            RuntimeError: If its loop is closed.
        """
        if threading.get_ident() == self._holder:
            self._delayed.append((loop, changed))
            return
        waiting = self._waiting.get(loop)
        if waiting is not None:
            waiting.append(changed)
            if self._waiting.get(loop) is waiting:  # the loop will set it; otherwise `_set` may have missed it
                return
        self._waiting[loop] = fresh = deque([changed])
        try:
            loop.call_soon_threadsafe(self._set, loop, fresh)
        except RuntimeError:
            self._waiting.pop(loop, None)
            raise

    def _set(self, loop: asyncio.AbstractEventLoop, waiting: deque[asyncio.Event]) -> None:
        if self._waiting.get(loop) is waiting:
            del self._waiting[loop]
        while waiting:
            waiting.popleft().set()
