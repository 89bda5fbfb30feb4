"""The context of an endpoint for one request: an open model, the caller's settings, and threads for blocking calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from llamac.engine.batching.request import Request
from llamac.engine.scoring.cancellation import Cancellation
from llamac.errors import LlamacError
from llamac.server.exchange import HttpError
from llamac.sizes import counted

if TYPE_CHECKING:
    from llamac.engine.generation.output import Completion
    from llamac.server.call import Call
    from llamac.server.metrics import Metrics
    from llamac.server.models import Entry, Models, Opened

LOGGER = logging.getLogger("llamac.server")
Result = TypeVar("Result")
Submitted = TypeVar("Submitted", bound=tuple[object, list[Request]])


class Threads(NamedTuple):
    """Threads for what takes time. Calls that compute can keep all of theirs busy, but not those that queue requests.

    Attributes:
        submitting: For calls that queue requests to an engine.
        computing: For other conversions and computations.
    """

    submitting: ThreadPoolExecutor
    computing: ThreadPoolExecutor

    def close(self) -> None:
        """End the threads."""
        for pool in self:
            pool.shutdown(wait=True, cancel_futures=True)


class Worker:
    """A model that answers a request. It stays open until the request has been answered.

    Attributes:
        engine: The model's engine.
        name: The model's name in answers.
        fingerprint: The `system_fingerprint` of answers.
        settings: The server's settings for this caller.
        metrics: The server's metrics.
        call: The request.
    """

    def __init__(
        self, models: Models, entry: Entry, opened: Opened, metrics: Metrics, call: Call, threads: Threads
    ) -> None:
        self.engine = opened.engine
        self.name = entry.name
        self.fingerprint = opened.fingerprint
        self.settings = call.settings
        self.metrics = metrics
        self.call = call
        self._models = models
        self._entry = entry
        self._threads = threads

    async def run(self, call: Callable[[], Result]) -> Result:
        """Run a call that converts the body's content in a thread. Cancelling the task frees the thread for others."""
        return await self.compute(lambda cancel: cancel.convert(call, self.call.body_bytes))

    async def compute(self, call: Callable[[Cancellation], Result]) -> Result:
        """Run a call in a thread. Cancelling the task cancels the call.

        Raises:
            HttpError: If the call takes longer than a request may take.
        """
        cancel = Cancellation()
        try:
            running = asyncio.wrap_future(self._started(partial(call, cancel), self._threads.computing))
            return await asyncio.wait_for(running, self.settings.request_seconds)
        except asyncio.TimeoutError:
            raise self.timed_out() from None
        finally:
            cancel.cancel()

    def timed_out(self) -> HttpError:
        """Return the error for a request that takes longer than it may."""
        limit = counted(self.settings.request_seconds or 0, "second")
        return HttpError(408, f"the answer took longer than {limit}, the limit of this server", "timeout")

    async def submit(self, call: Callable[[], Submitted]) -> Submitted:
        """Run a call that queues requests in a thread. Cancelling the task cancels the requests."""
        cancel = Cancellation()
        queued: list[Request] = []

        def checked() -> Submitted:
            found = call()
            queued.extend(found[1])
            try:
                cancel.check()
                for request in queued:
                    self.call.check_prompt(request.prompt_tokens)
            except LlamacError:
                _cancel(queued)
                raise
            if self.settings.log_prompts:
                tokenizer = self.engine.model.tokenizer
                for request in queued:
                    data = b"".join(tokenizer.token_bytes(token) for token in request._output.prompt)
                    self._log("prompt", data.decode("utf-8", "replace"))
            return found

        converted = partial(cancel.convert, checked, self.call.body_bytes)
        try:
            found = await asyncio.wrap_future(self._started(converted, self._threads.submitting))
        except BaseException:  # a call without a thread stays in the pool, which may run it later
            cancel.cancel()
            _cancel(queued)  # or `checked` does, if it has not queued them yet
            raise
        self.call.requests += found[1]
        return found

    def _started(self, call: Callable[[], Result], pool: ThreadPoolExecutor) -> Future[Result]:
        """Start a call in a thread. It keeps the model open, because it continues if its request is cancelled."""
        loop = asyncio.get_running_loop()
        self._models.hold(self._entry)
        try:
            running = pool.submit(call)
        except RuntimeError:  # the system refuses a thread
            self._models.release(self._entry)
            raise

        def release(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop, and with it the server, has ended
                loop.call_soon_threadsafe(self._models.release, self._entry)

        running.add_done_callback(release)
        return running

    def count(self, tokens: int) -> None:
        """Count tokens that were computed without a request to the engine."""
        self.call.computed += tokens

    def record(self, completion: Completion) -> None:
        """Record a result in the metrics and for the log."""
        self.metrics.record(completion)
        self.call.recorded += 1
        self.call.note(completion)
        if self.settings.log_prompts:
            for choice in completion.choices:
                self._log("answer", choice.text)

    def _log(self, what: str, text: str) -> None:
        LOGGER.info(what, extra={"fields": {"request_id": self.call.id, "model": self.name, "text": text}})


def _cancel(requests: list[Request]) -> None:
    for request in requests:
        request.cancel()
