"""Translates the bodies of Anthropic's Messages API into requests for an engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamac.engine.generation.reading import chosen_tools
from llamac.engine.prompts.prompt_ids import ToolOptions
from llamac.engine.sampling.params import SamplingParams
from llamac.engine.sampling.schemas import json_schema
from llamac.errors import ArgumentError, UnsupportedError
from llamac.guided.guides import Json
from llamac.openai import schemas
from llamac.openai.errors import InvalidRequestError, wrong_type
from llamac.openai.forms import Form, Ignored, Kinds, Schema
from llamac.openai.requests import template_text, updated
from llamac.openai.schemas import BOOLEAN, COUNT, FUNCTION, OBJECT, STRING, array, ref

if TYPE_CHECKING:
    from llamac.engine.batching.engine import Engine
    from llamac.engine.batching.request import Request

SAMPLING = {"max_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}
SAMPLING["stop_sequences"] = "stop"
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Reasoning efforts as chat templates name them.
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}
FAILED = "The tool failed"  # prefix of results with is_error, because templates have no other way to express errors

# ---- the forms of objects in bodies

Block = tuple[str, dict[str, Any]]  # the block's type, and its other fields
CACHED = ("cache_control",)
TEXT = Form({"text": STRING}, ("text",), no_effect=(*CACHED, "citations"))
TEXTS = Kinds({"text": TEXT})
_TEXT: Schema = {"anyOf": [STRING, array(TEXTS.schema)]}
TOOL_RESULT = Form(
    {"tool_use_id": STRING, "content": _TEXT, "is_error": BOOLEAN},
    ("tool_use_id",),
    no_effect=CACHED,
    texts={"is_error": f"the model reads {FAILED!r} before the content"},
)
TOOL_USE = Form(
    {"id": STRING, "name": STRING, "input": OBJECT},
    ("id", "name"),
    no_effect=CACHED,
    refused={"caller": ({"type": "direct"},)},
)
# The blocks of each role's messages.
BLOCKS = {
    "user": Kinds({"text": TEXT, "tool_result": TOOL_RESULT}),
    "assistant": Kinds(
        {
            "text": TEXT,
            "thinking": Form({"thinking": STRING}, ("thinking",), no_effect=("signature",)),
            "redacted_thinking": Form({}, no_effect=("data",)),
            "tool_use": TOOL_USE,
        }
    ),
}
MESSAGE = Form({"role": {"enum": list(BLOCKS)}, "content": {}}, ("role", "content"))
TOOL = Form(
    {
        "name": FUNCTION.honored["name"],
        "description": STRING,
        "input_schema": FUNCTION.honored["parameters"],
        "strict": BOOLEAN,
    },
    ("name",),
    no_effect=(*CACHED, "eager_input_streaming"),
    refused={"allowed_callers": (["direct"],), "defer_loading": (False,), "input_examples": ([],)},
)
TOOLS = Kinds({"custom": TOOL}, default="custom", hint=": only tools that the client runs are supported")
_CHOICE = Form({"disable_parallel_tool_use": BOOLEAN})
TOOL_CHOICES = Kinds(
    {
        **dict.fromkeys(CHOICES, _CHOICE),
        "tool": Form({"name": STRING, **_CHOICE.honored}, ("name",)),
    }
)
_SHOWN: Mapping[str, Schema] = {"display": {"enum": ["summarized", "omitted"]}}
_SHOWN_TEXT = {"display": "`omitted` leaves the thinking out of the answer; it is never summarized"}
THINKING = Kinds(
    {
        "enabled": Form({"budget_tokens": COUNT, **_SHOWN}, ("budget_tokens",), texts=_SHOWN_TEXT),
        "adaptive": Form(_SHOWN, texts=_SHOWN_TEXT),
        "disabled": Form({}),
    }
)
OUTPUT_FORMATS = Kinds({"json_schema": Form({"schema": OBJECT}, ("schema",))})
OUTPUT_CONFIG = Form(
    {"effort": {"enum": list(EFFORTS)}, "format": OUTPUT_FORMATS.schema},
    refused={"task_budget": ()},
    texts={"effort": "passed to templates that read `reasoning_effort`, otherwise without effect"},
)
KEEPS_ALL = ("all", {"type": "all"})
EDITS = Kinds(
    {"clear_thinking_20251015": Form({"keep": {"enum": list(KEEPS_ALL)}}, ("keep",))},
    hint=": the server does not edit conversations",
)
CONTEXT_MANAGEMENT = Form({"edits": array(EDITS.schema)})

_EFFECTLESS = (
    *("metadata", "service_tier", "cache_control", "inference_geo", "speed", "user_profile_id"),
    "diagnostics",
)
COUNTED: dict[str, Schema] = {
    "model": STRING,
    "messages": array(ref("Message"), minItems=1),
    "system": _TEXT,
    "tools": array(ref("Tool")),
    "tool_choice": TOOL_CHOICES.schema,
    "thinking": THINKING.schema,
    "output_config": OUTPUT_CONFIG.schema,
    "context_management": CONTEXT_MANAGEMENT.schema,
}
_MEANINGS = {
    **schemas.TEXTS,
    **dict.fromkeys(SAMPLING, "as in SamplingParams"),
    "stop_sequences": "as `stop` in SamplingParams",
    "messages": "text, thinking, tool calls and their results",
    "system": "a string, or parts of the type `text`",
    "tools": "tools that the client runs",
    "tool_choice": "`auto`, `any`, `none` or `tool`, and `disable_parallel_tool_use`",
    "thinking": "`enabled` with a budget, `adaptive`, or `disabled`, the default if the template supports it",
    "output_config": "`effort`, and a JSON schema as `format`; `task_budget` is refused",
    "context_management": "only edits that change nothing: `clear_thinking_20251015` that keeps everything",
    "speed": "the server has one speed",
    "cache_control": "prefixes are always cached",
}
COUNT_BODY = Form(COUNTED, ("model", "messages"), no_effect=_EFFECTLESS, texts=_MEANINGS)
_ELSEWHERE = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "output_format": "output_config.format",
}
BODY = Form(
    {
        **COUNTED,
        "stream": BOOLEAN,
        **{name: json_schema(field) for name, field in SAMPLING.items() if field != "stop"},
        "stop_sequences": array({**STRING, "minLength": 1}),
    },
    ("model", "messages", "max_tokens"),
    no_effect=_EFFECTLESS,
    texts=_MEANINGS,
    elsewhere=_ELSEWHERE,
)
_LEAST_BLOCKS: dict[str, dict[str, int]] = {"user": {"minItems": 1}, "assistant": {}}
# Shared schemas of the OpenAPI document, by name.
COMPONENTS: dict[str, Schema] = {
    "Message": {
        "anyOf": [
            MESSAGE.schema_with(
                {"role": {"const": role}, "content": {"anyOf": [STRING, array(blocks.schema, **_LEAST_BLOCKS[role])]}},
            )
            for role, blocks in BLOCKS.items()
        ]
    },
    "Tool": TOOLS.schema,
}


# ---- requests


@dataclass(frozen=True)
class MessagesRequest:
    """A validated body.

    Attributes:
        messages: The conversation in the format of chat templates.
        params: The sampling parameters.
        tools: Arguments of `Engine.chat` about tools.
        thinks: Whether the model may reason before it answers; None: not specified.
        shows_thoughts: Whether the answer includes the reasoning.
        effort: The reasoning effort as chat templates name it, or None.
        model: The requested model.
        stream: Whether to stream the answer.
        ignored: Names of parameters that have no effect on any model.
    """

    messages: list[dict[str, Any]]
    params: SamplingParams
    tools: Mapping[str, Any]
    thinks: bool | None
    shows_thoughts: bool
    effort: str | None
    model: str
    stream: bool
    ignored: tuple[str, ...]

    def template_options(self, engine: Engine) -> dict[str, Any]:
        """Return the template variables for `thinking` and the effort that the chat template reads."""
        options: dict[str, Any] = {"enable_thinking": bool(self.thinks)}
        if self.effort is not None:
            options["reasoning_effort"] = self.effort
        text = template_text(engine)
        return {name: value for name, value in options.items() if name in text}

    def without_effect(self, engine: Engine) -> tuple[str, ...]:
        """Return the names of parameters without effect, including those that the chat template does not read."""
        text = template_text(engine)
        found = list(self.ignored)
        if self.thinks is not None and self.params.reasoning_budget is None and "enable_thinking" not in text:
            found.append("thinking")
        if self.effort is not None and "reasoning_effort" not in text:
            found.append("output_config.effort")
        return tuple(found)

    def submit(self, engine: Engine, deadline: float | None) -> Request:
        """Queue the request."""
        options = self.template_options(engine)
        return engine.chat(self.messages, self.params, template_options=options, deadline=deadline, **self.tools)


def translate(body: Mapping[str, Any], *, counts: bool = False) -> MessagesRequest:
    """Check a body and translate it.

    Args:
        body: The parsed JSON object.
        counts: Whether the request only counts tokens.

    Raises:
        InvalidRequestError: If a parameter is missing, wrong, unknown or unsupported.
    """
    ignored = Ignored()
    given = (COUNT_BODY if counts else BODY).read(body, "", ignored)
    thinks, shown, budget = _thinking(given.get("thinking"), ignored)
    effort, guide = _output(given.get("output_config", {}), ignored)
    _check_edits(given.get("context_management"), ignored)
    return MessagesRequest(
        [*_system(given.get("system"), ignored), *_messages(given["messages"], ignored)],
        _params(given, {"reasoning_budget": budget, "guide": guide}),
        _tools(given, ignored),
        thinks,
        shown,
        effort,
        given["model"],
        given.get("stream", False),
        ignored.names,
    )


def _params(given: Mapping[str, Any], others: Mapping[str, Any]) -> SamplingParams:
    params = SamplingParams()
    for name, field in SAMPLING.items():
        if name in given and given[name] != []:
            params = updated(params, field, name, given[name])
    return params.updated({name: value for name, value in others.items() if value is not None})


def _thinking(value: object, ignored: Ignored) -> tuple[bool | None, bool, int | None]:
    """Return whether the model may reason, whether the answer shows the reasoning, and its token budget."""
    if value is None:
        return None, True, None
    kind, found = THINKING.read(value, "thinking", ignored)
    return kind != "disabled", found.get("display") != "omitted", found.get("budget_tokens")


def _output(value: object, ignored: Ignored) -> tuple[str | None, Json | None]:
    """Return the effort, and the guide for a format."""
    given = OUTPUT_CONFIG.read(value, "output_config", ignored)
    effort = EFFORTS[given["effort"]] if "effort" in given else None
    if "format" not in given:
        return effort, None
    name = "output_config.format"
    _, form = OUTPUT_FORMATS.read(given["format"], name, ignored)
    try:
        return effort, Json(form["schema"])
    except ArgumentError as error:
        raise InvalidRequestError(f"{name}: {error}", name, "invalid_value") from None
    except UnsupportedError as error:
        raise InvalidRequestError(f"{name}: {error}", name, "unsupported_parameter") from None


def _check_edits(value: object, ignored: Ignored) -> None:
    """Reject edits of the conversation, except those that keep all of it."""
    if value is not None:
        name = "context_management"
        for i, edit in enumerate(CONTEXT_MANAGEMENT.read(value, name, ignored).get("edits", ())):
            EDITS.read(edit, f"{name}.edits[{i}]", ignored)
        ignored.add(name)


def _tools(given: Mapping[str, Any], ignored: Ignored) -> dict[str, Any]:
    """Return the tools in OpenAI's format, and the tool choice."""
    tools = [_tool(tool, f"tools[{i}]", ignored) for i, tool in enumerate(given.get("tools", []))]
    found: dict[str, Any] = {"tools": tools} if tools else {}
    if "tool_choice" in given:
        kind, choice = TOOL_CHOICES.read(given["tool_choice"], "tool_choice", ignored)
        found["tool_choice"] = {"name": choice["name"]} if kind == "tool" else CHOICES[kind]
        found["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use", False)
    try:
        if found:
            chosen_tools(ToolOptions(**{"tools": [], **found}))
    except ArgumentError as error:
        param = "tools" if str(error).startswith("tools") else "tool_choice"
        raise InvalidRequestError(str(error), param, "invalid_value") from None
    return found


