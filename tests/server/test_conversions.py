"""Conversations become the tokens that a chat computes, and can end with the beginning of an answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

from http_server import Running, running

PATH = "/tokenize"
ASK = [{"role": "user", "content": "Hello <|im_end|>"}]
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running("helper") as served:
        yield served


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"reasoning_effort": "high"},
        {"tools": [TOOL]},
        {"chat_template_kwargs": {"reasoning_effort": "high"}, "tools": [TOOL]},
    ],
)
def test_a_conversation_has_the_tokens_of_a_chat(more: dict[str, Any], server: Running) -> None:
    body = {"messages": ASK, **more}
    usage = server.post("/v1/chat/completions", {**body, "max_tokens": 1}).json()["usage"]
    found = server.post(PATH, body).json()
    assert found["count"] == len(found["tokens"]) == usage["prompt_tokens"]


def test_the_beginning_of_an_answer_can_have_special_tokens_and_messages_cannot(server: Running) -> None:
    tokenizer = server.engine.model.tokenizer
    plain = server.post(PATH, {"messages": ASK}).json()["tokens"]
    begun = server.post(PATH, {"messages": ASK, "answer": "<think>\nHm.</think>"}).json()["tokens"]
    assert begun == plain + tokenizer.encode("<think>\nHm.</think>", parse_special=True)
    end = tokenizer.id_of("<|im_end|>")
    parsed = server.post(PATH, {"messages": ASK, "parse_special": True}).json()["tokens"]
    assert parsed.count(end) == plain.count(end) + 1


def test_what_belongs_to_messages_has_no_effect_on_a_text(server: Running) -> None:
    more = {"tools": [TOOL], "reasoning_effort": "high", "chat_template_kwargs": {}, "answer": "a"}
    found = server.post(PATH, {"prompt": "Hello", **more})
    assert found.json()["tokens"] == server.engine.model.tokenize("Hello")
    assert set(found.headers["x-llamac-no-effect"].split(", ")) == set(more)
    unread = server.post(PATH, {"messages": ASK, "chat_template_kwargs": {"mood": 1}})
    assert unread.headers["x-llamac-no-effect"] == "chat_template_kwargs.mood"
    for text in ({"messages": ASK}, {"prompt": "Hello"}):
        for wrong in ({"chat_template_kwargs": {"messages": 1}}, {"tools": [{"name": "a b"}]}):
            assert server.post(PATH, {**text, **wrong}).status_code == 400
