"""Translates the bodies of OpenAI's API into requests for an engine.

A parameter that llamac does not compute is refused by name, unless its value asks for nothing. Batch files use this
module, and a server can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from llamac.engine.prompts import ToolOptions
from llamac.engine.reading import chosen_tools
from llamac.engine.sampling import SamplingParams
from llamac.errors import ArgumentError, ArgumentTypeError, LlamacError, UnsupportedError
from llamac.guided.guides import Json

if TYPE_CHECKING:
    from llamac.engine.engine import Engine
    from llamac.engine.request import Request

Endpoint = Literal["chat", "completions"]
ENDPOINTS: dict[str, Endpoint] = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}

COMPLETION_TOKENS = 16  # max_tokens of /v1/completions if the body does not set it, as in OpenAI's API
ROLES = {"developer": "system"}  # names of roles that templates know under another name

# Parameters that do not change what is generated.
WITHOUT_EFFECT = frozenset(("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"))
# Parameters that this version does not compute, and the values, besides null, that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "stream": (False,),
    "stream_options": (),
    "suffix": ("",),
    "verbosity": (),
    "web_search_options": (),
}
# Parameters of `Engine.chat` about tools.
TOOLS: dict[Endpoint, tuple[str, ...]] = {
    "chat": ("tools", "tool_choice", "parallel_tool_calls"),
    "completions": (),
}
# Parameters of SamplingParams under their own names.
SAMPLING = (
    "temperature",
    "top_p",
    "seed",
    "stop",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "n",
    "best_of",
)
# Those that are not OpenAI's; vLLM's server has most of them.
EXTENSIONS = (
    *("top_k", "min_p", "typical_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_sequence_breakers", "xtc_probability", "xtc_threshold"),
    *("mirostat_tau", "mirostat_eta", "banned_tokens", "banned_strings", "reasoning_budget"),
    *("context_overflow", "context_keep", "candidate", "beam_width", "length_penalty", "early_stopping"),
)
LOGPROBS: dict[Endpoint, tuple[str, ...]] = {"chat": ("logprobs", "top_logprobs"), "completions": ("logprobs",)}
MAX_LOGPROBS = 20  # as in OpenAI's API
FORMATS = ("text", "json_object", "json_schema")  # of response_format
LENGTHS = ("max_tokens", "max_completion_tokens")


class InvalidRequestError(LlamacError, ValueError):
    """A body that cannot be computed.

    Attributes:
        param: The parameter that is wrong, or None.
        code: What is wrong with it, in a word that programs can compare.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@dataclass(frozen=True)
class GenerationRequest:
    """A body that has been checked.

    Attributes:
        endpoint: What it was sent to.
        input: Messages for "chat"; a text or token ids for "completions".
        params: The sampling parameters.
        tools: Arguments of `Engine.chat` about tools.
    """

    endpoint: Endpoint
    input: Any
    params: SamplingParams
    tools: Mapping[str, Any] = field(default_factory=dict)

    def submit(self, engine: Engine) -> Request:
        """Queue the request.

        Raises:
            LlamacError: As for `Engine.submit` and `Engine.chat`.
        """
        if self.endpoint == "chat":
            return engine.chat(self.input, self.params, **self.tools)
        return engine.submit(self.input, self.params)

    @property
    def input_name(self) -> str:
        """The parameter that has the input."""
        return "messages" if self.endpoint == "chat" else "prompt"


