"""Guides that force tool calls, in the model's format and with arguments that match the tools' schemas."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llamac.errors import ArgumentError, UnsupportedError
from llamac.guided.guides import Guide
from llamac.guided.library import check, llguidance
from llamac.guided.schemas import close_objects, schema_grammar
from llamac.text.tokenizer import Tokenizer
from llamac.tools.formats import FORMATS, Format, Writing
from llamac.tools.notations import Notation, Values, is_name, tagged_parameters
from llamac.tools.rules import Rules, json_value

_PLACES = re.compile("(NAME|ARGUMENTS|NUMBER|TEXT)")
_NUMBER = "/[0-9]{1,3}/"


class ToolCalls(Guide):
    """The text is one or more tool calls, or has tool calls in it."""


def calls_guide(
    form: Format,
    tools: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    parallel: bool,
    among_text: bool = False,
    answer: Mapping[str, Any] | None = None,
) -> ToolCalls:
    """A guide for calls of these tools.

    Args:
        form: The model's format.
        tools: The tools that may be called, in OpenAI's form.
        tokenizer: The model's tokenizer, which has the tokens that mark calls.
        parallel: Whether there can be several calls.
        among_text: Whether calls may occur in ordinary text, or be missing.
        answer: The JSON schema of an answer that may come in place of the calls.

    Raises:
        ArgumentError: If a tool's schema cannot be used.
        UnsupportedError: If calls cannot be forced in this format, or llguidance is not installed.
    """
    writing = form.writing
    if not writing.call or (among_text and not writing.trigger):
        names = ", ".join(name for name, each in FORMATS.items() if each.writing.call)
        raise UnsupportedError(f"tool calls cannot be forced in the format {form.name!r}, only in {names}")
    rules = Rules(tokenizer)
    begin, text = writing.begin, writing.call
    if among_text and begin:
        begin = begin.removeprefix(writing.trigger)
    elif among_text:
        text = text.removeprefix(writing.trigger)
    rules.lines.append("call: " + " | ".join(_call(rules, writing, text, tool) for tool in tools))
    several = parallel and writing.between is not None
    more = f"({rules.literals(writing.between or '')} call)*" if several and (writing.begin or not among_text) else ""
    whole = f"{rules.literals(begin)} call {more} {rules.literals(writing.end)}"
    if among_text:
        rules.lines.append(f"calls: {rules.until(writing.trigger)} {whole}")
        whole = f"calls{'*' if several and not writing.begin else '?'} {rules.text}"
    else:
        if answer is not None:
            whole = f"({whole} | {rules.literals(writing.head)} {json_value(answer)})"
        if writing.free:
            whole = f"({_symbols(rules, writing.free)})? {whole}"
    rules.lines.append(f"start: {whole}")
    grammar = llguidance().LLMatcher.grammar_from_lark("\n".join(["%llguidance {}", *rules.lines]))
    shown = ", ".join(tool["function"]["name"] for tool in tools)
    if not rules.has_tokens:  # else the vocabulary checks it
        check(grammar, "the grammar of the tool calls")
    return ToolCalls(grammar, shown, rules.closings)


def _call(rules: Rules, writing: Writing, text: str, tool: Mapping[str, Any]) -> str:
    """Add the rule of a tool's calls; return its name."""
    function = tool["function"]
    name = function["name"]
    schema = copy.deepcopy(dict(function.get("parameters") or {"type": "object", "properties": {}}))
    if function.get("strict") is False:
        schema = {"type": "object"}
    close_objects(schema)
    try:
        schema_grammar(schema)
        if isinstance(writing.style, Notation) and not writing.style.is_json and not is_name(name):
            raise ArgumentError("the model's format has Python's calls, and the name does not begin with a letter")
        arguments = _arguments(rules, writing, schema)
    except ArgumentError as error:
        raise ArgumentError(f"calls of the tool {name!r} cannot be forced: {error}") from None
    return rules.add("call", _symbols(rules, text, {"NAME": rules.literals(name), "ARGUMENTS": arguments}))


def _arguments(rules: Rules, writing: Writing, schema: Mapping[str, Any]) -> str:
    """The symbols of a call's arguments."""
    if writing.style is None:
        return json_value(schema)
    if isinstance(writing.style, Notation):
        return Values(rules, writing.style, schema).arguments()
    return tagged_parameters(rules, schema, writing.style)


def _symbols(rules: Rules, text: str, values: Mapping[str, str] | None = None) -> str:
    """A text with special tokens and places as symbols of a rule."""
    found: list[str] = []
    parts = _PLACES.split(text)
    for index, part in enumerate(parts):
        if part == "TEXT":
            found.append(rules.until(parts[index + 1]))
            parts[index + 1] = ""
        elif part == "NUMBER":
            found.append(rules.add("NUMBER", _NUMBER))
        else:
            found.append(values[part] if values is not None and part in values else rules.literals(part))
    return " ".join(found)
