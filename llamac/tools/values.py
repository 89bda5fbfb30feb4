"""Values of arguments that are not written as JSON: Python literals, bare texts, Gemma's notation."""

from __future__ import annotations

import ast
import io
import json
import keyword
import re
import tokenize
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MAX_PYTHON = 65536  # characters of calls in Python's syntax
MAX_DEPTH = 100  # of nested values
_RESERVED = "_reserved_"  # stands before names that Python reserves
# A string, in which nothing is a name, or the name of a call.
_STRING_OR_NAME = re.compile(
    r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|(?<![\w.:-])(?P<name>[\w.:-]+)(?=\s*\()""", re.DOTALL
)
QUOTES = ('<|"|>', "<escape>")  # marks around Gemma's strings
# Keywords of a schema that do not limit its values.
ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "$defs", "definitions", "$schema", "$id"}


def read_json(text: str, on_object: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value of JSON, without NaN and Infinity, which Python would accept.

    Args:
        text: The JSON.
        on_object: Makes the value of an object from its keys and values.

    Raises:
        ValueError: If the text is not JSON.
        RecursionError: If it is nested too deeply.
    """
    return json.loads(text, parse_constant=_refuse, object_pairs_hook=on_object)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def typed_value(text: str, schema: object, root: object = None) -> str:
    """The JSON of a bare text. The schema says whether it is a string; without one, it is.

    Args:
        text: The text. One line feed at its beginning and one at its end do not belong to it.
        schema: The parameter's JSON schema, or None.
        root: The schema that has the definitions to which the parameter's refers.
    """
    text = text.removeprefix("\n").removesuffix("\n")
    bare = text.strip()
    parts = alternatives(schema, root)
    for option in (option for part in parts for option in constants(part) or ()):
        written = json.dumps(option, ensure_ascii=False)
        if option == text or (not isinstance(option, str) and bare in (written, repr(option))):
            return written
    others = [part for part in parts if constants(part) is None]
    kinds = frozenset[str]().union(*(schema_types(part, root) for part in others or parts))
    if kinds and "string" not in kinds:
        for candidate in (bare, {"True": "true", "False": "false", "None": "null"}.get(bare, "")):
            try:
                read_json(candidate)
            except (ValueError, RecursionError):
                continue
            return candidate
        literal = _literal(bare)
        if literal is not None:
            return literal
    if "null" in kinds and bare in ("null", "None"):
        return "null"
    return json.dumps(text, ensure_ascii=False)


def resolved(schema: object, root: object) -> Mapping[str, Any] | None:
    """A schema behind its references; None if one of them leads nowhere.

    Args:
        schema: The schema, which can be a reference.
        root: The schema that has the definitions.
    """
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, Mapping):
            return None
        target = schema.get("$ref")
        if not isinstance(target, str):
            return schema
        schema = root
        for step in target.removeprefix("#").split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            schema = schema.get(step) if isinstance(schema, Mapping) else None
    return None


def constants(schema: object, root: object = None) -> list[Any] | None:
    """The values that a schema lists; None if it lists none."""
    found = resolved(schema, root) or {}
    listed = [found["const"]] if "const" in found else found.get("enum")
    return listed if isinstance(listed, list) else None


def alternatives(schema: object, root: object = None) -> list[Mapping[str, Any]]:
    """The schemas of a union and of the unions in it; the schema itself if it is none. References are followed."""
    found, seen, left = [], set(), [schema]
    while left:
        one = left.pop()
        part = {} if one is True else resolved(one, root)
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        keys = set(part) - ANNOTATIONS
        if keys in ({"anyOf"}, {"oneOf"}):
            left += reversed(_list(part[keys.pop()]))
        else:
            found.append(part)
    return found


def schema_types(schema: object, root: object = None, seen: set[int] | None = None) -> frozenset[str]:
    """The types that a schema allows; none if it does not say. seen: the ids of the schemas visited so far."""
    schema, seen = resolved(schema, root), set() if seen is None else seen
    if schema is None or id(schema) in seen:
        return frozenset()
    seen.add(id(schema))
    kind = schema.get("type")
    found = (
        {kind}
        if isinstance(kind, str)
        else {one for one in kind if isinstance(one, str)}
        if isinstance(kind, list)
        else set()
    )
    for part in (*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))):
        found |= schema_types(part, root, seen)
    if not found:
        found = {"string" if isinstance(value, str) else "other" for value in constants(schema) or ()}
    return frozenset(found)


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else ()


def _literal(text: str) -> str | None:
    """The JSON of a Python literal; None if it is none."""
    try:
        return json.dumps(ast.literal_eval(text[:MAX_PYTHON]), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def python_calls(text: str, parameters: Mapping[str, Sequence[str]]) -> list[tuple[str, str]] | None:
    """Names and arguments, as JSON, of calls in Python's syntax; None if the text is anything else.

    Args:
        text: Calls, one per line or in a list. `print(call)` counts as the call.
        parameters: The names of each tool's parameters, in order, for arguments without a name.
    """
    if len(text) > MAX_PYTHON:
        return None
    try:
        code, names = _with_names_of_python(text.strip())
        nodes = [node for statement in _parsed(code).body for node in _calls_of(statement)]
        calls = [_call(node, parameters, names) for node in nodes]
        return calls or None
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, tokenize.TokenError):
        return None


