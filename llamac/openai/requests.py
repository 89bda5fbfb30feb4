"""Translates the bodies of OpenAI's API into requests for an engine.

A parameter that llamac does not compute is refused by name, unless its value asks for nothing (parameters.py). Batch
files and the server use this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llamac.engine.generation.reading import chosen_tools
from llamac.engine.prompts.prompt_ids import ToolOptions
from llamac.engine.sampling.params import MAX_CANDIDATES, SamplingParams
from llamac.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from llamac.guided.guides import Json
from llamac.openai.errors import InvalidRequestError, wrong_type
from llamac.openai.inputs import read_messages, read_prompts, read_tools
from llamac.openai.parameters import EFFORTS, MAX_LOGPROBS, NOT_VARIABLES, PARAMETERS, Endpoint, parameters_of

if TYPE_CHECKING:
    from llamac.engine.batching.engine import Engine
    from llamac.engine.batching.request import Request

ENDPOINTS: dict[str, Endpoint] = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
COMPLETION_TOKENS = 16  # max_tokens of /v1/completions if the body does not set it, as in OpenAI's API

SAMPLING = tuple(parameter.name for parameter in PARAMETERS if parameter.is_sampling)
TOOLS = ("tools", "tool_choice", "parallel_tool_calls")  # parameters of `Engine.chat` about tools
FORMATS = ("text", "json_object", "json_schema")  # of response_format
LENGTHS = ("max_tokens", "max_completion_tokens")
STREAM_OPTIONS = ("include_usage", "include_obfuscation")


@dataclass(frozen=True)
class GenerationRequest:
    """A body that has been checked.

    Attributes:
        endpoint: What it was sent to.
        inputs: One list of messages for "chat"; texts or lists of token ids for "completions".
        params: The sampling parameters.
        tools: Arguments of `Engine.chat` about tools.
        model: The model that it names, or None.
        reasoning_effort: One of `EFFORTS`, or None.
        template_options: Variables of the chat template.
        echo: Whether the text begins with the prompt.
        only_echo: Whether it has nothing but the prompt: `max_tokens` is 0.
        suffix: The text after the one to fill in, or None.
        stream: Whether to send the answer in pieces.
        include_usage: Whether a stream ends with the usage.
        without_effect: Parameters that have no effect.
    """

    endpoint: Endpoint
    inputs: Sequence[Any]
    params: SamplingParams
    tools: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    reasoning_effort: str | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    echo: bool = False
    only_echo: bool = False
    suffix: str | None = None
    stream: bool = False
    include_usage: bool = False
    without_effect: tuple[str, ...] = ()

    def submit(self, engine: Engine, deadline: float | None = None) -> list[Request]:
        """Queue a request for each input. If one of them is refused, none is computed.

        Args:
            engine: The engine.
            deadline: As for `Engine.submit`.

        Raises:
            LlamacError: As for `Engine.submit` and `Engine.chat`.
        """
        if self.endpoint == "chat":
            options = {**_effort_options(engine, self.reasoning_effort), **self.template_options}
            chat = engine.chat
            return [chat(self.inputs[0], self.params, template_options=options, deadline=deadline, **self.tools)]
        found: list[Request] = []
        try:
            for prompt in prompts_of(self, engine):
                found.append(engine.submit(prompt, self.params, deadline=deadline))
        except BaseException:
            for request in found:
                request.cancel()
            raise
        return found

    @property
    def input_name(self) -> str:
        """The parameter that has the input."""
        return "messages" if self.endpoint == "chat" else "prompt"


def prompts_of(request: GenerationRequest, engine: Engine) -> Sequence[str | list[int]]:
    """The prompts of a completion. One with a suffix is made of the model's tokens for that.

    Raises:
        UnsupportedError: If there is a suffix, and the model has no such tokens.
    """
    if request.suffix is None:
        return request.inputs
    from llamac.openai.infill import infill_prompt

    return [infill_prompt(engine.model, prompt, request.suffix) for prompt in request.inputs]


def without_effect(request: GenerationRequest, engine: Engine) -> tuple[str, ...]:
    """The parameters of a request that have no effect, those included that the model's chat template does not read."""
    found = list(request.without_effect)
    if request.reasoning_effort is not None and not _effort_options(engine, request.reasoning_effort):
        found.append("reasoning_effort")
    template = engine.model.chat_template
    text = "" if template is None else "\n".join(template.templates.values())
    found += [f"chat_template_kwargs.{name}" for name in request.template_options if name not in text]
    return tuple(found)


