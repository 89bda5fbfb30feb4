"""Python functions as tools: their names, types, defaults and texts."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional, TypedDict

import pytest

import llamac
from llamac.errors import ArgumentError, ArgumentTypeError
from llamac.tools.functions import tool_list


@dataclass
class Place:
    name: str
    zip: int | None = None


class Options(TypedDict, total=False):
    exact: bool


class Unit(enum.Enum):
    C = "celsius"
    F = "fahrenheit"


def google(city: str, days: int = 1, *, note: str = "") -> str:
    """Look up the weather.

    It knows every city: also "Args" in a text.

    Args:
        city: The name of the city: as in
            an atlas.
        days (int, optional): How many days
        note: A note.

    Returns:
        days: not a parameter.
    """
    return ""


def numpy(city: str, days: int = 1, *, note: str = "") -> str:
    """Look up the weather.

    It knows every city: also "Args" in a text.

    Parameters
    ----------
    city : str
        The name of the city: as in
        an atlas.
    days : int, default: 1
        How many days
    note
        A note.

    Returns
    -------
    days
        not a parameter.
    """
    return ""


def rest(city: str, days: int = 1, *, note: str = "") -> str:
    """Look up the weather.

    It knows every city: also "Args" in a text.

    :param city: The name of the city: as in
        an atlas.
    :param int days: How many days
    :type days: int
    :param note: A note.
    :returns: days: not a parameter.
    :rtype: str
    """
    return ""


@pytest.mark.parametrize("function", [google, numpy, rest])
def test_the_three_styles_of_docstrings_give_the_same_schema(function: Callable[..., Any]) -> None:
    found = llamac.tool_schema(function)
    assert found["type"] == "function"
    assert found["function"] == {
        "name": function.__name__,
        "description": 'Look up the weather. It knows every city: also "Args" in a text.',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "The name of the city: as in an atlas."},
                "days": {"type": "integer", "description": "How many days"},
                "note": {"type": "string", "description": "A note."},
            },
            "required": ["city"],
        },
    }


def types(
    a: Optional[int],  # noqa: UP045  # both spellings
    b: Literal["x", "y"],
    c: list[str],
    d: dict[str, float],
    e: Place,
    f: Options,
    g: Unit,
    h: tuple[int, ...],
    i: Annotated[bool, "Really?"],
    j: list[Place],
    k: int | str | None = None,
) -> None:
    """Do something."""


def test_types_become_schemas() -> None:
    parameters = llamac.tool_schema(types)["function"]["parameters"]
    assert parameters["properties"] == {
        "a": {"type": ["integer", "null"]},
        "b": {"enum": ["x", "y"]},
        "c": {"type": "array", "items": {"type": "string"}},
        "d": {"type": "object", "additionalProperties": {"type": "number"}},
        "e": {"$ref": "#/$defs/Place"},
        "f": {"$ref": "#/$defs/Options"},
        "g": {"enum": ["celsius", "fahrenheit"]},
        "h": {"type": "array", "items": {"type": "integer"}},
        "i": {"type": "boolean", "description": "Really?"},
        "j": {"type": "array", "items": {"$ref": "#/$defs/Place"}},
        "k": {"type": ["integer", "string", "null"]},
    }
    assert parameters["required"] == list("abcdefghij")
    assert parameters["$defs"]["Place"]["required"] == ["name"]
    assert parameters["$defs"]["Options"]["required"] == []


def test_methods_have_no_self_and_lambdas_are_refused() -> None:
    class Server:
        def stop(self, now: bool) -> None:
            """Stop."""

    found = llamac.tool_schema(Server().stop)["function"]
    assert (found["name"], list(found["parameters"]["properties"])) == ("stop", ["now"])
    nameless = lambda: None  # noqa: E731
    nameless.__doc__ = "Do it."
    with pytest.raises(ArgumentError, match="'<lambda>', expected 1 to 64 letters"):
        tool_list([nameless])


def no_docstring(a: int) -> None: ...


def no_annotation(a) -> None:  # type: ignore[no-untyped-def]
    """Do it."""


def any_names(**names: int) -> None:
    """Do it."""


def no_such_type(a: Any) -> None:
    """Do it."""


no_such_type.__annotations__["a"] = "Nothing"


def no_schema(a: complex) -> None:
    """Do it."""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_docstring, "no_docstring has no docstring"),
        (no_annotation, "the parameter a of the function no_annotation has no type annotation"),
        (any_names, r"any_names has the parameter \*\*names"),
        (no_such_type, "no_such_type has an annotation that cannot be evaluated: name 'Nothing' is not defined"),
        (no_schema, "complex.* has no JSON schema here"),
        (5, "a tool must be a function or a dict"),
    ],
)
def test_functions_that_are_no_tools_are_refused(function: Any, message: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        llamac.tool_schema(function)
