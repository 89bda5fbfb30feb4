"""Builds the bodies of OpenAI's API from completions and errors."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from llamac import __version__
from llamac.engine.identity import identity_of, short_hash
from llamac.engine.sampling.params import CHECKS
from llamac.errors import (
    ArgumentError,
    ChatTemplateError,
    ContextFullError,
    DeviceError,
    LlamacError,
    OutOfMemoryError,
    QueueFullError,
    UnsupportedError,
)
from llamac.openai.errors import InvalidRequestError

if TYPE_CHECKING:
    from llamac.engine.batching.engine import Engine
    from llamac.engine.generation.logprobs import TokenLogprobs
    from llamac.engine.generation.output import Completion
    from llamac.engine.model import Model
    from llamac.openai.parameters import Endpoint
    from llamac.openai.requests import GenerationRequest

# OpenAI's name for each of llamac's finish reasons. Its API has only these two for plain text.
FINISH_REASONS = {"stop": "stop", "length": "length", "context": "length", "deadline": "length", "cancelled": "stop"}


def fingerprint(engine: Engine) -> str:
    """The `system_fingerprint`: it changes with llamac's version and with all that texts depend on besides a request.

    These are the model file, a tokenizer in place of its own, adapters, the number format of the KV cache, the
    numerics, and the context, which chooses the RoPE table of models that have two.
    """
    parts = (identity_of(engine.model), engine.kv_dtype, engine.numerics, engine.context)
    return f"llamac-{__version__}-{short_hash(*parts)}"


def completion_body(endpoint: Endpoint, completion: Completion, name: str, system: str, model: Model) -> dict[str, Any]:
    """The body of a successful response to one prompt or conversation, as for `answer_body`."""
    return _body(endpoint, choices_of(endpoint, [completion], model), [completion], name, system)


def answer_body(
    request: GenerationRequest, completions: Sequence[Completion], name: str, system: str, model: Model
) -> dict[str, Any]:
    """The body of a successful response.

    Args:
        request: The request.
        completions: The result for each of its inputs.
        name: The model's name.
        system: The `system_fingerprint`.
        model: The model, whose tokenizer has the texts of the tokens.
    """
    prompts = [echo_of(request, index, model) for index in range(len(request.inputs))] if request.echo else None
    choices = choices_of(request.endpoint, completions, model, prompts, only_echo=request.only_echo)
    return _body(request.endpoint, choices, completions, name, system, only_echo=request.only_echo)


def _body(
    endpoint: Endpoint,
    choices: list[dict[str, Any]],
    completions: Sequence[Completion],
    name: str,
    system: str,
    *,
    only_echo: bool = False,
) -> dict[str, Any]:
    return {
        "id": new_id("chatcmpl-" if endpoint == "chat" else "cmpl-"),
        "object": "chat.completion" if endpoint == "chat" else "text_completion",
        "created": int(time.time()),
        "model": name,
        "choices": choices,
        "usage": usage_body(completions, only_echo=only_echo),
        "system_fingerprint": system,
        "seed": completions[0].seed,
    }


def usage_body(completions: Sequence[Completion], *, only_echo: bool = False) -> dict[str, Any]:
    """The `usage` of a response: the tokens of all prompts and of all candidates."""
    usages = [completion.usage for completion in completions]
    counts = {
        name: sum(getattr(usage, name) for usage in usages)
        for name in ("prompt_tokens", "cached_tokens", "truncated_tokens", "shifted_tokens")
    }
    choices = [choice for completion in completions for choice in completion.choices]
    generated = 0 if only_echo else sum(choice.usage.completion_tokens for choice in choices)
    return {
        "prompt_tokens": counts["prompt_tokens"],
        "completion_tokens": generated,
        "total_tokens": counts["prompt_tokens"] + generated,
        "prompt_tokens_details": {"cached_tokens": counts["cached_tokens"]},
        **{name: counts[name] for name in ("truncated_tokens", "shifted_tokens") if counts[name]},
    }


@dataclass(frozen=True)
class Echo:
    """A prompt that is put before the text that continues it.

    Attributes:
        text: The prompt as text.
        ids: Its tokens, without a BOS that llamac has added.
        hidden: 1 if the first token begins with a space that the text does not have. Some tokenizers add it.
    """

    text: str
    ids: list[int]
    hidden: int


def echo_of(request: GenerationRequest, index: int, model: Model) -> Echo:
    """The prompt of a request that asks for an echo."""
    prompt = request.inputs[index]
    if isinstance(prompt, str):
        text, ids = prompt, model.tokenize(prompt, add_special=False) if model.has_tokenizer else []
    else:
        text, ids = model.detokenize(prompt), prompt
    spaces = [len(each) - len(each.lstrip(" ")) for each in ("".join(text_of(token, model) for token in ids), text)]
    return Echo(text, ids, int(spaces[0] > spaces[1]))


def choices_of(
    endpoint: Endpoint,
    completions: Sequence[Completion],
    model: Model,
    echoes: Sequence[Echo] | None = None,
    *,
    only_echo: bool = False,
) -> list[dict[str, Any]]:
    """The `choices` of a response: the candidates of each input in turn."""
    found: list[dict[str, Any]] = []
    for place, completion in enumerate(completions):
        for choice in completion.choices:
            echo = None if echoes is None else echoes[place]
            found.append(choice_body(endpoint, len(found), choice, model, echo, only_echo=only_echo))
    return found


def choice_body(
    endpoint: Endpoint,
    index: int,
    completion: Completion,
    model: Model,
    echo: Echo | None = None,
    *,
    only_echo: bool = False,
) -> dict[str, Any]:
    """One of the `choices` of a response."""
    choice: dict[str, Any] = {"index": index}
    if endpoint == "chat":
        answer = {"role": "assistant", "content": completion.text}
        choice["message"] = (answer if completion.message is None else completion.message.to_dict()) | {"refusal": None}
    else:
        choice["text"] = (echo.text if echo else "") + ("" if only_echo else completion.text)
    logprobs = None
    if completion.logprobs is not None:
        entries = [] if only_echo else list(completion.logprobs)
        echoed, hidden = (echo_entries(echo, completion), echo.hidden) if echo else ([], 0)
        logprobs = logprobs_body(endpoint, [*echoed, *entries], model, hidden=hidden)
    return choice | {"logprobs": logprobs, "finish_reason": finish_reason(completion)}


def finish_reason(completion: Completion) -> str:
    """OpenAI's name for what ended a generation."""
    reason = FINISH_REASONS[completion.finish_reason]
    message = completion.message
    if reason != "stop" or message is None or not message.tool_calls or message.named:
        return reason
    is_cut = isinstance(completion.stopped_by, str) and message.tool_calls[-1].error is not None
    return "stop" if is_cut else "tool_calls"


