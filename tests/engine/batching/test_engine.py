"""The engine: every request gets the tokens that it would get alone, whatever happens to the others."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from held_engines import held

import llamac
from builders import byte_ids, some_ids
from llamac import ArgumentError, ClosedError, ContextFullError, QueueFullError
from llamac.engine.generation.output import Completion
from processes import TIMEOUT
from waiting import wait_until

Script = Callable[..., llamac.Model]
BOS = 1


def alone(model: llamac.Model, prompt: Any, **options: Any) -> Completion:
    """The result in a session of its own with the model's whole context."""
    with model.session() as session:
        return session.generate(prompt, **options)


def assert_same(found: Completion, expected: Completion) -> None:
    assert found.tokens == expected.tokens
    assert found.text == expected.text
    assert (found.finish_reason, found.stopped_by, found.seed) == (
        expected.finish_reason,
        expected.stopped_by,
        expected.seed,
    )


# ---- results


def test_a_list_of_prompts_gives_a_list_of_results(model: llamac.Model) -> None:
    prompts: list[str | list[int]] = ["hello world", "The end", [5, 6, 7], ""]
    with llamac.Engine(model, max_sequences=3) as engine:
        found = engine.generate(prompts, max_tokens=20, seed=4)
        for prompt, completion in zip(prompts, found, strict=True):
            assert_same(completion, alone(model, prompt, max_tokens=20, seed=4))
        assert_same(
            engine.generate("hello", temperature=0, max_tokens=5, seed=1),
            alone(model, "hello", temperature=0, max_tokens=5, seed=1),
        )
        assert engine.generate([]) == []


def test_requests_have_their_own_parameters_and_ends(scripted: Script) -> None:
    model = scripted("abcdefghijklmnopqrstuvwxyz")
    with llamac.Engine(model, max_sequences=4) as engine:
        stop = engine.submit([BOS], stop="fg", max_tokens=20)
        length = engine.submit([BOS], max_tokens=3)
        pieces = list(engine.submit([BOS, *byte_ids("abc")], stop="ghX", max_tokens=6))
        assert (stop.result().text, stop.result().stopped_by) == ("abcde", "fg")
        assert (length.result().text, length.result().finish_reason) == ("abc", "length")
        assert pieces == ["d", "e", "f", "ghi"]


def test_random_arrivals_cancellations_and_preemptions_change_no_token(model: llamac.Model) -> None:
    """Each request's tokens are those it gets alone, or a prefix of them if it was cancelled."""
    rng = np.random.default_rng(3)
    shared = some_ids(150, seed=9)
    jobs: list[tuple[list[int], dict[str, Any]]] = []
    for i in range(60):
        prompt = some_ids(int(rng.integers(1, 200)), seed=i)
        if rng.random() < 0.5:
            prompt = [*shared[: rng.integers(1, 150)], *prompt]
        jobs.append((prompt, {"max_tokens": int(rng.integers(1, 40)), "seed": i, "temperature": 0.9}))
    with llamac.Engine(model, max_sequences=6, kv_tokens=900) as engine:
        requests = []

        def submit(prompt: list[int], options: dict[str, Any]) -> None:
            requests.append(engine.submit(prompt, priority=int(rng.integers(3)), **options))
            if rng.random() < 0.2:
                requests[rng.integers(len(requests))].cancel()

        with held(engine):  # some are cancelled before they end, and some must wait for memory
            for job in jobs[:20]:
                submit(*job)
        for job in jobs[20:]:
            submit(*job)
            if rng.random() < 0.3:
                time.sleep(0.002)
        found = [request.result(TIMEOUT) for request in requests]
        stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.prefix.hit_tokens > 0
    assert model.kv_bytes == 0
    cancelled = 0
    for (prompt, options), completion in zip(jobs, found, strict=True):
        expected = alone(model, prompt, **options)
        if completion.finish_reason == "cancelled":
            cancelled += 1
            assert completion.tokens == expected.tokens[: len(completion.tokens)]
        else:
            assert_same(completion, expected)
    assert 0 < cancelled < len(jobs)


