"""Endpoints about the server itself: health, readiness, metrics, and the served models."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from llamac.openai.errors import InvalidRequestError
from llamac.server.exchange import Answer, HttpError
from llamac.server.metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from llamac.server.call import Call
    from llamac.server.models import Entry
    from llamac.server.service import Service

STARTED = int(time.time())
STARTED_AT = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(STARTED))
MAX_MODELS = 1000  # maximum number of models per answer
MAX_DIGITS = 9  # maximum number of digits of a number, including leading zeros
SHOWN = 20  # maximum number of characters of a wrong value in an error


async def health(service: Service, call: Call) -> Answer:
    """Return whether the engines work."""
    failure = service.failure
    if failure is not None:
        raise HttpError(503, str(failure), "engine_stopped", "server_error")
    return Answer({"status": "ok"})


async def ready(service: Service, call: Call) -> Answer:
    """Return whether the models that are opened at startup have computed a token."""
    await health(service, call)
    if not service.is_warm:
        raise HttpError(503, "the model is being loaded", "loading", "server_error", {"retry-after": "1"})
    return Answer({"status": "ready"})


async def metrics(service: Service, call: Call) -> Answer:
    """Return the server's metrics. Keys that are restricted to some models may not read them."""
    key = call.key
    if key is not None and key.limits.models is not None:
        raise HttpError(403, f"the key {key.name!r} may not read the metrics: it is for some models only", "forbidden")
    return Answer(service.metrics.text(service.models), content_type=CONTENT_TYPE)


async def models(service: Service, call: Call) -> Answer:
    """List the models under all their names, in a format for OpenAI's and Anthropic's clients, with pagination."""
    data = [_model(name, entry) for name, entry in service.models.names.items() if call.allows(entry)]
    after, before = call.query.get("after_id"), call.query.get("before_id")
    if after is not None:
        data = data[_place(data, after, "after_id") + 1 :]
    if before is not None:
        data = data[: _place(data, before, "before_id")]
    limit = _limit(call.query.get("limit", str(MAX_MODELS)))
    page = data[-limit:] if before is not None and after is None else data[:limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return Answer({"object": "list", "data": page, "has_more": len(page) < len(data), **ends})


async def one_model(service: Service, call: Call) -> Answer:
    """Describe a model under one of its names."""
    return Answer(_model(call.name, service.models.find(call.name, call.allows)))


def _place(data: list[dict[str, Any]], name: str, parameter: str) -> int:
    """Return the index of a model in a list of models."""
    for place, model in enumerate(data):
        if model["id"] == name:
            return place
    raise InvalidRequestError(f"{parameter} names a model that is not served: {name!r}", parameter, "invalid_value")


def _limit(text: str) -> int:
    is_number = text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS
    if not is_number or not 1 <= int(text) <= MAX_MODELS:
        message = f"limit is {text[:SHOWN]!r}, expected an integer from 1 to {MAX_MODELS}"
        raise InvalidRequestError(message, "limit", "invalid_value")
    return int(text)


def _model(name: str, entry: Entry) -> dict[str, Any]:
    found: dict[str, Any] = {"id": name, "object": "model", "created": STARTED, "owned_by": "llamac"}
    found |= {"type": "model", "display_name": name, "created_at": STARTED_AT, "lifecycle": "active"}
    found["loaded"] = entry.opened is not None
    if entry.name != name:
        found["root"] = entry.name
    if entry.context is not None:
        found["max_model_len"] = found["max_input_tokens"] = entry.context
    return found
