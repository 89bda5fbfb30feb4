"""The conversation of `llamac chat`: its messages, its settings, and the session that answers them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from llamac.cli.sampling_options import NUMBERS
from llamac.cli.tools import result_messages
from llamac.engine.generation.output import Completion
from llamac.engine.generation.stream import Stream
from llamac.engine.model import Model
from llamac.engine.receipts.receipt import check_target
from llamac.engine.sampling.params import SamplingParams
from llamac.errors import ArgumentError, LlamacError
from llamac.format.private_files import replacing
from llamac.format.strict_json import read_object
from llamac.tools.functions import tool_list
from llamac.tools.message import Delta, ToolCall

# The parameters that can be changed, and what their values are made with.
KINDS: dict[str, type] = {
    "max_tokens": int,
    "context_keep": int,
    "top_k": int,
    "seed": int,
    "temperature": float,
    "top_p": float,
    "min_p": float,
    "stop": str,
    "context_overflow": str,
    "banned_strings": str,
    "dry_base": float,
    **{name: kind for name, (kind, _, _) in NUMBERS.items()},
}
FORMAT = "llamac-chat"  # names the format of a saved conversation


class ConversationError(LlamacError, ValueError):
    """A saved conversation that cannot be read."""


class Conversation:
    """Messages and the model that answers them. The session keeps what it has computed from turn to turn.

    Attributes:
        messages: Dicts with role and content, and the reasoning and calls of answers that had them.
        params: Sampling parameters of the next answers.
        tools: The tools that the model can call.
        tool_choice: Whether it must call one, in the answers to the user's messages.
        last: The result of the last answer, or None.
    """

    def __init__(
        self,
        model: Model,
        params: SamplingParams,
        system: str | None,
        tools: Sequence[dict[str, Any]] = (),
        tool_choice: str = "auto",
    ) -> None:
        self.model = model
        self.session = model.session()
        self.messages: list[dict[str, Any]] = []
        self.params = params
        self.tools = list(tools)
        self.tool_choice = tool_choice
        self.last: Completion | None = None
        self._last_stream: Stream | None = None
        self._answer: dict[str, Any] = {}  # the message of the last answer
        if system is not None:
            self.system = system

    def close(self) -> None:
        """Free the session."""
        self.session.close()

    # ---- messages

    @property
    def system(self) -> str:
        """The system message; empty if there is none."""
        return str(self.messages[0]["content"]) if self._begins_with_system else ""

    @system.setter
    def system(self, text: str) -> None:
        rest = self.messages[int(self._begins_with_system) :]
        self.messages = [*([{"role": "system", "content": text}] if text else []), *rest]

    @property
    def _begins_with_system(self) -> bool:
        return bool(self.messages) and self.messages[0].get("role") == "system"

    def reset(self) -> None:
        """Forget all messages but the system message."""
        self.messages, self.last = self.messages[: int(self._begins_with_system)], None

    @property
    def calls(self) -> list[ToolCall]:
        """The calls of the last answer."""
        if self.last is None or self.last.message is None or self.messages[-1:] != [self._answer]:
            return []
        return self.last.message.tool_calls

    def answer(self, message: str) -> Iterator[Delta]:
        """Add a message and generate its answer. What an interrupted answer said stays."""
        return self._generate([*self.messages, {"role": "user", "content": message}])

    def answer_results(self, results: Sequence[str | None]) -> Iterator[Delta]:
        """Add the results of the last answer's calls and generate the next answer.

        Args:
            results: A result for each call; None for a call that was skipped.
        """
        return self._generate([*self.messages, *result_messages(self.calls, results)])

    def regenerate(self) -> Iterator[Delta]:
        """Replace the last answer by a new one."""
        kept = self.messages[:-1] if self.messages and self.messages[-1]["role"] == "assistant" else self.messages
        if not kept or kept[-1]["role"] not in ("user", "tool"):
            raise ArgumentError("there is no answer to replace yet")
        return self._generate(kept)

    def _generate(self, messages: list[dict[str, Any]]) -> Iterator[Delta]:
        """Answer messages. They become the conversation's with the first token of the answer."""
        # after results, a call that must come would come forever
        choice = self.tool_choice if messages[-1]["role"] == "user" else "auto"
        tools: dict[str, Any] = {"tools": self.tools, "tool_choice": choice} if self.tools else {}
        stream = self.session.chat_stream(messages, self.params, **tools)
        has_begun = False
        try:
            for delta in stream.deltas():
                has_begun = True
                yield delta
        finally:
            with contextlib.suppress(LlamacError):
                stream.close()
                self.last, self._last_stream = stream.completion, stream
                if has_begun or self.last.finish_reason != "cancelled":
                    assert self.last.message is not None
                    self._answer = self.last.message.to_dict()
                    self.messages = [*messages, self._answer]

    # ---- settings

    def set(self, name: str, value: str) -> None:
        """Set a sampling parameter from text. "default" or "none" unsets it.

        Raises:
            ArgumentError: If there is no such parameter or the value is out of range.
        """
        name = name.replace("-", "_")
        if name == "guide" and value not in ("default", "none"):
            raise ArgumentError("a guide is an option of the command, such as --regex: /set can only unset it")
        if name not in (*KINDS, "guide"):
            raise ArgumentError(f"there is no setting {name!r}, expected one of {', '.join(sorted(KINDS))}")
        if value in ("default", "none"):
            self.params = replace(self.params, **{name: None})
            return
        kind = KINDS[name]
        try:
            converted = kind(value)
        except ValueError:
            what = "an integer" if kind is int else "a number"
            raise ArgumentError(f"{name} is {value!r}, expected {what}, or default") from None
        self.params = self.params.updated({name: converted})

    def settings(self) -> dict[str, Any]:
        """The parameters that are set, here or by the model."""
        merged = {}
        for field in fields(SamplingParams):
            own, recommended = getattr(self.params, field.name), getattr(self.model.sampling_defaults, field.name)
            merged[field.name] = recommended if own is None else own
        return {name: value for name, value in merged.items() if value not in (None, ())}

    # ---- files

    def save(self, path: str) -> None:
        """Write the messages to a file. Only a saved conversation or an empty file is replaced.

        Raises:
            ConversationError: If the file exists and is something else.
        """
        if os.path.exists(path) and os.path.getsize(path):
            _read(path)
        document = {"format": FORMAT, "model": self.model.name, "messages": self.messages}
        text = json.dumps({**document, **({"tools": self.tools} if self.tools else {})}, indent=2) + "\n"
        with replacing(Path(path)) as file:
            file.write(text.encode())

    def save_receipt(self, path: str) -> None:
        """Write the receipt of the last answer to a file. Only a receipt or an empty file is replaced.

        Raises:
            ArgumentError: If there is no answer yet, the file exists and is something else, or there is no such folder.
        """
        if self.last is None or self._last_stream is None:
            raise ArgumentError("there is no answer yet")
        check_target(path)
        self._last_stream.receipt().save(path)

    def load(self, path: str) -> None:
        """Replace the messages by those of a file, and the tools if it has some.

        Raises:
            ConversationError: If the file is not a saved conversation.
        """
        messages, tools = _read(path)
        self.messages, self.tools, self.last = messages, tools or self.tools, None