def _with_names_of_python(text: str) -> tuple[str, dict[str, str]]:
    """Calls whose tools have names of Python instead of names such as `get-weather`, and what these stand for."""
    names: dict[str, str] = {}

    def replaced(match: re.Match[str]) -> str:
        name = match["name"]
        if name is None or all(part.isidentifier() and not keyword.iskeyword(part) for part in name.split(".")):
            return match[0]
        names[f"{_RESERVED}{len(names)}"] = name
        return f"{_RESERVED}{len(names) - 1}"

    return _STRING_OR_NAME.sub(replaced, text), names


def _parsed(text: str) -> ast.Module:
    """The syntax tree of calls. Parameters of tools can have names that Python reserves, such as `from`."""
    try:
        return ast.parse(text)
    except SyntaxError:
        lines = text.splitlines(keepends=True)
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        for token, following in zip(tokens[-2::-1], tokens[:0:-1], strict=True):
            if following.string == "=" and token.type == tokenize.NAME and keyword.iskeyword(token.string):
                row, column = token.start
                lines[row - 1] = lines[row - 1][:column] + _RESERVED + lines[row - 1][column:]
        return ast.parse("".join(lines))


def _calls_of(statement: ast.stmt) -> list[ast.expr]:
    if not isinstance(statement, ast.Expr | ast.Assign):
        raise ValueError("not a call")
    value = statement.value
    return value.elts if isinstance(value, ast.List | ast.Tuple) else [value]


class _Constants(ast.NodeTransformer):
    """Replaces JSON's names of constants, which OLMo 3 writes, by Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(json.loads(node.id)) if node.id in ("true", "false", "null") else node


def _call(node: ast.expr, parameters: Mapping[str, Sequence[str]], names: Mapping[str, str]) -> tuple[str, str]:
    if not isinstance(node, ast.Call):
        raise ValueError("not a call")
    name = ast.unparse(node.func)
    name = names.get(name, name)
    if name == "print" and "print" not in parameters and len(node.args) == 1 and isinstance(node.args[0], ast.Call):
        return _call(node.args[0], parameters, names)
    if not re.fullmatch(r"[\w.:-]+", name) or len(node.args) > len(parameters.get(name, ())):
        raise ValueError("not a call of a tool")
    named = dict(zip(parameters.get(name, ()), node.args, strict=False))
    for argument in node.keywords:
        if argument.arg is None:
            raise ValueError("not a call of a tool")
        named[argument.arg.removeprefix(_RESERVED)] = argument.value
    values = {key: ast.literal_eval(_Constants().visit(value)) for key, value in named.items()}
    return name, json.dumps(values, ensure_ascii=False, allow_nan=False)


def relaxed_json(text: str, marks: tuple[str, ...]) -> str | None:
    """The JSON of an object with bare keys and marked strings; None if the text is anything else.

    Strings stand between two equal marks or in quotation marks. Other values are JSON or bare texts.
    """
    try:
        found, end = _relaxed(text, 0, 0, marks)
    except (ValueError, IndexError):
        return None
    return found if not text[end:].strip() and found.startswith("{") else None


def _relaxed(text: str, at: int, depth: int, marks: tuple[str, ...]) -> tuple[str, int]:
    """A value at a place, as JSON, and the place behind it."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    at = _after_space(text, at)
    for mark in marks:
        if text.startswith(mark, at):
            end = text.index(mark, at + len(mark))
            return json.dumps(text[at + len(mark) : end], ensure_ascii=False), end + len(mark)
    if text[at] == '"':
        value, end = json.JSONDecoder().raw_decode(text, at)
        return json.dumps(value, ensure_ascii=False), end
    if text[at] not in "{[":
        bare = re.compile(r"[^,}\]]*").match(text, at)
        assert bare is not None
        return _bare(bare[0].strip()), bare.end()
    closing, parts = {"{": "}", "[": "]"}[text[at]], []
    opening, at = text[at], _after_space(text, at + 1)
    while text[at] != closing:
        key = ""
        if opening == "{":
            key, at = _key(text, at, marks)
        value, at = _relaxed(text, at, depth + 1, marks)
        parts.append(key + value)
        at = _after_space(text, at)
        if text[at] not in f",{closing}":
            raise ValueError("expected a comma")
        if text[at] == ",":
            at = _after_space(text, at + 1)
    return opening + ", ".join(parts) + closing, at + 1


def _key(text: str, at: int, marks: tuple[str, ...]) -> tuple[str, int]:
    """A key with its colon, as JSON, and the place behind it."""
    if text[at] == '"' or text.startswith(marks, at):
        key, at = _relaxed(text, at, 0, marks)
        at = _after_space(text, at)
        if text[at] != ":":
            raise ValueError("expected a colon")
        return key + ": ", at + 1
    end = text.index(":", at)
    key = text[at:end].strip()
    if not re.fullmatch(r"[^\s{}\[\],\"]+", key):
        raise ValueError("not a key")
    return json.dumps(key, ensure_ascii=False) + ": ", end + 1


def _bare(text: str) -> str:
    """A number, true, false or null, else a string."""
    if re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?|true|false|null", text):
        return text
    return json.dumps({"True": True, "False": False, "None": None}.get(text, text), ensure_ascii=False)


def _after_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