def _effort_options(engine: Engine, effort: str | None) -> dict[str, Any]:
    """What the chat template reads of a reasoning effort. Models that do not reason have nothing to turn on or off."""
    template = engine.model.chat_template
    if effort is None or template is None:
        return {}
    text = "\n".join(template.templates.values())
    found: dict[str, Any] = {}
    if "reasoning_effort" in text:
        found["reasoning_effort"] = effort
    if "enable_thinking" in text:
        found["enable_thinking"] = effort != "none"
    return found


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
    without_effect = _check_names(endpoint, given)
    if not isinstance(given.get("model", ""), str):
        raise wrong_type("model", given["model"], "a string")
    if own not in given:
        raise InvalidRequestError(f"the body has no {own!r}", own, "missing_required_parameter")
    echo, stream = (_boolean(name, given.get(name, False)) for name in ("echo", "stream"))
    only_echo = echo and given.get("max_tokens") == 0
    params = _params(endpoint, {**given, "max_tokens": 1} if only_echo else given)
    if echo and params.context_overflow not in (None, "error"):
        raise InvalidRequestError("echo needs the whole prompt: leave context_overflow out", "echo", "invalid_value")
    if echo and params.logprobs is not None:
        params = params.updated({"prompt_logprobs": params.logprobs})
    inputs: Sequence[Any] = [read_messages(given[own])] if endpoint == "chat" else read_prompts(given[own])
    _check_count(params, inputs, stream=stream)
    return GenerationRequest(
        endpoint,
        inputs,
        params,
        tools=_tools(given) if endpoint == "chat" else {},
        model=given.get("model"),
        reasoning_effort=_effort(given.get("reasoning_effort")),
        template_options=_template_options(given.get("chat_template_kwargs", {})),
        echo=echo,
        only_echo=only_echo,
        suffix=_suffix(given.get("suffix"), inputs, echo=echo),
        stream=stream,
        include_usage=_include_usage(given.get("stream_options"), stream=stream),
        without_effect=without_effect,
    )


