"""Decides, without running it, whether a regular expression searches every text in linear time.

The library `tokenizers` searches with Oniguruma, which backtracks: a hostile expression can take days. `regex_problem`
proves linear time for a class of expressions that includes those of known models. Expressions without a proof count as
problems. The proof has three parts:

* An attempt to match at one position takes a limited number of steps before it enters an unbounded repeat. Alternatives
  and bounded repeats multiply the ways to try, so the steps are counted (`MAX_STEPS`).
* Only optional parts can follow an unbounded repeat of one character class. So after the repeat the attempt succeeds,
  and consumes every character that it has read.
* Some branches can fail after they have read a run of characters. The search would then continue one character later
  and read the run again. Such a branch is accepted if the next branch consumes the run: `C*X` and `C+X` before a branch
  that begins with `C+`, and `U*L+` before `U+L*`. `\\s+(?!\\S)` gives back at most one character.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

MAX_STEPS = 100  # steps of failing attempts at one position
MAX_LENGTH = 10_000  # characters of an expression; DeepSeek's list of letters has 3,000
MAX_DEPTH = 20  # nested groups
MAX_REPEATS = 1000  # the largest bound of a bounded repeat


class Char(NamedTuple):
    """A part that matches exactly one character. `text` is its source: a literal, an escape or a class."""

    text: str


class Anchor(NamedTuple):
    """A part that matches at a position and consumes nothing."""

    text: str


class Group(NamedTuple):
    """Alternatives. If `atomic`, the first match is final: the engine does not backtrack into the group."""

    branches: tuple[Branch, ...]
    atomic: bool = False


class Look(NamedTuple):
    """A lookahead or lookbehind. `kind` is "=", "!", "<=" or "<!"."""

    kind: str
    group: Group


class Repeat(NamedTuple):
    """A part repeated `least` to `most` times; None means unbounded."""

    part: Part
    least: int
    most: int | None
    possessive: bool = False


Part: TypeAlias = "Char | Anchor | Group | Look | Repeat"
Branch: TypeAlias = tuple[Part, ...]


class UnprovenError(Exception):
    """The expression's syntax is unknown, or it is not proven to take linear time."""


def regex_problem(expression: str) -> str:
    """Explain why an expression is not proven to search in linear time. Empty if it is proven."""
    try:
        branches = parse(expression).branches
        _check(sum(_failing_steps(branches, index) for index in range(len(branches))))
    except UnprovenError as problem:
        return f"{problem}: {expression[:80]!r}"
    return ""


def can_match_nothing(expression: str) -> bool:
    """Whether an expression can match an empty string. False if its syntax is unknown."""
    try:
        return _is_nullable(parse(expression))
    except UnprovenError:
        return False


# ---- the proof


def _failing_steps(branches: Sequence[Branch], index: int) -> int:
    """The steps that a branch can waste at a position, or per character of a run that the next branch consumes."""
    branch = branches[index]
    if branch == _SPACES_BUT_ONE:
        return 2
    if index + 1 < len(branches):
        if _consumes_upper_run(branch, branches[index + 1]):
            return 2 * _steps(branches[index + 1])
        if _is_run(branch[:1]) and _consumes_run_of(branch[0], branches[index + 1 :]):
            return 1 + _steps(branch[1:])
    return _steps(branch)


def _consumes_upper_run(branch: Branch, following: Branch) -> bool:
    """Whether the branches are `U*L+` and `U+L*` with the same parts around them."""
    return any(
        _is_run(branch[at : at + 2])
        and following == (*branch[:at], upper._replace(least=1), lower._replace(least=0), *branch[at + 2 :])
        for at, (upper, lower) in enumerate(itertools.pairwise(branch))
        if isinstance(upper, Repeat) and isinstance(lower, Repeat) and (upper.least, lower.least) == (0, 1)
    )


def _consumes_run_of(run: Part, following: Sequence[Branch]) -> bool:
    """Whether the next branch that does not fail after a run of the same characters consumes the run."""
    assert isinstance(run, Repeat)
    for branch in following:
        first = branch[0] if branch else None
        if not isinstance(first, Repeat) or first.part != run.part or not _is_run(branch[:1]):
            return False
        if branch == _SPACES_BUT_ONE or (first.least == 1 and all(map(_is_optional, branch[1:]))):
            return True
        _steps(branch[1:])
    return False


def _steps(branch: Branch) -> int:
    """The largest number of steps in a failing attempt. It must not fail after an unbounded repeat (UnprovenError)."""
    ways, total = 1, 0
    for index, part in enumerate(branch):
        if not _is_unbounded(part):
            more_ways, steps = _bounded(part)
            total, ways = total + ways * steps, ways * more_ways
            _check(total)
            continue
        if not all(map(_is_optional, branch[index + 1 :])):
            raise UnprovenError("a part after an unbounded repeat can fail")
        if isinstance(part, Group):
            return total + ways * sum(map(_steps, part.branches))
        if not isinstance(part, Repeat) or not isinstance(part.part, Char):
            raise UnprovenError("an unbounded repeat is not of a single character class")
        return total + ways * (part.least + 1)
    return total


