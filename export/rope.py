"""RoPE frequencies as transformers computes them from a config, in float32.

There is one function per rope_type. Python floats and float32 arrays are used where transformers uses Python floats and
float32 tensors, so every operation rounds at the same place, with one exception: powers are computed in float64 and
rounded once, because the last bit of torch's powers depends on the machine's vector width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamac.errors import ExportError

Floats = NDArray[np.float32]
Parameters = Mapping[str, Any]


@dataclass(frozen=True)
class Rope:
    """RoPE's tables.

    Attributes:
        inv_freq: (head_dim / 2) in radians per position.
        inv_freq_long: Replaces inv_freq in contexts longer than original_context, if that is not 0.
        attention_factor: Multiplies cosines and sines.
    """

    inv_freq: Floats
    inv_freq_long: Floats | None = None
    original_context: int = 0
    attention_factor: float = 1.0


def rope_fields(tables: Sequence[Rope]) -> dict[str, Any]:
    """The config record's fields of RoPE tables."""
    return {
        "rope_dim": tuple(2 * len(table.inv_freq) for table in tables),
        "rope_original_context": tuple(table.original_context for table in tables),
        "rope_attention_factor": tuple(table.attention_factor for table in tables),
    }


def make_rope(rope_type: str, parameters: Parameters, dim: int, context: int) -> Rope:
    """Compute the tables of one rope_type.

    Args:
        rope_type: A key of ROPE_TYPES.
        parameters: The config's numbers, with rope_theta. Optional ones can be None.
        dim: Rotated dimensions per head.
        context: The model's max_position_embeddings.

    Raises:
        ExportError: If the parameters give no usable frequencies.
    """
    try:
        with np.errstate(all="ignore"):
            rope = ROPE_TYPES[rope_type](parameters, dim, context)
    except (ArithmeticError, ValueError) as error:
        raise ExportError(f"config.json: the RoPE parameters of type {rope_type!r} cannot be used: {error}") from None
    tables = [table for table in (rope.inv_freq, rope.inv_freq_long) if table is not None]
    turned = [np.trim_zeros(table, "b") if rope_type == "proportional" else table for table in tables]
    if not all((np.isfinite(table) & (table > 0)).all() for table in turned) or not 0 < rope.attention_factor < 1e6:
        raise ExportError(
            f"config.json: the RoPE parameters of type {rope_type!r} give frequencies or factors out of range"
        )
    return rope


