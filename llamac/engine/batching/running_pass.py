"""The pass that an engine's thread computes, as other threads see it: they can make it end early."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from llamac import _core
from llamac.engine.batching.request import Request


class RunningPass:
    """Computes one thing at a time in the engine's thread. Any thread may call `interrupt` and `stop`.

    Attributes:
        computing: Requests with prompt rows in the running pass.
        requests: Requests with any rows in it.
    """

    def __init__(self, core: _core.Session) -> None:
        """Begin without a pass, of a session."""
        self.computing: frozenset[Request] = frozenset()
        self.requests: frozenset[Request] = frozenset()
        self._core = core
        self._lock = threading.Lock()  # of all attributes
        self._is_stopped = False
        self._scope: _core.CancelScope | None = None

    def interrupt(self, request: Request) -> None:
        """Make the running pass end if it computes the prompt of a request, or nothing that is still wanted."""
        with self._lock:
            is_useless = all(other._cancelled for other in self.requests)
            if self._scope is not None and (request in self.computing or is_useless):
                self._scope.cancel()

    def stop(self) -> None:
        """Make the running pass and all later ones end."""
        with self._lock:
            self._is_stopped = True
            if self._scope is not None:
                self._scope.cancel()

    def run(self, requests: Iterable[Request], computing: Iterable[Request], compute: Callable[[], None]) -> None:
        """Compute something for requests. It ends early if one of `computing` is cancelled, or all requests are.

        Raises:
            CancelledError: If it has ended early.
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
