"""Grammars of arguments that are not JSON: keyword arguments of Python, Gemma's objects, parameters between tags."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from llamac.errors import ArgumentError
from llamac.guided.schemas import schema_grammar
from llamac.tools.rules import Rules, json_value, quoted
from llamac.tools.values import ANNOTATIONS, alternatives, constants, resolved, schema_types

Schema = Mapping[str, Any]

_KEYWORDS: dict[str, set[str]] = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
    "boolean": set(),
    "null": set(),
}
_KEYWORDS["integer"] = _KEYWORDS["number"]
_ALL = set().union(*_KEYWORDS.values())
QUOTE = '"'
IS_STRING = "IS_STRING"  # in a tag before a value: true, or false for JSON
EQUALS = "="  # between a keyword argument and its value
_ANYTHING = r"(.|\n)*"
_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)  # of a pattern
_SLASHES = re.compile(r"\\.|/", re.DOTALL)
_NO_STRINGS = ["number", "boolean", "null", "array", "object"]
_ANY: Schema = {"type": ["string", *_NO_STRINGS]}
_NAME = "/[A-Za-z_][A-Za-z0-9_]{0,30}/"
# Numbers that are finite in Python.
_INTEGER = "/-?(0|[1-9][0-9]{0,15})/"
_NUMBER = r"/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?/"
# Strings that mean the same in Python and JSON, in one line.
_PYTHON_STRING = r'/"([^"\\\x00-\x1f\x7f]|\\["\\nrt])*"/'


@dataclass(frozen=True)
class Notation:
    """How values are written.

    Attributes:
        between: What comes between two items.
        pair: What comes between a key and its value.
        constants: true, false and null.
        mark: What stands around strings. Empty: strings are Python's.
        is_json: Whether any value can be JSON instead.
    """

    between: str
    pair: str
    constants: Mapping[str, str]
    mark: str = ""
    is_json: bool = False


PYTHON = Notation(", ", ": ", {"true": "True", "false": "False", "null": "None"})
_JSON_NAMES = {name: name for name in ("true", "false", "null")}
OLMO3 = Notation(", ", ": ", _JSON_NAMES)  # Python's calls with JSON's constants
GEMMA4 = Notation(",", ":", _JSON_NAMES, '<|"|>', is_json=True)
FUNCTIONGEMMA = Notation(",", ":", _JSON_NAMES, "<escape>", is_json=True)


class Values:
    """Adds the rules of values that match the parts of a schema."""

    def __init__(self, rules: Rules, notation: Notation, schema: Schema) -> None:
        """Begin with the schema of a tool's arguments."""
        self._rules = rules
        self._notation = notation
        self._root = schema
        self._shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        self._references: dict[str, str] = {}

    def arguments(self) -> str:
        """The arguments of a call. In Python they are keyword arguments, else an object."""
        if self._notation.is_json:
            return self.value(self._root)
        for key in self._root.get("properties", {}):
            if not key.isidentifier():
                raise ArgumentError(f"the parameter {key!r} is not a name of Python")
        return self._pairs(self._root, EQUALS)

    def value(self, schema: Any) -> str:
        """A value that matches a schema."""
        if not isinstance(schema, Mapping):
            schema = {} if schema else {"enum": []}
        if "$ref" in schema:
            return self._reference(schema)
        keys = set(schema) - ANNOTATIONS
        if keys and keys <= {"enum", "const", "type"} and keys != {"type"}:
            options = [schema["const"]] if "const" in schema else schema["enum"]
            return self._either(map(self._literal, options))
        for name in ("anyOf", "oneOf"):
            if keys == {name}:
                return self._either(self.value(part) for part in schema[name])
        if not keys:
            return self._any()
        if not keys <= _ALL | {"type"}:
            return self._json(schema, keys - _ALL - {"type"})
        kinds = schema.get("type", [kind for kind, own in _KEYWORDS.items() if keys & own and kind != "integer"])
        return self._either(self._typed(kind, schema) for kind in ([kinds] if isinstance(kinds, str) else kinds))

    def _typed(self, kind: str, schema: Schema) -> str:
        own = {key: schema[key] for key in _KEYWORDS[kind] if key in schema}
        match kind:
            case "object":
                return f'"{{" {self._pairs(schema, self._notation.pair)} "}}"'
            case "array":
                return self._array(own)
            case "boolean":
                return self._either(map(quoted, (self._notation.constants["true"], self._notation.constants["false"])))
            case "null":
                return quoted(self._notation.constants["null"])
            case "string" if not own:
                return self._string()
            case "number" | "integer" if not own and not self._notation.is_json:
                return _INTEGER if kind == "integer" else _NUMBER
            case _:
                return json_value({"type": kind, **own})

    def _string(self) -> str:
        if not self._notation.mark:
            return self._rules.add("STRING", _PYTHON_STRING)
        return f"{self._rules.literals(self._notation.mark)} {self._rules.until(self._notation.mark)}"

    def _literal(self, value: Any) -> str:
        """A constant."""
        if isinstance(value, bool) or value is None:
            return quoted(self._notation.constants[json.dumps(value)])
        if isinstance(value, str) and self._notation.mark and self._notation.mark not in value:
            mark = self._rules.literals(self._notation.mark)
            return f"{mark} {quoted(value)} {mark}" if value else f"{mark} {mark}"
        if isinstance(value, list | dict) and not self._notation.is_json:
            return quoted(repr(value))
        return quoted(json.dumps(value, ensure_ascii=False))

    def _array(self, own: Schema) -> str:
        item = self._rules.add("item", self.value(own.get("items", {})))
        least, most = own.get("minItems", 0), own.get("maxItems")
        if most == 0:
            return '"[]"'
        more = f"({quoted(self._notation.between)} {item}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        return f'"[" {f"{item} {more}" if least else f"({item} {more})?"} "]"'

    def _pairs(self, schema: Schema, pair: str) -> str:
        """The keys and values of an object, each key at most once and in the order of the schema."""
        between, required = quoted(self._notation.between), schema.get("required", ())
        properties = schema.get("properties", {})
        unknown = sorted(set(required) - set(properties))
        if unknown:
            return self._json(schema, {"required"})
        first = rest = ""
        others = schema.get("additionalProperties", True)
        if others is not False:
            key = other_key(self._rules, properties)
            key = key if self._is_bare(pair) else f"{quoted(QUOTE)} {key} {quoted(QUOTE)}"
            other = self._rules.add("pair", f"{key} {quoted(pair)} {self.value(others)}")
            first, rest = f"({other} ({between} {other})*)?", f"({between} {other})*"
        for key, part in reversed(properties.items()):
            if part is False:  # the key must not be there
                continue
            own = self._rules.add("pair", f"{self._key(key, pair)} {quoted(pair)} {self.value(part)}")
            needed = key in required
            first = self._rules.add("first", f"{own} {rest}" + ("" if needed else f" | {first}"))
            rest = self._rules.add("rest", f"{between} {own} {rest}" + ("" if needed else f" | {rest}"))
        return first

    def _key(self, key: str, pair: str) -> str:
        return quoted(key if self._is_bare(pair) and re.fullmatch(r"\w+", key) else json.dumps(key, ensure_ascii=False))

    def _is_bare(self, pair: str) -> bool:
        """Whether keys before this text have no quotation marks."""
        return self._notation.is_json or pair == EQUALS

    def _any(self) -> str:
        if "any" not in self._references:
            name = self._references["any"] = f"any_{len(self._rules.lines)}"
            place = len(self._rules.lines)
            self._rules.lines.append("")
            self._rules.lines[place] = f"{name}: {self.value(_ANY)}"
        return self._references["any"]

    def _reference(self, schema: Schema) -> str:
        """The rule of a schema that others refer to. It can contain itself."""
        target = schema["$ref"]
        if target not in self._references:
            name = self._references[target] = f"reference_{len(self._rules.lines)}"
            place = len(self._rules.lines)
            self._rules.lines.append("")
            found = resolved(schema, self._root)
            if found is None:
                raise ArgumentError(f"the reference to {target} cannot be followed: put that schema into $defs")
            self._rules.lines[place] = f"{name}: {self.value(found)}"
        return self._references[target]

    def _json(self, schema: Schema, keys: Iterable[str]) -> str:
        """JSON, for a schema with keywords that are not written here."""
        if not self._notation.is_json:
            raise ArgumentError(f"{', '.join(sorted(keys))} is not supported in the model's format of calls")
        return json_value({**self._shared, **schema})

    def _either(self, options: Iterable[str]) -> str:
        return f"({' | '.join(options)})"


