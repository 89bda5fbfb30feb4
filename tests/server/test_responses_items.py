"""`/v1/responses`: items become a conversation, and the answer becomes items, whole or by events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

from builders import SCRIPT_TEMPLATE, byte_ids, script_checkpoint, write_model
from http_server import Running, running
from llamac.guided.guides import Json
from llamac.openai.errors import InvalidRequestError
from llamac.server.responses_request import translate

PATH = "/v1/responses"
STOP = 2  # a token
ANSWER = '?<think>two</think>three\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {}}}, "strict": None}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    made = script_checkpoint([*byte_ids(ANSWER), STOP], context=256, stop_ids=[STOP])
    made.chat_template = SCRIPT_TEMPLATE
    path = write_model(tmp_path_factory.mktemp("responses") / "script.bin", made, generation={"temperature": 0})
    with running(path) as served:
        yield served


def test_items_become_a_conversation() -> None:
    schema = {"type": "object", "properties": {}}
    request, without_effect = translate(
        {
            "instructions": "Be brief.",
            "input": [
                {"role": "developer", "content": [{"type": "input_text", "text": "Add."}]},
                {"role": "user", "content": "1?"},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add."}]},
                {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
                {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "2"},
            ],
            "tools": [TOOL, {"type": "web_search"}],
            "tool_choice": {"type": "function", "name": "add"},
            "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}},
            "reasoning": {"effort": "low"},
            "max_output_tokens": 9,
            "store": True,
        }
    )
    calls = [{"id": name, "type": "function", "function": {"name": "add", "arguments": "{}"}} for name in ("c1", "c2")]
    assert request.inputs == [
        [
            {"role": "system", "content": "Be brief."},
            {"role": "developer", "content": "Add."},
            {"role": "user", "content": "1?"},
            {"role": "assistant", "content": "I add.", "reasoning_content": "hm", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ]
    ]
    assert request.tools["tools"][0]["function"] == {"name": "add", "parameters": TOOL["parameters"]}
    assert (request.params.max_tokens, request.params.guide) == (9, Json(schema))
    assert (request.reasoning_effort, without_effect) == ("low", ("store", "tools[]", "text.format.name"))


def test_reasoning_belongs_to_what_follows_it() -> None:
    thoughts = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    answer = {"role": "assistant", "content": "a"}
    request, _ = translate({"input": [answer, thoughts, call, thoughts, {"role": "user", "content": "?"}]})
    called = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    assert request.inputs[0] == [
        answer,
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [called]},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        {"role": "user", "content": "?"},
    ]


def test_consecutive_reasoning_items_have_separate_lines() -> None:
    thoughts = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]} for text in ("a.", "b.")]
    request, _ = translate({"input": [*thoughts, {"role": "assistant", "content": "x"}]})
    assert request.inputs[0] == [{"role": "assistant", "content": "x", "reasoning_content": "a.\nb."}]


def test_a_result_follows_its_call_also_if_the_answer_ended_with_text() -> None:
    """The items of a streamed answer are in the order in which the model wrote them."""
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    tail = {"role": "assistant", "content": "tail"}
    result = {"type": "function_call_output", "call_id": "c", "output": "o"}
    request, _ = translate({"input": [call, tail, result, tail, tail]})
    called = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    assert request.inputs[0] == [
        {"role": "assistant", "content": "tail", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c", "content": "o"},
        tail,
        tail,
    ]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": 5}]}, "input[0].output"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "input[0].name"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"tools": [{"name": "x"}]}, "tools[0]"),
        ({"reasoning": {"effort": "most"}}, "reasoning.effort"),
        ({"other": 1}, "other"),
        ({"prompt": {"id": "p"}}, "prompt"),
    ],
)
def test_wrong_bodies_are_refused(change: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        translate({"input": "?", **change})
    assert caught.value.param == param


SEARCH = {"type": "web_search"}


@pytest.mark.parametrize(
    ("change", "param", "start"),
    [
        ({"tools": [SEARCH, {**TOOL, "name": "bad name!"}]}, "tools[1]", "tools[1] has the name 'bad name!'"),
        ({"tools": [TOOL, SEARCH, TOOL]}, "tools", "tools has two tools named 'add'"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": 3}}}}, "text.format", "text.format: "),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0"),
        ({"input": []}, "input", "input is empty: expected at least one item"),
        ({"input": [], "instructions": "Be brief."}, "input", "input is empty: expected at least one item"),
        ({"messages": []}, "messages", "unknown parameter 'messages'; did you mean 'input'?"),
    ],
)
def test_errors_have_the_names_of_this_api(change: dict[str, Any], param: str, start: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        translate({"input": "?", **change})
    assert (caught.value.param, str(caught.value)[: len(start)]) == (param, start)


def test_a_format_besides_forced_calls_is_refused_by_its_name(server: Running) -> None:
    schema = {"type": "object"}
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "?"}]}
    json_object = {"type": "json_object"}
    forced = {"tools": [TOOL], "tool_choice": "required"}
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        PATH: ("text.format", {"input": "?", **forced, "text": {"format": json_object}}),
        "/v1/chat/completions": ("response_format", {**ask, **forced, "response_format": json_object}),
        "/v1/messages": (
            "output_config.format",
            {
                **ask,
                "max_tokens": 5,
                "tools": [{"name": "add", "input_schema": schema}],
                "tool_choice": {"type": "any"},
                "output_config": {"format": {"type": "json_schema", "schema": schema}},
            },
        ),
    }
    for path, (name, body) in bodies.items():
        found = server.post(path, body)
        error = found.json()["error"]
        assert (found.status_code, error.get("param", name)) == (400, name)
        assert error["message"] == (
            f"{name} cannot be combined with tool_choice 'required', because both constrain the answer: remove one of "
            "them"
        )


def test_tools_that_are_left_out_have_one_name() -> None:
    _, without_effect = translate({"input": "?", "tools": [SEARCH, {"type": "file_search"}, TOOL]})
    assert without_effect == ("tools[]",)


def test_an_answer_has_items(server: Running) -> None:
    found = server.post(PATH, {"input": "?", "tools": [TOOL], "user": "me"}).json()
    thoughts, message, call = found["output"]
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "two"}]
    assert (message["role"], message["content"][0]["text"].strip()) == ("assistant", "three")
    assert (call["name"], json.loads(call["arguments"]), call["status"]) == ("add", {"a": 1}, "completed")
    assert (found["status"], found["object"], found["user"]) == ("completed", "response", "me")
    usage = found["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"] == len(ANSWER) - 1
    short = server.post(PATH, {"input": "?", "max_output_tokens": 3}).json()
    assert (short["status"], short["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_only_the_item_that_a_limit_cuts_is_incomplete(server: Running) -> None:
    body = {"input": "?", "tools": [TOOL], "max_output_tokens": ANSWER.index("ree\n")}
    expected = [("reasoning", "completed"), ("message", "incomplete")]
    whole = server.post(PATH, body).json()
    events = server.events(PATH, body)
    assert events[-1]["type"] == "response.incomplete"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    for items in (whole["output"], events[-1]["response"]["output"], done):
        assert [(item["type"], item["status"]) for item in items] == expected


def test_an_answer_repeats_the_user_only_if_there_is_one(server: Running) -> None:
    """OpenAI's document lets `user` be missing, but not null."""
    assert "user" not in server.post("/v1/responses", {"input": "?", "user": None}).json()
    assert server.post("/v1/responses", {"input": "?", "user": "me"}).json()["user"] == "me"


