"""Bodies of OpenAI's API become requests of the engine, or errors that name what is wrong."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from llamac.engine.sampling.params import SamplingParams
from llamac.errors import (
    ChatTemplateError,
    ContextFullError,
    DeviceError,
    LlamacError,
    OutOfMemoryError,
    QueueFullError,
    UnsupportedError,
)
from llamac.guided.guides import Json
from llamac.openai.errors import InvalidRequestError
from llamac.openai.parameters import BOTH, PARAMETERS, Endpoint, parameters_of
from llamac.openai.requests import translate
from llamac.openai.responses import error_response

HI = [{"role": "user", "content": "Hi"}]
REFUSED = {name: entry.neutral for name, entry in parameters_of("chat").items() if entry.effect == "refused"}


def refusal(endpoint: Endpoint, **body: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        translate(endpoint, body)
    return caught.value


# ---- what is accepted


def test_every_sampling_parameter_is_passed_on() -> None:
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 7, "stop": ["a", "b"]}
    body = {"model": "any", "messages": HI, "max_completion_tokens": 5, **given}
    request = translate("chat", body)
    assert request.params == SamplingParams(max_tokens=5, **given)  # type: ignore[arg-type]
    assert (request.endpoint, request.inputs) == ("chat", [HI])


def test_lengths_have_the_defaults_of_the_api() -> None:
    assert translate("completions", {"prompt": "a"}).params.max_tokens == 16
    assert translate("chat", {"messages": HI}).params.max_tokens is None
    assert translate("completions", {"prompt": "a", "max_tokens": 3}).params.max_tokens == 3


def test_null_means_not_set() -> None:
    body = dict.fromkeys((*REFUSED, "temperature", "stop", "max_tokens", "model", "something new"))
    assert translate("chat", {**body, "messages": HI}).params == SamplingParams()


def test_values_that_ask_for_nothing_are_accepted() -> None:
    values = {name: neutral[0] for name, neutral in REFUSED.items() if neutral}
    assert translate("chat", {**values, "messages": HI, "stop": [], "user": "me"}).params == SamplingParams()


@pytest.mark.parametrize("prompt", ["text", [1, 2], ["text"], [[1, 2]]])
def test_a_prompt_is_text_or_ids_alone_or_in_a_list(prompt: Any) -> None:
    expected = prompt[0] if isinstance(prompt[0], list) or prompt == ["text"] else prompt
    assert translate("completions", {"prompt": prompt}).inputs == [expected]


def test_parts_of_text_are_joined_and_roles_stay() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts, "refusal": None}]
    assert translate("chat", {"messages": messages}).inputs[0] == [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
    ]


def test_without_the_library_a_response_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    error = refusal("chat", messages=HI, response_format={"type": "json_object"})
    assert (error.param, error.code) == ("response_format", "unsupported_parameter")
    assert 'pip install "llamac[guided]"' in str(error)
    assert translate("chat", {"messages": HI, "response_format": {"type": "text"}}).params.guide is None


def test_a_response_format_becomes_a_guide() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    formats = {
        "text": ({"type": "text"}, None),
        "object": ({"type": "json_object"}, Json()),
        "schema": (
            {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}},
            Json(schema),
        ),
    }
    for given, guide in formats.values():
        for endpoint, body in (("chat", {"messages": HI}), ("completions", {"prompt": "a"})):
            assert translate(endpoint, {**body, "response_format": given}).params.guide == guide  # type: ignore[arg-type]


# ---- what is refused


@pytest.mark.parametrize(
    ("given", "code", "message"),
    [
        ("json_object", "invalid_type", "response_format is a string, expected an object"),
        (
            {"type": "yaml"},
            "unsupported_value",
            "response_format.type is 'yaml', expected text, json_object or json_schema",
        ),
        (1.5, "invalid_type", "response_format is 1.5, expected an object"),
        ({"type": "json_schema"}, "missing_required_parameter", "response_format has no 'json_schema'"),
        ({"type": "json_schema", "json_schema": {}}, "missing_required_parameter", "json_schema has no 'schema'"),
        ({"type": "text", "color": 1}, "unknown_parameter", "'response_format.color'"),
        (
            {"type": "json_schema", "json_schema": {"schema": {"items": {"not": {}}}}},
            "invalid_value",
            "response_format: the JSON schema cannot be used, at /items: 'not' is not supported",
        ),
    ],
)
def test_wrong_response_formats_are_refused(given: Any, code: str, message: str) -> None:
    error = refusal("chat", messages=HI, response_format=given)
    assert error.code == code
    assert (error.param or "").startswith("response_format")
    assert message in str(error)


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_parameters_are_refused_by_name(name: str) -> None:
    error = refusal("chat", messages=HI, **{name: 3})
    assert (error.param, error.code) == (name, "unsupported_parameter")
    assert f"does not support {name!r}" in str(error)


@pytest.mark.parametrize(
    ("body", "param", "code", "message"),
    [
        ({}, "messages", "missing_required_parameter", "no 'messages'"),
        ({"messages": []}, "messages", "invalid_value", "empty"),
        ({"messages": "Hi"}, "messages", "invalid_type", "messages is a string, expected an array"),
        ({"messages": [1]}, "messages[0]", "invalid_type", "a number, expected an object"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter", "no 'content'"),
        ({"messages": [{"content": "a"}]}, "messages[0].role", "missing_required_parameter", "no 'role'"),
        ({"messages": [{"role": 1, "content": "a"}]}, "messages[0].role", "invalid_type", "expected a string"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content", "invalid_type", "a number"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            *("messages[0].content[0]", "unsupported_value", "'image_url'"),
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "audio": {}}]},
            *("messages[0].audio", "unsupported_parameter", "does not support 'messages[0].audio'"),
        ),
        ({"messages": HI, "prompt": "a"}, "prompt", "unknown_parameter", "unknown parameter 'prompt'"),
        ({"messages": HI, "temprature": 1}, "temprature", "unknown_parameter", "'temprature'"),
        ({"messages": HI, "model": 3}, "model", "invalid_type", "model is a number"),
        ({"messages": HI, "temperature": -1}, "temperature", "invalid_value", "temperature is -1"),
        (
            {"messages": HI, "temperature": "hot"},
            *("temperature", "invalid_type", "temperature must be a number, not a string"),
        ),
        ({"messages": HI, "temperature": True}, "temperature", "invalid_type", "not a boolean"),
        (
            {"messages": HI, "stop": ["a", None]},
            *("stop", "invalid_type", "each string of stop must be a string, not null"),
        ),
        ({"messages": HI, "stop": 5}, "stop", "invalid_type", "must be a string or an array of strings, not a number"),
        ({"messages": HI, "stop": [""]}, "stop", "invalid_value", "not empty"),
        ({"messages": HI, "n": True}, "n", "invalid_type", "n is a boolean"),
        ({"messages": HI, "stream": 1}, "stream", "invalid_type", "stream is a number, expected a boolean"),
        ({"messages": HI, "echo": True}, "echo", "unknown_parameter", "unknown parameter 'echo'"),
        ({"messages": HI, "stream_options": {}}, "stream_options", "invalid_value", "needs stream true"),
        (
            {"messages": HI, "stream": True, "stream_options": {"x": 1}},
            *("stream_options.x", "unknown_parameter", "'stream_options.x'"),
        ),
        ({"messages": HI, "stream": True, "best_of": 2}, "best_of", "invalid_value", "cannot be used with stream"),
        (
            {"messages": HI, "stream": True, "beam_width": 2},
            "beam_width",
            "invalid_value",
            "cannot be used with stream",
        ),
        (
            {"messages": HI, "reasoning_effort": "max"},
            *("reasoning_effort", "invalid_value", "'max', expected none, minimal, low, medium, high or xhigh"),
        ),
        (
            {"messages": HI, "chat_template_kwargs": {"template": "x"}},
            *("chat_template_kwargs", "invalid_value", "'template'"),
        ),
        (
            {"messages": HI, "chat_template_kwargs": {"a\r\nset-cookie: b": 1}},  # would stand in a header
            *("chat_template_kwargs", "invalid_value", "not a variable"),
        ),
        ({"messages": HI, "n": 257}, "n", "invalid_value", "n is 257"),
        ({"messages": HI, "max_tokens": 0}, "max_tokens", "invalid_value", "max_tokens is 0"),
        ({"messages": HI, "max_completion_tokens": 0}, *("max_completion_tokens", "invalid_value", "max_completion_")),
        (
            {"messages": HI, "max_tokens": 1, "max_completion_tokens": 1},
            "max_tokens",
            "invalid_value",
            "cannot be combined",
        ),
    ],
)
def test_wrong_bodies_are_refused(body: dict[str, Any], param: str, code: str | None, message: str) -> None:
    error = refusal("chat", **body)
    assert (error.param, error.code) == (param, code)
    assert message in str(error)


@pytest.mark.parametrize(
    ("prompt", "more", "message"),
    [
        ([1, 2], {}, "suffix needs a prompt that is a string"),
        ("a", {"echo": True}, "suffix and echo cannot be combined"),
    ],
)
def test_wrong_suffixes_are_refused(prompt: Any, more: dict[str, Any], message: str) -> None:
    error = refusal("completions", prompt=prompt, suffix="b", **more)
    assert (error.param, error.code, str(error)) == ("suffix", "invalid_value", message)


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        (["a", 1], "invalid_type"),
        (["a"] * 257, "invalid_value"),
        ([1.5], "invalid_type"),
        ({}, "invalid_type"),
        ([True], "invalid_type"),
    ],
)
def test_wrong_prompts_are_refused(prompt: Any, code: str) -> None:
    error = refusal("completions", prompt=prompt)
    assert (error.param, error.code) == ("prompt", code)


# ---- errors as responses


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code"),
    [
        (InvalidRequestError("m", "p", "c"), 400, "invalid_request_error", "p", "c"),
        (ContextFullError("m"), 400, "invalid_request_error", "prompt", "context_length_exceeded"),
        (ChatTemplateError("m"), 400, "invalid_request_error", "prompt", "chat_template_error"),
        (UnsupportedError("m"), 400, "invalid_request_error", "prompt", "unsupported_value"),
        (QueueFullError("m"), 429, "rate_limit_error", None, "rate_limit_exceeded"),
        (OutOfMemoryError("m"), 503, "server_error", None, "out_of_memory"),
        (DeviceError("m"), 503, "server_error", None, "device_failed"),
        (LlamacError("m"), 500, "server_error", None, None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_errors_have_the_status_and_shape_of_the_api(
    error: LlamacError, status: int, kind: str, param: str | None, code: str | None
) -> None:
    assert error_response(error, "prompt") == (
        status,
        {"error": {"message": "m", "type": kind, "param": param, "code": code}},
    )


def test_log_probabilities_and_biases_are_translated() -> None:
    chat: dict[str, Any] = {"messages": HI, "logprobs": True}
    assert translate("chat", {**chat, "top_logprobs": 3}).params.logprobs == 3
    assert translate("chat", chat).params.logprobs == 0
    assert translate("chat", {**chat, "logprobs": False}).params.logprobs is None
    assert translate("completions", {"prompt": "a", "logprobs": 2}).params.logprobs == 2
    biased = translate("chat", {"messages": HI, "logit_bias": {"5": 1.5, "7": -100}}).params
    assert biased.logit_bias == ((5, 1.5), (7, float("-inf")))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"1": "a"}}, "logit_bias"),
    ],
    ids=str,
)
def test_wrong_log_probabilities_and_biases_are_refused(body: dict[str, Any], param: str) -> None:
    assert refusal("chat", messages=HI, **body).param == param


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_tools_and_calls_are_passed_on() -> None:
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
    ]
    request = translate("chat", {"messages": messages, "tools": [TOOL], "tool_choice": "required"})
    assert request.tools == {"tools": [TOOL], "tool_choice": "required"}
    assert request.inputs[0][1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"name": ""}]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "g"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages[0].tool_calls"),
    ],
)
def test_wrong_tools_are_refused(change: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        translate("chat", {"messages": [{"role": "user", "content": "x"}], **change})
    assert caught.value.param == param


def test_several_prompts_make_several_inputs() -> None:
    assert translate("completions", {"prompt": ["a", "b"]}).inputs == ["a", "b"]
    assert translate("completions", {"prompt": [[1], [2, 3]]}).inputs == [[1], [2, 3]]
    error = refusal("completions", prompt=["a"] * 100, n=3)
    assert (error.param, str(error)) == ("n", "100 prompts with 3 candidates each: expected at most 256 together")


def test_an_echo_asks_for_the_log_probabilities_of_the_prompt() -> None:
    request = translate("completions", {"prompt": "a", "echo": True, "logprobs": 2, "max_tokens": 0})
    assert (request.echo, request.only_echo) == (True, True)
    assert (request.params.prompt_logprobs, request.params.max_tokens) == (2, 1)
    assert refusal("completions", prompt="a", echo=True, context_overflow="shift").param == "echo"
    assert refusal("completions", prompt="a", max_tokens=0).param == "max_tokens"


def test_parameters_without_effect_are_named() -> None:
    assert translate("chat", {"messages": HI, "store": True, "user": "a"}).without_effect == ("store", "user")


def test_each_parameter_is_in_the_table_once_for_each_endpoint() -> None:
    named = [(entry.name, endpoint) for entry in PARAMETERS for endpoint in entry.endpoints]
    assert len(named) == len(set(named))
    sampling = {entry.name for entry in PARAMETERS if entry.is_sampling}
    assert sampling <= set(SamplingParams.__dataclass_fields__)
    assert all(entry.endpoints == BOTH for entry in PARAMETERS if entry.is_sampling)
