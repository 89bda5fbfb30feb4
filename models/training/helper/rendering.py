"""Renders conversations with the model's chat template, as the engine and transformers render it."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from .conversation import Conversation

TEMPLATE = Path(__file__).with_name("chat_template.jinja")


@functools.cache
def _template() -> Any:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], undefined=jinja2.Undefined
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


def render(conversation: Conversation, *, prompt_only: bool = False) -> str:
    """Return a conversation as text; with `prompt_only`, up to the beginning of the last answer."""
    variables: dict[str, Any] = {"tools": conversation.tools or None}
    if conversation.enable_thinking:
        variables["enable_thinking"] = True
    messages = conversation.prompt if prompt_only else conversation.messages
    text: str = _template().render(messages=messages, add_generation_prompt=prompt_only, **variables)
    return text
