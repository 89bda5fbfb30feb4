"""Prompt lookup: the matches it finds, the drafts it makes, what it learns, and that it stays small and quick."""

from __future__ import annotations

import random

import pytest

from llamac.engine.speculation import lookup
from llamac.engine.speculation.lookup import LONGEST, ORDERS, Lookup


def common_suffix(ids: list[int], place: int) -> int:
    """How many tokens before a place equal the last ones."""
    n = 0
    while n < min(place, LONGEST) and ids[place - n - 1] == ids[len(ids) - n - 1]:
        n += 1
    return n


@pytest.mark.parametrize("n_ids", [2, 5, 40])
@pytest.mark.parametrize("n_prompt", [1, 3, 60])
def test_matches_are_real_and_at_least_as_long_as_those_of_the_most_recent_ngrams(
    n_ids: int, n_prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "RESUMED", LONGEST + 1)  # no match goes on after a token that differs
    draw = random.Random(n_ids)
    ids = [draw.randrange(n_ids) for _ in range(n_prompt)]
    found = Lookup(ids)
    for _ in range(400):
        ids.append(draw.randrange(n_ids))
        found.push(ids[-1])
        assert found.ids.tolist() == ids
        grams = {order: ids[-order:] for order in ORDERS if len(ids) >= order}
        places = [
            max((p for p in range(order, len(ids)) if ids[p - order : p] == gram), default=0)
            for order, gram in grams.items()
        ]
        best = max((common_suffix(ids, place) for place in places if place), default=0)
        assert found.length >= best >= 0
        if found.length:
            assert found.length <= common_suffix(ids, found._place)
            assert found.draft(1) == [ids[found._place]]


def test_a_draft_is_what_followed_and_repeats_a_text_that_repeats_itself() -> None:
    found = Lookup([1, 2, 3, 4, 5, 6, 7, 1])
    assert found.length == 0
    found.push(2)
    assert (found.length, found.draft(4)) == (2, [3, 4, 5, 6])
    found.push(3)
    assert (found.length, found.draft(2)) == (3, [4, 5])
    found.push(9)
    assert found.length == 0
    cyclic = Lookup([8, 9, 7])
    for token in [5, 6, 5, 6]:
        cyclic.push(token)
    assert cyclic.draft(5) == [5, 6, 5, 6, 5]


def test_a_running_match_beats_a_more_recent_one_that_is_shorter() -> None:
    found = Lookup([10, 11, 12, 13, 14, 15, 1, 2, 13, 14, 99, 10, 11])
    for token in (12, 13):
        found.push(token)
    found.push(14)  # the most recent place of 13, 14 is before 99
    assert (found.length, found.draft(1)) == (5, [15])


def test_a_long_match_goes_on_after_a_token_that_differs() -> None:
    found = Lookup([*range(100, 140), 7, 8])
    for token in range(100, 112):
        found.push(token)
    assert (found.length, found.was_right) == (12, True)
    found.push(9)
    assert (found.length, found.was_right, found.draft(3)) == (1, False, [113, 114, 115])
    assert found.rate(0) == lookup.PRIOR[0]
    assert (found.rate(1), found.rate(4)) == (found._rates[lookup._CLASS[6]], found._rates[lookup._CLASS[9]])
    found.push(113)
    assert (found.length, found.was_right, found.draft(2)) == (6, True, [114, 115])
    found.push(9)
    found.push(9)  # a second one in a row ends the match
    assert found.length == 0
    found.push(100)
    found.push(101)
    found.push(9)
    assert found.length == 0  # a short match ends at once


def test_a_match_that_goes_on_gives_way_to_a_longer_one() -> None:
    found = Lookup([*range(100, 140), 50, 51, 52, 53, 9, 60, 61, 62])
    for token in (*range(100, 107), 9):
        found.push(token)
    assert (found.length, found.draft(1)) == (1, [108])  # it was 7 tokens long, which counts as 3
    for token in (50, 51):
        found.push(token)
    assert (found.length, found.draft(2)) == (2, [52, 53])


@pytest.mark.parametrize("every", [8, 10, 15])
def test_an_edit_is_predicted_right_after_each_replaced_token(every: int) -> None:
    """Two tokens in common find a match again. Continuing after the replaced token also predicts those two."""
    draw = random.Random(1)
    text = [draw.randrange(30000) for _ in range(600)]
    found, right = Lookup(text), 0
    edited = [token if i % every else 40000 + i for i, token in enumerate(text)]
    for token in edited:
        found.push(token)
        right += found.was_right
    assert right >= len(text) * (every - 1) / every - 4


def test_every_token_teaches_how_often_predictions_are_right() -> None:
    right = Lookup([1, 2, 3, 4, 5] * 3)
    before = [Lookup([]).rate(0), right.rate(0)]
    for token in [1, 2, 3, 4, 5] * 20:
        right.push(token)
    assert right.rate(0) > 0.98 > max(before)
    wrong = Lookup([])
    for i in range(400):  # something else follows the pair 1, 2 each time
        for token in (1, 2, 10 + i):
            wrong.push(token)
    wrong.push(1)
    wrong.push(2)
    assert wrong.length == 2
    assert wrong.rate(0) < 0.05
    assert wrong.rate(10) > 0.5  # matches of other lengths have rates of their own


def test_the_index_is_bounded_and_still_finds_what_is_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "KEPT", 50)
    found = Lookup(range(1000))
    for token in range(1000, 3000):
        found.push(token)
    assert all(len(table) <= 50 for tables in found._tables for table in tables)
    for token in (2980, 2981):
        found.push(token)
    assert found.draft(3) == [2982, 2983, 2984]
    for token in (5, 6):
        found.push(token)
    assert found.length == 0
