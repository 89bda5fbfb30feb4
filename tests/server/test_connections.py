"""Connections whose socket and clock are stand-ins: every timeout, and clients that send or read too little."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("uvicorn")

import uvicorn
from uvicorn.server import ServerState

from llamac.server.connection import (
    IDLE_SECONDS,
    LINGER_SECONDS,
    MAX_AHEAD_BYTES,
    MAX_HEADER_BYTES,
    SPARE,
    Connection,
    Connections,
    detect_vanished_peers,
)
from llamac.server.metrics import Metrics

HEADER_SECONDS, SEND_SECONDS = 3.0, 5.0
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
BODY = b"answer"


class Socket(asyncio.Transport):
    """A transport that stores what is written. `unsent` bytes of that have not been read by the client."""

    def __init__(self, sslcontext: object = None, has_eof: bool = True) -> None:
        super().__init__({"sslcontext": sslcontext})
        self.written, self.unsent, self.events = b"", 0, list[str]()
        self.has_eof, self.is_read = has_eof, True

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def can_write_eof(self) -> bool:
        return self.has_eof

    def is_closing(self) -> bool:
        return bool({"close", "abort"} & set(self.events))

    def write_eof(self) -> None:
        self.events.append("eof")

    def close(self) -> None:
        self.events.append("close")

    def abort(self) -> None:
        self.events.append("abort")

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True


class Timer:
    """What the clock calls next."""

    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        self.seconds, self.call, self.is_cancelled = seconds, call, False

    def cancel(self) -> None:
        self.is_cancelled = True


class Loop:
    """An event loop that runs tasks and calls when the test says so."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.timers: list[Timer] = []
        self.has_ended = False

    def create_task(self, task: Any, **options: Any) -> Any:
        return self.loop.create_task(task, **options)

    def call_later(self, seconds: float, call: Callable[[], None]) -> Timer:
        self.timers.append(Timer(seconds, call))
        return self.timers[-1]

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        if self.has_ended:
            raise RuntimeError("Event loop is closed")
        call()

    def run(self) -> None:
        """Run what is ready."""

        async def later() -> None:
            for _ in range(5):
                await asyncio.sleep(0)

        self.loop.run_until_complete(later())

    @property
    def seconds(self) -> float:
        """Until the only timer."""
        [timer] = [timer for timer in self.timers if not timer.is_cancelled]
        return timer.seconds

    def pass_time(self) -> None:
        """Let the only timer end."""
        [timer] = [timer for timer in self.timers if not timer.is_cancelled]
        timer.cancel()
        timer.call()


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """An application that reads the whole request, except of /early, and answers, except /slow."""
    if scope["path"] == "/early":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
    message: dict[str, Any] = {"more_body": True}
    while message.get("more_body"):
        message = await receive()
    if scope["path"] == "/slow":
        message = await receive()
    if message["type"] == "http.disconnect":
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"6")]})
    await send({"type": "http.response.body", "body": BODY})


