"""langchain-tests' integration suite on langchain-openai."""

from __future__ import annotations

import os
from typing import Any

from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestChatOpenAI(ChatModelIntegrationTests):  # type: ignore[misc]
    """The suite, with what the server has and has not."""

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        """The class under test."""
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        """Short answers that are the same each time."""
        address = {"base_url": os.environ["LLAMAC_URL"] + "/v1", "api_key": "none", "model": "smollm2"}
        options = {"parallel_tool_calls": False}  # else SmolLM2 repeats the call
        return {
            **address,
            "max_tokens": 200,
            "seed": 1,
            "temperature": 0,
            "stream_usage": True,
            "model_kwargs": options,
        }

    @property
    def has_tool_choice(self) -> bool:
        """Calls can be forced."""
        return True

    @property
    def supports_json_mode(self) -> bool:
        """Answers can be JSON objects."""
        return True

    @property
    def supports_image_inputs(self) -> bool:
        """The model reads texts only."""
        return False
