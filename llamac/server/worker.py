"""What the endpoints share: the engine with its model, the settings, the metrics, and threads for what takes time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from llamac.engine.batching.engine import Engine
from llamac.engine.batching.request import Request
from llamac.errors import LlamacError
from llamac.openai.responses import fingerprint
from llamac.server.exchange import HttpError
from llamac.server.metrics import Metrics
from llamac.server.settings import Settings

THREADS = 4
Result = TypeVar("Result")
Submitted = TypeVar("Submitted", bound=tuple[object, list[Request]])


class Worker:
    """A model that a server serves.

    Attributes:
        engine: The engine. It must stay open longer than the worker.
        settings: The server's settings.
        metrics: The server's numbers.
        name: The model's name in answers.
        fingerprint: The `system_fingerprint` of answers.
        is_warm: Whether the engine has computed something.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = Metrics()
        own = engine.model.name or Path(engine.model.file.path).stem
        self.names = tuple(dict.fromkeys((*settings.names, own)))
        self.name = self.names[0]
        self.fingerprint = fingerprint(engine.model, engine.kv_dtype, engine.context)
        self.is_warm = False
        self._pool = ThreadPoolExecutor(THREADS, "llamac-server")

    def check_model(self, name: str | None) -> None:
        """Refuse a name that is not the model's. A request without one means the model.

        Raises:
            HttpError: If the name is another one.
        """
        if name is not None and name not in self.names:
            known = " or ".join(map(repr, self.names))
            raise HttpError(404, f"the model {name!r} is not served here, only {known}", "model_not_found")

    async def run(self, call: Callable[[], Result]) -> Result:
        """Run a call in a thread, so that the event loop never waits for it."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    async def submit(self, call: Callable[[], Submitted]) -> Submitted:
        """Run a call that queues requests in a thread. If nobody waits for it any more, its requests are cancelled."""
        running = asyncio.get_running_loop().run_in_executor(self._pool, call)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            running.add_done_callback(_cancel_submitted)
            raise

    async def warm_up(self) -> None:
        """Compute one token: the threads start, and the first weights are read."""
        token = self.engine.model.special.bos_id or 0
        try:
            await self.engine.submit([token], max_tokens=1)
        except LlamacError:
            if self.engine.failure is not None:
                raise
        self.is_warm = True

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _cancel_submitted(running: asyncio.Future[Submitted]) -> None:
    if not running.cancelled() and running.exception() is None:
        for request in running.result()[1]:
            request.cancel()
