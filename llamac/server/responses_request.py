"""Translates the bodies of OpenAI's Responses API into those of chats, which `llamac.openai` checks further."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamac.openai.errors import InvalidRequestError, wrong_type
from llamac.openai.parameters import EFFORTS
from llamac.openai.requests import GenerationRequest, is_one_of
from llamac.openai.requests import translate as translate_chat
from llamac.openai.schemas import ANY, FUNCTION, NULL, OBJECT, STRING, Schema, array, fields, or_null, ref

# The name of each parameter that a chat has as well.
SAME = {
    "model": "model",
    "temperature": "temperature",
    "top_p": "top_p",
    "max_output_tokens": "max_completion_tokens",
    "parallel_tool_calls": "parallel_tool_calls",
    "stream": "stream",
}
SUMMARIES = ("summary", "generate_summary")  # of the reasoning
OWN: dict[str, Schema] = {
    "input": {"anyOf": [STRING, array(ref("ResponseItem"), minItems=1)]},
    "instructions": STRING,
    "tools": array(ref("ResponseTool")),
    "tool_choice": {
        "anyOf": [STRING, fields({"type": STRING, "name": STRING}, ("name",))],
        "description": "`auto`, `none`, `required`, or the name of a function",
    },
    "text": fields(
        {"format": or_null(ref("ResponseTextFormat")), "verbosity": {"enum": ["medium", None]}}, others=False
    ),
    "reasoning": fields({"effort": {"enum": [*EFFORTS, None]}, **dict.fromkeys(SUMMARIES, ANY)}, others=NULL),
}
WITHOUT_EFFECT: dict[str, Schema] = dict.fromkeys(
    (
        *("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store"),
        *("user", "include", "stream_options", "max_tool_calls", "client_metadata"),
    ),
    ANY,
)
# Parameters that would change the answer, and the values, besides null, that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "previous_response_id": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
STATEFUL = ("conversation", "previous_response_id")
TEXTS = ("input_text", "output_text", "text")  # types of parts
_TEXT: Schema = {"anyOf": [STRING, array(fields({"type": {"enum": list(TEXTS)}, "text": STRING}, ("type", "text")))]}
_THOUGHTS: Schema = array(
    fields({"type": {"enum": ["reasoning_text", "summary_text"]}, "text": STRING}, ("type", "text"))
)
_FUNCTION = fields(
    {
        "type": {"const": "function"},
        **FUNCTION["properties"],
        "parameters": or_null(FUNCTION["properties"]["parameters"]),
    },
    ("type", "name"),
)
# The schemas that a document has once, by name.
COMPONENTS: dict[str, Schema] = {
    "ResponseItem": {
        "anyOf": [
            fields({"type": {"const": "message"}, "role": STRING, "content": _TEXT}, ("role",)),
            fields(
                {"type": {"const": "function_call"}, "call_id": STRING, "name": STRING, "arguments": STRING},
                ("type", "call_id", "name", "arguments"),
            ),
            fields(
                {"type": {"const": "function_call_output"}, "call_id": STRING, "output": _TEXT}, ("type", "call_id")
            ),
            fields(
                {"type": {"const": "reasoning"}, "content": or_null(_THOUGHTS), "summary": or_null(_THOUGHTS)},
                ("type",),
            ),
        ]
    },
    "ResponseTool": {
        "anyOf": [
            _FUNCTION,
            fields({"type": {"type": "string", "not": {"const": "function"}}}, ("type",)),
        ]
    },
    "ResponseTextFormat": {
        "anyOf": [
            fields({"type": {"enum": ["text", "json_object"]}}, ("type",)),
            fields({"type": {"const": "json_schema"}, "schema": OBJECT}, ("type", "schema")),
        ]
    },
}


def translate(body: Mapping[str, Any]) -> tuple[GenerationRequest, tuple[str, ...]]:
    """Check a body; return the chat that it asks for, and the parameters without effect.

    Raises:
        InvalidRequestError: If a parameter is missing, wrong, unknown or unsupported.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name in REFUSED and not is_one_of(value, REFUSED[name]):
            hint = ": the server keeps no answers, send the whole conversation" if name in STATEFUL else ""
            raise InvalidRequestError(f"this version does not support {name!r}{hint}", name, "unsupported_parameter")
        if name not in (*SAME, *OWN, *WITHOUT_EFFECT, *REFUSED):
            raise InvalidRequestError(f"unknown parameter {name!r}", name, "unknown_parameter")
    if "input" not in given:
        raise InvalidRequestError("the body has no 'input'", "input", "missing_required_parameter")
    chat = {SAME[name]: value for name, value in given.items() if name in SAME}
    chat["messages"] = _messages(given)
    tools, skipped = _tools(given.get("tools", []))
    if tools:
        chat["tools"] = tools
    if "tool_choice" in given:
        chat["tool_choice"] = given["tool_choice"]
    chat["response_format"] = _format(given.get("text", {}))
    chat["reasoning_effort"], unread = _effort(given)
    try:
        request = translate_chat("chat", chat)
    except InvalidRequestError as error:
        names = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text.format"}
        param = names.get(error.param or "", error.param)
        raise InvalidRequestError(str(error), param, error.code) from None
    return request, (*(name for name in WITHOUT_EFFECT if name in given), *skipped, *unread)