def test_windowed_models_resume_and_share(windowed: llamac.Model) -> None:
    shared = some_ids(700, seed=2)
    prompts = [[*shared, *some_ids(400, seed=seed)] for seed in range(6)]
    with llamac.Engine(windowed, max_sequences=2, kv_tokens=5000) as engine:
        found = [engine.generate([prompt], max_tokens=30, seed=1)[0] for prompt in prompts]
    for prompt, completion in zip(prompts, found, strict=True):
        assert_same(completion, alone(windowed, prompt, max_tokens=30, seed=1))
    # the first state cannot be cut; the second request keeps one where the prompts diverge, which the others share
    assert [completion.usage.cached_tokens for completion in found] == [0, 0, 640, 640, 640, 640]


# ---- the prefix cache


def test_a_shared_prefix_is_computed_once(model: llamac.Model) -> None:
    shared = some_ids(300)
    prompts = [[*shared, *some_ids(10, seed=seed)] for seed in range(1, 9)]
    with llamac.Engine(model, max_sequences=8) as engine:
        with held(engine):
            requests = [engine.submit(prompt, max_tokens=4, seed=1) for prompt in prompts]
        found = [request.result(TIMEOUT) for request in requests]
        rows = engine.stats().rows
        assert sum(completion.usage.cached_tokens for completion in found) == 7 * 256
        assert rows == 310 + 7 * (310 - 256) + 8 * 3
        again = engine.generate([prompts[3]], max_tokens=4, seed=1)[0]
        assert again.usage.cached_tokens == 309
        assert_same(again, found[3])


def test_the_next_turn_computes_only_its_own_tokens(model: llamac.Model) -> None:
    with llamac.Engine(model) as engine:
        first = engine.generate([some_ids(100)], max_tokens=20, seed=1)[0]
        conversation = [*some_ids(100), *first.tokens]
        second = engine.generate([[*conversation, 5, 6, 7]], max_tokens=4, seed=1)[0]
        assert second.usage.cached_tokens == 119  # the last token of an answer is never computed
        assert_same(second, alone(model, [*conversation, 5, 6, 7], max_tokens=4, seed=1))


def test_without_a_prefix_cache_everything_is_computed(model: llamac.Model) -> None:
    with llamac.Engine(model, prefix_cache=False) as engine:
        for _ in range(2):
            assert engine.generate([some_ids(100)], max_tokens=2)[0].usage.cached_tokens == 0
        assert engine.stats().prefix.lookups == 0


# ---- order


def test_no_stream_waits_for_a_whole_prompt(model: llamac.Model) -> None:
    """Beside a running stream, a step computes at most 64 rows of prompts."""
    with llamac.Engine(model, max_sequences=4) as engine:
        sizes = []
        compute = engine._batch._compute

        def record(shares: list[tuple[Any, int]]) -> Any:
            sizes.append([rows for _, rows in shares])
            return compute(shares)

        with held(engine, after=2) as is_held:
            stream = engine.submit([BOS], max_tokens=400, seed=1, temperature=3)
            assert is_held.wait(TIMEOUT)
            engine._batch._compute = record  # type: ignore[method-assign]
            prompt = engine.submit(some_ids(500), max_tokens=1)
        prompt.result(TIMEOUT)
        beside = [rows for rows in sizes if len(rows) == 2 and max(rows) > 1]
        assert len(beside) >= 5
        assert all(rows[0] == 1 and rows[1] <= 64 for rows in beside)
        stream.cancel()


def test_higher_priorities_are_served_first(model: llamac.Model) -> None:
    ended: list[int] = []
    with llamac.Engine(model, max_sequences=1) as engine:
        with held(engine):
            requests = {p: engine.submit([5], max_tokens=3, seed=1, priority=p) for p in (0, 2, 1)}
            requests[-1] = engine.submit([5], max_tokens=3, seed=1, deadline=TIMEOUT)
            for priority, request in requests.items():
                request._listeners.append(lambda p=priority, r=request: r.done and ended.append(p))  # type: ignore[func-returns-value, misc]
        for request in requests.values():
            request.result(TIMEOUT)
    assert ended == [2, 1, -1, 0]  # the deadline is earlier than none


