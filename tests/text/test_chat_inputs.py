"""What a ChatTemplate takes: templates, messages of other kinds than dicts, and messages to continue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vocab_samples import tokenizer_json, write_json

from llamac import ChatTemplate, ChatTemplateError
from llamac.errors import ArgumentError, ExportError
from llamac.text.chat_environment import CACHED, Renderer
from llamac.text.template_files import from_folder, read_templates

ALL = "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"


def test_there_has_to_be_a_template(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="templates is empty: expected at least one chat template"):
        ChatTemplate({})
    write_json(tmp_path, tokenizer=tokenizer_json())
    with pytest.raises(ChatTemplateError, match="has no chat template"):
        ChatTemplate.from_file(tmp_path)


@pytest.mark.parametrize("given", [5, [None], [{"name": "a"}], [{"name": 1, "template": "x"}], {"a": 1}])
def test_malformed_templates_in_a_file_are_refused(given: Any, tmp_path: Path) -> None:
    write_json(tmp_path, tokenizer_config={"chat_template": given})
    with pytest.raises(ExportError, match=r"tokenizer_config\.json: chat_template is neither a string nor a list of"):
        read_templates(tmp_path)


def test_templates_without_a_default_have_to_be_chosen_by_name(tmp_path: Path) -> None:
    write_json(tmp_path, tokenizer_config={"chat_template": {"rag": "r", "tool_use": "t"}})
    warnings: list[str] = []
    assert from_folder(tmp_path, warnings).templates == {"rag": "r", "tool_use": "t"}
    assert warnings == ["none of the chat templates (rag, tool_use) is named 'default': choose one by name"]


def test_messages_can_be_objects_with_model_dump() -> None:
    class Message:
        def model_dump(self) -> dict[str, Any]:
            return {"role": "user", "content": "Hi"}

    messages: Any = [Message()]
    assert ChatTemplate("{{ messages[0].content }}").render(messages) == "Hi"


def test_the_last_text_of_a_message_in_parts_is_continued() -> None:
    parts = [{"text": "a"}, {"text": "b "}, {"image": "x"}]
    found = ChatTemplate(ALL).render([{"role": "user", "content": parts}], continue_final_message=True)
    assert found == "<a><b "
    assert parts[1] == {"text": "b "}  # the caller's


@pytest.mark.parametrize("content", [None, 5, [], [{"image": "x"}], ["text"]])
def test_a_message_without_text_cannot_be_continued(content: Any) -> None:
    with pytest.raises(ArgumentError, match="continue_final_message: the last message has no text to continue"):
        ChatTemplate(ALL).render([{"role": "user", "content": content}], continue_final_message=True)


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ messages[1].content | replace('b', '') }}"])
def test_a_template_that_hides_the_last_message_cannot_continue_it(template: str) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(ChatTemplateError, match="the chat template omits or changes the last message"):
        ChatTemplate(template).render(chat, continue_final_message=True)


def test_the_worker_keeps_only_the_latest_templates() -> None:
    renderer = Renderer()
    for number in [*range(2 * CACHED), 0]:
        variables = {"messages": [{"content": f"<{number}>"}]}
        assert renderer.tracked(f"{number}{{{{ messages[0].content }}}}", variables, [], 99) == f"{number}<{number}>"
    assert len(renderer._plain._compiled) == len(renderer._tracking._compiled) == CACHED
