"""pydantic-ai: texts, forced tools and typed answers, by chats, responses and messages."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.output import NativeOutput, ToolOutput
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL = os.environ["LLAMAC_URL"]
KINDS = ["chat", "responses", "messages"]
SETTINGS: Any = {"max_tokens": 150, "temperature": 0, "parallel_tool_calls": False}


class City(BaseModel):
    """An answer of a given form."""

    name: str
    is_large: bool


def agent(kind: str, **options: Any) -> Agent[Any, Any]:
    model: Any
    if kind == "messages":
        model = AnthropicModel("smollm2", provider=AnthropicProvider(base_url=URL, api_key="none"))
    else:
        openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
        model = (OpenAIChatModel if kind == "chat" else OpenAIResponsesModel)("smollm2", provider=openai)
    return Agent(model, model_settings=SETTINGS, retries=0, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_ends_with_a_text(kind: str) -> None:
    found = asyncio.run(agent(kind, instructions="Be brief.").run("Name a color."))
    assert found.output
    assert found.usage.output_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_forced_through_a_tool(kind: str) -> None:
    found = asyncio.run(agent(kind, output_type=ToolOutput(City)).run("Describe Oslo."))
    assert isinstance(found.output, City)


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_an_answer_has_the_schema_of_a_class(kind: str) -> None:
    found = asyncio.run(agent(kind, output_type=NativeOutput(City)).run("Describe Oslo."))
    assert isinstance(found.output, City)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_streamed(kind: str) -> None:
    async def run() -> list[str]:
        async with agent(kind).run_stream("Name a color.") as found:
            return [piece async for piece in found.stream_text(delta=True)]

    assert "".join(asyncio.run(run()))