def test_a_higher_priority_takes_a_running_requests_place(model: llamac.Model) -> None:
    options: dict[str, Any] = {"max_tokens": 300, "seed": 1, "temperature": 3}
    with llamac.Engine(model, max_sequences=1) as engine:
        ended: list[str] = []
        with held(engine, after=2) as is_held:
            low = engine.submit([5], **options)
            assert is_held.wait(TIMEOUT)
            high = engine.submit([6], priority=1, max_tokens=5, seed=1)
            for name, request in (("low", low), ("high", high)):
                request._listeners.append(lambda n=name, r=request: r.done and ended.append(n))  # type: ignore[func-returns-value, misc]
        assert_same(high.result(TIMEOUT), alone(model, [6], max_tokens=5, seed=1))
        assert engine.stats().preemptions == 1
        assert_same(low.result(TIMEOUT), alone(model, [5], **options))
    assert ended == ["high", "low"]


def test_a_deadline_ends_a_request_with_what_it_has(model: llamac.Model) -> None:
    with llamac.Engine(model, max_sequences=1) as engine:
        with held(engine):
            late = engine.submit([5], max_tokens=5, deadline=0.01)
            time.sleep(0.02)
        completion = late.result(TIMEOUT)
        assert (completion.finish_reason, completion.tokens) == ("deadline", [])
        with held(engine, after=2) as is_held:
            request = engine.submit([5], max_tokens=500, temperature=3, seed=1, deadline=3600)
            assert is_held.wait(TIMEOUT)
            request._deadline = time.monotonic()
        completion = request.result(TIMEOUT)
        assert completion.finish_reason == "deadline"
        expected = alone(model, [5], max_tokens=500, temperature=3, seed=1)
        assert completion.tokens == expected.tokens[: len(completion.tokens)] != []
    for deadline in (0, -1):
        with llamac.Engine(model) as engine, pytest.raises(ArgumentError, match="deadline"):
            engine.submit([5], deadline=deadline)


# ---- cancelling and errors


def test_cancelling_keeps_what_was_generated(model: llamac.Model) -> None:
    with llamac.Engine(model) as engine:
        with held(engine, after=20) as is_held:
            request = engine.submit([5], max_tokens=500, temperature=3, seed=1)
            assert is_held.wait(TIMEOUT)
            pieces = [next(iter(request))]
            request.cancel()
        pieces += list(request)
        completion = request.result()
        assert completion.finish_reason == "cancelled"
        assert "".join(pieces) == completion.text
        assert (
            completion.tokens
            == alone(model, [5], max_tokens=500, temperature=3, seed=1).tokens[: len(completion.tokens)]
        )
        request.cancel()  # once more is fine
        wait_until(lambda: engine.stats().running == 0)  # after the step that computed it


def test_a_cancelled_prompt_stops_within_its_step(big_llama: Path) -> None:
    with llamac.load(big_llama) as model, llamac.Engine(model) as engine:
        request = engine.submit(some_ids(3000), max_tokens=2)
        wait_until(lambda: bool(engine._batch.running_pass.computing))
        request.cancel()
        assert request.result(TIMEOUT).finish_reason == "cancelled"
        assert engine.stats().rows < 3000
        assert_same(engine.generate([[5]], max_tokens=3, seed=1)[0], alone(model, [5], max_tokens=3, seed=1))


def test_a_full_queue_refuses_and_generate_waits(model: llamac.Model) -> None:
    with llamac.Engine(model, max_sequences=1, max_queue=2) as engine:
        with held(engine, after=1) as is_held:
            engine.submit([5], max_tokens=10_000, temperature=3, seed=1)
            assert is_held.wait(TIMEOUT)
            waiting = [engine.submit([5], max_tokens=1) for _ in range(2)]
            with pytest.raises(QueueFullError, match=r"2 requests are already waiting, .*max_queue"):
                engine.submit([5])
        assert len(engine.generate([[6]] * 10, max_tokens=2)) == 10
        assert all(request.done for request in waiting)


