"""HTTP as the endpoints use it: bodies in, answers and streams of events out, and clients that go away."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar

from llamac.errors import LlamacError
from llamac.format.strict_json import parse_object
from llamac.openai.errors import InvalidRequestError
from llamac.sizes import counted

if TYPE_CHECKING:
    from llamac.server.call import Call
    from llamac.server.connection import Connection
    from llamac.server.settings import Settings

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Write = Callable[[bytes], bool]  # sends events from any thread; False: the events after these must be yielded
Result = TypeVar("Result")

LONG_BODY = 1 << 16  # bytes that are parsed in another thread
JSON_TYPE = "application/json"
BODILESS = (204, 304)  # statuses of answers that have no body and no headers that describe one
MIN_WAIT_S, MAX_WAIT_S = 0.01, 1.0  # between two looks at a stream


class ClientGoneError(Exception):
    """The client has closed the connection: nobody reads the answer."""


class HttpError(LlamacError):
    """A request that is refused for a reason outside its body.

    Attributes:
        status: The status code.
        kind: The `type` of the error's body.
        code: The `code` of the error's body.
        headers: Headers of the answer.
        param: The `param` of the error's body.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code
        self.headers = dict(headers or {})
        self.param = param


# ---- in


async def read_json(call: Call) -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises:
        HttpError: If the body is too large or does not arrive in time.
        InvalidRequestError: If it is not a JSON object, or has strings that are not Unicode.
        ClientGoneError: If the client goes away.
    """
    settings = call.settings
    parts: list[bytes] = []
    try:
        await asyncio.wait_for(_read(call, settings.max_body_bytes, parts), settings.body_seconds)
    except asyncio.TimeoutError:
        message = f"the body has not arrived within {counted(settings.body_seconds, 'second')}"
        raise HttpError(408, message, "request_timeout", headers={"connection": "close"}) from None
    data = b"".join(parts)
    call.body_bytes = len(data)
    if len(data) < LONG_BODY:
        return _parsed(data)
    return await asyncio.get_running_loop().run_in_executor(None, _parsed, data)


async def _read(call: Call, limit: int, parts: list[bytes]) -> None:
    """Read a body. One that is too large is read to its end: clients that still send would not see the error."""
    message = f"the body has more than {limit} bytes, the limit of this server"
    announced = call.headers.get("content-length", "")
    too_large = HttpError(413, message, "request_too_large", headers={"connection": "close"})
    is_announced = announced.isdecimal() and int(announced[:20]) > limit
    if is_announced and "expect" in call.headers:
        raise too_large
    size, more = 0, True
    while more:
        try:
            event = await call.receive()
        except asyncio.CancelledError:  # the time is over
            if is_announced or size > limit:
                raise too_large from None
            raise
        if event["type"] == "http.disconnect":
            raise ClientGoneError
        part = event.get("body", b"")
        size += len(part)
        if size > limit:
            parts.clear()
        else:
            parts.append(part)
        more = event.get("more_body", False)
    if size > limit:
        raise too_large


def _parsed(data: bytes) -> dict[str, Any]:
    if not data:
        raise InvalidRequestError("the request has no body, expected a JSON object", code="invalid_json")
    try:
        document = parse_object(data, "the body", error=InvalidRequestError, max_bytes=len(data))
    except InvalidRequestError as error:
        raise InvalidRequestError(str(error), code="invalid_json") from None
    if b"\\u" in data:  # only an escape can stand for half of a character
        try:
            json.dumps(document, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            message = "the body has a lone surrogate, which is not a character"
            raise InvalidRequestError(message, code="invalid_json") from None
    return document


async def until_gone(
    receive: Receive, work: Coroutine[Any, Any, Result], watch: Coroutine[Any, Any, None] | None = None
) -> Result:
    """Await some work, and cancel it as soon as the client goes away.

    Args:
        receive: Tells when the client has gone.
        work: The work.
        watch: Ends when the client counts as gone, too.

    Raises:
        ClientGoneError: If the client went away first.
    """
    task = asyncio.ensure_future(work)
    ends: list[asyncio.Future[Any]] = [asyncio.ensure_future(_gone(receive))]
    if watch is not None:
        ends.append(asyncio.ensure_future(watch))
    try:
        await asyncio.wait({task, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for each in (task, *ends):
            each.cancel()
        await asyncio.gather(task, *ends, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# ---- out


# the line ends of Unicode that JSON may leave as they are; many clients divide a stream with `str.splitlines`
_LINE_ENDS = tuple((end.encode(), json.dumps(end)[1:-1].encode()) for end in "\x85\u2028\u2029")


def encoded(value: object) -> bytes:
    """A value as JSON in one line, whatever a client takes for the end of a line."""
    import msgspec

    data = msgspec.json.encode(value)
    for end, escape in _LINE_ENDS:
        data = data.replace(end, escape)
    return data


def event(value: object, name: str | None = None) -> bytes:
    """A server-sent event, which some APIs give a name."""
    data = value.encode() if isinstance(value, str) else encoded(value)
    return (b"" if name is None else b"event: " + name.encode() + b"\n") + b"data: " + data + b"\n\n"


def _start(status: int, headers: Mapping[str, str]) -> dict[str, Any]:
    """The ASGI message that begins an answer."""
    encoded_headers = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": encoded_headers}


class Answer:
    """A whole answer. It is an ASGI application."""

    def __init__(
        self,
        content: object,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        content_type: str = JSON_TYPE,
    ) -> None:
        """Make an answer.

        Args:
            content: The body: bytes, a text, or else what becomes JSON.
            status: The status.
            headers: Further headers.
            content_type: The type of the body. Answers without a body have no type.
        """
        text = content.encode() if isinstance(content, str) else content
        self._body = text if isinstance(text, bytes) else encoded(text)
        self._status = status
        described = {"content-type": content_type, "content-length": str(len(self._body))}
        self._headers = {**({} if status in BODILESS else described), **(headers or {})}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        await send(_start(self._status, self._headers))
        body = b"" if scope["method"] == "HEAD" else self._body
        await send({"type": "http.response.body", "body": body})


class EventStream:
    """Server-sent events, each sent as it comes. It is an ASGI application."""

    def __init__(
        self,
        events: Callable[[Write | None], AsyncIterator[bytes]],
        settings: Settings,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Make a stream.

        Args:
            events: Returns the events. They are closed when the client goes away. It gets a function that sends events
                without the event loop, or None if this connection has none.
            settings: How long to wait for the client, and for an event before a comment is sent.
            headers: Further headers.
        """
        self._events = events
        self._settings = settings
        self._headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **(headers or {}),
        }
        self._last = time.monotonic()
        self._is_sending = False
        self._unread = 0  # bytes that the client had not read at the last look
        self._connection: Connection | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events.

        Raises:
            ClientGoneError: If the client goes away or does not read.
        """
        await send(_start(200, self._headers))
        if scope["http_version"] == "1.1":  # else the body is not chunked
            self._connection = scope.get("llamac.connection")
        try:
            await until_gone(receive, self._send_all(send), self._watch(send))
        finally:
            if self._connection is not None:
                self._connection.stop_direct()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, send: Send) -> None:
        is_direct = self._connection is not None and self._connection.start_direct()
        events = self._events(self._write if is_direct else None)
        try:
            async for data in events:
                await self._send(send, data)
        finally:
            close = getattr(events, "aclose", None)
            if close is not None:
                await close()

    def _write(self, data: bytes) -> bool:
        assert self._connection is not None
        self._last = time.monotonic()
        return self._connection.write_direct(data)

    async def _send(self, send: Send, data: bytes) -> None:
        if not data:  # an empty chunk would end the body
            return
        self._last = time.monotonic()
        if self._connection is not None and self._connection.write_part(data):
            return
        self._is_sending = True
        self._has_read()
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._is_sending = False

    def _has_read(self) -> bool:
        """Whether the client has read something since the last look. Unknown without a connection of llamac's own."""
        before, self._unread = self._unread, 0 if self._connection is None else self._connection.unread
        return self._unread < before

    async def _watch(self, send: Send) -> None:
        """Send comments while nothing happens, which proxies would take for a dead connection.

        Ends when the client has not read for too long.
        """
        while True:
            limit = self._settings.send_seconds if self._is_sending else self._settings.ping_seconds
            await asyncio.sleep(min(MAX_WAIT_S, max(MIN_WAIT_S, self._last + limit - time.monotonic())))
            if self._is_sending and self._has_read():
                self._last = time.monotonic()
            waited = time.monotonic() - self._last
            if self._is_sending and waited >= self._settings.send_seconds:
                return
            if not self._is_sending and waited >= self._settings.ping_seconds:
                await self._send(send, b": ping\n\n")
