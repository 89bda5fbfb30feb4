"""Tokens found by their bytes, and the bans that keep a string out of a text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import llamac
from llamac.text import token_index
from llamac.text.token_index import BannedStrings


def test_tokens_are_found_by_their_bytes(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model:
        index = model.tokenizer._token_index
        shown = {token: index.bytes_of(token) for token in range(model.tokenizer.n_ids)}
    for part in (b"e", b"th", b" "):
        assert index.containing([part]) == [token for token, data in shown.items() if part in data]
        assert set(index.starting_with(part)) == {token for token, data in shown.items() if data.startswith(part)}
    assert index.bytes_of(10**6) == b""


def test_a_large_vocabulary_is_sorted_in_small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sort would keep Ctrl-C and all other threads waiting."""
    sizes: list[int] = []

    def counted(items: Iterable[Any]) -> list[Any]:
        listed = list(items)
        sizes.append(len(listed))
        return sorted(listed)

    monkeypatch.setattr(token_index, "sorted", counted, raising=False)
    shown = [bytes([65 + i % 26, 65 + i // 26 % 26, i % 251]) for i in range(26 * 26 * 4)]
    shown += [b"", b"A", b"AA", b"A"]
    expected = sorted((data, token) for token, data in enumerate(shown) if data)
    assert token_index._sorted(shown) == expected
    assert max(sizes) <= 26 * 26 + 1


def test_bans_are_the_tokens_that_complete_a_string(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model:
        index = model.tokenizer._token_index
        n = model.tokenizer.n_ids
    for strings in (["he"], ["a"], ["aab", "ba"], ["é"]):
        banned, text = [string.encode() for string in strings], b""
        bans = BannedStrings(strings, index)
        for token in [index.starting_with(byte)[0] for byte in (b"a", b"a", b"h", b"b", b"a", b"\xc3")]:
            found = {*bans.push(token), *bans.always}
            text += index.bytes_of(token)
            tail = {data: text[max(0, len(text) - len(data) + 1) :] for data in banned}
            assert found == {t for t in range(n) for data in banned if data in tail[data] + index.bytes_of(t)}
