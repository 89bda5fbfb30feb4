"""Messages with calls and results, in the form that a chat template reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from llamac.arguments import wrong_type
from llamac.errors import ArgumentError
from llamac.text.marks import MarkedText
from llamac.text.template_probe import RESULT_ROLES, ArgumentsForm, TemplateProbe, probe_of
from llamac.tools.formats import FORMATS, Format, detect
from llamac.tools.message import Message, parsed_arguments
from llamac.tools.writing import written_calls

# The roles of OpenAI's API, and the names of two of them in templates that do not know them.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MODEL_ROLES = ("assistant", "model")  # of the model's messages; the second is in templates that name it
LABELS = ("role", "name", "tool_call_id")  # keys of a message that are not content
OTHER_NAMES = {"developer": "system", "function": "tool"}

# What llamac says about tools if the template says nothing, in the form that Hermes models were trained on, or in the
# model's own.
_TOOLS = (
    "You can call functions to answer the user. The functions are described between <tools> and </tools>:\n<tools>\n"
    "{tools}\n</tools>\nTo call a function, write "
)
_HERMES_CALL = (
    "a JSON object with its name and arguments between <tool_call> and "
    '</tool_call>:\n<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
)
_OWN_CALL = "its name and arguments as in this call of a function NAME:\n"
_EXAMPLE = {"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}


def prepared(
    messages: object,
    template: str,
    tools: Sequence[Mapping[str, Any]] | None,
    special_tokens: Mapping[str, str] | None = None,
    form: Format | None = None,
) -> object:
    """Messages that a template can render, so that all they say is in its prompt.

    A role is one of OpenAI's API, or one that the template's code names: templates drop or change messages of others.
    Everything else depends on what the template reads (template_probe.py). If it reads only texts, the parts of a
    content become one text. Arguments of calls become dicts, as templates expect them, or a text where the template
    reads one; missing ones become empty. Calls that the template does not write become text in the model's format, or
    Hermes'. Results get the role with which the template reads them, or become the user's. Tools that it does not list
    are described in the system message. A system message that it refuses or drops becomes the user's.

    Args:
        messages: Dicts, or `Message` objects.
        template: The template's code.
        tools: The tools in OpenAI's form, or None.
        special_tokens: The strings of special tokens by the name of their variable in the template.
        form: The format that the request names for calls, which replaces the model's.

    Returns:
        New messages; the argument itself if it is not a list of messages, which the template's own checks report.

    Raises:
        ArgumentError: If a message has no role, an unknown one, or no content that the template can read.
        ChatTemplateError: If the template takes too long.
    """
    listed = as_dicts(messages)
    if not isinstance(listed, list) or not all(isinstance(message, Mapping) for message in listed):
        return listed
    probe = probe_of(template, special_tokens or {})
    listed = [_without_no_calls(message) for message in listed]
    listed = [_with_known_role(message, f"messages[{i}]", template, probe) for i, message in enumerate(listed)]
    for i, message in enumerate(listed):
        if not any(value is not None for key, value in message.items() if key not in LABELS):
            raise ArgumentError(f"messages[{i}] has no 'content': expected a str or a list of parts")
    listed = [_as_text(message, f"messages[{i}].content", probe) for i, message in enumerate(listed)]
    if form is None or not form.writing.call or form.name == "gemma":  # Gemma also reads Hermes' calls
        form = detect(template) or FORMATS["hermes"]
    listed = list(_with_calls_read(listed, form, probe))
    listed = list(_with_calls_split(listed, probe))
    listed = _with_results_read(listed, probe)
    if tools:
        listed = _with_tools(listed, tools, form, probe)
    return _with_systems_read(listed, probe, has_tools=bool(tools))


def describes_tools(template: str, special_tokens: Mapping[str, str]) -> bool:
    """Whether llamac describes tools in the messages, because the template lists none."""
    return probe_of(template, special_tokens).tools_place is None


def as_dicts(messages: Any) -> Any:
    """Messages with dicts instead of `Message` objects; anything but a list of messages is returned unchanged."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        return messages
    return [message.to_dict() if isinstance(message, Message) else message for message in messages]


