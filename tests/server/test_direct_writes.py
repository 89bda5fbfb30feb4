"""Streams whose parts the engine's thread writes to the socket, and what happens when the socket takes no more."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

from builders import byte_ids, script_checkpoint, write_model
from http_server import Running, running
from llamac.engine.batching.request import Request
from llamac.server.connection import Connection
from processes import TIMEOUT
from served_process import connected, read_all, request_bytes, said
from waiting import wait_until

TEXT = "abcdefghijklmnopqrstuvwxyz"
SMALL = 4096  # bytes that each side of a connection can hold
GREEDY = {"max_tokens": 12, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "hello"}], **GREEDY}


def chunks_of(answer: bytes) -> list[bytes]:
    """The chunks of a whole body, which ends with an empty one."""
    body = answer.partition(b"\r\n\r\n")[2]
    found = []
    while body:
        size, _, body = body.partition(b"\r\n")
        found.append(body[: int(size, 16)])
        assert body[int(size, 16) :][:2] == b"\r\n"
        body = body[int(size, 16) + 2 :]
    assert found.pop() == b""
    return found


def text_of(chunks: list[bytes]) -> str:
    """The text of the events of a stream."""
    lines = [line[6:] for line in b"".join(chunks).split(b"\n") if line.startswith(b"data: {")]
    return "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])


def joined(events: bytes, pattern: bytes) -> bytes:
    """The texts that a pattern finds in events. Pieces can be joined in any way if they come together."""
    return b"".join(re.findall(pattern, events))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Connection]:
    """The connections that have been written to directly."""
    found: list[Connection] = []
    start = Connection.start_direct

    def recorded(self: Connection) -> bool:
        found.append(self)
        return start(self)

    monkeypatch.setattr(Connection, "start_direct", recorded)
    return found


@pytest.fixture(scope="module")
def helper() -> Iterator[Running]:
    with running("helper") as served:
        yield served


def test_pieces_arrive_while_the_event_loop_is_busy(
    tmp_path: Path, opened: list[Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "script.bin", script_checkpoint(byte_ids(TEXT), context=64))
    allowed, busy, release = threading.Semaphore(0), threading.Event(), threading.Event()
    with running(path, prefix_cache=False) as served, connected(served.port) as connection:
        batch, step = served.engine._batch, served.engine._batch.step

        def allowed_step() -> None:
            assert allowed.acquire(timeout=TIMEOUT)
            step()

        def keep_busy() -> None:
            busy.set()
            assert release.wait(TIMEOUT)

        monkeypatch.setattr(batch, "step", allowed_step)
        body = {"prompt": "x", "temperature": 0, "max_tokens": 8, "stream": True}
        connection.sendall(request_bytes("/v1/completions", body, "Connection: close"))
        answer = b""
        allowed.release()
        while b'"text":"c"' not in answer:  # a prompt of two tokens is continued from the third letter on
            answer += connection.recv(1 << 16)
        opened[0].loop.call_soon_threadsafe(keep_busy)
        assert busy.wait(TIMEOUT)
        for letter in "defg":
            allowed.release()
            while f'"text":"{letter}"'.encode() not in answer:
                answer += connection.recv(1 << 16)
        release.set()
        monkeypatch.setattr(batch, "step", step)
        allowed.release()
        assert text_of(chunks_of(answer + read_all(connection))) == "cdefghij"


def test_a_client_that_does_not_read_gets_everything_later(
    opened: list[Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Connection.connection_made

    def made_small(self: Connection, transport: Any) -> None:
        made(self, transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)

    monkeypatch.setattr(Connection, "connection_made", made_small)
    body = {"prompt": "Once", "max_tokens": 400, "seed": 1, "ignore_eos": True}
    with running("stories") as served, connected(served.port, buffer=SMALL) as connection:
        expected = served.post("/v1/completions", body).json()["choices"][0]["text"]
        connection.sendall(request_bytes("/v1/completions", {**body, "stream": True}, "Connection: close"))
        wait_until(lambda: opened and opened[0]._direct is None)
        chunks = chunks_of(read_all(connection))
    assert text_of(chunks) == expected
    assert chunks[-1] == b"data: [DONE]\n\n"


@pytest.mark.parametrize("short", [1, 2, 4])
@pytest.mark.parametrize(
    ("path", "body", "piece"),
    [
        ("/v1/completions", {"prompt": "Once", "n": 2, **GREEDY, "seed": 1}, rb'"index":%b,"text":"([^"]*)"'),
        ("/v1/chat/completions", {**CHAT, "n": 2}, rb'"index":%b,"delta":{"content":"([^"]*)"'),
        (
            "/v1/responses",
            {"input": "hello", "temperature": 0},
            rb'"output_index":%b,"content_index":0,"delta":"([^"]*)"',
        ),
        ("/v1/messages", CHAT, rb'"index":%b,"delta":{"type":"text_delta","text":"([^"]*)"'),
        (
            "/execute",
            {"prompt": "Once", "sampling": {"max_tokens": 12}},
            rb'event: piece\n(?#%b)data: {"text":"([^"]*)"',
        ),
    ],
)
def test_a_short_write_loses_and_repeats_nothing(
    helper: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], piece: bytes, short: int
) -> None:
    written, ready, waiting = 0, threading.Event(), body.get("n", 1)
    step, push_to = helper.engine._batch.step, Request._push_to

    def step_when_ready() -> None:  # else the first pieces come together
        assert ready.wait(TIMEOUT)
        step()

    def push_to_and_count(self: Request, push: Callable[[str], bool]) -> None:
        nonlocal waiting
        push_to(self, push)
        waiting -= 1
        if not waiting:
            ready.set()

    class ShortWrites:
        """The module `os`, whose `write` once writes only half."""

        name = os.name

        @staticmethod
        def write(descriptor: int, data: bytes) -> int:
            nonlocal written
            written += 1
            return os.write(descriptor, data[: len(data) // 2] if written == short else data)

    request = request_bytes(path, {**body, "model": "helper", "stream": True}, "Connection: close")
    with monkeypatch.context() as patches:
        patches.setattr("llamac.server.connection.os", ShortWrites)
        patches.setattr(Request, "_push_to", push_to_and_count)
        patches.setattr(helper.engine._batch, "step", step_when_ready)
        found = b"".join(chunks_of(said(helper.port, request)))
    assert written == short
    with monkeypatch.context() as patches:
        patches.setattr(Connection, "start_direct", lambda self: False)
        expected = b"".join(chunks_of(said(helper.port, request)))
    assert written == short
    for index in (b"0", b"1"):
        assert joined(found, piece % index) == joined(expected, piece % index)
    assert joined(found, piece % b"0")
