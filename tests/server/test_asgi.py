"""The ASGI application without llamac's own connections, as other servers and Ray Serve run it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import llamac
from llamac.engine.batching.engine import Engine
from llamac.server.app import create_app
from llamac.server.exchange import ClientGoneError, EventStream
from llamac.server.guard import Guard
from llamac.server.models import Models
from llamac.server.service import Service
from llamac.server.settings import Settings

PATIENCE = 60.0  # seconds; only a hang takes so long
SETTINGS = Settings()


@pytest.fixture(scope="module")
def app() -> Iterator[Guard]:
    with llamac.load(llamac.models.path()) as model, Engine(model) as engine:
        service = Service(Models.of_one(engine, ("m",)), Settings(origins=("https://page",), max_body_bytes=128))
        yield create_app(service)
        service.close()


def call(app: Any, *events: Any, **scope: Any) -> list[Any]:
    """Call an application with these events, after which the client stays; return what it sends."""
    left, sent = list(events), []

    async def receive() -> Any:
        if not left:
            await asyncio.Event().wait()
        return left[0] if left[0]["type"] == "http.disconnect" else left.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    given = {"type": "http", "http_version": "1.1", "method": "GET", "path": "/health", "query_string": b"", **scope}
    given["headers"] = [(name.encode(), value.encode()) for name, value in given.get("headers", {}).items()]
    begun = time.monotonic()
    asyncio.run(asyncio.wait_for(app(given, receive, send), PATIENCE))
    assert time.monotonic() - begun < PATIENCE  # the application ends when it is cancelled
    return sent


def part(data: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": data, "more_body": more}


def completion(**options: Any) -> bytes:
    return json.dumps({"prompt": "a", "max_tokens": 2, **options}).encode()


POST = {"method": "POST", "path": "/v1/completions"}


def test_the_lifespan_is_answered_and_web_sockets_are_closed(app: Guard) -> None:
    sent = call(app, {"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}, type="lifespan")
    assert [message["type"] for message in sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert call(app, type="websocket") == [{"type": "websocket.close"}]


def test_a_request_without_a_thread_holds_no_model_and_computes_nothing_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with llamac.load(llamac.models.path()) as model, Engine(model) as engine:
        service = Service(Models.of_one(engine, ("m",)), SETTINGS)
        app = create_app(service)
        with monkeypatch.context() as exhausted:
            exhausted.setattr(threading.Thread, "start", refuse)
            assert call(app, part(completion()), **POST)[0]["status"] == 500
        assert call(app, part(completion()), **POST)[0]["status"] == 200  # after what the first one has left
        assert service.models.entries[0].uses == 0
        assert engine.stats().generated == 2
        service.close()


def test_a_stream_needs_no_connection_of_llamac(app: Guard) -> None:
    first, *parts = call(app, part(b" ", more=True), part(completion(stream=True)), part(b""), **POST)
    assert first["status"] == 200
    assert parts[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    assert parts[-2]["body"] == b"data: [DONE]\n\n"
    assert all(message["body"] and message["more_body"] for message in parts[:-1])


def test_a_client_that_goes_away_gets_nothing_more(app: Guard) -> None:
    assert call(app, part(b"{", more=True), {"type": "http.disconnect"}, **POST) == []
    endless = completion(stream=True, max_tokens=10**6, ignore_eos=True, context_overflow="shift")
    sent = call(app, part(endless), part(b""), {"type": "http.disconnect"}, **POST)
    assert not sent or sent[-1].get("more_body") is not False


def test_a_large_body_is_refused_before_it_is_sent_if_the_client_asks(app: Guard) -> None:
    headers = {"content-length": "129", "expect": "100-continue"}
    first, body = call(app, headers=headers, **POST)
    assert first["status"] == 413
    assert json.loads(body["body"])["error"]["code"] == "request_too_large"


@pytest.mark.parametrize(("asked", "allowed"), [("authorization", b"authorization"), ("a\tb", None)])
def test_a_preflight_repeats_only_printable_headers(app: Guard, asked: str, allowed: bytes | None) -> None:
    headers = {"origin": "https://page", "access-control-request-headers": asked}
    (first, _) = call(app, method="OPTIONS", path="/v1/models", headers=headers)
    assert first["status"] == 204
    assert dict(first["headers"]).get(b"access-control-allow-headers") == allowed


def test_a_host_can_be_an_address_of_ipv6(tmp_path: Path) -> None:
    with llamac.load(llamac.models.path()) as model, Engine(model) as engine:
        service = Service(Models.of_one(engine, ("m",)), Settings(hosts=("::1",)))
        app = create_app(service)
        assert call(app, headers={"host": "[::1]:8000"})[0]["status"] == 200
        assert call(app, headers={"host": "[::2]:8000"})[0]["status"] == 403
        service.close()


def test_a_proxy_may_send_whole_urls_and_no_host() -> None:
    with llamac.load(llamac.models.path()) as model, Engine(model) as engine:
        service = Service(Models.of_one(engine, ("m",)), Settings(hosts=("localhost",)))
        app = create_app(service)
        assert call(app, path="http://localhost/health", headers={"host": "localhost"})[0]["status"] == 200
        assert call(app, path="HTTP://localhost/v1", headers={"host": "localhost"})[0]["status"] == 404
        assert call(app, http_version="1.0")[0]["status"] == 200
        assert call(app, http_version="1.0", headers={"host": ""})[0]["status"] == 403
        service.close()


def events(*given: bytes, seconds: float = 0.0) -> Any:
    """Events that come after so many seconds each. They note that they were closed."""
    closed: list[bool] = []

    async def made(write: Any) -> AsyncIterator[bytes]:
        assert write is None
        try:
            for data in given:
                await asyncio.sleep(seconds)
                yield data
        finally:
            closed.append(True)

    made.closed = closed  # type: ignore[attr-defined]
    return made


def test_comments_are_sent_while_nothing_happens_and_no_chunk_is_empty() -> None:
    sent = call(EventStream(events(b"a", b"", b"b", seconds=0.1), replace(SETTINGS, ping_seconds=0.05)))
    bodies = [message["body"] for message in sent[1:-1]]
    assert b"".join(bodies).replace(b": ping\n\n", b"") == b"ab"
    assert b": ping\n\n" in bodies
    assert b"" not in bodies


def test_a_client_that_does_not_read_is_given_up() -> None:
    made = events(b"a", b"b")

    async def run() -> None:
        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()  # nobody reads

        scope = {"type": "http", "http_version": "1.0", "method": "GET"}
        await EventStream(made, replace(SETTINGS, send_seconds=0.2))(scope, receive, send)

    with pytest.raises(ClientGoneError):
        asyncio.run(asyncio.wait_for(run(), PATIENCE))
    assert made.closed == [True]


@pytest.mark.parametrize("reads", [True, False])
def test_only_a_client_that_does_not_read_is_given_up(reads: bool) -> None:
    class Connection:
        """A connection whose client reads a byte at each look, if it reads."""

        left = 10**6

        @property
        def unread(self) -> int:
            self.left -= reads
            return self.left

        def start_direct(self) -> bool:
            return False

        def stop_direct(self) -> None:
            pass

        def write_part(self, data: bytes) -> bool:
            return False

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message.get("body") == b"a":
            await asyncio.sleep(3.0)  # the buffer is full for longer than a client may read nothing

    scope = {"http_version": "1.1", "method": "GET", "llamac.connection": Connection()}
    stream = EventStream(events(b"a", b"b"), replace(SETTINGS, send_seconds=0.2))(scope, receive, send)
    with contextlib.nullcontext() if reads else pytest.raises(ClientGoneError):
        asyncio.run(asyncio.wait_for(stream, PATIENCE))
