"""uvicorn's HTTP connections, with limits for slow or silent clients and on the number of connections."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol

from llamac.server.failures import error_body
from llamac.server.metrics import Metrics
from llamac.sizes import counted

IDLE_SECONDS = 75.0  # how long an idle connection is kept open for the next request
LINGER_SECONDS = 2.0  # how long input is drained after an error, because a reset could overtake the error
VANISHED_SECONDS = 32767  # Linux accepts no longer time without a sign of a peer
MAX_HEADER_BYTES = 1 << 16
MAX_AHEAD_BYTES = 1 << 20  # what is read during an answer; the rest must wait for its end
SPARE = 64  # connections beyond the limit: their requests get the status 503, except those for the server's health


@dataclass
class Connections:
    """The connections of a server.

    Attributes:
        most: Maximum number of concurrent requests. Idle connections are closed to make room for new ones.
        header_seconds: Seconds in which the header of a request must arrive.
        send_seconds: Seconds in which a client must read what was sent.
        metrics: Counts requests that never reach an endpoint.
        all: All open connections.
        idle: Those without a request, as keys: longest idle first.
    """

    most: int
    header_seconds: float
    send_seconds: float
    metrics: Metrics
    all: set[Connection] = field(default_factory=set)
    idle: dict[Connection, None] = field(default_factory=dict)

    @property
    def are_too_many(self) -> bool:
        """Whether more connections than the limit have an active request."""
        return len(self.all) - len(self.idle) > self.most

    def add(self, connection: Connection) -> None:
        """Add a connection. If there are too many, close the one that has been idle longest."""
        self.all.add(connection)
        self.metrics.connections = len(self.all)
        if len(self.all) > self.most + SPARE and self.idle:
            oldest = next(iter(self.idle))
            self.remove(oldest)
            oldest.transport.abort()

    def remove(self, connection: Connection) -> None:
        """Remove a closed connection."""
        self.all.discard(connection)
        self.idle.pop(connection, None)
        self.metrics.connections = len(self.all)


class Connection(H11Protocol):
    """A connection. It is available to requests as `llamac.connection` of their scope."""

    def __init__(self, limits: Connections, **options: Any) -> None:
        """Create a connection; uvicorn calls this.

        Args:
            limits: The server's connections.
            options: The arguments of uvicorn's protocol.
        """
        super().__init__(**options)
        self.limits = limits
        self._timer: Any = None
        self._unsent = 0  # unsent bytes when the timer was set
        self._is_begun = False  # whether a part of the next request has arrived
        self._is_refused = False  # whether further input is discarded
        self._writing = threading.Lock()  # guards the next two attributes, and the order of a stream's parts
        self._direct: int | None = None  # the socket's descriptor while any thread may write to it
        self._rest = b""  # what it has not taken from other threads; the event loop writes this first

    # ---- called by uvicorn

    def connection_made(self, transport: Any) -> None:
        """Start the connection."""
        super().connection_made(transport)
        detect_vanished_peers(transport.get_extra_info("socket"), self.limits.send_seconds)
        self.limits.add(self)
        self._wait_for_request(self.limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection."""
        self._stop_timer()
        self.stop_direct()  # before the descriptor is closed, because another connection can get its number
        self.limits.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Handle input from the client."""
        if self._is_refused:
            return
        if not self._is_begun and self in self.limits.idle:
            self._is_begun = True
            self._start_timer(self.limits.header_seconds, self._on_silence)
        super().data_received(data)

    def eof_received(self) -> None:
        """Close the connection if the client stops sending during a request, which counts as a disconnect."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.abandon()

    def handle_events(self) -> None:
        """Handle the input that has arrived. The start of a request stops the timer."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self.scope["llamac.connection"] = self  # type: ignore[typeddict-unknown-key]  # its task runs later
            if {b"content-length", b"transfer-encoding"} <= dict(self.headers).keys():
                self.headers.append(CLOSE_HEADER)  # a proxy may take the rest for another request
            self.limits.idle.pop(self, None)
            self._stop_timer()
        self._keep_reading()

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
        """Reject input that is not HTTP. uvicorn calls this while it handles h11's exception."""
        if getattr(sys.exc_info()[1], "error_status_hint", 400) == 431:
            message = f"the header has more than {MAX_HEADER_BYTES} bytes, the limit of this server"
            self._refuse(431, "Request Header Fields Too Large", message, "headers_too_large")
        else:
            self._refuse(400, "Bad Request", f"this is not a request of HTTP/1.1: {sys.exc_info()[1]}", "invalid_http")

    # ---- called by the application

    @property
    def unread(self) -> int:
        """The number of bytes that the client's system has not taken yet."""
        count = self.transport.get_write_buffer_size()
        with contextlib.suppress(ImportError, AttributeError, OSError, ValueError):  # another system, or it is closed
            import fcntl
            import termios

            queued = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
            count += int.from_bytes(queued, sys.byteorder)
        return count

    def abandon(self) -> None:
        """Close the connection now, and discard unsent data."""
        if self.cycle is not None:
            self.cycle.disconnected = True
        self.transport.abort()

    def write_part(self, data: bytes) -> bool:
        """Send a part of a stream with chunked encoding. This bypasses uvicorn and h11, which dominate the cost.

        Returns:
            False if nothing was sent, because the client must read first.
        """
        with self._writing:
            self._flush()
            if self.flow.write_paused:
                return False
            self._write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def start_direct(self) -> bool:
        """Let any thread send parts of a stream with `write_direct`.

        Returns:
            Whether that is possible: the socket takes plain bytes, and has taken all earlier ones.
        """
        is_plain = os.name == "posix" and self.transport.get_extra_info("sslcontext") is None
        if is_plain and not self.transport.is_closing() and not self.transport.get_write_buffer_size():
            self._direct = self.transport.get_extra_info("socket").fileno()
        return self._direct is not None

    def stop_direct(self) -> None:
        """Leave all writing to the event loop."""
        with self._writing:
            self._direct = None
        self._write_rest()

    def write_direct(self, data: bytes) -> bool:
        """Send a part of a stream from any thread. This saves waking the event loop, which takes longer than the rest.

        Returns:
            Whether the socket took all of it. Otherwise the event loop sends the rest, and must send all later parts.
        """
        chunk = b"%x\r\n%b\r\n" % (len(data), data)
        with self._writing:
            sent = 0
            if self._direct is not None:
                with contextlib.suppress(OSError):  # the client must read first, or the event loop finds the error, too
                    sent = os.write(self._direct, chunk)
                if sent == len(chunk):
                    return True
                self._direct = None
            self._rest += chunk[sent:]
        with contextlib.suppress(RuntimeError):  # the event loop, and with it the server, has ended
            self.loop.call_soon_threadsafe(self._write_rest)
        return False

    # ---- internals

    def _keep_reading(self) -> None:
        """Read on when input for the next request has arrived during an answer, so that a disconnect is noticed.

        Beyond the limit, a disconnect is noticed after the answer.
        """
        ahead = self.conn.trailing_data[0]
        if self.cycle is None or self.cycle.response_complete or not ahead or not self.flow.read_paused:
            return
        if len(ahead) <= MAX_AHEAD_BYTES:
            self.flow.resume_reading()

    def _write_rest(self) -> None:
        """Write what the socket has not taken from other threads."""
        with self._writing:
            self._flush()

    def _flush(self) -> None:
        rest, self._rest = self._rest, b""
        if rest:
            self._write(rest)

    def _write(self, data: bytes) -> None:
        if not self.cycle.disconnected:
            self.transport.write(data)
        if self.transport.get_write_buffer_size():
            self._direct = None

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
        """Extend the time of a client that reads slowly, and disconnect a client that does not read."""
        if self.transport.get_write_buffer_size() >= self._unsent:
            self.abandon()
        else:
            self._start_timer(IDLE_SECONDS, self._on_silence)

    def _on_silence(self) -> None:
        if self.transport.is_closing():
            self.abandon()
        elif self._is_begun and self.conn.their_state is h11.IDLE:
            message = f"the header has not arrived within {counted(self.limits.header_seconds, 'second')}"
            self._refuse(408, "Request Timeout", message, "request_timeout")
        else:
            self.transport.close()

    def _refuse(self, status: int, reason: str, message: str, code: str) -> None:
        """Send an error and close the connection. If an answer has already begun, only close the connection."""
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
    """Make the system detect peers that have vanished silently, where it supports this."""
    if opened is None or opened.family not in (socket.AF_INET, socket.AF_INET6):
        return
    seconds = min(seconds, VANISHED_SECONDS)
    with contextlib.suppress(OSError, AttributeError):
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(seconds)))
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(seconds / 3)))
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(seconds * 1000))
