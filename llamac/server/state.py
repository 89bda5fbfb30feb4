"""Paths about the server itself: whether it works and is ready, its numbers, and the models that it serves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from llamac.server.exchange import Answer, HttpError
from llamac.server.metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from starlette.requests import Request

    from llamac.server.worker import Worker

STARTED = int(time.time())


async def health(worker: Worker, request: Request) -> Answer:
    """Whether the engine works."""
    failure = worker.engine.failure
    if failure is not None or worker.engine.closed:
        raise HttpError(503, str(failure or "the engine is closed"), "engine_stopped", "server_error")
    return Answer({"status": "ok"})


async def ready(worker: Worker, request: Request) -> Answer:
    """Whether the model has computed something."""
    await health(worker, request)
    if not worker.is_warm:
        raise HttpError(503, "the model is being loaded", "loading", "server_error", {"retry-after": "1"})
    return Answer({"status": "ready"})


async def metrics(worker: Worker, request: Request) -> Answer:
    """The server's numbers."""
    return Answer(worker.metrics.text(worker.engine), content_type=CONTENT_TYPE)


async def models(worker: Worker, request: Request) -> Answer:
    """The model under all its names."""
    return Answer({"object": "list", "data": [_model(worker, name) for name in worker.names]})


async def one_model(worker: Worker, request: Request) -> Answer:
    """The model under one of its names."""
    name = request.path_params["name"]
    worker.check_model(name)
    return Answer(_model(worker, name))


def _model(worker: Worker, name: str) -> dict[str, Any]:
    found = {"id": name, "object": "model", "created": STARTED, "owned_by": "llamac"}
    return {**found, "max_model_len": worker.engine.context}
