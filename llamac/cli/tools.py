"""The options of `llamac run` and `llamac chat` about tools, and how calls are shown."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llamac.cli.options import Group
from llamac.errors import ArgumentError
from llamac.format.small_files import read_small
from llamac.tools.functions import tool_list
from llamac.tools.message import Message, ToolCall

MAX_BYTES = 1 << 20  # of a file with tools
CALL = "call "  # stands before the name of a tool that the model calls
FORM = 'a list of tools in OpenAI\'s form, such as [{"type": "function", "function": {"name": "weather", ...}}]'


def add_tools(group: Group, needs: str = "") -> None:
    """Add --tools and --tool-choice."""
    group.add_argument(
        "--tools",
        metavar="FILE",
        help=f"{needs}let the model call the tools in FILE, {FORM.partition(',')[0]} as JSON (docs/tools.md)",
    )
    group.add_argument(
        "--tool-choice",
        metavar="CHOICE",
        help="with --tools: auto (default), none, required, or the name of the tool that must be called",
    )


def chosen_tools(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `chat` that the options ask for.

    Raises:
        ArgumentError: If the file has something else than tools, or --tool-choice names none of them.
        OSError: If the file cannot be read.
    """
    if options.tools is None:
        if options.tool_choice is not None:
            raise ArgumentError("--tool-choice needs --tools")
        return {}
    tools = read_tools(options.tools)
    choice = options.tool_choice or "auto"
    choices = ["auto", "none", "required", *(tool["function"]["name"] for tool in tools)]
    if choice not in choices:
        raise ArgumentError(f"--tool-choice is {choice!r}, expected one of {', '.join(choices)}")
    return {"tools": tools, "tool_choice": choice}


def read_tools(path: str) -> list[dict[str, Any]]:
    """The tools in a file.

    Raises:
        ArgumentError: If it has something else.
        OSError: If it cannot be read.
    """
    try:
        found = json.loads(read_small(Path(path), MAX_BYTES, ArgumentError).decode())
    except UnicodeDecodeError:
        raise ArgumentError(f"{path} is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, list) or not found or not all(isinstance(tool, dict) for tool in found):
        raise ArgumentError(f"{path} has no tools: expected {FORM}")
    try:
        return tool_list(found)
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error}") from None


class OneLine:
    """Puts arguments that arrive in pieces into one line: white space outside of strings becomes one space."""

    def __init__(self) -> None:
        self._in_string = self._escaped = self._was_space = False

    def push(self, text: str) -> str:
        """Add a piece; return what to show of it."""
        shown = []
        for char in text:
            is_space = char.isspace() and not self._in_string
            if not is_space or not self._was_space:
                shown.append(" " if is_space else char)
            self._was_space = is_space
            if self._escaped:
                self._escaped = False
            elif self._in_string and char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = not self._in_string
        return "".join(shown)


def message_text(message: Message, *, reasoning: bool) -> str:
    """The content of a message, and a line for each call; before them the reasoning, if asked for."""
    thoughts = [f"{message.reasoning}\n"] if reasoning and message.reasoning else []
    content = [message.content] if message.content else []
    return "\n".join(
        [*thoughts, *content, *(f"{CALL}{call.name} {OneLine().push(call.arguments)}" for call in message.tool_calls)]
    )


def remarks(message: Message) -> list[str]:
    """What a reader of an answer must know about it."""
    wrong = [f"the call of {call.name} cannot be used: {call.error}" for call in message.tool_calls if call.error]
    return [*message.notes, *wrong]


def result_messages(calls: Sequence[ToolCall], results: Sequence[str | None]) -> list[dict[str, Any]]:
    """The messages with the results of calls. A call that was skipped gets a message that says so."""
    return [
        {
            "role": "tool",
            "tool_call_id": call.id,
            "name": call.name,
            "content": "error: there is no result" if result is None else result,
        }
        for call, result in zip(calls, results, strict=True)
    ]