def _read(path: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages and tools of a saved conversation."""
    document = read_object(Path(path), error=ConversationError)
    messages = document.get("messages")
    if document.get("format") != FORMAT or not isinstance(messages, list):
        raise ConversationError(f"{path} is not a conversation that `llamac chat` saved")
    for index, message in enumerate(messages):
        if not _is_message(message):
            raise ConversationError(f"{path}: messages[{index}] is not an object with the strings role and content")
    try:
        return messages, tool_list(document.get("tools", []))
    except ArgumentError as error:
        raise ConversationError(f"{path}: {error}") from None


def _is_message(message: object) -> bool:
    """Whether this is a message of the user, the system or a tool, or an answer, which can have calls alone."""
    if not isinstance(message, dict):
        return False
    calls = message.get("tool_calls", [])
    texts = {key: value for key, value in message.items() if key != "tool_calls"}
    if calls and texts.get("content") is None:
        texts["content"] = ""
    is_text = {"role", "content"} <= set(texts) and all(isinstance(value, str) for value in texts.values())
    return is_text and isinstance(calls, list) and all(map(_is_call, calls))


def _is_call(call: object) -> bool:
    """Whether this is a call of a message, with an id, a name and arguments as texts."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(call.get("id"), str):
        return False
    return all(isinstance(function.get(key), str) for key in ("name", "arguments"))