def test_wrong_requests_are_refused_before_anything_is_computed(model: llamac.Model) -> None:
    with llamac.Engine(model) as engine:
        with pytest.raises(ContextFullError):
            engine.generate([[5], some_ids(601)])
        with pytest.raises(ArgumentError, match="expected 0 to"):
            engine.generate([[5], [100_000]])
        for prompt in (5, None):
            with pytest.raises(ArgumentError):
                engine.submit(prompt)  # type: ignore[arg-type]
        assert engine.stats().steps == 0
    settings: list[dict[str, Any]] = [{"max_sequences": 0}, {"max_sequences": 257}, {"kv_tokens": 5}, {"max_queue": 0}]
    for wrong in settings:
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            llamac.Engine(model, **wrong)
    assert model.kv_budget is None
    assert all(session.closed for session in model._sessions)  # including those of engines that could not be opened
    with pytest.raises(ArgumentError, match="model must be a Model"):
        llamac.Engine("stories.bin")  # type: ignore[arg-type]


def test_a_request_that_cannot_fit_the_memory_fails_alone(model: llamac.Model) -> None:
    with llamac.Engine(model, max_sequences=4, kv_tokens=600, context=600) as engine:
        model.kv_budget = engine._session._core.page_size()[1] * 3
        large = engine.submit(some_ids(300), max_tokens=2)
        small = engine.submit([5], max_tokens=5, seed=1)
        assert_same(small.result(TIMEOUT), alone(model, [5], max_tokens=5, seed=1))
        with pytest.raises(llamac.OutOfMemoryError):
            large.result(TIMEOUT)


def test_closing_cancels_everything(model: llamac.Model) -> None:
    engine = llamac.Engine(model, max_sequences=1)
    requests = [engine.submit([5], max_tokens=10_000, temperature=3, seed=1) for _ in range(3)]
    engine.close()
    engine.close()
    assert {request.result(TIMEOUT).finish_reason for request in requests} <= {"cancelled", "context"}
    assert model.kv_bytes == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "llamac-engine"]
    with pytest.raises(ClosedError):
        engine.submit([5])


def test_a_model_closed_under_the_engine_ends_its_requests(tiny_llama: Path) -> None:
    model = llamac.load(tiny_llama)
    engine = llamac.Engine(model)
    request = engine.submit([5], max_tokens=10_000, temperature=3, seed=1)
    next(iter(request))
    while not model.closed:
        with contextlib.suppress(llamac.BusyError):
            model.close()
    with contextlib.suppress(llamac.LlamacError):
        request.result(TIMEOUT)
    assert request.done
    engine.close()


