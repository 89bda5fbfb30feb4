"""Failures of one part of an engine: the request that they concern ends with an error, the others go on unchanged."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from held_engines import held

import llamac
from builders import some_ids
from llamac import OutOfMemoryError, _core
from llamac.engine.batching import batch
from llamac.engine.cache import prefix_store
from llamac.engine.generation import logprobs
from llamac.engine.generation.output import Completion, Output
from llamac.engine.sampling import sampler
from llamac.guided import constraint
from processes import TIMEOUT
from prophet import Prophet
from waiting import wait_until

PROMPTS = [some_ids(30 + 7 * i, seed=i) for i in range(4)]


class Panic(BaseException):
    """What a panic of a Rust library is for Python: not an Exception."""


@pytest.fixture(autouse=True)
def nothing_leaks(model: llamac.Model) -> Iterator[None]:
    gc.collect()
    objects = _core.live_objects()
    yield
    assert model.kv_bytes == 0
    gc.collect()  # errors refer to frames, and these to the requests that have the errors
    assert _core.live_objects() == objects


@pytest.fixture
def engine(model: llamac.Model) -> Iterator[llamac.Engine]:
    with llamac.Engine(model, max_sequences=4) as engine:
        yield engine


def options(seed: int) -> dict[str, Any]:
    return {"max_tokens": 12, "temperature": 0.9, "seed": seed}


def assert_unharmed(engine: llamac.Engine, requests: list[llamac.Request]) -> None:
    """Check that requests for PROMPTS end with the tokens that they get alone, and that the engine goes on."""
    for i, request in enumerate(requests):
        assert request.result(TIMEOUT).tokens == expected(engine.model, i).tokens
    again = engine.submit(PROMPTS[0], **options(0))
    assert again.result(TIMEOUT).tokens == expected(engine.model, 0).tokens
    assert engine.failure is None
    wait_until(lambda: engine.stats().running == engine.stats().waiting == 0)


def submit_with_last(engine: llamac.Engine) -> tuple[llamac.Request, list[llamac.Request]]:
    """Submit a request that ranks last, so that a failure ends it, and requests for the other prompts.

    It comes first, because a step can have begun before the engine was held, and can compute what has been submitted.
    """
    return engine.submit(PROMPTS[3], priority=-1, **options(3)), submit_all(engine)


def expected(model: llamac.Model, i: int) -> Completion:
    with model.session() as alone:
        return alone.generate(PROMPTS[i], **options(i))


def submit_all(engine: llamac.Engine) -> list[llamac.Request]:
    return [engine.submit(prompt, **options(i)) for i, prompt in enumerate(PROMPTS[:3])]


# ---- of one request


@pytest.mark.parametrize("kind", [ValueError, MemoryError, SystemExit, Panic])
@pytest.mark.parametrize("after", [0, 3])
def test_a_logits_processor_that_fails_ends_its_request(
    engine: llamac.Engine, kind: type[BaseException], after: int
) -> None:
    calls, failure = 0, kind("no")

    def process(ids: Any, logits: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise failure

    failing = engine.submit(PROMPTS[3], logits_processors=[process], **options(3))
    others = submit_all(engine)
    with pytest.raises(llamac.LlamacError, match=f"failed: {type(failure).__name__}: ") as found:
        failing.result(TIMEOUT)
    assert found.value.__cause__ is failure
    assert repr(failing) == f"<llamac.Request: {after} tokens, failed>"
    with pytest.raises(llamac.LlamacError, match="failed: "):
        list(failing)
    assert_unharmed(engine, others)


@pytest.mark.parametrize("part", ["_compute_mask", "accept"])
def test_a_guide_whose_library_panics_ends_its_request(
    engine: llamac.Engine, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    pytest.importorskip("llguidance")

    def panic(*arguments: object) -> None:
        raise Panic("the library")

    monkeypatch.setattr(constraint.Constraint, part, panic)
    failing = engine.submit(PROMPTS[3], guide=llamac.Regex("[a-z]{3,9}"), **options(3))
    others = submit_all(engine)
    with pytest.raises(llamac.LlamacError, match="failed: Panic: the library"):
        failing.result(TIMEOUT)
    assert_unharmed(engine, others)


def test_a_result_that_cannot_be_read_is_an_error(engine: llamac.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = Output.completion

    def fail(self: Output, *arguments: Any) -> Completion:
        if self.params.seed == 3:
            raise RecursionError("too deep")
        return complete(self, *arguments)

    monkeypatch.setattr(Output, "completion", fail)
    failing = engine.submit(PROMPTS[3], **options(3))
    others = submit_all(engine)
    with pytest.raises(llamac.LlamacError, match="reading the result failed: RecursionError: too deep"):
        failing.result(TIMEOUT)
    assert_unharmed(engine, others)


@pytest.mark.parametrize("settings", [{"n": 2}, {"beam_width": 2, "temperature": 0.0}, {"prompt_logprobs": 2}])
def test_a_token_that_cannot_be_recorded_ends_its_request(
    engine: llamac.Engine, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    from llamac.engine.generation import beam_search

    def refuse(*arguments: object) -> None:
        raise Panic("a step")

    if "beam_width" in settings:
        monkeypatch.setattr(beam_search.BeamSearch, "advance", refuse)
    else:
        accept = Output.accept

        def fail(self: Output, *arguments: Any) -> str:
            if self.params.max_tokens == 5:
                refuse()
            return accept(self, *arguments)

        monkeypatch.setattr(Output, "accept", fail)
    failing = engine.submit(PROMPTS[3], **{**options(3), "max_tokens": 5, **settings})
    others = submit_all(engine)
    with pytest.raises(llamac.LlamacError, match="failed: Panic: a step"):
        failing.result(TIMEOUT)
    assert_unharmed(engine, others)


def test_a_progress_callback_that_fails_cancels_its_prompts(engine: llamac.Engine) -> None:
    def report(phase: str, done: int, total: int) -> None:
        if done == 1:
            raise ZeroDivisionError("a callback")

    others = submit_all(engine)
    with pytest.raises(ZeroDivisionError, match="a callback"):
        engine.generate([[5], PROMPTS[3], PROMPTS[2]], progress=report, max_tokens=400, temperature=3.0, seed=1)
    assert_unharmed(engine, others)


def test_an_event_loop_that_is_gone_harms_nobody(engine: llamac.Engine) -> None:
    requests: list[llamac.Request] = []

    async def begin() -> None:
        request = engine.submit(PROMPTS[3], max_tokens=200, temperature=3.0, seed=1)
        requests.append(request)
        waiting = request._wait_until(lambda: False)
        waiting.send(None)  # waits in a loop that ends before it does

    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()
    others = submit_all(engine)
    requests[0].cancel()
    assert_unharmed(engine, others)


# ---- memory


class Failing:
    """Fails some of the calls of a function: those from the `first` to before `last`."""

    def __init__(self, call: Callable[..., Any], failure: BaseException, first: int, last: int) -> None:
        self.call, self.failure, self.first, self.last = call, failure, first, last
        self.calls = 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        if self.first <= self.calls < self.last:
            raise type(self.failure)(*self.failure.args)  # a new one: its traceback holds pages
        return self.call(*arguments, **named)


@pytest.mark.parametrize("after", [False, True], ids=["before the pass", "after the pass"])
@pytest.mark.parametrize("first", [2, 3, 5])  # the first step can lack some of the requests
def test_python_without_memory_ends_one_request_at_a_time(
    engine: llamac.Engine, monkeypatch: pytest.MonkeyPatch, first: int, after: bool
) -> None:
    """What a step that failed halfway had computed is computed again."""
    run = engine._session._compute
    fail = Failing(lambda: None, MemoryError("no room"), first, first + 1)

    def compute(*arguments: Any) -> None:
        if after:
            run(*arguments)
        fail()
        if not after:
            run(*arguments)

    monkeypatch.setattr(engine._session, "_compute", compute)
    with held(engine):
        last, others = submit_with_last(engine)
    with pytest.raises(llamac.OutOfMemoryError, match="a step failed: MemoryError: no room"):
        last.result(TIMEOUT)
    assert_unharmed(engine, others)


def test_a_prompt_that_cannot_be_scored_is_computed_again(
    engine: llamac.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass has lengthened sequences, unlike a pass that found no memory itself."""
    monkeypatch.setattr(batch, "score_rows", Failing(logprobs.score_rows, llamac.OutOfMemoryError("no row"), 1, 2))
    with held(engine):
        last, others = submit_with_last(engine)
        scored = engine.submit(PROMPTS[3], prompt_logprobs=2, **options(3))
    with pytest.raises(llamac.OutOfMemoryError, match="no row"):
        last.result(TIMEOUT)
    assert scored.result(TIMEOUT).tokens == expected(engine.model, 3).tokens
    assert_unharmed(engine, others)


