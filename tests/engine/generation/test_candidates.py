"""Several candidates of a request: each is what it would be alone, and the prompt is computed once."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from held_engines import held

import llamac
from builders import some_ids
from llamac import ArgumentError, SamplingParams
from llamac.engine.generation.candidates import combined
from llamac.engine.generation.output import Completion, FinishReason
from llamac.engine.generation.stream import resolved_params
from llamac.engine.session import Session
from processes import TIMEOUT

SETTINGS: dict[str, Any] = {"max_tokens": 12, "seed": 3, "temperature": 1.3, "ignore_eos": True}
PROMPT = some_ids(150, seed=5)


def alone(model: llamac.Model, n: int, prompt: Any = PROMPT, **options: Any) -> list[Completion]:
    """The candidates, generated one by one."""
    with model.session() as session:
        return [session.generate(prompt, **{**SETTINGS, **options}, candidate=i) for i in range(n)]


def assert_same(found: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.tokens, one.text, one.finish_reason) == (other.tokens, other.text, other.finish_reason)
        assert (one.seed, one.candidate) == (other.seed, other.candidate)


def test_candidates_are_those_that_they_would_be_alone(model: llamac.Model) -> None:
    expected = alone(model, 4)
    assert len({tuple(completion.tokens) for completion in expected}) == 4
    found = model.generate(PROMPT, n=4, **SETTINGS)
    assert found.choices[0] is found
    assert_same(found.choices, expected)
    assert_same(model.generate(PROMPT, n=2, **SETTINGS).choices, expected[:2])
    assert_same(model.generate(PROMPT, n=2, candidate=2, **SETTINGS).choices, expected[2:])
    assert expected[0].choices == [expected[0]]
    assert model.kv_bytes == 0


def test_a_prompt_of_one_token_has_candidates(model: llamac.Model) -> None:
    assert_same(model.generate([5], n=3, **SETTINGS).choices, alone(model, 3, [5]))
    with llamac.Engine(model) as engine:
        assert_same(engine.submit([5], n=3, **SETTINGS).result(TIMEOUT).choices, alone(model, 3, [5]))


def test_candidates_tell_what_the_prompt_took(model: llamac.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(session: Session, *arguments: Any) -> int:
        time.sleep(0.2)
        return original(session, *arguments)

    original = Session._prefill_missing
    monkeypatch.setattr(Session, "_prefill_missing", slow)
    most = len(PROMPT) - 1
    with model.session() as session:
        for found, cached in (
            (model.generate(PROMPT, n=3, **SETTINGS), 0),
            (session.generate(PROMPT, n=3, **SETTINGS), 0),
            (session.generate(PROMPT, n=3, **SETTINGS), most - 1),
        ):
            assert [choice.usage.cached_tokens for choice in found.choices] == [cached, most, most]
            assert all(choice.timings.prefill >= 0.2 for choice in found.choices)


def test_a_session_keeps_the_prompt_of_its_candidates(model: llamac.Model) -> None:
    with model.session() as session:
        assert_same(session.generate(PROMPT, n=3, **SETTINGS).choices, alone(model, 3))
        assert session.tokens() == PROMPT[:-1]
        again = session.generate([*PROMPT, 7], n=2, **SETTINGS)
        assert_same(again.choices, alone(model, 2, [*PROMPT, 7]))
        assert session.generate(PROMPT, **SETTINGS).usage.cached_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("sequences", [2, 8])
def test_an_engine_computes_the_prompt_of_candidates_once(
    model: llamac.Model, prefix_cache: bool, sequences: int
) -> None:
    with llamac.Engine(model, max_sequences=sequences, prefix_cache=prefix_cache) as engine:
        found = engine.submit(PROMPT, n=5, **SETTINGS).result(TIMEOUT)
        rows = engine.stats().rows
    assert_same(found.choices, alone(model, 5))
    # each computes the last token of the prompt, and its own tokens but for the last
    assert rows == len(PROMPT) - 1 + 5 * SETTINGS["max_tokens"]


def test_windowed_models_have_candidates(windowed: llamac.Model) -> None:
    prompt = some_ids(700, seed=2)
    assert_same(windowed.generate(prompt, n=3, **SETTINGS).choices, alone(windowed, 3, prompt))
    with llamac.Engine(windowed, max_sequences=2) as engine:
        assert_same(engine.submit(prompt, n=3, **SETTINGS).result(TIMEOUT).choices, alone(windowed, 3, prompt))


def test_candidates_that_pause_are_unchanged(model: llamac.Model) -> None:
    with llamac.Engine(model, max_sequences=8, kv_tokens=256, prefix_cache=False) as engine:
        with held(engine):
            requests = [engine.submit(some_ids(60, seed=i), n=4, **{**SETTINGS, "max_tokens": 60}) for i in range(3)]
        found = [request.result(TIMEOUT) for request in requests]
        assert engine.stats().preemptions > 0
    for i, completion in enumerate(found):
        assert_same(completion.choices, alone(model, 4, some_ids(60, seed=i), max_tokens=60))


def test_candidates_that_shift_their_context_are_unchanged(model: llamac.Model) -> None:
    options: Any = {**SETTINGS, "max_tokens": 90, "context_overflow": "shift"}
    with model.session(context=64) as session:
        expected = [session.generate(some_ids(40, seed=1), candidate=i, **options) for i in range(4)]
        assert_same(session.generate(some_ids(40, seed=1), n=4, **options).choices, expected)
    assert expected[0].usage.shifted_tokens > 0
    with llamac.Engine(model, context=64, max_sequences=2) as engine:
        assert_same(engine.submit(some_ids(40, seed=1), n=4, **options).result(TIMEOUT).choices, expected)


def test_best_of_returns_the_most_probable_candidates(model: llamac.Model) -> None:
    candidates = alone(model, 6, logprobs=0)

    def mean(completion: Completion) -> float:
        assert completion.logprobs is not None
        return sum(entry.logprob for entry in completion.logprobs) / len(completion.logprobs)

    expected = sorted(candidates, key=lambda completion: -mean(completion))
    found = model.generate(PROMPT, n=2, best_of=6, **SETTINGS)
    assert_same(found.choices, expected[:2])
    assert [choice.score for choice in found.choices] == pytest.approx([mean(one) for one in expected[:2]])
    assert found.logprobs is None
    with llamac.Engine(model) as engine:
        found = engine.generate([PROMPT], n=1, best_of=6, logprobs=2, **SETTINGS)[0]
    assert_same(found.choices, expected[:1])
    assert found.logprobs is not None
    assert len(found.logprobs[0].top) == 2
    assert model.generate(PROMPT, n=2, best_of=2, **SETTINGS).score is None  # nothing to choose


def test_best_of_prefers_complete_candidates(model: llamac.Model) -> None:
    """A candidate that a deadline cut short may have a higher mean: its first tokens are not its text."""
    complete = alone(model, 3, logprobs=0)
    assert complete[2].logprobs is not None
    likely = max(complete[2].logprobs, key=lambda entry: entry.logprob)
    reasons: tuple[FinishReason, ...] = ("deadline", "cancelled")
    for reason in reasons:
        cut = replace(complete[2], finish_reason=reason, logprobs=[likely])
        params = resolved_params(model, SamplingParams(n=3, best_of=4))
        choices = combined([cut, *complete[:2], replace(cut, logprobs=[])], params).choices
        assert [choice.finish_reason for choice in choices] == ["length", "length", reason]
        assert choices[0].score is not None
        assert choices[2].score is not None
        assert choices[0].score < choices[2].score


def test_candidates_have_log_probabilities_of_their_own_and_share_the_prompts(model: llamac.Model) -> None:
    settings = {**SETTINGS, "logprobs": 1, "prompt_logprobs": 1}
    expected = alone(model, 3, logprobs=1, prompt_logprobs=1)
    for found in (model.generate(PROMPT, n=3, **settings),):
        assert [choice.logprobs for choice in found.choices] == [one.logprobs for one in expected]
        assert [choice.prompt_logprobs for choice in found.choices] == [expected[0].prompt_logprobs] * 3


def test_stop_strings_end_each_candidate(model: llamac.Model) -> None:
    texts = [one.text for one in alone(model, 4, max_tokens=40)]
    stop = texts[1][5:7]
    found = model.generate(PROMPT, n=4, stop=stop, **{**SETTINGS, "max_tokens": 40})
    assert_same(found.choices, alone(model, 4, stop=stop, max_tokens=40))
    assert found.choices[1].stopped_by == stop


def test_the_candidates_of_a_request_are_streams(model: llamac.Model) -> None:
    with llamac.Engine(model) as engine:
        request = engine.submit(PROMPT, n=3, **SETTINGS)
        with pytest.raises(ArgumentError, match=r"Request\.candidates"):
            next(request)
        texts = ["".join(candidate) for candidate in request.candidates]
        assert texts == [choice.text for choice in request.result(TIMEOUT).choices]
        assert request.done
        assert request.prompt_tokens == len(PROMPT)
        single = engine.submit(PROMPT, **SETTINGS)
        assert single.candidates == [single]


def test_a_cancelled_request_keeps_what_its_candidates_have(model: llamac.Model) -> None:
    with llamac.Engine(model) as engine:
        request = engine.submit(PROMPT, n=3, **{**SETTINGS, "max_tokens": 400})
        next(request.candidates[2])
        request.candidates[1].cancel()
        assert request.candidates[1].result(TIMEOUT).finish_reason == "cancelled"
        assert not request.done
        request.cancel()
        found = request.result(TIMEOUT)
        assert [choice.finish_reason for choice in found.choices] == ["cancelled"] * 3
        assert found.choices[2].tokens
        late = engine.submit(PROMPT, n=2, deadline=0.01, **{**SETTINGS, "max_tokens": 400}).result(TIMEOUT)
        assert {choice.finish_reason for choice in late.choices} == {"deadline"}
    assert model.kv_bytes == 0


def test_a_candidate_that_fails_fails_the_request(model: llamac.Model) -> None:
    def fail(ids: Any, row: Any) -> None:
        if len(ids) > len(PROMPT) + 3:
            raise ValueError("enough")

    with pytest.raises(ArgumentError, match="enough"):
        model.generate(PROMPT, n=3, logits_processors=fail, **SETTINGS)
    assert model.kv_bytes == 0


def test_asyncio_programs_get_candidates(model: llamac.Model) -> None:
    async def main() -> tuple[Completion, list[str]]:
        async with llamac.AsyncEngine(model) as engine:
            found = await engine.generate([PROMPT], n=2, **SETTINGS)
            request = engine.submit(PROMPT, n=2, **SETTINGS)
            texts = [text async for text in request.candidates[1]]
            with pytest.raises(ArgumentError, match="a stream has one candidate"):
                async for _ in request:
                    pass
            return found[0], texts

    found, texts = asyncio.run(main())
    assert_same(found.choices, alone(model, 2))
    assert "".join(texts) == found.choices[1].text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n is 0, expected 1 to 256"),
        ({"n": 3, "best_of": 2}, "n is 3, expected at most best_of, which is 2"),
        ({"n": 3, "best_of": 1}, "n is 3, expected at most best_of, which is 1"),
        ({"n": 2, "candidate": 2**31 - 1}, "candidate is 2147483647, expected at most"),
    ],
)
def test_wrong_numbers_of_candidates_are_refused(model: llamac.Model, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        model.generate(PROMPT, **options)


def test_streams_of_several_candidates_are_refused(model: llamac.Model) -> None:
    with pytest.raises(ArgumentError, match="a stream has one candidate, but the request asks for n=2"):
        model.stream(PROMPT, n=2)
    with model.session() as session, pytest.raises(ArgumentError, match="asks for best_of=2"):
        session.stream(PROMPT, best_of=2)
