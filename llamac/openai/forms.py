"""The objects in bodies: which keys each of them can have, and the one check that all of them pass.

Nothing is ignored silently. A key is honored; or it has no effect on the answer, and is named; or it would change the
answer in a way that llamac does not support, and is refused with an error that names it. The OpenAPI
document and the tables of docs/server.md are made from the same forms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llamac.arguments import FOREIGN, meant_name
from llamac.openai.errors import InvalidRequestError, wrong_type

Schema = Mapping[str, Any]

ANY: Schema = {}
NULL: Schema = {"type": "null"}
INDEX = re.compile(r"\[\d+\]")
# The schemas of plain values that are checked here. Readers check the others.
TYPES: dict[str, tuple[type | tuple[type, ...], str]] = {
    "string": (str, "a string"),
    "boolean": (bool, "a boolean"),
    "integer": (int, "an integer"),
    "number": ((int, float), "a number"),
    "object": (dict, "an object"),
    "array": (list, "an array"),
}


class Ignored:
    """The names of what a body has without effect, each once: items of an array share names, as messages[].name."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def add(self, name: str) -> None:
        """Note a name, without the places of items in arrays."""
        self._names[INDEX.sub("[]", name)] = None

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, in the order in which they came."""
        return tuple(self._names)


def fields(schemas: Mapping[str, Schema], required: Sequence[str] = (), *, others: bool | Schema = True) -> Schema:
    """The schema of an object.

    Args:
        schemas: The schema of each field.
        required: Fields that must be there.
        others: Whether there can be others, or their schema.
    """
    names = {"required": list(required)} if required else {}
    return {"type": "object", "properties": dict(schemas), **names, "additionalProperties": others}


def or_null(schema: Schema) -> Schema:
    """A schema that allows null, too."""
    return schema if not schema else {"anyOf": [schema, NULL]}


def either(names: Sequence[str]) -> str:
    """Names as in "a, b or c"."""
    return " or ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def is_one_of(value: object, neutral: Sequence[object]) -> bool:
    """Whether a value is one of several. A number does not equal a boolean."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)


@dataclass(frozen=True)
class Form:
    """The keys of an object. null means "not set", even for a key that does not exist.

    Attributes:
        honored: The schemas of the keys that llamac reads.
        required: Those that must be there.
        only_one: Of these, exactly one must be there.
        no_effect: Keys that are accepted and change nothing.
        refused: Keys that would change the answer, and their values that ask for nothing, which are accepted.
        texts: What keys mean, for documents and errors.
        elsewhere: Where keys belong that other bodies have at this place, for errors.
    """

    honored: Mapping[str, Schema]
    required: Sequence[str] = ()
    only_one: Sequence[str] = ()
    no_effect: Sequence[str] = ()
    refused: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)

    @property
    def schemas(self) -> dict[str, Schema]:
        """The schemas of all keys, with their descriptions."""
        found = {
            **self.honored,
            **dict.fromkeys(self.no_effect, ANY),
            **{name: {"enum": list(values)} for name, values in self.refused.items()},
        }
        texts = self.texts
        return {name: {**found[name], "description": texts[name]} if texts.get(name) else found[name] for name in found}

    @property
    def schema(self) -> Schema:
        """The schema of the object."""
        return self.schema_with({})

    def schema_with(self, replaced: Mapping[str, Schema]) -> Schema:
        """The schema of the object, with other schemas for some of its keys."""
        given = {**self.schemas, **replaced}
        if not self.only_one:
            return _object(given, self.required)
        others = {one: {name: NULL for name in self.only_one if name != one} for one in self.only_one}
        return {"anyOf": [_object({**given, **others[one]}, (*self.required, one)) for one in self.only_one]}

    def read(self, given: object, where: str, ignored: Ignored) -> dict[str, Any]:
        """Check an object.

        Args:
            given: The object.
            where: Where it is in the body; empty for the body.
            ignored: Gets the names of the keys without effect.

        Returns:
            The values that are honored and not null.

        Raises:
            InvalidRequestError: If it is not an object, a key is unknown, refused or missing, or a value is wrong.
        """
        if not isinstance(given, dict):
            raise wrong_type(where or "the body", given, "an object")
        found = {}
        for name, value in given.items():
            if value is None:
                continue
            path = f"{where}.{name}" if where else name
            if name in self.honored:
                _check(value, self.honored[name], path)
                found[name] = value
            elif name in self.no_effect:
                ignored.add(path)
            elif name not in self.refused:
                raise InvalidRequestError(f"unknown parameter {path!r}{self._hint(name)}", path, "unknown_parameter")
            elif not is_one_of(value, self.refused[name]):
                raise InvalidRequestError(self._unsupported(name, path), path, "unsupported_parameter")
        for name in self.required:
            if name not in found:
                path = f"{where}.{name}" if where else name
                message = f"{where or 'the body'} has no {name!r}"
                raise InvalidRequestError(message, path, "missing_required_parameter")
        if self.only_one and sum(name in found for name in self.only_one) != 1:
            names = " or ".join(map(repr, self.only_one))
            message = f"expected either {names} in {where or 'the body'}"
            raise InvalidRequestError(message, self.only_one[0], "missing_required_parameter")
        return found

    def _hint(self, name: str) -> str:
        """What to write instead of an unknown key."""
        foreign = self.elsewhere.get(FOREIGN.get(name, name))
        known = foreign or meant_name(name, (*self.honored, *self.no_effect, *self.refused))
        return f"; did you mean {known!r}?" if known else ""

    def _unsupported(self, name: str, path: str) -> str:
        text = f" ({self.texts[name]})" if self.texts.get(name) else ""
        values = " or ".join(map(json.dumps, self.refused[name]))
        hint = f", or set it to {values}" if values else ""
        return f"this version does not support {path!r}{text}: omit it{hint}"


