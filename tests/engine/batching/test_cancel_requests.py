"""A cancelled request ends at once, whatever the engine's thread is doing, and keeps what was generated."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import llamac
from llamac.engine.batching import async_engine

LIMIT = 10  # seconds; only a failure takes so long


class Steps:
    """Holds the passes of an engine's thread until a test lets them go on."""

    def __init__(self, engine: llamac.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()
        self._compute = engine._session._compute
        self.limit = 0  # passes that are not held
        self.size = 1  # requests of a pass that is held; of more than one, no prompt
        self.runs = 0
        self._batch = engine._batch
        monkeypatch.setattr(engine._session, "_compute", self.compute)

    def compute(self, *arguments: Any) -> None:
        self.runs += 1
        running = self._batch.running_pass
        if self.runs > self.limit and len(running.requests) >= self.size and (self.size == 1 or not running.computing):
            self.entered.set()
            assert self.leave.wait(LIMIT)
        self._compute(*arguments)


@pytest.fixture
def engine(model: llamac.Model) -> Iterator[llamac.Engine]:
    with llamac.Engine(model, max_sequences=2) as engine:
        yield engine


@pytest.mark.parametrize("after", [0, 1, 4], ids=["in the prompt", "after a token", "after some tokens"])
def test_a_cancel_does_not_wait_for_the_running_step(
    engine: llamac.Engine, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    steps = Steps(engine, monkeypatch)
    steps.limit = after
    expected = engine.model.generate("ab", max_tokens=after + 3, temperature=0)
    request = engine.submit("ab", max_tokens=after + 3, temperature=0)
    assert steps.entered.wait(LIMIT)
    request.cancel()
    assert request.done  # while the step is still held
    result = request.result(timeout=0)
    assert (result.finish_reason, result.tokens) == ("cancelled", expected.tokens[:after])
    assert "".join(request) == result.text
    steps.leave.set()
    other = engine.generate("ab", max_tokens=after + 3, temperature=0)
    assert other.tokens == expected.tokens
    assert request.result() is result


def test_text_that_was_held_back_is_delivered(engine: llamac.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    text = engine.model.generate("ab", max_tokens=4, temperature=0).text
    steps = Steps(engine, monkeypatch)
    steps.limit = 4
    request = engine.submit("ab", max_tokens=9, temperature=0, stop=text[-1:] + "never")
    assert steps.entered.wait(LIMIT)
    request.cancel()
    steps.leave.set()
    assert "".join(request) == request.result().text == text


def test_a_pass_that_nobody_wants_is_cancelled(engine: llamac.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(engine, monkeypatch)
    steps.limit = 1
    requests = [engine.submit("ab", max_tokens=50, temperature=0)]
    assert steps.entered.wait(LIMIT)
    scope = engine._batch.running_pass._scope
    assert scope is not None
    assert not scope.cancelled
    requests[0].cancel()
    assert scope.cancelled
    steps.leave.set()


def test_a_pass_that_others_need_goes_on(engine: llamac.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(engine, monkeypatch)
    steps.size = 2
    one, two = (engine.submit("ab", max_tokens=500, temperature=0, ignore_eos=True) for _ in range(2))
    assert steps.entered.wait(LIMIT)
    scope = engine._batch.running_pass._scope
    one.cancel()
    assert scope is not None
    assert not scope.cancelled
    steps.leave.set()
    assert len(two.result().tokens) == 500


def test_a_task_that_is_cancelled_while_it_submits_leaves_no_request(
    model: llamac.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_engine, "LONG_TEXT", 1)
    submitted: list[llamac.Request] = []
    entered, leave = threading.Event(), threading.Event()

    async def use() -> None:
        async with llamac.AsyncEngine(model) as engine:
            submit: Callable[..., llamac.Request] = engine.engine.submit

            def slow(*arguments: Any, **options: Any) -> llamac.Request:
                entered.set()
                assert leave.wait(LIMIT)
                submitted.append(submit(*arguments, **options))
                return submitted[0]

            monkeypatch.setattr(engine.engine, "submit", slow)
            task = asyncio.create_task(engine.generate("ab", max_tokens=500, ignore_eos=True))
            while not entered.is_set():
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            leave.set()
            while not submitted or not submitted[0].done:
                await asyncio.sleep(0.001)
            assert submitted[0].result().finish_reason == "cancelled"

    asyncio.run(use())
