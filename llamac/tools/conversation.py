"""Messages with calls and results, in the form that a chat template reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llamac.arguments import wrong_type
from llamac.errors import ArgumentError
from llamac.text.marks import MarkedText
from llamac.tools.formats import FORMATS, Format, detect, reads_tools
from llamac.tools.message import Message, parsed_arguments
from llamac.tools.writing import written_calls

# The roles of OpenAI's API, and the names of two of them in templates that do not know them.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MODEL_ROLES = ("assistant", "model")  # of the model's messages; the second is in templates that name it
READS_PARTS = re.compile(r"""\.text\b|['"]text['"]""")  # a key of parts: a template without it reads only texts
JOINS_ARGUMENTS = re.compile(r"""\barguments(?:['"]\s*\])?\s*\+""")  # with texts: they must be one
LABELS = ("role", "name", "tool_call_id")  # keys of a message that are not content
OTHER_NAMES = {"developer": "system", "function": "tool"}

ALTERNATE = "must alternate"  # what templates say that refuse two messages of a user in a row
NO_SYSTEM = "System role not supported"  # what templates that refuse system messages say: Gemma 1 and 2

# What the system message says about tools if the template says nothing, in the form that Hermes models were trained on.
_TOOLS = (
    "You can call functions to answer the user. The functions are described between <tools> and </tools>:\n<tools>\n"
    "{tools}\n</tools>\nTo call a function, write a JSON object with its name and arguments between <tool_call> and "
    '</tool_call>:\n<tool_call>\n{{"name": "...", "arguments": {{...}}}}\n</tool_call>'
)


def prepared(messages: object, template: str, tools: Sequence[Mapping[str, Any]] | None) -> object:
    """Messages that a template can render.

    A role is one of OpenAI's API, or one that the template's code names: templates drop or change messages of others.
    If the template reads only texts, the parts of a content become one text. Arguments of calls become dicts, as
    templates expect them, or a text where the template reads one; missing ones become empty. For a template that knows
    tools but writes no calls, calls become text in the model's format. For a template that does not know tools, calls
    and results become texts in Hermes' form, and the tools are in the system message, or in the first message if the
    template has no system messages.

    Args:
        messages: Dicts, or `Message` objects.
        template: The template's code.
        tools: The tools in OpenAI's form, or None.

    Returns:
        New messages; the argument itself if it is not a list of messages, which the template's own checks report.

    Raises:
        ArgumentError: If a message has no role, an unknown one, or no content that the template can read.
    """
    listed = as_dicts(messages)
    if not isinstance(listed, list) or not all(isinstance(message, Mapping) for message in listed):
        return listed
    listed = [_without_no_calls(message) for message in listed]
    listed = [_with_known_role(message, f"messages[{i}]", template) for i, message in enumerate(listed)]
    for i, message in enumerate(listed):
        if not any(value is not None for key, value in message.items() if key not in LABELS):
            raise ArgumentError(f"messages[{i}] has no 'content': expected a str or a list of parts")
    if not READS_PARTS.search(template):
        listed = [_as_text(message, f"messages[{i}].content") for i, message in enumerate(listed)]
    if "tool_calls" not in template:
        knows_tools = reads_tools(template)
        form = (detect(template) if knows_tools else None) or FORMATS["hermes"]
        listed = [_with_written_calls(message, form) for message in listed]
        return listed if knows_tools else _without_tools(listed, tools, template)
    as_text = JOINS_ARGUMENTS.search(template) is not None
    keeps_text = as_text or "arguments is string" in template
    return [_with_arguments(message, keeps_text, as_text) for message in listed]


