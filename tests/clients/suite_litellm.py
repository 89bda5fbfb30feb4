"""litellm: chats, completions, embeddings, responses and messages through its own providers."""

from __future__ import annotations

import json
import os
from typing import Any

import litellm
import pytest

URL = os.environ["LLAMAC_URL"]
OPENAI: Any = {"api_base": f"{URL}/v1", "api_key": "none"}
ANTHROPIC: Any = {"api_base": URL, "api_key": "none"}
PROVIDERS = [("openai/smollm2", OPENAI), ("anthropic/smollm2", ANTHROPIC)]
ASK: Any = [{"role": "user", "content": "Name a color."}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "Weather", "parameters": PARAMETERS}}


@pytest.mark.parametrize(("model", "address"), PROVIDERS)
def test_a_chat_is_answered(model: str, address: Any) -> None:
    found = litellm.completion(model, ASK, max_tokens=20, temperature=0, **address)
    assert found.choices[0].message.content
    assert found.usage.completion_tokens > 0


@pytest.mark.parametrize(("model", "address"), PROVIDERS)
def test_a_chat_is_streamed(model: str, address: Any) -> None:
    pieces = list(litellm.completion(model, ASK, max_tokens=20, temperature=0, stream=True, **address))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)


@pytest.mark.parametrize(("model", "address"), PROVIDERS)
def test_a_tool_is_called(model: str, address: Any) -> None:
    options: Any = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    found = litellm.completion(model, ASK, max_tokens=100, temperature=0, **options, **address)
    [call] = found.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)


def test_a_text_is_continued() -> None:
    found = litellm.text_completion(
        model="text-completion-openai/smollm2", prompt="Once upon a time", max_tokens=10, **OPENAI
    )
    assert found.choices[0].text


def test_texts_are_embedded() -> None:
    found = litellm.embedding("openai/smollm2", ["a", "b"], **OPENAI)
    assert len(found.data) == 2


def test_a_response_is_made() -> None:
    found: Any = litellm.responses(model="openai/smollm2", input="Name a color.", max_output_tokens=20, **OPENAI)
    assert found.output


def test_an_unknown_model_is_its_own_error() -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion("openai/other", ASK, **OPENAI)
