"""A failed request frees its body at once, without the cycle collector."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from llamac.server.call import Call
from llamac.server.exchange import LONG_BODY, Answer, read_json
from llamac.server.guard import Guard
from llamac.server.metrics import Metrics
from llamac.server.settings import Settings


class Body(bytearray):
    """A part of a body that supports weak references."""


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def answered(parts: list[bytes], then: str | None, status: list[int]) -> list[weakref.ref[Body]]:
    """Send a body to an endpoint that reads it; return weak references to its parts.

    Args:
        parts: The body.
        then: "end" after a whole body, an event that follows a part of one, or None for silence.
        status: Receives the status of the answer.
    """

    async def endpoint(call: Call) -> Answer:
        return Answer(await read_json(call))

    async def receive() -> dict[str, Any]:
        if not events:
            await asyncio.sleep(60)
        return events.pop(0)

    async def send(event: Any) -> None:
        status.append(event.get("status", 0))

    bodies = [Body(part) for part in parts]
    events = [{"type": "http.request", "body": body, "more_body": True} for body in bodies]
    if then == "end":
        events[-1]["more_body"] = False
    elif then is not None:
        events.append({"type": then})
    kept = [weakref.ref(body) for body in bodies]
    del bodies
    settings = Settings(body_seconds=0.2, max_body_bytes=4 * LONG_BODY)
    guard = Guard(endpoint, frozenset(("/v1/completions",)), settings, Metrics())
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/v1/completions", "headers": []}
    await guard(scope, receive, send)
    return kept


@pytest.mark.parametrize(
    ("parts", "then", "expected"),
    [
        ([b"{", b"}"], "end", 200),
        ([b"{", b"x"], "http.disconnect", None),
        ([b"{", b"x"], None, 408),
        ([b"{", b"x"], "end", 400),
        ([b"{", b"x" * LONG_BODY], "end", 400),
        ([b"x" * LONG_BODY] * 5, "end", 413),
    ],
)
def test_a_body_is_freed_when_its_request_has_ended(
    no_collector: None, parts: list[bytes], then: str | None, expected: int | None
) -> None:
    status: list[int] = []

    async def run() -> list[bool]:
        kept = await answered(parts, then, status)
        await asyncio.sleep(0)  # the loop forgets the tasks that have ended
        return [body() is None for body in kept]

    assert asyncio.run(run()) == [True] * len(parts)
    assert status[:1] == ([] if expected is None else [expected])
