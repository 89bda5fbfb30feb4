"""Memory: plans, limits that every later call keeps, and the list of what a model holds."""

from __future__ import annotations

import contextlib
import gc
import pickle
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import llamac
from builders import some_ids
from llamac import _core
from llamac.engine import memory
from llamac.text import tokenizer


@pytest.fixture(autouse=True)
def exact_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tokenizer takes is measured, and differs a little from run to run."""
    monkeypatch.setattr(tokenizer, "resident_bytes", lambda: 0)


def floor(model: llamac.Model, context: int = 64) -> int:
    """The least limit for one sequence of `context` positions."""
    return model.plan_memory(context=context).total


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "q8"])
def test_a_plan_is_what_the_largest_pass_takes(tiny_llama: Path, threads: int, kv_dtype: Any) -> None:
    with llamac.load(tiny_llama, threads=threads, kv_dtype=kv_dtype) as model:
        plan = model.plan_memory(context=600)
        with model.session(context=600) as session:
            session.eval([1] * 300, logits=None)
            session.eval([1] * 300, logits="all")
            held = session.memory()
        assert plan.kv == held["kv"]
        assert 0 <= plan.activations - held["activations"] < 4096
        assert (plan.context, plan.sequences, plan.kv_dtype) == (600, 1, kv_dtype)
        assert plan.kv_per_token == plan.kv // 640
        assert model.plan_memory(context=600, sequences=3).kv == 3 * plan.kv


@pytest.mark.parametrize("length", [10, 300, 700, 1900])
def test_windows_need_no_more_than_their_plan(windowed: llamac.Model, length: int) -> None:
    with windowed.session() as session:
        _, pages = _core.memory_limits(session._core, length)
        most = 0
        for start in range(0, length, 200):
            session.eval([1] * min(200, length - start), logits=None)
            most = max(most, session.memory()["kv"])
        assert most <= pages
        session.truncate(0)
        session.eval([1] * length, logits=None)
        assert session.memory()["kv"] <= pages
    whole = windowed.plan_memory(context=2000)
    assert whole.kv < 2000 * whole.kv_per_token  # layers with windows keep less


def test_a_limit_that_cannot_be_kept_is_refused_with_the_plan(model: llamac.Model, tiny_llama: Path) -> None:
    plan = model.plan_memory(context=600)
    with pytest.raises(llamac.OutOfMemoryError) as failure:
        llamac.load(tiny_llama, context=600, max_memory=plan.total - plan.kv // 2)
    text = str(failure.value)
    assert "these settings fit: a context of " in text
    assert "kv_dtype q8" in text
    for name in ("weights", "tokenizer", "activations", "logits", "KV cache", "total"):
        assert f"\n  {name}" in text
    with pytest.raises(llamac.OutOfMemoryError, match=r"this model needs at least \d+MiB"):
        llamac.load(tiny_llama, max_memory=1000)


def test_what_is_said_to_fit_does(model: llamac.Model, tiny_llama: Path) -> None:
    limit = model.plan_memory(context=600, kv_dtype="f16").total - 20_000
    with pytest.raises(llamac.OutOfMemoryError) as failure:
        llamac.load(tiny_llama, context=600, kv_dtype="f16", max_memory=limit)
    found = re.search(r"these settings fit: a context of (\d+) with kv_dtype f16", str(failure.value))
    assert found is not None
    context = int(found[1])
    assert 64 <= context < 600
    with llamac.load(tiny_llama, context=context, kv_dtype="f16", max_memory=limit) as limited:
        assert limited.generate([1] * (context - 4), max_tokens=5, ignore_eos=True).finish_reason == "length"
    with pytest.raises(llamac.OutOfMemoryError):
        llamac.load(tiny_llama, context=context + 64, kv_dtype="f16", max_memory=limit)


def test_a_limit_is_kept(model: llamac.Model, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_resident", lambda path: None)  # reading it takes long in a process with many mappings
    limit = floor(model, 256)
    with llamac.load(tiny_llama, max_memory=limit) as limited:
        assert limited.max_memory == limit
        with limited.session(context=600) as session:
            with contextlib.suppress(llamac.OutOfMemoryError):
                while limited.memory().total <= limit:
                    session.eval([1] * 8, logits=None)
            assert 64 <= session.length() < 600
            assert limited.memory().total <= limit
        with limited.session(context=256) as session:  # nothing of the failed one is left
            session.eval([1] * 256, logits=None)
            with pytest.raises(llamac.OutOfMemoryError, match="other sessions use or reserve"):
                [limited.session(context=600) for _ in range(20)]
            assert limited.memory().total <= limit


def test_the_callers_budget_and_the_limit_hold_both(model: llamac.Model, tiny_llama: Path) -> None:
    with llamac.load(tiny_llama, max_memory=floor(model, 600)) as limited:
        whole = limited.kv_budget
        assert whole is not None
        limited.kv_budget = 1000
        assert limited.kv_budget == 1000
        limited.kv_budget = 1 << 40
        assert limited.kv_budget == whole
        with limited.session():
            assert limited.kv_budget < whole
        limited.kv_budget = None
        assert limited.kv_budget == whole
    model.kv_budget = 5
    assert model.kv_budget == 5


def test_an_engine_keeps_a_limit_and_gives_it_back(model: llamac.Model) -> None:
    prompts = [[1, i] * 40 for i in range(2, 8)]
    expected = [model.generate(prompt, max_tokens=40, temperature=0, context=200).tokens for prompt in prompts]
    logits = memory.ENGINE_BYTES * model.config["vocab_size"] * 4 + memory.SESSION_BYTES * model.config["vocab_size"]
    limit = floor(model, 200) + logits + 2 * model.plan_memory(context=64).kv + (1 << 17)
    with llamac.Engine(model, max_sequences=4, context=200, max_memory=limit) as engine:
        requests = [engine.submit(prompt, max_tokens=40, temperature=0) for prompt in prompts]
        used = []
        while not all(request.done for request in requests):
            used.append(engine.memory().total)
        assert [request.result().tokens for request in requests] == expected
        assert max(used, default=0) <= limit
        assert engine.memory().prefix_cache > 0
        assert engine.memory().prefix_cache <= engine.memory().kv
    assert (model.max_memory, model.kv_budget) == (None, None)
    with pytest.raises(llamac.OutOfMemoryError, match="fewer sequences"):
        llamac.Engine(model, max_sequences=4, context=600, max_memory=floor(model, 200))
    assert (model.max_memory, model.kv_budget, model._memory.engine_logits) == (None, None, 0)


def test_engines_of_a_model_close_in_any_order(model: llamac.Model) -> None:
    first = llamac.Engine(model, kv_tokens=1000, max_memory="1GiB")
    plain = llamac.Engine(model)  # as for the candidates of a request
    second = llamac.Engine(model, kv_tokens=2000, max_memory="512MiB")
    limits = (model.max_memory, model.kv_budget)
    plain.close()
    first.close()
    assert (model.max_memory, model.kv_budget) == limits
    second.close()
    assert (model.max_memory, model.kv_budget) == (None, None)


def test_an_engine_with_limits_that_nobody_closed_is_freed(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model:
        engine = weakref.ref(llamac.Engine(model, kv_tokens=1000, max_memory="1GiB"))
        gc.collect()
        assert engine() is None


def test_every_part_is_listed(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model:
        before = model.memory()
        assert (before.weights, before.kv, before.activations) == (tiny_llama.stat().st_size, 0, 0)
        with model.session() as session:
            session.eval([1] * 70, logits=None)
            now = model.memory()
            assert now.kv == model.kv_bytes == session.memory()["kv"]
            assert now.activations == session.memory()["activations"]
            assert now.logits == memory.SESSION_BYTES * model.config["vocab_size"]
            assert now.weights_resident is None or 0 < now.weights_resident <= now.weights + (1 << 17)
            parts = (now.weights, now.adapters, now.tokenizer, now.activations, now.logits, now.kv)
            assert now.total == sum(parts)
        assert model.memory().kv == 0
    with pytest.raises(llamac.ClosedError):
        model.memory()


def test_a_pickled_model_keeps_its_limit(model: llamac.Model, tiny_llama: Path) -> None:
    size = floor(model, 256)
    with llamac.load(tiny_llama, max_memory=f"{size}B") as limited, pickle.loads(pickle.dumps(limited)) as again:
        assert again.max_memory == limited.max_memory == size


def test_wrong_sizes_and_settings_are_refused(model: llamac.Model, tiny_llama: Path) -> None:
    for wrong in ("2 gigs", "", "GiB", "-1GB", "1e3MB"):
        with pytest.raises(llamac.ArgumentError, match="expected a size such as 2GiB"):
            llamac.load(tiny_llama, max_memory=wrong)
    for size in (0, "0MB", -5):
        with pytest.raises(llamac.ArgumentError, match="at least 1 byte"):
            llamac.load(tiny_llama, max_memory=size)
    with pytest.raises(llamac.ArgumentTypeError):
        llamac.load(tiny_llama, max_memory=1.5)  # type: ignore[arg-type]
    with pytest.raises(llamac.ArgumentError, match="sequences is 0"):
        model.plan_memory(sequences=0)


def test_limits_beyond_all_memory_are_no_limits(model: llamac.Model, tiny_llama: Path) -> None:
    model.kv_budget = 1 << 70
    assert len(model.generate([5], max_tokens=2, ignore_eos=True).tokens) == 2
    model.kv_budget = None
    with llamac.Engine(model, kv_tokens=1 << 70) as engine:
        assert len(engine.generate([[5]], max_tokens=2, ignore_eos=True)[0].tokens) == 2
    assert model.kv_budget is None
    with llamac.load(tiny_llama, max_memory=1 << 80) as unlimited:
        assert len(unlimited.generate([5], max_tokens=2, ignore_eos=True).tokens) == 2


def least_limit(open_with: Callable[[int], Any]) -> int:
    """The least limit that is accepted, to 500 bytes."""
    low, high = 1, 1 << 30
    while high - low > 500:
        middle = (low + high) // 2
        try:
            open_with(middle).close()
            high = middle
        except llamac.OutOfMemoryError:
            low = middle
    return high


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("max_sequences", [1, 4])
def test_the_least_limit_of_an_engine_leaves_room_for_a_whole_request(
    tiny_llama: Path, drafts: bool, prefix_cache: bool, max_sequences: int
) -> None:
    with llamac.load(tiny_llama, threads=1, draft_model=tiny_llama if drafts else None) as model:
        _ = model.tokenizer.n_ids
        settings: dict[str, Any] = {"context": 512, "max_sequences": max_sequences, "prefix_cache": prefix_cache}
        limit = least_limit(lambda limit: llamac.Engine(model, max_memory=limit, **settings))
        with pytest.raises(llamac.OutOfMemoryError, match="fewer sequences"):
            llamac.Engine(model, max_memory=limit - 1000, **settings)
        for spare in (0, 20_000, 200_000):
            with llamac.Engine(model, max_memory=limit + spare, **settings) as engine:
                for prompt in (some_ids(504), some_ids(500, seed=1)):
                    completion = engine.generate([prompt], max_tokens=8, ignore_eos=True)[0]
                    assert (completion.finish_reason, len(completion.tokens)) == ("length", 8)
                assert engine.memory().total <= limit + spare


def test_a_draft_model_leaves_room_for_what_the_plan_promises(tiny_llama: Path) -> None:
    prompt = some_ids(memory.MIN_CONTEXT - 8)

    def load(limit: int | None) -> llamac.Model:
        return llamac.load(tiny_llama, threads=1, draft_model=tiny_llama, max_memory=limit)

    limit = least_limit(load)
    longest = []
    for spare in (0, 20_000, 200_000, 10_000_000):
        with load(limit + spare) as model, model.session() as session:
            assert len(session.generate(prompt, max_tokens=8, ignore_eos=True).tokens) == 8
            assert model.memory().total <= limit + spare
            longest.append(session._draft_context)
    assert longest[0] >= memory.MIN_CONTEXT
    assert longest == sorted(longest)
    assert longest[-1] == 600  # the model's context


def test_a_session_without_room_for_drafts_generates_without(tiny_llama: Path, model: llamac.Model) -> None:
    limit = floor(model, 256)
    with llamac.load(tiny_llama) as drafting, llamac.load(tiny_llama, max_memory=limit) as limited:
        with pytest.warns(llamac.LlamacWarning, match="makes no drafts: max_memory is .* no room for it"):
            session = limited.session(draft_model=drafting, context=256)
        completion = session.generate(some_ids(200), max_tokens=20, ignore_eos=True)
        assert (len(completion.tokens), completion.usage.drafted_tokens) == (20, 0)
        assert limited.memory().draft == 0
        assert limited.memory().total <= limit
        session.close()


def test_an_engine_without_room_for_drafts_generates_without(tiny_llama: Path, model: llamac.Model) -> None:
    logits = memory.ENGINE_BYTES * model.config["vocab_size"] + memory.SESSION_BYTES * model.config["vocab_size"]
    limit = floor(model, 256) + logits
    settings: dict[str, Any] = {"context": 256, "max_sequences": 1, "prefix_cache": False, "max_memory": limit}
    with llamac.load(tiny_llama) as drafting:
        with pytest.warns(llamac.LlamacWarning, match="the draft model makes no drafts"):
            engine = llamac.Engine(model, draft_model=drafting, **settings)
        completion = engine.generate([some_ids(200)], max_tokens=20, ignore_eos=True)[0]
        assert (len(completion.tokens), completion.usage.drafted_tokens) == (20, 0)
        assert engine.memory().total <= limit
        engine.close()


def test_the_draft_model_of_load_counts_while_no_session_drafts(tiny_llama: Path, model: llamac.Model) -> None:
    limit = 4 * floor(model, 600)
    with (
        llamac.load(tiny_llama) as other,
        llamac.load(tiny_llama, threads=1, draft_model=tiny_llama, max_memory=limit) as limited,
    ):
        for draft_model in (None, other):
            with limited.session(draft_model=draft_model) as session:
                assert session._draft_context == 600
                assert limited.memory().total + (limited.kv_budget or 0) <= limit
            assert limited.memory().total + (limited.kv_budget or 0) <= limit


@pytest.mark.filterwarnings("ignore:the draft model makes no drafts")
def test_drafts_leave_room_for_the_pages_of_other_sessions(tiny_llama: Path, model: llamac.Model) -> None:
    def opened(limit: int) -> int:
        """How long a text a session drafts for, beside another one with 480 positions."""
        with llamac.load(tiny_llama, threads=1, max_memory=limit) as limited, limited.session() as other:
            other.eval([1] * 480, logits=None)
            with limited.session(draft_model=drafting) as session:
                return session._draft_context

    with llamac.load(tiny_llama, threads=1) as drafting:
        least = 2 * floor(model, 600)
        found = [opened(least + spare) for spare in range(0, 2 * floor(model, 600), 20_000)]
    assert (found[0], found[-1]) == (0, 600)
    assert found == sorted(found)


def test_the_plan_of_an_engine_under_the_limit_of_load_includes_its_prefix_cache(
    model: llamac.Model, tiny_llama: Path
) -> None:
    with llamac.load(tiny_llama, context=256, max_memory=floor(model, 256) + 8_000) as limited:
        with pytest.raises(llamac.OutOfMemoryError, match="are needed: fewer sequences"):
            llamac.Engine(limited, max_sequences=1)
        llamac.Engine(limited, max_sequences=1, prefix_cache=False).close()
