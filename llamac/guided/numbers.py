"""Numbers of JSON schemas that llguidance, which reads all numbers as doubles, would change."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from llamac.guided.library import llguidance

LIMIT = 1 << 63  # the library's integers are smaller; a constant or limit of -LIMIT makes it overflow the stack
EXACT = 1 << 53  # up to here, doubles hold every integer
# The library cannot express smaller numbers than this one, which stands for 0 as an excluded lower limit.
SMALLEST = 1e-20


def number_problem(schema: Mapping[str, Any]) -> str:
    """What is wrong with the numbers in a schema's own keywords, in one line; an empty string if nothing is."""
    for name in ("const", "enum"):
        for number in _numbers(schema.get(name)):
            if not _is_constant(number):
                return f"the number {_shown(number)} has too many digits, and would be rounded: use a string"
    for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
        limit = schema.get(name)
        if isinstance(limit, int | float) and not _is_limit(limit, name):
            if abs(limit) >= LIMIT - 1:
                return f"{name} is {_shown(limit)}: the limits of an integer need to be between -2**63 and 2**63 - 1"
            return f"{name} is {_shown(limit)}, and would be rounded: use a number between -2**53 and 2**53"
    return ""


def _shown(number: float) -> str:
    """A number as Python writes it, unless it has too many digits for that."""
    return repr(number) if isinstance(number, float) or abs(number) < 10**100 else f"{Decimal(number):.3e}"


def _numbers(value: object) -> Iterator[float]:
    """All numbers in a JSON value."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield value
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for part in parts:
        yield from _numbers(part)


def _is_constant(number: float) -> bool:
    """Whether the library writes this number."""
    if abs(number) >= LIMIT:
        return False
    if isinstance(number, int):
        return number == LIMIT - 1 or int(float(number)) == number
    return _written(number) == number


def _is_limit(number: float, name: str) -> bool:
    """Whether the library keeps this limit."""
    if number >= LIMIT - 1:  # it writes no larger integers
        return name.endswith("aximum")
    least = EXACT if name.startswith("exclusive") else LIMIT - 512  # it computes the limit next to an excluded one
    return abs(number) < least and (isinstance(number, float) or int(float(number)) == number)


def _written(number: float) -> float | None:
    """A number as the library writes it, which reads numbers with many digits inexactly; None if it refuses it."""
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    if len(digits) <= 15 and abs(int(exponent)) <= 22:
        return number
    library = llguidance()
    grammar = library.LLMatcher.grammar_from_json_schema(json.dumps({"const": number}))
    matcher = library.LLMatcher(library.LLTokenizer("byte"), grammar, log_level=0)
    return None if matcher.is_error() else float(matcher.compute_ff_bytes())


def with_inclusive_limits(schema: dict[Any, Any]) -> dict[Any, Any]:
    """The schema without an excluded integer that is the next one to the other limit, which the library would allow."""
    low, high = _limit(schema, "exclusiveMinimum"), _limit(schema, "exclusiveMaximum")
    most, least = _limit(schema, "maximum", high), _limit(schema, "minimum", low)
    if low.is_integer() and 0 <= low < most < low + 1:
        schema = {**schema, "minimum": math.nextafter(low, math.inf) if low else SMALLEST}
        del schema["exclusiveMinimum"]
    elif high.is_integer() and high - 1 < least < high <= 0:
        schema = {**schema, "maximum": math.nextafter(high, -math.inf) if high else -SMALLEST}
        del schema["exclusiveMaximum"]
    return schema


def _limit(schema: Mapping[Any, Any], name: str, default: float = math.nan) -> float:
    """A limit of a schema; the default if it has none."""
    limit = schema.get(name)
    return float(limit) if isinstance(limit, int | float) else default
