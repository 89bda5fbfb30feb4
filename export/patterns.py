"""Matches the patterns of strangers: regular expressions without a way to run for years.

Python's `re` goes back and tries again, which a hostile pattern makes it do more often than there is time for. Here all
the places where a part of a pattern may end are kept together as a set, so that the work is bounded by the lengths of
pattern and text. What a pattern can be made of: characters, classes, groups, "|", "^", "$" and repetition.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from llamac.errors import UnsupportedError

Places = frozenset[int]
Part = Callable[[str, int], Places]  # from where a part of the pattern begins to where it may end

_TOKEN = re.compile(
    r"(?P<group>\((?:\?:)?)|(?P<end>\))|(?P<bar>\|)|(?P<repeat>(?:[*+?]|\{\d{1,3}(?:,(?:\d{1,3})?)?\})\??)"
    r"|(?P<place>[\^$])|(?P<one>\[\^?\]?(?:\\.|[^\]\\])*\]|\\[^0-9A-Za-z]|\\[dDwWsS]|[^\\(){}\[\]])"
)
_MAX_LENGTH, _MAX_DEPTH = 300, 50


def matcher(pattern: str, *, whole: bool = False) -> Callable[[str], bool]:
    """Compile a pattern to a function that tells whether it describes a name, or an end of the name after a dot.

    PEFT finds modules by the ends of their names. Raises UnsupportedError for patterns that are not supported.

    Args:
        pattern: The pattern.
        whole: Whether it must describe the whole name.
    """
    part = _Parser(pattern).whole()

    def matches(text: str) -> bool:
        begins = frozenset({0, *(at + 1 for at, letter in enumerate(text) if letter == "." and not whole)})
        return len(text) in _step(part, text, begins)

    return matches


def _step(part: Part, text: str, begins: Places) -> Places:
    return frozenset[int]().union(*(part(text, at) for at in begins))


# Each part is asked once per place, whatever the pattern: this is what bounds the work.
_remembered = functools.lru_cache(maxsize=1024)


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._pattern, self._at = pattern, 0

    def whole(self) -> Part:
        if len(self._pattern) > _MAX_LENGTH:
            raise self._unknown()
        part = self._choice(0)
        if self._at < len(self._pattern):
            raise self._unknown()
        return part

    def _unknown(self) -> UnsupportedError:
        return UnsupportedError(
            f"the pattern {self._pattern[:100]!r} is not supported from {self._pattern[self._at : self._at + 9]!r} on: "
            "expected characters, classes, groups, |, ^, $ and repetition"
        )

    def _choice(self, depth: int) -> Part:
        """Sequences with bars between them, up to the end of their group."""
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
                    raise self._unknown()
                self._at += 1
            elif kind == "repeat":
                parts.append(_repeated(parts.pop(), text))
            elif kind == "place":
                parts.append(_at_begin if text == "^" else _at_end)
            else:
                parts.append(self._letter(text))
        return _one_of([_in_turn(parts) for parts in sequences])

    def _letter(self, text: str) -> Part:
        try:
            accepts = re.compile(text).fullmatch
        except re.error:
            raise self._unknown() from None
        return lambda text, at: frozenset({at + 1} if at < len(text) and accepts(text[at]) else ())


def _at_begin(text: str, at: int) -> Places:
    return frozenset(() if at else {at})


def _at_end(text: str, at: int) -> Places:
    return frozenset({at} if at == len(text) else ())


def _one_of(parts: list[Part]) -> Part:
    return _remembered(lambda text, at: frozenset[int]().union(*(part(text, at) for part in parts)))


def _in_turn(parts: list[Part]) -> Part:
    def ends(text: str, at: int) -> Places:
        found = frozenset({at})
        for part in parts:
            found = _step(part, text, found)
        return found

    return _remembered(ends)


def _repeated(part: Part, how: str) -> Part:
    least, most = {"*": (0, 999), "+": (1, 999), "?": (0, 1)}.get(how[0], (0, 0))
    if how[0] == "{":
        first, comma, last = how.rstrip("?")[1:-1].partition(",")
        least, most = int(first), int(last) if last else 999 if comma else int(first)

    def ends(text: str, at: int) -> Places:
        found, new = frozenset[int](), frozenset({at})
        for times in range(most + 1):
            if times >= least:
                found |= new
            after = _step(part, text, new)
            if after == new:
                return found | new
            if not after or (times >= least and after <= found):
                break
            new = after
        return found

    return _remembered(ends)
