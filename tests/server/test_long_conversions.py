"""Floods of long texts and of many tokens: conversions that do not end occupy neither the server nor an engine."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

import llamac
from builders import checkpoint, llama_config, write_model
from http_server import ENDLESS, Running, running
from llamac.server.service import COMPUTING, SUBMITTING
from llamac.text.tokenizer import LONG_TEXT
from processes import TIMEOUT
from served_process import request_bytes
from waiting import wait_until

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
LONG = "a" * (LONG_TEXT + 1)
SHORT = {"prompt": "Once", "max_tokens": 2, "ignore_eos": True}
MANY = 40  # more than the default executor of asyncio has threads on small machines

COMPUTED: dict[str, Any] = {
    "/tokenize": {"prompt": LONG},
    "/detokenize": {"tokens": [5] * len(LONG)},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": [{"role": "user", "content": LONG}]},
}
SUBMITTED: dict[str, Any] = {
    "/v1/completions": {"prompt": LONG, **ENDLESS},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}], **ENDLESS},
    "/execute": {"prompt": LONG, "sampling": ENDLESS},
}


class Held:
    """Holds conversions of long texts and of many tokens until a test lets them go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = 0
        self.leave = threading.Event()
        self._lock = threading.Lock()
        for name in ("_guarded", "decode"):
            monkeypatch.setattr(llamac.Tokenizer, name, self._holding(getattr(llamac.Tokenizer, name)))

    def _holding(self, convert: Callable[..., Any]) -> Callable[..., Any]:
        def held(tokenizer: llamac.Tokenizer, given: Any, *arguments: Any, **options: Any) -> Any:
            if len(given) >= LONG_TEXT:
                with self._lock:
                    self.begun += 1
                assert self.leave.wait(TIMEOUT)
            return convert(tokenizer, given, *arguments, **options)

        return held


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = checkpoint(llama_config(context=64))
    made.chat_template = TEMPLATE
    return write_model(tmp_path_factory.mktemp("long") / "tiny.bin", made)


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[Running]:
    with running(path) as served:
        served.post("/v1/chat/completions", {**SHORT, "prompt": None, "messages": [{"role": "user", "content": "a"}]})
        yield served


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held(monkeypatch)
    yield made
    made.leave.set()


def sent(server: Running, path: str, body: Any) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port), TIMEOUT)
    client.sendall(request_bytes(path, body))
    return client


@pytest.mark.parametrize("target", COMPUTED)
def test_a_flood_of_conversions_leaves_the_server_to_others(server: Running, held: Held, target: str) -> None:
    with ExitStack() as clients:
        for _ in range(2 * (COMPUTING + SUBMITTING)):
            clients.enter_context(sent(server, target, COMPUTED[target]))
        wait_until(lambda: held.begun == COMPUTING)
        assert server.client.get("/health").status_code == 200
        assert server.post("/v1/completions", SHORT).json()["usage"]["completion_tokens"] == 2
        assert server.events("/v1/completions", SHORT)[-1] == "[DONE]"
    # now all of these clients have gone, and their threads are free
    assert server.post("/tokenize", {"prompt": "a"}).status_code == 200
    assert not held.leave.is_set()


@pytest.mark.parametrize("target", SUBMITTED)
def test_requests_that_are_given_up_free_their_threads(server: Running, held: Held, target: str) -> None:
    with ExitStack() as clients:
        for _ in range(2 * SUBMITTING):
            clients.enter_context(sent(server, target, SUBMITTED[target]))
        wait_until(lambda: held.begun == SUBMITTING)
    assert server.post("/v1/completions", SHORT).status_code == 200
    assert not held.leave.is_set()
    held.leave.set()
    server.wait_until_idle()  # what they have queued since then is cancelled: it would never end


def test_tasks_that_are_cancelled_free_their_threads(path: Path, held: Held) -> None:
    async def use(engine: llamac.AsyncEngine) -> None:
        tasks = [asyncio.create_task(engine.generate(LONG, context_overflow="shift")) for _ in range(MANY)]
        while not held.begun:
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        assert all(
            isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*tasks, return_exceptions=True)
        )
        await asyncio.get_running_loop().run_in_executor(None, lambda: None)
        assert not held.leave.is_set()
        held.leave.set()

    async def opened() -> None:
        with llamac.load(path) as model:
            async with llamac.AsyncEngine(model) as engine:
                await asyncio.wait_for(use(engine), TIMEOUT)

    asyncio.run(opened())
