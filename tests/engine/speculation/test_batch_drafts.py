"""Drafts in an engine: every request gets the tokens that it would get alone without drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import llamac
from builders import checkpoint, llama_config, some_ids, write_model
from llamac.engine.speculation import batch_drafts, draft_plan
from llamac.engine.speculation.draft_plan import RowCosts
from llamac.engine.speculation.lookup import Lookup
from llamac.errors import ArgumentTypeError
from prophet import Prophet

Options = dict[str, Any]


@pytest.fixture
def prophet(monkeypatch: pytest.MonkeyPatch) -> Prophet:
    """Drafts from the first step on, whatever they cost."""
    found = Prophet(part_right=0.8, most=6)
    found.install(monkeypatch)
    return found


def expected_of(model: llamac.Model, prophet: Prophet, prompts: list[list[int]], options: list[Options]) -> list[Any]:
    """The results alone, without drafts."""
    found = []
    for prompt, chosen in zip(prompts, options, strict=True):
        with model.session() as session:
            found.append(session.generate(prompt, speculation=False, **chosen))
        prophet.known[tuple(prompt)] = found[-1].tokens
    return found


def check(engine: llamac.Engine, prompts: list[list[int]], options: list[Options], expected: list[Any]) -> int:
    """Submit all; compare; return the number of accepted drafts."""
    requests = [engine.submit(prompt, **chosen) for prompt, chosen in zip(prompts, options, strict=True)]
    accepted = 0
    for request, alone in zip(requests, expected, strict=True):
        found = request.result(60)
        assert found.tokens == alone.tokens
        assert (found.text, found.finish_reason, found.stopped_by) == (
            alone.text,
            alone.finish_reason,
            alone.stopped_by,
        )
        assert found.logprobs == alone.logprobs
        assert found.usage.accepted_tokens <= found.usage.drafted_tokens
        accepted += found.usage.accepted_tokens
    return accepted


SETTINGS: list[Options] = [
    {"temperature": 0},
    {"temperature": 1.0, "repetition_penalty": 1.2, "logprobs": 2},
    {"temperature": 0.7, "top_p": 0.9, "stop_token_ids": list(range(0, 280, 9)), "min_tokens": 10},
    {"temperature": 1.0, "mirostat_tau": 4.0},
    {"temperature": 0.8, "dry_multiplier": 0.8, "context_overflow": "shift", "context_keep": 4},
    {"temperature": 0.8, "reasoning_budget": 5},
]


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("part_right", [0.0, 0.8, 1.0])
def test_requests_get_the_tokens_that_they_get_alone(
    model: llamac.Model, prophet: Prophet, n: int, part_right: float
) -> None:
    prophet.part_right = part_right
    prompts = [some_ids(20 + 30 * i, seed=i) for i in range(len(SETTINGS))]
    options = [{"max_tokens": 30 + 7 * i, "seed": i, **chosen} for i, chosen in enumerate(SETTINGS)]
    expected = expected_of(model, prophet, prompts, options)
    with llamac.Engine(model, max_sequences=n) as engine:
        accepted = 0
        for start in range(0, len(prompts), n):
            some = slice(start, start + n)
            accepted += check(engine, prompts[some], options[some], expected[some])
        if part_right:
            assert accepted > 0
        rounds = check(engine, prompts[:1], options[:1], expected[:1])  # with the prefix that the cache kept
        assert rounds >= 0


def test_windows_and_a_small_cache(windowed: llamac.Model, prophet: Prophet) -> None:
    prompts = [some_ids(150 + i, seed=i) for i in range(3)]
    options: list[Options] = [{"max_tokens": 90, "temperature": 0.9, "seed": i} for i in range(3)]
    expected = expected_of(windowed, prophet, prompts, options)
    with llamac.Engine(windowed, max_sequences=3) as engine:
        assert check(engine, prompts, options, expected) > 0
    with llamac.Engine(windowed, max_sequences=3, kv_tokens=600) as engine:
        check(engine, prompts, options, expected)


def test_a_pass_without_memory_for_drafts_is_computed_without(
    model: llamac.Model, prophet: Prophet, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, options = [some_ids(70)], [{"max_tokens": 50, "temperature": 0, "seed": 1}]
    expected = expected_of(model, prophet, prompts, options)
    refused = []

    def refuse(self: llamac.Session, packed: Any, *arguments: Any) -> None:
        refused.append(len(packed))
        raise llamac.OutOfMemoryError("no pages")

    monkeypatch.setattr(llamac.Session, "_compute_drafts", refuse)
    with llamac.Engine(model, max_sequences=2) as engine:
        assert check(engine, prompts, options, expected) == 0
    assert refused


def test_many_requests_and_those_that_do_not_want_it_get_no_drafts(model: llamac.Model, prophet: Prophet) -> None:
    prompts = [some_ids(20, seed=i) for i in range(batch_drafts.MAX_REQUESTS + 1)]
    options: list[Options] = [{"max_tokens": 20, "temperature": 0, "seed": 1}] * len(prompts)
    expected = expected_of(model, prophet, prompts, options)
    with llamac.Engine(model, max_sequences=8) as engine:
        found = engine.generate(prompts, max_tokens=20, temperature=0, seed=1)
        assert [each.tokens for each in found] == [each.tokens for each in expected]
        off = engine.submit(prompts[0], max_tokens=20, temperature=0, speculation=False).result(60)
        assert off.usage.drafted_tokens == 0
        assert off.tokens == expected[0].tokens


# ---- draft models


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of a draft model whatever they cost."""

    def count(rate: Any, costs: list[float], credit: float, most: int, requests: int) -> tuple[int, float]:
        return min(most, 5), 2.0

    monkeypatch.setattr(RowCosts, "is_known", True)
    monkeypatch.setattr(RowCosts, "step", 0.01)
    monkeypatch.setattr(draft_plan, "best_count", count)
    monkeypatch.setattr(Lookup, "length", property(lambda self: 0, lambda self, value: None), raising=False)


