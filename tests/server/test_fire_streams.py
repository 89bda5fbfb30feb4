"""Streams while clients come in floods, leave at every token, clocks jump, logs fail and the server is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

from builders import byte_ids, script_checkpoint, write_model
from http_server import PATIENCE, running
from processes import TIMEOUT, heed_signals
from served_process import (
    ENDLESS,
    choices_of,
    connected,
    read_all,
    request_bytes,
    said,
    server,
    status_of,
    wait_for,
)
from waiting import wait_until

TEXT = "abcdefghijklmnopqrstuvwxyz"
BODY = {"prompt": "Once", "max_tokens": 100, "seed": 1, "ignore_eos": True}
LAST_HEALTH = request_bytes("/health", None, "Connection: close")
JUMPING = """
import time
now, calls = time.time, [0]

def jumping():
    calls[0] += 1
    return now() + 3e8 * (calls[0] % 3 - 1)  # ten years to and fro

time.time = jumping
time.time_ns = lambda: int(jumping() * 1e9)
"""


def streamed(body: dict[str, Any]) -> bytes:
    """A request for a stream."""
    return request_bytes("/v1/completions", {**body, "stream": True}, "Connection: close")


def text_of(answer: bytes) -> str:
    """The text of a stream, as far as it came."""
    lines = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: {") and line.endswith(b"}")]
    return "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])


# ---- floods


def test_a_flood_beyond_the_limits_leaves_streams_and_health_alone() -> None:
    limits = ("--max-sequences", 4, "--max-queue", 4, "--max-connections", 30)
    with ThreadPoolExecutor(60) as pool, server("--port", 0, *limits) as started, contextlib.ExitStack() as held:
        port = started.port
        alone = text_of(said(port, streamed(BODY)))
        endless = held.enter_context(connected(port))
        endless.sendall(streamed({**BODY, **ENDLESS}))
        begun = endless.recv(1000)  # it runs
        requests = [request_bytes("/v1/completions", BODY, "Connection: close")] * 300
        flood = [pool.submit(said, port, request) for request in requests]
        while not all(future.done() for future in flood):
            assert status_of(said(port, LAST_HEALTH)) == 200
        while len(text_of(begun)) < len(alone):
            begun += endless.recv(1 << 16)
        assert text_of(begun).startswith(alone)
        endless.close()
        answers = [future.result(TIMEOUT) for future in flood]
        refused = [answer for answer in answers if status_of(answer) != 200]
        assert {status_of(answer) for answer in refused} <= {429, 503}
        assert refused
        assert all(b"retry-after: 1\r\n" in answer for answer in refused)
        assert {choices_of(answer)[0]["text"] for answer in answers if answer not in refused} <= {alone}
        wait_for(port, "llamac_requests_running", 0)
        wait_for(port, "llamac_connections", 1)


# ---- clients that leave


@pytest.mark.parametrize("reset", [False, True])
def test_a_client_can_leave_at_every_token(tmp_path: Path, reset: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "script.bin", script_checkpoint(byte_ids(TEXT), context=64))
    allowed = threading.Semaphore(0)
    with running(path, prefix_cache=False) as served:
        batch, step, pages = served.engine._batch, served.engine._batch.step, served.engine.stats().kv_bytes

        def allowed_step() -> None:
            assert allowed.acquire(timeout=PATIENCE)
            step()

        def gone() -> float:
            counted: float = served.service.metrics.requests._values.get(("/v1/completions", "499"), 0)
            return counted

        monkeypatch.setattr(batch, "step", allowed_step)
        for index in range(len(TEXT) - 2):  # a prompt of two tokens is continued from the third letter on
            steps = served.engine.stats().steps
            with connected(served.port) as connection:
                connection.sendall(streamed({"prompt": "x", "temperature": 0, "max_tokens": 60}))
                found = connection.recv(1 << 16)
                assert status_of(found) == 200
                for n in range(index):
                    allowed.release()
                    while text_of(found) != TEXT[2 : 3 + n]:
                        found += connection.recv(1 << 16)
                if reset:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            wait_until(lambda index=index: gone() == index + 1)  # type: ignore[misc]
            allowed.release()
            wait_until(lambda: not (served.engine.stats().running or served.engine.stats().waiting))
            assert served.engine.stats().steps - steps <= index + 1
            assert served.engine.stats().kv_bytes == pages
            allowed.acquire(blocking=False)
        monkeypatch.setattr(batch, "step", step)


# ---- the world


def test_a_log_that_cannot_be_written_does_not_matter() -> None:
    with open("/dev/full", "w") as full:
        _serves_with_log(full)


def test_a_log_that_nobody_reads_does_not_matter() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x")
    os.set_blocking(writing, True)
    with open(reading), open(writing, "w") as pipe:
        _serves_with_log(pipe)


def _serves_with_log(log: TextIO) -> None:
    port = _free_port()
    command = [sys.executable, "-m", "llamac", "serve", "--port", str(port), "-v"]
    with subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=heed_signals) as process:
        try:
            limit = time.monotonic() + TIMEOUT
            while not _is_ready(port):
                assert process.poll() is None, "the server has ended"
                assert time.monotonic() < limit
                time.sleep(0.01)
            for _ in range(3):
                assert choices_of(said(port, request_bytes("/v1/completions", BODY, "Connection: close")))
            assert status_of(said(port, request_bytes("/v1/nothing", None, "Connection: close"))) == 404
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT) == -signal.SIGTERM
        finally:
            process.kill()


def _is_ready(port: int) -> bool:
    try:
        return status_of(said(port, request_bytes("/ready", None, "Connection: close"))) == 200
    except ConnectionRefusedError:
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def test_nothing_depends_on_the_wall_clock(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(JUMPING)
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with server("--port", 0) as usual:
        expected = text_of(said(usual.port, streamed(BODY)))
    with server("--port", 0, "--timeout", 60, "--client-timeout", 30, "-v", PYTHONPATH=paths) as started:
        assert [text_of(said(started.port, streamed(BODY))) for _ in range(3)] == [expected] * 3
        assert choices_of(said(started.port, request_bytes("/v1/completions", BODY, "Connection: close")))
        assert status_of(said(started.port, LAST_HEALTH)) == 200
        started.process.send_signal(signal.SIGTERM)
        code, errors = started.end()
    assert code == -signal.SIGTERM
    years = {line[:4] for line in errors.splitlines() if " request " in line}
    assert len(years) > 1, "the clock did not jump"


@pytest.mark.parametrize("where", ["port", "uds"])
def test_a_server_that_was_killed_starts_again_at_once(tmp_path: Path, where: str) -> None:
    port = _free_port()
    path = str(tmp_path / "socket")
    place = ("--port", port) if where == "port" else ("--uds", path)

    def connection() -> socket.socket:
        if where == "port":
            return connected(port)
        opened = socket.socket(socket.AF_UNIX)
        opened.settimeout(TIMEOUT)
        opened.connect(path)
        return opened

    with server(*place) as started, connection() as client, connection() as idle:
        client.sendall(streamed({**BODY, **ENDLESS}))
        received = client.recv(1000)
        while text_of(received).count(" ") < 5:
            received += client.recv(1000)
        started.process.kill()
        received += read_all(client)
        assert read_all(idle) == b""
        assert b"[DONE]" not in received, "the client could take the answer for a whole one"
        assert not received.endswith(b"0\r\n\r\n")
        started.process.wait(TIMEOUT)
        with server(*place), connection() as again:  # while the clients of the first one are still there
            again.sendall(streamed({**BODY, **ENDLESS}))
            repeated = again.recv(1000)
            while len(text_of(repeated)) < len(text_of(received)):
                repeated += again.recv(1000)
            assert text_of(repeated).startswith(text_of(received))
