"""JSON schemas of Python types."""

from __future__ import annotations

import enum
import random
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from typing import Annotated, Any, Literal, Optional, TypedDict, Union

import pytest

import llamac
from llamac.errors import ArgumentError, ArgumentTypeError
from llamac.guided.schemas import schema_grammar, type_schema


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: float
    y: float = 0.0


@dataclass
class Tree:
    name: str
    at: Point
    children: list[Tree]
    tags: dict[str, bool] = field(default_factory=dict)


class Entry(TypedDict):
    n: int


class Options(Entry, total=False):
    color: Color


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        (str, {"type": "string"}),
        (float, {"type": "number"}),
        (list, {"type": "array"}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (tuple[str, ...], {"type": "array", "items": {"type": "string"}}),
        (typing.List, {"type": "array"}),  # noqa: UP006
        (typing.Dict, {"type": "object"}),  # noqa: UP006
        (tuple[()], {"type": "array", "prefixItems": [], "minItems": 0, "maxItems": 0}),
        (dict[str, None], {"type": "object", "additionalProperties": {"type": "null"}}),
        (dict[str, Any], {"type": "object", "additionalProperties": {}}),
        (Literal["a", 1], {"enum": ["a", 1]}),
        (Color, {"enum": ["red", "blue"]}),
        (Optional[bool], {"anyOf": [{"type": "boolean"}, {"type": "null"}]}),  # noqa: UP045
        (Union[int, str], {"anyOf": [{"type": "integer"}, {"type": "string"}]}),  # noqa: UP007
        (int | None, {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        (Annotated[int, "a number"], {"type": "integer"}),
        (
            tuple[int, str],
            {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2, "maxItems": 2},
        ),
    ],
)
def test_plain_types(kind: Any, schema: object) -> None:
    assert type_schema(kind) == schema
    llamac.Json(kind)


def test_dataclasses_are_closed_objects_that_can_contain_themselves() -> None:
    assert type_schema(Tree) == {
        "$ref": "#/$defs/Tree",
        "$defs": {
            "Tree": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "at": {"$ref": "#/$defs/Point"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/Tree"}},
                    "tags": {"type": "object", "additionalProperties": {"type": "boolean"}},
                },
                "required": ["name", "at", "children"],
                "additionalProperties": False,
            },
            "Point": {
                "type": "object",
                "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
    }
    assert repr(llamac.Json(Tree)) == "llamac.Json(Tree)"


def test_only_what_the_constructor_takes_is_a_key() -> None:
    @dataclass
    class Point:
        unit: typing.ClassVar[str] = "m"
        x: int
        norm: float = field(init=False, default=0.0)

    schema = type_schema(Point)
    [found] = schema["$defs"].values()
    assert (found["properties"], found["required"]) == ({"x": {"type": "integer"}}, ["x"])


def test_typed_dicts_have_optional_keys() -> None:
    schema = type_schema(Options)["$defs"]["Options"]
    assert schema["required"] == ["n"]
    assert list(schema["properties"]) == ["n", "color"]


def test_classes_of_one_name_stay_apart() -> None:
    first, second = make_dataclass("Local", [("value", int)]), make_dataclass("Local", [("value", str)])
    found = type_schema(tuple[first, second])  # type: ignore[valid-type]
    references = [part["$ref"].rpartition("/")[2] for part in found["prefixItems"]]
    assert [found["$defs"][name]["properties"]["value"] for name in references] == [
        {"type": "integer"},
        {"type": "string"},
    ]


def test_names_of_properties_that_can_be_any_are_no_condition() -> None:
    """Zod describes records with them; other conditions are refused."""
    record = {"type": "object", "additionalProperties": {"type": "integer"}}
    where: list[Callable[[Any], Any]] = [
        lambda schema: schema,
        lambda schema: {"properties": {"a": schema, "propertyNames": {"type": "string"}}},
        lambda schema: {"anyOf": [schema, {"type": "null"}]},
        lambda schema: {"$ref": "#/$defs/R", "$defs": {"R": schema}},
    ]
    for placed in where:
        expected = schema_grammar(placed(record))
        for names in (True, {}, {"type": "string"}):
            assert schema_grammar(placed({**record, "propertyNames": names})) == expected
        with pytest.raises(ArgumentError, match="'propertyNames' is not supported"):
            schema_grammar(placed({**record, "propertyNames": {"pattern": "^a"}}))


def test_the_pattern_of_pydantics_decimal_numbers_needs_no_look_ahead() -> None:
    of_pydantic = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
    same = r"^[+-]?(\d+\.?\d*|\.\d+)$"
    patterns = [{"anyOf": [{"type": "number"}, {"type": "string", "pattern": each}]} for each in (of_pydantic, same)]
    assert len({schema_grammar(schema) for schema in patterns}) == 1
    draw = random.Random(1)
    for size in range(7):
        for _ in range(300):
            number = "".join(draw.choices("+-.019", k=size))
            assert bool(re.search(same, number)) == bool(re.search(of_pydantic, number)), number


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"const": 2**53 + 1}, "number 9007199254740993 exactly: use a string, or a number with fewer digits"),
        ({"enum": [1, {"a": [-(2**60) - 1]}]}, "number -1152921504606846977 exactly"),
        ({"const": 123456789.12345679}, "number 123456789.12345679 exactly"),
        ({"const": 0.9452706955539223}, "number 0.9452706955539223 exactly"),
        ({"const": -(2**63)}, "number -9223372036854775808 exactly"),
        ({"type": "integer", "const": 10**20 + 1}, "number 100000000000000000001 exactly"),
        ({"const": 10**400}, r"number 1.000e\+400 exactly"),
        ({"exclusiveMinimum": 0, "maximum": 10**400}, r"maximum is 1.000e\+400, which is too large for a double"),
        ({"exclusiveMinimum": -(10**400)}, r"exclusiveMinimum is -1.000e\+400, which is too large for a double"),
        ({"type": "number", "minimum": -3.4e38}, r"minimum is -3.4e\+38: a lower limit needs to be from -2\*\*63"),
        ({"type": "integer", "minimum": -(2**63) - 1}, "minimum is -9223372036854775809: a lower limit"),
        ({"type": "integer", "minimum": 10**19, "maximum": 10**19 + 5}, "minimum is 10000000000000000000: a lower"),
        (
            {"type": "integer", "minimum": 0, "exclusiveMinimum": 2**63 - 1024},
            "exclusiveMinimum is 9223372036854774784",
        ),
        ({"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}, "maximum is -9223372036854775808: an upper"),
        ({"type": "integer", "maximum": -1e19}, r"maximum is -1e\+19: an upper limit needs to be at least 1025"),
        (
            {"type": "integer", "minimum": 10**18},
            r"an integer with a limit beyond 10\*\*18 or",
        ),
        ({"type": "number", "minimum": 0, "maximum": 1e19}, r"the limits of a number need to be between -2\*\*63"),
        ({"minimum": True, "exclusiveMinimum": 5}, "Expected f64 for 'minimum', got true"),
    ],
)
def test_numbers_that_the_library_would_change_are_refused(schema: dict[str, Any], found: str) -> None:
    with pytest.raises(ArgumentError, match=f"at /properties/id: .*{found}"):
        llamac.Json({"properties": {"id": schema}})


