"""Builds the bodies of OpenAI's API from completions and errors."""

from __future__ import annotations

import os
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from llamac import __version__
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
    from llamac.engine.model import Model
    from llamac.engine.output import Completion
    from llamac.openai.requests import Endpoint

# OpenAI's name for each of llamac's finish reasons. Its API has only these two for plain text.
FINISH_REASONS = {"stop": "stop", "length": "length", "context": "length", "deadline": "length", "cancelled": "stop"}


def fingerprint(model: Model) -> str:
    """The `system_fingerprint`: it changes with llamac's version and with the model file."""
    return f"llamac-{__version__}-{model.file.id[:16]}"


def completion_body(endpoint: Endpoint, completion: Completion, name: str, system: str) -> dict[str, Any]:
    """The body of a successful response.

    Args:
        endpoint: What the request was sent to.
        completion: The result.
        name: The model's name.
        system: The `system_fingerprint`.
    """
    choice: dict[str, Any] = {"index": 0}
    if endpoint == "chat":
        choice["message"] = {"role": "assistant", "content": completion.text, "refusal": None}
    else:
        choice["text"] = completion.text
    choice |= {"logprobs": None, "finish_reason": FINISH_REASONS[completion.finish_reason]}
    usage = completion.usage
    return {
        "id": new_id("chatcmpl-" if endpoint == "chat" else "cmpl-"),
        "object": "chat.completion" if endpoint == "chat" else "text_completion",
        "created": int(time.time()),
        "model": name,
        "choices": [choice],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        },
        "system_fingerprint": system,
        "seed": completion.seed,
    }


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