def translate(endpoint: Endpoint, body: Mapping[str, Any]) -> GenerationRequest:
    """Check a body and translate it.

    Args:
        endpoint: What it was sent to.
        body: The parsed JSON object.

    Raises:
        InvalidRequestError: If a parameter is missing, wrong, unknown or unsupported.
    """
    given = {name: value for name, value in body.items() if value is not None}
    own = "messages" if endpoint == "chat" else "prompt"
    known = {own, "model", "response_format", *SAMPLING, *EXTENSIONS, *LOGPROBS[endpoint], *TOOLS[endpoint]}
    known |= {*LENGTHS, *WITHOUT_EFFECT, *UNSUPPORTED}
    for name, value in given.items():
        if name not in known:
            raise InvalidRequestError(f"unknown parameter {name!r}", name, "unknown_parameter")
        if name in UNSUPPORTED and not _asks_for_nothing(value, UNSUPPORTED[name]):
            raise InvalidRequestError(_unsupported(name), name, "unsupported_parameter")
    if not isinstance(given.get("model", ""), str):
        raise _wrong_type("model", given["model"], "a string")
    if own not in given:
        raise InvalidRequestError(f"the body has no {own!r}", own, "missing_required_parameter")
    read: Callable[[Any], Any] = _messages if endpoint == "chat" else _prompt
    chosen = {name: given[name] for name in TOOLS[endpoint] if name in given}
    try:
        if chosen.get("tools") or "tool_choice" in chosen or "parallel_tool_calls" in chosen:
            chosen_tools(ToolOptions(**{"tools": [], **chosen}))
    except ArgumentError as error:
        param = "tools" if str(error).startswith("tools") else "tool_choice"
        raise InvalidRequestError(str(error), param, "invalid_value") from None
    return GenerationRequest(endpoint, read(given[own]), _params(endpoint, given), chosen)


def _asks_for_nothing(value: object, neutral: Sequence[object]) -> bool:
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)


def _unsupported(name: str) -> str:
    values = " or ".join(map(repr, UNSUPPORTED[name]))
    return f"this version does not support {name!r}: leave it out" + (f", or set it to {values}" if values else "")


def _params(endpoint: Endpoint, given: Mapping[str, Any]) -> SamplingParams:
    lengths = [name for name in LENGTHS if name in given]
    if len(lengths) > 1:
        raise InvalidRequestError("max_tokens and max_completion_tokens exclude each other", LENGTHS[0])
    values = {name: given[name] for name in (*SAMPLING, *EXTENSIONS) if name in given}
    if "logit_bias" in values:
        values["logit_bias"] = _logit_bias(values["logit_bias"])
    if values.get("stop") == []:
        del values["stop"]
    params = SamplingParams(logprobs=_logprobs(endpoint, given))
    for name, value in values.items():
        params = _updated(params, name, name, value)
    if (guide := _guide(given.get("response_format"))) is not None:
        params = params.updated({"guide": guide})
    if lengths:
        return _updated(params, "max_tokens", lengths[0], given[lengths[0]])
    return params if endpoint == "chat" else params.updated({"max_tokens": COMPLETION_TOKENS})


def _guide(value: object) -> Json | None:
    """The guide that a `response_format` asks for."""
    name = "response_format"
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _wrong_type(name, value, "an object")
    kind = value.get("type")
    if kind not in FORMATS:
        raise InvalidRequestError(f"{name}.type is {kind!r}, expected {' or '.join(FORMATS)}", name, "invalid_value")
    schema = None
    if kind == "json_schema":
        described = value.get("json_schema")
        if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
            message = f"{name}.json_schema has no 'schema', expected an object with a JSON schema"
            raise InvalidRequestError(message, name, "missing_required_parameter")
        schema = described["schema"]
    try:
        return None if kind == "text" else Json(schema)
    except ArgumentError as error:
        raise InvalidRequestError(f"{name}: {error}", name, "invalid_value") from None
    except UnsupportedError as error:
        raise InvalidRequestError(f"{name}: {error}", name, "unsupported_parameter") from None


def _logprobs(endpoint: Endpoint, given: Mapping[str, Any]) -> int | None:
    """How many of the most probable tokens to report; None: no log probabilities."""
    wanted = given.get("logprobs")
    if endpoint == "completions":
        return None if wanted is None else _number_of_logprobs("logprobs", wanted)
    if not isinstance(wanted, bool | None):
        raise _wrong_type("logprobs", wanted, "a boolean")
    top = _number_of_logprobs("top_logprobs", given.get("top_logprobs", 0))
    if top and not wanted:
        raise InvalidRequestError("top_logprobs needs logprobs true", "top_logprobs", "invalid_value")
    return top if wanted else None


