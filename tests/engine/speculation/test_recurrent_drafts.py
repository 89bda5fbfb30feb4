"""Drafts of models with recurrent layers: each draft has a state, so any of them can be the last right one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from recurrent_models import delta_nets, short_convs

import llamac
from builders import some_ids, write_model
from llamac.engine.speculation import draft_plan
from llamac.engine.speculation.draft_plan import RowCosts, max_drafts
from llamac.engine.speculation.lookup import Lookup
from prophet import Prophet, check_drafts, results

PROMPT = some_ids(70)
OTHER = some_ids(90, seed=3)


@pytest.fixture(scope="module", params=[delta_nets, short_convs], ids=["delta_nets", "short_convs"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[llamac.Model]:
    with llamac.load(write_model(tmp_path_factory.mktemp("recurrent") / "model.bin", request.param())) as model:
        yield model


@pytest.fixture
def prophet(monkeypatch: pytest.MonkeyPatch) -> Prophet:
    """Drafts from the first step on, whatever they cost."""
    found = Prophet(part_right=0.75, most=9)
    found.install(monkeypatch)
    return found


@pytest.mark.parametrize("part_right", [0.0, 0.75, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_nothing(model: llamac.Model, prophet: Prophet, part_right: float, temperature: float) -> None:
    prophet.part_right = part_right
    found = check_drafts(model, prophet, PROMPT, max_tokens=250, temperature=temperature, seed=4, ignore_eos=True)
    usage = found.usage
    assert usage.drafted_tokens > 100
    assert usage.accepted_tokens == usage.drafted_tokens * part_right or part_right == 0.75
    assert usage.accepted_tokens > 0 or part_right == 0.0


def test_a_tree_has_the_bits_of_its_paths(model: llamac.Model) -> None:
    ids, parents = [5, 6, 7, 8, 9, 10, 11, 12], [-1, 0, 1, 1, 0, -1, 5, -1]
    paths = [[5], [5, 6], [5, 6, 7], [5, 6, 8], [5, 9], [10], [10, 11], [12]]
    for length in (0, 1, 70):
        with model.session(sequences=2) as session:
            if length:
                session.eval(PROMPT[:length], logits=None, sequence=1)
            found = session.eval_drafts(ids, parents, sequence=1)
            for draft, path in enumerate(paths):
                np.testing.assert_array_equal(found[draft], model.logits([*PROMPT[:length], *path])[-1])
            for draft in (7, 3, 1, 2):  # any number of drafts can be accepted in turn
                session.accept(draft)
                assert session.tokens(1) == [*PROMPT[:length], *paths[draft]]
            expected = model.logits([*PROMPT[:length], 5, 6, 7, 4])[-1]
            np.testing.assert_array_equal(session.eval([4], sequence=1), expected)


def test_requests_of_an_engine_get_the_tokens_that_they_get_alone(model: llamac.Model, prophet: Prophet) -> None:
    prompts = [PROMPT, OTHER, PROMPT[:60]]
    options: dict[str, Any] = {"max_tokens": 60, "temperature": 0.9, "seed": 2, "ignore_eos": True}
    expected = [model.generate(prompt, speculation=False, **options).tokens for prompt in prompts]
    prophet.known = {tuple(prompt): tokens for prompt, tokens in zip(prompts, expected, strict=True)}
    with llamac.Engine(model) as engine:
        requests = [engine.submit(prompt, **options) for prompt in prompts]
        found = [request.result(60) for request in requests]
    assert [each.tokens for each in found] == expected
    assert all(each.usage.accepted_tokens > 20 for each in found)


def test_drafts_take_no_memory_that_others_need(model: llamac.Model, prophet: Prophet) -> None:
    expected = model.generate(PROMPT, max_tokens=60, temperature=0, seed=1, speculation=False)
    prophet.known[tuple(PROMPT)], prophet.part_right = expected.tokens, 1.0
    with model.session() as session:
        session.eval(PROMPT, logits=None)
        before = session.memory()["kv"]
        session.eval(expected.tokens, logits=None)
        model.kv_budget = 2 * session.memory()["kv"] - before  # less than the states of drafts
        session.truncate(0)
        found = session.generate(PROMPT, max_tokens=60, temperature=0, seed=1)
        assert results(found) == results(expected)
        assert found.usage.drafted_tokens == 0
    model.kv_budget = None


def test_large_states_allow_few_drafts(model: llamac.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with model.session() as session:
        assert max_drafts(session._core) > 16
        monkeypatch.setattr(draft_plan, "state_bytes", lambda core: 40 << 20)
        assert max_drafts(session._core) == 6
        monkeypatch.setattr(draft_plan, "state_bytes", lambda core: 100 << 20)
        assert max_drafts(session._core) == 4


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of a draft model whatever they cost."""
    monkeypatch.setattr(RowCosts, "is_known", True)
    monkeypatch.setattr(RowCosts, "step", 0.01)
    monkeypatch.setattr(draft_plan, "best_count", lambda rate, costs, credit, most, requests: (min(most, 6), 2.0))
    monkeypatch.setattr(Lookup, "length", property(lambda self: 0, lambda self, value: None), raising=False)


@pytest.mark.usefixtures("always")
def test_a_recurrent_draft_model_computes_each_token_of_a_text_once(
    model: llamac.Model, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes wrong drafts in a fork. Otherwise it would compute up to 256 tokens again after each."""
    path = write_model(tmp_path_factory.mktemp("draft") / "draft.bin", delta_nets())
    options: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "ignore_eos": True}
    with llamac.load(path) as draft, llamac.Engine(model, draft_model=draft) as engine:
        computed = 0
        before = llamac.Session._run

        def counting(session: llamac.Session, rows: Any, *arguments: Any) -> None:
            nonlocal computed
            computed += len(rows) // 4 if session.model is draft else 0
            before(session, rows, *arguments)

        monkeypatch.setattr(llamac.Session, "_run", counting)
        with model.session(draft_model=draft) as session:
            for make in (session.generate, lambda prompt, **each: engine.submit(prompt, **each).result(60)):
                for seed in range(2):
                    expected = model.generate(PROMPT, seed=seed, **options, speculation=False)
                    computed = 0
                    found = make(PROMPT, seed=seed, **options)
                    assert found.tokens == expected.tokens
                    usage = found.usage
                    assert usage.drafted_tokens > 0
                    assert computed <= len(PROMPT) + len(expected.tokens) + usage.drafted_tokens
