"""Wakes tasks of asyncio from the engine's thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Iterator


class Waker:
    """Sets events of event loops, with one call to a loop for all that happens before the loop has time for it.

    Such a call writes to a socket of the loop. That takes longer than all else that a token of a stream needs.
    """

    def __init__(self) -> None:
        self._waiting: dict[asyncio.AbstractEventLoop, deque[asyncio.Event]] = {}
        self._holder: int | None = None  # a thread whose events wait for the end of `holding`
        self._held: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Set the events of this thread at the end: those of a step together, when it needs the interpreter no more."""
        self._holder = threading.get_ident()
        try:
            yield
        finally:
            self._holder = None
            held, self._held = self._held, []
            for loop, changed in held:
                with contextlib.suppress(RuntimeError):  # nobody waits in a loop that has been closed
                    self.wake(loop, changed)

    def wake(self, loop: asyncio.AbstractEventLoop, changed: asyncio.Event) -> None:
        """Set an event soon.

        Raises:
            RuntimeError: If its loop is closed.
        """
        if threading.get_ident() == self._holder:
            self._held.append((loop, changed))
            return
        waiting = self._waiting.get(loop)
        if waiting is not None:
            waiting.append(changed)
            if self._waiting.get(loop) is waiting:  # the loop takes it; else it may have been too late
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
