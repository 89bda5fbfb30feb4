"""Paths about the server itself: whether it works and is ready, its numbers, and the models that it serves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from llamac.server.exchange import Answer, HttpError
from llamac.server.metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from starlette.requests import Request

    from llamac.server.models import Entry
    from llamac.server.service import Service

STARTED = int(time.time())


async def health(service: Service, request: Request) -> Answer:
    """Whether the engines work."""
    failure = service.failure
    if failure is not None:
        raise HttpError(503, str(failure), "engine_stopped", "server_error")
    return Answer({"status": "ok"})


async def ready(service: Service, request: Request) -> Answer:
    """Whether the models that are opened at the start have computed something."""
    await health(service, request)
    if not service.is_warm:
        raise HttpError(503, "the model is being loaded", "loading", "server_error", {"retry-after": "1"})
    return Answer({"status": "ready"})


async def metrics(service: Service, request: Request) -> Answer:
    """The server's numbers. A key for some models may not read those of others."""
    key = request.scope["llamac_call"].key
    if key is not None and key.limits.models is not None:
        raise HttpError(403, f"the key {key.name!r} may not read the metrics: it is for some models only", "forbidden")
    return Answer(service.metrics.text(service.models), content_type=CONTENT_TYPE)


async def models(service: Service, request: Request) -> Answer:
    """The models under all their names."""
    allows = request.scope["llamac_call"].allows
    data = [_model(name, entry) for name, entry in service.models.names.items() if allows(entry)]
    return Answer({"object": "list", "data": data})


async def one_model(service: Service, request: Request) -> Answer:
    """A model under one of its names."""
    name = request.path_params["name"]
    return Answer(_model(name, service.models.find(name, request.scope["llamac_call"].allows)))


def _model(name: str, entry: Entry) -> dict[str, Any]:
    found: dict[str, Any] = {"id": name, "object": "model", "created": STARTED, "owned_by": "llamac"}
    found["loaded"] = entry.opened is not None
    if entry.name != name:
        found["root"] = entry.name
    if entry.context is not None:
        found["max_model_len"] = entry.context
    return found
