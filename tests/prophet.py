"""Drafts whose tokens a test knows, so that it decides how many of them are right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

import llamac
from llamac.engine.cache.recurrent import state_bytes
from llamac.engine.speculation import draft_plan
from llamac.engine.speculation.draft_plan import RowCosts
from llamac.engine.speculation.lookup import Lookup


class Prophet:
    """Makes drafts of the tokens of known requests, some of them wrong.

    Attributes:
        known: The tokens that follow each prompt.
        part_right: The chance that a draft is right.
        most: The most drafts of a pass.
    """

    def __init__(self, part_right: float, most: int) -> None:
        self.known: dict[tuple[int, ...], Sequence[int]] = {}
        self.part_right = part_right
        self.most = most
        self._draw = random.Random(1)

    def draft(self, lookup: Lookup, n: int) -> list[int]:
        ids = tuple(lookup.ids)
        prompt = next((prompt for prompt in self.known if ids[: len(prompt)] == prompt), ids)
        start = len(ids) - len(prompt)
        right = self.known.get(prompt, ())[start : start + n]
        return [token if self._draw.random() < self.part_right else (token + 1) % 250 for token in right]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Draft from the first step on, whatever it costs."""
        monkeypatch.setattr(Lookup, "draft", lambda lookup, n: self.draft(lookup, n))
        monkeypatch.setattr(Lookup, "length", property(lambda lookup: 9, lambda lookup, value: None), raising=False)
        draft_at_any_cost(monkeypatch, self.most)


def draft_at_any_cost(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Draft as many tokens as possible from the first step on, at most `most` in a pass."""
    monkeypatch.setattr(RowCosts, "is_known", True)
    monkeypatch.setattr(RowCosts, "step", 0.01)
    monkeypatch.setattr(draft_plan, "best_count", lambda rate, costs, credit, limit, _: (min(limit, most), 2.0))


def draft_with_models(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Let a drafting model draft from the first step on, whatever that costs, and prompt lookup not at all."""
    draft_at_any_cost(monkeypatch, most)
    monkeypatch.setattr(RowCosts, "is_tiny", False)
    monkeypatch.setattr(Lookup, "length", property(lambda self: 0, lambda self, value: None), raising=False)


def results(completion: llamac.Completion) -> tuple[Any, ...]:
    """What must not depend on drafts."""
    c = completion
    return c.text, c.tokens, c.finish_reason, c.stopped_by, c.seed, c.logprobs, c.prompt_logprobs


def check_drafts(model: llamac.Model, prophet: Prophet, prompt: list[int], **options: Any) -> llamac.Completion:
    """Generate without drafts, then with drafts that are partly right: pieces, results and sessions are equal."""
    session_options = {name: options.pop(name) for name in ("context", "kv_dtype") if name in options}
    with model.session(**session_options) as plain, model.session(**session_options) as drafting:
        expected_stream = plain.stream(prompt, speculation=False, **options)
        expected = list(expected_stream)
        prophet.known[tuple(prompt)] = expected_stream.completion.tokens
        stream = drafting.stream(prompt, **options)
        assert list(stream) == expected
        assert results(stream.completion) == results(expected_stream.completion)
        usage = stream.completion.usage
        assert expected_stream.completion.usage.drafted_tokens == 0
        assert 0 <= usage.accepted_tokens <= usage.drafted_tokens
        assert drafting.tokens() == plain.tokens()
        spare = state_bytes(plain._core)  # the page for the next state, which a pass allocates if it is missing
        assert plain.memory()["kv"] - spare <= drafting.memory()["kv"] <= plain.memory()["kv"]
        assert drafting.sample(seed=1, temperature=1.0) == plain.sample(seed=1, temperature=1.0)
        if plain.length() < plain.context:
            assert drafting.eval([3]).tobytes() == plain.eval([3]).tobytes()
        return stream.completion
