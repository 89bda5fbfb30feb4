"""Reads the keys of config.json by which queries are scaled by their position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llamac.export.hf.keys import LIMITS, Keys
from llamac.export.hf.rope import FULL, ORIGINAL_CONTEXT, QUERY_BETA, RopeParameters


def scaled_queries(keys: Keys, parameters: dict[str, RopeParameters]) -> dict[str, Any]:
    """The layers' fields for queries that are scaled by their position."""
    values = parameters[FULL].values if parameters else {}
    if not (beta := values.get(QUERY_BETA)):
        return {}
    if beta > LIMITS["query_beta"] or ORIGINAL_CONTEXT not in values:
        keys.problems.append(
            f"{QUERY_BETA} is {beta:g}, expected at most {LIMITS['query_beta']:g}, with {ORIGINAL_CONTEXT}"
        )
    return {"query_beta": float(np.float32(beta)), "query_context": values.get(ORIGINAL_CONTEXT, 1)}


def tuned_queries(keys: Keys, row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Llama 4's layers without RoPE, whose queries are scaled by their position."""
    if "attn_temperature_tuning" not in row:
        return {}
    if keys.values.get("attn_temperature_tuning") == 4:  # the default of earlier versions of transformers
        keys.values["attn_temperature_tuning"] = True
    is_tuned = keys.flag("attn_temperature_tuning", row["attn_temperature_tuning"])
    beta = keys.number("attn_scale", row["attn_scale"], LIMITS["query_beta"]) or 0.0
    context = keys.size("floor_scale", "query_context", row["floor_scale"])
    if not is_tuned or not beta:
        return {}
    return {"query_beta": float(np.float32(beta)), "query_context": context, "query_offset": 1}
