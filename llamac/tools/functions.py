"""Tools as callers give them: JSON schemas in OpenAI's form, bare or wrapped, and Python functions."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llamac.arguments import wrong_type
from llamac.errors import ArgumentError
from llamac.guided.schemas import type_schema
from llamac.tools.readers import Schemas

Tool = Mapping[str, Any] | Callable[..., Any]
NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_PARAMETERS = ("args", "arguments", "parameters", "params", "other parameters")
_SECTIONS = (
    *(*_PARAMETERS, "returns", "return", "raises", "yields", "example", "examples", "note", "notes", "see also"),
    *("attributes", "references", "warnings", "warns"),
)
_FIELD = re.compile(r":(\w+)(?:\s+[^:]*?)?(?:\s*\b(\w+))?:(?:\s+(.*)|$)")  # reST's, such as ":param int days: how many"
_FIELDS = ("param", "parameter", "arg", "argument", "key", "keyword")


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The description of a Python function as a tool, in OpenAI's form.

    The name and the types come from the signature. The descriptions come from the docstring, in the style of Google,
    NumPy or reST: the text before its sections describes the tool, and the entries of the parameters describe
    these. A parameter without a default is required.

    Args:
        function: The function. Every parameter needs a type annotation.

    Raises:
        ArgumentError: If the function has no docstring, or if a parameter has no annotation, is positional-only, or is
            `*args` or `**kwargs`.
    """
    name = getattr(function, "__name__", None)
    if not callable(function) or not isinstance(name, str):
        raise wrong_type("a tool", function, "a function or a dict with a JSON schema")
    description, texts = _docstring(inspect.getdoc(function) or "")
    if not description:
        raise ArgumentError(f"the function {name} has no docstring: the model needs to know what the tool does")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ArgumentError(f"the function {name} has an annotation that cannot be evaluated: {error}") from None
    properties: dict[str, Any] = {}
    required, definitions = [], {}
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ArgumentError(f"the function {name} has the parameter {parameter}: a tool has named parameters only")
        if key not in hints:
            raise ArgumentError(f"the parameter {key} of the function {name} has no type annotation")
        schema = type_schema(hints[key])
        definitions.update(schema.pop("$defs", {}))
        text = next((note for note in getattr(hints[key], "__metadata__", ()) if isinstance(note, str)), texts.get(key))
        properties[key] = {**_compact(schema), **({"description": text} if text else {})}
        if parameter.default is parameter.empty:
            required.append(key)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    if definitions:
        parameters["$defs"] = definitions
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _compact(schema: dict[str, Any]) -> dict[str, Any]:
    """A union of plain types as a list of types, which prompts show in fewer tokens."""
    parts = schema.get("anyOf", ())
    if parts and all(list(part) == ["type"] for part in parts):
        return {"type": [part["type"] for part in parts]}
    return schema


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description in a docstring, and the texts of its parameters, in the style of Google, NumPy or reST."""
    lines = text.splitlines()
    heads = {i: style for i in range(len(lines)) if (style := _style(lines, i))}
    first = min(heads, default=len(lines))
    description = " ".join(" ".join(lines[:first]).split())
    texts: dict[str, str] = {}
    for head, style in heads.items():
        body = lines[head + (2 if style == "numpy" else 1) : min((i for i in heads if i > head), default=None)]
        if style == "rest":
            field = _FIELD.match(lines[head].strip())
            assert field is not None
            if field[1] in _FIELDS and field[2]:
                rest = " ".join(line.strip() for line in _until_blank(body))
                texts[field[2]] = f"{field[3] or ''} {rest}".strip()
        elif lines[head].strip(": ").lower() in _PARAMETERS:
            texts.update(_google(body) if style == "google" else _numpy(body))
    return description, texts


def _style(lines: list[str], i: int) -> str:
    """The style of the section that a line begins; empty if it begins none."""
    line = lines[i].strip()
    if line.lower().rstrip(":") in _SECTIONS:
        if i + 1 < len(lines) and re.fullmatch(r"\s*-{3,}\s*", lines[i + 1]):
            return "numpy"
        if line.endswith(":"):
            return "google"
    return "rest" if _FIELD.match(line) else ""


def _until_blank(lines: list[str]) -> list[str]:
    return lines[: next((i for i, line in enumerate(lines) if not line.strip()), None)]


def _google(lines: list[str]) -> dict[str, str]:
    """Entries such as "days (int): How many." with lines that continue them."""
    texts: dict[str, str] = {}
    key, indent = "", None
    for line in filter(str.strip, lines):
        depth = len(line) - len(line.lstrip())
        indent = depth if indent is None else indent
        entry = re.match(r"\s*\*{0,2}(\w+)\s*(?:\(.*?\))?\s*:(?:\s+(.*)|$)", line) if depth == indent else None
        if depth == 0:
            break  # the description goes on
        if entry is not None:
            key, texts[entry[1]] = entry[1], (entry[2] or "").strip()
        elif key:
            texts[key] = f"{texts[key]} {line.strip()}".strip()
    return texts


def _numpy(lines: list[str]) -> dict[str, str]:
    """Entries such as "days : int" with indented lines below them."""
    texts: dict[str, str] = {}
    keys: list[str] = []
    for line in filter(str.strip, lines):
        if line[0].isspace():
            texts.update({key: f"{texts[key]} {line.strip()}".strip() for key in keys})
        else:
            names = line.partition(":")[0].split(",")
            keys = [name.strip().lstrip("*") for name in names]
            texts.update(dict.fromkeys(keys, ""))
    return texts


def tool_list(tools: object) -> list[dict[str, Any]]:
    """Tools in OpenAI's form, which chat templates read.

    Args:
        tools: Dicts in that form, or only what it has under "function"; or functions.

    Raises:
        ArgumentError: If a tool has no name, two have the same one, or a schema is not an object.
    """
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise wrong_type("tools", tools, "a list of functions or of dicts with JSON schemas")
    found: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        given = tool if isinstance(tool, Mapping) else tool_schema(tool)
        wrapped = dict(given) if "function" in given else {"type": "function", "function": dict(given)}
        function = wrapped["function"]
        if not isinstance(function, Mapping):
            raise wrong_type(f"tools[{index}]['function']", function, "a dict")
        name = function.get("name")
        if name is None:
            raise ArgumentError(f"tools[{index}] has no name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ArgumentError(
                f"tools[{index}] has the name {name!r}, expected 1 to 64 letters, digits, dots, colons, hyphens or "
                "underscores"
            )
        if not isinstance(function.get("description"), str | None):
            raise wrong_type(f"tools[{index}]['function']['description']", function["description"], "a str")
        if not isinstance(function.get("parameters", {}), Mapping):
            raise wrong_type(f"tools[{index}]['function']['parameters']", function["parameters"], "a JSON schema")
        properties = function.get("parameters", {}).get("properties", {})
        if not isinstance(properties, Mapping):
            raise wrong_type(f"tools[{index}]['function']['parameters']['properties']", properties, "a dict")
        if any(name == other["function"]["name"] for other in found):
            raise ArgumentError(f"tools has two tools named {name!r}: each needs its own name")
        found.append({"type": "function", **wrapped})
    return found


def parameters_of(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """The JSON schema of each tool's parameters, by name."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or {"type": "object"} for tool in tools}
