"""Wraps every endpoint: the request's id, the key, the origin, errors, log and metrics."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from llamac.errors import LlamacError
from llamac.openai.responses import error_response
from llamac.server.call import MESSAGES, Call
from llamac.server.exchange import Answer, ClientGoneError, EventStream, HttpError, Receive, Scope, Send
from llamac.server.failures import error_body, messages_error
from llamac.server.metrics import CLIENT_GONE, Metrics
from llamac.server.settings import Settings
from llamac.sizes import counted

Endpoint = Callable[[Call], Awaitable[Answer | EventStream]]

LOGGER = logging.getLogger("llamac.server")
OPEN = ("/health", "/ready", "/")  # need no key
PAGE = "/page/"  # needs no key either: the page asks for it
METHODS = "GET, POST, OPTIONS"
EXPOSED = "x-request-id, x-llamac-no-effect, retry-after"


class Guard:
    """The ASGI application: it lets the endpoints answer.

    Attributes:
        settings: The server's settings.
        metrics: The server's numbers.
    """

    def __init__(self, answer: Endpoint, paths: frozenset[str], settings: Settings, metrics: Metrics) -> None:
        self._answer = answer
        self._paths = paths
        self.settings = settings
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. No exception leaves this method."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":  # uvicorn then answers 403
            await send({"type": "websocket.close"})
            return
        call = Call(scope, receive, send, self.settings)
        begun = time.monotonic()
        origin = call.headers.get("origin", "")
        if self._allows(origin):
            call.extra["access-control-allow-origin"] = origin
            call.extra["vary"] = "Origin"
            call.extra["access-control-expose-headers"] = EXPOSED
        try:
            self._check(call)
            if scope["method"] == "OPTIONS" and self._allows(origin):
                await self._preflight(call, receive)
            else:
                answer = await self._answer(call)
                await answer(scope, receive, call.send)
        except (ClientGoneError, asyncio.CancelledError) as error:  # the latter: the server stops at once
            forget_locals(error)
            call.status = CLIENT_GONE
            if "llamac.connection" in scope:  # it may have gone by not reading
                scope["llamac.connection"].abandon()
        except Exception as error:
            await self._fail(call, error, receive)
            forget_locals(error)
        finally:
            call.end()
        self._record(call, time.monotonic() - begun)

    # ---- before

    def _check(self, call: Call) -> None:
        connection = call.scope.get("llamac.connection")
        if connection is not None and call.scope["http_version"] not in ("1.0", "1.1"):
            message = f"this server speaks HTTP/1.1, not HTTP/{call.scope['http_version']}"
            raise HttpError(505, message, "http_version_not_supported", headers={"connection": "close"})
        if call.path not in OPEN and connection is not None and connection.limits.are_too_many:
            most = connection.limits.most
            message = f"the server is answering {counted(most, 'request')}, which is its limit"
            headers = {"connection": "close"}
            raise HttpError(503, message, "too_many_connections", "server_error", headers)
        settings = self.settings
        host = _host_of(call.headers.get("host", ""))
        # browsers always send the header; checks of HTTP/1.0 may leave it out
        if settings.hosts and "host" in call.headers and host not in settings.hosts:
            message = f"the server does not answer to the name {host!r} (--host, or an API key, allows it)"
            raise HttpError(403, message, "unknown_host")
        origin = call.headers.get("origin", "")
        if origin and not self._allows(origin) and not _is_same(origin, call.headers.get("host", "")):
            raise HttpError(403, f"web pages of {origin} may not call this server (--cors allows it)", "foreign_origin")
        is_open = call.path in OPEN or call.path.startswith(PAGE) or call.scope["method"] == "OPTIONS"
        if not settings.keys or is_open:
            return
        key = settings.keys.find(_key(call.headers))
        if key is None:
            message = "a valid API key is missing: send it as `Authorization: Bearer KEY`"
            headers = {"www-authenticate": "Bearer"}
            raise HttpError(401, message, "invalid_api_key", "authentication_error", headers)
        call.use(key)

    def _allows(self, origin: str) -> bool:
        return bool(origin) and ("*" in self.settings.origins or origin in self.settings.origins)

    async def _preflight(self, call: Call, receive: Receive) -> None:
        asked = call.headers.get("access-control-request-headers", "")
        headers = {"access-control-allow-methods": METHODS, "access-control-max-age": "600"}
        if asked.isascii() and asked.isprintable():
            headers["access-control-allow-headers"] = asked
        await Answer("", 204, headers)(call.scope, receive, call.send)

    # ---- after

    async def _fail(self, call: Call, error: Exception, receive: Receive) -> None:
        """Answer with an error. A stream has begun already: it has sent its own."""
        status, body, headers = self._body_of(error, call)
        if status == 500:
            fields = {"request_id": call.id, "path": call.path}
            LOGGER.error("a request has failed", exc_info=error, extra={"fields": fields})
        if call.path.startswith(MESSAGES):
            body = messages_error(status, body["error"]["message"], call.id)
        if call.status is None:
            await Answer(body, status, headers)(call.scope, receive, call.send)

    def _body_of(self, error: Exception, call: Call) -> tuple[int, dict[str, Any], Mapping[str, str]]:
        if isinstance(error, HttpError):
            body = error_body(str(error), error.kind, error.code, error.param)
            return error.status, body, self._retry(error.status) | error.headers
        if isinstance(error, LlamacError):
            status, body = error_response(error)
            return status, body, self._retry(status)
        message = f"the server has failed; its log says more about the request {call.id}"
        return 500, error_body(message, "server_error", "internal_error"), {}

    def _retry(self, status: int) -> dict[str, str]:
        return {"retry-after": str(self.settings.retry_seconds)} if status in (429, 503) else {}

    def _record(self, call: Call, seconds: float) -> None:
        known = call.path if call.path in self._paths else "other"
        status = call.status or 500
        self.metrics.answered(call, known, status, seconds)
        fields = {
            "request_id": call.id,
            "method": call.scope["method"],
            "path": call.path,
            "status": status,
            "seconds": round(seconds, 4),
            **call.fields,
        }
        if call.prompt_tokens:
            fields |= {"prompt_tokens": call.prompt_tokens, "completion_tokens": call.new_tokens}
        LOGGER.info("request", extra={"fields": fields})


def forget_locals(error: BaseException) -> None:
    """Free the local variables of the functions that raised an exception, such as a request's body.

    A task refers to its exception, whose traceback refers to frames that refer to the task. Python's cycle collector
    counts objects, not bytes: without this, it would let many bodies of megabytes pile up.
    """
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each = each.__context__


def _key(headers: Mapping[str, str]) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _host_of(authority: str) -> str:
    """A host without its port."""
    if authority.startswith("["):
        return authority.partition("]")[0][1:].lower()
    return authority.partition(":")[0].lower()


def _is_same(origin: str, authority: str) -> bool:
    """Whether an origin is that of the server with this host and port. A proxy may leave out the port."""
    scheme, _, own = origin.partition("://")
    host, port = _host_of(own), _port_of(own) or {"http": "80", "https": "443"}.get(scheme.lower(), "")
    return bool(host) and host == _host_of(authority) and _port_of(authority) in ("", port)


def _port_of(authority: str) -> str:
    """The port of a host; "" if it has none."""
    return authority.rpartition("]")[2].partition(":")[2]


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
