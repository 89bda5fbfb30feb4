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
_SECTIONS = (
    "args",
    "arguments",
    "parameters",
    "returns",
    "return",
    "raises",
    "yields",
    "example",
    "examples",
    "note",
    "notes",
)


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The description of a Python function as a tool, in OpenAI's form.

    Name and types come from the signature, the texts from a docstring in Google's style: its first paragraph, and the
    entries under "Args:". A parameter without a default is required.

    Args:
        function: The function. Every parameter needs a type annotation.

    Raises:
        ArgumentError: If the function has no docstring, a parameter has no annotation, or is not a named one.
    """
    name = getattr(function, "__name__", None)
    if not callable(function) or not isinstance(name, str):
        raise wrong_type("a tool", function, "a function or a dict with a JSON schema")
    description, texts = _docstring(inspect.getdoc(function) or "")
    if not description:
        raise ArgumentError(f"the function {name} has no docstring: the model needs to know what the tool does")
    hints = typing.get_type_hints(function, include_extras=True)
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
    """The first paragraphs of a docstring, and the texts of its "Args:"."""
    lines = text.splitlines()
    heads = [i for i, line in enumerate(lines) if line.rstrip().endswith(":") and line.strip(": ").lower() in _SECTIONS]
    description = " ".join(" ".join(lines[: heads[0] if heads else None]).split())
    texts: dict[str, str] = {}
    for head in heads:
        if lines[head].strip(": ").lower() not in ("args", "arguments", "parameters"):
            continue
        after = [later for later in heads if later > head]
        key, indent = "", None
        for line in lines[head + 1 : after[0] if after else None]:
            if not line.strip():
                continue
            depth = len(line) - len(line.lstrip())
            indent = depth if indent is None else indent
            entry = re.match(r"\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)", line) if depth == indent else None
            if entry is not None:
                key, texts[entry[1]] = entry[1], entry[2].strip()
            elif key:
                texts[key] = f"{texts[key]} {line.strip()}".strip()
    return description, texts


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
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ArgumentError(
                f"tools[{index}] has the name {name!r}, expected 1 to 64 letters, digits, dots, colons, hyphens or "
                "underscores"
            )
        if not isinstance(function.get("parameters", {}), Mapping):
            raise wrong_type(f"tools[{index}]['function']['parameters']", function["parameters"], "a JSON schema")
        if any(name == other["function"]["name"] for other in found):
            raise ArgumentError(f"tools has two tools named {name!r}: each needs its own name")
        found.append({"type": "function", **wrapped})
    return found


def parameters_of(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """The JSON schema of each tool's parameters, by name."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or {"type": "object"} for tool in tools}