@dataclass(frozen=True)
class Kinds:
    """Objects whose `type` says which other keys they can have.

    Attributes:
        forms: The other keys, for each type.
        default: The type of an object without one; None: it must be there.
        hint: What an error says about other types.
    """

    forms: Mapping[str, Form]
    default: str | None = None
    hint: str = ""

    @property
    def schema(self) -> Schema:
        """The schema of one of them."""
        kinds = []
        for kind, form in self.forms.items():
            name: Schema = {"const": kind}
            required = form.required if kind == self.default else ("type", *form.required)
            kinds.append(_object({"type": name, **form.schemas}, required))
        return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}

    def read(self, given: object, where: str, ignored: Ignored) -> tuple[str, dict[str, Any]]:
        """Check one of them, as `Form.read` does. Returns its type and its other values."""
        if not isinstance(given, dict):
            raise wrong_type(where, given, "an object")
        kind = self.default if given.get("type") is None else given["type"]
        form = self.forms.get(kind) if isinstance(kind, str) else None
        if form is None or kind is None:
            found = "missing" if kind is None else repr(kind)
            message = f"{where}.type is {found}, expected {either(list(self.forms))}{self.hint}"
            raise InvalidRequestError(message, where, "unsupported_value")
        return kind, form.read({name: given[name] for name in given if name != "type"}, where, ignored)


def _object(schemas: Mapping[str, Schema], required: Sequence[str]) -> Schema:
    properties = {name: schema if name in required else or_null(schema) for name, schema in schemas.items()}
    return fields(properties, required, others=NULL)


def _check(value: object, schema: Schema, path: str) -> None:
    """Check a plain value."""
    name = schema.get("type", "")
    kind, expected = TYPES.get(name, (object, ""))
    if not isinstance(value, kind) or (isinstance(value, bool) and name in ("integer", "number")):
        raise wrong_type(path, value, expected)
    if isinstance(value, int) and kind is int:
        least, most = schema.get("minimum", value), schema.get("maximum", value)
        if not least <= value <= most:
            limits = f"{least} to {most}" if "maximum" in schema else f"at least {least}"
            raise InvalidRequestError(f"{path} is {value}, expected {limits}", path, "invalid_value")
    if "enum" in schema and not is_one_of(value, schema["enum"]):
        names = either([each if isinstance(each, str) else json.dumps(each) for each in schema["enum"]])
        raise InvalidRequestError(f"{path} is {value!r}, expected {names}", path, "invalid_value")
