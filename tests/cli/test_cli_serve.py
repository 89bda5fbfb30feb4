"""`llamac serve`: what it refuses to start with, how it is reached, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

import httpx

from commands import Command
from processes import TIMEOUT, heed_signals

ENDLESS = {"prompt": "x", "stream": True, "max_tokens": 10**6, "ignore_eos": True, "context_overflow": "shift"}


class Server:
    """A server in a process of its own."""

    def __init__(self, *arguments: object, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "llamac", "serve", *map(str, arguments)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            preexec_fn=heed_signals,
        )
        assert self.process.stderr is not None
        self.first_line = self.process.stderr.readline()
        found = re.fullmatch(r"llamac: serving \S+ on (\S+)\n", self.first_line)
        assert found is not None, self.first_line + self.process.stderr.read()
        self.address = found[1]

    def wait_until_closed(self) -> None:
        """Wait until the server accepts no more connections."""
        port = int(self.address.rpartition(":")[2])
        limit = time.monotonic() + TIMEOUT
        with contextlib.suppress(ConnectionRefusedError, ConnectionResetError):
            while True:
                assert time.monotonic() < limit, "the server still accepts connections"
                socket.create_connection(("127.0.0.1", port), TIMEOUT).close()
                time.sleep(0.01)

    def end(self) -> tuple[int, str]:
        """Wait for the end; return the exit code and what was logged."""
        _, errors = self.process.communicate(timeout=TIMEOUT)
        return self.process.returncode, errors


@contextlib.contextmanager
def server(*arguments: object, **environment: str) -> Iterator[Server]:
    started = Server(*arguments, **environment)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.communicate()


# ---- what it refuses


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 lets other machines in: give --api-key-file FILE or LLAMAC_API_KEY"),
        (["--host", "nowhere.invalid", "--no-key"], "cannot listen on nowhere.invalid port 8000"),
        (["--port", "99999"], "--port is 99999, expected 0 to 65535"),
        (["--max-queue", "0"], "--max-queue is 0, expected more than 0"),
        (["--max-body", "much"], "--max-body is 'much'"),
        (["--tls-cert", "c.pem"], "--tls-cert and --tls-key need each other"),
        (["--uds", "."], "this is not a socket, and is not replaced"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(
    llamac_command: Command, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LLAMAC_API_KEY", raising=False)
    llamac_command("serve", *arguments).refuses_with(message)


def test_a_port_in_use_is_refused(llamac_command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        llamac_command("serve", "--port", port).refuses_with(f"cannot listen on 127.0.0.1 port {port}: Address already")


def test_files_with_no_key_or_no_certificate_are_refused(llamac_command: Command, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    llamac_command("serve", "--api-key-file", empty).refuses_with("has no API keys")
    llamac_command("serve", "--api-key-file", tmp_path / "none").fails_with("none: No such file")
    llamac_command("serve", "--tls-cert", empty, "--tls-key", empty).refuses_with(f"--tls-cert {empty}: ")


def test_without_its_libraries_it_says_what_to_install(
    llamac_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    llamac_command("serve").fails_with('pip install "llamac[serve]"')


# ---- how it is reached, and how it ends


def test_a_server_logs_requests_and_ends_when_they_are_answered() -> None:
    with server("--port", 0, "-v", "--log-format", "json", "--alias", "tales", LLAMAC_API_KEY="secret-key") as started:
        headers = {"Authorization": "Bearer secret-key"}
        with httpx.Client(base_url=started.address, headers=headers, timeout=TIMEOUT) as client:
            assert client.get("/v1/models").json()["data"][0]["id"] == "tales"
            body = {"prompt": "My password is 1234", "max_tokens": 150, "seed": 1, "stream": True, "ignore_eos": True}
            with client.stream("POST", "/v1/completions", json=body) as stream:
                lines = stream.iter_lines()
                next(lines)
                started.process.send_signal(signal.SIGTERM)
                rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""] or rest[-1] == "data: [DONE]"
        code, errors = started.end()
    assert code == -signal.SIGTERM
    entries: list[dict[str, Any]] = [json.loads(line) for line in errors.splitlines()]
    assert [(e["path"], e["status"]) for e in entries] == [("/v1/models", 200), ("/v1/completions", 200)]
    assert "secret-key" not in errors
    assert "1234" not in errors


@pytest.mark.parametrize(("options", "status"), [((), 200), (("--no-page",), 404)])
def test_there_is_a_page_unless_it_is_left_out(options: tuple[str, ...], status: int) -> None:
    with server("--port", 0, *options) as started:
        assert httpx.get(f"{started.address}/", timeout=TIMEOUT).status_code == status


def test_a_second_interrupt_ends_it_at_once() -> None:
    with server("--port", 0, "--drain", 1000) as started:
        with httpx.stream("POST", f"{started.address}/v1/completions", json=ENDLESS, timeout=TIMEOUT) as stream:
            lines = stream.iter_lines()
            next(lines)
            started.process.send_signal(signal.SIGINT)
            started.wait_until_closed()  # two signals that wait for the process at the same time count as one
            started.process.send_signal(signal.SIGINT)
            with contextlib.suppress(httpx.HTTPError):
                for _ in lines:
                    pass
        assert started.end()[0] == 130


def test_requests_that_do_not_end_are_cut_after_the_drain() -> None:
    with server("--port", 0, "--drain", 1) as started:
        with httpx.stream("POST", f"{started.address}/v1/completions", json=ENDLESS, timeout=TIMEOUT) as stream:
            lines = stream.iter_lines()
            next(lines)
            started.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(httpx.HTTPError):
                for _ in lines:
                    pass
        assert started.end()[0] == -signal.SIGTERM


def test_a_unix_socket_is_private_and_can_be_reused(tmp_path: Path) -> None:
    path = tmp_path / "llamac.sock"
    for _ in range(2):  # the socket that the first one leaves is replaced
        with server("--uds", path) as started:
            assert started.address == f"unix:{path}"
            assert path.stat().st_mode & 0o777 == 0o600
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=TIMEOUT) as client:
                assert client.get("http://x/health").json() == {"status": "ok"}
            other = subprocess.run(
                [sys.executable, "-m", "llamac", "serve", "--uds", str(path)], capture_output=True, text=True
            )
            assert "another process listens there" in other.stderr


def test_a_service_manager_hears_of_it(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    heard: list[str] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(TIMEOUT)

        def listen() -> None:
            while "STOPPING=1" not in heard:
                heard.append(manager.recv(100).decode())

        listener = threading.Thread(target=listen)
        listener.start()
        with server("--port", 0, NOTIFY_SOCKET=str(path), WATCHDOG_USEC="20000") as started:
            while "WATCHDOG=1" not in heard:
                listener.join(0.01)
            assert httpx.get(f"{started.address}/ready").status_code == 200
            started.process.send_signal(signal.SIGTERM)
            started.end()
        listener.join(TIMEOUT)
    assert heard[0] == "READY=1"
    assert heard[-1] == "STOPPING=1"