def _tool(tool: object, where: str, ignored: Ignored) -> dict[str, Any]:
    function = TOOLS.read(tool, where, ignored)[1]
    function["parameters"] = function.pop("input_schema", {"type": "object"})
    return {"type": "function", "function": function}


# ---- messages


def _system(value: object, ignored: Ignored) -> list[dict[str, Any]]:
    return [] if value is None else [{"role": "system", "content": _text(value, "system", ignored)}]


def _messages(value: list[Any], ignored: Ignored) -> list[dict[str, Any]]:
    if not value:
        raise InvalidRequestError("messages is empty: expected at least one message", "messages", "invalid_value")
    return [made for i, message in enumerate(value) for made in _message(message, f"messages[{i}]", ignored)]


def _message(message: object, where: str, ignored: Ignored) -> list[dict[str, Any]]:
    """Convert a message to the format of templates. Tool results become separate messages."""
    given = MESSAGE.read(message, where, ignored)
    role, content = given["role"], given["content"]
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = _blocks(BLOCKS[role], content, f"{where}.content", ignored)
    return _answer(blocks) if role == "assistant" else _turn(blocks, f"{where}.content", ignored)


def _turn(blocks: list[Block], where: str, ignored: Ignored) -> list[dict[str, Any]]:
    if not blocks:
        raise InvalidRequestError(f"{where} is empty: expected at least one block", where, "invalid_value")
    results, texts = [], []
    for i, (kind, block) in enumerate(blocks):
        if kind == "text":
            texts.append(block["text"])
            continue
        text = _text(block.get("content", ""), f"{where}[{i}].content", ignored)
        if block.get("is_error"):
            text = f"{FAILED}: {text}" if text else f"{FAILED}."
        results.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text})
    return [*results, *([{"role": "user", "content": "\n".join(texts)}] if texts else [])]


def _answer(blocks: list[Block]) -> list[dict[str, Any]]:
    texts, thoughts, calls = [], [], []
    for kind, block in blocks:
        if kind == "thinking":
            thoughts.append(block["thinking"])
        elif kind == "tool_use":
            function = {"name": block["name"], "arguments": json.dumps(block.get("input", {}), ensure_ascii=False)}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif kind == "text":
            texts.append(block["text"])
    found: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        found["reasoning_content"] = "\n".join(thoughts)
    if calls:
        found["tool_calls"] = calls
    return [found]


def _text(value: object, where: str, ignored: Ignored) -> str:
    if isinstance(value, str):
        return value
    return "\n".join(block["text"] for _, block in _blocks(TEXTS, value, where, ignored))


def _blocks(kinds: Kinds, value: object, where: str, ignored: Ignored) -> list[Block]:
    if not isinstance(value, list):
        raise wrong_type(where, value, "a string or an array of blocks")
    return [kinds.read(block, f"{where}[{i}]", ignored) for i, block in enumerate(value)]