def test_an_answer_has_the_temperature_that_was_used(server: Running) -> None:
    found = server.post(PATH, {"input": "x", "max_output_tokens": 1}).json()
    assert (found["temperature"], found["top_p"]) == (0, 1)  # the model recommends greedy answers
    found = server.post(PATH, {"input": "x", "max_output_tokens": 1, "temperature": 0.5, "top_p": 0.25}).json()
    assert (found["temperature"], found["top_p"]) == (0.5, 0.25)


def test_events_tell_the_whole_answer(server: Running) -> None:
    body = {"input": "?", "tools": [TOOL]}
    whole = server.post(PATH, body).json()
    events = server.events(PATH, body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"

    def plain(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]

    assert plain(events[-1]["response"]["output"]) == plain(whole["output"])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    for index, kind in enumerate(("reasoning_text", "output_text", "function_call_arguments")):
        deltas = [event for event in events if event["type"] == f"response.{kind}.delta"]
        [end] = [event for event in events if event["type"] == f"response.{kind}.done"]
        text = end["arguments"] if kind == "function_call_arguments" else end["text"]
        assert "".join(delta["delta"] for delta in deltas) == text
        assert {delta["output_index"] for delta in deltas} == {index}
        assert {delta["item_id"] for delta in deltas} == {done[index]["id"]}
