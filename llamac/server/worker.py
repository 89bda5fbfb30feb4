"""What an endpoint has for one request: an open model, its caller's settings, and threads for what takes time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from llamac.engine.batching.request import Request
from llamac.engine.scoring.cancellation import Cancellation
from llamac.errors import LlamacError

if TYPE_CHECKING:
    from llamac.engine.generation.output import Completion
    from llamac.server.call import Call
    from llamac.server.metrics import Metrics
    from llamac.server.models import Entry, Models, Opened

LOGGER = logging.getLogger("llamac.server")
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

    async def compute(self, call: Callable[[Cancellation], Result]) -> Result:
        """Run a call in a thread. If nobody waits for it any more, it is cancelled."""
        cancel = Cancellation()
        try:
            return await self.run(partial(call, cancel))
        finally:
            cancel.cancel()

    async def submit(self, call: Callable[[], Submitted]) -> Submitted:
        """Run a call that queues requests in a thread. If nobody waits for it any more, its requests are cancelled."""

        def checked() -> Submitted:
            found = call()
            try:
                for request in found[1]:
                    self.call.check_prompt(request.prompt_tokens)
            except LlamacError:
                for request in found[1]:
                    request.cancel()
                raise
            if self.settings.log_prompts:
                tokenizer = self.engine.model.tokenizer
                for request in found[1]:
                    data = b"".join(tokenizer.token_bytes(token) for token in request._output.prompt)
                    self._log("prompt", data.decode("utf-8", "replace"))
            return found

        running = self._started(checked)
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

    def count(self, tokens: int) -> None:
        """Count tokens that were computed without a request to the engine."""
        self.metrics.prompt_tokens.add(tokens)
        self.call.computed += tokens

    def record(self, completion: Completion) -> None:
        """Count a result, and note it for the log."""
        self.metrics.record(completion)
        self.call.note(completion)
        if self.settings.log_prompts:
            for choice in completion.choices:
                self._log("answer", choice.text)

    def _log(self, what: str, text: str) -> None:
        LOGGER.info(what, extra={"fields": {"request_id": self.call.id, "model": self.name, "text": text}})


def _cancel_submitted(running: Future[Submitted]) -> None:
    if not running.cancelled() and running.exception() is None:
        for request in running.result()[1]:
            request.cancel()
