"""Every key of every object in a body is honored, named as without effect, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from llamac.openai.errors import InvalidRequestError
from llamac.openai.requests import translate as translate_openai
from llamac.server import messages_request, responses_request

CACHE = {"type": "ephemeral"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FREE = (
    "parameters",
    "input_schema",
    "schema",
    "metadata",
    "input",
    "chat_template_kwargs",
)  # objects of the user's own
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "1?"}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ],
    "tools": [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}, {"name": "sub"}],
    "tool_choice": {"type": "function", "function": {"name": "add"}},
    "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    "stream": True,
    "stream_options": {"include_usage": True},
}
RESPONSES: dict[str, Any] = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "1?"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "1"}]},
    ],
    "tools": [{"type": "function", "name": "add", "parameters": SCHEMA}],
    "tool_choice": {"type": "function", "name": "add"},
    "text": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "reasoning": {"effort": "low"},
}
MESSAGES: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "1?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm"},
                {"type": "redacted_thinking"},
                {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "1"}]}],
        },
    ],
    "tools": [{"name": "add", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "add"},
    "thinking": {"type": "enabled", "budget_tokens": 9},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}


def chat(body: dict[str, Any]) -> tuple[str, ...]:
    return translate_openai("chat", body).without_effect


def responses(body: dict[str, Any]) -> tuple[str, ...]:
    return responses_request.translate(body)[1]


def messages(body: dict[str, Any]) -> tuple[str, ...]:
    return messages_request.translate(body).ignored


APIS: dict[str, tuple[Callable[[dict[str, Any]], tuple[str, ...]], dict[str, Any]]] = {
    "chat": (chat, CHAT),
    "responses": (responses, RESPONSES),
    "messages": (messages, MESSAGES),
}


def objects(value: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects in a body, with their places."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from objects(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        yield path, value
        for name, item in value.items():
            if name not in FREE or not isinstance(item, dict):
                yield from objects(item, f"{path}.{name}" if path else name)


PLACES = [(api, path) for api, (_, body) in APIS.items() for path, _ in objects(body)]


@pytest.mark.parametrize(("api", "path"), PLACES)
def test_an_unknown_key_is_refused_wherever_it_is(api: str, path: str) -> None:
    translate, original = APIS[api]
    body = copy.deepcopy(original)
    translate(body)
    dict(objects(body))[path]["surprise"] = 1
    with pytest.raises(InvalidRequestError) as caught:
        translate(body)
    place = f"{path}.surprise" if path else "surprise"
    assert (caught.value.param, caught.value.code) == (place, "unknown_parameter")
    assert place in str(caught.value)


EXTRA: list[tuple[str, str, dict[str, Any], str]] = [
    ("chat", "messages[0].content[0]", {"cache_control": CACHE}, "messages[].content[].cache_control"),
    ("chat", "messages[1].tool_calls[0]", {"index": 0}, "messages[].tool_calls[].index"),
    ("chat", "tools[0]", {"cache_control": CACHE}, "tools[].cache_control"),
    ("chat", "response_format.json_schema", {"name": "x"}, "response_format.json_schema.name"),
    ("chat", "stream_options", {"include_obfuscation": True}, "stream_options.include_obfuscation"),
    ("responses", "input[0]", {"id": "msg_1"}, "input[].id"),
    ("responses", "input[1]", {"encrypted_content": "x"}, "input[].encrypted_content"),
    ("responses", "input[1]", {"summary": [{"type": "summary_text", "text": "s"}]}, "input[].summary"),
    ("responses", "input[0].content[0]", {"annotations": []}, "input[].content[].annotations"),
    ("responses", "text.format", {"description": "x"}, "text.format.description"),
    ("messages", "system[0]", {"cache_control": CACHE}, "system[].cache_control"),
    ("messages", "messages[0].content[0]", {"cache_control": CACHE}, "messages[].content[].cache_control"),
    ("messages", "messages[1].content[0]", {"signature": "x"}, "messages[].content[].signature"),
    ("messages", "messages[1].content[1]", {"data": "x"}, "messages[].content[].data"),
    ("messages", "messages[1].content[2]", {"cache_control": CACHE}, "messages[].content[].cache_control"),
    ("messages", "messages[2].content[0].content[0]", {"citations": []}, "messages[].content[].content[].citations"),
    ("messages", "tools[0]", {"cache_control": CACHE}, "tools[].cache_control"),
    ("messages", "tools[0]", {"eager_input_streaming": True}, "tools[].eager_input_streaming"),
    ("messages", "", {"speed": "fast"}, "speed"),
]


@pytest.mark.parametrize(("api", "path", "extra", "name"), EXTRA)
def test_a_key_without_effect_is_named(api: str, path: str, extra: dict[str, Any], name: str) -> None:
    translate, original = APIS[api]
    body = copy.deepcopy(original)
    assert name not in translate(body)
    dict(objects(body))[path].update(extra)
    assert name in translate(body)


@pytest.mark.parametrize(
    ("api", "path", "extra"),
    [
        ("chat", "messages[1]", {"annotations": []}),
        ("messages", "messages[1].content[2]", {"caller": {"type": "direct"}}),
        ("messages", "tools[0]", {"defer_loading": False, "allowed_callers": ["direct"], "strict": None}),
        ("responses", "tools[0]", {"defer_loading": False, "strict": True}),
    ],
)
def test_a_value_that_asks_for_nothing_is_accepted(api: str, path: str, extra: dict[str, Any]) -> None:
    translate, original = APIS[api]
    body = copy.deepcopy(original)
    names = translate(body)
    dict(objects(body))[path].update(extra)
    assert translate(body) == names


@pytest.mark.parametrize(
    ("api", "path", "extra", "param"),
    [
        ("messages", "tools[0]", {"defer_loading": True}, "tools[0].defer_loading"),
        ("messages", "tools[0]", {"input_examples": [{"a": 1}]}, "tools[0].input_examples"),
        ("messages", "output_config", {"task_budget": {"type": "tokens", "total": 9}}, "output_config.task_budget"),
        ("messages", "context_management.edits[0]", {"type": "compact_20260112"}, "context_management.edits[0]"),
        (
            *("messages", "context_management.edits[0]", {"keep": {"type": "thinking_turns", "value": 1}}),
            "context_management.edits[0].keep",
        ),
        ("messages", "thinking", {"type": "disabled"}, "thinking.budget_tokens"),
        ("messages", "thinking", {"display": "short"}, "thinking.display"),
        ("messages", "messages[2].content[0]", {"is_error": "yes"}, "messages[2].content[0].is_error"),
        ("responses", "input[2]", {"caller": {"type": "program"}}, "input[2].caller"),
        ("responses", "reasoning", {"mode": "pro"}, "reasoning.mode"),
        ("chat", "messages[1]", {"audio": {"id": "a"}}, "messages[1].audio"),
        ("chat", "tool_choice", {"type": "allowed_tools"}, "tool_choice.type"),
    ],
)
def test_a_key_that_would_change_the_answer_is_refused(api: str, path: str, extra: dict[str, Any], param: str) -> None:
    translate, original = APIS[api]
    body = copy.deepcopy(original)
    dict(objects(body))[path].update(extra)
    with pytest.raises(InvalidRequestError) as caught:
        translate(body)
    assert caught.value.param == param


def test_names_of_a_long_conversation_stand_in_the_header_once() -> None:
    block = {"type": "text", "text": "?", "cache_control": CACHE}
    body = {**MESSAGES, "messages": [{"role": "user", "content": [block] * 9}] * 9}
    assert messages(body) == ("context_management", "messages[].content[].cache_control")


@pytest.mark.parametrize(
    ("api", "name", "meant"),
    [
        ("responses", "messages", "input"),
        ("responses", "max_tokens", "max_output_tokens"),
        ("responses", "reasoning_effort", "reasoning.effort"),
        ("messages", "stop", "stop_sequences"),
        ("chat", "n_predict", "max_tokens"),
        ("responses", "n_predict", "max_output_tokens"),
        ("messages", "num_predict", "max_tokens"),
        ("messages", "output_format", "output_config.format"),
    ],
)
def test_a_key_of_another_api_is_corrected(api: str, name: str, meant: str) -> None:
    translate, body = APIS[api]
    with pytest.raises(InvalidRequestError, match=f"'{name}'; did you mean '{meant}'"):
        translate({**body, name: 1})


def test_a_misspelt_key_is_corrected() -> None:
    with pytest.raises(InvalidRequestError, match="'temprature'; did you mean 'temperature'"):
        chat({**CHAT, "temprature": 1})