class Served:
    """A server's connections."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.config = uvicorn.Config(
            answer, h11_max_incomplete_event_size=MAX_HEADER_BYTES, ws="none", lifespan="off", log_config=None
        )
        self.limits = Connections(2, HEADER_SECONDS, SEND_SECONDS, Metrics())

    def connect(self, **options: Any) -> tuple[Connection, Socket]:
        state, opened = ServerState(), Socket(**options)
        connection = Connection(self.limits, config=self.config, server_state=state, app_state={}, _loop=self.loop)
        connection.connection_made(opened)
        return connection, opened


@pytest.fixture
def served() -> Iterator[Served]:
    found = Served()
    yield found
    for task in asyncio.all_tasks(found.loop.loop):
        task.cancel()
    found.loop.run()
    found.loop.loop.close()


def test_a_header_that_stops_in_the_middle_gets_408(served: Served) -> None:
    connection, opened = served.connect()
    connection.data_received(b"GET / HT")
    assert served.loop.seconds == HEADER_SECONDS
    served.loop.pass_time()
    assert opened.written.startswith(b"HTTP/1.1 408 ")
    assert b"the header has not arrived within 3 seconds" in opened.written
    assert opened.events == ["eof"]
    connection.data_received(b"TP/1.1\r\n\r\n")  # is drained, so that no reset overtakes the answer
    assert served.loop.seconds == LINGER_SECONDS
    served.loop.pass_time()
    assert opened.events == ["eof", "abort"]


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_silent_client_is_closed_without_an_answer(served: Served, is_answered: bool) -> None:
    connection, opened = served.connect()
    if is_answered:
        connection.data_received(GET)
        served.loop.run()
    written = opened.written
    assert served.loop.seconds == (IDLE_SECONDS if is_answered else HEADER_SECONDS)
    served.loop.pass_time()
    assert (opened.written, opened.events) == (written, ["close"])


def test_a_header_that_is_too_long_gets_431(served: Served) -> None:
    connection, opened = served.connect()
    connection.data_received(b"GET / HTTP/1.1\r\nA: " + b"a" * (MAX_HEADER_BYTES + 1))
    assert opened.written.startswith(b"HTTP/1.1 431 ")
    assert b"headers_too_large" in opened.written
    assert 'status="431"' in "".join(served.limits.metrics.requests.lines())


@pytest.mark.parametrize("has_eof", [True, False])
def test_what_is_not_http_gets_400(served: Served, has_eof: bool) -> None:
    """TLS cannot close only one direction."""
    connection, opened = served.connect(has_eof=has_eof)
    connection.data_received(b"\x16\x03\x01\r\n\r\n")
    assert opened.written.startswith(b"HTTP/1.1 400 ")
    assert b"this is not a request of HTTP/1.1" in opened.written
    assert opened.events == ["eof" if has_eof else "close"]
    assert served.loop.seconds == (LINGER_SECONDS if has_eof else SEND_SECONDS)


def test_a_broken_body_after_the_answer_has_begun_only_closes(served: Served) -> None:
    connection, opened = served.connect()
    connection.data_received(POST.replace(b"/ ", b"/early "))
    served.loop.run()
    begun = opened.written
    assert b"begun" in begun
    connection.data_received(b"this is no length\r\n")
    assert (opened.written, opened.events) == (begun, ["close"])
    served.loop.pass_time()
    assert opened.events == ["close", "abort"]


def test_a_client_that_closes_its_side_during_a_request_has_left(served: Served) -> None:
    connection, opened = served.connect()
    connection.eof_received()  # between requests, uvicorn closes
    assert opened.events == []
    connection.data_received(POST)
    served.loop.run()
    connection.eof_received()
    assert opened.events == ["abort"]
    assert connection.cycle.disconnected
    connection.connection_lost(None)
    served.loop.run()
    assert (opened.written, served.limits.all) == (b"", set())


def test_pipelined_requests_are_answered_one_after_the_other(served: Served) -> None:
    connection, opened = served.connect()
    connection.data_received(GET + GET + GET[:9])
    served.loop.run()
    served.loop.run()
    assert opened.written.count(BODY) == 2
    assert served.loop.seconds == HEADER_SECONDS  # for the rest of the third
    connection.data_received(GET[9:])
    served.loop.run()
    assert opened.written.count(BODY) == 3


@pytest.mark.parametrize("ahead", [b"G", b"\r\n", GET, b"x" * MAX_AHEAD_BYTES])
def test_input_during_an_answer_does_not_hide_a_disconnect(served: Served, ahead: bytes) -> None:
    connection, opened = served.connect()
    connection.data_received(GET.replace(b"/ ", b"/slow "))
    served.loop.run()
    connection.data_received(ahead)
    assert opened.is_read
    connection.eof_received()
    assert opened.events == ["abort"]
    assert connection.cycle.disconnected


def test_a_long_request_during_an_answer_is_read_after_it(served: Served) -> None:
    connection, opened = served.connect()
    connection.data_received(GET.replace(b"/ ", b"/slow "))
    served.loop.run()
    body = b"x" * (2 * MAX_AHEAD_BYTES)
    connection.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body))
    connection.data_received(body[: MAX_AHEAD_BYTES + 1])
    assert not opened.is_read  # more is not stored
    connection.cycle.message_event.set()  # the slow answer ends
    served.loop.run()
    assert opened.is_read
    connection.data_received(body[MAX_AHEAD_BYTES + 1 :])
    served.loop.run()
    assert (opened.written.count(BODY), opened.events) == (2, [])


def test_a_request_with_two_lengths_is_the_last_of_its_connection(served: Served) -> None:
    connection, opened = served.connect()
    connection.data_received(POST.replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n") + b"0\r\n\r\n" + GET)
    served.loop.run()
    served.loop.run()
    assert b"\r\nconnection: close\r\n" in opened.written.lower()
    assert (opened.written.count(BODY), opened.events) == (1, ["close"])


def test_a_slow_reader_keeps_its_connection_and_one_that_does_not_read_loses_it(served: Served) -> None:
    connection, opened = served.connect()
    connection.data_received(GET)
    opened.unsent = 6
    served.loop.run()
    assert served.loop.seconds == SEND_SECONDS
    opened.unsent = 2
    served.loop.pass_time()
    assert opened.events == []
    served.loop.pass_time()  # nothing more has been read
    assert opened.events == ["abort"]


def test_a_connection_that_is_closing_is_ended_when_its_time_is_over(served: Served) -> None:
    connection, opened = served.connect()
    connection.data_received(GET)
    opened.close()
    served.loop.run()
    served.loop.pass_time()
    assert opened.events == ["close", "abort"]


def test_the_connection_that_is_idle_longest_makes_room(served: Served) -> None:
    connections = [served.connect() for _ in range(served.limits.most + SPARE + 1)]
    oldest, opened = connections[0]
    assert opened.events == ["abort"]
    assert oldest not in served.limits.all
    assert not any(other.events for _, other in connections[1:])
    oldest.connection_lost(None)
    oldest._wait_for_request(1.0)  # an answer that is complete too late
    assert oldest not in served.limits.idle
    assert not served.limits.are_too_many


def test_threads_write_only_to_plain_sockets_that_have_taken_everything(served: Served) -> None:
    for options, unsent, closes in (({"sslcontext": "TLS"}, 0, False), ({}, 1, False), ({}, 0, True)):
        connection, opened = served.connect(**options)
        opened.unsent = unsent
        if closes:
            opened.close()
        assert not connection.start_direct()


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_part_that_no_thread_may_write_is_written_by_the_event_loop(served: Served, has_ended: bool) -> None:
    connection, opened = served.connect()
    connection.data_received(POST)
    served.loop.has_ended = has_ended
    assert not connection.write_direct(b"part")
    served.loop.has_ended = False
    assert opened.written == (b"" if has_ended else b"4\r\npart\r\n")
    assert connection.write_part(b"more")
    assert opened.written == b"4\r\npart\r\n4\r\nmore\r\n"
    connection.pause_writing()
    assert not connection.write_part(b"too much")
    connection.abandon()
    connection.resume_writing()
    assert connection.write_part(b"for nobody")
    assert opened.written == b"4\r\npart\r\n4\r\nmore\r\n"


def test_no_part_gets_between_the_halves_of_another(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    connection, opened = served.connect()
    connection.data_received(POST)

    def write_half(descriptor: int, data: bytes) -> int:
        opened.write(data[: len(data) // 2])
        return len(data) // 2

    class Lock:
        """A lock. When it is released for the first time, another thread gets it and writes at once."""

        def __init__(self) -> None:
            self.lock, self.is_first = threading.Lock(), True

        def __enter__(self) -> None:
            self.lock.acquire()

        def __exit__(self, *error: object) -> None:
            self.lock.release()
            if self.is_first:
                self.is_first = False
                connection.write_direct(b"direct")

    monkeypatch.setattr("llamac.server.connection.os", SimpleNamespace(write=write_half))
    connection._direct, connection._writing = 1, Lock()  # type: ignore[assignment]
    served.loop.has_ended = True  # the loop's call comes later
    assert connection.write_part(b"loop")
    connection._write_rest()
    assert opened.written == b"4\r\nloop\r\n6\r\ndirect\r\n"


def test_only_the_system_s_own_connections_are_watched() -> None:
    detect_vanished_peers(None, 1.0)
    one, other = socket.socketpair()
    with one, other:
        detect_vanished_peers(one, 1.0)
        assert not one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
