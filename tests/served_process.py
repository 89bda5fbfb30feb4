"""`llamac serve` in a process of its own, and clients that speak HTTP as they like."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from processes import TIMEOUT, heed_signals

# A request that does not end by itself.
ENDLESS = {"max_tokens": 10**6, "ignore_eos": True, "context_overflow": "shift"}


class Server:
    """A server in a process of its own."""

    def __init__(self, *arguments: object, **environment: str) -> None:
        """Start it, and wait until it listens."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "llamac", "serve", *map(str, arguments)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            preexec_fn=heed_signals,
        )
        assert self.process.stderr is not None
        self.first_line = self.process.stderr.readline()
        found = re.fullmatch(r"llamac: serving .+ on (\S+)\n", self.first_line)
        assert found is not None, self.first_line + self.process.stderr.read()
        self.address = found[1]

    @property
    def port(self) -> int:
        """Its port."""
        return int(self.address.rpartition(":")[2])

    def wait_until_closed(self) -> None:
        """Wait until the server accepts no more connections."""
        limit = time.monotonic() + TIMEOUT
        with contextlib.suppress(ConnectionRefusedError, ConnectionResetError):
            while True:
                assert time.monotonic() < limit, "the server still accepts connections"
                socket.create_connection(("127.0.0.1", self.port), TIMEOUT).close()
                time.sleep(0.01)

    def end(self) -> tuple[int, str]:
        """Wait for the end; return the exit code and what was logged."""
        _, errors = self.process.communicate(timeout=TIMEOUT)
        return self.process.returncode, errors


@contextlib.contextmanager
def server(*arguments: object, **environment: str) -> Iterator[Server]:
    """A server that is killed at the end."""
    started = Server(*arguments, **environment)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.communicate()


# ---- clients


def connected(port: int, *, buffer: int | None = None) -> socket.socket:
    """Connect to a server. buffer: bytes that the client's side of the connection can hold."""
    connection = socket.socket()
    connection.settimeout(TIMEOUT)
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    try:
        connection.connect(("127.0.0.1", port))
    except OSError:
        connection.close()
        raise
    return connection


def request_bytes(path: str, body: Any = None, *lines: str) -> bytes:
    """A request. lines: further header lines."""
    data = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    head = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(data)}", *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + data


def read_all(connection: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def read_answer(connection: socket.socket) -> bytes:
    """A whole answer, of a connection that remains open."""
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += connection.recv(1)
    found = re.search(rb"\r\ncontent-length: (\d+)\r\n", answer)
    assert found is not None, answer
    return answer + connection.recv(int(found[1]), socket.MSG_WAITALL)


def said(port: int, *parts: bytes) -> bytes:
    """Send something, and read until the server closes the connection."""
    with connected(port) as connection:
        for part in parts:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(part)
        return read_all(connection)


def status_of(answer: bytes) -> int:
    """The status of an answer."""
    found = re.match(rb"HTTP/1\.1 (\d{3}) ", answer)
    assert found is not None, answer[:200]
    return int(found[1])


def error_of(answer: bytes) -> tuple[int, str]:
    """The status and the code of an error."""
    body = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert set(body) == {"error"}, body
    return status_of(answer), body["error"]["code"]


def choices_of(answer: bytes) -> Any:
    """The choices of a whole answer."""
    assert status_of(answer) == 200, answer
    return json.loads(answer.partition(b"\r\n\r\n")[2])["choices"]


def metrics(port: int) -> dict[str, float]:
    """The numbers of `/metrics`."""
    text = said(port, request_bytes("/metrics", None, "Connection: close")).decode()
    lines = [line for line in text.partition("\r\n\r\n")[2].splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def wait_for(port: int, name: str, most: float) -> None:
    """Wait until a number is not larger than that."""
    limit = time.monotonic() + TIMEOUT
    while (now := metrics(port)[name]) > most:
        assert time.monotonic() < limit, f"{name} is {now}"
        time.sleep(0.01)