def other_key(rules: Rules, known: Iterable[str]) -> str:
    """Any key but those that are known."""
    without = " | ".join(map(quoted, known))
    return rules.add("KEY", f"{_NAME} & ~({without})" if without else _NAME)


CALLED = r"[A-Za-z_][\w.:-]*"


def is_name(name: str) -> bool:
    """Whether calls in Python's syntax can have this name. They are read with hyphens, dots and colons, too."""
    return re.fullmatch(CALLED, name) is not None


def tagged_parameters(rules: Rules, schema: Schema, tags: Sequence[str]) -> str:
    """Parameters between tags: texts as they are, other values as JSON.

    Args:
        rules: Gets the rules.
        schema: The schema of a tool's arguments.
        tags: What stands before a key, between the key and its value, and after the value: a space that a text need
            not have, the tag, and what follows it. IS_STRING in the second stands for true or false.
    """
    found = []
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    for key, part in schema.get("properties", {}).items():
        if part is False:  # the parameter must not be given
            continue
        value = _tagged(rules, {**shared, **({} if part is True else part)}, tags)
        needed = key in schema.get("required", ())
        found.append(f"({rules.literals(tags[0] + key)} {value}){'' if needed else '?'}")
    others = schema.get("additionalProperties", True)
    if others is not False:
        key = other_key(rules, schema.get("properties", {}))
        other = {**shared, **others} if isinstance(others, Mapping) else {}
        found.append(f"({rules.literals(tags[0])} {key} {_tagged(rules, other, tags)})*")
    return " ".join(found)


