"""What an endpoint has for one request: an open model, its caller's settings, and threads for what takes time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from llamac.engine.batching.request import Request

if TYPE_CHECKING:
    from llamac.engine.generation.output import Completion
    from llamac.server.call import Call
    from llamac.server.metrics import Metrics
    from llamac.server.models import Entry, Models, Opened

Result = TypeVar("Result")
Submitted = TypeVar("Submitted", bound=tuple[object, list[Request]])


class Worker:
    """A model that answers a request. It stays open until the request has been answered.

    Attributes:
        engine: Its engine.
        name: Its name in answers.
        fingerprint: The `system_fingerprint` of answers.
        settings: The server's settings, as they apply to the caller.
        metrics: The server's numbers.
        call: The request.
    """

    def __init__(
        self, models: Models, entry: Entry, opened: Opened, metrics: Metrics, call: Call, pool: ThreadPoolExecutor
    ) -> None:
        self.engine = opened.engine
        self.name = entry.name
        self.fingerprint = opened.fingerprint
        self.settings = call.settings
        self.metrics = metrics
        self.call = call
        self._models = models
        self._entry = entry
        self._pool = pool

    async def run(self, call: Callable[[], Result]) -> Result:
        """Run a call in a thread, so that the event loop never waits for it."""
        return await asyncio.wrap_future(self._started(call))

    async def submit(self, call: Callable[[], Submitted]) -> Submitted:
        """Run a call that queues requests in a thread. If nobody waits for it any more, its requests are cancelled."""
        running = self._started(call)
        try:
            found = await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            running.add_done_callback(_cancel_submitted)
            raise
        self.call.requests += found[1]
        return found

    def _started(self, call: Callable[[], Result]) -> Future[Result]:
        """Start a call in a thread, which holds the model: the thread goes on when its request is given up."""
        loop = asyncio.get_running_loop()
        self._models.hold(self._entry)
        running = self._pool.submit(call)

        def release(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended, and with it the server
                loop.call_soon_threadsafe(self._models.release, self._entry)

        running.add_done_callback(release)
        return running

    def record(self, completion: Completion) -> None:
        """Count a result, and note it for the log."""
        self.metrics.record(completion)
        self.call.note(completion)


def _cancel_submitted(running: Future[Submitted]) -> None:
    if not running.cancelled() and running.exception() is None:
        for request in running.result()[1]:
            request.cancel()
