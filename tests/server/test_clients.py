"""The clients that people have, against a server: openai's and anthropic's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from builders import SCRIPT_TEMPLATE, byte_ids, script_checkpoint, write_model
from http_server import Running, running

STOP = 2  # a token
ANSWER = '?<think>two</think>three\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
ASK: list[Any] = [{"role": "user", "content": "?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    made = script_checkpoint([*byte_ids(ANSWER), STOP], context=256, stop_ids=[STOP])
    made.chat_template = SCRIPT_TEMPLATE
    path = write_model(tmp_path_factory.mktemp("clients") / "script.bin", made, generation={"temperature": 0})
    with running(path) as served:
        yield served


@pytest.fixture
def openai(server: Running) -> Iterator[Any]:
    library = pytest.importorskip("openai")
    with library.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic(server: Running) -> Iterator[Any]:
    library = pytest.importorskip("anthropic")
    with library.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="none", max_retries=0) as client:
        yield client


def test_openai_reads_models_completions_and_embeddings(openai: Any) -> None:
    assert [model.id for model in openai.models.list()] == ["tiny"]
    found = openai.completions.create(model="tiny", prompt="?", max_tokens=4, logprobs=1)
    assert len(found.choices[0].logprobs.tokens) == found.usage.completion_tokens == 4
    pieces = list(openai.completions.create(model="tiny", prompt="?", max_tokens=4, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == found.choices[0].text
    vectors = openai.embeddings.create(model="tiny", input=["a", "b"]).data  # asks for base64
    assert len(vectors[0].embedding) == len(vectors[1].embedding) > 0


def test_openai_reads_a_stream_with_a_call_and_usage(openai: Any) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
    with openai.chat.completions.stream(
        model="tiny", messages=ASK, tools=[tool], stream_options={"include_usage": True}
    ) as stream:
        for _ in stream:
            pass
        found = stream.get_final_completion()
    [choice] = found.choices
    assert (choice.finish_reason, choice.message.content.strip()) == ("tool_calls", "three")
    assert choice.message.reasoning_content == "two"
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    assert found.usage.completion_tokens == len(ANSWER) - 1


def test_openai_reads_a_response_and_its_events(openai: Any) -> None:
    tool = {"type": "function", "name": "add", "parameters": PARAMETERS}
    body = {"model": "tiny", "input": ASK, "tools": [tool]}
    found = openai.responses.create(**body)
    assert [item.type for item in found.output] == ["reasoning", "message", "function_call"]
    assert (found.output_text.strip(), json.loads(found.output[2].arguments)) == ("three", {"a": 1})
    with openai.responses.stream(**body) as stream:
        for _ in stream:
            pass
        last = stream.get_final_response()
    assert (last.status, last.output_text) == ("completed", found.output_text)
    assert last.usage.output_tokens == found.usage.output_tokens == len(ANSWER) - 1


def test_openai_raises_its_own_errors(openai: Any) -> None:
    library = pytest.importorskip("openai")
    with pytest.raises(library.NotFoundError, match="is not served here") as caught:
        openai.chat.completions.create(model="other", messages=ASK)
    assert (caught.value.code, caught.value.request_id[:4]) == ("model_not_found", "req_")
    with pytest.raises(library.BadRequestError) as refused:
        openai.chat.completions.create(model="tiny", messages=ASK, temperature=-1)
    assert refused.value.param == "temperature"
    misspelt = [*ASK, {"role": "asistant", "content": "!"}]
    with pytest.raises(
        library.BadRequestError, match=r"messages\[1\].role is 'asistant', .*mean 'assistant'"
    ) as refused:
        openai.chat.completions.create(model="tiny", messages=misspelt)
    assert refused.value.param == "messages"
    with pytest.raises(library.BadRequestError, match=r"input\[1\].role is 'asistant', expected user, ") as refused:
        openai.responses.create(model="tiny", input=misspelt)
    assert refused.value.param == "input[1].role"


def test_anthropic_reads_an_answer_and_a_stream(anthropic: Any) -> None:
    tool = {"name": "add", "input_schema": PARAMETERS}
    body = {"model": "tiny", "max_tokens": 200, "messages": ASK, "tools": [tool]}
    found = anthropic.messages.create(**body)
    assert [block.type for block in found.content] == ["thinking", "text", "tool_use"]
    assert (found.content[2].input, found.stop_reason) == ({"a": 1}, "tool_use")
    with anthropic.messages.stream(**body) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == found.content[1].text == last.content[1].text
    assert (last.content[0].thinking, last.content[2].input, last.stop_reason) == ("two", {"a": 1}, "tool_use")
    assert last.usage.output_tokens == found.usage.output_tokens == len(ANSWER) - 1
    assert anthropic.messages.count_tokens(model="tiny", messages=ASK).input_tokens > 0


def test_anthropic_raises_its_own_errors(anthropic: Any) -> None:
    library = pytest.importorskip("anthropic")
    with pytest.raises(library.NotFoundError, match="is not served here") as caught:
        anthropic.messages.create(model="other", max_tokens=1, messages=ASK)
    assert caught.value.request_id[:4] == "req_"
    misspelt = [*ASK, {"role": "asistant", "content": "!"}]
    with pytest.raises(library.BadRequestError, match=r"messages\[1\].role is 'asistant', expected user or assistant"):
        anthropic.messages.create(model="tiny", max_tokens=1, messages=misspelt)
