"""A server on a loopback port, in a thread of the test."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

import llamac
from llamac.engine.batching.engine import Engine
from llamac.server.app import create_app
from llamac.server.models import Models
from llamac.server.service import Service
from llamac.server.serving import listen, make_server
from llamac.server.settings import Settings
from waiting import wait_until

PATIENCE = 60.0  # seconds; only a hang takes so long
# A request that does not end by itself.
ENDLESS = {"max_tokens": 10**6, "ignore_eos": True, "context_overflow": "shift"}


@dataclass(frozen=True)
class Running:
    """A server that runs.

    Attributes:
        client: Sends requests to it.
        service: What it serves.
        port: Its port.
    """

    client: httpx.Client
    service: Service
    port: int

    @property
    def engine(self) -> Engine:
        """The engine of the only model."""
        ((_, opened),) = self.service.models.open_ones()
        return opened.engine

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """Send a body."""
        return self.client.post(path, json=body, **options)

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The data of all events of a stream."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            lines = list(response.iter_lines())
        return [_value(line[6:]) for line in lines if line.startswith("data: ")]

    def wait_until_idle(self) -> None:
        """Wait until the engine has nothing to compute."""
        limit = time.monotonic() + PATIENCE
        while (stats := self.engine.stats()).running or stats.waiting:
            assert time.monotonic() < limit, stats
            time.sleep(0.005)


def _value(text: str) -> Any:
    return text if text == "[DONE]" else json.loads(text)


@contextlib.contextmanager
def running(
    path: Path | str,
    settings: Settings | None = None,
    *,
    names: tuple[str, ...] = (),
    connections: int = 100,
    **options: Any,
) -> Any:
    """Serve a model, under these names and its own. Further options are those of the engine."""
    with llamac.load(path) as model, Engine(model, **options) as engine:
        service = Service(Models.of_one(engine, names), settings or Settings())
        with serving(service, connections) as served:
            yield served


@contextlib.contextmanager
def serving(service: Service, connections: int = 100) -> Iterator[Running]:
    """Run a server, once its models are warm. The service is closed at the end."""
    opened = listen("127.0.0.1", 0)
    port = opened.getsockname()[1]
    server = make_server(create_app(service), 1, connections)

    async def run() -> None:
        await service.warm_up()
        await server.serve(sockets=[opened])

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())  # until then, the engine computes for itself
        assert thread.is_alive()
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
            yield Running(client, service, port)
    finally:
        server.should_exit = server.force_exit = True
        thread.join(PATIENCE)
        service.close()
        opened.close()
    assert not thread.is_alive()
