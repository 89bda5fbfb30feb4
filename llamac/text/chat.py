"""Chat templates, which turn messages into a prompt in the format that a model was trained on.

A template is Jinja code from the model's authors. It renders as in transformers. Templates are untrusted:
chat_process.py renders them in a separate process with limits on time, memory and output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from llamac.arguments import StrPath, file_path, wrong_type
from llamac.errors import ArgumentError, ArgumentTypeError, ChatTemplateError
from llamac.text.marks import Marks
from llamac.text.template_files import DEFAULT, read_templates
from llamac.text.template_probe import probe_of

if TYPE_CHECKING:
    from llamac.text.chat_runs import FindSpecial, PromptRun

Message = Mapping[str, Any]

WITH_TOOLS = "tool_use"  # the name of the template for conversations with tools
MAX_DEPTH = 100  # of nested lists and dicts in a template's variables
# The fields of a message that can have the model's reasoning. Templates read the first two.
REASONING = ("reasoning_content", "thinking", "reasoning")
# What gpt-oss's template says about a message with calls: it writes one of the two as the reasoning.
_NOT_BOTH = "Cannot pass both content and thinking"
TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # marks the end of the message to continue; the same as in transformers


class ChatTemplate:
    """The chat templates of a model. Immutable; threads can share it.

    Args:
        templates: Jinja code, or several templates by name. Unless it is given a name, `render` uses "default", or
            "tool_use" for conversations with tools.
        special_tokens: The strings of special tokens by the name of their variable in the templates (`bos_token`, ...).

    Attributes:
        templates: The templates by name.
        special_tokens: As above.
    """

    def __init__(self, templates: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        given = {DEFAULT: templates} if isinstance(templates, str) else templates
        for name, values in (("templates", given), ("special_tokens", special_tokens or {})):
            if not isinstance(values, Mapping) or not all(
                isinstance(part, str) for pair in values.items() for part in pair
            ):
                raise ArgumentTypeError(f"{name} must be a dict of str to str")
        self.templates: dict[str, str] = dict(given)
        self.special_tokens: dict[str, str] = dict(special_tokens or {})
        if not self.templates:
            raise ArgumentError("templates is empty: expected at least one chat template")

    @classmethod
    def from_file(cls, path: StrPath) -> ChatTemplate:
        """Read the chat templates of a model.

        Args:
            path: A Hugging Face directory (chat_template.jinja, additional_chat_templates, tokenizer_config.json), one
                of these files, or a GGUF file.

        Raises:
            ChatTemplateError: If there is no chat template.
            ExportError: If a file is damaged or malformed.
        """
        path = file_path(path, "path")
        found = read_templates(path)
        if not found.templates:
            raise ChatTemplateError(f"{path} has no chat template")
        return cls(found.templates, found.special_tokens)

    def __repr__(self) -> str:
        return f"<llamac.ChatTemplate {self._names()}, special_tokens={self.special_tokens}>"

    def choose(self, name: str | None = None, *, tools: bool = False) -> str:
        """Choose a template and return its code.

        Args:
            name: The template's name. None: the default template, or the one for tools.
            tools: Whether the conversation has tools.

        Raises:
            ArgumentError: If there is no such template.
        """
        if name is not None:
            if name not in self.templates:
                raise ArgumentError(f"there is no chat template named {name!r}, only {self._names()}")
            return self.templates[name]
        if tools and WITH_TOOLS in self.templates:
            return self.templates[WITH_TOOLS]
        if DEFAULT not in self.templates:
            raise ArgumentError(f"no chat template is named 'default': choose one of {self._names()}")
        return self.templates[DEFAULT]

    def _names(self) -> str:
        return ", ".join(map(repr, sorted(self.templates)))

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
        """Render a conversation to a prompt, as transformers' `apply_chat_template(..., tokenize=False)` does.

        Args:
            messages: Dicts with `role`, `content` and the other fields that the template reads.
            add_generation_prompt: Whether to end the prompt with the beginning of the model's answer.
            tools: JSON schemas of functions.
            documents: Documents for templates that support retrieval.
            continue_final_message: Whether to end the prompt inside the last message, so that the model continues it.
                A str names the field to continue instead of `content`. There is no generation prompt then.
            template: The name of the template.
            **variables: Other variables of the template, such as `enable_thinking`.

        Raises:
            ChatTemplateError: If the template fails, refuses the messages or exceeds a limit.
        """
        from llamac.text import chat_process

        request = self._request(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=documents,
            continue_final_message=continue_final_message,
            template=template,
            **variables,
        )
        prompt = request.prompt(chat_process.render(request.template, request.variables))
        return request.restored(prompt, bytes(len(prompt)))[0]

    def render_runs(
        self,
        messages: Sequence[Message],
        special_names: Sequence[str],
        find_special: FindSpecial | None = None,
        **options: Any,
    ) -> list[PromptRun]:
        """Render a conversation like `render`, and split the prompt into runs with and without special tokens.

        A special token counts only if the template wrote its name, or the name of one of `special_tokens`. Names in
        messages, tools, documents and other variables are ordinary text, no matter how the template transforms them.

        Args:
            messages: As for `render`.
            special_names: The names of the tokenizer's special tokens, `Tokenizer.special_names`.
            find_special: `Tokenizer.special_spans`, needed if `Tokenizer.reads_other_spellings`.
            **options: Keyword arguments of `render`.

        Returns:
            Runs whose texts, joined, are the prompt. Tokenize each run separately and concatenate the ids.

        Raises:
            ChatTemplateError: As for `render`, or if the origin of the text cannot be determined.
        """
        from llamac.text import chat_process, chat_runs

        request = self._request(messages, **options)
        trusted = [name for name, value in request.variables.items() if self.special_tokens.get(name) == value]
        rendered, origins = chat_process.render_tracked(request.template, request.variables, trusted)
        prompt = request.prompt(rendered)
        prompt, origins = request.restored(prompt, origins[: len(prompt)])
        return chat_runs.split(prompt, origins, special_names, find_special)

    def _request(
        self,
        messages: object,
        *,
        add_generation_prompt: bool = True,
        tools: object = None,
        documents: object = None,
        continue_final_message: bool | str = False,
        template: str | None = None,
        **variables: Any,
    ) -> _Request:
        text = self.choose(template, tools=tools is not None)
        marks = Marks()
        probe = probe_of(text, self.special_tokens)
        chat = [probe.adapted(message) for message in _messages(marks.placed(messages), text)]
        field = continue_final_message if isinstance(continue_final_message, str) else "content"
        continued = _tag_last(chat, text, field) if continue_final_message else None
        given = {
            **self.special_tokens,
            **{name: _plain(value, f"the variable {name}") for name, value in variables.items()},
            "messages": chat,
            "tools": None if tools is None else _dicts(tools, "tools"),
            "documents": None if documents is None else _dicts(documents, "documents"),
            "add_generation_prompt": bool(add_generation_prompt) and continued is None,
        }
        return _Request(text, given, continued, marks)


class _Request(NamedTuple):
    """A template, its variables, the text of the message to continue, if any, and the placeholders in the messages."""

    template: str
    variables: dict[str, Any]
    continued: str | None
    marks: Marks

    def prompt(self, rendered: str) -> str:
        """The rendered text, up to the end of the message to continue."""
        if self.continued is None:
            return rendered
        at = rendered.rfind(TAG.strip())
        if at < 0 or self.continued.strip() not in rendered:
            raise ChatTemplateError("continue_final_message: the chat template omits or changes the last message")
        # If the template trimmed the message, the tag has lost its space; then the spaces before the tag go as well.
        return rendered[:at] if rendered.startswith(TAG, at) else rendered[:at].rstrip()

    def restored(self, prompt: str, origins: bytes) -> tuple[str, bytes]:
        """The prompt with what the placeholders stand for, and the origin of each of its characters."""
        return self.marks.restored(prompt, origins, self.template, self.variables)


def _messages(messages: object, template: str) -> list[dict[Any, Any]]:
    """The messages as plain data, without entries that are None, which templates would render as "None"."""
    chat = _dicts(messages, "messages")
    if not chat:
        raise ArgumentError("messages is empty: a conversation has at least one message")
    chat = [{key: value for key, value in message.items() if value is not None} for message in chat]
    for index, message in enumerate(chat):
        reasoning = next((message[name] for name in REASONING if name in message), None)
        if reasoning is not None:
            chat[index] = {"thinking": reasoning, **message, REASONING[0]: reasoning}
    return [_with_one_text(message) if _NOT_BOTH in template else message for message in chat]


def _with_one_text(message: dict[Any, Any]) -> dict[Any, Any]:
    """A message with calls without a content beside its reasoning, which the template would refuse."""
    content, thinking = message.get("content"), message.get("thinking")
    if message.get("tool_calls") and all(isinstance(text, str) and text for text in (content, thinking)):
        return {**message, "content": "", "thinking": f"{thinking}\n{content}"}
    return message


def _tag_last(chat: list[dict[Any, Any]], template: str, field: str) -> str:
    """Append the tag to a field of the last message, and return the field's text."""
    content = chat[-1].get(field)
    fields = [name for name in REASONING if chat[-1].get(name) == content] if field in REASONING else [field]
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
    raise ArgumentError("continue_final_message: the last message has no text to continue")


# ---- plain data


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


def _plain(value: Any, name: str, depth: int = 0) -> Any:
    """Convert a value to built-in types, so that templates cannot call methods of the caller's objects."""
    if depth > MAX_DEPTH:
        raise ArgumentError(f"{name}: lists and dicts are nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):  # str.__str__ also converts enum members; the same holds for the types below
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
    raise wrong_type(name, value, "made of str, numbers, lists and dicts")
