"""What schemathesis needs besides the document: the well-formed requests that the server may refuse.

A schema cannot say what depends on the model (its vocabulary, its template, its context) or on another parameter of the
body. Such a request is refused with status 400 and one of the codes below. The check `well_formed_requests_are_read`
fails for every other refusal: of a type, of an unknown or of a missing parameter. There is one exception: the server
refuses 6.0 where an integer is expected, and JSON schemas cannot tell it from 6.
"""

from __future__ import annotations

from typing import Any

import schemathesis

CODES = (
    "invalid_value",
    "unsupported_value",
    "context_length_exceeded",
    "chat_template_error",
    "unsupported_parameter",
)
# Errors of Anthropic's API have no codes.
TEXTS = ("tool_choice is", "two tools named", "chat template", "positions", "schema")


@schemathesis.check
def well_formed_requests_are_read(
    ctx: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case
) -> None:
    """A request that the document allows is refused for its values, never for its form."""
    is_positive = case.meta is not None and case.meta.generation.mode.is_positive
    if response.status_code != 400 or not is_positive or has_whole_float(case.body):
        return
    error = response.json()["error"]
    if "code" in error:
        assert error["code"] in CODES, f"refused: {error}"
    else:
        assert any(text in error["message"] for text in TEXTS), f"refused: {error}"


def has_whole_float(value: Any) -> bool:
    """Whether an integer is written with a fraction somewhere in a body."""
    if isinstance(value, dict | list):
        return any(map(has_whole_float, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and value.is_integer()