def _effort(given: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """The effort of the reasoning, and what has no effect on it: summaries come only from OpenAI's servers."""
    value = given.get("reasoning", {})
    if not isinstance(value, dict):
        raise wrong_type("reasoning", value, "an object")
    set_names = [name for name in value if value[name] is not None]
    for name in set_names:
        if name not in ("effort", *SUMMARIES):
            message = f"unknown parameter 'reasoning.{name}'"
            raise InvalidRequestError(message, f"reasoning.{name}", "unknown_parameter")
    return value.get("effort"), [f"reasoning.{name}" for name in set_names if name in SUMMARIES]


def _tools(value: object) -> tuple[list[dict[str, Any]], list[str]]:
    """Functions as a chat has them, and the names of tools that only OpenAI's servers run: those are left out."""
    if not isinstance(value, list):
        raise wrong_type("tools", value, "an array")
    found, skipped = [], []
    for i, tool in enumerate(value):
        if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
            raise wrong_type(f"tools[{i}]", tool, "an object with a type")
        if tool["type"] == "function":
            function = {name: part for name, part in tool.items() if name != "type" and part is not None}
            found.append({"type": "function", "function": function})
        else:
            skipped.append(f"tools[{i}]")
    return found, skipped


def _format(text: object) -> dict[str, Any] | None:
    """The `response_format` of a chat."""
    if not isinstance(text, dict):
        raise wrong_type("text", text, "an object")
    for name, value in text.items():
        if name not in ("format", "verbosity") or (name == "verbosity" and value not in (None, "medium")):
            message = f"this version does not support 'text.{name}'"
            raise InvalidRequestError(message, f"text.{name}", "unsupported_parameter")
    form = text.get("format")
    if not isinstance(form, dict | None):
        raise wrong_type("text.format", form, "an object")
    if form is not None and form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}
    return form


# ---- the conversation


def _messages(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if "instructions" in given:
        if not isinstance(given["instructions"], str):
            raise wrong_type("instructions", given["instructions"], "a string")
        found.append({"role": "system", "content": given["instructions"]})
    items = given["input"]
    if isinstance(items, str):
        return [*found, {"role": "user", "content": items}]
    if not isinstance(items, list):
        raise wrong_type("input", items, "a string or an array of items")
    thoughts = ""
    for i, item in enumerate(items):
        where = f"input[{i}]"
        if not isinstance(item, dict):
            raise wrong_type(where, item, "an object")
        kind = item.get("type", "message")
        if kind == "reasoning":
            thoughts += _text(item.get("content") or item.get("summary") or "", where, "reasoning_text", "summary_text")
            continue
        message = _message(kind, item, where)
        if message["role"] == "assistant" and thoughts:
            message["reasoning_content"], thoughts = thoughts, ""
        last = found[-1] if found else {}
        if "tool_calls" in message and last.get("role") == "assistant":
            last.setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            found.append(message)
    return found


def _message(kind: object, item: Mapping[str, Any], where: str) -> dict[str, Any]:
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str):
            raise wrong_type(f"{where}.role", role, "a string")
        return {"role": role, "content": _text(item.get("content", ""), where, *TEXTS)}
    if kind not in ("function_call", "function_call_output"):
        message = f"{where}.type is {kind!r}: this version does not read such items"
        raise InvalidRequestError(message, where, "unsupported_value")
    for name in ("call_id", "name", "arguments") if kind == "function_call" else ("call_id",):
        if not isinstance(item.get(name), str):
            raise wrong_type(f"{where}.{name}", item.get(name), "a string")
    if kind == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        return {"role": "assistant", "tool_calls": [{"id": item["call_id"], "type": "function", "function": function}]}
    content = _text(item.get("output", ""), where, *TEXTS)
    return {"role": "tool", "tool_call_id": item["call_id"], "content": content}


def _text(content: object, where: str, *types: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_type(f"{where}.content", content, "a string or an array of parts")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in types or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else None
            message = f"{where} has a part of the type {kind!r}: this version reads {' and '.join(types)} with a text"
            raise InvalidRequestError(message, where, "unsupported_value")
        texts.append(part["text"])
    return "\n".join(texts)
