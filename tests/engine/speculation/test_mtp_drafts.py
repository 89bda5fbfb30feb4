"""Drafts of a model's MTP layer: results stay the same, and known layers predict everything or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mtp_models import (
    attention_config,
    attention_model,
    continue_cyclic,
    cyclic,
    latent_config,
    latent_model,
    mtp_model,
    mtp_reference,
    post_config,
)

import llamac
from builders import some_ids, write_model
from llamac import _core
from llamac.engine.memory import plan_memory
from llamac.engine.rows import appended_rows, as_ids
from llamac.engine.session import Session
from llamac.engine.speculation import head
from llamac.engine.speculation.mtp import MtpDrafter
from llamac.export.checkpoint import ModelConfig
from prophet import draft_with_models, results

PROMPT = some_ids(70)
MOST = 5  # drafts of a pass


MODELS = {"recurrent": mtp_model, "attention": attention_model, "latent": latent_model}


@pytest.fixture(scope="module", params=MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[llamac.Model]:
    with llamac.load(write_model(tmp_path_factory.mktemp("mtp") / "model.bin", MODELS[kind]())) as model:
        yield model


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_with_models(monkeypatch, MOST)


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0, "seed": 2},
    {"temperature": 0.3, "seed": 3},
    {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.2, "logprobs": 2},
    {"temperature": 0.8, "seed": 5, "stop_token_ids": list(range(0, 280, 19)), "min_tokens": 10},
]


@pytest.mark.parametrize("options", SETTINGS, ids=lambda options: f"{options['temperature']}")
def test_drafts_change_nothing(model: llamac.Model, options: dict[str, Any]) -> None:
    with model.session() as plain, model.session() as drafting:
        expected = plain.generate(PROMPT, max_tokens=90, speculation=False, **options)
        found = drafting.generate(PROMPT, max_tokens=90, **options)
        assert results(found) == results(expected)
        assert found.usage.drafted_tokens > 0
        assert expected.usage.drafted_tokens == 0
        assert drafting.tokens() == plain.tokens()
        assert drafting.eval([3]).tobytes() == plain.eval([3]).tobytes()


def test_drafts_are_those_of_the_definition(kind: str, model: llamac.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are (token at i + 1, hidden state at i) from the text's first position on; drafts go on from their own
    hidden states.
    """
    made = MODELS[kind]()
    calls: list[tuple[list[int], list[int]]] = []
    draft = MtpDrafter.draft

    def recording(self: MtpDrafter, ids: Any, n: int, sampling: Any) -> list[int]:
        calls.append((list(ids), found := draft(self, ids, n, sampling)))
        return found

    monkeypatch.setattr(MtpDrafter, "draft", recording)
    model.generate(PROMPT, max_tokens=12, temperature=0, ignore_eos=True)
    assert len(calls) > 3
    assert all(found for _, found in calls)
    for ids, found in calls:
        hidden = np.empty((len(ids) - 1, model.config["dim"]), np.float32)
        with model.session() as session:
            session._core.eval_rows(appended_rows(as_ids(ids[:-1]), 0, 0, "last"), hidden=hidden.data)
        states, tokens = hidden.astype(np.float64), ids[1:]
        for token in found:
            own, logits = mtp_reference(made, tokens, states)
            best = np.argsort(logits[-1, : model.n_token_ids])[-2:]
            assert token == best[1] or logits[-1, best[1]] - logits[-1, token] < 1e-3
            states, tokens = np.vstack([states, own[-1:]]), [*tokens, token]


