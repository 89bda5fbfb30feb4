"""Connections that are slow, silent, broken or too many, against a server in a process of its own."""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import struct
from collections.abc import Iterator

import pytest

pytest.importorskip("uvicorn")

from llamac.server.connection import detect_vanished_peers
from processes import TIMEOUT
from served_process import (
    ENDLESS,
    Server,
    choices_of,
    connected,
    error_of,
    metrics,
    read_all,
    read_answer,
    request_bytes,
    said,
    server,
    status_of,
    wait_for,
)

HEALTH = request_bytes("/health")
LAST_HEALTH = request_bytes("/health", None, "Connection: close")
STREAM = {"prompt": "x", "stream": True, **ENDLESS}
MAX_CONNECTIONS = 20
MANY = 10_000
FILES = 1000  # besides connections, of this process and of a server


@pytest.fixture(scope="module")
def fast() -> Iterator[Server]:
    """A server that waits for no client longer than half a second."""
    with server("--port", 0, "--client-timeout", 0.5, "--max-connections", MAX_CONNECTIONS) as started:
        yield started


@pytest.fixture(scope="module")
def patient() -> Iterator[Server]:
    with server("--port", 0) as started:
        yield started


@pytest.fixture(autouse=True)
def healthy(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "fast" in request.fixturenames:
        port = request.getfixturevalue("fast").port
        assert status_of(said(port, LAST_HEALTH)) == 200
        wait_for(port, "llamac_requests_running", 0)


# ---- headers


@pytest.mark.parametrize("before", [b"", HEALTH])
@pytest.mark.parametrize("start", [b"G", b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"])
def test_a_header_must_arrive_in_time(fast: Server, before: bytes, start: bytes) -> None:
    with connected(fast.port) as connection:
        if before:
            connection.sendall(before)
            assert status_of(read_answer(connection)) == 200
        connection.sendall(start)
        while not select.select([connection], [], [], 0.05)[0]:  # a byte now and then is not enough
            connection.sendall(b"x")
        assert error_of(read_all(connection)) == (408, "request_timeout")


def test_a_client_that_says_nothing_is_left(fast: Server) -> None:
    assert said(fast.port) == b""


def test_a_body_that_nobody_waits_for_does_not_hold_the_connection(fast: Server) -> None:
    with connected(fast.port) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n")
        assert status_of(read_answer(connection)) == 200
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(90):
                connection.sendall(b"x")
                if select.select([connection], [], [], 0.05)[0]:
                    break
            else:
                raise AssertionError("the connection is still open")


@pytest.mark.parametrize(
    "header",
    [
        b"X-Bomb: " + b"a" * (1 << 20) + b"\r\n",
        b"".join(b"X-%d: a\r\n" % i for i in range(100_000)),
        b"a" * (1 << 20),
        b"X-Fold: a\r\n" + b" a\r\n" * 100_000,
    ],
    ids=["long", "many", "endless", "folded"],
)
def test_header_bombs_are_refused(fast: Server, header: bytes) -> None:
    answer = said(fast.port, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n" + header)
    assert error_of(answer) == (431, "headers_too_large")


@pytest.mark.parametrize(
    "data",
    [
        *(b"\r\n\r\n\r\nhello\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"GET\r\n\r\n"),
        *(b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"),
        b"GET /a b HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: a\x00b\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    ],
)
def test_what_is_not_http_is_refused(fast: Server, data: bytes) -> None:
    assert error_of(said(fast.port, data)) == (400, "invalid_http")


@pytest.mark.parametrize("data", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/9.9\r\nHost: 127.0.0.1\r\n\r\n"])
def test_other_versions_of_http_are_refused(fast: Server, data: bytes) -> None:
    assert error_of(said(fast.port, data)) == (505, "http_version_not_supported")


def test_invalid_utf8_outside_of_bodies_does_no_harm(fast: Server) -> None:
    header = (
        b"\r\nX-Request-ID: \xff\r\nAuthorization: Bearer \xc3\x28\r\nOrigin: \xff\xff\r\nConnection: close\r\n\r\n"
    )
    assert status_of(said(fast.port, b"GET /%ff%c3%28 HTTP/1.1\r\nHost: 127.0.0.1" + header)) in (403, 404)
    assert status_of(said(fast.port, b"GET /health HTTP/1.1\r\nHost: \xff\xfe" + header)) == 403
    assert status_of(said(fast.port, b"GET /v1/models/%ff%00%0a HTTP/1.1\r\nHost: 127.0.0.1" + header)) in (403, 404)


def test_a_request_for_another_protocol_is_answered_as_http(fast: Server) -> None:
    upgrade = ["Connection: Upgrade, close", "Upgrade: websocket", "Sec-WebSocket-Key: x", "Sec-WebSocket-Version: 13"]
    assert status_of(said(fast.port, request_bytes("/health", None, *upgrade))) == 200


def test_pipelined_requests_are_answered_in_order(fast: Server) -> None:
    bodies = [{"prompt": str(i), "max_tokens": 1} for i in range(5)]
    requests = b"".join(request_bytes("/v1/completions", body, f"X-Request-ID: r{i}") for i, body in enumerate(bodies))
    answer = said(fast.port, requests + LAST_HEALTH)
    places = [answer.index(b"x-request-id: r%d\r\n" % i) for i in range(5)]
    assert places == sorted(places)
    assert answer.count(b"HTTP/1.1 200 ") == 6


# ---- bodies

CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "chunks",
    [
        *(b"zz\r\n", b"-1\r\n{", b"5\r\n{}XXXXXXXX\r\n", b"5;" + b"x" * 100_000, b"f" * 30 + b"\r\n{"),
        *(b"2\r\n{}\r\n0\r\nX: " + b"a" * 100_000, b"2\r\n{}\n\n0\r\n\r\n", b"\x00\x00\r\n"),
    ],
)
def test_broken_chunks_are_refused(fast: Server, chunks: bytes) -> None:
    assert error_of(said(fast.port, CHUNKED + chunks))[0] in (400, 431)


@pytest.mark.parametrize("chunks", [b"5\r\n{", b"2\r\n{}\r\n", b"2", b""])
def test_chunks_must_arrive_in_time(fast: Server, chunks: bytes) -> None:
    assert error_of(said(fast.port, CHUNKED + chunks)) == (408, "request_timeout")


def test_broken_chunks_after_the_answer_only_end_the_connection(fast: Server) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connected(fast.port) as connection:
        connection.sendall(head)
        assert status_of(read_answer(connection)) == 200
        connection.sendall(b"zz\r\n")
        assert read_all(connection) == b""


@pytest.mark.parametrize(
    "data",
    [
        *(b"[" * (15 << 20), b'{"a":' * (3 << 20), b'{"prompt": "\xff\xfe"}', b'{"prompt": ' + b"9" * 10**7 + b"}"),
        *(b'{"prompt": [' + b"1," * (7 << 20) + b"1]}", b'{"prompt": "' + b"\\" * (15 << 20), b"\xff" * (15 << 20)),
        b'{"messages": ' + b"[" * 90 + b"]" * 90 + b"}",
        b'{"prompt": "a", "' + b"k" * (15 << 20) + b'": 1}',
        b"{" + b",".join(b'"k%d":1' % i for i in range(200_000)) + b"}",
    ],
    ids=["arrays", "objects", "not-utf8", "digits", "ids", "escapes", "bytes", "deep", "key", "keys"],
)
def test_huge_and_deep_json_is_refused(patient: Server, data: bytes) -> None:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n"
    answer = said(patient.port, head.encode() + b"Connection: close\r\n\r\n", data)
    assert status_of(answer) == 400
    assert len(answer) < 2000


@pytest.mark.parametrize("extra", [[], ["Expect: 100-continue"]])
def test_a_body_that_is_too_large_gets_its_answer(fast: Server, extra: list[str]) -> None:
    head = ["POST /v1/completions HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {40 << 20}", *extra]
    parts = [] if extra else [b" " * (1 << 20)] * 40
    answer = said(fast.port, "\r\n".join(head).encode() + b"\r\n\r\n", *parts)
    assert error_of(answer) == (413, "request_too_large")


# ---- answers


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read_is_left(fast: Server, stream: bool) -> None:
    if stream:
        sent = request_bytes("/v1/completions", {**STREAM, "n": 8, "logprobs": 20})
    else:
        sent = request_bytes("/tokenize", {"prompt": "a" * 10**6, "return_token_strs": True}, "Connection: close")
    before = metrics(fast.port)["llamac_connections"]
    with connected(fast.port, buffer=4096) as connection:
        connection.sendall(sent)
        assert select.select([connection], [], [], TIMEOUT)[0]
        wait_for(fast.port, "llamac_connections", before)
        wait_for(fast.port, "llamac_requests_running", 0)


@pytest.mark.parametrize("reads", [True, False])
def test_a_client_that_sends_no_more_counts_as_gone(fast: Server, reads: bool) -> None:
    with connected(fast.port, buffer=4096) as connection:
        connection.sendall(request_bytes("/v1/completions", STREAM))
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
        connection.shutdown(socket.SHUT_WR)
        if reads:
            read_all(connection)
        wait_for(fast.port, "llamac_requests_running", 0)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no such option")
@pytest.mark.parametrize(("seconds", "limit_ms"), [(12.0, 12_000), (float("inf"), 32_767_000)])
def test_the_system_closes_connections_whose_peer_has_vanished(seconds: float, limit_ms: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, connected(listening.getsockname()[1]):
        accepted, _ = listening.accept()
        with accepted:
            detect_vanished_peers(accepted, seconds)
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == limit_ms
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


def test_a_client_that_reads_slowly_gets_everything(fast: Server) -> None:
    body = {"prompt": "x", "stream": True, "max_tokens": 40, "seed": 1}
    with connected(fast.port, buffer=4096) as connection:
        connection.sendall(request_bytes("/v1/completions", body, "Connection: close"))
        answer = b""
        while part := connection.recv(64):
            answer += part
    assert b"data: [DONE]" in answer
    assert answer.endswith(b"0\r\n\r\n")


# ---- many


def test_connections_without_a_request_make_room(fast: Server) -> None:
    with contextlib.ExitStack() as held:
        idle = [held.enter_context(connected(fast.port)) for _ in range(10 * MAX_CONNECTIONS)]
        assert status_of(said(fast.port, LAST_HEALTH)) == 200
        assert metrics(fast.port)["llamac_connections"] <= MAX_CONNECTIONS + 100
        assert read_all(idle[0]) == b""


def test_requests_beyond_the_limit_are_refused_and_health_answers(fast: Server) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(MAX_CONNECTIONS):
            stream = held.enter_context(connected(fast.port))
            stream.sendall(request_bytes("/v1/completions", STREAM))
            assert stream.recv(100).startswith(b"HTTP/1.1 200 ")
            held.callback(stream.setsockopt, socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        refused = said(fast.port, request_bytes("/v1/completions", {"prompt": "x"}))
        assert error_of(refused) == (503, "too_many_connections")
        assert b"retry-after: 1\r\n" in refused
        assert status_of(said(fast.port, LAST_HEALTH)) == 200
        assert status_of(said(fast.port, request_bytes("/ready", None, "Connection: close"))) == 200


def test_ten_thousand_connections_are_held() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(MANY, hard - FILES)  # where the system allows no more
    now = struct.pack("ii", 1, 0)  # closed connections free their ports at once
    completion = request_bytes("/v1/completions", {"prompt": "x", "seed": 1}, "Connection: close")
    with server("--port", 0, "--max-connections", count) as started, contextlib.ExitStack() as held:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, count + FILES), hard))
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        alone = choices_of(said(started.port, completion))
        connections = []
        for _ in range(count - 1):
            connections.append(held.enter_context(connected(started.port)))
            connections[-1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
        assert metrics(started.port)["llamac_connections"] == count
        assert choices_of(said(started.port, completion)) == alone
        for connection in connections[:: max(1, count // 100)]:
            connection.sendall(HEALTH)
            assert status_of(read_answer(connection)) == 200
        for connection in connections:
            connection.close()
        wait_for(started.port, "llamac_connections", 1)
