"""If any allocation of the core fails in a server, the answer says so, and the server answers the next requests.

Some allocations fail in each test; all of them with `--failing-allocations 0`, which takes minutes.
"""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

from failing_allocations import Failing, numbers_of

from builders import checkpoint, llama_config, some_ids, write_model
from http_server import Running, serving
from llamac import _core
from llamac.cli import make_parser
from llamac.cli.serve_models import models_of
from llamac.engine.batching import engine
from llamac.server.service import Service
from llamac.server.settings import Settings

MESSAGES = [{"role": "user", "content": "hello world"}]
SETTINGS = {"max_tokens": 5, "seed": 1, "temperature": 0.9}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {**SETTINGS, "prompt": some_ids(40), "n": 2, "logprobs": 2}),
    ("/v1/completions", {**SETTINGS, "prompt": "hello " * 20, "stream": True}),
    ("/v1/chat/completions", {**SETTINGS, "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {**SETTINGS, "messages": MESSAGES, "stream": True}),
    ("/v1/responses", {"max_output_tokens": 5, "temperature": 0, "input": "hello"}),
    ("/v1/messages", {"model": "tiny", "max_tokens": 5, "temperature": 0, "messages": MESSAGES}),
    ("/v1/messages/count_tokens", {"model": "tiny", "messages": MESSAGES}),
    ("/v1/embeddings", {"input": ["hello", "world"]}),
    ("/tokenize", {"prompt": "hello world"}),
]
NO_MEMORY = "out of memory"
CHANGING = ("id", "created", "created_at", "completed_at", "usage", "timings")  # keys whose values differ each time


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one model, of one layer."""
    found = tmp_path_factory.mktemp("models")
    made = checkpoint(llama_config(n_layers=1))
    made.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    write_model(found / "tiny.bin", made)
    (found / "models.toml").write_text('default = "tiny"\n')
    return found


@contextlib.contextmanager
def server_of(folder: Path) -> Iterator[Running]:
    """A server that has not loaded the model yet."""
    options = ["serve", "--models-dir", str(folder), "--context", "256", "--threads", "1"]
    with serving(Service(models_of(make_parser().parse_args(options)), Settings())) as served:
        yield served


def answer_of(server: Running, path: str, body: dict[str, Any]) -> Any:
    """The answer to a request without what differs each time, or NO_MEMORY if its error says so."""
    response = server.post(path, body)
    if NO_MEMORY in response.text:
        assert response.status_code == 503 or response.headers["content-type"].startswith("text/event-stream")
        return NO_MEMORY
    assert response.status_code == 200, response.text
    if "stream" not in body:
        return lasting(response.json())
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def lasting(value: Any) -> Any:
    """A JSON value without what differs each time."""
    if isinstance(value, dict):
        return {key: lasting(each) for key, each in value.items() if key not in CHANGING}
    return [lasting(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("sign", [1, -1], ids=["once", "from then on"])
def test_any_allocation_of_a_server_can_fail(
    request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch, sign: int
) -> None:
    monkeypatch.setattr(engine, "CACHED_STATES", 4)
    objects, refused = _core.live_objects(), 0
    with Failing(0) as whole, server_of(folder) as server:
        expected = [answer_of(server, *each) for each in REQUESTS]
    for number in numbers_of(whole.count, request.config.getoption("failing_allocations")):
        with server_of(folder) as server:
            with Failing(sign * number):
                found = [answer_of(server, *each) for each in REQUESTS]
            refused += found.count(NO_MEMORY)
            for each, wanted in zip(found, expected, strict=True):
                assert each in (wanted, NO_MEMORY), number
            assert [answer_of(server, *each) for each in REQUESTS] == expected, number
            server.wait_until_idle()
            assert server.engine.failure is None
            assert server.engine.model.kv_bytes == server.engine.stats().prefix.bytes
    assert refused > 1
    gc.collect()
    assert _core.live_objects() <= objects
