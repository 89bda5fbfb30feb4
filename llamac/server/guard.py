"""What happens to every request before and after its endpoint: its id, the key, the origin, errors, log and metrics."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from llamac.errors import LlamacError
from llamac.openai.responses import error_response, new_id
from llamac.server.exchange import Answer, ClientGoneError, HttpError, Receive, Scope, Send
from llamac.server.failures import error_body, messages_error
from llamac.server.metrics import Metrics
from llamac.server.settings import Settings

Application = Callable[[Scope, Receive, Send], Awaitable[None]]

LOGGER = logging.getLogger("llamac.server")
MESSAGES = "/v1/messages"  # has errors and ids as in Anthropic's API
OPEN = ("/health", "/ready")  # need no key
REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
CLIENT_GONE = 499  # in the log and the metrics, as nginx writes it
METHODS = "GET, POST, OPTIONS"
EXPOSED = "x-request-id, x-llamac-no-effect, retry-after"


class Guard:
    """An ASGI application around the endpoints."""

    def __init__(self, inner: Application, paths: frozenset[str], settings: Settings, metrics: Metrics) -> None:
        self._inner = inner
        self._paths = paths
        self._settings = settings
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. No exception leaves this method."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":  # uvicorn then answers 403
            await send({"type": "websocket.close"})
            return
        exchange = _Exchange(scope, send)
        begun = time.monotonic()
        origin = exchange.headers.get("origin", "")
        if self._allows(origin):
            exchange.extra["access-control-allow-origin"] = origin
            exchange.extra["vary"] = "Origin"
            exchange.extra["access-control-expose-headers"] = EXPOSED
        try:
            self._check(exchange)
            if scope["method"] == "OPTIONS" and self._allows(origin):
                await self._preflight(exchange, receive)
            else:
                scope["app"] = self  # Starlette's routes then raise their 404 and 405
                scope["llamac_id"] = exchange.id
                await self._inner(scope, receive, exchange.send)
        except ClientGoneError:
            exchange.status = CLIENT_GONE
        except Exception as error:
            await self._fail(exchange, error, receive)
        self._record(exchange, time.monotonic() - begun)

    # ---- before

    def _check(self, exchange: _Exchange) -> None:
        settings = self._settings
        host = _host_of(exchange.headers.get("host", ""))
        if settings.hosts and host not in settings.hosts:
            message = f"the server does not answer to the name {host!r} (--host, or an API key, allows it)"
            raise HttpError(403, message, "unknown_host")
        origin = exchange.headers.get("origin", "")
        if origin and not self._allows(origin) and _host_of(origin.partition("://")[2]) != host:
            raise HttpError(403, f"web pages of {origin} may not call this server (--cors allows it)", "foreign_origin")
        is_open = exchange.path in OPEN or exchange.scope["method"] == "OPTIONS"
        if settings.keys and not is_open and not settings.keys.accepts(_key(exchange.headers)):
            message = "a valid API key is missing: send it as `Authorization: Bearer KEY`"
            headers = {"www-authenticate": "Bearer"}
            raise HttpError(401, message, "invalid_api_key", "authentication_error", headers)

    def _allows(self, origin: str) -> bool:
        return bool(origin) and ("*" in self._settings.origins or origin in self._settings.origins)

    async def _preflight(self, exchange: _Exchange, receive: Receive) -> None:
        asked = exchange.headers.get("access-control-request-headers", "")
        headers = {"access-control-allow-methods": METHODS, "access-control-max-age": "600"}
        if asked.isascii() and asked.isprintable():
            headers["access-control-allow-headers"] = asked
        await Answer("", 204, headers)(exchange.scope, receive, exchange.send)

    # ---- after

    async def _fail(self, exchange: _Exchange, error: Exception, receive: Receive) -> None:
        """Answer with an error. A stream has begun already: it has sent its own."""
        status, body, headers = self._answer_of(error, exchange)
        if status >= 500:
            fields = {"request_id": exchange.id, "path": exchange.path}
            LOGGER.error("a request has failed", exc_info=error, extra={"fields": fields})
        if exchange.path.startswith(MESSAGES):
            body = messages_error(status, body["error"]["message"], exchange.id)
        if exchange.status is None:
            await Answer(body, status, headers)(exchange.scope, receive, exchange.send)

    def _answer_of(self, error: Exception, exchange: _Exchange) -> tuple[int, dict[str, Any], Mapping[str, str]]:
        from starlette.exceptions import HTTPException

        if isinstance(error, HTTPException):
            message = {
                404: f"there is no {exchange.path!r} here",
                405: f"{exchange.path} does not take the method {exchange.scope['method']}",
            }.get(error.status_code, error.detail)
            code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
            error = HttpError(error.status_code, message, code, headers=error.headers or {})
        if isinstance(error, HttpError):
            body = error_body(str(error), error.kind, error.code, error.param)
            return error.status, body, self._retry(error.status) | error.headers
        if isinstance(error, LlamacError):
            status, body = error_response(error)
            return status, body, self._retry(status)
        message = f"the server has failed; its log says more about the request {exchange.id}"
        return 500, error_body(message, "server_error", "internal_error"), {}

    def _retry(self, status: int) -> dict[str, str]:
        return {"retry-after": str(self._settings.retry_seconds)} if status in (429, 503) else {}

    def _record(self, exchange: _Exchange, seconds: float) -> None:
        known = exchange.path if exchange.path in self._paths else "other"
        status = exchange.status or 500
        self._metrics.requests.add(1, known, str(status))
        self._metrics.request_s.observe(seconds)
        fields = {
            "request_id": exchange.id,
            "method": exchange.scope["method"],
            "path": exchange.path,
            "status": status,
            "seconds": round(seconds, 4),
        }
        LOGGER.info("request", extra={"fields": fields})


class _Exchange:
    """A request and its answer.

    Attributes:
        id: The id that its client has given, else a new one.
        status: The status of the answer, once it has begun.
        extra: Further headers of the answer.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self.scope = scope
        self.path: str = scope["path"]
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        given = self.headers.get("x-request-id", "")
        self.id = given if REQUEST_ID.fullmatch(given) else new_id("req_")
        self.status: int | None = None
        self.extra = {"x-request-id": self.id, "x-content-type-options": "nosniff"}
        if self.path.startswith(MESSAGES):
            self.extra["request-id"] = self.id
        self._send = send

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Send a part of the answer; its beginning gets the headers that every answer has."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            extra = [(name.encode(), value.encode("latin-1", "replace")) for name, value in self.extra.items()]
            message = {**message, "headers": [*message["headers"], *extra]}
        await self._send(message)


def _key(headers: Mapping[str, str]) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _host_of(authority: str) -> str:
    """A host without its port."""
    if authority.startswith("["):
        return authority.partition("]")[0][1:].lower()
    return authority.partition(":")[0].lower()


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
