"""A plugin of pytest for the libraries' own tests, which were written for a mock that accepts any value.

Their bodies have every parameter at once, with sample values such as `best_of=0`. The plugin leaves out what the
server's OpenAPI document does not accept, also in nested objects, and replaces values that are wrong in themselves.
"""

from __future__ import annotations

import json
import os
import urllib.request
from typing import Any

import pytest

URL = os.environ["LLAMAC_URL"]
REPLACED: dict[str, Any] = {
    "best_of": 1,  # was 0
    "logit_bias": {"5": 0},  # was {"foo": 0}: keys are token ids
    "seed": 1,  # was below 0
    "stop_sequences": ["string"],
}
DROPPED = {
    "max_tokens": "max_completion_tokens",  # one excludes the other
    "suffix": "prompt",  # the model has no tokens for it
}
ADDED = {"/responses": ("input", "string")}  # a server without prompts of its own needs an input


def document() -> dict[str, Any]:
    with urllib.request.urlopen(URL + "/openapi.json", timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


DOCUMENT = document()


def body_schema(path: str) -> dict[str, Any]:
    """The schema of a path's bodies; empty if it has none."""
    whole = "/v1" + path.partition("?")[0].removeprefix("/v1")
    operation = DOCUMENT["paths"].get(whole, {}).get("post", {})
    content = operation.get("requestBody", {}).get("content", {})
    found: dict[str, Any] = content.get("application/json", {}).get("schema", {})
    return found


def adapted(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A body without the keys and values that the document excludes."""
    schema = body_schema(path)
    if not schema:
        return body
    replaced = {name: REPLACED.get(name, value) for name, value in body.items()}
    found: dict[str, Any] = fitted(replaced, schema)
    for name, other in DROPPED.items():
        if other in found:
            found.pop(name, None)
    for name in ("max_completion_tokens", "max_output_tokens", "max_tokens"):
        if name in found:
            found[name] = min(16, found[name]) or 16
    if not found.get("stream"):
        found.pop("stream_options", None)
    if "tool_choice" in found and not found.get("tools"):
        del found["tool_choice"]
    if isinstance(found.get("text"), dict):
        found["text"] = {"format": {"type": "text"}}
    for tool in found.get("tools", ()):
        tool.pop("strict", None)  # the sample's parameters are no JSON schema
    for name, value in (ADDED[key] for key in ADDED if path.partition("?")[0].endswith(key)):
        found.setdefault(name, value)
    return found


def fitted(value: Any, schema: dict[str, Any]) -> Any:
    """A value without the keys and the items of arrays that a schema excludes, in whatever depth."""
    if isinstance(value, list):
        items = next((option["items"] for option in choices(schema) if "items" in option), {})
        return [item for item in (fitted(each, items) for each in value) if item is not None]
    closed = [each for each in choices(schema) if each.get("additionalProperties") == {"type": "null"}]
    if not isinstance(value, dict) or not closed:
        return value
    known = next((each["properties"] for each in closed if is_of(value, each["properties"])), None)
    if known is None:
        return None
    return {name: fitted(item, known[name]) for name, item in value.items() if accepts(known.get(name), item)}


def choices(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The alternatives of a schema, whose references are followed."""
    if "$ref" in schema:
        schema = DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return [found for option in schema["anyOf"] for found in choices(option)] if "anyOf" in schema else [schema]


def is_of(value: dict[str, Any], known: dict[str, Any]) -> bool:
    """Whether an object has the `type` and the `role` of a schema's properties."""
    for name in ("type", "role"):
        constants = [option["const"] for option in choices(known.get(name, {})) if "const" in option]
        if constants and value.get(name, constants[0]) not in constants:
            return False
    return True


def accepts(schema: Any, value: Any) -> bool:
    """Whether a key exists, and is not one that is refused."""
    if schema is None:
        return False
    refused = schema.get("anyOf", [{}])[0].get("enum")
    return refused is None or value in refused


@pytest.fixture(scope="session", autouse=True)
def adapt_bodies() -> None:
    """Let the library send what the server can compute."""
    import importlib

    client = importlib.import_module(f"{os.environ['LLAMAC_LIBRARY']}._base_client")
    original = client.BaseClient._build_request

    def build(self: Any, options: Any, **others: Any) -> Any:
        if isinstance(options.json_data, dict):
            options.json_data = adapted(options.url, options.json_data)
        return original(self, options, **others)

    client.BaseClient._build_request = build
    client.BaseClient._should_retry = lambda self, response: False  # what is refused stays refused
