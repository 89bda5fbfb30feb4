"""Translates the bodies of Anthropic's Messages API into requests for an engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamac.engine.generation.reading import chosen_tools
from llamac.engine.prompts.prompt_ids import ToolOptions
from llamac.engine.sampling.params import SamplingParams
from llamac.engine.sampling.schemas import json_schema
from llamac.errors import ArgumentError, ArgumentTypeError
from llamac.openai.errors import InvalidRequestError, wrong_type
from llamac.openai.schemas import ANY, BOOLEAN, COUNT, OBJECT, STRING, TEXT_PART, Schema, array, fields, or_null, ref
from llamac.tools.functions import NAME

if TYPE_CHECKING:
    from llamac.engine.batching.engine import Engine
    from llamac.engine.batching.request import Request

SAMPLING = {"max_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}
SAMPLING["stop_sequences"] = "stop"
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
THINKING = ("enabled", "disabled", "adaptive")
# The parameters of each path, with the schemas of their values.
COUNTED: dict[str, Schema] = {
    "model": STRING,
    "messages": array(ref("Message"), minItems=1),
    "system": {"anyOf": [STRING, array(TEXT_PART)]},
    "tools": array(ref("Tool")),
    "tool_choice": {
        "anyOf": [
            fields({"type": {"enum": list(CHOICES)}, "disable_parallel_tool_use": BOOLEAN}, ("type",)),
            fields({"type": {"const": "tool"}, "name": STRING}, ("type", "name")),
        ]
    },
    "thinking": {
        "anyOf": [
            fields({"type": {"enum": ["disabled", "adaptive"]}}, ("type",)),
            fields({"type": {"const": "enabled"}, "budget_tokens": COUNT}, ("type", "budget_tokens")),
        ]
    },
}
HONOURED: dict[str, Schema] = {
    **COUNTED,
    "stream": BOOLEAN,
    **{name: json_schema(field) for name, field in SAMPLING.items() if field != "stop"},
    "stop_sequences": array({**STRING, "minLength": 1}),
}
WITHOUT_EFFECT: dict[str, Schema] = dict.fromkeys(("metadata", "service_tier", "cache_control", "inference_geo"), ANY)
_BLOCK: dict[str, Schema] = {
    "tool_result": fields(
        {
            "type": {"const": "tool_result"},
            "tool_use_id": STRING,
            "content": or_null({"anyOf": [STRING, array(TEXT_PART)]}),
        },
        ("type", "tool_use_id"),
    ),
    "tool_use": fields(
        {"type": {"const": "tool_use"}, "id": STRING, "name": STRING, "input": OBJECT}, ("type", "id", "name")
    ),
    "thinking": fields({"type": {"const": "thinking"}, "thinking": STRING}, ("type", "thinking")),
    "redacted_thinking": fields({"type": {"const": "redacted_thinking"}}, ("type",)),
}
# The schemas that a document has once, by name.
COMPONENTS: dict[str, Schema] = {
    "Message": {
        "anyOf": [
            fields(
                {
                    "role": {"const": "user"},
                    "content": {"anyOf": [STRING, array({"anyOf": [TEXT_PART, _BLOCK["tool_result"]]})]},
                },
                ("role", "content"),
            ),
            fields(
                {
                    "role": {"const": "assistant"},
                    "content": {
                        "anyOf": [
                            STRING,
                            array(
                                {
                                    "anyOf": [
                                        TEXT_PART,
                                        *(part for kind, part in _BLOCK.items() if kind != "tool_result"),
                                    ]
                                }
                            ),
                        ]
                    },
                },
                ("role", "content"),
            ),
        ]
    },
    "Tool": fields(
        {
            "type": or_null({"const": "custom"}),
            "name": {"type": "string", "pattern": f"^{NAME.pattern}$"},
            "description": or_null(STRING),
            "input_schema": fields({"properties": OBJECT}),
        },
        ("name",),
    ),
}


@dataclass(frozen=True)
class MessagesRequest:
    """A body that has been checked.

    Attributes:
        messages: The conversation as chat templates read it.
        params: The sampling parameters.
        tools: Arguments of `Engine.chat` about tools.
        thinks: Whether the model may reason before it answers.
        model: The model that it names.
        stream: Whether to send the answer in pieces.
        without_effect: Parameters that have no effect.
    """

    messages: list[dict[str, Any]]
    params: SamplingParams
    tools: Mapping[str, Any]
    thinks: bool
    model: str
    stream: bool
    without_effect: tuple[str, ...]

    def template_options(self, engine: Engine) -> dict[str, Any]:
        """What the chat template reads of `thinking`."""
        template = engine.model.chat_template
        reads = template is not None and any("enable_thinking" in text for text in template.templates.values())
        return {"enable_thinking": self.thinks} if reads else {}

    def submit(self, engine: Engine, deadline: float | None) -> Request:
        """Queue the request."""
        options = self.template_options(engine)
        return engine.chat(self.messages, self.params, template_options=options, deadline=deadline, **self.tools)


def translate(body: Mapping[str, Any], *, counts: bool = False) -> MessagesRequest:
    """Check a body and translate it.

    Args:
        body: The parsed JSON object.
        counts: Whether it asks for the number of tokens only.

    Raises:
        InvalidRequestError: If a parameter is missing, wrong, unknown or unsupported.
    """
    given = {name: value for name, value in body.items() if value is not None}
    known = COUNTED if counts else HONOURED
    for name in given:
        if name not in known and name not in WITHOUT_EFFECT:
            raise InvalidRequestError(f"{name}: this parameter is unknown or not supported", name, "unknown_parameter")
    for name in ("model", "messages") if counts else ("model", "messages", "max_tokens"):
        if name not in given:
            raise InvalidRequestError(f"{name}: this parameter is required", name, "missing_required_parameter")
    for name, kind, expected in (("model", str, "a string"), ("stream", bool, "a boolean")):
        if not isinstance(given.get(name, kind()), kind):
            raise wrong_type(name, given[name], expected)
    thinks, budget = _thinking(given.get("thinking"))
    return MessagesRequest(
        [*_system(given.get("system")), *_messages(given["messages"])],
        _params(given, budget),
        _tools(given),
        thinks,
        given["model"],
        given.get("stream", False),
        tuple(name for name in WITHOUT_EFFECT if name in given),
    )


def _params(given: Mapping[str, Any], budget: int | None) -> SamplingParams:
    params = SamplingParams()
    for name, field in SAMPLING.items():
        if name in given and given[name] != []:
            try:
                params = params.updated({field: given[name]})
            except ArgumentTypeError as error:
                raise InvalidRequestError(str(error).replace(field, name, 1), name, "invalid_type") from None
            except ArgumentError as error:
                raise InvalidRequestError(str(error).replace(field, name, 1), name, "invalid_value") from None
    return params if budget is None else params.updated({"reasoning_budget": budget})


def _thinking(value: object) -> tuple[bool, int | None]:
    """Whether the model may reason, and for how many tokens."""
    if value is None:
        return False, None
    if not isinstance(value, dict):
        raise wrong_type("thinking", value, "an object")
    kind, budget = value.get("type"), value.get("budget_tokens")
    if kind not in THINKING:
        raise InvalidRequestError(f"thinking.type is {kind!r}, expected {' or '.join(THINKING)}", "thinking")
    if kind != "enabled":
        return kind == "adaptive", None
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
        raise InvalidRequestError(f"thinking.budget_tokens is {budget!r}, expected a number of tokens", "thinking")
    return True, budget


def _tools(given: Mapping[str, Any]) -> dict[str, Any]:
    """Tools in OpenAI's form, and the choice among them."""
    tools = given.get("tools", [])
    if not isinstance(tools, list):
        raise wrong_type("tools", tools, "an array")
    found: dict[str, Any] = {"tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]} if tools else {}
    choice = given.get("tool_choice")
    if choice is not None:
        if not isinstance(choice, dict):
            raise wrong_type("tool_choice", choice, "an object")
        kind = choice.get("type")
        if not isinstance(kind, str) or (kind != "tool" and kind not in CHOICES):
            expected = " or ".join((*CHOICES, "tool"))
            raise InvalidRequestError(f"tool_choice.type is {kind!r}, expected {expected}", "tool_choice")
        found["tool_choice"] = {"name": choice.get("name")} if kind == "tool" else CHOICES[kind]
        only_one = choice.get("disable_parallel_tool_use", False)
        if not isinstance(only_one, bool):
            raise wrong_type("tool_choice.disable_parallel_tool_use", only_one, "true or false")
        found["parallel_tool_calls"] = not only_one
    try:
        if found:
            chosen_tools(ToolOptions(**{"tools": [], **found}))
    except ArgumentError as error:
        raise InvalidRequestError(str(error), "tools") from None
    return found


def _tool(tool: object, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise wrong_type(where, tool, "an object")
    if tool.get("type", "custom") not in ("custom", None):
        message = f"{where}.type is {tool['type']!r}: only tools that the client runs are supported"
        raise InvalidRequestError(message, where, "unsupported_value")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema", {"type": "object"})}
    if tool.get("description") is not None:
        if not isinstance(tool["description"], str):
            raise wrong_type(f"{where}.description", tool["description"], "a string")
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


# ---- messages


def _system(value: object) -> list[dict[str, Any]]:
    return [] if value is None else [{"role": "system", "content": _text(value, "system")}]


def _messages(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise wrong_type("messages", value, "an array")
    if not value:
        raise InvalidRequestError("messages is empty: expected at least one message", "messages", "invalid_value")
    return [made for i, message in enumerate(value) for made in _message(message, f"messages[{i}]")]


def _message(message: object, where: str) -> list[dict[str, Any]]:
    """A message as templates read it. Results of tools become messages of their own."""
    if not isinstance(message, dict):
        raise wrong_type(where, message, "an object")
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise InvalidRequestError(f"{where}.role is {role!r}, expected user or assistant", where, "invalid_value")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = _blocks(content, f"{where}.content")
    return _answer(blocks, where) if role == "assistant" else _turn(blocks, where)


def _turn(blocks: Sequence[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    results, texts = [], []
    for i, block in enumerate(blocks):
        place = f"{where}.content[{i}]"
        if block.get("type") == "tool_result":
            if not isinstance(block.get("tool_use_id"), str):
                raise wrong_type(f"{place}.tool_use_id", block.get("tool_use_id"), "a string")
            content = block.get("content")
            text = "" if content is None else _text(content, f"{place}.content")
            results.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text})
        else:
            texts.append(_block_text(block, place))
    return [*results, *([{"role": "user", "content": "\n".join(texts)}] if texts else [])]


def _answer(blocks: Sequence[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        place = f"{where}.content[{i}]"
        kind = block.get("type")
        if kind == "thinking":
            if not isinstance(block.get("thinking"), str):
                raise wrong_type(f"{place}.thinking", block.get("thinking"), "a string")
            thoughts.append(block["thinking"])
        elif kind == "tool_use":
            for name in ("id", "name"):
                if not isinstance(block.get(name), str):
                    raise wrong_type(f"{place}.{name}", block.get(name), "a string")
            arguments = json.dumps(_input(block, place), ensure_ascii=False)
            function = {"name": block["name"], "arguments": arguments}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif kind != "redacted_thinking":
            texts.append(_block_text(block, place))
    found: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        found["reasoning_content"] = "\n".join(thoughts)
    if calls:
        found["tool_calls"] = calls
    return [found]


def _input(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    found = block.get("input", {})
    if not isinstance(found, dict):
        raise wrong_type(f"{where}.input", found, "an object")
    return found


def _text(value: object, where: str) -> str:
    if isinstance(value, str):
        return value
    return "\n".join(_block_text(block, f"{where}[{i}]") for i, block in enumerate(_blocks(value, where)))


def _blocks(value: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise wrong_type(where, value, "a string or an array of blocks")
    for i, block in enumerate(value):
        if not isinstance(block, dict):
            raise wrong_type(f"{where}[{i}]", block, "an object")
    return value


def _block_text(block: Mapping[str, Any], where: str) -> str:
    if block.get("type") != "text":
        message = f"{where}.type is {block.get('type')!r}: this version does not read such blocks here"
        raise InvalidRequestError(message, where, "unsupported_value")
    if not isinstance(block.get("text"), str):
        raise wrong_type(f"{where}.text", block.get("text"), "a string")
    text: str = block["text"]
    return text