def test_tokens_that_were_not_computed_again_have_no_hidden_states(
    model: llamac.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`prompt_logprobs` computes the prompt before, without hidden states."""
    prefilled: list[int] = []
    kept: list[tuple[int, int]] = []
    prefill_missing, keep = Session._prefill_missing, MtpDrafter.keep

    def noting(self: Session, *arguments: Any) -> int:
        prefilled.append(prefill_missing(self, *arguments))
        return prefilled[-1]

    def recording(self: MtpDrafter, place: int, states: Any, first: int, n: int) -> None:
        kept.append((place, n))
        keep(self, place, states, first, n)

    monkeypatch.setattr(Session, "_prefill_missing", noting)
    monkeypatch.setattr(MtpDrafter, "keep", recording)
    found = model.generate(PROMPT, max_tokens=9, temperature=0, prompt_logprobs=0)
    assert prefilled == [found.usage.prompt_tokens - kept[0][1]]
    assert prefilled == [kept[0][0]]
    assert prefilled[0] > 0
    assert found.usage.cached_tokens == 0


@pytest.mark.parametrize("context", [80, 120, 300, 600])
def test_small_contexts_change_nothing(model: llamac.Model, context: int) -> None:
    options: dict[str, Any] = {"max_tokens": 600, "temperature": 0, "seed": 1, "ignore_eos": True}
    with model.session(context=context) as session:
        found = session.generate(PROMPT, **options)
        expected = session.generate(PROMPT, speculation=False, **options)
    assert results(found) == results(expected)
    assert found.usage.drafted_tokens > context - 80


@pytest.fixture(scope="module")
def knowing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[llamac.Model]:
    """A model whose MTP layer predicts every token."""
    with llamac.load(write_model(tmp_path_factory.mktemp("knowing") / "model.bin", cyclic(7))) as model:
        yield model


@pytest.mark.parametrize("config", [attention_config, latent_config, post_config])
@pytest.mark.parametrize(("step", "accepted"), [(7, True), (8, False)])
def test_a_layer_that_knows_the_text_has_all_drafts_accepted_and_a_wrong_one_none(
    config: Callable[[], ModelConfig], step: int, accepted: bool, tmp_path: Path
) -> None:
    with llamac.load(write_model(tmp_path / "model.bin", cyclic(step, config()))) as model:
        found = model.generate([5], max_tokens=61, temperature=0, ignore_eos=True)
        assert found.tokens == [(12 + 7 * i) % model.n_token_ids for i in range(61)]
    if accepted:
        assert found.usage.drafted_tokens == found.usage.accepted_tokens == 50  # 5 of 6 tokens; the first has none
    else:
        assert found.usage.accepted_tokens == 0
        assert found.usage.drafted_tokens > 250


def test_a_session_goes_on_with_the_layer(knowing: llamac.Model) -> None:
    """A text that continues the last one, one that parts from it, a fork, and sessions that others have changed."""
    with knowing.session() as session:
        text = continue_cyclic(session, PROMPT)
        text = continue_cyclic(session, text)
        text = continue_cyclic(session, [*text[:80], 9, 9])
        session.truncate(10)
        continue_cyclic(session, text)
        with session.fork(length=60) as fork:
            continue_cyclic(fork, text[:75])
        session.truncate(0)
        session.prefill(PROMPT[::-1])
        continue_cyclic(session, [*PROMPT[::-1], 4])


def test_a_long_text_begins_again(knowing: llamac.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full sequence of the layer, and a prompt longer than the hidden states that are kept."""
    monkeypatch.setattr(head, "CONTEXT", 290)
    prompt = some_ids(400)
    found = knowing.generate(prompt, max_tokens=301, temperature=0, ignore_eos=True)
    assert found.usage.accepted_tokens == found.usage.drafted_tokens == 250


def test_a_shifted_context_has_drafts(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_tokens": 200, "temperature": 0, "seed": 1, "ignore_eos": True}
    options["context_overflow"] = "shift"
    with llamac.load(write_model(tmp_path / "model.bin", cyclic(7))) as model, model.session(context=100) as session:
        found = session.generate(PROMPT, **options)
        expected = session.generate(PROMPT, speculation=False, **options)
    assert results(found) == results(expected)
    assert found.usage.accepted_tokens > 100


@pytest.mark.parametrize("n", [1, 3, 4])
def test_requests_of_an_engine_get_the_tokens_that_they_get_alone(model: llamac.Model, n: int) -> None:
    prompts = [some_ids(20 + 30 * i, seed=i) for i in range(6)]
    options = [{"max_tokens": 30, **SETTINGS[i % len(SETTINGS)]} for i in range(6)]
    expected = [
        model.generate(prompt, speculation=False, **chosen) for prompt, chosen in zip(prompts, options, strict=True)
    ]
    with llamac.Engine(model, max_sequences=n) as engine:
        requests = [engine.submit(prompt, **chosen) for prompt, chosen in zip(prompts, options, strict=True)]
        for request, alone in zip(requests, expected, strict=True):
            assert results(request.result(60))[:4] == results(alone)[:4]
        assert engine.stats().drafted_tokens > 0


def test_an_engine_has_all_drafts_accepted_of_a_layer_that_knows_the_texts(knowing: llamac.Model) -> None:
    options: dict[str, Any] = {"max_tokens": 61, "temperature": 0, "ignore_eos": True}
    with llamac.Engine(knowing, max_sequences=2) as engine:
        for prompts in ([PROMPT], [some_ids(30), some_ids(500)], [PROMPT]):  # the last from the prefix cache
            for request in [engine.submit(prompt, **options) for prompt in prompts]:
                usage = request.result(60).usage
                assert usage.accepted_tokens > 30
        stats = engine.stats()
        assert stats.accepted_tokens == stats.drafted_tokens


def test_a_cancelled_plan_is_made_again(knowing: llamac.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer has drafted for a request when another one is cancelled: the next step drafts for the same text."""
    calls: list[list[int]] = []
    draft = MtpDrafter.draft

    def cancelled(self: MtpDrafter, ids: Any, n: int, sampling: Any) -> list[int]:
        calls.append(found := draft(self, ids, n, sampling))
        if len(calls) in (2, 5):
            raise llamac.CancelledError("cancelled", 0)
        return found

    options: dict[str, Any] = {"max_tokens": 61, "temperature": 0, "ignore_eos": True}
    expected = knowing.generate(PROMPT, **options)
    monkeypatch.setattr(MtpDrafter, "draft", cancelled)
    with llamac.Engine(knowing) as engine:
        found = engine.submit(PROMPT, **options).result(60)
    assert found.tokens == expected.tokens
    assert found.usage.accepted_tokens == expected.usage.accepted_tokens
    assert calls[1] == calls[2]
    assert calls[4] == calls[5]


def test_a_draft_model_comes_first(knowing: llamac.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MtpDrafter, "draft", lambda self, ids, n, sampling: pytest.fail("the MTP layer made drafts"))
    with llamac.load(write_model(tmp_path / "draft.bin", cyclic(7).without_mtp())) as draft:
        with knowing.session(draft_model=draft) as session:
            found = session.generate([5], max_tokens=31, temperature=0, ignore_eos=True)
        with llamac.Engine(knowing, draft_model=draft) as engine:
            assert engine.submit([5], max_tokens=31, temperature=0, ignore_eos=True).result(60).tokens == found.tokens
    assert found.usage.accepted_tokens == found.usage.drafted_tokens == 25


def test_a_layer_without_memory_ends_drafts(knowing: llamac.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise llamac.OutOfMemoryError("no memory")

    options: dict[str, Any] = {"max_tokens": 31, "temperature": 0, "ignore_eos": True}
    expected = knowing.generate(PROMPT, **options)
    monkeypatch.setattr(head, "open_head", refuse)
    found = knowing.generate(PROMPT, **options)
    with llamac.Engine(knowing) as engine:
        other = engine.submit(PROMPT, **options).result(60)
    assert found.tokens == other.tokens == expected.tokens
    assert (found.usage.drafted_tokens, other.usage.drafted_tokens) == (0, 0)


def test_memory_counts_the_layer(knowing: llamac.Model) -> None:
    with knowing.session() as session:
        assert knowing.memory().draft == 0
        session.generate(PROMPT, max_tokens=20, temperature=0, ignore_eos=True)
        used = knowing.memory().draft
    assert knowing.memory().draft == 0
    planned = plan_memory(knowing, None, knowing.config["context"])
    assert 0 < used <= planned.draft
    assert "drafts" in "\n".join(planned.lines())


def test_under_a_limit_the_layer_leaves_room_for_the_whole_context(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.bin", cyclic(7))
    options: dict[str, Any] = {"max_tokens": 31, "temperature": 0, "ignore_eos": True}
    with llamac.load(path) as model, model.session() as session:
        enough = model._memory.fixed() + _core.memory_limits(session._core, session.context)[1]
    drafted = []
    for limit in (enough - 1, enough):
        with llamac.load(path, max_memory=limit) as model, model.session() as session:
            drafted.append(session.generate(PROMPT, **options).usage.drafted_tokens)
    assert drafted == [0, 25]
