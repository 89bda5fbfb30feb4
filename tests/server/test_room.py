"""The room for models: which model leaves, when, and for how long. The engines are stand-ins without a file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from http_server import PATIENCE
from llamac.server import models as table
from llamac.server.models import Entry, Models, Need

SOON = 0.05  # seconds in which the table does what it does at once


@pytest.fixture(autouse=True)
def without_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "fingerprint", lambda engine: "")
    monkeypatch.setattr(table, "_counts_of", lambda engine: {})


def model(name: str, size: int, seconds: float = 0.0) -> Entry:
    """A model that needs `size` bytes, and `seconds` to find that out."""

    def opens(limit: int | None) -> Any:
        opened = SimpleNamespace(chat_template=None, close=lambda: None)
        return SimpleNamespace(failure=None, context=1, model=opened, close=lambda: None)

    def measures(limit: int) -> Need:
        time.sleep(seconds)
        return Need(size, 0, (0, 0))

    return Entry([name], opens, measures)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, PATIENCE))


def test_a_model_whose_clients_left_before_its_turn_makes_no_room() -> None:
    async def test() -> None:
        first, second, third = model("first", 10), model("second", 10), model("third", 10)
        models = Models([first, second, third], max_memory=10, wait_seconds=10 * PATIENCE)
        await models.take(first)
        taken = asyncio.ensure_future(models.take(second))
        await asyncio.sleep(SOON)
        given_up = asyncio.ensure_future(models.take(third))
        await asyncio.sleep(SOON)
        given_up.cancel()
        models.release(first)
        await taken
        await asyncio.sleep(SOON)
        assert third._loading is None
        assert not second._leaving
        await models.take(second)

    run(test())


def test_no_more_models_leave_than_make_room() -> None:
    async def test() -> None:
        first, small, large = model("first", 10), model("small", 5), model("large", 15)
        models = Models([first, small, large], max_memory=20, wait_seconds=10 * PATIENCE)
        await models.take(first)
        await models.take(first)
        waiting = asyncio.ensure_future(models.take(large))
        await asyncio.sleep(SOON)
        await models.take(small)  # it fits
        models.release(first)  # now the small one has not been used for longest
        given_up = asyncio.ensure_future(models.take(first))
        await asyncio.sleep(SOON)
        given_up.cancel()
        await asyncio.sleep(SOON)
        assert (first._leaving, small._leaving) == (True, False)
        models.release(first)
        await waiting
        assert (first.opened, small.uses) == (None, 1)

    run(test())


def test_a_model_that_was_just_loaded_is_not_the_first_to_leave() -> None:
    async def test() -> None:
        first, second, third = model("first", 5), model("second", 5), model("third", 5)
        models = Models([first, second, third], max_memory=10, wait_seconds=10 * PATIENCE)
        await models.take(first)
        models.release(first)
        await models.take(first)
        await models.take(second)
        waiting = asyncio.ensure_future(models.take(third))
        await asyncio.sleep(SOON)
        assert (first._leaving, second._leaving) == (True, False)
        models.release(first)
        await waiting

    run(test())


def test_the_time_for_room_begins_after_the_measuring() -> None:
    async def test() -> None:
        first, second = model("first", 10), model("second", 10, seconds=0.6)
        models = Models([first, second], max_memory=10, wait_seconds=0.5)
        await models.take(first)
        asyncio.get_running_loop().call_later(0.8, models.release, first)
        await models.take(second)

    run(test())
