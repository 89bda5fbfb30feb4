"""Beam searches in sessions and engines. tests/export/test_parity_beams.py compares them with transformers."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from held_engines import held

import llamac
from builders import some_ids
from llamac import ArgumentError
from llamac.engine.generation.output import Completion
from processes import TIMEOUT

pytest.importorskip("llguidance")

PROMPT = some_ids(150, seed=5)
SETTINGS: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def guided() -> Iterator[llamac.Model]:
    with llamac.load("stories-gpt2") as model:
        yield model


def search(model: llamac.Model, prompt: Any = PROMPT, **options: Any) -> list[Completion]:
    return model.generate(prompt, **{**SETTINGS, **options}).choices


def log_softmax(model: llamac.Model, ids: list[int]) -> Any:
    """The log probabilities of the token after some ids."""
    logits = model.logits(ids)[-1][: model.n_token_ids].astype(np.float64)
    return logits - np.log(np.exp(logits).sum())


def results(found: list[Completion]) -> list[tuple[list[int], str, str, float | None]]:
    return [(choice.tokens, choice.text, choice.finish_reason, choice.score) for choice in found]


def test_a_wide_search_finds_the_most_probable_sequences(model: llamac.Model) -> None:
    """With as many beams as there are tokens, a search of two steps misses nothing."""
    ids = PROMPT[:20]
    first = log_softmax(model, ids)
    best = np.argsort(-first)[:20].tolist()
    scores = {
        (one, two): first[one] + after
        for one in best
        for two, after in enumerate(log_softmax(model, [*ids, one]).tolist())
    }
    expected = sorted(scores, key=lambda pair: -scores[pair])[:3]
    found = search(model, ids, beam_width=20, n=3, max_tokens=2)
    assert [tuple(choice.tokens) for choice in found] == expected
    assert [choice.score for choice in found] == pytest.approx([scores[pair] / 2 for pair in expected], abs=1e-4)
    assert model.kv_bytes == 0


def test_a_search_is_the_same_in_sessions_and_engines(model: llamac.Model) -> None:
    expected = results(search(model, beam_width=4, n=4))
    assert len(expected) == 4
    with model.session() as session:
        assert results(session.generate(PROMPT, beam_width=4, n=2, **SETTINGS).choices) == expected[:2]
        assert session.tokens() == PROMPT[:-1]
    for cache in (True, False):
        with llamac.Engine(model, max_sequences=6, prefix_cache=cache) as engine:
            requests = [engine.submit(PROMPT, beam_width=4, n=4, **SETTINGS) for _ in range(3)]
            others = [engine.submit(some_ids(50, seed=i), seed=i, **SETTINGS) for i in range(4)]
            for request in requests:
                assert results(request.result(TIMEOUT).choices) == expected
            for i, request in enumerate(others):
                assert request.result(TIMEOUT).tokens == model.generate(some_ids(50, seed=i), seed=i, **SETTINGS).tokens
    assert model.kv_bytes == 0


def test_windowed_models_search(windowed: llamac.Model) -> None:
    prompt = some_ids(700, seed=2)
    expected = results(search(windowed, prompt, beam_width=3, n=3))
    with llamac.Engine(windowed, max_sequences=3) as engine:
        found = engine.submit(prompt, beam_width=3, n=3, **SETTINGS).result(TIMEOUT)
    assert results(found.choices) == expected


def test_a_search_that_pauses_is_unchanged(model: llamac.Model) -> None:
    options: Any = {"beam_width": 4, "n": 4, "max_tokens": 70, "ignore_eos": True}
    with llamac.Engine(model, max_sequences=12, kv_tokens=512, prefix_cache=False) as engine:
        with held(engine):
            requests = [engine.submit(some_ids(60, seed=i), **options) for i in range(3)]
        found = [request.result(TIMEOUT) for request in requests]
        assert engine.stats().preemptions > 0
    for i, completion in enumerate(found):
        assert results(completion.choices) == results(search(model, some_ids(60, seed=i), **options))


def test_a_search_that_does_not_fit_the_memory_fails_alone(model: llamac.Model) -> None:
    with llamac.Engine(model, max_sequences=8, kv_tokens=256, prefix_cache=False, context=256) as engine:
        request = engine.submit(some_ids(60, seed=1), beam_width=8, max_tokens=150, ignore_eos=True)
        with pytest.raises(llamac.OutOfMemoryError):
            request.result(TIMEOUT)
        assert engine.submit(some_ids(60, seed=1), **SETTINGS).result(TIMEOUT).tokens
    assert model.kv_bytes == 0


def test_beams_have_log_probabilities(model: llamac.Model) -> None:
    for choice in search(model, beam_width=3, n=3, logprobs=2, prompt_logprobs=0):
        assert choice.logprobs is not None
        assert [entry.token for entry in choice.logprobs] == choice.tokens
        total = math.fsum(entry.logprob for entry in choice.logprobs)
        assert choice.score == pytest.approx(total / len(choice.tokens), abs=1e-6)
        assert len(choice.logprobs[0].top) == 2
        assert choice.prompt_logprobs is not None
        assert len(choice.prompt_logprobs) == len(PROMPT)


def test_stop_strings_end_beams(model: llamac.Model) -> None:
    texts = [choice.text for choice in search(model, beam_width=4, n=4)]
    stop = texts[0][3:5]
    found = search(model, beam_width=4, n=4, stop=stop)
    assert any(choice.stopped_by == stop for choice in found)
    for choice in found:
        assert stop not in choice.text
        assert (choice.finish_reason == "stop") == (choice.stopped_by == stop)


def test_processors_change_the_log_probabilities_of_beams(model: llamac.Model) -> None:
    def only_even(ids: Any, row: Any) -> None:
        assert ids[: len(PROMPT)].tolist() == PROMPT
        assert np.isclose(np.exp(row.astype(float)).sum(), 1, atol=1e-4)
        row[1::2] = -np.inf

    for choice in search(model, beam_width=3, n=3, logits_processors=only_even):
        assert all(token % 2 == 0 for token in choice.tokens)


def test_a_processor_must_not_make_a_beam_infinitely_probable(model: llamac.Model) -> None:
    def infinite(ids: Any, row: Any) -> None:
        row[7] = np.inf

    with pytest.raises(llamac.ArgumentError, match="a logit is infinite, after the logits processors"):
        search(model, beam_width=2, logits_processors=infinite)


def best_texts(model: llamac.Model, ids: list[int], texts: dict[tuple[int, ...], float]) -> list[tuple[int, ...]]:
    """Sequences of tokens, best first, by the mean of their log probabilities."""
    for tokens in texts:
        each = [log_softmax(model, [*ids, *tokens[:i]])[token] for i, token in enumerate(tokens)]
        texts[tokens] = math.fsum(each) / len(each)
    return sorted(texts, key=lambda tokens: -texts[tokens])


def test_a_guide_restricts_a_search(guided: llamac.Model) -> None:
    """The search is wide enough to consider every sequence of tokens that makes a text of the guide."""
    texts = ["yes", "no", "maybe", "never"]
    ids = guided.tokenizer.encode("Is it")
    found = search(guided, ids, beam_width=32, n=4, guide=llamac.Choice(texts), max_tokens=10)
    assert {choice.text for choice in found} <= set(texts)
    assert {choice.finish_reason for choice in found} == {"stop"}
    scores = dict.fromkeys((tuple(choice.tokens) for choice in found), 0.0)
    assert [tuple(choice.tokens) for choice in found] == best_texts(guided, ids, scores)
    assert [choice.score for choice in found] == pytest.approx(sorted(scores.values(), reverse=True), abs=1e-4)
    with llamac.Engine(guided, max_sequences=32) as engine:
        request = engine.submit(ids, beam_width=32, n=4, guide=llamac.Choice(texts), max_tokens=10)
        other = engine.submit(ids, guide=llamac.Regex("[a-z]{5}"), seed=1)
        assert results(request.result(TIMEOUT).choices) == results(found)
        assert len(other.result(TIMEOUT).text) == 5


def test_a_guided_search_completes_its_texts(guided: llamac.Model) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    for choice in search(guided, "A", beam_width=3, n=3, guide=llamac.Json(schema), max_tokens=24):
        assert isinstance(json.loads(choice.text)["name"], str)
        assert choice.finish_reason == "stop"


def test_banned_strings_are_in_no_sequence(guided: llamac.Model) -> None:
    text = search(guided, "One day", beam_width=4)[0].text
    banned = [text[2:4], text[7:12]]
    for choice in search(guided, "One day", beam_width=4, n=4, banned_strings=banned):
        assert len(choice.tokens) == SETTINGS["max_tokens"]
        assert not any(string in choice.text for string in banned)


def test_a_search_without_any_token_says_so(guided: llamac.Model) -> None:
    letters = [token for token in range(guided.n_token_ids) if guided.tokenizer.token_bytes(token) == b"a"]
    with pytest.raises(ArgumentError, match="no sequence left: the guide and the bans exclude every token"):
        search(guided, "b", beam_width=2, guide=llamac.Regex("a"), banned_tokens=letters)


@pytest.mark.parametrize("penalty", [1.0, 0.0])
def test_a_search_that_stops_later_finds_sequences_at_least_as_good(model: llamac.Model, penalty: float) -> None:
    """True stops the same search first, "never" last. Without a penalty on length, no longer sequence is better."""
    options: dict[str, Any] = {"stop_token_ids": range(5, model.n_token_ids, 3), "length_penalty": penalty}
    rules = (True, False, "never")
    found = [search(model, beam_width=3, n=3, max_tokens=20, early_stopping=rule, **options) for rule in rules]
    assert all(choice.stopped_by in options["stop_token_ids"] for choices in found for choice in choices)
    scores = np.array([[choice.score for choice in choices] for choices in found])
    assert (scores[:-1] <= scores[1:]).all()
    assert ((scores[:-1] < scores[1:]).any(axis=1) == (penalty > 0)).all()


def test_a_cancelled_search_keeps_its_best_sequences(model: llamac.Model) -> None:
    with llamac.Engine(model) as engine:
        with held(engine, after=10) as is_held:
            request = engine.submit(PROMPT, beam_width=3, n=2, max_tokens=1000, ignore_eos=True)
            assert is_held.wait(TIMEOUT)
            request.cancel()
        found = request.result(TIMEOUT)
        assert [choice.finish_reason for choice in found.choices] == ["cancelled"] * 2
        assert found.tokens
        assert found.score is not None
        late = engine.submit(PROMPT, beam_width=3, deadline=0.02, max_tokens=1000, ignore_eos=True).result(TIMEOUT)
        assert late.finish_reason == "deadline"
        never = engine.submit(PROMPT, beam_width=3)
        engine.close()
        assert never.result(TIMEOUT).finish_reason in ("cancelled", "stop")
    assert model.kv_bytes == 0


def test_no_text_of_a_search_is_known_before_its_end(model: llamac.Model) -> None:
    async def main() -> Completion:
        async with llamac.AsyncEngine(model) as engine:
            request = engine.submit(PROMPT, beam_width=2, **SETTINGS)
            with pytest.raises(ArgumentError, match="a beam search has no text before its end"):
                async for _ in request:
                    pass
            with pytest.raises(ArgumentError, match="a beam search has no text before its end"):
                next(request)
            assert request.candidates == [request]
            return await request

    assert asyncio.run(main()).tokens == search(model, beam_width=2)[0].tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_width": 2, "n": 3}, "n is 3, expected at most beam_width, which is 2"),
        ({"beam_width": 3, "best_of": 3}, "best_of and beam_width cannot be combined"),
        ({"beam_width": 3, "temperature": 0.7}, "not support temperature, because nothing is drawn: omit it"),
        ({"beam_width": 3, "reasoning_budget": 7}, "not support reasoning_budget, because it forces tokens"),
        ({"beam_width": 3, "context_overflow": "shift"}, "beam search does not support context_overflow='shift'"),
        ({"early_stopping": "soon"}, "early_stopping is 'soon', expected True, False or 'never'"),
        ({"early_stopping": 1}, "early_stopping must be True or False"),
        ({"length_penalty": 1000}, "length_penalty is 1000, expected -100 to 100"),
    ],
)
def test_wrong_parameters_are_refused(model: llamac.Model, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        model.generate(PROMPT, **options)
    with llamac.Engine(model, max_sequences=2) as engine, pytest.raises(ArgumentError, match="max_sequences"):
        engine.submit(PROMPT, beam_width=3)
    assert model.generate(PROMPT, beam_width=1, temperature=0.5, max_tokens=3).tokens
