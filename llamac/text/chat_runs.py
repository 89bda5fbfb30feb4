"""Splits a rendered prompt into runs for the tokenizer: special tokens count only where the template wrote them.

A run is tokenized with special tokens or without. Splitting text changes how it is tokenized, so a prompt is split
only around data in which the name of a special token occurs.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from llamac.text.tracked_str import TEMPLATE

_WRITTEN = re.compile(rb"[^\x00]+")  # origins of characters that are not data


class PromptRun(NamedTuple):
    """Part of a rendered prompt. parse_special: whether the names of special tokens in it become those tokens."""

    text: str
    parse_special: bool


class SpecialNames:
    """Finds names of special tokens as the library `tokenizers` does: the leftmost, and of those the longest."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = sorted(set(filter(None, names)))
        self._first = re.compile("|".join(re.escape(first) for first in sorted({name[0] for name in self._names})))
        # For each name the longest other name that it begins with.
        self._shorter: dict[str, str] = {}
        open_names: list[str] = []
        for name in self._names:
            while open_names and not name.startswith(open_names[-1]):
                open_names.pop()
            self._shorter[name] = open_names[-1] if open_names else ""
            open_names.append(name)
        self._longest = max(map(len, self._names), default=0)

    def find(self, text: str, origins: bytes | None = None) -> Iterator[tuple[int, int]]:
        """The (start, end) of each name in `text`.

        origins: of the characters; then only those names whose first and last characters are the template's.
        """
        if not self._names:
            return
        at = 0
        while match := self._first.search(text, at):
            start = match.start()
            end = start + len(self._longest_at(text, start))
            if end > start and (origins is None or origins[start] == origins[end - 1] == TEMPLATE):
                yield start, end
                at = end
            else:
                at = start + 1

    def _longest_at(self, text: str, start: int) -> str:
        """The longest name that begins at `start`, or an empty string."""
        # All names that the text continues with sort at or before it, and the last name before it begins with them.
        last = bisect.bisect_right(self._names, text[start : start + self._longest]) - 1
        name = self._names[last] if last >= 0 else ""
        while not text.startswith(name, start):
            name = self._shorter[name]
        return name


def split(text: str, origins: bytes, special_names: Sequence[str]) -> list[PromptRun]:
    """The runs of a rendered prompt. origins: one of each character, as tracked_str.py defines them."""
    names = SpecialNames(special_names)
    runs: list[PromptRun] = []
    group: list[tuple[int, int, bool]] = []  # consecutive pieces that can be tokenized together
    for start, end, is_name in _pieces(text, origins, names):
        if is_name or not any(names.find(text[start:end])):
            group.append((start, end, is_name))
            continue
        runs += _joined(text, group, names)
        runs.append(PromptRun(text[start:end], False))
        group = []
    return runs + _joined(text, group, names)


def _pieces(text: str, origins: bytes, names: SpecialNames) -> Iterator[tuple[int, int, bool]]:
    """(start, end, whether it is a name that the template wrote), of all pieces of the text."""
    done = 0
    for region in _WRITTEN.finditer(origins):
        first, last = region.span()
        for start, end in names.find(text[first:last], origins[first:last]):
            if done < first + start:
                yield done, first + start, False
            done = first + end
            yield first + start, done, True
    if done < len(text):
        yield done, len(text), False


def _joined(text: str, pieces: list[tuple[int, int, bool]], names: SpecialNames) -> list[PromptRun]:
    """Consecutive pieces as one run, if the names in it are exactly those that the template wrote."""
    if not pieces:
        return []
    first, last = pieces[0][0], pieces[-1][1]
    written = [(start - first, end - first) for start, end, is_name in pieces if is_name]
    if list(names.find(text[first:last])) == written:
        return [PromptRun(text[first:last], True)]
    return [PromptRun(text[start:end], is_name) for start, end, is_name in pieces]
