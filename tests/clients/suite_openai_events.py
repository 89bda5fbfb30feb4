"""OpenAI's own OpenAPI document on each event of a stream, which prism cannot check."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import jsonschema
import pytest

ASK = [{"role": "user", "content": "?"}]
FUNCTION = {"name": "add", "parameters": {"type": "object"}}
USAGE = {"stream_options": {"include_usage": True}}
# Values that OpenAI's API sends as null as long as they are unknown, although its document does not let them be null.
NO_REASON, NO_USAGE, NO_USAGE_YET = "choices.0.finish_reason is null", "usage is null", "response.usage is null"
CASES: list[tuple[str, str, dict[str, Any], set[str]]] = [
    ("chat/completions", "CreateChatCompletionStreamResponse", {"messages": ASK}, set()),
    (
        "chat/completions",
        "CreateChatCompletionStreamResponse",
        {"messages": ASK, "tools": [{"type": "function", "function": FUNCTION}], **USAGE},
        set(),
    ),
    (
        "chat/completions",
        "CreateChatCompletionStreamResponse",
        {"messages": ASK, "n": 2, "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 9},
        set(),
    ),
    ("completions", "CreateCompletionResponse", {"prompt": "a", "max_tokens": 5}, {NO_REASON}),
    (
        "completions",
        "CreateCompletionResponse",
        {"prompt": "a", "max_tokens": 5, "logprobs": 2, **USAGE},
        {NO_REASON, NO_USAGE},
    ),
    ("responses", "ResponseStreamEvent", {"input": "?"}, {NO_USAGE_YET}),
    ("responses", "ResponseStreamEvent", {"input": "?", "max_output_tokens": 9}, {NO_USAGE_YET}),
    (
        "responses",
        "ResponseStreamEvent",
        {"input": "?", "tools": [{"type": "function", "strict": False, **FUNCTION}]},
        {NO_USAGE_YET},
    ),
]


def with_nulls(value: Any) -> Any:
    """A schema in which `nullable`, of an older version of OpenAPI, means what it meant there."""
    if isinstance(value, list):
        return [with_nulls(each) for each in value]
    if not isinstance(value, dict):
        return value
    found = {name: with_nulls(each) for name, each in value.items()}
    return {"anyOf": [found, {"type": "null"}]} if value.get("nullable") is True else found


COMPONENTS = with_nulls(json.loads(Path(os.environ["LLAMAC_DOCUMENT"]).read_text("utf-8"))["components"])


def violations(form: str, event: Any) -> set[str]:
    """Where an event is not as its schema says."""
    schema = COMPONENTS["schemas"][form]
    if "type" in event:  # one of many kinds of events
        names = [option["$ref"].rpartition("/")[2] for option in schema["anyOf"]]
        [form] = [name for name in names if event["type"] in COMPONENTS["schemas"][name]["properties"]["type"]["enum"]]
    whole = {"$ref": f"#/components/schemas/{form}", "components": COMPONENTS}
    found = jsonschema.Draft202012Validator(whole).iter_errors(event)
    return {f"{'.'.join(map(str, error.absolute_path))} is {json.dumps(error.instance)}" for error in found}


def events(path: str, body: dict[str, Any]) -> list[Any]:
    data = json.dumps({"model": "tiny", "stream": True, **body}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{os.environ['LLAMAC_URL']}/v1/{path}", data, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]


@pytest.mark.parametrize(("path", "form", "body", "nulls"), CASES)
def test_every_event_is_as_the_document_says(path: str, form: str, body: dict[str, Any], nulls: set[str]) -> None:
    found = events(path, body)
    assert len(found) > 4
    assert set().union(*(violations(form, event) for event in found)) == nulls