def _check_names(endpoint: Endpoint, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Refuse parameters that would change the answer; return those that have no effect on it."""
    known = parameters_of(endpoint)
    for name, value in given.items():
        if name not in known:
            raise InvalidRequestError(f"unknown parameter {name!r}", name, "unknown_parameter")
        if known[name].effect == "refused" and not is_one_of(value, known[name].neutral):
            values = " or ".join(map(repr, known[name].neutral))
            hint = f", or set it to {values}" if values else ""
            message = f"this version does not support {name!r}: leave it out{hint}"
            raise InvalidRequestError(message, name, "unsupported_parameter")
    return tuple(name for name in given if known[name].effect == "no effect")


def is_one_of(value: object, neutral: Sequence[object]) -> bool:
    """Whether a value is one of several. A number is no boolean."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)


def _check_count(params: SamplingParams, inputs: Sequence[Any], *, stream: bool) -> None:
    candidates = max(params.n or 1, params.best_of or 1)
    if len(inputs) * candidates > MAX_CANDIDATES:
        message = f"{len(inputs)} prompts with {candidates} candidates each: expected at most {MAX_CANDIDATES} together"
        raise InvalidRequestError(message, "n", "invalid_value")
    if stream and ((params.best_of or 1) > (params.n or 1) or (params.beam_width or 1) > 1):
        name = "beam_width" if (params.beam_width or 1) > 1 else "best_of"
        message = f"{name} chooses among candidates when all of them have ended: it cannot be used with stream"
        raise InvalidRequestError(message, name, "invalid_value")


# ---- parameters


def _tools(given: Mapping[str, Any]) -> dict[str, Any]:
    chosen = {name: given[name] for name in TOOLS if name in given}
    try:
        if chosen.get("tools"):
            read_tools(chosen["tools"])
        if chosen.get("tools") or "tool_choice" in chosen or "parallel_tool_calls" in chosen:
            chosen_tools(ToolOptions(**{"tools": [], **chosen}))
    except ArgumentError as error:
        param = "tools" if str(error).startswith("tools") else "tool_choice"
        raise InvalidRequestError(str(error), param, "invalid_value") from None
    return chosen


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(name, value, "a boolean")
    return value


def _effort(value: object) -> str | None:
    if value is not None and value not in EFFORTS:
        message = f"reasoning_effort is {value!r}, expected {' or '.join(EFFORTS)}"
        raise InvalidRequestError(message, "reasoning_effort", "invalid_value")
    return value if isinstance(value, str) else None


def _template_options(value: object) -> dict[str, Any]:
    name = "chat_template_kwargs"
    if not isinstance(value, dict):
        raise wrong_type(name, value, "an object")
    for key in value:
        if key in NOT_VARIABLES:
            message = f"{name} has {key!r}, which is not a variable of the template"
            raise InvalidRequestError(message, name, "invalid_value")
    return value


def _suffix(value: object, inputs: Sequence[Any], *, echo: bool) -> str | None:
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise wrong_type("suffix", value, "a string")
    if echo:
        raise InvalidRequestError("suffix and echo exclude each other", "suffix", "invalid_value")
    if not all(isinstance(prompt, str) for prompt in inputs):
        raise InvalidRequestError("suffix needs a prompt that is a string", "suffix", "invalid_value")
    return value


def _include_usage(value: object, *, stream: bool) -> bool:
    name = "stream_options"
    if value is None:
        return False
    if not isinstance(value, dict):
        raise wrong_type(name, value, "an object")
    if not stream:
        raise InvalidRequestError(f"{name} needs stream true", name, "invalid_value")
    unknown = next((key for key in value if key not in STREAM_OPTIONS), None)
    if unknown is not None:
        raise InvalidRequestError(f"unknown parameter '{name}.{unknown}'", f"{name}.{unknown}", "unknown_parameter")
    chosen = [_boolean(f"{name}.{key}", value.get(key) or False) for key in STREAM_OPTIONS]
    return chosen[0]


def _params(endpoint: Endpoint, given: Mapping[str, Any]) -> SamplingParams:
    lengths = [name for name in LENGTHS if name in given]
    if len(lengths) > 1:
        message = "max_tokens and max_completion_tokens exclude each other"
        raise InvalidRequestError(message, LENGTHS[0], "invalid_value")
    values = {name: given[name] for name in SAMPLING if name in given}
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
        raise wrong_type(name, value, "an object")
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
        raise wrong_type("logprobs", wanted, "a boolean")
    top = _number_of_logprobs("top_logprobs", given.get("top_logprobs", 0))
    if top and not wanted:
        raise InvalidRequestError("top_logprobs needs logprobs true", "top_logprobs", "invalid_value")
    return top if wanted else None


def _number_of_logprobs(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise wrong_type(name, value, "a whole number")
    if not 0 <= value <= MAX_LOGPROBS:
        raise InvalidRequestError(f"{name} is {value}, expected 0 to {MAX_LOGPROBS}", name, "invalid_value")
    return value


def _logit_bias(value: object) -> dict[int, Any]:
    """JSON has token ids as strings. A bias of -100 bans a token, as in OpenAI's API."""
    if not isinstance(value, dict):
        raise wrong_type("logit_bias", value, "an object")
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
