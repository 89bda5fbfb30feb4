"""`/v1/messages`: Anthropic's conversations become the engine's, and its answers have Anthropic's form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

from builders import SCRIPT_TEMPLATE, byte_ids, script_checkpoint, write_model
from http_server import Running, running
from llamac.guided.guides import Json
from llamac.openai.errors import InvalidRequestError
from llamac.server.messages_request import translate

PATH = "/v1/messages"
STOP = 2  # a token
HI: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": "?"}]}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ANSWER = f"?<think>two</think>three\n{CALL}"
TOOL: dict[str, Any] = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {}}},
}


def script(folder: Path, answer: str) -> Path:
    """A model that gives this answer, the first character of which is the question."""
    made = script_checkpoint([*byte_ids(answer), STOP], context=256, stop_ids=[STOP])
    made.chat_template = SCRIPT_TEMPLATE
    return write_model(folder / "script.bin", made, generation={"temperature": 0})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(script(tmp_path_factory.mktemp("messages"), ANSWER)) as served:
        yield served


def events_of(server: Running, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream. Checks that each has its name in front."""
    with server.client.stream("POST", PATH, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        lines = [line for line in response.iter_lines() if line]
    values = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert lines[::2] == [f"event: {value['type']}" for value in values]
    return values


# ---- requests


def test_a_conversation_becomes_that_of_a_chat_template() -> None:
    body = {
        **HI,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "1?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "I add."},
                    {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]},
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
        "stop_sequences": ["END"],
        "metadata": {"user_id": "x"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    request = translate(body)
    call = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert request.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "I add.", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "2"},
        {"role": "user", "content": "And?"},
    ]
    function = {"name": "add", "description": "Adds.", "parameters": TOOL["input_schema"]}
    assert request.tools["tools"] == [{"type": "function", "function": function}]
    assert (request.tools["tool_choice"], request.tools["parallel_tool_calls"]) == ({"name": "add"}, False)
    assert (request.params.stop, request.params.reasoning_budget, request.params.max_tokens) == (("END",), 1024, 200)
    assert (request.thinks, request.ignored) == (
        True,
        ("metadata", "system[].cache_control", "messages[].content[].signature"),
    )


def test_a_tool_that_failed_says_so_to_the_model() -> None:
    def read(**result: Any) -> str:
        block = {"type": "tool_result", "tool_use_id": "t", **result}
        [message] = translate({**HI, "messages": [{"role": "user", "content": [block]}]}).messages
        assert message["role"] == "tool"
        return str(message["content"])

    assert read(content="no such file", is_error=True) == "The tool failed: no such file"
    assert read(content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], is_error=True) == (
        "The tool failed: a\nb"
    )
    assert read(is_error=True) == "The tool failed."
    assert read(content="fine", is_error=False) == read(content="fine", is_error=None) == "fine"


def test_an_output_config_has_an_effort_and_a_schema() -> None:
    schema = {"type": "object", "properties": {}}
    config = {"effort": "max", "format": {"type": "json_schema", "schema": schema}}
    request = translate({**HI, "output_config": config})
    assert (request.effort, request.params.guide) == ("xhigh", Json(schema))
    assert translate(HI).effort is None