def _tagged(rules: Rules, schema: Schema, tags: Sequence[str]) -> str:
    """A value between the tag before it and its closing tag. The first tag can say whether it is a string."""
    parts = alternatives(schema, schema)
    if parts and parts[0] is not schema and not any(map(partial(_has_open_strings, root=schema), parts)):
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        return f"({' | '.join(_tagged(rules, {**shared, **part}, tags) for part in parts)})"
    says_kind = IS_STRING in tags[1]
    before = {is_text: rules.literals(tags[1].replace(IS_STRING, json.dumps(is_text))) for is_text in (True, False)}
    closing = rules.literals("".join(tags[2:]))
    kinds = schema_types(schema, schema)
    options = constants(schema, schema)
    if options is not None:
        texts = [quoted(option) for option in options if isinstance(option, str)]
        others = [quoted(json.dumps(option, ensure_ascii=False)) for option in options if not isinstance(option, str)]
        found = [(True, texts), (False, others)] if says_kind else [(True, texts + others)]
        return f"({' | '.join(f'{before[is_text]} ({one})' for is_text, values in found for one in values)}) {closing}"
    if kinds and "string" not in kinds:
        return f"{before[False]} {json_value(schema)} {closing}"
    text = f"{before[True]} {_text(rules, resolved(schema, schema) or {}, tags)}"
    other = _without_strings(schema) if says_kind else None
    return text if other is None else f"({text} | {before[False]} {json_value(other)} {closing})"


def _has_open_strings(schema: Schema, root: Schema) -> bool:
    """Whether a schema that is not a union allows strings that it does not list."""
    return constants(schema) is None and "string" in (schema_types(schema, root) or ("string",))


def _text(rules: Rules, schema: Schema, tags: Sequence[str]) -> str:
    """A text that matches a schema, and its closing tag."""
    space, tag, after = tags[2:]
    parts = []
    if isinstance(schema.get("pattern"), str):
        parts.append(f"/{'|'.join(map(_anywhere, _split(schema['pattern'])))}/")
    if "minLength" in schema or "maxLength" in schema:
        parts.append(rf"/(.|\n){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/")
    body = " & ".join(parts)
    return f"{rules.until(space + tag if body else tag, body)} {rules.literals(after)}"


def _split(pattern: str) -> list[list[str]]:
    """The alternatives of a pattern as lists of characters, escapes and character classes. Slashes are escaped."""
    alternatives: list[list[str]] = [[]]
    depth = 0
    for part in _PARTS.findall(pattern):
        depth += (part == "(") - (part == ")")
        if part == "|" and depth == 0:
            alternatives.append([])
        else:
            alternatives[-1].append(_SLASHES.sub(lambda found: r"\/" if found[0] == "/" else found[0], part))
    return alternatives


def _anywhere(parts: list[str]) -> str:
    """A pattern of whole texts for one that is searched for, which only anchors tie to a text's beginning and end."""
    begins, ends = parts[:1] == ["^"], parts[-1:] == ["$"]
    inner = "".join(parts[begins : len(parts) - ends])
    return f"{'' if begins else _ANYTHING}({inner}){'' if ends else _ANYTHING}"


def _without_strings(schema: Schema) -> Schema | None:
    """The schema of the values of a schema that are not strings; None if there are none."""
    found = {**schema, **(resolved(schema, schema) or {})}
    found.pop("$ref", None)
    listed = found.get("type", _NO_STRINGS)
    found["type"] = [kind for kind in ([listed] if isinstance(listed, str) else listed) if kind != "string"]
    if not found["type"]:
        return None
    try:
        schema_grammar(found)
    except ArgumentError:  # the other keywords allow only strings
        return None
    return found
