"""Connections as uvicorn makes them, with limits on clients that are slow, silent or too many."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from llamac.server.failures import error_body
from llamac.server.metrics import Metrics

IDLE_SECONDS = 75.0  # that a connection is kept for the next request
LINGER_SECONDS = 2.0  # that a client may go on to send after an error; a reset could overtake the error
MAX_HEADER_BYTES = 1 << 16
SPARE = 64  # connections beyond the limit, whose requests are refused; those for the server's health are answered


@dataclass
class Connections:
    """The connections of a server.

    Attributes:
        most: Most requests at a time. Connections that wait for a request make room for new ones.
        header_seconds: Seconds in which the header of a request must arrive.
        send_seconds: Seconds in which a client must take what it is sent.
        metrics: Counts requests that never reach an endpoint.
        all: The open ones, those without a request among them, longest first.
    """

    most: int
    header_seconds: float
    send_seconds: float
    metrics: Metrics
    all: set[Connection] = field(default_factory=set)
    idle: dict[Connection, None] = field(default_factory=dict)

    @property
    def are_too_many(self) -> bool:
        """Whether more than the limit have a request."""
        return len(self.all) - len(self.idle) > self.most

    def add(self, connection: Connection) -> None:
        """Add one. If there are too many, the one that has waited longest for a request is closed."""
        self.all.add(connection)
        self.metrics.connections = len(self.all)
        if len(self.all) > self.most + SPARE and self.idle:
            oldest = next(iter(self.idle))
            self.remove(oldest)
            oldest.transport.abort()

    def remove(self, connection: Connection) -> None:
        """Forget one that has been closed."""
        self.all.discard(connection)
        self.idle.pop(connection, None)
        self.metrics.connections = len(self.all)


class Connection(H11Protocol):
    """A connection. The scope of each of its requests has it as `llamac.connection`."""

    def __init__(self, limits: Connections, **options: Any) -> None:
        """Make one, for uvicorn.

        Args:
            limits: The server's connections.
            options: Those of uvicorn's protocol.
        """
        super().__init__(**options)
        self.limits = limits
        self._timer: Any = None
        self._unsent = 0  # bytes, when the timer was set
        self._is_begun = False  # a part of the next request has arrived
        self._is_refused = False  # nothing more is read

    # ---- as uvicorn calls it

    def connection_made(self, transport: Any) -> None:
        """Begin."""
        super().connection_made(transport)
        detect_vanished_peers(transport.get_extra_info("socket"), self.limits.send_seconds)
        self.limits.add(self)
        self._wait_for_request(self.limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._stop_timer()
        self.limits.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what the client has sent."""
        if self._is_refused:
            return
        if not self._is_begun and self in self.limits.idle:
            self._is_begun = True
            self._start_timer(self.limits.header_seconds, self._on_silence)
        super().data_received(data)

    def eof_received(self) -> None:
        """Leave a client that sends no more while it is being answered: it has gone, as far as anybody can know."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.abandon()

    def handle_events(self) -> None:
        """Handle what has arrived. A request that has begun to be answered stops the clock."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self.scope["llamac.connection"] = self  # type: ignore[typeddict-unknown-key]  # its task runs later
            self.limits.idle.pop(self, None)
            self._stop_timer()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self.server_state.total_requests += 1
        self._wait_for_request(IDLE_SECONDS)
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.conn.our_state is h11.DONE and self.conn.their_state is h11.DONE:
            self.conn.start_next_cycle()
            if self.conn.trailing_data[0]:
                self._is_begun = True
                self._start_timer(self.limits.header_seconds, self._on_silence)
            self.handle_events()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP. uvicorn calls this while it handles the exception of h11."""
        if getattr(sys.exc_info()[1], "error_status_hint", 400) == 431:
            message = f"the header has more than {MAX_HEADER_BYTES} bytes, the limit of this server"
            self._refuse(431, "Request Header Fields Too Large", message, "headers_too_large")
        else:
            self._refuse(400, "Bad Request", f"this is not a request of HTTP/1.1: {sys.exc_info()[1]}", "invalid_http")

    # ---- as the application calls it

    def abandon(self) -> None:
        """Close the connection now, with whatever has not been sent."""
        if self.cycle is not None:
            self.cycle.disconnected = True
        self.transport.abort()

    def write_part(self, data: bytes) -> bool:
        """Send a part of a stream with chunked encoding, past uvicorn and h11, which take longer than all else.

        Returns:
            False if nothing was sent, because the client must read first.
        """
        if self.flow.write_paused:
            return False
        if not self.cycle.disconnected:
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    # ---- inside

    def _wait_for_request(self, seconds: float) -> None:
        if self not in self.limits.all:  # it has been closed
            return
        self.limits.idle[self] = None
        self._is_begun = False
        self._start_timer(seconds, self._on_silence)

    def _start_timer(self, seconds: float, call: Callable[[], None]) -> None:
        self._stop_timer()
        self._unsent = self.transport.get_write_buffer_size()
        if self._unsent:
            seconds, call = self.limits.send_seconds, self._on_unread
        self._timer = self.loop.call_later(seconds, call)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_unread(self) -> None:
        """Give a client that reads slowly more time, and none to one that does not read."""
        if self.transport.get_write_buffer_size() >= self._unsent:
            self.abandon()
        else:
            self._start_timer(IDLE_SECONDS, self._on_silence)

    def _on_silence(self) -> None:
        if self.transport.is_closing():
            self.abandon()
        elif self._is_begun and self.conn.their_state is h11.IDLE:
            message = f"the header has not arrived within {self.limits.header_seconds:g} seconds"
            self._refuse(408, "Request Timeout", message, "request_timeout")
        else:
            self.transport.close()

    def _refuse(self, status: int, reason: str, message: str, code: str) -> None:
        """Send an error and close the connection; only close it if an answer has begun already."""
        self._is_refused = True
        self.limits.metrics.requests.add(1, "other", str(status))
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error_body(message, "invalid_request_error", code)).encode()
            head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
            if self.transport.can_write_eof():
                self.transport.write_eof()
                self._start_timer(LINGER_SECONDS, self.abandon)
                return
        self.transport.close()
        self._start_timer(self.limits.send_seconds, self.abandon)


def detect_vanished_peers(opened: socket.socket | None, seconds: float) -> None:
    """Make the system close a connection whose peer has vanished without a word, where it can do so."""
    if opened is None or opened.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with contextlib.suppress(OSError, AttributeError):
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(seconds)))
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(seconds / 3)))
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(seconds * 1000))
