"""Guides: what they accept as arguments, and errors that show the place."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest

import llamac
from llamac import ArgumentError, UnsupportedError
from llamac.errors import ArgumentTypeError

Make = Callable[[], object]
CYCLE: dict[str, Any] = {}
CYCLE["items"] = CYCLE


def test_a_long_line_of_a_grammar_is_no_long_string() -> None:
    llamac.Grammar('start: "a"' + " " * 17_000 + '"b"')


def nested(depth: int) -> dict[str, Any]:
    """A schema of arrays in arrays."""
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: llamac.Json('{"type":'), "the JSON schema is not JSON: Expecting value: line 1 column 9"),
        (lambda: llamac.Json({"properties": {"a/b": {"type": "strng"}}}), "at /properties/a~1b: Invalid type: strng"),
        (lambda: llamac.Json({"items": {"anyOf": [{}, {"not": {}}]}}), "at /items/anyOf/1: 'not' is not supported"),
        (lambda: llamac.Json({"$ref": "#/$defs/x"}), "at its root: Pointer '/$defs/x' does not exist"),
        (
            lambda: llamac.Json({"$defs": {"x": {"uniqueItems": True}}, "items": {"$ref": "#/$defs/x"}}),
            "at /$defs/x: 'uniqueItems' is not supported",
        ),
        (lambda: llamac.Json({"format": "password"}), "at its root: Unknown format: password"),
        (
            lambda: llamac.Json({"items": {"type": "string", "pattern": "a)"}}),
            "at /items: the regular expression: unopened group, at character 2",
        ),
        (lambda: llamac.Json(False), "the JSON schema is false, which allows nothing"),
        (lambda: llamac.Json({"const": {1, 2}}), "at its root: not JSON: Object of type set"),
        (lambda: llamac.Json('{"not":' * 10**5), "the JSON schema is nested too deep"),
        (lambda: llamac.Json(nested(300)), "the JSON schema is nested too deep"),
        (lambda: llamac.Json(nested(10**5)), "the JSON schema is nested too deep"),
        (lambda: llamac.Json(CYCLE), "the JSON schema is not JSON: Circular reference detected"),
        (lambda: llamac.Json({"minimum": float("nan")}), "the JSON schema is not JSON: Out of range float values"),
        (lambda: llamac.Json({"type": "integer", "minimum": 2**64}), "minimum is 18446744073709551616: a lower limit"),
        (lambda: llamac.Json({"items": {"const": "a" * 20000}}), "at /items: a string of 20000 characters is too long"),
        (lambda: llamac.Json({"const": "\ud800"}), "the JSON schema contains a lone surrogate"),
        (lambda: llamac.Regex("\ud800"), "pattern contains a lone surrogate"),
        (lambda: llamac.Regex("a" * 131073), "pattern has 131,073 characters, expected at most 131,072"),
        (lambda: llamac.Choice(["\ud800"]), "an option contains a lone surrogate"),
        (lambda: llamac.Choice(["b", "a" * 16385]), "an option has 16,385 characters, expected at most 16,384"),
        (lambda: llamac.Grammar('start: "\ud800"'), "the grammar contains a lone surrogate"),
        (
            lambda: llamac.Grammar('start: "a" x\nx: "' + "a" * 16385 + '"'),
            "the grammar has a string of more than 16,384 characters, in line 2",
        ),
        (lambda: llamac.Grammar(" " * (2**20 + 1)), "the grammar has 1,048,577 characters, expected at most 1,048,576"),
        (lambda: llamac.Regex("[a"), 'the regular expression cannot be used: "[a": unclosed character class, at chara'),
        (lambda: llamac.Regex(r"(?=a)b"), "look-around, including look-ahead and look-behind, is not supported"),
        (lambda: llamac.Choice([]), "options is empty"),
        (lambda: llamac.Choice(["a", ""]), "options holds an empty str"),
        (lambda: llamac.Grammar('start: "a" b'), "the grammar cannot be used: line 1, column 8: unknown name"),
        (
            lambda: llamac.Grammar('root ::= "a" ['),
            "the GBNF grammar cannot be used: Unexpected end of input at line 1",
        ),
        (lambda: llamac.Grammar('root ::= "a" b'), "the GBNF grammar cannot be used: Rule 'b' not found"),
        (
            lambda: llamac.Grammar('first ::= "a"', syntax="gbnf"),
            "the GBNF grammar cannot be used: No 'root' rule found",
        ),
        (lambda: llamac.Grammar('first: "a"'), "the grammar cannot be used: no start rule found"),
        (
            lambda: llamac.Grammar('root ::= "a"\n  | "\\ud800"'),
            r"the GBNF grammar has the escape \ud800 in line 2, which is not a character",
        ),
        (
            lambda: llamac.Grammar('root ::= "a\n"'),
            "the GBNF grammar, converted to Lark's syntax, cannot be used: line 3",
        ),
        (lambda: llamac.Grammar("", syntax="ebnf"), "syntax is 'ebnf', expected 'lark', 'gbnf' or None"),  # type: ignore[arg-type]
    ],
)
def test_errors_show_the_place_in_one_line(make: Make, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        make()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: llamac.Json(3), "schema must be a JSON schema, a type or a Pydantic model, not int"),
        (lambda: llamac.Json(set[int]), "set[int] has no JSON schema here"),
        (lambda: llamac.Regex(b"a"), "pattern must be a str, not bytes"),  # type: ignore[arg-type]
        (lambda: llamac.Choice("ab"), "options must be a sequence of str, not str"),
        (lambda: llamac.Choice([1]), "each of options must be a str, not int"),  # type: ignore[list-item]
        (lambda: llamac.Grammar(1), "text must be a str, not int"),  # type: ignore[arg-type]
        (lambda: llamac.SamplingParams(guide={"type": "object"}), "guide must be a Json, Regex, Choice or Grammar"),  # type: ignore[arg-type]
    ],
)
def test_wrong_types_are_errors(make: Make, message: str) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        make()
    assert message in str(caught.value)


def test_guides_are_values() -> None:
    assert llamac.Regex("a+") == llamac.Regex("a+") != llamac.Regex("a*")
    assert hash(llamac.Choice(["a"])) == hash(llamac.Choice(("a",)))
    for guide in (llamac.Json({"type": "integer"}), llamac.Regex("a+"), llamac.Grammar('start: "a"')):
        assert pickle.loads(pickle.dumps(guide)) == guide
        assert llamac.SamplingParams(guide=guide) == llamac.SamplingParams(guide=guide)


def test_their_reprs_are_short() -> None:
    assert repr(llamac.Regex("a+")) == "llamac.Regex('a+')"
    assert repr(llamac.Json()) == "llamac.Json()"
    assert repr(llamac.Json(list[int])) == "llamac.Json(list[int])"
    assert repr(llamac.Grammar('start: "' + "a" * 100 + '"')).endswith("aaa...)")


def test_a_grammar_in_either_syntax_means_the_same() -> None:
    assert llamac.Grammar('root ::= "a" | "b"\n') == llamac.Grammar(' root::= "a" | "b"\n', syntax="gbnf")
    assert llamac.Grammar('start: "root ::= "')  # Lark: only a line that defines root is GBNF


def test_a_json_text_and_a_dict_are_the_same_schema() -> None:
    assert llamac.Json('{"type": "integer"}') == llamac.Json({"type": "integer"})
    assert llamac.Json() == llamac.Json({"type": "object"})
    assert llamac.Json(True) == llamac.Json({})


def test_without_the_library_the_error_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    makers: list[Any] = [
        llamac.Json,
        lambda: llamac.Regex("a"),
        lambda: llamac.Choice(["a"]),
        lambda: llamac.Grammar(""),
    ]
    for make in makers:
        with pytest.raises(UnsupportedError, match=r'pip install "llamac\[guided\]"'):
            make()
