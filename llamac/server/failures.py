"""The bodies of errors, in the formats of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

from typing import Any

# Anthropic's error types by status.
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def messages_error(status: int, message: str, request_id: str) -> dict[str, Any]:
    """Return the body of an error in the format of Anthropic's API."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def error_body(message: str, kind: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    """Return the body of an error in the format of OpenAI's API."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
