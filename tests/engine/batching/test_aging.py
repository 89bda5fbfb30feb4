"""Waiting requests rise: the order of an engine's requests, step by step, with a clock that the test moves."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from held_engines import held

import llamac
from builders import some_ids
from llamac import SamplingParams
from llamac.engine.batching import admission, batch, request
from llamac.engine.batching.request import Request
from llamac.engine.batching.scheduler import LEVEL_S
from processes import TIMEOUT


class Steps:
    """An engine whose steps the test makes, in its own thread. It has one place, unless the options say otherwise."""

    def __init__(self, model: llamac.Model, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.now = 1000.0
        self.perf_counter = time.perf_counter
        for module in (batch, request):
            monkeypatch.setattr(module, "time", self)
        self.engine = llamac.Engine(model, **{"max_sequences": 1, **options})
        self.batch = self.engine._batch

    def monotonic(self) -> float:
        return self.now

    def add(self, length: int = 1, *, priority: int = 0, deadline: float | None = None, beam_width: int = 1) -> Request:
        sampled: dict[str, Any] = {"temperature": 3, "seed": 1} if beam_width == 1 else {}
        params = SamplingParams(max_tokens=12, ignore_eos=True, beam_width=beam_width, **sampled)
        prompt = [5] if length == 1 else some_ids(length, seed=length)
        added = self.engine._request(prompt, params, priority, deadline)
        self.batch.add(added._members)
        return added

    def wait(self, levels: float) -> None:
        self.now += levels * LEVEL_S

    def running(self) -> Request:
        """The request that computes the next step."""
        [found] = self.running_after(1)
        return found

    def running_after(self, n: int) -> set[Request]:
        """The requests that run after n steps."""
        for _ in range(n):
            self.batch.step()
        return set(self.batch.running)

    def run_to_the_end(self) -> None:
        while not self.batch.is_empty:
            self.batch.step()


@pytest.fixture
def open_steps(model: llamac.Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Steps]]:
    with contextlib.ExitStack() as engines:

        def opened(**options: Any) -> Steps:
            steps = Steps(model, monkeypatch, **options)
            engines.enter_context(steps.engine)
            return steps

        yield opened


@pytest.fixture
def steps(open_steps: Callable[..., Steps]) -> Steps:
    return open_steps()


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
    steps.batch.waiting.clear()
    low = steps.add()
    assert steps.running() is low
    steps.batch.add([aged])
    high = steps.add(priority=5)
    assert steps.running() is high
    high.cancel()
    assert steps.running() is aged  # before the one that was displaced


# ---- no place stays idle


def test_places_that_a_displaced_search_leaves_over_are_given_away(open_steps: Callable[..., Steps]) -> None:
    steps = open_steps(max_sequences=4)
    search = steps.add(beam_width=4)
    assert steps.running_after(1) == set(search._members)
    aged = steps.add()
    steps.wait(1.1)
    above = steps.add(priority=1)
    assert steps.running_after(2) == {aged, above}


def page_positions(model: llamac.Model) -> int:
    with model.session() as session:
        return session._core.page_size()[0]


def test_pages_that_a_displaced_request_leaves_over_are_given_away(
    open_steps: Callable[..., Steps], model: llamac.Model
) -> None:
    page = page_positions(model)
    steps = open_steps(max_sequences=3, prefix_cache=False, kv_tokens=8 * page)
    large = steps.add(6 * page)
    assert steps.running_after(1) == {large}
    aged = steps.add(3 * page)
    assert steps.running_after(1) == {large}
    steps.wait(1.1)
    above = steps.add(priority=1)
    assert steps.running_after(2) == {aged, above}


def test_pages_that_another_session_frees_are_given_away(open_steps: Callable[..., Steps], model: llamac.Model) -> None:
    page = page_positions(model)
    steps = open_steps(max_sequences=2, prefix_cache=False, kv_tokens=8 * page)
    with model.session(context=5 * page) as session:
        session.eval(some_ids(5 * page))
        first = steps.add()
        assert steps.running_after(1) == {first}
        second = steps.add(4 * page)
        assert steps.running_after(1) == {first}
    assert steps.running_after(1) == {first, second}


def test_a_request_starts_beside_one_that_has_computed_its_prefix(open_steps: Callable[..., Steps]) -> None:
    """Though a beam search behind it waits for more places than are free."""
    steps = open_steps(max_sequences=4)
    first, second = steps.add(400), steps.add(400)
    steps.add(beam_width=4)
    assert steps.running_after(1) == {first}
    assert steps.running_after(3) == {first, second}


def test_a_request_that_rises_above_a_wide_search_starts(open_steps: Callable[..., Steps]) -> None:
    steps = open_steps(max_sequences=2)
    first = steps.add()
    assert steps.running_after(1) == {first}
    rising = steps.add()
    steps.wait(0.5)
    steps.add(beam_width=2, deadline=1000)
    assert steps.running_after(1) == {first}
    steps.wait(0.6)
    assert steps.running_after(1) == {first, rising}


def test_a_batch_that_looks_for_no_request_to_start_would_find_none(open_steps: Callable[..., Steps]) -> None:
    steps = open_steps(max_sequences=5, kv_tokens=300)
    chance = random.Random(7)
    looks = 0
    for _ in range(120):
        if len(steps.batch.waiting) < 12 and chance.random() < 0.4:
            width = chance.choice([1, 1, 1, 2, 4])
            priority, deadline = chance.randrange(4), chance.choice([None, 500, 1000])
            steps.add(chance.choice([1, 20, 90]), priority=priority, deadline=deadline, beam_width=width)
        steps.wait(chance.choice([0, 0, 0.4]))
        steps.batch.step()
        steps.batch._admission.admit()
        if steps.batch._admission._full_at is not None:
            running = set(steps.batch.running)
            steps.batch._admission._full_at = None
            steps.batch._admission.admit()
            assert set(steps.batch.running) == running
            looks += 1
    assert looks > 20


@pytest.mark.parametrize(("deadline", "reason"), [(None, "length"), (60, "deadline")])
def test_prompts_beyond_the_queue_wait_from_when_they_are_queued(
    model: llamac.Model, monkeypatch: pytest.MonkeyPatch, deadline: float | None, reason: str
) -> None:
    """Their time before that does not raise them above other requests. Deadlines count from the call."""
    now = 1000.0
    clock = SimpleNamespace(monotonic=lambda: now, perf_counter=time.perf_counter)
    for module in (admission, batch, request):
        monkeypatch.setattr(module, "time", clock)
    with llamac.Engine(model, max_sequences=1, max_queue=1) as engine, ThreadPoolExecutor(1) as pool:
        with held(engine) as is_held:
            found = pool.submit(engine.generate, [[5]] * 3, max_tokens=1, deadline=deadline)
            assert is_held.wait(TIMEOUT)
            now += 100
        completions = found.result(TIMEOUT)
    assert [completion.finish_reason for completion in completions] == [reason] * 3
    assert deadline or [completion.timings.queued for completion in completions] == [100, 0, 0]
