"""Writes calls as a model writes them, for chat templates that do not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from llamac.text.marks import MarkedText
from llamac.tools.formats import FORMATS, Format
from llamac.tools.notations import EQUALS, IS_STRING, Notation

_PLACES = re.compile("(NAME|NUMBER|ARGUMENTS)")


def written_calls(form: Format, calls: Iterable[Any]) -> MarkedText:
    """The text of an answer with these calls. The format's own text around them counts as the template's.

    Args:
        form: The model's format. Calls have Hermes' form if its calls cannot be forced.
        calls: Calls in OpenAI's form. What is missing in one is left empty.
    """
    writing = form.writing if form.writing.call else FORMATS["hermes"].writing
    pieces = [(writing.begin, True)]
    for number, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        function = function if isinstance(function, Mapping) else {}
        name, arguments = str(function.get("name") or ""), function.get("arguments", {})
        values = {"NAME": name, "NUMBER": str(number), "ARGUMENTS": _arguments(writing.style, arguments)}
        pieces += [(writing.between or "", True)] if number else []
        pieces += [(values.get(part, part), part not in values) for part in _PLACES.split(writing.call)]
    return MarkedText([*pieces, (writing.end, True)])


def _arguments(style: Notation | tuple[str, ...] | None, arguments: Any) -> str:
    """Arguments in a style; JSON if they are not an object, or the style can have JSON."""
    if isinstance(arguments, str):
        return arguments
    if not isinstance(arguments, Mapping) or style is None or (isinstance(style, Notation) and style.is_json):
        return json.dumps(arguments, ensure_ascii=False)
    if isinstance(style, Notation):
        return style.between.join(f"{key}{EQUALS}{_value(style, value)}" for key, value in arguments.items())
    opening, middle, space, closing, after = style
    texts = {key: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for key, v in arguments.items()}
    middles = {key: middle.replace(IS_STRING, json.dumps(isinstance(v, str))) for key, v in arguments.items()}
    return "".join(f"{opening}{key}{middles[key]}{text}{space}{closing}{after}" for key, text in texts.items())


def _value(notation: Notation, value: Any) -> str:
    """A value in Python's syntax."""
    if isinstance(value, bool) or value is None:
        return notation.constants[json.dumps(value)]
    if isinstance(value, Mapping):
        pairs = (f"{_value(notation, key)}{notation.pair}{_value(notation, item)}" for key, item in value.items())
        return f"{{{notation.between.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{notation.between.join(_value(notation, item) for item in value)}]"
    return json.dumps(value, ensure_ascii=False)
