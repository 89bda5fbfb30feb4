"""Translates bodies of OpenAI's Responses API to chat bodies, which `llamac.openai` validates further."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamac.errors import ArgumentError
from llamac.openai.errors import InvalidRequestError, wrong_type
from llamac.openai.forms import Form, Ignored, Kinds, Schema, fields
from llamac.openai.parameters import EFFORTS, body_form
from llamac.openai.requests import GenerationRequest
from llamac.openai.requests import translate as translate_chat
from llamac.openai.schemas import BARE_CHOICE, BOOLEAN, FUNCTION, OBJECT, STRING, array, ref
from llamac.tools.functions import tool_list

# Parameters with the same name in chats.
SAME = {
    "model": "model",
    "temperature": "temperature",
    "top_p": "top_p",
    "max_output_tokens": "max_completion_tokens",
    "parallel_tool_calls": "parallel_tool_calls",
    "stream": "stream",
}
# Parameters with another name in chats.
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}

# ---- the forms of objects in bodies

TEXTS = ("input_text", "output_text", "text")  # types of text parts
THOUGHTS = ("reasoning_text", "summary_text")
_PART = Form({"text": STRING}, ("text",), no_effect=("annotations", "logprobs", "prompt_cache_breakpoint"))
PARTS = Kinds(dict.fromkeys(TEXTS, _PART))
THOUGHT_PARTS = Kinds(dict.fromkeys(THOUGHTS, Form({"text": STRING}, ("text",))))
_TEXT: Schema = {"anyOf": [STRING, array(PARTS.schema)]}
ROLES = ("user", "assistant", "system", "developer")
_OF_ANSWERS = ("id", "status")  # keys of items from earlier answers
_DIRECT = {"caller": ({"type": "direct"},)}
ITEMS = Kinds(
    {
        "message": Form(
            {"role": {"enum": list(ROLES)}, "content": _TEXT}, ("role",), no_effect=(*_OF_ANSWERS, "phase")
        ),
        "function_call": Form(
            {"call_id": STRING, "name": STRING, "arguments": STRING},
            ("call_id", "name", "arguments"),
            no_effect=_OF_ANSWERS,
            refused=_DIRECT,
        ),
        "function_call_output": Form(
            {"call_id": STRING, "output": _TEXT, "name": STRING}, ("call_id",), no_effect=_OF_ANSWERS, refused=_DIRECT
        ),
        "reasoning": Form(
            dict.fromkeys(("content", "summary"), array(THOUGHT_PARTS.schema)),
            no_effect=(*_OF_ANSWERS, "encrypted_content"),
            texts={"summary": "read if there is no content"},
        ),
    },
    default="message",
)
TOOL = Form(FUNCTION.honored, FUNCTION.required, refused={"allowed_callers": (["direct"],), "defer_loading": (False,)})
FORMATS = Kinds(
    {
        "text": Form({}),
        "json_object": Form({}),
        "json_schema": Form({"schema": OBJECT, "strict": BOOLEAN}, ("schema",), no_effect=("name", "description")),
    }
)
TEXT = Form({"format": ref("ResponseTextFormat")}, refused={"verbosity": ("medium",)})
REASONING = Form(
    {"effort": {"enum": list(EFFORTS)}},
    no_effect=("summary", "generate_summary"),
    refused={"context": ("auto",), "mode": ("standard",)},
)
_STATE = "the server keeps no answers: send the whole conversation"
_CHAT = body_form("chat")
BODY = Form(
    {
        "input": {"anyOf": [STRING, array(ref("ResponseItem"), minItems=1)]},
        "instructions": STRING,
        "tools": array(ref("ResponseTool")),
        "tool_choice": {"anyOf": [STRING, BARE_CHOICE.schema]},
        "text": TEXT.schema,
        "reasoning": REASONING.schema,
        **{name: _CHAT.honored[other] for name, other in SAME.items()},
    },
    ("input",),
    no_effect=(
        *("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store"),
        *("user", "include", "stream_options", "max_tool_calls", "client_metadata"),
    ),
    refused={
        "background": (False,),
        "conversation": (),
        "previous_response_id": (),
        "prompt": (),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    },
    elsewhere={"max_tokens": "max_output_tokens", **NAMES},
    texts={
        "input": "a string, or items: messages, function calls and their results, and reasoning",
        "instructions": "the system message",
        "tools": "functions; other types are left out and reported as without effect",
        "tool_choice": "`auto`, `none`, `required`, or the name of a function",
        "text": "`format`: `text`, `json_object` or `json_schema`",
        "reasoning": "`effort`, like `reasoning_effort` of chat; summaries have no effect",
        "conversation": _STATE,
        "previous_response_id": _STATE,
        **{name: _CHAT.texts[other] for name, other in SAME.items()},
        "max_output_tokens": _CHAT.texts["max_tokens"],
        **{name: _CHAT.texts[name] for name in ("prompt_cache_key", "store")},
    },
)
# Shared schemas of the OpenAPI document, by name.
COMPONENTS: dict[str, Schema] = {
    "ResponseItem": ITEMS.schema,
    "ResponseTool": {
        "anyOf": [
            Kinds({"function": TOOL}).schema,
            fields({"type": {"type": "string", "not": {"const": "function"}}}, ("type",)),
        ]
    },
    "ResponseTextFormat": FORMATS.schema,
}


def translate(body: Mapping[str, Any]) -> tuple[GenerationRequest, tuple[str, ...]]:
    """Validate a body. Return its chat request, and the names of parameters without effect.

    Raises:
        InvalidRequestError: If a parameter is missing, wrong, unknown or unsupported.
    """
    ignored = Ignored()
    given = BODY.read(body, "", ignored)
    chat = {SAME[name]: value for name, value in given.items() if name in SAME}
    chat["messages"] = _messages(given, ignored)
    tools = _tools(given.get("tools", []), ignored)
    if tools:
        chat["tools"] = tools
    if "tool_choice" in given:
        chat["tool_choice"] = given["tool_choice"]
    chat["response_format"] = _format(given.get("text", {}), ignored)
    chat["reasoning_effort"] = REASONING.read(given.get("reasoning", {}), "reasoning", ignored).get("effort")
    try:
        request = translate_chat("chat", chat)
    except InvalidRequestError as error:
        name = error.param or ""
        if name not in NAMES:
            raise
        raise InvalidRequestError(str(error).replace(name, NAMES[name], 1), NAMES[name], error.code) from None
    return request, ignored.names


def _tools(tools: list[Any], ignored: Ignored) -> list[dict[str, Any]]:
    """Return the functions in the format of chats. Tools that only OpenAI's servers run are dropped and reported."""
    found = []
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
            raise wrong_type(where, tool, "an object with a type")
        if tool["type"] == "function":
            function = TOOL.read({name: tool[name] for name in tool if name != "type"}, where, ignored)
            try:
                found += tool_list([function])
            except ArgumentError as error:
                message = str(error).replace("tools[0]", where, 1)  # indices differ from those of the chat
                raise InvalidRequestError(message, where, "invalid_value") from None
        else:
            ignored.add(where)
    return found


