"""Values of calls that are not JSON: what is read, and what stays text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llamac.tools.functions import tool_list
from llamac.tools.values import MAX_DEPTH, MAX_PYTHON, python_calls, read_json, relaxed_json, resolved, typed_value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{a: 1, "b" : [x y, true,], c: {}}', {"a": 1, "b": ["x y", True], "c": {}}),
        ("{}", {}),
        ("{a: <'>{'<'>, b: <'><'>}", {"a": "{'", "b": ""}),
        ("[1]", None),
        ("{a: 1} more", None),
        ("{a 1}", None),
        ('{"a" 1}', None),
        ("{a b: 1}", None),
        ("{a: 1 b: 2", None),
        ("{a: [1 {}]}", None),
        ("{a: <'>open}", None),
        ("{a: " * (MAX_DEPTH + 2) + "1" + "}" * (MAX_DEPTH + 2), None),
    ],
)
def test_json_with_bare_keys(text: str, expected: Any) -> None:
    found = relaxed_json(text, ("<'>",))
    assert (None if found is None else json.loads(found)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f(1, b='x')", [("f", {"a": 1, "b": "x"})]),
        ("[f(a=true), print(g())]", [("f", {"a": True}), ("g", {})]),
        ("x = f(None)", [("f", {"a": None})]),
        ("f(class=1)", [("f", {"class": 1})]),
        ("import os", None),
        ("f", None),
        ("f(1, 2, 3)", None),
        ("f(**{'a': 1})", None),
        ("f()()", None),
        ("f(a=g())", None),
        ("f(a=1e999)", None),
        ("f(", None),
        ("f()" + " " * MAX_PYTHON, None),
    ],
)
def test_calls_in_pythons_syntax(text: str, expected: Any) -> None:
    found = python_calls(text, {"f": ["a", "b"], "g": []})
    assert (None if found is None else [(name, json.loads(arguments)) for name, arguments in found]) == expected


def test_references_are_followed_within_the_schema() -> None:
    root = {"$defs": {"a/b": {"$ref": "#/$defs/c"}, "c": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert resolved({"$ref": "#/$defs/a~1b"}, root) == {"type": "integer"}
    for target in ("#/$defs/loop", "#/$defs/none", "#/$defs/c/type/x"):
        assert resolved({"$ref": target}, root) is None


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (["integer", "null"], "None", None),
        (["string", "null"], "null", None),
        ("string", "null", "null"),
        ("boolean", "True", True),
        ("array", "['a', 1]", ["a", 1]),
        ("integer", "many", "many"),
        ("number", "NaN", "NaN"),
        (["number", "null"], "-Infinity", "-Infinity"),
    ],
)
def test_texts_get_the_type_of_the_schema(kind: Any, text: str, expected: Any) -> None:
    assert read_json(typed_value(text, {"type": kind}, {})) == expected


@pytest.mark.parametrize(
    ("parts", "text", "expected"),
    [
        ([{"enum": ["C", "1"]}, {"type": "integer"}], "1", "1"),
        ([{"enum": ["C", "1"]}, {"type": "integer"}], "2", 2),
        ([{"enum": ["C", 1]}, {"type": "null"}], "1", 1),
        ([{"enum": ["C", 1]}, {"type": "null"}], "null", None),
        ([{"enum": ["C"]}, {"$ref": "#/$defs/a"}], "2", "2"),
        ([{"enum": ["C"]}, True], "2", "2"),
    ],
)
def test_texts_get_the_type_of_a_part_of_a_union(parts: list[Any], text: str, expected: Any) -> None:
    root = {"$defs": {"a": {"anyOf": [{"type": "string"}, {"type": "boolean"}]}}}
    assert read_json(typed_value(text, {"anyOf": parts}, root)) == expected


def test_a_union_that_contains_itself_twice_takes_no_time() -> None:
    """Following every reference would take 2^100 steps."""
    union = {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}, {"type": "integer"}]}
    for part in (union, {**union, "minimum": 0}):
        root = {"$defs": {"a": part}}
        assert read_json(typed_value("5", {"$ref": "#/$defs/a"}, root)) == 5


@pytest.mark.parametrize("text", ["NaN", "[-Infinity]", '{"a": Infinity}'])
def test_json_has_no_numbers_that_are_not_finite(text: str) -> None:
    with pytest.raises(ValueError, match="is not a JSON number"):
        read_json(text)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("f", "tools must be a list of functions or of dicts with JSON schemas, not str"),
        ({"name": "f"}, "tools must be a list of functions or of dicts"),
        ([{"function": 5}], r"tools\[0\]\['function'\] must be a dict, not int"),
    ],
)
def test_tools_are_a_list_of_functions_or_dicts(tools: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        tool_list(tools)
