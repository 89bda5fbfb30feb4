"""Finds tokens by the bytes that they add to a text."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from llamac.text.decoding import TokenTexts


class TokenIndex:
    """The bytes of all tokens of a tokenizer, to search. Special tokens add none to a text."""

    def __init__(self, texts: TokenTexts) -> None:
        self._shown = [texts.shown_bytes(token, True) for token in range(texts.id_count)]
        self._found: tuple[tuple[bytes, ...], list[int]] = (), []  # the last result of `containing`
        self._sorted = _sorted(self._shown)

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token adds to a text. An unknown id adds none."""
        return self._shown[token] if 0 <= token < len(self._shown) else b""

    def containing(self, parts: Iterable[bytes]) -> list[int]:
        """Tokens whose bytes contain one of these parts."""
        wanted = tuple(parts)
        last, found = self._found
        if wanted != last:
            found = [token for token, data in enumerate(self._shown) if any(part in data for part in wanted)]
            self._found = wanted, found
        return found

    def starting_with(self, start: bytes) -> list[int]:
        """Tokens whose bytes start with these, at least one byte."""
        found = []
        for at in range(bisect.bisect_left(self._sorted, (start, -1)), len(self._sorted)):
            data, token = self._sorted[at]
            if not data.startswith(start):
                break
            found.append(token)
        return found


def _sorted(shown: list[bytes]) -> list[tuple[bytes, int]]:
    """The bytes of tokens that have any, with their ids, in order.

    Sorts small groups: one sort of a large vocabulary would keep all other threads, and Ctrl-C, waiting.
    """
    groups: dict[bytes, list[tuple[bytes, int]]] = {}
    for token, data in enumerate(shown):
        if data:
            groups.setdefault(data[:2], []).append((data, token))
    found: list[tuple[bytes, int]] = []
    for start in sorted(groups):
        found += sorted(groups[start])
    return found


class BannedStrings:
    """The tokens that would complete a banned string, wherever tokens divide it."""

    def __init__(self, strings: Iterable[str], index: TokenIndex) -> None:
        self._strings = [text.encode() for text in strings]
        self._index = index
        self._tail = b""
        self._longest = max(map(len, self._strings), default=0)
        self._starting: dict[bytes, list[int]] = {}
        self.always = index.containing(self._strings)

    def push(self, token: int) -> list[int]:
        """Add a token; return those that must not follow it, beyond `always`."""
        if self._longest < 2:
            return []
        self._tail = (self._tail + self._index.bytes_of(token))[1 - self._longest :]
        found: list[int] = []
        for data in self._strings:
            for n in range(1, len(data)):
                if self._tail.endswith(data[:n]):
                    rest = data[n:]
                    if rest not in self._starting:
                        self._starting[rest] = self._index.starting_with(rest)
                    found += self._starting[rest]
        return found
