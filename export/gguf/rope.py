"""The RoPE tables that the metadata and tensors of a GGUF file describe, with llama.cpp's angles."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from llamac.errors import ExportError, UnsupportedError
from llamac.export.gguf import gemma4
from llamac.export.gguf.architecture import Architecture
from llamac.export.gguf.families import LOG_MULTIPLIER, ROPE_FACTORS
from llamac.export.gguf.families_read import BASE_ALPHA
from llamac.export.gguf.keys import Keys
from llamac.export.rope import Rope, make_rope

Floats = NDArray[np.float32]


def rope_tables(
    keys: Keys, row: Architecture, dim: int, context: int, factors: Mapping[str, Floats]
) -> tuple[Rope, ...]:
    """The RoPE tables: one for all layers, or one for layers without and one for layers with a window."""
    rope = _rope(keys, row, dim, context, factors)
    if not row.two_ropes:
        return (rope,)
    theta = keys.number("rope.freq_base_swa") or keys.number("rope.freq_base") or 0.0
    of_windows = keys.size("rope.dimension_count_swa", dim) if "rope.dimension_count_swa" in row.keys else dim
    keys.finish()
    return rope, make_rope("default", {"rope_theta": theta}, of_windows, context)


def _rope(keys: Keys, row: Architecture, dim: int, context: int, factors: Mapping[str, Floats]) -> Rope:
    """A RoPE table with llama.cpp's angles."""
    theta = keys.number("rope.freq_base") or 0.0
    alpha = keys.number(BASE_ALPHA) if BASE_ALPHA in row.keys else None
    theta *= alpha ** (dim / (dim - 2)) if alpha and dim > 2 else 1.0
    attention_factor = keys.number("rope.scaling.attn_factor") or 1.0
    original = keys.size("rope.scaling.original_context_length", context)
    kind = keys.text("rope.scaling.type")
    factor = keys.number("rope.scaling.factor") or keys.number("rope.scale_linear") or 1.0
    keys.finish()
    for name, table in factors.items():
        if table.shape != (dim // 2,) or not (np.isfinite(table) & (table > 0)).all():
            raise ExportError(f"the tensor {ROPE_FACTORS[name]} must have {dim // 2} positive elements")
    if "long" in factors or "short" in factors:
        if factors.keys() != {"long", "short"} or kind not in (None, "none", "longrope"):
            raise ExportError("rope_factors_long and rope_factors_short must both be present, without other scaling")
        parameters = {f"{name}_factor": factors[name].tolist() for name in ("long", "short")}
        parameters |= {"rope_theta": theta, "factor": None, "attention_factor": attention_factor}
        return make_rope("longrope", {**parameters, "original_max_position_embeddings": original}, dim, context)
    if kind == "yarn" and factor != 1.0:
        rope = _yarn(keys, row, theta, factor, attention_factor, original, dim, context)
    elif kind in (None, "linear", "none", "yarn"):  # YaRN by 1 has no effect
        scale = 1.0 if kind == "none" else factor
        rope = make_rope("linear", {"rope_theta": theta, "factor": scale}, dim, context)
        rope = Rope(rope.inv_freq, attention_factor=attention_factor)
    else:
        raise UnsupportedError(
            f"rope.scaling.type is {kind!r:.40}; llamac supports none, linear, yarn, and longrope with its tensors"
        )
    if "freqs" in factors:
        rope = Rope(gemma4.turned(rope.inv_freq, factors["freqs"]), attention_factor=rope.attention_factor)
    return rope


def _yarn(
    keys: Keys,
    row: Architecture,
    theta: float,
    factor: float,
    attention_factor: float,
    original: int,
    dim: int,
    context: int,
) -> Rope:
    """YaRN. Like llama.cpp, it multiplies attention_factor by 1 + ln(factor) / 10, from the YaRN paper."""
    if keys.number("rope.scaling.yarn_ext_factor") not in (None, 1.0):
        keys.wrong("rope.scaling.yarn_ext_factor", "1")
    slopes = {name: keys.number(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    # DeepSeek's and Mistral's second factor, over all dimensions; the first is divided by it
    second = keys.number(LOG_MULTIPLIER) if LOG_MULTIPLIER in row.keys else None
    growth = 0.1 * math.log(max(factor, 1.0))
    usual = 1.0 if row.latent else (1 + growth) / (1 + growth * (second or 0.0))
    # llama.cpp ignores this key; converters write the attention factor of config.json, which is the usual one
    given = keys.number("rope.scaling.yarn_attn_factor")
    if given not in (None, 1.0) and not math.isclose(given or 0.0, usual, rel_tol=1e-5):
        keys.wrong("rope.scaling.yarn_attn_factor", f"1 or {usual:.6g}")
    keys.finish()
    parameters = {
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": attention_factor * usual,
        "mscale": None,
        "mscale_all_dim": None,
        "truncate": True,
        **slopes,
    }
    return make_rope("yarn", parameters, dim, context)