def test_a_factor_that_no_double_holds_is_refused() -> None:
    with pytest.raises(ArgumentError, match="number out of range"):
        llamac.Json({"type": "integer", "multipleOf": 10**400})


def test_the_place_of_a_number_in_a_definition_is_the_definition() -> None:
    properties = {"name": {"type": "string"}, "id": {"$ref": "#/$defs/Id"}}
    with pytest.raises(ArgumentError, match=r"at /\$defs/Id/anyOf/1: a guide cannot write the number 9007199254740993"):
        llamac.Json({"properties": properties, "$defs": {"Id": {"anyOf": [{}, {"const": 2**53 + 1}]}}})


def test_numbers_that_the_library_keeps_are_accepted() -> None:
    kept = [0, True, -1.5, 2**53, -(2**60), 2**63 - 1, 0.1, 0.30000000000000004, 1e-20, [1], {"a": None}]
    llamac.Json({"enum": kept})
    llamac.Json({"enum": [1e19, 1e20, -1e20, 10**20, 10**23, 6.02214076e23, 1e300, 1.7976931348623157e308, 2.0**63]})
    llamac.Json({"const": {"minimum": 1, "const": 2}})
    for schema in ({"minimum": 0, "maximum": 2**63 - 1}, {"maximum": 2**64 - 1}, {"exclusiveMinimum": True}):
        llamac.Json({"type": "integer", **schema})
    llamac.Json({"properties": {"const": {"type": "integer"}, "minimum": {"minimum": 1}}})


def test_an_annotation_without_a_type_is_an_error() -> None:
    broken = make_dataclass("Broken", [("value", "Nowhere")])
    with pytest.raises(ArgumentTypeError, match="Broken has an annotation that cannot be evaluated: name 'Nowhere'"):
        type_schema(broken)


def test_pydantic_models() -> None:
    pydantic = pytest.importorskip("pydantic")
    inner = pydantic.create_model("Inner", n=(int, ...))
    model: Any = pydantic.create_model("Outer", inner=(inner, ...), tags=(dict[str, int], ...), note=(str, ""))
    schema = type_schema(model)
    assert schema["required"] == ["inner", "tags"]
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Inner"]["additionalProperties"] is False
    assert schema["properties"]["tags"]["additionalProperties"] == {"type": "integer"}
    assert "$defs" in type_schema(list[model])
    llamac.Json(model)
    llamac.Json(list[model])
    llamac.Json(pydantic.dataclasses.dataclass(Point))
