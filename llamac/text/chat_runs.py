"""Splits a rendered prompt into runs for the tokenizer, so that only special tokens of the template count.

Each run is tokenized with or without special tokens. Splitting a text can change its tokens, so a prompt is split only
around data that contains the name of a special token.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from llamac.text.tracked_str import DATA, TEMPLATE

_WRITTEN = re.compile(rb"[^\x00]+")  # origins of characters that are not data


class PromptRun(NamedTuple):
    """A part of a rendered prompt.

    Attributes:
        text: The text.
        parse_special: Whether names of special tokens in it become those tokens.
    """

    text: str
    parse_special: bool


class SpecialNames:
    """Finds names of special tokens as the library `tokenizers` does: the leftmost match, and of these the longest."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = sorted(set(filter(None, names)))
        self._first = re.compile("|".join(re.escape(first) for first in sorted({name[0] for name in self._names})))
        # Maps each name to the longest other name that is its prefix, or to "".
        self._shorter: dict[str, str] = {}
        open_names: list[str] = []
        for name in self._names:
            while open_names and not name.startswith(open_names[-1]):
                open_names.pop()
            self._shorter[name] = open_names[-1] if open_names else ""
            open_names.append(name)
        self._longest = max(map(len, self._names), default=0)

    def find(self, text: str, origins: bytes | None = None) -> Iterator[tuple[int, int]]:
        """Find the names in the text.

        Args:
            text: The text.
            origins: The origin of each character. If given, only names whose first and last characters are from the
                template are found.

        Yields:
            The (start, end) of each name.
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
        # In sorted order, every name that is a prefix of the text comes at or before it, and all of them are prefixes
        # of the last name that does.
        last = bisect.bisect_right(self._names, text[start : start + self._longest]) - 1
        name = self._names[last] if last >= 0 else ""
        while not text.startswith(name, start):
            name = self._shorter[name]
        return name


# Returns the (start, end) of each part of the text that the tokenizer turns into a special token.
FindSpecial = Callable[[str], Sequence[tuple[int, int]]]


def split(
    text: str, origins: bytes, special_names: Sequence[str], find_special: FindSpecial | None = None
) -> list[PromptRun]:
    """Split a rendered prompt into runs.

    Args:
        text: The prompt.
        origins: The origin of each character (tracked_str.py).
        special_names: The names of special tokens.
        find_special: For a tokenizer that also reads other spellings of these names, because it normalizes them.
    """
    names = SpecialNames(special_names)
    runs = _split_at_names(text, origins, names)
    if find_special is None:
        return runs
    checked: list[PromptRun] = []
    start = 0
    for run in runs:
        checked += _checked(run, origins[start : start + len(run.text)], names, find_special)
        start += len(run.text)
    return checked


def _split_at_names(text: str, origins: bytes, names: SpecialNames) -> list[PromptRun]:
    runs: list[PromptRun] = []
    group: list[tuple[int, int, bool]] = []  # consecutive pieces that can be tokenized together
    for start, end, is_name in _pieces(text, origins, names):
        if is_name or not any(names.find(text[start:end])):
            group.append((start, end, is_name))
            continue
        runs += _join(text, group, names)
        runs.append(PromptRun(text[start:end], False))
        group = []
    return runs + _join(text, group, names)


def _checked(run: PromptRun, origins: bytes, names: SpecialNames, find_special: FindSpecial) -> Iterator[PromptRun]:
    """Split a run if the tokenizer finds a special token in it that the template did not write."""
    text = run.text
    found = find_special(text) if run.parse_special else []
    written = [span for span in found if _is_written(text, origins, span)]
    if len(written) == len(found):
        yield run
        return
    written += [(start, end) for start, end, is_name in _pieces(text, origins, names) if is_name]
    done = 0
    for start, end in sorted(written):
        if start >= done:
            if start > done:
                yield PromptRun(text[done:start], False)
            yield PromptRun(text[start:end], True)
            done = end
    if done < len(text):
        yield PromptRun(text[done:], False)


def _is_written(text: str, origins: bytes, span: tuple[int, int]) -> bool:
    """Whether the template wrote a part of the text, apart from the spaces around it, which some tokens absorb."""
    start, end = span
    part = text[start:end]
    written = origins[end - len(part.lstrip()) : start + len(part.rstrip())]
    return DATA not in written and written[:1] == written[-1:] == bytes([TEMPLATE])


def _pieces(text: str, origins: bytes, names: SpecialNames) -> Iterator[tuple[int, int, bool]]:
    """Split the text into names that the template wrote and the pieces between them: (start, end, is_name)."""
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


def _join(text: str, pieces: list[tuple[int, int, bool]], names: SpecialNames) -> list[PromptRun]:
    """Join consecutive pieces to one run if the names in it are exactly those that the template wrote."""
    if not pieces:
        return []
    first, last = pieces[0][0], pieces[-1][1]
    written = [(start - first, end - first) for start, end, is_name in pieces if is_name]
    if list(names.find(text[first:last])) == written:
        return [PromptRun(text[first:last], True)]
    return [PromptRun(text[start:end], is_name) for start, end, is_name in pieces]
