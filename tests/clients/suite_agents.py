"""openai-agents: a run with a forced tool, by chats and by responses, whole and streamed."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
CALLS: list[str] = []
MODELS = [OpenAIChatCompletionsModel, OpenAIResponsesModel]


class City(BaseModel):
    """An answer of a given form."""

    name: str
    is_large: bool


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    CALLS.append(city)
    return "sunny"


def agent(kind: Any, **options: Any) -> Agent[Any]:
    client = AsyncOpenAI(base_url=os.environ["LLAMAC_URL"] + "/v1", api_key="none")
    settings = ModelSettings(max_tokens=120, temperature=0, **options.pop("settings", {}))
    return Agent("helper", model=kind("smollm2", client), model_settings=settings, **options)


@pytest.mark.parametrize("kind", MODELS)
def test_a_run_ends_with_a_text(kind: Any) -> None:
    found = asyncio.run(Runner.run(agent(kind, instructions="Be brief."), "Name a color."))
    assert isinstance(found.final_output, str)
    assert found.final_output
    assert found.raw_responses[0].usage.output_tokens > 0


@pytest.mark.parametrize("kind", MODELS)
def test_a_forced_tool_is_run_and_its_result_is_read(kind: Any) -> None:
    CALLS.clear()
    settings = {"tool_choice": "required", "parallel_tool_calls": False}
    asyncio.run(Runner.run(agent(kind, tools=[weather], settings=settings), "The weather of Oslo?", max_turns=4))
    assert len(CALLS) == 1


@pytest.mark.parametrize("kind", MODELS)
def test_an_answer_has_the_form_of_a_class(kind: Any) -> None:
    found = asyncio.run(Runner.run(agent(kind, output_type=City), "Describe Oslo."))
    assert isinstance(found.final_output, City)


@pytest.mark.parametrize("kind", MODELS)
def test_a_run_is_streamed(kind: Any) -> None:
    async def run() -> tuple[list[str], Any]:
        result = Runner.run_streamed(agent(kind), "Name a color.")
        kinds = [event.type async for event in result.stream_events()]
        return kinds, result.final_output

    kinds, output = asyncio.run(run())
    assert kinds.count("raw_response_event") > 3
    assert output
