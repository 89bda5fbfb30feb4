"""Requests that wait rise: the order of an engine's requests, step by step, by a clock that the test moves."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

import llamac
from llamac import SamplingParams
from llamac.engine.batching import batch, request
from llamac.engine.batching.request import Request
from llamac.engine.batching.scheduler import LEVEL_S


class Steps:
    """An engine with one place whose steps the test makes, in its own thread."""

    def __init__(self, model: llamac.Model, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.perf_counter = time.perf_counter
        for module in (batch, request):
            monkeypatch.setattr(module, "time", self)
        self.engine = llamac.Engine(model, max_sequences=1)

    def monotonic(self) -> float:
        return self.now

    def add(self, *, priority: int = 0, deadline: float | None = None) -> Request:
        params = SamplingParams(max_tokens=12, temperature=3, seed=1, ignore_eos=True)
        added = self.engine._request([5], params, priority, deadline)
        self.engine._batch.add([added])
        return added

    def wait(self, levels: float) -> None:
        self.now += levels * LEVEL_S

    def running(self) -> Request:
        """The request that computes the next step."""
        self.engine._batch.step()
        [found] = self.engine._batch.running
        return found

    def run_to_the_end(self) -> None:
        while not self.engine._batch.is_empty:
            self.engine._batch.step()


@pytest.fixture
def steps(model: llamac.Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    steps = Steps(model, monkeypatch)
    with steps.engine:
        yield steps


@pytest.mark.parametrize(("waited", "is_first"), [(0, False), (2.9, False), (3, True)])
def test_an_older_request_passes_newer_ones_of_a_higher_priority(steps: Steps, waited: float, is_first: bool) -> None:
    aged = steps.add()
    steps.wait(waited)
    new = steps.add(priority=3)
    assert steps.running() is (aged if is_first else new)


@pytest.mark.parametrize(("waited", "is_first"), [(0.9, False), (1, True)])
def test_an_older_request_passes_newer_ones_with_a_deadline(steps: Steps, waited: float, is_first: bool) -> None:
    aged = steps.add()
    steps.wait(waited)
    urgent = steps.add(deadline=1000)
    assert steps.running() is (aged if is_first else urgent)


def test_gained_levels_take_no_place_and_protect_one(steps: Steps, model: llamac.Model) -> None:
    first = steps.add()
    assert steps.running() is first
    aged = steps.add()
    steps.wait(3)
    assert steps.running() is first
    first.cancel()
    assert steps.running() is aged
    steps.wait(50)  # a running request gains nothing
    equal = steps.add(priority=3)
    assert steps.running() is aged
    above = steps.add(priority=4)
    assert steps.running() is above
    steps.run_to_the_end()
    alone = model.generate([5], max_tokens=12, temperature=3, seed=1, ignore_eos=True).tokens
    assert [one.result().tokens for one in (aged, equal, above)] == [alone] * 3
    assert steps.engine.stats().preemptions == 1


def test_a_higher_priority_takes_a_place_though_an_aged_request_ranks_before_it(steps: Steps) -> None:
    aged = steps.add()
    steps.wait(9)
    steps.engine._batch.waiting.clear()
    low = steps.add()
    assert steps.running() is low
    steps.engine._batch.add([aged])
    high = steps.add(priority=5)
    assert steps.running() is high
    high.cancel()
    assert steps.running() is aged  # before the one that was displaced
