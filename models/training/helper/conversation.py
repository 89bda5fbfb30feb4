"""What a generator of conversations returns: the messages, and how to judge another answer to the last of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from .dice import Dice

Message = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """What the last answer must be. Each field that is set must hold.

    Attributes:
        text: The whole answer.
        has: Texts that stand in the answer (compared without regard to case).
        lacks: Texts that do not stand in it.
        json: The value of the answer as JSON.
        calls: Names and arguments of the tool calls, in order; an empty list allows none.
        thinks: Whether the answer begins with reasoning.
    """

    text: str | None = None
    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    json: Any = None
    calls: tuple[dict[str, Any], ...] = ()
    thinks: bool = False


@dataclass
class Conversation:
    """Messages that end with the model's answer, tools, and the check of that answer.

    Attributes:
        skill: The name of what is practised.
        enable_thinking: The variable of the chat template.
    """

    skill: str
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    enable_thinking: bool = False
    check: Check = field(default_factory=Check)

    def system(self, text: str) -> None:
        """Set the system message."""
        self.messages.insert(0, {"role": "system", "content": text})

    def user(self, text: str) -> None:
        """Add a message of the user."""
        self.messages.append({"role": "user", "content": text})

    def answer(self, text: str, check: Check | None = None, thought: str = "") -> None:
        """Add an answer; without a check, the answer must be this text."""
        message = {"role": "assistant", "content": text}
        if thought:
            message["reasoning_content"] = thought
        self.messages.append(message)
        self.check = check or Check(text=text)

    def answer_json(self, value: Any) -> None:
        """Add an answer that is a JSON value."""
        self.answer(json.dumps(value, ensure_ascii=False), Check(json=value))

    def call(self, calls: list[dict[str, Any]]) -> None:
        """Add an answer that calls tools."""
        wrapped = [{"type": "function", "function": call} for call in calls]
        self.messages.append({"role": "assistant", "content": "", "tool_calls": wrapped})
        self.check = Check(calls=tuple(calls))

    def result(self, value: Any) -> None:
        """Add the result of a tool call."""
        self.messages.append({"role": "tool", "content": json.dumps(value, ensure_ascii=False)})

    @property
    def prompt(self) -> list[Message]:
        """The messages before the last answer."""
        return self.messages[:-1]


def new(skill: str, dice: Dice) -> Conversation:
    """Begin a conversation; sometimes it has a system message that changes nothing."""
    conversation = Conversation(skill)
    if dice.chance(1, 6):
        conversation.system(dice.choose(("You are a helpful assistant.", "You are helper.", "Be helpful.")))
    return conversation
