"""Matches untrusted regular expressions in bounded time.

Python's `re` backtracks, and a hostile pattern can make that take years. This matcher instead computes the set of all
positions where each part of a pattern can end, so the time is bounded by the lengths of pattern and text. Patterns can
have characters, classes, groups, "|", "^", "$" and repetition.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from llamac.errors import UnsupportedError

Positions = frozenset[int]
# A part of a pattern: maps a text and the position where the part begins to all positions where it can end.
Part = Callable[[str, int], Positions]

_TOKEN = re.compile(
    r"(?P<group>\((?:\?:)?)|(?P<end>\))|(?P<bar>\|)|(?P<repeat>(?:[*+?]|\{\d{1,3}(?:,(?:\d{1,3})?)?\})\??)"
    r"|(?P<anchor>[\^$])|(?P<character>\[\^?\]?(?:\\.|[^\]\\])*\]|\\[^0-9A-Za-z]|\\[dDwWsS]|[^\\(){}\[\]])"
)
_MAX_LENGTH, _MAX_DEPTH = 300, 50
_UNBOUNDED = 999  # repetitions; more than any name has characters


def matcher(pattern: str, *, whole: bool = False) -> Callable[[str], bool]:
    """Compile a pattern for names of modules.

    Args:
        pattern: The pattern.
        whole: Whether it must match the whole name. Otherwise it can also match the end of the name after any dot, as
            PEFT does.

    Returns:
        A function that returns whether a name matches.

    Raises:
        UnsupportedError: If the pattern is too long or has unsupported syntax.
    """
    part = _Parser(pattern).parse()

    def matches(text: str) -> bool:
        starts = frozenset({0, *(at + 1 for at, character in enumerate(text) if character == "." and not whole)})
        return len(text) in _ends(part, text, starts)

    return matches


def _ends(part: Part, text: str, starts: Positions) -> Positions:
    """All positions where a part can end if it begins at one of `starts`."""
    return frozenset[int]().union(*(part(text, start) for start in starts))


# Caches the result of each part at each position, which bounds the time for every pattern.
_cached = functools.lru_cache(maxsize=1024)


class _Parser:
    """A recursive-descent parser of patterns."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._at = pattern, 0

    def parse(self) -> Part:
        if (length := len(self._pattern)) > _MAX_LENGTH:
            raise UnsupportedError(
                f"the pattern '{self._pattern[:40]}...' has {length} characters, at most {_MAX_LENGTH} are supported"
            )
        part = self._choice(0)
        if self._at < len(self._pattern):
            raise self._unsupported()
        return part

    def _unsupported(self) -> UnsupportedError:
        return UnsupportedError(
            f"the pattern {self._pattern[:100]!r} is not supported from {self._pattern[self._at : self._at + 9]!r} on: "
            "expected characters, classes, groups, |, ^, $ and repetition"
        )

    def _choice(self, depth: int) -> Part:
        """Parse alternatives separated by bars, up to the end of their group."""
        sequences: list[list[Part]] = [[]]
        while found := _TOKEN.match(self._pattern, self._at):
            kind, text, parts = found.lastgroup, found[0], sequences[-1]
            if kind == "end" or depth > _MAX_DEPTH or (kind == "repeat" and not parts):
                break
            self._at = found.end()
            if kind == "bar":
                sequences.append([])
            elif kind == "group":
                parts.append(self._choice(depth + 1))
                if not self._pattern.startswith(")", self._at):
                    raise self._unsupported()
                self._at += 1
            elif kind == "repeat":
                parts.append(_repetition(parts.pop(), text))
            elif kind == "anchor":
                parts.append(_match_start if text == "^" else _match_end)
            else:
                parts.append(self._character(text))
        return _alternatives([_sequence(parts) for parts in sequences])

    def _character(self, token: str) -> Part:
        """A part that matches one character. `token` is a character, an escape or a class."""
        try:
            accepts = re.compile(token).fullmatch
        except re.error:
            raise self._unsupported() from None
        return lambda text, at: frozenset({at + 1} if at < len(text) and accepts(text[at]) else ())


def _match_start(text: str, at: int) -> Positions:
    return frozenset(() if at else {at})


def _match_end(text: str, at: int) -> Positions:
    return frozenset({at} if at == len(text) else ())


def _alternatives(parts: list[Part]) -> Part:
    return _cached(lambda text, at: frozenset[int]().union(*(part(text, at) for part in parts)))


def _sequence(parts: list[Part]) -> Part:
    def match(text: str, at: int) -> Positions:
        positions = frozenset({at})
        for part in parts:
            positions = _ends(part, text, positions)
        return positions

    return _cached(match)


def _repetition(part: Part, quantifier: str) -> Part:
    least, most = {"*": (0, _UNBOUNDED), "+": (1, _UNBOUNDED), "?": (0, 1)}.get(quantifier[0], (0, 0))
    if quantifier[0] == "{":
        first, comma, last = quantifier.rstrip("?")[1:-1].partition(",")
        least, most = int(first), int(last) if last else _UNBOUNDED if comma else int(first)

    def match(text: str, at: int) -> Positions:
        found, current = frozenset[int](), frozenset({at})
        for count in range(most + 1):
            if count >= least:
                found |= current
            following = _ends(part, text, current)
            if following == current:
                return found | current
            if not following or (count >= least and following <= found):
                break
            current = following
        return found

    return _cached(match)
