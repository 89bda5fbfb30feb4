"""Drafts in an engine: every request gets the tokens that it would get alone without drafts."""

from __future__ import annotations

import random
from typing import Any

import pytest

import llamac
from builders import some_ids
from llamac.engine import batch_drafts
from llamac.engine.draft_plan import RowCosts
from llamac.engine.lookup import Lookup

Options = dict[str, Any]


class Prophet:
    """Makes drafts of the tokens of known requests, some of them wrong."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, ...], list[int]] = {}
        self.part_right = 0.8
        self._draw = random.Random(1)

    def draft(self, lookup: Lookup, n: int) -> list[int]:
        ids = tuple(lookup.ids)
        prompt = next(prompt for prompt in self.known if ids[: len(prompt)] == prompt)
        start = len(ids) - len(prompt)
        right = self.known[prompt][start : start + n]
        return [token if self._draw.random() < self.part_right else (token + 1) % 250 for token in right]


@pytest.fixture
def prophet(monkeypatch: pytest.MonkeyPatch) -> Prophet:
    """Drafts from the first step on, whatever they cost."""
    found = Prophet()
    monkeypatch.setattr(Lookup, "draft", lambda self, n: found.draft(self, n))
    monkeypatch.setattr(Lookup, "length", property(lambda self: 9, lambda self, value: None), raising=False)
    monkeypatch.setattr(RowCosts, "is_known", True)
    monkeypatch.setattr(RowCosts, "step", 0.01)
    monkeypatch.setattr(batch_drafts, "best_count", lambda rate, costs, credit, most, requests: (min(most, 6), 2.0))
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

    def refuse(self: llamac.Session, packed: Any, logits: Any) -> None:
        refused.append(len(packed))
        raise llamac.OutOfMemoryError("no pages")

    monkeypatch.setattr(llamac.Session, "_run_drafts", refuse)
    with llamac.Engine(model, max_sequences=2) as engine:
        assert check(engine, prompts, options, expected) == 0
    assert refused


def test_many_requests_and_those_that_do_not_want_it_get_no_drafts(model: llamac.Model, prophet: Prophet) -> None:
    prompts = [some_ids(20, seed=i) for i in range(batch_drafts.MOST_REQUESTS + 1)]
    options: list[Options] = [{"max_tokens": 20, "temperature": 0, "seed": 1}] * len(prompts)
    expected = expected_of(model, prophet, prompts, options)
    with llamac.Engine(model, max_sequences=8) as engine:
        found = engine.generate(prompts, max_tokens=20, temperature=0, seed=1)
        assert [each.tokens for each in found] == [each.tokens for each in expected]
        off = engine.submit(prompts[0], max_tokens=20, temperature=0, speculation=False).result(60)
        assert off.usage.drafted_tokens == 0
        assert off.tokens == expected[0].tokens
