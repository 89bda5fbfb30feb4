"""Readers of the inside of a tool call: from the text between two tags to names and arguments.

A reader gets one character at a time, so it does not matter how the text was cut. It reports to a sink.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from llamac.tools.values import python_calls, read_json, relaxed_json, typed_value

Groups = Mapping[str, str]
Options = Mapping[str, Any]
Schemas = Mapping[str, Mapping[str, Any]]  # the parameters of each tool, a JSON schema, by the tool's name

NAME_KEYS = ("name", "tool_name", "function", "function_name")
ARGUMENT_KEYS = ("arguments", "parameters", "args")
KNOWN_KEYS = (*NAME_KEYS, *ARGUMENT_KEYS, "type", "id", "tool_call_id")
BETWEEN = " \t\r\n,;"  # what can stand between two calls
INCOMPLETE = "the call is incomplete: the text ends inside it"


class Sink(Protocol):
    """Gets what a reader finds."""

    def open(self, name: str) -> bool:
        """A call begins. Returns False if the text is not a call after all."""

    def add(self, text: str) -> None:
        """A piece of its arguments."""

    def close(self, error: str | None = None) -> None:
        """It ends."""

    def ignore(self, char: str) -> None:
        """A character that belongs to no call."""

    def doubt(self) -> None:
        """The object has a key that calls do not have."""


class Reader:
    """Reads the inside of one or more calls.

    Attributes:
        is_done: Whether the calls are complete, so that what follows is not part of them.
        in_string: Whether the next characters belong to a string, so that tags in them end nothing.
        closing: The text that ends the value that is being read. A tag that ends the calls belongs to this value if
            this text follows it. "": no value, or one without such a text.
        is_cut: Whether the text ends before the closing tag. Set before `end`.
    """

    is_done = False
    in_string = False
    closing = ""
    is_cut = False

    def __init__(self, sink: Sink, groups: Groups, schemas: Schemas, options: Options) -> None:
        """Begin.

        Args:
            sink: Gets what is found.
            groups: The groups of the opening tag; "name" is a tool's name.
            schemas: The parameters of the tools, by name.
            options: Settings of the format.
        """
        self._sink = sink
        self._name = groups.get("name", "").strip()
        self._groups = groups
        self._schemas = schemas
        self._options = options

    def read(self, char: str) -> None:
        """Read a character."""
        raise NotImplementedError

    def end(self) -> None:
        """The text of the calls has ended."""
        raise NotImplementedError


class _Value:
    """Finds the end of a JSON value, also of one that is not quite valid: it counts brackets outside of strings."""

    def __init__(self, first: str) -> None:
        self.in_string = first == '"'
        self.is_done = False  # the value has ended with the last character
        self._depth = int(first in "{[")
        self._escaped = False

    def read(self, char: str) -> bool:
        """Read the next character; whether it belongs to the value."""
        if self.in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self.in_string = False
                self.is_done = self._depth == 0
        elif self._depth == 0 and (char in ",}];" or char.isspace()):
            return False
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.is_done = self._depth == 0
        return True


class ArgumentsReader(Reader):
    """The arguments alone, as a JSON object; the tag had the name."""

    def __init__(self, sink: Sink, groups: Groups, schemas: Schemas, options: Options) -> None:
        super().__init__(sink, groups, schemas, options)
        self._value: _Value | None = None
        sink.open(self._name)

    def read(self, char: str) -> None:
        """Read a character."""
        if self._value is None:
            if char.isspace():
                return
            if char not in "{[":
                self._sink.ignore(char)
                return
            self._value = _Value(char)
        elif self.is_done:
            if not char.isspace():
                self._sink.ignore(char)
            return
        else:
            self._value.read(char)
        self._sink.add(char)
        self.in_string = self._value.in_string
        if self._value.is_done:
            self.is_done = True
            self._sink.close()

    def end(self) -> None:
        """The text of the calls has ended."""
        if not self.is_done:
            if self._value is None:
                self._sink.add("{}")
            self._sink.close(None if self._value is None else INCOMPLETE)


class JsonReader(Reader):
    """Objects with a name and arguments, one after another or in a list."""

    def __init__(self, sink: Sink, groups: Groups, schemas: Schemas, options: Options) -> None:
        super().__init__(sink, groups, schemas, options)
        self._read: Callable[[str], None] = self._between
        self._level = 0  # objects that are open; a call can lie in an object of its own
        self._in_list = False
        self._begin()

    def _begin(self) -> None:
        self._key = ""
        self._text = ""  # of the key or value that is being read, or arguments that came before the name
        self._value: _Value | None = None
        self._is_open = self._has_arguments = self._streams = False
        self._early = ""

    def read(self, char: str) -> None:
        """Read a character."""
        self._read(char)

    def end(self) -> None:
        """The text of the calls has ended."""
        if self._level and self._is_open:
            self._sink.close(INCOMPLETE)
        self._level = 0

    def _between(self, char: str) -> None:
        """Outside of the objects."""
        if char == "{":
            self._begin()
            self._level, self.is_done = 1, False
            self._read = self._before_key
        elif char == "[":
            self._in_list = True
        elif char == "]":
            self._in_list, self.is_done = False, True
        elif char not in BETWEEN:
            self._sink.ignore(char)

    def _before_key(self, char: str) -> None:
        if char == '"':
            self._text, self._value = char, _Value(char)
            self.in_string = True
            self._read = self._in_key
        elif char == "}":
            self._close_object()
        elif char != "," and not char.isspace():
            self._sink.ignore(char)

    def _in_key(self, char: str) -> None:
        assert self._value is not None
        self._text += char
        self._value.read(char)
        if self._value.is_done:
            self.in_string = False
            self._take_key(_string(self._text) or "")
            self._read = self._before_value

    def _take_key(self, key: str) -> None:
        self._key = key
        if not self._is_open and key not in KNOWN_KEYS:
            self._sink.doubt()

    def _before_value(self, char: str) -> None:
        if char.isspace() or char == ":":
            return
        if self._key == "function" and char == "{":
            self._level += 1
            self._read = self._before_key
            return
        if char in ",}":
            self._sink.ignore(char)
            self._read = self._before_key
            if char == "}":
                self._close_object()
            return
        self._text, self._value = "", _Value(char)
        self._streams = char in "{[" and self._key in ARGUMENT_KEYS and self._is_open and not self._has_arguments
        self._has_arguments |= self._streams
        self._read = self._in_value
        self._add(char)

    def _in_value(self, char: str) -> None:
        assert self._value is not None
        if self._value.read(char):
            self._add(char)
        else:
            self._end_value()
            self._read(char)

    def _add(self, char: str) -> None:
        """Add a character to the value."""
        assert self._value is not None
        self.in_string = self._value.in_string
        if self._streams:
            self._sink.add(char)
        else:
            self._text += char
        if self._value.is_done:
            self._end_value()

    def _end_value(self) -> None:
        text, self._text = self._text, ""
        self.in_string = False
        self._read = self._before_key
        if self._streams:
            return
        if self._key in NAME_KEYS and not self._is_open:
            name = _string(text)
            self._is_open = name is not None and self._sink.open(name)
            if self._is_open and self._early:
                self._sink.add(self._early)
                self._has_arguments = True
        elif self._key in ARGUMENT_KEYS and not self._has_arguments:
            if self._is_open:
                self._sink.add(_arguments(text))
                self._has_arguments = True
            else:
                self._early = _arguments(text)

    def _close_object(self) -> None:
        self._level -= 1
        if self._level:
            return
        if not self._is_open:
            self._sink.ignore("}")
        self._close_call()
        self._end_object()

    def _close_call(self) -> None:
        if self._is_open:
            if not self._has_arguments:
                self._sink.add("{}")
            self._sink.close()
            self._is_open = False

    def _end_object(self) -> None:
        self.is_done = not self._in_list
        self._read = self._between


class KeyedReader(JsonReader):
    """Objects whose keys are names of tools and whose values are the arguments, as Apertus writes them."""

    def _take_key(self, key: str) -> None:
        self._close_call()
        self._key = ARGUMENT_KEYS[0]
        self._is_open, self._has_arguments = self._sink.open(key), False

    def _end_value(self) -> None:
        super()._end_value()
        self._close_call()

    def _close_object(self) -> None:
        self._close_call()
        self._level = 0
        self._end_object()


def _string(text: str) -> str | None:
    """The value of a JSON string; None if it is none."""
    try:
        value = read_json(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _arguments(text: str) -> str:
    """Arguments as an object: some models write them as a string that holds the object, or null."""
    inner = _string(text)
    if text == "null":
        return "{}"
    return text if inner is None else inner or "{}"


def _is_json(text: str) -> bool:
    try:
        read_json(text)
    except (ValueError, RecursionError):
        return False
    return True


class ParametersReader(Reader):
    """Parameters between tags, each with its name and its text, as Qwen3-Coder, GLM and MiniMax write them.

    The option `tags` has the texts before and after a key, and those before and after a value. The third can be empty.
    The option `kind` is the text between a key and `true`, if the value is a string, or `false`, if it is JSON. If
    neither follows, the schema decides.
    """

    def __init__(self, sink: Sink, groups: Groups, schemas: Schemas, options: Options) -> None:
        super().__init__(sink, groups, schemas, options)
        self._tags: tuple[str, str, str, str] = options["tags"]
        self._text = ""
        self._written: set[str] = set()
        sink.open(self._name)

    def read(self, char: str) -> None:
        """Read a character."""
        self._text += char
        if self._text.endswith(self._tags[3]):
            self._take(self._text[: -len(self._tags[3])])
            self._text = self.closing = ""
        elif not self.closing and self._text.endswith(self._tags[2] or self._tags[1]):
            key, closing, value = self._text.partition(self._tags[0])[2].partition(self._tags[1])
            self.closing = self._tags[3] if key and closing and self._tags[2] in value else ""

    def end(self) -> None:
        """The text of the calls has ended."""
        if self.is_cut:
            self._take_cut()
            return
        self._take(self._text)
        self._sink.add("}" if self._written else "{}")
        self._sink.close()

    def _take_cut(self) -> None:
        """Pass on the incomplete parameter. The arguments stay open, so that nobody mistakes them for complete."""
        rest = self._text.partition(self._tags[0])[2]
        key, closing, value = rest.partition(self._tags[1])
        opened, value = ("", value) if not self._tags[2] else value.partition(self._tags[2])[1:]
        if closing and (opened or not self._tags[2]):
            key, kind = self._key_and_kind(key)
            written = self._value(key, value, kind)
            self._sink.add(self._pair(key, written[:-1] if written.startswith('"') else written))
        elif not self._written:
            self._sink.add("{")
        self._sink.close(INCOMPLETE)

    def _key_and_kind(self, text: str) -> tuple[str, str]:
        """A key, and what the tag says about its value."""
        key, _, kind = text.partition(self._options["kind"]) if "kind" in self._options else (text, "", "")
        return key.strip(), kind

    def _value(self, key: str, text: str, kind: str) -> str:
        """The JSON of a parameter's text."""
        if kind == "true":
            return json.dumps(text, ensure_ascii=False)
        if kind == "false" and _is_json(text):
            return text.strip()
        schema = self._schemas.get(self._name, {})
        properties = schema.get("properties")
        return typed_value(text, properties.get(key) if isinstance(properties, Mapping) else None, schema)

    def _pair(self, key: str, value: str) -> str:
        return (", " if self._written else "{") + json.dumps(key, ensure_ascii=False) + ": " + value

    def _take(self, text: str) -> None:
        """Pass a parameter on."""
        before, opening, rest = text.partition(self._tags[0])
        for char in before.strip() if opening else text.strip():
            self._sink.ignore(char)
        key, closing, value = rest.partition(self._tags[1])
        key, kind = self._key_and_kind(key)
        value = value.partition(self._tags[2])[2] if self._tags[2] else value
        if not opening or not closing or key in self._written:
            for char in opening + rest:
                self._sink.ignore(char)
            return
        self._sink.add(self._pair(key, self._value(key, value, kind)))
        self._written.add(key)