def _number_of_logprobs(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong_type(name, value, "a whole number")
    if not 0 <= value <= MAX_LOGPROBS:
        raise InvalidRequestError(f"{name} is {value}, expected 0 to {MAX_LOGPROBS}", name, "invalid_value")
    return value


def _logit_bias(value: object) -> dict[int, Any]:
    """JSON has token ids as strings. A bias of -100 bans a token, as in OpenAI's API."""
    if not isinstance(value, dict):
        raise _wrong_type("logit_bias", value, "an object")
    found = {}
    for name, bias in value.items():
        if not name.isascii() or not name.isdigit() or len(name) > 10:
            message = f"logit_bias has the key {name!r}, expected a token id"
            raise InvalidRequestError(message, "logit_bias", "invalid_value")
        found[int(name)] = float("-inf") if bias == -100 else bias
    return found


def _updated(params: SamplingParams, field: str, name: str, value: object) -> SamplingParams:
    """Set a field from the parameter `name`."""
    try:
        return params.updated({field: value})
    except ArgumentTypeError as error:
        raise InvalidRequestError(str(error).replace(field, name, 1), name, "invalid_type") from None
    except ArgumentError as error:
        raise InvalidRequestError(str(error).replace(field, name, 1), name, "invalid_value") from None


def _wrong_type(name: str, value: object, expected: str) -> InvalidRequestError:
    found = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    kind = found.get(type(value), "a number")
    return InvalidRequestError(f"{name} is {kind}, expected {expected}", name, "invalid_type")


# ---- inputs


def _prompt(value: object) -> str | list[int]:
    """A text or token ids. A list with one of them is accepted as well."""
    if isinstance(value, list) and value and all(isinstance(item, str | list) for item in value):
        if len(value) > 1:
            message = f"prompt has {len(value)} prompts: this version accepts one per request"
            raise InvalidRequestError(message, "prompt", "unsupported_value")
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return value
    raise _wrong_type("prompt", value, "a string or an array of token ids")


def _messages(value: object) -> list[dict[str, Any]]:
    """Messages as chat templates read them: the content is a text."""
    if not isinstance(value, list):
        raise _wrong_type("messages", value, "an array of messages")
    if not value:
        raise InvalidRequestError("messages is empty: expected at least one message", "messages", "invalid_value")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _wrong_type(where, message, "an object")
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
            raise _wrong_type(f"{where}.{name}", given[name], "a string")
    given["role"] = ROLES.get(given["role"], given["role"])
    given["content"] = _text(given.get("content", ""), f"{where}.content")
    if "tool_calls" in given:
        _check_calls(given["tool_calls"], f"{where}.tool_calls")
    return given


def _check_calls(calls: object, where: str) -> None:
    """Check the calls of an earlier answer: each has a function with a name and arguments."""
    if not isinstance(calls, list):
        raise _wrong_type(where, calls, "an array")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            message = f"{where}[{index}] has no function with a name"
            raise InvalidRequestError(message, f"{where}[{index}]", "invalid_value")
        if not isinstance(function.get("arguments", ""), str):
            raise _wrong_type(f"{where}[{index}].function.arguments", function["arguments"], "a string with JSON")


def _text(content: object, where: str) -> str:
    """The text of a message. Parts are joined by line feeds."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong_type(where, content, "a string or an array of parts")
    texts = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        if not isinstance(part, dict):
            raise _wrong_type(place, part, "an object")
        if part.get("type") != "text":
            message = f"{place}.type is {part.get('type')!r}: this version reads parts of the type 'text' only"
            raise InvalidRequestError(message, place, "unsupported_value")
        if not isinstance(part.get("text"), str):
            raise _wrong_type(f"{place}.text", part.get("text"), "a string")
        texts.append(part["text"])
    return "\n".join(texts)
