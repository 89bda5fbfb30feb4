"""SmolLM2-135M-Instruct behind a server: chats, schemas and forced calls through HTTP are the engine's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

from http_server import Running, running

pytestmark = pytest.mark.real

CHAT = "/v1/chat/completions"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "name": "weather",
    "description": "Looks up the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]},
}


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[Running]:
    with running(smollm2) as served:
        yield served


def test_an_answer_is_the_models_streamed_or_not(server: Running) -> None:
    body = {"messages": FRANCE, "max_tokens": 24, "temperature": 0}
    found = server.post(CHAT, body).json()
    alone = server.engine.model.chat(FRANCE, max_tokens=24, temperature=0)
    assert found["choices"][0]["message"]["content"] == alone.text
    assert "Paris" in alone.text
    events = server.events(CHAT, body)
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events[:-1]) == alone.text
    again = server.post(CHAT, body).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert again["choices"] == found["choices"]
    rendered = server.post("/apply-template", {"messages": FRANCE}).json()["prompt"]
    assert server.post("/tokenize", {"messages": FRANCE}).json()["count"] == found["usage"]["prompt_tokens"]
    assert rendered.endswith("<|im_start|>assistant\n")


def test_a_call_can_be_forced(server: Running) -> None:
    tool = {"type": "function", "function": WEATHER}
    body: dict[str, Any] = {"messages": FRANCE, "tools": [tool], "tool_choice": "required", "max_tokens": 80, "seed": 1}
    message = server.post(CHAT, body).json()["choices"][0]["message"]
    [call, *_] = message["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert set(json.loads(call["function"]["arguments"])) == {"city"}


def test_an_answer_follows_a_schema(server: Running) -> None:
    schema = {"type": "object", "properties": {"capital": {"type": "string", "maxLength": 20}}, "required": ["capital"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}}}
    body = {"messages": FRANCE, "response_format": form, "max_tokens": 60, "temperature": 0}
    message = server.post(CHAT, body).json()["choices"][0]["message"]
    assert set(json.loads(message["content"])) == {"capital"}


def test_anthropics_conversations_are_answered(server: Running) -> None:
    body = {"model": server.service.models.entries[0].name, "messages": FRANCE, "max_tokens": 24, "temperature": 0}
    found = server.post("/v1/messages", body).json()
    assert "Paris" in found["content"][0]["text"]