def _powers(theta: float, dim: int) -> Floats:
    """theta^(2j / dim) as (dim / 2), correctly rounded to float32 (tests/export/test_export_bits.py)."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    powers: Floats = np.power(np.float64(np.float32(theta)), exponents.astype(np.float64)).astype(np.float32)
    return powers


def _plain(theta: float, dim: int) -> Floats:
    inverse: Floats = np.float32(1) / _powers(theta, dim)
    return inverse


def _default(parameters: Parameters, dim: int, context: int) -> Rope:
    """Su et al., "RoFormer" (arXiv:2104.09864)."""
    return Rope(_plain(parameters["rope_theta"], dim))


def _linear(parameters: Parameters, dim: int, context: int) -> Rope:
    """Chen et al., "Extending Context Window via Positional Interpolation" (arXiv:2306.15595)."""
    return Rope(_plain(parameters["rope_theta"], dim) / np.float32(parameters["factor"]))


def _dynamic(parameters: Parameters, dim: int, context: int) -> Rope:
    """NTK-aware scaling of the base. It starts beyond max_position_embeddings; up to there it equals the default."""
    if dim == 2:
        raise ValueError("heads of 2 dimensions have a single frequency, which does not depend on the base")
    factor = parameters["factor"]
    growth = factor * context / context - (factor - 1)
    return Rope(_plain(parameters["rope_theta"] * growth ** (dim / (dim - 2)), dim))


def _ntk_alpha(parameters: Parameters, dim: int, context: int) -> Rope:
    """NTK-aware scaling of the base with a constant."""
    if dim == 2:
        raise ValueError("heads of 2 dimensions have a single frequency, which does not depend on the base")
    return Rope(_plain(parameters["rope_theta"] * parameters["alpha"] ** (dim / (dim - 2)), dim))


def _ntk_fixed(parameters: Parameters, dim: int, context: int) -> Rope:
    """NTK-aware scaling of gte's own code: multiplies the base by the factor, divides frequencies by factor^(2 / dim).

    The lowest frequency, theta^(2 / dim - 1), is thus divided by the factor itself. Factors up to 1 have no effect.
    """
    factor = max(1.0, parameters["factor"])
    inv_freq = _plain(parameters["rope_theta"] * factor, dim) / np.float32(factor ** (2 / dim))
    return Rope(inv_freq)


def _llama3(parameters: Parameters, dim: int, context: int) -> Rope:
    """Llama 3.1: divides low frequencies by the factor, keeps high ones, and interpolates between."""
    one = np.float32(1)
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    inv_freq = _plain(parameters["rope_theta"], dim)
    wave = one / inv_freq * np.float32(2 * math.pi)
    is_low, is_high = wave > np.float32(original / low), wave < np.float32(original / high)
    scaled = np.where(is_low, inv_freq / np.float32(factor), inv_freq)
    smooth = (one / wave * np.float32(original) - np.float32(low)) / np.float32(high - low)
    smoothed = (one - smooth) * scaled / np.float32(factor) + smooth * scaled
    return Rope(np.where(is_low | is_high, scaled, smoothed))


def _yarn(parameters: Parameters, dim: int, context: int) -> Rope:
    """Peng et al., "YaRN" (arXiv:2309.00071)."""
    if dim % 2:
        raise ValueError(f"YaRN is not defined for an odd number of dimensions, {dim}")
    theta, original = parameters["rope_theta"], parameters["original_max_position_embeddings"]
    factor = parameters["factor"] if parameters["factor"] is not None else context / original

    def correction_dim(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = correction_dim(parameters["beta_fast"] or 32), correction_dim(parameters["beta_slow"] or 1)
    if parameters["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    one, powers = np.float32(1), _powers(theta, dim)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, one)
    kept = one - ramp
    inv_freq = one / (np.float32(factor) * powers) * (one - kept) + one / powers * kept
    return Rope(inv_freq, attention_factor=_yarn_attention_factor(parameters, factor))


def _yarn_attention_factor(parameters: Parameters, factor: float) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given: float | None = parameters["attention_factor"]
    if given is not None:
        return given
    if parameters["mscale"] and parameters["mscale_all_dim"]:
        return scale(parameters["mscale"]) / scale(parameters["mscale_all_dim"])
    return scale(1)


def _longrope(parameters: Parameters, dim: int, context: int) -> Rope:
    """Ding et al., "LongRoPE" (arXiv:2402.13753): one set of factors up to the original context, another beyond."""
    original = parameters["original_max_position_embeddings"]
    factor = parameters["factor"] if parameters["factor"] is not None else context / original
    attention_factor = parameters["attention_factor"]
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    powers = _powers(parameters["rope_theta"], dim)
    tables = []
    for name in ("short_factor", "long_factor"):
        if len(parameters[name]) != len(powers):
            raise ValueError(f"{name} has {len(parameters[name])} numbers, expected {len(powers)}")
        tables.append(np.float32(1) / (np.array(parameters[name], np.float32) * powers))
    return Rope(tables[0], tables[1], original, attention_factor)


def _proportional(parameters: Parameters, dim: int, context: int) -> Rope:
    """Gemma 4: the frequencies of whole heads. Only the first part rotates."""
    part, factor = parameters["partial_rotary_factor"], parameters["factor"]
    turned = int((1.0 if part is None else part) * dim // 2)
    if turned > dim // 2:
        raise ValueError(f"{turned} of {dim // 2} frequencies rotate")
    inv_freq = _plain(parameters["rope_theta"], dim) / np.float32(1.0 if factor is None else factor)
    inv_freq[turned:] = 0
    return Rope(inv_freq)


ROPE_TYPES: dict[str, Callable[[Parameters, int, int], Rope]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "ntk_alpha": _ntk_alpha,
    "ntk_fixed": _ntk_fixed,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}