def test_many_threads_can_submit(model: llamac.Model) -> None:
    expected = [alone(model, [5 + i], max_tokens=10, seed=i) for i in range(8)]
    found: dict[int, Completion] = {}
    with llamac.Engine(model, max_sequences=3) as engine:

        def use(i: int) -> None:
            found[i] = engine.generate([[5 + i]], max_tokens=10, seed=i)[0]

        threads = [threading.Thread(target=use, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
    for i in range(8):
        assert_same(found[i], expected[i])


def test_progress_counts_requests(model: llamac.Model) -> None:
    seen: list[tuple[str, int, int]] = []
    with llamac.Engine(model) as engine:
        engine.generate([[5], [6], [7]], max_tokens=2, progress=lambda *report: seen.append(report))
    assert seen == [("generating", i, 3) for i in range(4)]


# ---- asyncio


def test_a_closed_asynchronous_engine_cannot_be_entered(model: llamac.Model) -> None:
    async def main() -> None:
        async with llamac.AsyncEngine(model) as engine:
            pass
        with pytest.raises(llamac.ClosedError, match="the engine is closed"):
            async with engine:
                pass

    asyncio.run(main())


def test_coroutines_wait_without_blocking_the_loop(model: llamac.Model) -> None:
    async def main() -> None:
        async with llamac.AsyncEngine(model, max_sequences=3, max_queue=2) as engine:
            single = await engine.generate("hello", max_tokens=5, seed=1)
            assert_same(single, alone(model, "hello", max_tokens=5, seed=1))
            prompts = [[5 + i] for i in range(8)]
            for prompt, completion in zip(prompts, await engine.generate(prompts, max_tokens=6, seed=2), strict=True):
                assert_same(completion, alone(model, prompt, max_tokens=6, seed=2))
            request = engine.submit("hello", max_tokens=20, seed=3)
            pieces = [piece async for piece in request]
            assert "".join(pieces) == (await request).text == alone(model, "hello", max_tokens=20, seed=3).text

    asyncio.run(main())


def test_a_cancelled_task_cancels_its_requests(model: llamac.Model) -> None:
    async def main() -> None:
        async with llamac.AsyncEngine(model) as engine:
            task = asyncio.create_task(engine.generate([[5]], max_tokens=10_000, temperature=3, seed=1))
            while not engine.stats().running:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while engine.stats().running:
                await asyncio.sleep(0.001)

    asyncio.run(main())


# ---- pieces in the engine's thread


def test_pieces_are_pushed_until_they_are_refused(scripted: Script) -> None:
    pushed: list[str] = []

    def push(piece: str) -> bool:
        pushed.append(piece)
        return len(pushed) < 5

    with llamac.Engine(scripted("abcdefghijkl")) as engine:
        with held(engine, after=3):
            request = engine.submit("", max_tokens=10, temperature=0)
            first = next(request)
            request._push_to(push)
        rest = "".join(request)
        assert len(pushed) == 5
        assert first + "".join(pushed) + rest == request.result().text == "abcdefghij"


def test_nothing_is_pushed_after_a_cancellation(scripted: Script) -> None:
    pushed: list[str] = []

    def push(piece: str) -> bool:
        pushed.append(piece)
        return True

    with llamac.Engine(scripted("abcdefghijkl", context=64)) as engine:
        with held(engine, after=3) as is_held:
            request = engine.submit("", max_tokens=60, temperature=0)
            request._push_to(push)
            assert is_held.wait(TIMEOUT)
            request.cancel()
            before = list(pushed)
        assert "".join(before) + "".join(request) == request.result().text
        engine.generate("", max_tokens=1)
        assert pushed == before


def test_a_failing_push_ends_only_its_request(scripted: Script) -> None:
    def push(piece: str) -> bool:
        raise ValueError("broken")

    with llamac.Engine(scripted("abcdefghijkl")) as engine:
        with held(engine):
            request = engine.submit("", max_tokens=4, temperature=0)
            other = engine.submit("", max_tokens=4, temperature=0)
            request._push_to(push)
        with pytest.raises(llamac.LlamacError, match="recording a token failed: ValueError: broken"):
            request.result(TIMEOUT)
        assert other.result(TIMEOUT).text == "abcd"


def test_chat_uses_the_template(scripted: Script) -> None:
    model = scripted("abcdef")
    with llamac.Engine(model) as engine, pytest.raises(ArgumentError, match="no chat template"):
        engine.chat([{"role": "user", "content": "hello"}])


def test_ids_are_computed_once_after_a_pause(model: llamac.Model) -> None:
    """What a paused request has generated is computed again, not sampled again."""
    with llamac.Engine(model, max_sequences=1, prefix_cache=False) as engine:
        with held(engine, after=20) as is_held:
            low = engine.submit(some_ids(20), max_tokens=40, temperature=3, seed=1)
            assert is_held.wait(TIMEOUT)
            pieces = [next(iter(low))]
            high = engine.submit([6], priority=1, max_tokens=1)
        high.result(TIMEOUT)
        assert engine.stats().preemptions == 1
        pieces += list(low)
        assert engine.stats().generated == 40 + 1
        assert "".join(pieces) == low.result().text
    assert array("i", low.result().tokens) == array(
        "i", alone(model, some_ids(20), max_tokens=40, temperature=3, seed=1).tokens
    )