def small_model(tmp_path: Path, **changes: Any) -> Path:
    config = replace(llama_config(dim=24, n_heads=2, n_kv_heads=1, n_layers=1), **changes)
    return write_model(tmp_path / "small.bin", checkpoint(config))


@pytest.mark.parametrize("n", [1, 3, 4])
@pytest.mark.parametrize("is_equal", [True, False])
@pytest.mark.usefixtures("always")
def test_a_draft_model_changes_no_token(tiny_llama: Path, tmp_path: Path, n: int, is_equal: bool) -> None:
    path = tiny_llama if is_equal else small_model(tmp_path)
    with llamac.load(path) as draft, llamac.load(tiny_llama) as model:
        prompts = [some_ids(20 + 60 * i, seed=i) for i in range(2 * n)]
        options = [
            {"max_tokens": 40, "seed": i, "ignore_eos": True, "temperature": i % 3 / 2} for i in range(len(prompts))
        ]
        expected = [
            model.generate(prompt, speculation=False, **chosen) for prompt, chosen in zip(prompts, options, strict=True)
        ]
        with llamac.Engine(model, max_sequences=n, draft_model=draft) as engine:
            accepted = check(engine, prompts, options, expected)
            stats = engine.stats()
            assert stats.accepted_tokens == accepted
            assert stats.drafted_tokens > accepted or is_equal
            assert stats.drafted_tokens >= accepted >= (20 * n if is_equal else 0)  # the last requests'
            assert engine.memory().draft > draft.file.header["file_bytes"]
        assert draft.kv_bytes == 0


@pytest.mark.usefixtures("always")
def test_an_engine_uses_the_draft_model_of_load(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama, draft_model=tiny_llama) as model, llamac.Engine(model) as engine:
        assert engine.submit(some_ids(20), max_tokens=30, temperature=0).result(60).usage.accepted_tokens > 10


@pytest.mark.usefixtures("always")
def test_a_draft_model_with_a_short_context_or_closed_ends_the_drafts(tiny_llama: Path, tmp_path: Path) -> None:
    prompt, options = some_ids(30), {"max_tokens": 60, "temperature": 0, "seed": 1}
    with llamac.load(small_model(tmp_path, context=50)) as draft, llamac.load(tiny_llama) as model:
        expected = model.generate(prompt, speculation=False, **options)
        with llamac.Engine(model, draft_model=draft) as engine:
            found = engine.submit(prompt, **options).result(60)
            assert found.tokens == expected.tokens
            assert 0 < found.usage.drafted_tokens <= 5 * 20  # none from position 50 on
            draft.close()
            again = engine.submit(prompt, **options).result(60)
            assert (again.tokens, again.usage.drafted_tokens) == (expected.tokens, 0)


def test_what_is_no_draft_model_is_refused(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model, pytest.raises(ArgumentTypeError, match="draft_model"):
        llamac.Engine(model, draft_model="small.bin")  # type: ignore[arg-type]


@pytest.mark.usefixtures("always")
def test_a_long_prompt_is_read_in_pieces_by_the_draft_model(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other requests wait for each piece."""
    rows: list[int] = []
    before = llamac.Session._run

    def counted(session: llamac.Session, packed: Any, *arguments: Any) -> None:
        if session.model is draft:
            rows.append(len(packed) // 4)
        before(session, packed, *arguments)

    with llamac.load(tiny_llama) as draft, llamac.load(tiny_llama) as model:
        monkeypatch.setattr(llamac.Session, "_run", counted)
        with llamac.Engine(model, draft_model=draft) as engine:
            found = engine.submit(some_ids(200), max_tokens=30, temperature=0).result(60)
        assert found.usage.accepted_tokens > 5
        assert sum(rows) >= 200
        assert max(rows) == batch_drafts.MAX_READ


@pytest.mark.usefixtures("always")
def test_a_cancel_ends_the_draft_models_pass(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = llamac.Session._run

    def cancel_then(session: llamac.Session, *arguments: Any) -> None:
        if session.model is draft:
            request.cancel()
        before(session, *arguments)

    with (
        llamac.load(tiny_llama) as draft,
        llamac.load(tiny_llama) as model,
        llamac.Engine(model, draft_model=draft) as engine,
    ):
        monkeypatch.setattr(llamac.Session, "_run", cancel_then)
        request = engine.submit(some_ids(20), max_tokens=1000, temperature=0, ignore_eos=True)
        assert request.result(60).finish_reason == "cancelled"
        monkeypatch.setattr(llamac.Session, "_run", before)
        assert len(engine.submit(some_ids(20), max_tokens=20, temperature=0).result(60).tokens) == 20


def test_steps_without_drafts_restore_the_budget(model: llamac.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """After wrong drafts, an engine eventually drafts again."""
    left: list[float] = []
    before = batch_drafts.RequestDrafts.follow

    def follow(drafts: batch_drafts.RequestDrafts) -> None:
        if not left:
            drafts.credit.left = -1.0
        before(drafts)
        left.append(drafts.credit.left)

    monkeypatch.setattr(RowCosts, "is_known", True)
    monkeypatch.setattr(RowCosts, "step", 0.01)
    monkeypatch.setattr(batch_drafts.RequestDrafts, "follow", follow)
    with llamac.Engine(model) as engine:
        engine.submit(some_ids(20), max_tokens=100, temperature=1.0, seed=1).result(60)
    assert left[-1] >= -1 + 90 * draft_plan.STEP_CREDIT
