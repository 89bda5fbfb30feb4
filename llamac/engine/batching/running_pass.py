"""The running pass of an engine, which other threads can interrupt."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from llamac import _core
from llamac.engine.batching.request import Request


class RunningPass:
    """Runs one pass at a time in the engine's thread. Any thread may call `interrupt` and `stop`.

    Attributes:
        computing: Requests with prompt rows in the running pass.
        requests: Requests with any rows in it.
    """

    def __init__(self, core: _core.Session) -> None:
        """Create an idle object for the passes of a session."""
        self.computing: frozenset[Request] = frozenset()
        self.requests: frozenset[Request] = frozenset()
        self._core = core
        self._lock = threading.Lock()  # guards all attributes
        self._is_stopped = False
        self._scope: _core.CancelScope | None = None

    def interrupt(self, request: Request) -> None:
        """Interrupt the running pass if it computes this request's prompt, or if all of its requests are cancelled."""
        with self._lock:
            is_useless = all(other._cancelled for other in self.requests)
            if self._scope is not None and (request in self.computing or is_useless):
                self._scope.cancel()

    def stop(self) -> None:
        """Interrupt the running pass and all later ones."""
        with self._lock:
            self._is_stopped = True
            if self._scope is not None:
                self._scope.cancel()

    def run(self, requests: Iterable[Request], computing: Iterable[Request], compute: Callable[[], None]) -> None:
        """Run a pass for requests. It is interrupted if any of `computing`, or all requests, are cancelled.

        Raises:
            CancelledError: If it was interrupted.
        """
        scope = _core.CancelScope(self._core)
        with self._lock:
            self._scope, self.computing, self.requests = scope, frozenset(computing), frozenset(requests)
            if self._is_stopped or any(request._cancelled for request in self.computing):
                scope.cancel()
        try:
            scope.run(compute)
        finally:
            with self._lock:
                self._scope, self.computing, self.requests = None, frozenset(), frozenset()