def echo_entries(echo: Echo, completion: Completion) -> list[TokenLogprobs | int]:
    """The log probabilities of a prompt. A first token has none: its id alone."""
    entries = completion.prompt_logprobs or []
    own = entries[max(0, len(entries) - len(echo.ids)) :]  # without BOS
    return [token if entry is None else entry for token, entry in zip(echo.ids, own, strict=False)]


def logprobs_body(
    endpoint: Endpoint, entries: Sequence[TokenLogprobs | int], model: Model, offset: int = 0, hidden: int = 0
) -> dict[str, Any]:
    """The `logprobs` of a choice: an object per token in a chat, parallel arrays in a completion.

    Args:
        endpoint: What the request was sent to.
        entries: The tokens. An id alone is a token without a log probability.
        model: The model.
        offset: Characters of the tokens that come before these.
        hidden: Characters of the first token that the text does not have.
    """
    if endpoint == "chat":
        content = [
            {
                **_token_body(entry.token, entry.logprob, model),
                "top_logprobs": [_token_body(token, logprob, model) for token, logprob in entry.top],
            }
            for entry in entries
            if not isinstance(entry, int)
        ]
        return {"content": content, "refusal": None}
    texts = [text_of(entry if isinstance(entry, int) else entry.token, model) for entry in entries]
    texts[:1] = [text[hidden:] for text in texts[:1]]
    return {
        "tokens": texts,
        "token_logprobs": [None if isinstance(entry, int) else _finite(entry.logprob) for entry in entries],
        "top_logprobs": [
            None
            if isinstance(entry, int)
            else {text_of(token, model): _finite(logprob) for token, logprob in entry.top}
            for entry in entries
        ],
        "text_offset": list(itertools.accumulate(map(len, texts[:-1]), initial=offset)) if texts else [],
    }


def text_of(token: int, model: Model) -> str:
    """A token as text. Bytes that are not UTF-8 become U+FFFD."""
    return _bytes_of(token, model).decode("utf-8", "replace")


def _token_body(token: int, logprob: float, model: Model) -> dict[str, Any]:
    data = _bytes_of(token, model)
    return {"token": data.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(data)}


def _bytes_of(token: int, model: Model) -> bytes:
    return model.tokenizer.token_bytes(token) if model.has_tokenizer else b"%d" % token


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI's API writes -9999 for it."""
    return max(logprob, -9999.0)


def new_id(prefix: str) -> str:
    """A random id."""
    return prefix + os.urandom(12).hex()


def error_response(error: LlamacError, input_name: str | None = None) -> tuple[int, dict[str, Any]]:
    """The status code and the body for an error.

    Args:
        error: The error.
        input_name: The parameter that has the input, if the input has been read. A message that begins with the name
            of a sampling parameter is about that one.
    """
    message = str(error)
    first = message.partition(" ")[0]
    is_parameter = input_name is not None and first in CHECKS
    kind, param, code = "invalid_request_error", first if is_parameter else input_name, None
    if param == "guide":
        param = "response_format"
        message = message.replace("guide", param, 1)
    status = HTTPStatus.BAD_REQUEST
    match error:
        case InvalidRequestError():
            param, code = error.param, error.code
        case ContextFullError():
            code = "context_length_exceeded"
        case ChatTemplateError():
            code = "chat_template_error"
        case ArgumentError():
            code = "invalid_value"
        case UnsupportedError():
            code = "unsupported_value"
        case QueueFullError():
            status, kind, param = HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_error", None
            code = "rate_limit_exceeded"
        case OutOfMemoryError():
            status, kind, param, code = HTTPStatus.SERVICE_UNAVAILABLE, "server_error", None, "out_of_memory"
        case DeviceError():
            status, kind, param, code = HTTPStatus.SERVICE_UNAVAILABLE, "server_error", None, "device_failed"
        case _:
            status, kind, param = HTTPStatus.INTERNAL_SERVER_ERROR, "server_error", None
    return status.value, {"error": {"message": message, "type": kind, "param": param, "code": code}}
