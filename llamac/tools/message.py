"""What a chat model answers: a message with reasoning, content and tool calls, and the pieces in which it arrives."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from llamac.tools.values import read_json

ID = re.compile(r"[0-9A-Za-z]{9}")  # of calls: templates of Mistral accept no other


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool that the model asks for.

    Attributes:
        id: Names the call in the message with its result. The same request with the same seed gives the same ids.
        name: The tool's name.
        arguments: The arguments as JSON text, as the model wrote them. Formats that are not JSON are converted to it.
        error: What is wrong with the call, or None: its arguments are not a JSON object, or the text ends too early.
    """

    id: str
    name: str
    arguments: str
    error: str | None = None

    @property
    def parsed(self) -> dict[str, Any] | None:
        """The arguments as a dict; None if they are not a JSON object."""
        return parsed_arguments(self.arguments)

    def to_dict(self) -> dict[str, Any]:
        """The call as in OpenAI's API."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class Message:
    """An answer, split into its parts. `chat` accepts it as a message of a conversation.

    Attributes:
        content: The answer without reasoning and calls; None if there are calls and nothing else.
        reasoning: What the model wrote between its thinking tags, or None.
        tool_calls: The calls, in order.
        notes: What could not be used as it was: a malformed call that stayed in the content, text that was ignored.
        named: Whether the request named the tool to call. OpenAI's API then gives the finish reason "stop".
        role: "assistant".
    """

    content: str | None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    named: bool = False
    role: str = "assistant"

    def to_dict(self) -> dict[str, Any]:
        """The message as in OpenAI's API, with the reasoning as `reasoning_content`, without empty parts."""
        found: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning is not None:
            found["reasoning_content"] = self.reasoning
        if self.tool_calls:
            found["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        return found


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a tool call.

    Attributes:
        index: Which call of the message it belongs to.
        id: The call's id, in its first piece.
        name: The tool's name, in its first piece.
        arguments: Text to append to the arguments.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True)
class Delta:
    """A piece of a message. One of the three is set.

    Attributes:
        content: Text to append to the content.
        reasoning: Text to append to the reasoning.
        tool_call: A piece of a tool call.
    """

    content: str | None = None
    reasoning: str | None = None
    tool_call: ToolCallDelta | None = None

    def to_dict(self) -> dict[str, Any]:
        """The `delta` of a chunk as in OpenAI's API."""
        call = self.tool_call
        if call is None:
            return {"content": self.content} if self.reasoning is None else {"reasoning_content": self.reasoning}
        function = (
            {"arguments": call.arguments} if call.name is None else {"name": call.name, "arguments": call.arguments}
        )
        first = {} if call.id is None else {"id": call.id, "type": "function"}
        return {"tool_calls": [{"index": call.index, **first, "function": function}]}


def parsed_arguments(text: str, on_repeat: Callable[[str], object] | None = None) -> dict[str, Any] | None:
    """Arguments as a dict; None if they are not a JSON object.

    Args:
        text: The arguments.
        on_repeat: Called with each key that an object has more than once. Its last value counts.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if on_repeat is not None and len(made) < len(pairs):
            for key, count in Counter(key for key, _ in pairs).items():
                if count > 1:
                    on_repeat(key)
        return made

    try:
        value = read_json(text, unique)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
