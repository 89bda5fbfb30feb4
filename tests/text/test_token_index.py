"""Tokens found by their bytes, and the bans that keep a string out of a text."""

from __future__ import annotations

from pathlib import Path

import llamac
from llamac.text.token_index import BannedStrings


def test_tokens_are_found_by_their_bytes(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model:
        index = model.tokenizer._token_index
        shown = {token: index.bytes_of(token) for token in range(model.tokenizer.n_ids)}
    for part in (b"e", b"th", b" "):
        assert index.containing([part]) == [token for token, data in shown.items() if part in data]
        assert set(index.starting_with(part)) == {token for token, data in shown.items() if data.startswith(part)}
    assert index.bytes_of(10**6) == b""


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
