"""Translates the bodies of OpenAI's API into requests for an engine.

A parameter that llamac does not support is refused, unless its value requests nothing (parameters.py). Batch files
and the server use this module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llamac.engine.generation.reading import chosen_tools
from llamac.engine.prompts.prompt_ids import ToolOptions
from llamac.engine.sampling.params import MAX_CANDIDATES, SamplingParams
from llamac.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from llamac.guided.guides import Json
from llamac.openai.errors import InvalidRequestError
from llamac.openai.forms import Ignored
from llamac.openai.inputs import read_messages, read_prompts, read_tool_choice, read_tools
from llamac.openai.parameters import NOT_VARIABLES, PARAMETERS, VARIABLE, Endpoint, body_form
from llamac.openai.schemas import FORMATS, JSON_SCHEMA, STREAMING

if TYPE_CHECKING:
    from llamac.engine.batching.engine import Engine
    from llamac.engine.batching.request import Request

ENDPOINTS: dict[str, Endpoint] = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
COMPLETION_TOKENS = 16  # max_tokens of /v1/completions if the body does not set it, as in OpenAI's API
BAN = -100  # the bias of a token that must not occur, as in OpenAI's API
MAX_DIGITS = 9  # of a token id, as in the schema of `logit_bias`

# What messages about Python's types say, in terms of JSON.
JSON_TERMS = {
    "a str or a sequence of str": "a string or an array of strings",
    "a sequence of token ids": "an array of token ids",
    "a dict from token ids to numbers": "an object with numbers by token id",
    "a str": "a string",
    "not str": "not a string",
    "not int": "not a number",
    "not float": "not a number",
    "not bool": "not a boolean",
    "not list": "not an array",
    "not dict": "not an object",
    "not NoneType": "not null",
}
JSON_TERM = re.compile("|".join(JSON_TERMS))

SAMPLING = tuple(parameter.name for parameter in PARAMETERS if parameter.is_sampling)
TOOLS = ("tools", "tool_choice", "parallel_tool_calls")  # parameters of `Engine.chat` about tools
LENGTHS = ("max_tokens", "max_completion_tokens")


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
            options = {**effort_options(engine, self.reasoning_effort), **self.template_options}
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
        InvalidRequestError: If there is a suffix, and the model has no such tokens.
    """
    if request.suffix is None:
        return request.inputs
    from llamac.openai.infill import infill_prompt

    try:
        return [infill_prompt(engine.model, prompt, request.suffix) for prompt in request.inputs]
    except UnsupportedError as error:
        raise InvalidRequestError(str(error), "suffix", "unsupported_value") from None


def without_effect(request: GenerationRequest, engine: Engine) -> tuple[str, ...]:
    """The parameters of a request that have no effect, those included that the model's chat template does not read."""
    return (*request.without_effect, *unread_options(engine, request.reasoning_effort, request.template_options))


def unread_options(engine: Engine, effort: str | None, options: Mapping[str, Any]) -> list[str]:
    """The names of the parameters for the chat template that it does not read."""
    known = set(re.findall(r"\w+", template_text(engine))) if options else ()
    found = ["reasoning_effort"] if effort is not None and not effort_options(engine, effort) else []
    return found + [f"chat_template_kwargs.{name}" for name in options if name not in known]


def template_text(engine: Engine) -> str:
    """The code of the model's chat templates; empty if it has none."""
    template = engine.model.chat_template
    return "" if template is None else "\n".join(template.templates.values())


def effort_options(engine: Engine, effort: str | None) -> dict[str, Any]:
    """What the chat template reads of a reasoning effort. Models that do not reason have nothing to turn on or off."""
    if effort is None:
        return {}
    text = template_text(engine)
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
    ignored = Ignored()
    given = body_form(endpoint).read(body, "", ignored)
    echo, stream = given.get("echo", False), given.get("stream", False)
    only_echo = echo and given.get("max_tokens") == 0
    params = _params(endpoint, {**given, "max_tokens": 1} if only_echo else given, ignored)
    if echo and params.context_overflow not in (None, "error"):
        raise InvalidRequestError("echo needs the whole prompt: omit context_overflow", "echo", "invalid_value")
    if echo and params.logprobs is not None:
        params = params.updated({"prompt_logprobs": params.logprobs})
    is_chat = endpoint == "chat"
    inputs: Sequence[Any] = [read_messages(given["messages"], ignored)] if is_chat else read_prompts(given["prompt"])
    _check_count(params, inputs, stream=stream)
    return GenerationRequest(
        endpoint,
        inputs,
        params,
        tools=_tools(given, ignored) if is_chat else {},
        model=given.get("model"),
        reasoning_effort=given.get("reasoning_effort"),
        template_options=template_options(given.get("chat_template_kwargs", {})),
        echo=echo,
        only_echo=only_echo,
        suffix=_suffix(given.get("suffix"), inputs, echo=echo),
        stream=stream,
        include_usage=_include_usage(given.get("stream_options"), ignored, stream=stream),
        without_effect=ignored.names,
    )


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


