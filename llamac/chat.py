"""Chat templates: from messages to the text of a prompt, as a model was trained to see it.

A template is Jinja, written by the model's makers and rendered as transformers renders it. It is not trusted:
chat_process.py runs it apart from this process, with limits of time, memory and size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llamac.arguments import file_path, wrong_type
from llamac.errors import ArgumentError, ArgumentTypeError, ChatTemplateError

Message = Mapping[str, Any]

DEFAULT = "default"
WITH_TOOLS = "tool_use"  # the name of the template that is used where tools are given
MAX_DEPTH = 100  # of lists and dicts in what a template gets
# Names under which messages hold what a model thought before it answered; templates read the first, or "thinking".
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # marks the end of the message that is to be continued; also in transformers


class ChatTemplate:
    """The chat templates of a model: one, or several by name. Immutable; threads may share it.

    texts: the templates by name; the one named "default" is used unless another is asked for, and "tool_use" where
    there are tools. tokens: the texts of special tokens (`bos_token`, ...), which are variables of the templates.
    """

    def __init__(self, texts: Mapping[str, str] | str, tokens: Mapping[str, str] | None = None) -> None:
        given = {DEFAULT: texts} if isinstance(texts, str) else texts
        for name, values in (("texts", given), ("tokens", tokens or {})):
            if not isinstance(values, Mapping) or not all(
                isinstance(part, str) for pair in values.items() for part in pair
            ):
                raise ArgumentTypeError(f"{name} must be texts by name")
        self.texts: dict[str, str] = dict(given)
        self.tokens: dict[str, str] = dict(tokens or {})
        if not self.texts:
            raise ArgumentError("there is no chat template")

    @classmethod
    def from_file(cls, path: str | Path) -> ChatTemplate:
        """The templates of a directory (chat_template.jinja, additional_chat_templates, tokenizer_config.json), of one
        of these files, or of a GGUF file. ChatTemplateError where there is none."""
        from llamac.export.chat_templates import read_templates

        path = file_path(path, "path")
        found = read_templates(path)
        if found is None:
            raise ChatTemplateError(f"{path} holds no chat template")
        return found

    def choose(self, name: str | None = None, *, tools: bool = False) -> str:
        """The template with a name; without one the one for tools, if there are any, or the default one."""
        if name is not None:
            if name not in self.texts:
                raise ArgumentError(f"there is no chat template named {name!r}, only {self._names()}")
            return self.texts[name]
        if tools and WITH_TOOLS in self.texts:
            return self.texts[WITH_TOOLS]
        if DEFAULT not in self.texts:
            raise ArgumentError(f"none of the chat templates is the default one: choose {self._names()}")
        return self.texts[DEFAULT]

    def _names(self) -> str:
        return ", ".join(map(repr, sorted(self.texts)))

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool | str = False,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation, what transformers' `apply_chat_template(..., tokenize=False)` gives.

        messages: dicts with `role` and `content`, and what else the template reads. add_generation_prompt: the text
        ends where the model's answer begins. tools: JSON schemas of functions. continue_final_message: the text ends
        within the last message, which the model continues (a name: within this entry of it, instead of its content);
        there is no generation prompt then. template: the name of
        the template to use. variables: more of what the template reads, such as `enable_thinking`.

        Raises ChatTemplateError where the template fails or refuses the messages.
        """
        from llamac import chat_process

        text = self.choose(template, tools=tools is not None)
        chat = _messages(messages)
        field = continue_final_message if isinstance(continue_final_message, str) else "content"
        last = _mark_last(chat, text, field) if continue_final_message else ""
        given = {
            **self.tokens,
            **_dict(variables, "a variable of the template"),
            "messages": chat,
            "tools": None if tools is None else _dicts(tools, "tools"),
            "documents": None if documents is None else _dicts(documents, "documents"),
            "add_generation_prompt": bool(add_generation_prompt) and not continue_final_message,
        }
        rendered = chat_process.render(text, given)
        return _cut_behind(rendered, last) if continue_final_message else rendered


def _messages(messages: object) -> list[dict[Any, Any]]:
    """The messages as plain data. What is None in a message counts as absent: templates would write "None"."""
    chat = _dicts(messages, "messages")
    if not chat:
        raise ArgumentError("messages is empty: a conversation has at least one message")
    chat = [{key: value for key, value in message.items() if value is not None} for message in chat]
    for index, message in enumerate(chat):
        thoughts = next((message[name] for name in THOUGHTS if name in message), None)
        if thoughts is not None:
            chat[index] = {"thinking": thoughts, **message, THOUGHTS[0]: thoughts}
    return chat


def _mark_last(chat: list[dict[Any, Any]], template: str, field: str) -> str:
    """Writes the tag behind the last message's text, which is returned. Thoughts have several names."""
    content = chat[-1].get(field)
    fields = [name for name in THOUGHTS if chat[-1].get(name) == content] if field in THOUGHTS else [field]
    if not any(name in template for name in fields):
        raise ArgumentError(f"continue_final_message: this chat template does not read the {field} of messages")
    if isinstance(content, str):
        chat[-1].update(dict.fromkeys(fields, content + TAG))
        return content
    for part in reversed(content) if isinstance(content, list | tuple) else ():
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] = text + TAG
            return text
    raise ArgumentError("continue_final_message: the last message has no text that could be continued")


def _cut_behind(rendered: str, last: str) -> str:
    """A rendered text up to the tag; without the spaces in front of it where the template cut the tag's own."""
    at = rendered.rfind(TAG.strip())
    if at < 0 or last.strip() not in rendered:
        raise ChatTemplateError("continue_final_message: the chat template leaves out or changes the last message")
    return rendered[:at] if rendered.startswith(TAG, at) else rendered[:at].rstrip()


# ---- plain data


def plain_inputs(options: Mapping[str, Any]) -> dict[str, list[dict[Any, Any]]]:
    """Those of `ChatTemplate.render`'s arguments that hold what people write, as plain data."""
    names = [name for name in ("messages", "tools", "documents") if options.get(name) is not None]
    return {name: _dicts(options[name], name) for name in names}


def _dicts(values: object, name: str) -> list[dict[Any, Any]]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise wrong_type(name, values, "a list of dicts")
    dicts: list[dict[Any, Any]] = []
    for index, value in enumerate(values):
        item = _plain(value, f"{name}[{index}]")
        if not isinstance(item, dict):
            raise wrong_type(f"{name}[{index}]", value, "a dict")
        dicts.append(item)
    return dicts


def _dict(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: _plain(value, name) for key, value in values.items()}


def _plain(value: Any, name: str, depth: int = 0) -> Any:
    """What a template gets to see of a value: data without methods of its own."""
    if depth > MAX_DEPTH:
        raise ArgumentError(f"{name}: lists and dicts are nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):  # also one of an enumeration: its text
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key, name, depth + 1): _plain(item, name, depth + 1) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_plain(item, name, depth + 1) for item in value)
    if isinstance(value, list):
        return [_plain(item, name, depth + 1) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name), name, depth + 1) for item in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):  # pydantic
        return _plain(value.model_dump(), name, depth + 1)
    raise wrong_type(name, value, "texts, numbers, lists and dicts")
