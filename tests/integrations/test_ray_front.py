"""The front of the application for Ray Serve: what clients get when replicas die or are busy. Ray is not needed."""

from __future__ import annotations

import asyncio
import json
import sys
import types
from collections.abc import AsyncIterator
from typing import Any

import pytest

from llamac.errors import UnsupportedError
from llamac.exit_codes import ERROR
from llamac.integrations import ray_batch, ray_serve
from llamac.integrations.ray_serve import ATTEMPTS, Front

pytest.importorskip("uvicorn")

STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-request-id", b"1")]
BEGINNING = {"type": "http.response.start", "status": 200, "headers": STREAM}
JSON_BEGINNING = {**BEGINNING, "headers": [(b"content-type", b"application/json")]}
PART = {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}
END = {"type": "http.response.body", "body": b"", "more_body": False}


class RayActorError(Exception):
    """As Ray's."""


class BackPressureError(Exception):
    """As Ray's."""


class DeploymentUnavailableError(Exception):
    """As Ray's."""


@pytest.fixture(autouse=True)
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules with the exceptions that the front catches."""
    errors = (RayActorError, BackPressureError, DeploymentUnavailableError)
    for name in ("ray", "ray.exceptions", "ray.serve", "ray.serve.exceptions"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for kind in errors:
        place = "ray.exceptions" if kind is RayActorError else "ray.serve.exceptions"
        monkeypatch.setattr(sys.modules[place], kind.__name__, kind, raising=False)


class Replicas:
    """A handle of replicas. Each answers with the next script: messages, and an exception or None."""

    def __init__(self, *scripts: Any) -> None:
        self._scripts = list(scripts)
        self.bodies: list[bytes] = []
        self.sessions: list[str] = []
        self.answer = self

    def options(self, *, stream: bool, session_id: str) -> Replicas:
        assert stream
        self.sessions.append(session_id)
        return self

    def remote(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[list[dict[str, Any]]]:
        assert all(name != b"content-length" for name, _ in scope["headers"])
        self.bodies.append(body)
        messages, error = self._scripts.pop(0)

        async def answers() -> AsyncIterator[list[dict[str, Any]]]:
            for message in messages:
                yield [message]
            if error is not None:
                raise error

        return answers()


def ask(replicas: Replicas, path: str = "/v1/completions", *, kind: str = "http", parts: Any = (b"{}",)) -> list[Any]:
    """Send a request to the front; return the messages that the client gets."""
    sent: list[Any] = []
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages[-1:] = [{**messages[-1], "more_body": False}] if messages else []
    messages += [{"type": f"{kind}.{name}"} for name in ("startup", "shutdown")] if kind == "lifespan" else []
    gone = None in parts

    async def receive() -> Any:
        if gone:
            return {"type": "http.disconnect"}
        if not messages:
            await asyncio.Event().wait()  # the client stays
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        application = Front(replicas, 8).__serve_build_asgi_app__()
        headers = [(b"content-length", b"2"), (b"accept", b"*/*")]
        await application({"type": kind, "path": path, "method": "POST", "headers": headers}, receive, send)

    asyncio.run(asyncio.wait_for(run(), 30))
    return sent


def error_of(sent: list[Any]) -> tuple[int, str]:
    """The status and the code of an answer that is an error."""
    assert dict(sent[0]["headers"])[b"retry-after"] == b"1"
    error = json.loads(b"".join(message["body"] for message in sent[1:]))["error"]
    return sent[0]["status"], error.get("code") or error["type"]


def test_an_answer_is_passed_on_without_the_id_that_ray_adds() -> None:
    replicas = Replicas(([BEGINNING, PART, END], None))
    sent = ask(replicas, parts=(b'{"prompt"', b': "x"}'))
    assert sent == [{**BEGINNING, "headers": STREAM[:1]}, PART, END]
    assert replicas.bodies == [b'{"prompt"']  # a byte more than is allowed: the replica refuses it


def test_a_replica_that_dies_before_its_answer_is_replaced() -> None:
    dead: Any = ([], RayActorError())
    replicas = Replicas(*[dead] * (ATTEMPTS - 1), ([JSON_BEGINNING, END], None))
    assert ask(replicas) == [JSON_BEGINNING, END]
    assert len(set(replicas.sessions)) == 1
    assert error_of(ask(Replicas(*[dead] * ATTEMPTS))) == (503, "replica_died")


@pytest.mark.parametrize(("path", "start"), [("/v1/completions", b"data: "), ("/v1/messages", b"event: error\ndata: ")])
def test_a_stream_whose_replica_dies_ends_with_an_error(path: str, start: bytes) -> None:
    sent = ask(Replicas(([BEGINNING, PART], RayActorError())), path)
    assert sent[:2] == [{**BEGINNING, "headers": STREAM[:1]}, PART]
    assert sent[2]["body"].startswith(start)
    assert b"the process that computed the answer has died: send the request again" in sent[2]["body"]
    assert not sent[2]["more_body"]


def test_a_whole_answer_whose_replica_dies_is_cut() -> None:
    with pytest.raises(ConnectionAbortedError, match="has died: send the request again"):
        ask(Replicas(([JSON_BEGINNING, PART], RayActorError())))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (BackPressureError(), (429, "rate_limit_exceeded")),
        (DeploymentUnavailableError(), (503, "replicas_unavailable")),
    ],
)
def test_busy_and_missing_replicas_are_errors(error: Exception, expected: tuple[int, str]) -> None:
    assert error_of(ask(Replicas(([], error)))) == expected
    assert error_of(ask(Replicas(([], error)), "/v1/messages"))[0] == expected[0]


def test_what_is_no_request_to_a_replica() -> None:
    assert error_of(ask(Replicas(), "/metrics")) == (404, "not_found")
    assert ask(Replicas(), kind="websocket") == [{"type": "websocket.close"}]
    assert [message["type"] for message in ask(Replicas(), kind="lifespan", parts=())] == [
        *("lifespan.startup.complete", "lifespan.shutdown.complete"),
    ]
    assert ask(Replicas(), parts=(None,)) == []


def test_without_ray_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (ray_batch, ray_serve):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install .*llamac\[ray\]"):
        ray_serve.build_app({})
    with pytest.raises(UnsupportedError, match=r"pip install .*llamac\[ray\]"):
        ray_batch.answer_file("in.jsonl", "out.jsonl")
    assert ray_batch.main(["in.jsonl", "out.jsonl"]) == ERROR
    assert "llamac[ray]" in capsys.readouterr().err