def _format(text: object, ignored: Ignored) -> dict[str, Any] | None:
    """Return the `response_format` of the chat."""
    form = TEXT.read(text, "text", ignored).get("format")
    if form is None:
        return None
    kind, found = FORMATS.read(form, "text.format", ignored)
    return {"type": kind, "json_schema": found} if kind == "json_schema" else {"type": kind}


# ---- the conversation


def _messages(given: Mapping[str, Any], ignored: Ignored) -> list[dict[str, Any]]:
    """Return the messages of the chat. Consecutive reasoning, text and calls become one message."""
    found: list[dict[str, Any]] = []
    if "instructions" in given:
        found.append({"role": "system", "content": given["instructions"]})
    items = given["input"]
    if isinstance(items, str):
        return [*found, {"role": "user", "content": items}]
    if not isinstance(items, list):
        raise wrong_type("input", items, "a string or an array of items")
    if not items:
        raise InvalidRequestError("input is empty: expected at least one item", "input", "invalid_value")
    for i, item in enumerate(items):
        where = f"input[{i}]"
        kind, values = ITEMS.read(item, where, ignored)
        message = _message(kind, values, where, ignored)
        last = found[-1] if found else {}
        is_begun = last.keys() == {"role", "reasoning_content"} or kind == "function_call"
        is_begun |= kind == "message" and "tool_calls" in last  # the results must follow the calls
        if is_begun and message["role"] == last.get("role") == "assistant":
            for name in message.keys() - {"role"}:
                if name == "tool_calls":
                    last[name] = [*last.get(name, ()), *message[name]]
                else:
                    last[name] = "\n".join(filter(None, (last.get(name), message[name])))
        else:
            found.append(message)
    return [{"content": "", **message} for message in found]


def _message(kind: str, item: Mapping[str, Any], where: str, ignored: Ignored) -> dict[str, Any]:
    match kind:
        case "message":
            content = _text(PARTS, item.get("content", ""), f"{where}.content", ignored)
            return {"role": item["role"], "content": content}
        case "reasoning":
            if item.get("content") and item.get("summary"):
                ignored.add("input[].summary")
            name = "content" if item.get("content") else "summary"
            thoughts = _text(THOUGHT_PARTS, item.get(name, []), f"{where}.{name}", ignored)
            return {"role": "assistant", "reasoning_content": thoughts}
        case "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            return {"role": "assistant", "tool_calls": [call]}
    content = _text(PARTS, item.get("output", ""), f"{where}.output", ignored)
    named = {"name": item["name"]} if "name" in item else {}
    return {"role": "tool", "tool_call_id": item["call_id"], **named, "content": content}


def _text(kinds: Kinds, content: object, where: str, ignored: Ignored) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_type(where, content, "a string or an array of parts")
    return "\n".join(kinds.read(part, f"{where}[{i}]", ignored)[1]["text"] for i, part in enumerate(content))