def _bounded(part: Part) -> tuple[int, int]:
    """For a part without unbounded repeats: the ways to match at one position, and the steps to try all of them."""
    if isinstance(part, Look):
        return 1, 1 + _bounded(part.group)[1]
    if isinstance(part, Group):
        ways, total = 0, 0
        for branch in part.branches:
            branch_ways, steps = 1, 0
            for inner in branch:
                more_ways, more_steps = _bounded(inner)
                steps, branch_ways = steps + branch_ways * more_steps, branch_ways * more_ways
                _check(steps)
            ways, total = ways + branch_ways, total + steps
        return (1 if part.atomic else ways), total
    if isinstance(part, Repeat):
        if part.most is None:
            raise UnprovenError("an unbounded repeat is in a part that can fail or is repeated")
        inner_ways, inner_steps = _bounded(part.part)
        ways, total, power = 0, 0, 1
        for times in range(part.most + 1):
            ways += power if times >= part.least else 0
            total += power * inner_steps if times < part.most else 0
            power *= inner_ways
            _check(total)
        return (1 if part.possessive else ways), total
    return 1, 1


def _check(steps: int) -> None:
    if steps > MAX_STEPS:
        raise UnprovenError(f"an attempt to match can fail after more than {MAX_STEPS} steps")


def _is_run(branch: Branch) -> bool:
    """Whether all parts are unbounded repeats of single character classes."""
    return bool(branch) and all(
        isinstance(part, Repeat) and part.most is None and isinstance(part.part, Char) for part in branch
    )


def _is_unbounded(part: Part) -> bool:
    if isinstance(part, Repeat):
        return part.most is None or _is_unbounded(part.part)
    if isinstance(part, Group):
        return any(_is_unbounded(inner) for branch in part.branches for inner in branch)
    return isinstance(part, Look) and _is_unbounded(part.group)


def _is_optional(part: Part) -> bool:
    """Whether a part succeeds at every position, in a limited number of steps in addition to what it consumes."""
    if not isinstance(part, Repeat) or part.least:
        return False
    if not _is_run((part,)):
        _bounded(part)
    return True


def _is_nullable(part: Part) -> bool:
    if isinstance(part, Repeat):
        return part.least == 0 or _is_nullable(part.part)
    if isinstance(part, Group):
        return any(all(map(_is_nullable, branch)) for branch in part.branches)
    return isinstance(part, Anchor | Look)


# ---- the grammar: the part of Oniguruma's syntax that known expressions use

_PART = re.compile(
    r"(?P<open>\((?!\?)|\(\?(?:i?:|>|<?[=!]))|(?P<close>\))|(?P<bar>\|)"
    r"|(?P<repeat>[*+?]|\{\d{0,4}(?:,\d{0,4})?\})(?P<suffix>[+?]?)"
    r"|(?P<anchor>[\^$]|\\[bBAzZG])"
    r"|(?P<char>\\[pP]\{\^?\w+\}|\\x\{[0-9A-Fa-f]+\}|\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\[dDwWsShHrntfvae]"
    r"|\\[^0-9A-Za-z]|[^\\()\[\]{}|*+?^$])",
    re.DOTALL,
)


def parse(expression: str) -> Group:
    """Parse an expression.

    Raises:
        UnprovenError: If its syntax is unknown.
    """
    if len(expression) > MAX_LENGTH:
        raise UnprovenError(f"it has more than {MAX_LENGTH} characters")
    group, at = _parse_group(expression, 0, 0)
    if at < len(expression):
        raise UnprovenError(f"its syntax at character {at} is not analyzed")
    return group


def _parse_group(text: str, at: int, depth: int) -> tuple[Group, int]:
    """Parse the alternatives from `at` to the end of their group. Returns them and their end."""
    branches: list[list[Part]] = [[]]
    while at < len(text):
        branch = branches[-1]
        if text[at] == "[":
            end = _class_end(text, at)
            branch.append(Char(text[at:end]))
            at = end
            continue
        found = _PART.match(text, at)
        if found is None or (found["repeat"] and not branch) or depth > MAX_DEPTH:
            raise UnprovenError(f"its syntax at character {at} is not analyzed")
        if found["close"]:
            break
        at = found.end()
        if found["bar"]:
            branches.append([])
        elif found["open"]:
            group, at = _parse_group(text, at, depth + 1)
            if not text.startswith(")", at):
                raise UnprovenError("a group is not closed")
            at += 1
            kind = found["open"][2:]
            branch.append(Look(kind, group) if kind[-1:] in ("=", "!") else group._replace(atomic=kind == ">"))
        elif found["repeat"]:
            branch.append(_repeat(branch.pop(), found["repeat"], found["suffix"]))
        else:
            branch.append(Anchor(found[0]) if found["anchor"] else Char(found[0]))
    return Group(tuple(map(tuple, branches))), at


def _class_end(text: str, at: int) -> int:
    """The end of the character class that begins at `at`. Classes can be nested."""
    depth = 0
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == "[":
            depth += 1
            at += text.startswith("^", at + 1)
            at += text.startswith("]", at + 1)  # there it is a literal
        elif text[at] == "]":
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    raise UnprovenError("a character class is not closed")


def _repeat(part: Part, text: str, suffix: str) -> Repeat:
    least: int
    most: int | None
    if text[0] == "{":
        first, comma, last = text[1:-1].partition(",")
        least, most = int(first or 0), int(last) if last else None if comma else int(first or 0)
        if suffix or not (first or last) or (most or least) > MAX_REPEATS:
            raise UnprovenError(f"the repeat {text}{suffix} is not analyzed")
        return Repeat(part, least, most)
    least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[text]
    if suffix == "?" and most is None:
        raise UnprovenError(f"the repeat {text}{suffix} is not analyzed")
    return Repeat(part, least, most, suffix == "+")


_SPACES_BUT_ONE = parse(r"\s+(?!\S)").branches[0]
