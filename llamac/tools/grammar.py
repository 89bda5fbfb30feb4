"""Guides that force tool calls, in the model's format and with arguments that match the tools' schemas."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llamac.errors import ArgumentError, UnsupportedError
from llamac.guided.guides import Guide
from llamac.guided.library import check, llguidance
from llamac.guided.schemas import WHITE_SPACE, close_objects, schema_grammar
from llamac.text.tokenizer import Tokenizer
from llamac.tools.formats import FORMATS, Format
from llamac.tools.values import schema_types

_TEXT = r"/(.|\n)*/"
_PLACES = re.compile("(NAME|ARGUMENTS|PARAMETERS|TEXT)")


class ToolCalls(Guide):
    """The text is one or more tool calls, or has tool calls in it."""


def calls_guide(
    form: Format, tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, *, parallel: bool, among_text: bool = False
) -> ToolCalls:
    """A guide for calls of these tools.

    Args:
        form: The model's format.
        tools: The tools that may be called, in OpenAI's form.
        tokenizer: The model's tokenizer, which has the tokens that mark calls.
        parallel: Whether there can be several calls.
        among_text: Whether calls may stand in ordinary text, or be missing.

    Raises:
        ArgumentError: If a tool's schema cannot be used.
        UnsupportedError: If calls cannot be forced in this format, or llguidance is not installed.
    """
    writing = form.writing
    if not writing.call or (among_text and not writing.trigger):
        names = ", ".join(name for name, each in FORMATS.items() if each.writing.call)
        raise UnsupportedError(f"tool calls cannot be forced in the format {form.name!r}, only in {names}")
    rules = _Rules(tokenizer)
    begin, text = writing.begin, writing.call
    if among_text and begin:
        begin = begin.removeprefix(writing.trigger)
    elif among_text:
        text = text.removeprefix(writing.trigger)
    rules.lines.append("call: " + " | ".join(rules.call(f"call_{i}", text, tool) for i, tool in enumerate(tools)))
    several = parallel and writing.between is not None
    more = f"({rules.symbols(writing.between or '')} call)*" if several and (writing.begin or not among_text) else ""
    whole = f"{rules.symbols(begin)} call {more} {rules.symbols(writing.end)}"
    if among_text:
        rules.lines.append(f"calls: {rules.mark(writing.trigger)} {whole}")
        whole = f"calls{'*' if several and not writing.begin else '?'} {rules.symbols('TEXT')}"
    elif writing.free:
        whole = f"({rules.symbols(writing.free)})? {whole}"
    rules.lines.append(f"start: {whole}")
    grammar = llguidance().LLMatcher.grammar_from_lark("\n".join(["%llguidance {}", *rules.lines]))
    shown = ", ".join(tool["function"]["name"] for tool in tools)
    return ToolCalls(grammar if rules.has_tokens else check(grammar, "the grammar of the tool calls"), shown)


class _Rules:
    """Rules of a grammar in llguidance's variant of Lark.

    Attributes:
        lines: The rules.
        has_tokens: Whether they name special tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.lines: list[str] = []
        self.has_tokens = False
        self._tokenizer = tokenizer
        names = sorted(tokenizer.special_names, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def symbols(self, text: str, values: Mapping[str, str] | None = None) -> str:
        """A text with special tokens and places as symbols of a rule."""
        found: list[str] = []
        for part in _PLACES.split(text):
            if part == "TEXT":
                found.append("TEXT")
                if f"TEXT: {_TEXT}" not in self.lines:
                    self.lines.append(f"TEXT: {_TEXT}")
            elif values is not None and part in values and part != "NAME":
                found.append(values[part])
            else:
                found += self._literals(values["NAME"] if part == "NAME" and values is not None else part)
        return " ".join(found)

    def _literals(self, text: str) -> list[str]:
        """A text as strings and special tokens."""
        found, at = [], 0
        for match in self._special.finditer(text):
            token = self._tokenizer.id_of(match[0])
            if token is not None:
                found += [_quoted(text[at : match.start()]), f"<[{token}]>"]
                at, self.has_tokens = match.end(), True
        return [part for part in (*found, _quoted(text[at:])) if part != '""']

    def call(self, rule: str, text: str, tool: Mapping[str, Any]) -> str:
        """Add the rule of a tool's calls; return its name."""
        function = tool["function"]
        name = function["name"]
        schema = copy.deepcopy(dict(function.get("parameters") or {"type": "object", "properties": {}}))
        if function.get("strict") is False:
            schema = {"type": "object"}
        close_objects(schema)
        try:
            schema_grammar(schema)
        except ArgumentError as error:
            raise ArgumentError(f"calls of the tool {name!r} cannot be forced: {error}") from None
        values = {"NAME": name, "ARGUMENTS": _json(schema)}
        if "PARAMETERS" in text:
            values["PARAMETERS"] = self._parameters(rule, schema)
        self.lines.append(f"{rule}: {self.symbols(text, values)}")
        return rule

    def _parameters(self, rule: str, schema: Mapping[str, Any]) -> str:
        """The parameters of a call, each between tags."""
        found = []
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        for index, (key, part) in enumerate(schema.get("properties", {}).items()):
            opening = _quoted(f"<parameter={key}>\n")
            options = part.get("enum") if isinstance(part, Mapping) else None
            if isinstance(options, list) and options and all(isinstance(option, str) for option in options):
                body = f"({' | '.join(map(_quoted, options))}) {_quoted(chr(10) + '</parameter>' + chr(10))}"
            elif "string" in schema_types(part) or not schema_types(part):
                self.lines.append(f"{rule}_{index}[lazy]: /(.|\\n)*\\n<\\/parameter>\\n/")
                body = f"{rule}_{index}"
            else:
                body = f"{_json({**shared, **part})} {_quoted(chr(10) + '</parameter>' + chr(10))}"
            needed = key in schema.get("required", ())
            found.append(f"({opening} {body}){'' if needed else '?'}")
        return " ".join(found)

    def mark(self, trigger: str) -> str:
        """Ordinary text up to the first mark of a call."""
        symbols = self.symbols(trigger)
        if symbols.startswith("<["):
            return f"{self.symbols('TEXT')} {symbols}"
        self.lines.append(f"mark[lazy]: {_TEXT} {symbols}")
        return "mark"


def _json(schema: Mapping[str, Any]) -> str:
    """A schema inside a rule."""
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE, "lenient": False}})


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
