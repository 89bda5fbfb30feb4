"""transformers' response templates: a checkpoint's own description of its answers, as a format.

The object `response_template` in tokenizer_config.json (transformers 5.13 and later) has the fields of a message. Each
begins with `open` or `open_pattern` and ends with `close` or `close_pattern`; the field without a beginning is what
stands outside of the others. `content` names a parser of its text, and `transform` says what becomes of the value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llamac.errors import ArgumentError, UnsupportedError
from llamac.tools.formats import Format, Kind, Region
from llamac.tools.patterns import Found, Pattern, pattern
from llamac.tools.readers import READERS, Groups, Options, Reader, Schemas, Sink
from llamac.tools.values import MAX_DEPTH, QUOTES, read_json, relaxed_json, typed_value

NAME = "response_template"
_KINDS: dict[str, Kind] = {
    "content": "content",
    "reasoning_content": "reasoning",
    "reasoning": "reasoning",
    "thinking": "reasoning",
    "tool_calls": "calls",
}
_PARSERS = ("text", "int", "float", "bool", "json", "xml-inline", "kv-lines")
_FIELD_KEYS = {
    *("open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join", "optional"),
    *("transform", "transform_each"),
}
_PLACE = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_CALL = {"type": "function", "function": "{content}"}


def read_response_template(spec: object) -> Format:
    """The format that a response template describes.

    Raises:
        UnsupportedError: If it is malformed, or has a part that is not known here. The message names the place.
    """
    if not isinstance(spec, Mapping) or not isinstance(spec.get("fields"), Mapping):
        raise UnsupportedError(f"{NAME} has no object 'fields'")
    if spec.get("version", 1) != 1:
        raise UnsupportedError(f"{NAME} has the version {spec['version']!r}, expected 1")
    anchor = _pattern(spec, "start_anchor", NAME)
    if not anchor:
        raise UnsupportedError(f"{NAME} has neither 'start_anchor' nor 'start_anchor_pattern'")
    regions: list[Region] = []
    outside: Kind = "content"
    for name, given in spec["fields"].items():
        place = f"{NAME}.fields.{name}"
        if not isinstance(given, Mapping):
            raise UnsupportedError(f"{place} is {given!r:.60}, expected an object")
        if not set(given) <= _FIELD_KEYS:
            raise UnsupportedError(f"{place} has unknown parts: {sorted(set(given) - _FIELD_KEYS)}")
        kind = _KINDS.get(name, "content")
        opening, closing = _pattern(given, "open", place), _pattern(given, "close", place)
        if opening:
            reader, options = _reader(given, place) if kind == "calls" else ("", {})
            regions.append(Region(kind, opening, closing or r"\Z", reader, options=options))
            continue
        outside = kind
        if closing:  # a mark: what follows is outside again
            regions.append(Region("content", closing))
    found = Format(NAME, tuple(regions), outside=outside, anchor=pattern(anchor))
    for region in regions:
        pattern(region.open), pattern(region.close)
    return found


def _pattern(given: Mapping[str, Any], key: str, place: str) -> str:
    """A tag as a pattern: a literal, one of several, or a regular expression. Empty if there is none."""
    literals, source = given.get(key), given.get(f"{key}_pattern")
    if literals is None:
        if not isinstance(source, str | None):
            raise UnsupportedError(f"{place}.{key}_pattern is not a string")
        return (source or "").removeprefix(r"\s*")  # white space before a tag is dropped anyway
    listed = [literals] if isinstance(literals, str) else literals
    if source is not None or not isinstance(listed, list) or not all(isinstance(one, str) and one for one in listed):
        raise UnsupportedError(f"{place}.{key} is not a string or a list of strings")
    return "|".join(re.escape(one) for one in sorted(listed, key=len, reverse=True))


def _reader(given: Mapping[str, Any], place: str) -> tuple[str, dict[str, Any]]:
    """The reader of a field with calls, and its options. Plain JSON is streamed."""
    parser, transform = given.get("content", "text"), given.get("transform")
    options = _options(parser, given.get("content_args"), f"{place}.content", f"{place}.content_args")
    if parser == "json" and not options:
        function = transform.get("function") if isinstance(transform, Mapping) else None
        if transform == _CALL:
            return "json", {}
        if function == {"name": "{name}", "arguments": "{content}"}:
            return "arguments", {}
    each = given.get("transform_each", False)
    return NAME, {"parser": parser, "arguments": options, "transform": transform, "each": each}


def _options(parser: object, given: object, place: str, args_place: str, depth: int = 0) -> dict[str, Any]:
    """The options of a parser and of the parsers of its values, with their patterns compiled."""
    if depth > MAX_DEPTH:
        raise UnsupportedError(f"the parsers of {place.partition('.value_parser')[0]} are nested too deeply")
    if not isinstance(parser, str) or parser not in _PARSERS:
        raise UnsupportedError(f"{place} is {parser!r:.60}, expected one of {', '.join(_PARSERS)}")
    if not isinstance(given or {}, Mapping):
        raise UnsupportedError(f"{args_place} is not an object")
    options: dict[str, Any] = {**given} if isinstance(given, Mapping) else {}
    if isinstance(options.get("tag_pattern"), str):
        options["tag_pattern"] = pattern(options["tag_pattern"])
    elif parser == "xml-inline":
        raise UnsupportedError(f"{args_place} has no 'tag_pattern'")
    if options.get("unquoted_keys") and not options.get("string_delims"):
        options["string_delims"] = [(mark, mark) for mark in QUOTES]
    inner, place = options.get("value_parser"), f"{args_place}.value_parser"
    if inner is not None:
        if not isinstance(inner, Mapping):
            raise UnsupportedError(f"{place} is {inner!r:.60}, expected an object")
        name = inner.get("name", "text")
        args = _options(name, inner.get("args"), f"{place}.name", f"{place}.args", depth + 1)
        options["value_parser"] = {"name": name, "args": args}
    return options


class TemplateReader(Reader):
    """Calls that a response template describes. They are known when their text has ended."""

    def __init__(self, sink: Sink, groups: Groups, schemas: Schemas, options: Options) -> None:
        super().__init__(sink, groups, schemas, options)
        self._text = ""

    def read(self, char: str) -> None:
        """Read a character."""
        self._text += char

    def end(self) -> None:
        """The text of the calls has ended."""
        try:
            value = _parsed(self._text, self._options["parser"], self._options["arguments"])
            calls = self._transformed(value)
        except (ValueError, KeyError, TypeError, ArgumentError, RecursionError):
            return  # the text stays in the content
        for call in calls:
            function = call.get("function") if isinstance(call, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            if isinstance(name, str) and isinstance(function, Mapping) and self._sink.open(name):
                self._sink.add(self._written(name, function.get("arguments", {})))
                self._sink.close()

    def _transformed(self, value: Any) -> list[Any]:
        transform = self._options["transform"]
        if transform is None:
            return value if isinstance(value, list) else [value]
        if self._options["each"]:
            return [_filled(transform, {**self._groups, **item}) for item in value]
        filled = _filled(transform, {**self._groups, "content": value})
        return filled if isinstance(filled, list) else [filled]

    def _written(self, name: str, arguments: Any) -> str:
        """The JSON of arguments. Texts get the types that the tool's schema asks for."""
        if isinstance(arguments, str):
            return arguments
        root = self._schemas.get(name, {})
        schema = root.get("properties", {})
        if not isinstance(arguments, Mapping):
            return _json_text(arguments)
        values = {
            key: typed_value(value, schema.get(key), root) if isinstance(value, str) else _json_text(value)
            for key, value in arguments.items()
        }
        return "{" + ", ".join(f"{_json_text(key)}: {value}" for key, value in values.items()) + "}"


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _filled(transform: Any, scope: Mapping[str, Any]) -> Any:
    """A transform with its places filled."""
    if isinstance(transform, Mapping):
        return {key: _filled(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [_filled(value, scope) for value in transform]
    place = _PLACE.fullmatch(transform) if isinstance(transform, str) else None
    if place is None:
        return transform
    value: Any = scope
    for key in place[1].split("."):
        value = value[key]
    return value


def _parsed(text: str, parser: str, options: Mapping[str, Any]) -> Any:
    """The value of a text."""
    stripped = text.strip() if options.get("strip", True) else text
    match parser:
        case "int":
            return int(stripped)
        case "float":
            return float(stripped)
        case "bool":
            return stripped.lower() in ("true", "1")
        case "json":
            return _json(text, options)
        case "xml-inline":
            return _elements(text, options)
        case "kv-lines":
            lines = (line.partition(options.get("kv_sep", ":")) for line in text.split(options.get("line_sep", "\n")))
            pairs = {key.strip(): value.strip() for key, separator, value in lines if separator}
            return {key: _inner(value, options) for key, value in pairs.items()}
        case _:
            return stripped


def _inner(text: str, options: Mapping[str, Any]) -> Any:
    parser = options.get("value_parser")
    return text if parser is None else _parsed(text, parser["name"], parser["args"])


def _json(text: str, options: Mapping[str, Any]) -> Any:
    marks = tuple(str(pair[0]) for pair in options.get("string_delims") or [])
    try:
        if marks:
            converted = relaxed_json(text.strip(), marks)
            if converted is not None:
                return read_json(converted)
        return read_json(text)
    except ValueError:
        if options.get("allow_non_json"):
            return text.strip()
        raise


def _elements(text: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The keys and values of tags in a text."""
    found: dict[str, Any] = {}
    merged: set[str] = set()
    tag, at = options["tag_pattern"], 0
    assert isinstance(tag, Pattern)
    while at < len(text):
        match = tag.match(text, at, limit=len(text)) if tag.may_start_with(text[at]) else None
        if not isinstance(match, Found) or match.end == at:
            at += 1
            continue
        key, value = match.groups["key"], _inner(match.groups.get("value", ""), options)
        if key in found and options.get("merge_duplicates"):
            value = [*(found[key] if key in merged else [found[key]]), value]
            merged.add(key)
        found[key] = value
        at = match.end
    return found


READERS[NAME] = TemplateReader