def as_dicts(messages: Any) -> Any:
    """Messages with dicts instead of `Message` objects; anything but a list of messages is returned unchanged."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        return messages
    return [message.to_dict() if isinstance(message, Message) else message for message in messages]


def _with_known_role(message: Mapping[str, Any], where: str, template: str) -> Mapping[str, Any]:
    """The message with a role that the template supports."""
    role = message.get("role")
    if role is None:
        raise ArgumentError(f"{where} has no 'role': expected one of {_listed_roles()}")
    if not isinstance(role, str):
        raise wrong_type(f"{where}.role", role, "a str")
    if role and (f"'{role}'" in template or f'"{role}"' in template):
        return message
    if role in OTHER_NAMES:
        return {**message, "role": OTHER_NAMES[role]}
    if role in ROLES:
        return message
    from difflib import get_close_matches  # not needed before the first error

    near = get_close_matches(role, ROLES, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ArgumentError(
        f"{where}.role is {role!r}, expected {_listed_roles()}, or a role that the model's chat template names{hint}"
    )


def _without_no_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message without a list of calls that is empty: templates take any list for calls."""
    if message.get("tool_calls", True):
        return message
    return {key: value for key, value in message.items() if key != "tool_calls"}


def _as_text(message: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A message with the parts of its content as one text, joined by line feeds."""
    content = message.get("content")
    if content is None or isinstance(content, str | Mapping):
        return message
    is_result = message["role"] in ("tool", "function")
    if not isinstance(content, list | tuple):
        if is_result:
            return message
        raise wrong_type(where, content, "a str or a list of parts")
    for i, part in enumerate(content):
        if isinstance(part, Mapping) and "type" in part and not isinstance(part.get("text"), str) and not is_result:
            raise ArgumentError(
                f"{where}[{i}] is a part without a text, and the model's chat template reads only texts"
            )
    return _joined(message)


def _joined(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with the parts of its content as one text, if all of them are texts; templates interpret other ones."""
    content = message.get("content")
    if not isinstance(content, list | tuple) or not content:
        return message
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        return message
    return {**message, "content": "\n".join(map(str, texts))}


def _listed_roles() -> str:
    return f"{', '.join(map(repr, ROLES[:-1]))} or {ROLES[-1]!r}"


def _with_arguments(message: Mapping[str, Any], keeps_text: bool, as_text: bool) -> Mapping[str, Any]:
    """A message whose calls have arguments that its template reads: dicts, also texts, or only texts."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return message
    return {**message, "tool_calls": [_call(call, keeps_text, as_text) for call in calls]}


def _call(call: Any, keeps_text: bool = False, as_text: bool = False) -> Any:
    """A call with its arguments as a dict if they were the text of one, unless a text is kept or wanted."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call(call["function"], keeps_text, as_text)}
    if "name" not in call:
        return call
    arguments = call.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    if as_text and isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif isinstance(arguments, str) and not keeps_text:
        value = parsed_arguments(arguments)
        arguments = arguments if value is None else value
    return {**call, "arguments": arguments}


def _with_written_calls(message: Mapping[str, Any], form: Format) -> Mapping[str, Any]:
    """The message with its calls in its text, if it is the model's: the tokens around calls are special."""
    calls = message.get("tool_calls") if message.get("role") in MODEL_ROLES else None
    if not isinstance(calls, list | tuple) or not calls:
        return message
    content = _joined(message).get("content")
    text = written_calls(form, map(_call, calls))
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    if content and isinstance(content, str):
        text = MarkedText([(f"{content}\n", False), *text.pieces])
    return {**rest, "content": text}


def _without_tools(
    messages: Iterable[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, template: str
) -> list[dict[str, Any]]:
    """Messages without results, and with the tools in one of them."""
    found: list[dict[str, Any]] = []
    is_result = False  # the last message
    for message in map(dict, messages):
        if message.get("role") == "tool":
            content = _joined(message).get("content")
            text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
            message = {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
            if is_result:
                found[-1]["content"] += f"\n{message['content']}"
                continue
            is_result = True
        elif is_result:
            is_result = False
            content = _joined(message).get("content")
            if ALTERNATE in template and message.get("role") == "user" and isinstance(content, str):
                found[-1]["content"] += f"\n{content}"
                continue
        found.append(message)
    if tools:
        text = _TOOLS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        first = _joined(found[0]) if found else {}
        if first.get("role") == "system" and isinstance(first.get("content"), str):
            found[0] = {**first, "content": f"{first['content']}\n\n{text}"}
        elif NO_SYSTEM in template and first.get("role") == "user" and isinstance(first.get("content"), str):
            found[0] = {**first, "content": f"{text}\n\n{first['content']}"}
        else:
            found.insert(0, {"role": "system", "content": text})
    return found
