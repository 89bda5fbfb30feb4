"""Packed tokenizers that are built from the arrays of a GGUF file."""

from __future__ import annotations

import itertools
import random
import threading
from array import array
from concurrent.futures import ThreadPoolExecutor

import pytest

from llamac.errors import ArgumentError
from llamac.text.vocabulary import packing
from llamac.text.vocabulary.spm import MAX_TIES


@pytest.fixture(scope="module", params=[3, 20, 10**6])
def vocabulary(request: pytest.FixtureRequest) -> tuple[list[str], array[float]]:
    """All strings of up to five letters, and scores with that many values."""
    choose = random.Random(request.param)
    texts = ["".join(letters) for n in range(1, 6) for letters in itertools.product("abc", repeat=n)]
    return texts, array("f", (choose.randrange(request.param) for _ in texts))


def test_parts_of_the_ranked_merges_are_all_of_them(vocabulary: tuple[list[str], array[float]]) -> None:
    texts, scores = vocabulary
    opened = packing._open(texts)
    assert opened is not None
    tables, forms = opened[2], bytes([1]) * len(texts)
    merges, rivals = tables.rank_merges(scores, forms, MAX_TIES)
    assert len(merges) > 12 * len(texts)
    for n_parts in (2, 3, 7, 2 * len(texts)):
        parts = [tables.rank_merges(scores, forms, MAX_TIES, part, n_parts) for part in range(n_parts)]
        assert b"".join(found for found, _ in parts) == merges
        assert [rival for _, found in parts for rival in found] == rivals
    with pytest.raises(ArgumentError, match="part is 2, expected less than 2"):
        tables.rank_merges(scores, forms, MAX_TIES, 2, 2)


def test_threads_rank_the_same_merges(
    vocabulary: tuple[list[str], array[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, scores = vocabulary
    opened = packing._open(texts)
    assert opened is not None
    forms = bytes([1]) * len(texts)
    expected = packing._rank(opened[2], scores, forms)
    monkeypatch.setattr(packing, "MANY", 1)
    assert packing._rank(opened[2], scores, forms) == expected


def test_an_interruption_waits_only_for_the_parts_that_have_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MANY", 1)
    ranked: list[int] = []
    release = threading.Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            release.set()
            super().shutdown(wait)

    monkeypatch.setattr(packing, "ThreadPoolExecutor", Pool)

    class Slow:
        def rank_merges(self, scores: object, forms: object, most: int, part: int, n_parts: int) -> object:
            ranked.append(part)
            if part == 0:
                raise KeyboardInterrupt
            assert release.wait(10)
            return b"", []

    with pytest.raises(KeyboardInterrupt):
        packing._rank(Slow(), array("f", [0]), b"\1")  # type: ignore[arg-type]
    assert len(ranked) <= packing.RANKERS + 1  # the thread that was interrupted may have begun another one
