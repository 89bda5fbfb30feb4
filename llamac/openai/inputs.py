"""Reads the inputs of a body: prompts to continue and messages to answer."""

from __future__ import annotations

from typing import Any

from llamac.openai.errors import InvalidRequestError, wrong_type
from llamac.openai.forms import Ignored
from llamac.openai.schemas import (
    BARE_CHOICE,
    BARE_TOOL,
    CALL,
    CALLED,
    CHOICE,
    FUNCTION,
    MAX_PROMPTS,
    MESSAGE,
    NAMED,
    PARTS,
    TOOL,
)
from llamac.tools.functions import tool_list


def read_prompts(value: object, name: str = "prompt", most: int = MAX_PROMPTS) -> list[str | list[int]]:
    """Texts or token ids, from one of them or an array of at most `most` of them.

    Raises:
        InvalidRequestError: If the value is something else, or there are too many prompts.
    """
    several = isinstance(value, list) and any(isinstance(item, str | list) for item in value)
    listed: list[Any] = value if isinstance(value, list) and several else [value]
    if len(listed) > most:
        raise InvalidRequestError(f"{name} has {len(listed)} texts, expected at most {most}", name, "invalid_value")
    for index, item in enumerate(listed):
        where = f"{name}[{index}]" if several else name
        if not isinstance(item, str | list):
            message = str(wrong_type(where, item, "a string or an array of token ids"))
            raise InvalidRequestError(message, name, "invalid_type")
        wrong = () if isinstance(item, str) else [i for i in item if not isinstance(i, int) or isinstance(i, bool)]
        if wrong:
            raise InvalidRequestError(f"{where} has {wrong[0]!r}, expected token ids", name, "invalid_type")
    return listed


def read_messages(value: object, ignored: Ignored) -> list[dict[str, Any]]:
    """Messages as chat templates read them: the content is a text.

    Args:
        value: The messages.
        ignored: Gets the names of the keys without effect.

    Raises:
        InvalidRequestError: If they are malformed, or have parts that are not text.
    """
    if not isinstance(value, list):
        raise wrong_type("messages", value, "an array of messages")
    if not value:
        raise InvalidRequestError("messages is empty: expected at least one message", "messages", "invalid_value")
    return [_message(message, f"messages[{index}]", ignored) for index, message in enumerate(value)]


def read_tools(value: object, ignored: Ignored) -> list[dict[str, Any]]:
    """Tools in OpenAI's form.

    Args:
        value: The tools, in that form or bare.
        ignored: Gets the names of the keys without effect.

    Raises:
        ArgumentError: If a name or a schema is malformed.
        InvalidRequestError: If one of them is not a function, or has unknown keys.
    """
    if not isinstance(value, list):
        raise wrong_type("tools", value, "an array of functions")
    return tool_list([_tool(tool, f"tools[{index}]", ignored) for index, tool in enumerate(value)])


def _tool(tool: object, where: str, ignored: Ignored) -> dict[str, Any]:
    if isinstance(tool, dict) and tool.get("function") is None:
        function = BARE_TOOL.read(tool, where, ignored)
        function.pop("type", None)
    else:
        wrapped = TOOL.read(tool, where, ignored)
        function = FUNCTION.read(wrapped["function"], f"{where}.function", ignored)
    return {"type": "function", "function": function}


def read_tool_choice(value: object, ignored: Ignored) -> str | dict[str, Any]:
    """A mode, or the function to call.

    Raises:
        InvalidRequestError: If it is neither.
    """
    name = "tool_choice"
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and "function" not in value:
        return {"name": BARE_CHOICE.read(value, name, ignored)["name"]}
    return NAMED.read(CHOICE.read(value, name, ignored)["function"], f"{name}.function", ignored)


def _message(message: object, where: str, ignored: Ignored) -> dict[str, Any]:
    given = MESSAGE.read(message, where, ignored)
    has_calls = given["role"] == "assistant" and bool(given.get("tool_calls"))
    if "content" not in given and not has_calls:
        raise InvalidRequestError(f"{where} has no 'content'", f"{where}.content", "missing_required_parameter")
    given["content"] = _text(given.get("content", ""), f"{where}.content", ignored)
    if "tool_calls" in given:
        calls = enumerate(given["tool_calls"])
        given["tool_calls"] = [_call(call, f"{where}.tool_calls[{index}]", ignored) for index, call in calls]
    return given


def _call(call: object, where: str, ignored: Ignored) -> dict[str, Any]:
    """A call of an earlier answer."""
    found = CALL.read(call, where, ignored)
    return {**found, "function": CALLED.read(found["function"], f"{where}.function", ignored)}


def _text(content: object, where: str, ignored: Ignored) -> str:
    """The text of a message. Parts are joined by line feeds."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_type(where, content, "a string or an array of parts")
    parts = [PARTS.read(part, f"{where}[{index}]", ignored)[1] for index, part in enumerate(content)]
    return "\n".join(part["text"] for part in parts)
