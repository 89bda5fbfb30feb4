"""Guides: what a generated text must match. They are immutable and do not depend on a model."""

from __future__ import annotations

import json
import re
import sys
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from llamac.arguments import wrong_type
from llamac.errors import ArgumentError
from llamac.guided.library import check, checked_text, llguidance
from llamac.guided.schemas import MAX_STRING, TOO_DEEP, schema_grammar, type_schema

Syntax = Literal["lark", "gbnf"]

MAX_GRAMMAR, MAX_PATTERN = 1 << 20, 1 << 17  # characters
# The library's parser follows each option by itself, up to 2,000 of them; its lexer follows any number as one
# expression, but compiles a long option slowly.
MAX_ROWS = 1000
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)  # of GBNF
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')


class Guide:
    """What a generated text must match: `Json`, `Regex`, `Choice` or `Grammar`.

    Attributes:
        grammar: The grammar in llguidance's form.
        closings: Tokens that end free text inside of the grammar, for completing a text before `max_tokens`.
    """

    grammar: str
    closings: tuple[tuple[int, ...], ...]

    def __init__(self, grammar: str, shown: str, closings: Iterable[Iterable[int]] = ()) -> None:
        self.grammar = grammar
        self.closings = tuple(map(tuple, closings))
        self._shown = shown

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Guide) and self.grammar == other.grammar

    def __hash__(self) -> int:
        return hash(self.grammar)

    def __repr__(self) -> str:
        return f"llamac.{type(self).__name__}({self._shown})"


class Json(Guide):
    """The text is JSON, and matches a schema.

    Attributes:
        schema: The schema.
    """

    schema: Mapping[str, Any]

    def __init__(self, schema: object = None) -> None:
        """Compile a schema.

        Args:
            schema: A JSON schema (draft 2020-12) as a dict or bool, or its text; a Pydantic model, a dataclass or a
                TypedDict; or a type such as `list[int]`. Default: any JSON object.

        Raises:
            ArgumentError: If the schema is wrong, or has a keyword that is not supported. The message names the place.
            UnsupportedError: If llguidance is not installed.
        """
        llguidance()
        found: Any = schema
        if schema is None:
            found = {"type": "object"}
        elif isinstance(schema, str):
            try:
                found = json.loads(schema)
            except RecursionError:
                raise ArgumentError(TOO_DEEP) from None
            except ValueError as error:
                raise ArgumentError(f"the JSON schema is not JSON: {error}") from None
        elif isinstance(schema, type) or typing.get_origin(schema) is not None:
            found = type_schema(schema)
        if found is True:
            found = {}
        if not isinstance(found, Mapping):
            if found is False:
                raise ArgumentError("the JSON schema is false, which allows nothing")
            raise wrong_type("schema", found, "a JSON schema, a type or a Pydantic model")
        grammar = schema_grammar(found)
        self.schema = found
        name = schema.__name__ if isinstance(schema, type) and not typing.get_origin(schema) else _short(schema)
        super().__init__(grammar, name)


class Regex(Guide):
    """The whole text matches a regular expression."""

    def __init__(self, pattern: str) -> None:
        """Compile a regular expression.

        Args:
            pattern: In the syntax of Rust's `regex`: like Python's, without look-around and back references.

        Raises:
            ArgumentError: If it is wrong or too long. The message shows the place.
            UnsupportedError: If llguidance is not installed.
        """
        if not isinstance(pattern, str):
            raise wrong_type("pattern", pattern, "a str")
        grammar = llguidance().LLMatcher.grammar_from_regex(checked_text(pattern, "pattern", MAX_PATTERN))
        super().__init__(check(grammar, "the regular expression"), _short(pattern))


class Choice(Guide):
    """The text is one of several."""

    def __init__(self, options: Sequence[str]) -> None:
        """Compile the options.

        Raises:
            ArgumentError: If there are none, or one is empty or too long.
            UnsupportedError: If llguidance is not installed.
        """
        if isinstance(options, str) or not isinstance(options, Sequence):
            raise wrong_type("options", options, "a sequence of str")
        for option in options:
            if not isinstance(option, str):
                raise wrong_type("each of options", option, "a str")
            if not option:
                raise ArgumentError("options holds an empty str: give each option a text")
            checked_text(option, "an option", MAX_STRING)
        if not options:
            raise ArgumentError("options is empty, expected at least one text")
        texts = " | ".join(json.dumps(option, ensure_ascii=False) for option in options)
        lark = f"start: {texts}" if len(options) <= MAX_ROWS else f"start: OPTION\nOPTION: {texts}"
        super().__init__(check(llguidance().LLMatcher.grammar_from_lark(lark), "options"), _short(list(options)))


class Grammar(Guide):
    """The text matches a context-free grammar."""

    def __init__(self, text: str, *, syntax: Syntax | None = None) -> None:
        """Compile a grammar.

        Args:
            text: The grammar.
            syntax: "lark": llguidance's variant of Lark, which begins with the rule `start`; "gbnf": llama.cpp's
                GBNF, which begins with the rule `root`. Default: GBNF if a line defines `root` with `::=`.

        Raises:
            ArgumentError: If the grammar is wrong or too long. The message shows the place.
            UnsupportedError: If llguidance is not installed.
        """
        if not isinstance(text, str):
            raise wrong_type("text", text, "a str")
        if syntax not in (None, "lark", "gbnf"):
            raise ArgumentError(f"syntax is {syntax!r}, expected 'lark', 'gbnf' or None")
        library = llguidance()
        lark, name = checked_text(text, "the grammar", MAX_GRAMMAR), "the grammar"
        if long := next((found for found in _STRING.finditer(text) if len(found[0]) - 2 > MAX_STRING), None):
            line = text.count("\n", 0, long.start()) + 1
            raise ArgumentError(f"the grammar has a string of more than {MAX_STRING:,} characters, in line {line}")
        if syntax == "gbnf" or (syntax is None and re.search(r"(?m)^\s*root\s*::=", text)):
            lark, name = _lark_of(text), "the GBNF grammar, converted to Lark's syntax,"
        super().__init__(check(library.LLMatcher.grammar_from_lark(lark), name), _short(text))


def _lark_of(text: str) -> str:
    """A GBNF grammar in Lark's syntax."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    text = _ESCAPE.sub(_unescaped, text)
    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # the library raises several kinds, some of them plain
        raise ArgumentError(f"the GBNF grammar cannot be used: {error}") from None


def _unescaped(escape: re.Match[str]) -> str:
    """An escape of GBNF as Lark also reads it: a code above ASCII as its character."""
    digits = escape[1] or escape[2]
    if not digits:
        return escape[0]
    code = int(digits, 16)
    if 0xD800 <= code < 0xE000 or code > sys.maxunicode:
        line = escape.string.count("\n", 0, escape.start()) + 1
        raise ArgumentError(f"the GBNF grammar has the escape {escape[0]} in line {line}, which is not a character")
    return chr(code) if code > 0x7F else f"\\x{code:02x}"


def _short(value: object) -> str:
    """An argument as `repr` shows it."""
    text = "" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
