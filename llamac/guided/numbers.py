"""Numbers of JSON schemas that llguidance, which reads all numbers as doubles, would change."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, NamedTuple, TypeGuard

from llamac.guided.library import llguidance

LIMIT = 1 << 63  # the library's integers are smaller; a constant or limit of -LIMIT makes it overflow the stack
EXACT = 1 << 53  # up to here, doubles hold every integer
# The library cannot express smaller numbers than this one, which stands for 0 as an excluded lower limit.
SMALLEST = 1e-20
# The keywords of included and excluded limits, and the factor that makes them lower limits.
_SIDES = (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1))


class _Limit(NamedTuple):
    """A limit as a lower one: upper limits have the opposite sign here."""

    value: float
    is_excluded: bool
    name: str


def number_problem(schema: Mapping[str, Any]) -> str:
    """What is wrong with the numbers in a schema's own keywords, in one line; an empty string if nothing is."""
    for name in ("const", "enum"):
        for number in _numbers(schema.get(name)):
            if not _is_constant(number):
                found = f"a guide cannot write the number {_shown(number)} exactly"
                return f"{found}: use a string, or a number with fewer digits"
    for included, excluded, sign in _SIDES:
        limit = _limit(schema, included, excluded, sign)
        if limit is None:
            continue
        found = f"{limit.name} is {_shown(limit.value * sign)}"
        if abs(limit.value) > sys.float_info.max:
            return f"{found}, which is too large for a double: use a smaller one"
        if sign > 0 and not (limit.value >= -LIMIT and _kept(limit, sign).value < LIMIT):
            return f"{found}: a lower limit needs to be from -2**63 to 2**63 - 1025"
        if sign < 0 and _kept(limit, sign).value >= LIMIT:
            return f"{found}: an upper limit needs to be at least 1025 - 2**63"
    return ""


def _shown(number: float) -> str:
    """A number as Python writes it, unless it has too many digits for that."""
    return repr(number) if isinstance(number, float) or abs(number) < 10**100 else f"{Decimal(number):.3e}"


def _numbers(value: object) -> Iterator[float]:
    """All numbers in a JSON value."""
    if _is_number(value):
        yield value
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for part in parts:
        yield from _numbers(part)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_constant(number: float) -> bool:
    """Whether the library writes this number."""
    if isinstance(number, int) and -LIMIT <= number < LIMIT:
        return number == LIMIT - 1 or (number > -LIMIT and int(float(number)) == number)
    return _written(number) == Decimal(repr(number))


def _written(number: float) -> Decimal | None:
    """A number as the library writes it, which reads numbers with many digits inexactly; None if it refuses it."""
    exact = Decimal(repr(number))
    _, digits, exponent = exact.as_tuple()
    if len(digits) <= 15 and abs(int(exponent)) <= 22:
        return exact
    library = llguidance()
    grammar = library.LLMatcher.grammar_from_json_schema(json.dumps({"const": number}))
    matcher = library.LLMatcher(library.LLTokenizer("byte"), grammar, log_level=0)
    return None if matcher.is_error() else Decimal(matcher.compute_ff_bytes().decode())


def _at_least(number: float) -> float:
    """The first double from this one on that the library does not read as a smaller number."""
    found = number
    while float(_written(found) or found) < number:
        found = math.nextafter(found, math.inf)
    return found


def _limit(schema: Mapping[Any, Any], included: str, excluded: str, sign: int) -> _Limit | None:
    """The strictest limit of one side; None if it has none, or one that the library refuses.

    In draft 4 of JSON Schema, a boolean says whether the other limit is excluded.
    """
    own, other = schema.get(included), schema.get(excluded)
    if isinstance(own, bool) or not all(value is None or isinstance(value, int | float) for value in (own, other)):
        return None
    limits = [_Limit(own * sign, other is True, included)] if own is not None else []
    if _is_number(other):
        limits.append(_Limit(other * sign, True, excluded))
    return max(limits, default=None)


def _kept(limit: _Limit, sign: int) -> _Limit:
    """The next limit that the library keeps. Beyond 2**53, it is an included double, written as an integer."""
    if abs(limit.value) < EXACT:
        return limit._replace(value=_at_least(limit.value))
    value = max(int(limit.value) + limit.is_excluded, 1 - LIMIT)
    if value == 1 - LIMIT and sign < 0:  # the library's largest integer, which it makes of larger limits
        return limit._replace(value=-LIMIT, is_excluded=False)
    rounded = float(value)
    if rounded < value:
        rounded = math.nextafter(rounded, math.inf)
    return limit._replace(value=int(rounded), is_excluded=False)


def with_kept_limits(schema: dict[Any, Any]) -> dict[Any, Any]:
    """The schema with limits that the library keeps. They allow no number that the schema does not allow.

    The library would round large limits. It would allow an excluded integer that is the next one to the other limit.
    """
    low, high = (_limit(schema, *side) for side in _SIDES)
    for (included, excluded, sign), limit, other in zip(_SIDES, (low, high), (high, low), strict=True):
        if limit is None:
            continue
        value, is_excluded, _ = _kept(limit, sign)
        if is_excluded and other and value == int(value) and 0 <= value < -other.value < value + 1:
            value, is_excluded = _at_least(math.nextafter(value, math.inf)) if value else SMALLEST, False
        schema = {name: part for name, part in schema.items() if name not in (included, excluded)}
        schema[excluded if is_excluded else included] = value * sign
    return schema
