"""Reads what a body asks to continue or to answer: prompts and messages."""

from __future__ import annotations

from typing import Any

from llamac.openai.errors import InvalidRequestError, wrong_type
from llamac.tools.functions import tool_list

MAX_PROMPTS = 256  # of a request
ROLES = {"developer": "system"}  # names of roles that templates know under another name


def read_prompts(value: object, name: str = "prompt") -> list[str | list[int]]:
    """Texts or token ids, from one of them or an array of them.

    Raises:
        InvalidRequestError: If the value is something else, or there are too many prompts.
    """
    several = isinstance(value, list) and value and all(isinstance(item, str | list) for item in value)
    listed: list[Any] = value if isinstance(value, list) and several else [value]
    if len(listed) > MAX_PROMPTS:
        raise InvalidRequestError(
            f"{name} has {len(listed)} prompts, expected at most {MAX_PROMPTS}", name, "invalid_value"
        )
    for item in listed:
        is_ids = isinstance(item, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in item)
        if not isinstance(item, str) and not is_ids:
            raise wrong_type(name, item, "a string, an array of token ids, or an array of these")
    return listed


def read_messages(value: object) -> list[dict[str, Any]]:
    """Messages as chat templates read them: the content is a text."""
    if not isinstance(value, list):
        raise wrong_type("messages", value, "an array of messages")
    if not value:
        raise InvalidRequestError("messages is empty: expected at least one message", "messages", "invalid_value")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def read_tools(value: object) -> list[dict[str, Any]]:
    """Tools in OpenAI's form.

    Raises:
        ArgumentError: If one of them is malformed.
        InvalidRequestError: If one of them is not a function.
    """
    found = tool_list(value)
    for index, tool in enumerate(found):
        if tool["type"] != "function":
            message = f"tools[{index}].type is {tool['type']!r}, expected 'function'"
            raise InvalidRequestError(message, "tools", "invalid_value")
    return found


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise wrong_type(where, message, "an object")
    given = {name: value for name, value in message.items() if value is not None}
    for name in given:
        if name not in ("role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id"):
            message_ = f"this version does not support {where}.{name}"
            raise InvalidRequestError(message_, f"{where}.{name}", "unsupported_parameter")
    has_calls = given.get("role") == "assistant" and bool(given.get("tool_calls"))
    for name in ("role",) if has_calls else ("role", "content"):
        if name not in given:
            raise InvalidRequestError(f"{where} has no {name!r}", f"{where}.{name}", "missing_required_parameter")
    for name in ("role", "name", "reasoning_content", "tool_call_id"):
        if not isinstance(given.get(name, ""), str):
            raise wrong_type(f"{where}.{name}", given[name], "a string")
    given["role"] = ROLES.get(given["role"], given["role"])
    given["content"] = _text(given.get("content", ""), f"{where}.content")
    if "tool_calls" in given:
        _check_calls(given["tool_calls"], f"{where}.tool_calls")
    return given


def _check_calls(calls: object, where: str) -> None:
    """Check the calls of an earlier answer: each has a function with a name and arguments."""
    if not isinstance(calls, list):
        raise wrong_type(where, calls, "an array")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            message = f"{where}[{index}] has no function with a name"
            raise InvalidRequestError(message, f"{where}[{index}]", "invalid_value")
        if not isinstance(function.get("arguments", ""), str):
            raise wrong_type(f"{where}[{index}].function.arguments", function["arguments"], "a string with JSON")


def _text(content: object, where: str) -> str:
    """The text of a message. Parts are joined by line feeds."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_type(where, content, "a string or an array of parts")
    texts = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        if not isinstance(part, dict):
            raise wrong_type(place, part, "an object")
        if part.get("type") != "text":
            message = f"{place}.type is {part.get('type')!r}: this version reads parts of the type 'text' only"
            raise InvalidRequestError(message, place, "unsupported_value")
        if not isinstance(part.get("text"), str):
            raise wrong_type(f"{place}.text", part.get("text"), "a string")
        texts.append(part["text"])
    return "\n".join(texts)
