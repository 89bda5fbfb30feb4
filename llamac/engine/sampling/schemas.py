"""JSON schemas of sampling parameters, derived from the checks of requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamac.engine.prompts.overflow import CONTEXT_OVERFLOWS
from llamac.engine.sampling.params import CHECKS, MAX_SEED, MAX_TEMPERATURE, MIN_POSITIVE, Integer, Real

TOKEN_ID: Mapping[str, Any] = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
TEXT: Mapping[str, Any] = {"type": "string", "minLength": 1}
TEXTS: Mapping[str, Any] = {"anyOf": [TEXT, {"type": "array", "items": TEXT}]}
# The schemas of the checks that are functions, by the functions' names.
FUNCTIONS: dict[str, Mapping[str, Any]] = {
    "_temperature": {"anyOf": [{"const": 0}, {"type": "number", "minimum": MIN_POSITIVE, "maximum": MAX_TEMPERATURE}]},
    "_seed": {"type": "integer", "minimum": 0, "maximum": MAX_SEED},
    "_flag": {"type": "boolean"},
    "_strings": TEXTS,
    "_encodable": TEXTS,
    "_token_ids": {"type": "array", "items": TOKEN_ID},
    "_logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "exclusiveMinimum": -3e38, "exclusiveMaximum": 3e38},
    },
    "_overflow": {"enum": list(CONTEXT_OVERFLOWS)},
    "_early_stopping": {"enum": [True, False, "never"]},
}
NOT_JSON = ("guide", "logits_processors")  # parameters without a JSON representation


def json_schema(name: str) -> dict[str, Any]:
    """Return the JSON schema of a sampling parameter's values.

    Args:
        name: A field of `SamplingParams` that is not one of `NOT_JSON`.
    """
    check: Any = CHECKS[name]
    if isinstance(check, Integer):
        return {"type": "integer", "minimum": check.least, **({} if check.most is None else {"maximum": check.most})}
    if isinstance(check, Real):
        return {"type": "number", "exclusiveMinimum" if check.above else "minimum": check.least, "maximum": check.most}
    return dict(FUNCTIONS[check.__name__])
