"""The conversation of `llamac chat`: its messages, its settings, and the session that answers them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from llamac.cli.sampling_options import NUMBERS
from llamac.engine.generation import Stream
from llamac.engine.model import Model
from llamac.engine.output import Completion
from llamac.engine.receipts import read_receipt
from llamac.engine.sampling import SamplingParams
from llamac.errors import ArgumentError, LlamacError
from llamac.format.strict_json import read_object
from llamac.text.reasoning import Part, ReasoningSplitter

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
        messages: Dicts with role and content, and the reasoning of answers that had one.
        params: Sampling parameters of the next answers.
        last: The result of the last answer, or None.
    """

    def __init__(self, model: Model, params: SamplingParams, system: str | None) -> None:
        self.model = model
        self.session = model.session()
        self.messages: list[dict[str, str]] = []
        self.params = params
        self.last: Completion | None = None
        self._last_stream: Stream | None = None
        if system is not None:
            self.system = system

    def close(self) -> None:
        """Free the session."""
        self.session.close()

    # ---- messages

    @property
    def system(self) -> str:
        """The system message; empty if there is none."""
        return self.messages[0]["content"] if self.messages and self.messages[0]["role"] == "system" else ""

    @system.setter
    def system(self, text: str) -> None:
        rest = self.messages[1:] if self.system else self.messages
        self.messages = [*([{"role": "system", "content": text}] if text else []), *rest]

    def reset(self) -> None:
        """Forget all messages but the system message."""
        self.messages, self.last = self.messages[: int(bool(self.system))], None

    def answer(self, message: str) -> Iterator[Part]:
        """Add a message and generate its answer. What an interrupted answer said stays."""
        return self._generate([*self.messages, {"role": "user", "content": message}])

    def regenerate(self) -> Iterator[Part]:
        """Replace the last answer by a new one."""
        kept = self.messages[:-1] if self.messages and self.messages[-1]["role"] == "assistant" else self.messages
        if not kept or kept[-1]["role"] != "user":
            raise ArgumentError("there is no answer to replace yet")
        return self._generate(kept)

    def _generate(self, messages: list[dict[str, str]]) -> Iterator[Part]:
        """Answer messages. They become the conversation's with the first token of the answer."""
        said: list[Part] = []
        splitter = ReasoningSplitter(self.model.chat_prompt(messages))
        stream = self.session.chat_stream(messages, self.params)
        try:
            for piece in stream:
                for part in splitter.push(piece):
                    said.append(part)
                    yield part
            for part in splitter.flush():
                said.append(part)
                yield part
        finally:
            with contextlib.suppress(LlamacError):
                stream.close()
                self.last, self._last_stream = stream.completion, stream
                if said or self.last.finish_reason != "cancelled":
                    self.messages = [*messages, _answer(said)]

    # ---- settings

    def set(self, name: str, value: str) -> None:
        """Set a sampling parameter from text. "default" or "none" unsets it.

        Raises:
            ArgumentError: If there is no such parameter or the value is out of range.
        """
        name = name.replace("-", "_")
        if name not in KINDS:
            raise ArgumentError(f"there is no setting {name!r}, expected one of {', '.join(sorted(KINDS))}")
        if value in ("default", "none"):
            self.params = replace(self.params, **{name: None})
            return
        kind = KINDS[name]
        try:
            converted = kind(value)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
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
        """Write the messages to a file. Only a saved conversation is replaced.

        Raises:
            ConversationError: If the file exists and is something else.
        """
        if os.path.exists(path):
            _read(path)
        text = json.dumps({"format": FORMAT, "model": self.model.name, "messages": self.messages}, indent=2) + "\n"
        temporary = f"{path}.{os.getpid()}.tmp"
        try:
            with open(temporary, "x", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)

    def save_receipt(self, path: str) -> None:
        """Write the receipt of the last answer to a file. Only a receipt is replaced.

        Raises:
            ArgumentError: If there is no answer yet, or the file exists and is something else.
        """
        if self.last is None or self._last_stream is None:
            raise ArgumentError("there is no answer yet")
        if os.path.exists(path):
            read_receipt(path)
        self._last_stream.receipt().save(path)

    def load(self, path: str) -> None:
        """Replace the messages by those of a file.

        Raises:
            ConversationError: If the file is not a saved conversation.
        """
        self.messages, self.last = _read(path), None


def _answer(said: list[Part]) -> dict[str, str]:
    """The message of an answer."""
    reasoning = "".join(part.text for part in said if part.is_reasoning)
    answer = {"role": "assistant", "content": "".join(part.text for part in said if not part.is_reasoning)}
    return {**answer, "reasoning_content": reasoning} if reasoning else answer


def _read(path: str) -> list[dict[str, str]]:
    document = read_object(Path(path), error=ConversationError)
    messages = document.get("messages")
    if document.get("format") != FORMAT or not isinstance(messages, list):
        raise ConversationError(f"{path} is not a conversation that `llamac chat` saved")
    for index, message in enumerate(messages):
        valid = isinstance(message, dict) and all(isinstance(value, str) for value in message.values())
        if not valid or not {"role", "content"} <= set(message):
            raise ConversationError(f"{path}: messages[{index}] is not an object with the strings role and content")
    return messages