def _with_known_role(message: Mapping[str, Any], where: str, template: str, probe: TemplateProbe) -> Mapping[str, Any]:
    """The message with a role that the template supports."""
    role = message.get("role")
    if role is None:
        raise ArgumentError(f"{where} has no 'role': expected one of {_listed_roles()}")
    if not isinstance(role, str):
        raise wrong_type(f"{where}.role", role, "a str")
    named = role and (f"'{role}'" in template or f'"{role}"' in template)
    if named and (role != "function" or not probe.is_known or probe.knows_role(role)):  # calls have this key
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


def _as_text(message: Mapping[str, Any], where: str, probe: TemplateProbe) -> Mapping[str, Any]:
    """A message with the parts of its content as one text, joined by line feeds, if the template reads only texts."""
    content, role = message.get("content"), message["role"]
    if content is None or isinstance(content, str | Mapping):
        return message
    is_result = role in ("tool", "function")
    if probe.form((is_result and probe.result_role) or role) != "text":
        return message
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


def _with_arguments(message: Mapping[str, Any], form: ArgumentsForm) -> Mapping[str, Any]:
    """A message whose calls have arguments that its template reads."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return message
    return {**message, "tool_calls": [_call(call, form) for call in calls]}


def _call(call: Any, form: ArgumentsForm = "dict") -> Any:
    """A call with its arguments in a form; if it is "both", a text stays one."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call(call["function"], form)}
    if "name" not in call:
        return call
    arguments = call.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    if form == "text" and isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif form == "dict" and isinstance(arguments, str):
        value = parsed_arguments(arguments)
        arguments = arguments if value is None else value
    return {**call, "arguments": arguments}


def _with_written_calls(message: Mapping[str, Any], form: Format) -> Mapping[str, Any]:
    """The message with its calls in its text, if it is the model's: the tokens around calls are special."""
    calls = message.get("tool_calls") if message.get("role") in MODEL_ROLES else None
    if not isinstance(calls, list | tuple) or not calls:
        return message
    content = _joined(message).get("content")
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    said = [content] if content and isinstance(content, str) else []
    return {**rest, "content": MarkedText.joined("\n", [*said, written_calls(form, map(_call, calls))])}


def _with_calls_read(
    messages: Iterable[Mapping[str, Any]], form: Format, probe: TemplateProbe
) -> Iterator[Mapping[str, Any]]:
    """Yield the messages with calls, and the texts beside them, where the template reads them."""
    for message in messages:
        if not message.get("tool_calls"):
            yield message
            continue
        has_text = message.get("content") and message["role"] in MODEL_ROLES
        place = probe.place_of_text if has_text else "same message"
        if not probe.writes_calls or place == "text of calls":
            yield _with_written_calls(message, form)
            continue
        message = _with_arguments(message, probe.arguments_form)
        if place == "message before":
            yield {key: value for key, value in message.items() if key != "tool_calls"}
            message = {"role": message["role"], "tool_calls": message["tool_calls"]}
        yield message


def _with_calls_split(messages: Sequence[Mapping[str, Any]], probe: TemplateProbe) -> Iterator[Mapping[str, Any]]:
    """Yield a message for each call, and its results after it, where the template does not write several calls."""
    left = 0  # results of the last calls that follow
    for i, message in enumerate(messages):
        calls = message.get("tool_calls")
        if left:
            left -= 1
        elif isinstance(calls, list) and len(calls) > 1 and probe.splits_calls:
            results = list(takewhile(_is_result, messages[i + 1 :]))
            places, left = _calls_of(results, calls), len(results)
            for number, call in enumerate(calls):
                yield {**(message if number == 0 else {"role": message["role"]}), "tool_calls": [call]}
                yield from (result for result, place in zip(results, places, strict=True) if place == number)
        else:
            yield message