def _tools(given: Mapping[str, Any], ignored: Ignored) -> dict[str, Any]:
    chosen = {name: given[name] for name in TOOLS if name in given}
    try:
        if "tools" in chosen:
            chosen["tools"] = read_tools(chosen["tools"], ignored)
        if "tool_choice" in chosen:
            chosen["tool_choice"] = read_tool_choice(chosen["tool_choice"], ignored)
        if chosen:
            chosen_tools(ToolOptions(**{"tools": [], **chosen}))
    except ArgumentError as error:
        param = "tools" if str(error).startswith("tools") else "tool_choice"
        raise InvalidRequestError(str(error), param, "invalid_value") from None
    return chosen


def template_options(given: dict[str, Any]) -> dict[str, Any]:
    """Variables of a chat template, checked.

    Raises:
        InvalidRequestError: If one of them is not a variable.
    """
    name = "chat_template_kwargs"
    for key in given:
        if key in NOT_VARIABLES or not VARIABLE.fullmatch(key):
            message = f"{name} has {key!r}, which is not a variable of the template"
            raise InvalidRequestError(message, name, "invalid_value")
    return given


def _suffix(value: str | None, inputs: Sequence[Any], *, echo: bool) -> str | None:
    if not value:
        return None
    if echo:
        raise InvalidRequestError("suffix and echo cannot be combined", "suffix", "invalid_value")
    if not all(isinstance(prompt, str) for prompt in inputs):
        raise InvalidRequestError("suffix needs a prompt that is a string", "suffix", "invalid_value")
    return value


def _include_usage(value: object, ignored: Ignored, *, stream: bool) -> bool:
    if value is None:
        return False
    given = STREAMING.read(value, "stream_options", ignored)
    if not stream:
        raise InvalidRequestError("stream_options needs stream true", "stream_options", "invalid_value")
    wanted: bool = given.get("include_usage", False)
    return wanted


def _params(endpoint: Endpoint, given: Mapping[str, Any], ignored: Ignored) -> SamplingParams:
    lengths = [name for name in LENGTHS if name in given]
    if len(lengths) > 1:
        message = "max_tokens and max_completion_tokens cannot be combined"
        raise InvalidRequestError(message, LENGTHS[0], "invalid_value")
    values = {name: given[name] for name in SAMPLING if name in given}
    if "logit_bias" in values:
        biases = read_biases(values["logit_bias"], "logit_bias")
        values["logit_bias"] = {token: float("-inf") if bias == BAN else bias for token, bias in biases.items()}
    if values.get("stop") == []:
        del values["stop"]
    params = SamplingParams(logprobs=_logprobs(endpoint, given))
    for name, value in values.items():
        params = updated(params, name, name, value)
    if (guide := _guide(given.get("response_format"), ignored)) is not None:
        params = params.updated({"guide": guide})
    if lengths:
        return updated(params, "max_tokens", lengths[0], given[lengths[0]])
    return params if endpoint == "chat" else params.updated({"max_tokens": COMPLETION_TOKENS})


def _guide(value: object, ignored: Ignored) -> Json | None:
    """The guide that a `response_format` asks for."""
    if value is None:
        return None
    name = "response_format"
    kind, found = FORMATS.read(value, name, ignored)
    schema = None
    if kind == "json_schema":
        schema = JSON_SCHEMA.read(found["json_schema"], f"{name}.json_schema", ignored)["schema"]
    try:
        return None if kind == "text" else Json(schema)
    except ArgumentError as error:
        raise InvalidRequestError(f"{name}: {error}", name, "invalid_value") from None
    except UnsupportedError as error:
        raise InvalidRequestError(f"{name}: {error}", name, "unsupported_parameter") from None


def _logprobs(endpoint: Endpoint, given: Mapping[str, Any]) -> int | None:
    """How many of the most probable tokens to report; None: no log probabilities."""
    wanted: int | None = given.get("logprobs")
    if endpoint == "completions":
        return wanted
    top: int = given.get("top_logprobs", 0)
    if top and not wanted:
        raise InvalidRequestError("top_logprobs needs logprobs true", "top_logprobs", "invalid_value")
    return top if wanted else None


def read_biases(value: Mapping[str, Any], where: str) -> dict[int, Any]:
    """Biases by token: JSON has token ids as strings.

    Args:
        value: The object.
        where: Where it is in the body.

    Raises:
        InvalidRequestError: If a key is not a token id.
    """
    for key in value:
        if not key.isascii() or not key.isdigit() or len(key) > MAX_DIGITS:
            raise InvalidRequestError(f"{where} has the key {key!r}, expected a token id", where, "invalid_value")
    return {int(key): bias for key, bias in value.items()}


def updated(params: SamplingParams, field: str, name: str, value: object) -> SamplingParams:
    """Set a field of sampling parameters.

    Args:
        params: The parameters before.
        field: The field.
        name: What the body calls it.
        value: Its value.

    Raises:
        InvalidRequestError: If the value is wrong. The message has the name that the body has.
    """
    try:
        return params.updated({field: value})
    except ArgumentTypeError as error:
        message = JSON_TERM.sub(lambda found: JSON_TERMS[found[0]], str(error).replace(field, name, 1))
        raise InvalidRequestError(message, name, "invalid_type") from None
    except ArgumentError as error:
        raise InvalidRequestError(str(error).replace(field, name, 1), name, "invalid_value") from None
