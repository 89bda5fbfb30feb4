"""Drafts whose tokens a test knows, so that it decides how many of them are right."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

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
