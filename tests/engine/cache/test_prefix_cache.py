"""The prefix cache finds, keeps and evicts states; restored states have the bits of recomputed ones."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

import llamac
from builders import some_ids
from llamac import _core
from llamac.engine.cache.prefix_cache import MIN_TOKENS, PrefixCache


class Keeper:
    """A cache beside a session that computes what it keeps."""

    def __init__(self, model: llamac.Model, states: int, max_bytes: int | None = None) -> None:
        self.model = model
        self.session = model.session(sequences=2)
        self.owner = model.session(sequences=states)
        self.cache = PrefixCache(self.owner._core, states, max_bytes)

    def compute(self, ids: list[int]) -> None:
        self.session._core.truncate(0)
        self.session.eval(ids, logits=None)
        self.cache.keep(array("i", ids), self.session._core, 0)

    def found(self, ids: list[int]) -> int:
        return self.cache.find(array("i", ids)).length

    def close(self) -> None:
        self.session.close()
        self.owner.close()


def page_size(model: llamac.Model) -> tuple[int, int]:
    with model.session() as session:
        return session._core.page_size()


def test_the_longest_common_prefix_is_found(model: llamac.Model) -> None:
    ids, other = some_ids(200), some_ids(200, seed=7)
    keeper = Keeper(model, 8)
    assert keeper.found(ids) == 0
    keeper.compute(ids)
    assert keeper.found(ids) == 199  # one id is left to compute
    assert keeper.found([*ids, 5]) == 200
    assert keeper.found([*ids[:130], *other]) == 130
    assert keeper.found(ids[:100]) == 99
    assert keeper.found([*ids[: MIN_TOKENS - 1], *other]) == 0
    keeper.compute([*ids[:130], *other])
    assert keeper.found([*ids[:130], *other[:50], 1, 2]) == 180
    assert keeper.found([*ids[:150], *other]) == 150
    assert keeper.cache.stats.states == 2
    keeper.close()


def test_a_restored_prefix_has_the_bits_of_computing_again(model: llamac.Model) -> None:
    ids, rest = some_ids(150), some_ids(20, seed=3)
    keeper = Keeper(model, 4)
    keeper.compute(ids)
    prompt = [*ids[:77], *rest]
    match = keeper.cache.restore(array("i", prompt), keeper.session._core, 1)
    assert match.length == 77
    assert keeper.session.tokens(1) == ids[:77]
    found = keeper.session.eval(rest, sequence=1, logits="all")
    assert found.tobytes() == model.logits(prompt)[77:].tobytes()
    assert keeper.found([*ids, 1]) == 150  # the cached state has not changed
    stats = keeper.cache.stats
    assert (stats.lookups, stats.hits, stats.tokens, stats.hit_tokens) == (1, 1, len(prompt), 77)
    positions, page_bytes = page_size(model)
    assert stats.hit_bytes == 77 * page_bytes // positions
    keeper.close()


def test_states_of_shorter_prefixes_are_not_kept_twice(model: llamac.Model) -> None:
    ids = some_ids(200)
    keeper = Keeper(model, 4)
    for length in (50, 100, 200, 150):
        keeper.compute(ids[:length])
    assert keeper.cache.stats.states == 1
    assert [keeper.owner.length(i) for i in range(4)].count(0) == 3
    keeper.close()


def test_the_state_used_longest_ago_is_evicted_up_to_where_others_begin(model: llamac.Model) -> None:
    shared = some_ids(64)
    tails = [some_ids(64, seed=seed) for seed in range(1, 4)]
    keeper = Keeper(model, 8)
    for tail in tails:
        keeper.compute([*shared, *tail])
    keeper.compute([*shared, *tails[0]])  # used again
    assert keeper.cache.evict()
    assert keeper.found([*shared, *tails[1], 1]) == 64
    assert keeper.found([*shared, *tails[0], 1]) == 128
    assert keeper.cache.evict()
    assert keeper.found([*shared, *tails[2], 1]) == 64
    assert keeper.cache.evict()
    assert keeper.found([*shared, *tails[0], 1]) == 64  # the last one is cut to what they shared
    assert keeper.cache.evict()
    assert keeper.found([*shared, 1]) == 0
    assert not keeper.cache.evict()
    assert keeper.owner.memory()["kv"] == 0
    keeper.close()


def test_a_full_cache_makes_room(model: llamac.Model) -> None:
    keeper = Keeper(model, 3)
    prompts = [some_ids(70, seed=seed) for seed in range(1, 9)]
    for prompt in prompts:
        keeper.compute(prompt)
    assert [keeper.found([*prompt, 1]) for prompt in prompts] == [0] * 5 + [70] * 3
    keeper.close()
    _, page_bytes = page_size(model)
    keeper = Keeper(model, 8, max_bytes=5 * page_bytes)
    for prompt in prompts:
        keeper.compute(prompt)
    assert keeper.cache.stats.states == 2
    assert keeper.cache.stats.bytes == 4 * page_bytes  # two pages for 70 positions
    assert keeper.cache.stats.max_bytes == 5 * page_bytes
    keeper.close()


def test_bytes_count_shared_positions_once(model: llamac.Model) -> None:
    positions, page_bytes = page_size(model)
    keeper = Keeper(model, 8)
    keeper.compute([*some_ids(128), *some_ids(64, seed=1)])
    other = array("i", [*some_ids(128), *some_ids(64, seed=2)])
    match = keeper.cache.restore(other, keeper.session._core, 1)
    keeper.session.eval(other[match.length :], sequence=1, logits=None)
    keeper.cache.keep(other, keeper.session._core, 1)
    assert keeper.cache.stats.bytes == 256 // positions * page_bytes
    keeper.cache.clear()
    assert (keeper.cache.stats.bytes, keeper.cache.stats.states, keeper.cache.stats.evictions) == (0, 0, 0)
    keeper.close()


def test_random_prompts_are_found_as_a_list_would_find_them(model: llamac.Model) -> None:
    """Short alphabets make runs that split anywhere."""
    rng = np.random.default_rng(5)
    keeper = Keeper(model, 64)
    kept: list[list[int]] = []
    for _ in range(60):
        prompt = [int(x) for x in rng.integers(3, 5, rng.integers(MIN_TOKENS, 40))]
        if kept and rng.random() < 0.7:
            base = kept[rng.integers(len(kept))]
            prompt = [*base[: rng.integers(1, len(base) + 1)], *prompt]
        common = [
            next((i for i, (a, b) in enumerate(zip(k, prompt, strict=False)) if a != b), min(len(k), len(prompt)))
            for k in kept
        ]
        expected = min(max(common, default=0), len(prompt) - 1)
        assert keeper.found(prompt) == (expected if expected >= MIN_TOKENS else 0)
        keeper.compute(prompt)
        kept.append(prompt)
    keeper.close()


def test_windowed_states_are_restored_only_where_they_can_be_cut(windowed: llamac.Model) -> None:
    ids, other = some_ids(1000), some_ids(100, seed=3)
    keeper = Keeper(windowed, 8)
    keeper.compute(ids)
    assert keeper.found([*ids, 1]) == 1000
    match = keeper.cache.find(array("i", [*ids[:300], *other]))
    assert (match.length, match.shared) == (0, 300)
    keeper.compute(ids[:300])
    assert keeper.found([*ids[:300], *other]) == 300
    assert keeper.found([*ids[:400], *other]) == 300  # restored whole, then computed further
    assert keeper.found([*ids, 1]) == 1000
    while keeper.cache.evict():
        pass
    assert keeper.owner.memory()["kv"] == 0
    keeper.close()


def test_states_that_cannot_be_cut_are_snapshots(model: llamac.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are restored whole, and what follows is computed again. So are recurrent layers' where none is kept."""

    def cut_length(cache: PrefixCache, slot: int, length: int) -> int:
        return length if length == cache._session.length(slot) else 0

    monkeypatch.setattr(PrefixCache, "_cut_length", cut_length)
    ids, other = some_ids(300), some_ids(100, seed=3)
    keeper = Keeper(model, 3)
    for length in (64, 128, 300):
        keeper.compute(ids[:length])
    assert keeper.cache.stats.states == 3  # a longer one replaces none
    for prompt, length in (
        ([*ids[:200], *other], 128),
        ([*ids[:128], *other], 128),
        ([*ids[:127], *other], 64),
        ([*ids[:63], *other], 0),
        ([*ids, *other], 300),
    ):
        match = keeper.cache.restore(array("i", prompt), keeper.session._core, 1)
        assert (match.length, keeper.session.length(1)) == (length, length if length else keeper.session.length(1))
        if length:
            found = keeper.session.eval(prompt[length:], sequence=1, logits="last")
            assert found.tobytes() == model.logits(prompt)[-1].tobytes()
            keeper.session.truncate(0, sequence=1)
    assert keeper.cache.stats.bytes == _core.held_bytes(keeper.owner._core)
    keeper.compute([*ids[:128], *other])  # takes the place of the one that was used longest ago
    assert keeper.cache.stats.states == 3
    while keeper.cache.evict():
        pass
    assert keeper.owner.memory()["kv"] == 0
    keeper.close()