USE_OF_THREE = {"type": "tool_use", "id": "a", "name": "add", "input": 3}
RESULT_OF_ZERO = {"type": "tool_result", "tool_use_id": "a", "content": 0}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].id"),
        ({"messages": [{"role": "assistant", "content": [USE_OF_THREE]}]}, "messages[0].content[0].input"),
        ({"messages": [{"role": "user", "content": [RESULT_OF_ZERO]}]}, "messages[0].content[0].content"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        ({"tools": [{"name": "add", "description": []}]}, "tools[0].description"),
        ({"tools": [{"name": ""}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "on"}}, "thinking"),
        ({"mcp_servers": []}, "mcp_servers"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"items": {"not": {}}}}}},
            "output_config.format",
        ),
        ({"stream": 1}, "stream"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
def test_wrong_bodies_are_refused(change: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        translate({**HI, **change})
    assert caught.value.param == param


# ---- answers


def test_an_answer_has_blocks_of_thoughts_text_and_calls(server: Running) -> None:
    found = server.post(PATH, {**HI, "tools": [TOOL]}).json()
    thoughts, text, call = found["content"]
    assert (thoughts["type"], thoughts["thinking"], text["text"].strip()) == ("thinking", "two", "three")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {"a": 1})
    assert (found["type"], found["role"], found["stop_reason"]) == ("message", "assistant", "tool_use")
    usage = found["usage"]
    prompt = server.post(f"{PATH}/count_tokens", {name: HI[name] for name in ("model", "messages")}).json()
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == prompt["input_tokens"]
    assert usage["output_tokens"] == len(ANSWER) - 1


@pytest.mark.parametrize(
    ("arguments", "stop", "reason"),
    [
        ('{"a": 1}', "1}", {"stop_reason": "stop_sequence", "stop_sequence": "1}"}),
        ('{"a": }', None, {"stop_reason": "end_turn", "stop_sequence": None}),
        ("[1]", None, {"stop_reason": "end_turn", "stop_sequence": None}),
        ('{"a": 1}', "later", {"stop_reason": "tool_use", "stop_sequence": None}),
    ],
)
def test_a_call_that_cannot_be_run_is_no_use_of_a_tool(
    arguments: str, stop: str | None, reason: dict[str, Any], tmp_path: Path
) -> None:
    answer = f'?<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    body: dict[str, Any] = {**HI, "tools": [TOOL], "max_tokens": 100, "stop_sequences": [stop] if stop else []}
    function = {"name": "add", "parameters": TOOL["input_schema"]}
    with running(script(tmp_path, answer), names=("tiny",)) as served:
        found = served.post(PATH, body).json()
        events = events_of(served, body)
        tools = [{"type": "function", "function": function}]
        chat = {"messages": HI["messages"], "tools": tools, "max_tokens": 100, "stop": stop}
        choice = served.post("/v1/chat/completions", chat).json()["choices"][0]
    assert {name: found[name] for name in reason} == reason
    assert events[-2]["delta"] == reason
    is_run = reason["stop_reason"] == "tool_use"
    assert [block["type"] for block in found["content"]] == ["tool_use" if is_run else "text"]
    if not is_run:
        written = choice["message"]["tool_calls"][0]["function"]["arguments"]
        assert found["content"][0]["text"] == f"add: {written}"
    assert choice["finish_reason"] == ("stop" if reason["stop_sequence"] else "tool_calls")


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("answer", [CALL, '{"a": 1}'])
def test_an_answer_in_a_format_can_be_a_call_instead(answer: str, strict: bool, tmp_path: Path) -> None:
    schema = {**TOOL["input_schema"], "required": ["a"], "additionalProperties": False}
    made = {"format": {"type": "json_schema", "schema": schema}}
    function = {"name": "add", "parameters": schema, "strict": strict}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    chat = {**HI, "tools": [{"type": "function", "function": function}], "response_format": wanted}
    with running(script(tmp_path, f"?{answer}"), names=("tiny",)) as served:
        body = {**HI, "tools": [{**TOOL, "input_schema": schema, "strict": strict}], "output_config": made}
        [block] = served.post(PATH, body).json()["content"]
        [choice] = served.post("/v1/chat/completions", chat).json()["choices"]
    if answer == CALL:
        arguments = json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])
        assert (block["type"], block["input"], choice["finish_reason"]) == ("tool_use", arguments, "tool_calls")
        assert arguments == {"a": 1} or not strict
    else:
        assert (block["text"], choice["message"]["content"], choice["finish_reason"]) == (answer, answer, "stop")