def test_a_step_with_drafts_can_lack_memory_to_sample(engine: llamac.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after it has sampled the last tokens of a request."""
    prophet = Prophet(part_right=0.7, most=4)
    for i, prompt in enumerate(PROMPTS):
        prophet.known[tuple(prompt)] = expected(engine.model, i).tokens
    prophet.install(monkeypatch)
    for first in range(2, 20):
        failing = Failing(sampler.draw_rows, llamac.OutOfMemoryError("no row"), first, first + 1)
        monkeypatch.setattr(batch, "draw_rows", failing)
        with held(engine):
            last, others = submit_with_last(engine)
        with contextlib.suppress(llamac.OutOfMemoryError):
            assert last.result(TIMEOUT).tokens == expected(engine.model, 3).tokens
        assert_unharmed(engine, others)
    assert engine.stats().drafted_tokens > 0


def test_memory_that_never_comes_back_ends_all_requests_and_not_the_engine(
    engine: llamac.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(engine._session, "_compute", Failing(lambda: None, MemoryError(), 1, 10**6))
        requests = submit_all(engine)
        for request in requests:
            with pytest.raises(llamac.OutOfMemoryError):
                request.result(TIMEOUT)
    assert_unharmed(engine, submit_all(engine))


def test_a_step_that_failed_halfway_frees_the_cached_prefixes(
    engine: llamac.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been changing them."""
    engine.submit(some_ids(100), **options(0)).result(TIMEOUT)
    assert engine.stats().prefix.states
    monkeypatch.setattr(engine._session, "_compute", Failing(lambda: None, MemoryError(), 1, 2))
    with pytest.raises(llamac.OutOfMemoryError):
        engine.submit(PROMPTS[0], **options(0)).result(TIMEOUT)
    assert not engine.stats().prefix.states


@pytest.mark.parametrize("first", [2, 3, 6])  # the first step can lack some of the requests
def test_pages_that_cannot_be_allocated_pause_requests(
    engine: llamac.Engine, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    run = engine._session._compute
    failing = Failing(run, llamac.OutOfMemoryError("no page"), first, first + 1)
    monkeypatch.setattr(engine._session, "_compute", failing)
    with held(engine):
        requests = submit_all(engine)
    assert_unharmed(engine, requests)
    assert failing.calls > first


def test_a_beam_search_survives_a_step_without_memory(engine: llamac.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: Any = {"max_tokens": 6, "beam_width": 3, "temperature": 0.0}
    with engine.model.session() as alone:
        wanted = alone.generate(PROMPTS[3], **settings)
    monkeypatch.setattr(engine._session, "_compute", Failing(engine._session._compute, MemoryError(), 4, 5))
    with held(engine):
        request = engine.submit(PROMPTS[3], priority=1, **settings)
        other = engine.submit(PROMPTS[0], priority=-1, max_tokens=100, temperature=3.0, seed=1)
    assert request.result(TIMEOUT).tokens == wanted.tokens
    with pytest.raises(llamac.OutOfMemoryError):
        other.result(TIMEOUT)


def test_an_engine_whose_thread_cannot_start_refuses_requests_until_it_can(
    model: llamac.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with llamac.Engine(model) as engine:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OutOfMemoryError, match="thread"):
            engine.submit([5], max_tokens=1)
        assert engine.stats().waiting == 0
        monkeypatch.setattr(threading.Thread, "start", start)
        assert engine.submit([5], max_tokens=1).result(TIMEOUT).finish_reason == "length"


# ---- prefixes on disk


@pytest.mark.parametrize("fault", ["full", "thread", "unreadable", "memory"])
def test_a_disk_that_fails_slows_down_and_nothing_more(
    model: llamac.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    prompt = some_ids(200, seed=5)
    with llamac.Engine(model, prefix_dir=tmp_path) as engine:
        wanted = engine.generate([prompt], **options(5))[0]
    refuse: Any
    if fault == "full":
        refuse = Failing(open, OSError(errno.ENOSPC, "No space left on device"), 1, 10**6)
        monkeypatch.setattr(prefix_store, "replacing", refuse)
    elif fault == "thread":
        refuse = Failing(open, RuntimeError("can't start new thread"), 1, 10**6)
        monkeypatch.setattr(threading, "Thread", _Unstartable)
    elif fault == "unreadable":
        monkeypatch.setattr(prefix_store, "open_regular", Failing(open, OSError(errno.EIO, "I/O error"), 1, 10**6))
    else:
        monkeypatch.setattr(_core, "take_page", Failing(open, MemoryError(), 1, 10**6))
    with llamac.Engine(model, prefix_dir=tmp_path) as engine:
        found = engine.generate([prompt, some_ids(150, seed=6)], **options(5))
        assert found[0].tokens == wanted.tokens
        if fault in ("full", "thread"):
            engine._cache.close()  # type: ignore[union-attr]
            assert engine.stats().prefix.disk_errors > 0
        assert engine.failure is None


class _Unstartable(threading.Thread):
    def start(self) -> None:
        if self.name == "llamac-prefixes":
            raise RuntimeError("can't start new thread")
        super().start()


# ---- everything at once


def test_random_failures_cancellations_and_deadlines_leave_nothing_behind(model: llamac.Model, tmp_path: Path) -> None:
    """With little memory and failures in every part, each request ends once, and the others have their tokens."""
    rng = np.random.default_rng(11)
    jobs = []

    def failing(calls: int) -> Callable[[Any, Any], None]:
        left = iter(range(calls))

        def process(ids: Any, logits: Any) -> None:
            if next(left, None) is None:
                raise Panic("a processor")

        return process

    with llamac.Engine(model, max_sequences=5, kv_tokens=700, prefix_dir=tmp_path, prefix_dir_bytes=1 << 20) as engine:
        run = engine._session._compute
        failing_run: Any = _Sometimes(run, np.random.default_rng(12))
        engine._session._compute = failing_run  # type: ignore[method-assign]
        for i in range(50):
            prompt = some_ids(int(rng.integers(1, 160)), seed=i % 7)
            settings = options(i)
            kind = rng.choice(["plain", "failing", "cancelled", "late"], p=[0.4, 0.2, 0.2, 0.2])
            if kind == "failing":
                settings["logits_processors"] = [failing(int(rng.integers(6)))]
            deadline = float(rng.uniform(1e-4, 0.02)) if kind == "late" else None
            request = engine.submit(prompt, priority=int(rng.integers(3)), deadline=deadline, **settings)
            jobs.append((kind, prompt, settings, request))
            if kind == "cancelled":
                request.cancel()
            if rng.random() < 0.3:
                time.sleep(0.002)
        results: list[tuple[list[int], dict[str, Any], Completion]] = []
        errors: list[tuple[str, llamac.LlamacError]] = []
        for kind, prompt, settings, request in jobs:
            try:
                results.append((prompt, settings, request.result(TIMEOUT)))
            except llamac.LlamacError as failure:
                errors.append((kind, failure))
        assert all(kind == "failing" or isinstance(error, llamac.OutOfMemoryError) for kind, error in errors)
        assert len(errors) > 3
        assert {"length", "cancelled"} <= {found.finish_reason for *_, found in results}
        assert engine.failure is None
        wait_until(lambda: engine.stats().running == engine.stats().waiting == 0)
    for prompt, settings, found in results:
        with model.session() as alone:
            wanted = alone.generate(prompt, **{**settings, "logits_processors": []})
        assert found.tokens == wanted.tokens[: len(found.tokens)]
        assert len(found.tokens) == len(wanted.tokens) or found.finish_reason in ("cancelled", "deadline")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".llamac-")]


class _Sometimes:
    """A pass that sometimes finds no memory, before or after it computes."""

    def __init__(self, run: Callable[..., None], rng: np.random.Generator) -> None:
        self._run, self._rng = run, rng

    def __call__(self, *arguments: Any) -> None:
        chance = self._rng.random()
        if chance < 0.03:
            raise llamac.OutOfMemoryError("no page")
        self._run(*arguments)
        if chance > 0.98:
            raise MemoryError("no room")
