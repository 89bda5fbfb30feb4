"""JSON schemas: those of Python types, and where in a schema a problem is."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llamac.errors import ArgumentError, ArgumentTypeError
from llamac.guided.library import checked_text, llguidance, problem
from llamac.guided.numbers import number_problem, with_kept_limits

Schema = dict[str, Any]

MAX_STRING = 1 << 14  # characters: a guide can force all of them in one step, at 10 us each, and no other thread runs
ANNOTATIONS = ("title", "description", "$comment")
TOO_DEEP = "the JSON schema is nested too deep"

# At most one space, or at most two line feeds and an indentation: a model cannot write white space without end.
WHITE_SPACE = r" |\n{1,2}[ \t]{0,20}"
_SIMPLE: dict[Any, Schema] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    None: {"type": "null"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
_OF_SCHEMAS = frozenset(("properties", "patternProperties", "$defs", "definitions"))  # keywords with named schemas
_LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
_DEFINITIONS = ("$defs", "definitions")
# Pydantic's pattern of decimal numbers, and the same one without look-ahead.
_SAME_PATTERNS = {r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d+\.?\d*|\.\d+)$"}
_ANY_NAME: tuple[Any, ...] = (True, {}, {"type": "string"})  # values of propertyNames that all keys match


def schema_grammar(schema: object) -> str:
    """The grammar, in llguidance's form, of the JSON texts that a schema allows.

    Raises:
        ArgumentError: If the schema is wrong, or has a keyword that is not supported. The message names the place.
    """
    try:
        grammar, found = _compiled(schema)
    except RecursionError:
        raise ArgumentError(TOO_DEEP) from None
    except ArgumentError:
        raise
    except ValueError as error:  # a number that is not finite, or an object that contains itself
        if "recursion limit" in str(error):
            raise ArgumentError(TOO_DEEP) from None
        raise ArgumentError(f"the JSON schema is not JSON: {error}") from None
    if found:
        place, found = _place(schema, found)
        raise ArgumentError(f"the JSON schema cannot be used, at {place or 'its root'}: {_reworded(found)}")
    return grammar


def _compiled(schema: object) -> tuple[str, str]:
    """The grammar of a schema, and what is wrong with it."""
    try:
        text = checked_text(json.dumps(schema, allow_nan=False, ensure_ascii=False), "the JSON schema")
        _check_numbers(schema)
        if any(mark in text for mark in ('"propertyNames"', '"^(?!', 'inimum"', 'aximum"')):
            text = json.dumps(simplified(schema), ensure_ascii=False)
    except TypeError as error:
        return "", f"not JSON: {error}"
    if (length := _longest(schema)) > MAX_STRING:
        return "", f"a string of {length} characters is too long, expected at most {MAX_STRING}"
    options = {"whitespace_pattern": WHITE_SPACE, "lenient": False, "coerce_one_of": False}
    grammar = llguidance().LLMatcher.grammar_from_json_schema(text, overrides=options)
    return grammar, problem(grammar)


def simplified(schema: Any) -> Any:
    """The schema in words that the library knows.

    It has no `propertyNames` that all keys match and no look-ahead, as Zod and Pydantic write them, and no limits that
    the library would change.
    """
    if not isinstance(schema, Mapping):
        return schema
    found: dict[Any, Any] = {}
    for name, value in schema.items():
        if name in _OF_SCHEMAS and isinstance(value, Mapping):
            found[name] = {key: simplified(part) for key, part in value.items()}
        elif name in _LISTS and isinstance(value, list | tuple):
            found[name] = [simplified(part) for part in value]
        elif name == "pattern" and isinstance(value, str):
            found[name] = _SAME_PATTERNS.get(value, value)
        elif name != "propertyNames" or value not in _ANY_NAME:
            found[name] = value if name in ANNOTATIONS or name == "const" else simplified(value)
    return with_kept_limits(found)


def _longest(schema: object) -> int:
    """The length of the longest string outside of annotations. The schema has been written as JSON, so it ends."""
    if isinstance(schema, str):
        return len(schema)
    if isinstance(schema, Mapping):
        items = [(key, value) for key, value in schema.items() if key not in ANNOTATIONS or not isinstance(value, str)]
        return max((_longest(part) for item in items for part in item), default=0)
    return max(map(_longest, schema), default=0) if isinstance(schema, list | tuple) else 0


def _check_numbers(schema: object, place: str = "") -> None:
    """Refuse a schema with numbers that the library would change.

    Raises:
        ArgumentError: If it has one. The message names the place.
    """
    if not isinstance(schema, Mapping):
        return
    if found := number_problem(schema):
        raise ArgumentError(f"the JSON schema cannot be used, at {place or 'its root'}: {found}")
    for step, part in _subschemas(schema):
        _check_numbers(part, place + step)


def _place(schema: object, found: str) -> tuple[str, str]:
    """The innermost schema that has a problem of its own, as a JSON pointer, and the problem."""
    pointer = ""
    shared = {name: schema[name] for name in _DEFINITIONS if isinstance(schema, Mapping) and name in schema}
    while True:
        for step, part in _subschemas(schema):
            if not isinstance(part, Mapping):
                continue
            _, inner = _compiled({**shared, **part})
            if inner == found:
                pointer, schema = pointer + step, part
                break
        else:
            return pointer, found


def _subschemas(schema: object) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside a schema, each with the step of a JSON pointer to it."""
    for name, value in schema.items() if isinstance(schema, Mapping) else ():
        if name in _OF_SCHEMAS and isinstance(value, Mapping):
            yield from ((f"/{name}/{_escaped(key)}", part) for key, part in value.items())
        elif name in _LISTS and isinstance(value, Sequence):
            yield from ((f"/{name}/{index}", part) for index, part in enumerate(value))
        elif isinstance(value, Mapping) and name not in ("const", "default"):
            yield f"/{name}", value


