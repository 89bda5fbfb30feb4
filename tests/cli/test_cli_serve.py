"""`llamac serve`: what it refuses to start with, how it is reached, and how it ends."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

import httpx

import llamac
from commands import Command
from llamac import models
from llamac.cli.serve import _file_names
from llamac.cli.serve_models import _adapt
from llamac.errors import ArgumentError, ExportError
from llamac.server.callback import call_back
from llamac.server.models_file import ModelSettings
from llamac.server.serving import check_certificate, listen_unix, socket_file, watchdog_seconds
from processes import TIMEOUT
from served_process import connected, read_all, server
from waiting import wait_until

ENDLESS = {"prompt": "x", "stream": True, "max_tokens": 10**6, "ignore_eos": True, "context_overflow": "shift"}


# ---- what it refuses


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--host", "0.0.0.0"],
            "--host 0.0.0.0 accepts connections from other machines: give --api-key-file FILE or LLAMAC_API_KEY",
        ),
        (["--host", "nowhere.invalid", "--no-key"], "cannot listen on nowhere.invalid port 8000"),
        (["--port", "99999"], "--port is 99999, expected 0 to 65535"),
        (["--max-queue", "0"], "--max-queue is 0, expected more than 0"),
        (["--max-body", "much"], "--max-body is 'much'"),
        (["--max-prompt", "0"], "--max-prompt is 0, expected more than 0"),
        (["--client-timeout", "nan"], "--client-timeout is nan, expected more than 0"),
        (["--idle-seconds", "nan", "--models-dir", "."], "--idle-seconds is nan, expected 0 (never) or more"),
        (["--idle-seconds", "5"], "--idle-seconds needs --models-dir"),
        (["--alias", ""], "--alias is '', expected a name"),
        (["--cors", "example.org"], "--cors is 'example.org', expected an origin such as https://example.org"),
        (["--cors", "https://example.org/"], "--cors is 'https://example.org/', expected an origin"),
        (["--ready-callback", "localhost:80"], "--ready-callback is 'localhost:80', expected http://HOST/PATH"),
        (["--ready-callback", "http://a:b@x/"], "--ready-callback is 'http://a:b@x/', expected http://HOST/PATH"),
        (["--tls-cert", "c.pem"], "--tls-cert and --tls-key belong together"),
        (["--uds", "."], "this is not a socket, so llamac does not replace it"),
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


def test_more_connections_than_the_system_allows_are_refused() -> None:
    limited = f"ulimit -n 500; exec {sys.executable} -m llamac serve --max-connections 1000"
    done = subprocess.run(["sh", "-c", limited], capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 2
    assert "--max-connections is 1000, but this process may open 500 files (ulimit -Hn): expected at most 244" in (
        done.stderr
    )


# ---- how it is reached, and how it ends


def test_a_server_logs_requests_and_ends_when_they_are_answered(tmp_path: Path) -> None:
    file = shutil.copy(models.path(), tmp_path / "fables.bin")
    arguments = (file, "--port", 0, "-v", "--log-format", "json", "--alias", "tales")
    with server(*arguments, LLAMAC_API_KEY="secret-key") as started:
        headers = {"Authorization": "Bearer secret-key"}
        with httpx.Client(base_url=started.address, headers=headers, timeout=TIMEOUT) as client:
            names = [model["id"] for model in client.get("/v1/models").json()["data"]]
            assert names == ["tales", "stories", "fables"]  # the alias, the model's own name, and its file's
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
        code, errors = started.end()
    assert (code, errors) == (130, "llamac: finishing a request for at most 1000 s; Ctrl-C again stops at once\n")


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
    with socket.socket(socket.AF_UNIX) as killed:  # the socket that a killed server leaves is replaced
        killed.bind(str(path))
    for _ in range(2):
        with server("--uds", path) as started:
            assert started.address == f"unix:{path}"
            assert path.stat().st_mode & 0o777 == 0o600
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=TIMEOUT) as client:
                assert client.get("http://x/health").json() == {"status": "ok"}
            other = subprocess.run(
                [sys.executable, "-m", "llamac", "serve", "--uds", str(path)], capture_output=True, text=True
            )
            assert "another process listens there" in other.stderr
            assert path.exists()
            started.process.send_signal(signal.SIGTERM)
            assert started.end()[0] == -signal.SIGTERM
        assert not path.exists()


def test_a_socket_that_another_server_has_replaced_stays(tmp_path: Path) -> None:
    path = tmp_path / "llamac.sock"
    path.touch()
    with socket_file(str(path)):
        (tmp_path / "other.sock").touch()
        (tmp_path / "other.sock").replace(path)
    assert path.exists()
    with socket_file(str(path)):
        pass
    assert not path.exists()


@pytest.mark.parametrize("kind", [socket.SOCK_DGRAM, socket.SOCK_SEQPACKET])
def test_a_unix_socket_of_another_kind_is_not_replaced(tmp_path: Path, kind: socket.SocketKind) -> None:
    path = tmp_path / "other.sock"
    with socket.socket(socket.AF_UNIX, kind) as other:
        other.bind(str(path))
        with pytest.raises(ArgumentError, match="llamac cannot tell whether a process still uses this socket"):
            listen_unix(str(path))
        assert path.is_socket()


def test_a_unix_socket_whose_queue_is_full_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "busy.sock"
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as first:
        busy.bind(str(path))
        busy.listen(0)
        first.connect(str(path))
        with pytest.raises(ArgumentError, match="another process listens there"):
            listen_unix(str(path))
        assert path.is_socket()


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


def test_keys_are_read_again_on_sighup(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first name=alice\n")
    with server("--port", 0, "--api-key-file", file) as started:

        def status(key: str) -> int:
            return httpx.get(f"{started.address}/v1/models", headers={"x-api-key": key}, timeout=TIMEOUT).status_code

        assert [status("first"), status("second")] == [200, 401]
        file.write_text("second name=bob\n")
        started.process.send_signal(signal.SIGHUP)
        wait_until(lambda: status("second") == 200)
        assert status("first") == 401
        file.write_text("third max_request=1\n")
        started.process.send_signal(signal.SIGHUP)
        assert started.process.stderr is not None
        line = started.process.stderr.readline()
        assert "the API keys remain unchanged" in line
        assert "there is no limit 'max_request'; did you mean 'max_requests'?" in line
        assert "third" not in line
        assert status("second") == 200


class Manager(http.server.BaseHTTPRequestHandler):
    """Fails once, then listens."""

    heard: ClassVar[list[tuple[str, bytes]]] = []

    def do_POST(self) -> None:
        self.heard.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(500 if len(self.heard) == 1 else 204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_manager_is_told_over_http_that_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Manager, "heard", [])
    with http.server.HTTPServer(("127.0.0.1", 0), Manager) as manager:
        threading.Thread(target=manager.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{manager.server_port}/ready?id=7"
        # a proxy that the machine uses for other things is ignored
        with server("--port", 0, "--ready-callback", url, http_proxy="http://127.0.0.1:9") as started:
            wait_until(lambda: len(Manager.heard) == 2)
            assert httpx.get(f"{started.address}/ready").status_code == 200
            document = json.loads(Manager.heard[1][1])
            assert Manager.heard[1][0] == "/ready?id=7"
            assert document["status"] == "ready"
            assert (document["address"], document["models"]) == (started.address, ["helper"])
            assert document["pid"] == started.process.pid
        manager.shutdown()


def test_a_manager_that_cannot_be_told_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    call_back(f"http://127.0.0.1:{port}/?id=secret", {}, waits=(0, 0)).join(TIMEOUT)
    (record,) = caplog.records
    fields = record.__dict__["fields"]
    assert (fields["host"], fields["attempts"]) == ("127.0.0.1", 3)
    assert "refused" in fields["reason"]
    assert "secret" not in str(fields)


def test_a_watchdog_for_another_process_hears_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "3000000")
    assert watchdog_seconds() == 1.5
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    assert watchdog_seconds() == 1.5
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert watchdog_seconds() is None


def openssl(*arguments: object) -> None:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("openssl makes the certificate, and is not installed")
    subprocess.run([program, *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture
def certificate_and_key(tmp_path: Path) -> tuple[Path, Path]:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    options = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost -addext"
    openssl(*options.split(), "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate)
    return certificate, key


def test_wrong_certificates_and_keys_are_refused(certificate_and_key: tuple[Path, Path], tmp_path: Path) -> None:
    certificate, key = certificate_and_key
    other, locked, broken, none = (tmp_path / name for name in ("other", "locked", "broken", "none"))
    openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", other)
    openssl("pkey", "-in", key, "-aes256", "-passout", "pass:x", "-out", locked)
    broken.write_text("-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n")
    messages = {
        (certificate, other): f"--tls-key {other}: this is not the key of the certificate {certificate}",
        (certificate, locked): f"--tls-key {locked}: the key is encrypted, and llamac does not ask for passwords",
        (certificate, certificate): f"--tls-key {certificate}: expected a PEM file, with a line -----BEGIN PRIVATE KEY",
        (key, key): f"--tls-cert {key}: expected a PEM file, with a line -----BEGIN CERTIFICATE-----",
        (broken, key): f"--tls-cert {broken} and --tls-key {key}: ",
    }
    for files, message in messages.items():
        with pytest.raises(ArgumentError) as caught:
            check_certificate(*files)
        assert str(caught.value).startswith(message)
    with pytest.raises(FileNotFoundError) as missing:
        check_certificate(none, key)
    assert missing.value.filename == str(none)


def test_a_client_without_a_handshake_is_closed_in_time(certificate_and_key: tuple[Path, Path]) -> None:
    certificate, key = certificate_and_key
    with server("--port", 0, "--tls-cert", certificate, "--tls-key", key, "--client-timeout", 0.5) as started:
        begun = time.monotonic()
        with connected(started.port) as connection:
            assert read_all(connection) == b""
        assert time.monotonic() - begun < 30  # asyncio would wait for a minute


def test_https_is_served_with_a_certificate(certificate_and_key: tuple[Path, Path]) -> None:
    certificate, key = certificate_and_key
    with server("--port", 0, "--tls-cert", certificate, "--tls-key", key) as started:
        assert started.address.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=certificate)
        with httpx.Client(base_url=started.address, verify=context, timeout=TIMEOUT) as client:
            assert client.get("/health").json() == {"status": "ok"}
            body = {"prompt": "Once", "max_tokens": 3, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as stream:
                assert [line for line in stream.iter_lines() if line][-1] == "data: [DONE]"
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{started.address}/health")
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(started.address.replace("https", "http"))


def test_many_models_are_served(tmp_path: Path) -> None:
    for name in ("one", "two"):
        shutil.copy(models.path(), tmp_path / f"{name}.bin")
    (tmp_path / "models.toml").write_text("[models.two]\npinned = true\n")
    with server("--port", 0, "--models-dir", tmp_path, "--max-memory", "200MB", "-v") as started:
        assert started.first_line.startswith("llamac: serving two, one on ")
        with httpx.Client(base_url=started.address, timeout=TIMEOUT) as client:
            body = {"prompt": "Once", "max_tokens": 3}
            for name in ("one", "two"):
                assert client.post("/v1/completions", json={**body, "model": name}).json()["model"] == name
        started.process.send_signal(signal.SIGTERM)
        code, errors = started.end()
    assert code == -signal.SIGTERM
    assert "a model is loaded model=one" in errors


def test_a_model_is_named_after_its_file_or_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a-1.5").mkdir()
    (tmp_path / "b-1.5.bin").touch()
    monkeypatch.chdir(tmp_path / "a-1.5")
    names = [_file_names(name) for name in (".", "../a-1.5", "../b-1.5.bin", "/", "hf:a/b")]
    assert names == [("a-1.5",), ("a-1.5",), ("b-1.5",), (), ()]


def test_a_template_is_read_whole_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    settings = ModelSettings(chat_template=file)
    with llamac.load(models.path()) as model:
        file.write_bytes(b"a\r\n{{ messages[0].content }}{#" + b" " * 1_500_000 + b"#}")  # one comment: lexed at once
        _adapt(model, settings)
        assert model.chat_prompt([{"role": "user", "content": "Hi"}]) == "a\nHi"
        for data, message in ((b"\xff", "is not UTF-8"), (b" " * ((1 << 22) + 1), "more than the 4194304 bytes")):
            file.write_bytes(data)
            with pytest.raises(ExportError, match=rf"template\.jinja.* {message}"):
                _adapt(model, settings)


def test_an_option_for_one_model_is_refused_with_a_folder(llamac_command: Command, tmp_path: Path) -> None:
    for arguments, shown in (((models.path(),), "MODEL"), (("--alias", "a"), "--alias")):
        done = llamac_command("serve", "--port", "0", "--models-dir", tmp_path, *arguments)
        done.refuses_with(f"--models-dir serves the models of a folder: omit {shown} (set it in models.toml)")


def test_a_folder_with_a_mistake_is_refused(llamac_command: Command, tmp_path: Path) -> None:
    llamac_command("serve", "--port", "0", "--models-dir", tmp_path).refuses_with("has no models: expected files")
    llamac_command("serve", "--port", "0", "--models-dir", tmp_path / "none").fails_with("none: No such file")
    shutil.copy(models.path(), tmp_path / "one.bin")
    (tmp_path / "models.toml").write_text("[models.one]\nalias = 'x'\n")
    llamac_command("serve", "--port", "0", "--models-dir", tmp_path).refuses_with("did you mean 'aliases'?")
    (tmp_path / "models.toml").unlink()
    keys = tmp_path / "keys"
    keys.write_text("secret name=alice models=two\n")
    arguments = ("serve", "--port", "0", "--models-dir", tmp_path, "--api-key-file", keys)
    llamac_command(*arguments).refuses_with("the key 'alice': models: no model has the name 'two'")