class RelaxedReader(Reader):
    """Arguments as Gemma 4 and FunctionGemma write them: bare keys, and strings between the option `marks`."""

    def __init__(self, sink: Sink, groups: Groups, schemas: Schemas, options: Options) -> None:
        super().__init__(sink, groups, schemas, options)
        self._text = ""
        sink.open(self._name)

    def read(self, char: str) -> None:
        """Read a character."""
        self._text += char
        if self._text.endswith(self._options["marks"]):
            self.in_string = not self.in_string

    def end(self) -> None:
        """The text of the calls has ended."""
        text = self._text.strip()
        converted = relaxed_json(text, self._options["marks"]) if text else "{}"
        self._sink.add(text if converted is None else converted)
        self._sink.close(INCOMPLETE if converted is None else None)


class PythonReader(Reader):
    """Calls in Python's syntax, alone or in a list."""

    def __init__(self, sink: Sink, groups: Groups, schemas: Schemas, options: Options) -> None:
        super().__init__(sink, groups, schemas, options)
        self._text = ""
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def read(self, char: str) -> None:
        """Read a character."""
        self._text += char
        if self._escaped:
            self._escaped = False
        elif self._quote:
            self._escaped = char == "\\"
            self._quote = "" if char == self._quote else self._quote
        elif char in "'\"#":
            self._quote = "\n" if char == "#" else char  # a comment ends with its line
        elif char in "([{":
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1
            self.is_done = self._depth == 0 and self._text.lstrip().startswith("[")
        self.in_string = bool(self._quote)

    def end(self) -> None:
        """The text of the calls has ended."""
        parameters = {name: list(schema.get("properties", ())) for name, schema in self._schemas.items()}
        for name, arguments in python_calls(self._text, parameters) or ():
            if self._sink.open(name):
                self._sink.add(arguments)
                self._sink.close()


READERS: dict[str, type[Reader]] = {
    "json": JsonReader,
    "keyed json": KeyedReader,
    "arguments": ArgumentsReader,
    "parameters": ParametersReader,
    "relaxed": RelaxedReader,
    "python": PythonReader,
}