def _escaped(key: object) -> str:
    return str(key).replace("~", "~0").replace("/", "~1")


def _reworded(found: str) -> str:
    if found.startswith("Unimplemented keys: "):
        keywords = json.loads(found.partition(": ")[2])
        return f"{', '.join(map(repr, keywords))} {'is' if len(keywords) == 1 else 'are'} not supported"
    if found.startswith("oneOf constraints are not supported"):
        return "oneOf is supported only if a constant or a type tells the alternatives apart: use anyOf"
    if found.startswith("Failed to generate regex for integer range"):
        return "an integer with a limit beyond 10**18 or -10**18 needs both limits"
    if found.startswith("Failed to generate regex for float range"):
        return "the limits of a number need to be between -2**63 and 2**63; beyond 10**18 or -10**18, it needs both"
    if document := re.match(r"Resource '(.*)' is not present", found):
        return f"the reference to {document[1]} cannot be followed: put that schema into $defs"
    return found


# ---- Python types


def type_schema(kind: Any) -> Schema:
    """The JSON schema of a Pydantic model, a dataclass, a TypedDict, or a type made of them and of plain types.

    Objects have no other keys than the class declares.

    Raises:
        ArgumentTypeError: If a type has no JSON form that is known here.
    """
    if _is_pydantic(kind):
        schema = _pydantic_schema(kind)
        close_objects(schema)
        return schema
    definitions = _Definitions()
    schema = _schema_of(kind, definitions)
    return {**schema, "$defs": definitions.schemas} if definitions.schemas else schema


def _is_pydantic(kind: Any) -> bool:
    """Whether a type is a model or a dataclass of Pydantic's."""
    return hasattr(kind, "model_json_schema") or hasattr(kind, "__pydantic_fields__")


def _pydantic_schema(kind: Any) -> Schema:
    if hasattr(kind, "model_json_schema"):
        schema: Schema = kind.model_json_schema()
        return schema
    from pydantic import TypeAdapter

    found: Schema = TypeAdapter(kind).json_schema()
    return found


def close_objects(schema: Any) -> None:
    """Allow no other keys in objects whose schema does not say anything about them."""
    if isinstance(schema, dict):
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
        for _, part in _subschemas(schema):
            close_objects(part)


class _Definitions:
    """The schemas of classes, which are defined once and can contain themselves."""

    def __init__(self) -> None:
        self.schemas: dict[str, Schema] = {}
        self._names: dict[type, str] = {}

    def reference(self, kind: type) -> Schema:
        """A reference to the schema of a dataclass or TypedDict."""
        if kind not in self._names:
            taken = kind.__qualname__ in self.schemas
            name = self._names[kind] = f"{kind.__qualname__}-{len(self.schemas)}" if taken else kind.__qualname__
            self.schemas[name] = {}
            self.schemas[name] = {
                "type": "object",
                "properties": {key: _schema_of(hint, self) for key, hint in _hints(kind).items()},
                "required": _required(kind),
                "additionalProperties": False,
            }
        return {"$ref": f"#/$defs/{self._names[kind]}"}


def _hints(kind: type) -> dict[str, Any]:
    """The type of each key."""
    try:
        hints = typing.get_type_hints(kind)
    except NameError as error:
        raise ArgumentTypeError(f"{kind.__qualname__} has an annotation that cannot be evaluated: {error}") from None
    if not dataclasses.is_dataclass(kind):
        return hints
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def _required(kind: Any) -> list[str]:
    """The keys without a default, in the order of the declaration."""
    if not dataclasses.is_dataclass(kind):
        return [key for key in kind.__annotations__ if key in kind.__required_keys__]
    missing = dataclasses.MISSING
    fields = [field for field in dataclasses.fields(kind) if field.init]
    return [field.name for field in fields if field.default is missing and field.default_factory is missing]


def _schema_of(kind: Any, definitions: _Definitions) -> Schema:
    if _is_pydantic(kind):
        schema = _pydantic_schema(kind)
        close_objects(schema)
        definitions.schemas.update(schema.pop("$defs", {}))
        return schema
    if isinstance(kind, typing.Hashable) and kind in _SIMPLE:
        return dict(_SIMPLE[kind])
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"enum": [member.value for member in kind]}
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or typing.is_typeddict(kind)):
        return definitions.reference(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (list, tuple, dict) and not arguments and kind != tuple[()]:  # typing.List and the like
        return dict(_SIMPLE[origin])
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema_of(part, definitions) for part in arguments]}
    if origin is typing.Annotated:
        return _schema_of(arguments[0], definitions)
    if origin is tuple and arguments[-1:] != (Ellipsis,):
        items = [_schema_of(part, definitions) for part in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if isinstance(origin, type) and issubclass(origin, Mapping) and arguments[0] is str:
        return {"type": "object", "additionalProperties": _schema_of(arguments[1], definitions)}
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return {"type": "array", "items": _schema_of(arguments[0], definitions)}
    raise ArgumentTypeError(f"{kind!r} has no JSON schema here: use a dataclass, a Pydantic model or a JSON schema")