def _is_result(message: Mapping[str, Any]) -> bool:
    return message["role"] in (*RESULT_ROLES, "function")


def _calls_of(results: Sequence[Mapping[str, Any]], calls: Sequence[Any]) -> list[int]:
    """The number of each result's call: the only one with its id, or else the one at its place."""
    ids = [call.get("id") if isinstance(call, Mapping) else None for call in calls]
    names = [result.get("tool_call_id") for result in results]
    return [ids.index(name) if ids.count(name) == 1 else min(i, len(calls) - 1) for i, name in enumerate(names)]


def _with_results_read(messages: Iterable[Mapping[str, Any]], probe: TemplateProbe) -> list[Mapping[str, Any]]:
    """Messages with results in the role that the template reads, or in those of the user."""
    found: list[Mapping[str, Any]] = []
    is_result = False  # the last message
    for message in messages:
        if message["role"] == "tool" and (role := probe.result_role):
            message = {**message, "role": role}
        elif message["role"] == "tool":
            content = _joined(message).get("content")
            text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
            message = {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
            if is_result:
                found[-1] = _with_content(message, "\n", found[-1]["content"], message["content"])
                continue
            is_result = True
        elif is_result:
            is_result = False
            if message["role"] == "user" and not probe.reads_users_in_a_row:
                found[-1] = _with_content(message, "\n", found[-1]["content"], message.get("content"))
                continue
        found.append(message)
    return found


def _with_tools(
    messages: list[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], form: Format, probe: TemplateProbe
) -> list[Mapping[str, Any]]:
    """Messages with the tools in the system message, unless the template reads them elsewhere."""
    place = probe.tools_place
    if place == "variable":
        return messages
    has_system = bool(messages) and messages[0]["role"] == "system"
    first = messages[0] if has_system else {"role": "system", "content": ""}
    rest = messages[1:] if has_system else messages
    if place == "list":
        return [{**first, "tools": tools}, *rest]
    if place == "text":
        return [
            {**first, "tools": json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)},
            *rest,
        ]
    listed = _TOOLS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    text: str = listed + _HERMES_CALL
    if form.name != "hermes":
        text = MarkedText.joined("", [listed, _OWN_CALL, written_calls(form, [_EXAMPLE])])
    return [_with_content(first, "\n\n", first.get("content"), text), *rest]


def _with_systems_read(
    messages: list[Mapping[str, Any]], probe: TemplateProbe, *, has_tools: bool
) -> list[Mapping[str, Any]]:
    """Messages with the system's texts where the template reads them: as they are, or in messages of the user."""
    found: list[Mapping[str, Any]] = []
    was_moved = False  # the last message
    has_result = any(message["role"] in RESULT_ROLES for message in messages[-1:])
    for i, message in enumerate(messages):
        is_moved = message["role"] == "system" and not probe.reads_system(i == 0, has_tools, has_result)
        message = {**message, "role": "user"} if is_moved else message
        if found and (is_moved or was_moved) and found[-1]["role"] == message["role"] == "user":
            found[-1] = _with_content(message, "\n\n", found[-1].get("content"), message.get("content"))
        else:
            found.append(message)
        was_moved = is_moved
    return found


def _with_content(message: Mapping[str, Any], between: str, *contents: Any) -> Mapping[str, Any]:
    """A message with several contents as one: as a text, or as a list if one of them has parts that are no texts."""
    given = [content for each in contents if (content := _joined({"content": each})["content"])]
    if all(isinstance(content, str) for content in given):
        return {**message, "content": MarkedText.joined(between, given)}
    lists = [content if isinstance(content, list | tuple) else [{"type": "text", "text": content}] for content in given]
    return {**message, "content": [part for each in lists for part in each]}
