"""Builds the bodies of OpenAI's API from completions and errors."""

from __future__ import annotations

import itertools
import os
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from llamac import __version__
from llamac.engine.identity import identity_of, short_hash
from llamac.errors import (
    ArgumentError,
    ChatTemplateError,
    ContextFullError,
    LlamacError,
    OutOfMemoryError,
    QueueFullError,
)
from llamac.openai.requests import InvalidRequestError

if TYPE_CHECKING:
    from llamac.engine.logprobs import TokenLogprobs
    from llamac.engine.model import Model
    from llamac.engine.output import Completion
    from llamac.openai.requests import Endpoint

# OpenAI's name for each of llamac's finish reasons. Its API has only these two for plain text.
FINISH_REASONS = {"stop": "stop", "length": "length", "context": "length", "deadline": "length", "cancelled": "stop"}


def fingerprint(model: Model, kv_dtype: str, context: int) -> str:
    """The `system_fingerprint`: it changes with llamac's version and with all that texts depend on besides a request.

    These are the model file, a tokenizer in place of its own, adapters, the number format of the KV cache, and the
    context, which chooses the RoPE table of models that have two.
    """
    return f"llamac-{__version__}-{short_hash(identity_of(model), kv_dtype, context)}"


def completion_body(endpoint: Endpoint, completion: Completion, name: str, system: str, model: Model) -> dict[str, Any]:
    """The body of a successful response.

    Args:
        endpoint: What the request was sent to.
        completion: The result.
        name: The model's name.
        system: The `system_fingerprint`.
        model: The model, whose tokenizer has the texts of the tokens.
    """
    usage = completion.usage
    dropped = {"truncated_tokens": usage.truncated_tokens, "shifted_tokens": usage.shifted_tokens}
    generated = sum(choice.usage.completion_tokens for choice in completion.choices)
    return {
        "id": new_id("chatcmpl-" if endpoint == "chat" else "cmpl-"),
        "object": "chat.completion" if endpoint == "chat" else "text_completion",
        "created": int(time.time()),
        "model": name,
        "choices": [choice_body(endpoint, i, choice, model) for i, choice in enumerate(completion.choices)],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": usage.prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            **{name: number for name, number in dropped.items() if number},
        },
        "system_fingerprint": system,
        "seed": completion.seed,
    }


def choice_body(endpoint: Endpoint, index: int, completion: Completion, model: Model) -> dict[str, Any]:
    """One of the `choices` of a response."""
    choice: dict[str, Any] = {"index": index}
    if endpoint == "chat":
        answer = {"role": "assistant", "content": completion.text}
        choice["message"] = (answer if completion.message is None else completion.message.to_dict()) | {"refusal": None}
    else:
        choice["text"] = completion.text
    logprobs = None if completion.logprobs is None else logprobs_body(endpoint, completion.logprobs, model)
    reason = FINISH_REASONS[completion.finish_reason]
    if reason == "stop" and completion.message is not None and completion.message.tool_calls:
        reason = "tool_calls"
    return choice | {"logprobs": logprobs, "finish_reason": reason}


def logprobs_body(endpoint: Endpoint, entries: list[TokenLogprobs], model: Model) -> dict[str, Any]:
    """The `logprobs` of a choice: an object per token in a chat, parallel arrays in a completion."""
    if endpoint == "chat":
        content = [
            {
                **_token_body(entry.token, entry.logprob, model),
                "top_logprobs": [_token_body(token, logprob, model) for token, logprob in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}
    texts = [_bytes_of(entry.token, model).decode("utf-8", "replace") for entry in entries]
    top = [{_bytes_of(t, model).decode("utf-8", "replace"): _finite(p) for t, p in entry.top} for entry in entries]
    return {
        "tokens": texts,
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": top,
        "text_offset": list(itertools.accumulate(map(len, texts[:-1]), initial=0)) if texts else [],
    }


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
        input_name: The parameter that has the input, if the input has been read.
    """
    kind, param, code = "invalid_request_error", input_name, None
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
        case QueueFullError():
            status, kind, param = HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_error", None
        case OutOfMemoryError():
            status, kind, param, code = HTTPStatus.SERVICE_UNAVAILABLE, "server_error", None, "out_of_memory"
        case _:
            status, kind, param = HTTPStatus.INTERNAL_SERVER_ERROR, "server_error", None
    return status.value, {"error": {"message": str(error), "type": kind, "param": param, "code": code}}
