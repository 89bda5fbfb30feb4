"""The chat template of `helper`: its text, by this project's renderer, transformers' and the training's own."""

from __future__ import annotations

from typing import Any

import pytest

from llamac.models.training.helper import generator
from llamac.models.training.helper.conversation import Conversation
from llamac.models.training.helper.rendering import TEMPLATE, render
from llamac.text.chat import ChatTemplate

TOOL = {"type": "function", "function": {"name": "add", "description": "Ä", "parameters": {"type": "object"}}}
CALLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
    {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}},
]


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(TEMPLATE.read_text(encoding="utf-8"))


def test_the_training_renders_as_llamac_does(template: ChatTemplate) -> None:
    for index in range(40):
        made = generator.conversation(31, index)
        options: dict[str, Any] = {"tools": made.tools or None, "enable_thinking": made.enable_thinking}
        assert template.render(made.prompt, **options) == render(made, prompt_only=True)
        assert template.render(made.messages, add_generation_prompt=False, **options) == render(made)


def test_the_training_renders_as_transformers_does() -> None:
    chat = pytest.importorskip("transformers.utils.chat_template_utils")
    for index in range(40):
        made = generator.conversation(32, index)
        rendered, _ = chat.render_jinja_template(
            [made.messages],
            tools=made.tools or None,
            chat_template=TEMPLATE.read_text(encoding="utf-8"),
            enable_thinking=made.enable_thinking,
        )
        assert rendered == [render(made)]


def test_system_tools_and_thinking_share_a_message(template: ChatTemplate) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = template.render(messages, tools=[TOOL], enable_thinking=True)
    assert text == (
        "<|im_start|>system\nBe brief.\n\nYou can call these tools:\n<tools>\n"
        '{"type": "function", "function": {"name": "add", "description": "Ä", "parameters": {"type": "object"}}}\n'
        "</tools>\nA call has this form:\n<tool_call>\n"
        '{"name": "...", "arguments": {...}}\n</tool_call>\n\nThink before you answer.<|im_end|>\n'
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_without_system_tools_and_thinking_there_is_no_system_message(template: ChatTemplate) -> None:
    text = template.render([{"role": "user", "content": "Hi"}])
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_calls_and_results(template: ChatTemplate) -> None:
    """Arguments may be an object or, as in OpenAI's API, its text; results in a row share a message."""
    text = template.render(
        [
            {"role": "user", "content": "Add."},
            {"role": "assistant", "content": None, "tool_calls": CALLS},
            {"role": "tool", "content": '{"sum": 1}'},
            {"role": "tool", "content": '{"sum": 2}'},
        ]
    )
    assert text == (
        "<|im_start|>user\nAdd.<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>\n'
        '<|im_start|>user\n<tool_response>\n{"sum": 1}\n</tool_response>\n'
        '<tool_response>\n{"sum": 2}\n</tool_response><|im_end|>\n<|im_start|>assistant\n'
    )


def test_only_the_last_turn_shows_its_reasoning(template: ChatTemplate) -> None:
    first = {"role": "assistant", "content": "2.", "reasoning_content": "1 + 1"}
    messages = [{"role": "user", "content": "1 + 1?"}, first]
    assert "<think>\n1 + 1\n</think>\n\n2.<|im_end|>" in template.render(messages, add_generation_prompt=False)
    assert "<think>" not in template.render([*messages, {"role": "user", "content": "Thanks"}])


def test_a_conversation_is_built_in_the_form_of_the_api() -> None:
    made = Conversation("calls")
    made.user("Add 1.")
    made.call([{"name": "add", "arguments": {"a": 1}}])
    made.result({"sum": 1})
    made.answer("The sum is 1.")
    made.system("Be brief.")
    assert [each["role"] for each in made.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert made.messages[2]["tool_calls"] == CALLS[:1]
    assert made.prompt == made.messages[:-1]
    assert made.check.text == "The sum is 1."