def test_tools_that_the_model_does_not_get_are_not_counted() -> None:
    body = {"model": "helper", "messages": HI["messages"]}
    unread = {"tools": [TOOL], "tool_choice": {"type": "none"}}
    with running("helper") as server:
        plain, without, with_tools = (
            server.post(f"{PATH}/count_tokens", {**body, **tools}).json()["input_tokens"]
            for tools in ({}, unread, {"tools": [TOOL]})
        )
        usage = server.post(PATH, {**body, **unread, "max_tokens": 1}).json()["usage"]
    assert plain == without == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert without < with_tools


def test_what_has_no_effect_is_named_in_the_header(server: Running) -> None:
    """The template reads neither efforts nor whether to think."""
    system = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]
    body = {**HI, "system": system, "output_config": {"effort": "low"}, "thinking": {"type": "adaptive"}}
    expected = "system[].cache_control, thinking, output_config.effort"
    assert server.post(PATH, body).headers["x-llamac-no-effect"] == expected
    with server.client.stream("POST", PATH, json={**body, "stream": True}) as response:
        assert response.headers["x-llamac-no-effect"] == expected
    del body["max_tokens"]
    assert server.post(f"{PATH}/count_tokens", body).headers["x-llamac-no-effect"] == expected
    assert "x-llamac-no-effect" not in server.post(PATH, HI).headers


def test_an_answer_can_leave_its_thoughts_out(server: Running) -> None:
    body = {**HI, "thinking": {"type": "enabled", "budget_tokens": 64, "display": "omitted"}}
    thoughts, text, *_ = server.post(PATH, body).json()["content"]
    assert (thoughts["type"], thoughts["thinking"], text["text"].strip()[:5]) == ("thinking", "", "three")
    events = events_of(server, body)
    assert [event["content_block"]["type"] for event in events if "content_block" in event][:2] == ["thinking", "text"]
    assert not [event for event in events if event.get("delta", {}).get("type") == "thinking_delta"]


def test_an_answer_says_why_it_ended(server: Running) -> None:
    short = server.post(PATH, {**HI, "max_tokens": 3}).json()
    assert short["stop_reason"] == "max_tokens"
    stopped = server.post(PATH, {**HI, "stop_sequences": ["ree"]}).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "ree")
    assert stopped["content"][1]["text"] == "th"
    assert server.post(PATH, HI).json()["stop_reason"] == "end_turn"


def test_a_stream_opens_and_closes_each_block(server: Running) -> None:
    body = {**HI, "tools": [TOOL]}
    whole = server.post(PATH, body).json()
    first, *middle, delta, last = events_of(server, body)
    assert (first["type"], first["message"]["content"], last["type"]) == ("message_start", [], "message_stop")
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    blocks: list[dict[str, Any]] = []
    is_open = False
    for found in middle:
        if found["type"] == "content_block_start":
            assert not is_open
            assert found["index"] == len(blocks)
            blocks.append(dict(found["content_block"]))
            is_open = True
            continue
        assert is_open
        assert found["index"] == len(blocks) - 1
        if found["type"] == "content_block_stop":
            is_open = False
            continue
        piece = found["delta"]
        name = {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "partial_json"}[piece["type"]]
        blocks[-1][name] = blocks[-1].get(name, "") + piece[name]
    assert not is_open
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
    assert (blocks[0]["thinking"], blocks[1]["text"]) == ("two", whole["content"][1]["text"])
    assert json.loads(blocks[2]["partial_json"]) == {"a": 1}


def test_errors_have_the_form_of_the_api(server: Running) -> None:
    for body, status, kind in (
        ({**HI, "model": "other"}, 404, "not_found_error"),
        ({**HI, "max_tokens": -1}, 400, "invalid_request_error"),
        ({**HI, "messages": [{"role": "user", "content": "x" * 9000}]}, 400, "invalid_request_error"),
    ):
        response = server.post(PATH, body)
        found = response.json()
        assert (response.status_code, found["type"], found["error"]["type"]) == (status, "error", kind), found
        assert found["request_id"] == response.headers["request-id"]
    assert server.client.get(PATH).json()["type"] == "error"
