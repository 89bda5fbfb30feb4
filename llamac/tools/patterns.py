"""Regular expressions over a text that arrives in pieces, in linear time.

Formats describe their tags with them. Python's `re` cannot say whether the end of a text could still become a match,
and a pattern from a checkpoint could keep it busy forever. This matcher follows all alternatives at once, in the order
in which `re` would try them, and so finds the match that `re` finds.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from llamac.errors import UnsupportedError

_OLD = sys.version_info < (3, 11)
ops: Any = importlib.import_module("sre_constants" if _OLD else "re._constants")
parser: Any = importlib.import_module("sre_parse" if _OLD else "re._parser")

MAX_HELD = 256  # characters that a match can have while it can still grow
MAX_PROGRAM = 2000  # instructions of a pattern
MAX_PATTERN = 2000  # characters of a pattern
MAX_DEPTH = 50  # of nested groups


class Found(NamedTuple):
    """A match.

    Attributes:
        end: Where it ends in the text.
        groups: The texts of the named groups that matched.
    """

    end: int
    groups: Mapping[str, str]


class Partial:
    """The text ends before it is known whether there is a match."""


PARTIAL: Final = Partial()
Outcome = Found | Partial | None
Accepts = Callable[[str], bool]
Saved = tuple[tuple[int, int], ...]  # slots of groups and places in the text; the last entry of a slot counts
Thread = tuple[int, Saved]

# Kinds of instructions. An instruction is a tuple of its kind and its arguments. CHAR has what it accepts, and whether
# these are single characters that the pattern names.
CHAR, SPLIT, JUMP, SAVE, START, END, MATCH = range(7)

_CATEGORIES: dict[Any, Accepts] = {
    ops.CATEGORY_DIGIT: lambda c: c.isdecimal(),
    ops.CATEGORY_NOT_DIGIT: lambda c: not c.isdecimal(),
    ops.CATEGORY_SPACE: lambda c: c.isspace(),
    ops.CATEGORY_NOT_SPACE: lambda c: not c.isspace(),
    ops.CATEGORY_WORD: lambda c: c.isalnum() or c == "_",
    ops.CATEGORY_NOT_WORD: lambda c: not (c.isalnum() or c == "_"),
}


class Pattern:
    """A compiled pattern. A dot matches line feeds, too. Immutable; threads can share it."""

    def __init__(self, source: str) -> None:
        """Compile a pattern.

        Raises:
            UnsupportedError: If it is wrong, too large, or uses look-around, back references or flags.
        """
        self.source = source
        if len(source) > MAX_PATTERN:
            raise UnsupportedError(f"the pattern has {len(source)} characters, more than {MAX_PATTERN}")
        try:
            parsed = parser.parse(source, re.DOTALL)
        except (re.error, RecursionError, OverflowError) as error:
            raise UnsupportedError(f"the pattern {source[:80]!r} is wrong: {error}") from None
        if parsed.state.flags & ~(re.DOTALL | re.UNICODE):
            raise UnsupportedError(f"the pattern {source[:80]!r} has flags, which are not supported")
        self._names = {number: name for name, number in parsed.state.groupdict.items()}
        self._program: list[tuple[Any, ...]] = []
        self._compile(parsed, 0)
        self._add(MATCH)
        self._first: dict[str, bool] = {}

    @property
    def names(self) -> frozenset[str]:
        """The names of the groups."""
        return frozenset(self._names.values())

    def may_start_with(self, char: str) -> bool:
        """Whether a match can begin with a character."""
        if char not in self._first:
            threads = self._followed([(0, ())], 0, at_start=True, at_end=None)
            self._first[char] = any(self._accepts(op, char) for op, _ in threads)
        return self._first[char]

    def spells(self, text: str) -> bool:
        """Whether a text is a part of the pattern as it stands there, not where the pattern takes any character."""
        reached: list[Thread] = [(op, ()) for op, (kind, *_) in enumerate(self._program) if kind == CHAR]
        for char in text:
            threads = self._followed(reached, 0, at_start=True, at_end=True)
            reached = [(op + 1, ()) for op, _ in threads if self._accepts(op, char) and self._program[op][2]]
        return bool(reached)

    def match(
        self, text: str, at: int = 0, *, final: bool = True, starts: bool = True, limit: int = MAX_HELD
    ) -> Outcome:
        """Match at a place.

        Args:
            text: The text.
            at: The place.
            final: Whether nothing follows the text.
            starts: Whether nothing comes before the text.
            limit: Characters from which on a match no longer grows.

        Returns:
            The match; PARTIAL if more text can change the outcome; None if there is no match.
        """
        best: Found | None = None
        place, size = at, len(text)
        reached: list[Thread] = [(0, ())]
        while True:
            at_end = (True if final else None) if place == size else False
            threads = self._followed(reached, place, at_start=starts and place == 0, at_end=at_end)
            for index, (op, saved) in enumerate(threads):
                if self._program[op][0] == MATCH:
                    best, threads = Found(place, self._groups(text, saved)), threads[:index]
                    break
            if not threads or place - at > limit:
                return best
            if place == size:
                return best if final else PARTIAL
            char, place = text[place], place + 1
            reached = [(op + 1, saved) for op, saved in threads if self._accepts(op, char)]

    def _accepts(self, op: int, char: str) -> bool:
        instruction = self._program[op]
        return instruction[0] == CHAR and bool(instruction[1](char))

    def _followed(self, reached: list[Thread], place: int, *, at_start: bool, at_end: bool | None) -> list[Thread]:
        """The threads at instructions that wait for a character, in the order in which `re` would try them.

        at_end: whether the text ends here; None: it is not known.
        """
        found: list[Thread] = []
        seen: set[int] = set()
        stack = reached[::-1]
        while stack:
            op, saved = stack.pop()
            if op in seen:
                continue
            seen.add(op)
            instruction = self._program[op]
            kind = instruction[0]
            if kind == SPLIT:
                stack += [(instruction[2], saved), (instruction[1], saved)]
            elif kind == JUMP:
                stack.append((instruction[1], saved))
            elif kind == SAVE:
                stack.append((op + 1, (*saved, (instruction[1], place))))
            elif (kind == START and at_start) or (kind == END and at_end):
                stack.append((op + 1, saved))
            elif kind in (CHAR, MATCH) or (kind == END and at_end is None):
                found.append((op, saved))
        return found

    def _groups(self, text: str, saved: Saved) -> dict[str, str]:
        places = dict(saved)
        names = self._names.items()
        return {name: text[places[2 * n] : places[2 * n + 1]] for n, name in names if 2 * n + 1 in places}

    # ---- compiling

    def _add(self, *instruction: Any) -> int:
        if len(self._program) >= MAX_PROGRAM:
            raise UnsupportedError(f"the pattern {self.source[:80]!r} is too large")
        self._program.append(instruction)
        return len(self._program) - 1

    def _compile(self, nodes: Any, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise UnsupportedError(f"the pattern {self.source[:80]!r} is nested too deeply")
        for op, value in nodes:
            if op is ops.MAX_REPEAT or op is ops.MIN_REPEAT:
                least, most, inner = value
                self._compile_repeat(least, most, inner, greedy=op is ops.MAX_REPEAT, depth=depth)
            elif op is ops.BRANCH:
                self._compile_branches(value[1], depth)
            elif op is ops.SUBPATTERN:
                group, added, removed, inner = value
                if added or removed:
                    raise UnsupportedError(f"the pattern {self.source[:80]!r} has flags, which are not supported")
                if group in self._names:
                    self._add(SAVE, 2 * group)
                self._compile(inner, depth + 1)
                if group in self._names:
                    self._add(SAVE, 2 * group + 1)
            elif op is ops.AT and value in (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING):
                self._add(START)
            elif op is ops.AT and value in (ops.AT_END, ops.AT_END_STRING):
                self._add(END)
            else:
                self._add(CHAR, self._characters(op, value), _is_literal(op, value))

    def _compile_branches(self, branches: Any, depth: int) -> None:
        jumps = []
        for index, branch in enumerate(branches):
            split = self._add(SPLIT, 0, 0) if index + 1 < len(branches) else None
            self._compile(branch, depth + 1)
            if split is not None:
                jumps.append(self._add(JUMP, 0))
                self._program[split] = (SPLIT, split + 1, len(self._program))
        for jump in jumps:
            self._program[jump] = (JUMP, len(self._program))

    def _compile_repeat(self, least: int, most: Any, inner: Any, *, greedy: bool, depth: int) -> None:
        for _ in range(least):
            self._compile(inner, depth + 1)
        splits = []
        if most is ops.MAXREPEAT:
            splits.append(self._add(SPLIT, 0, 0))
            self._compile(inner, depth + 1)
            self._add(JUMP, splits[0])
        else:
            for _ in range(least, most):
                splits.append(self._add(SPLIT, 0, 0))
                self._compile(inner, depth + 1)
        for split in splits:
            ways = (split + 1, len(self._program))
            self._program[split] = (SPLIT, *(ways if greedy else ways[::-1]))

    def _characters(self, op: Any, value: Any) -> Accepts:
        """What a node that stands for one character accepts."""
        if op is ops.LITERAL:
            return chr(value).__eq__
        if op is ops.NOT_LITERAL:
            return chr(value).__ne__
        if op is ops.ANY:
            return lambda char: True
        if op is ops.RANGE:
            return lambda char: value[0] <= ord(char) <= value[1]
        if op is ops.CATEGORY and value in _CATEGORIES:
            return _CATEGORIES[value]
        if op is ops.IN:
            negated = value[0][0] is ops.NEGATE
            parts = [self._characters(*part) for part in value[negated:]]
            return lambda char: any(part(char) for part in parts) is not negated
        raise UnsupportedError(f"the pattern {self.source[:80]!r} uses {str(op).lower()}, which is not supported")


def _is_literal(op: Any, value: Any) -> bool:
    return op is ops.LITERAL or (op is ops.IN and all(part is ops.LITERAL for part, _ in value))


@functools.lru_cache(maxsize=512)
def pattern(source: str) -> Pattern:
    """A compiled pattern, compiled once."""
    return Pattern(source)


def after_last(found: Pattern, text: str) -> str:
    """The text behind the last match in it, else the whole text."""
    for at in range(len(text) - 1, -1, -1):
        if found.may_start_with(text[at]):
            match = found.match(text, at)
            if isinstance(match, Found) and match.end > at:
                return text[match.end :]
    return text
