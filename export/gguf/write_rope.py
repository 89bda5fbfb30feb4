"""Expresses a table of RoPE frequencies in GGUF: a base with a scaling rule, or factors in tensors.

A checkpoint has frequencies, not the rule behind them. This module infers the rule and verifies that the reader's
formula (export/rope.py) gives the same frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamac.errors import ExportError, UnsupportedError
from llamac.export.checkpoint import Checkpoint
from llamac.export.gguf import gemma4, latent
from llamac.export.gguf.families import LOG_MULTIPLIER, ROPE_FACTORS, Architecture
from llamac.export.gguf.families_read import SECTIONS
from llamac.export.rope import make_rope

Floats = NDArray[np.float32]
Number = int | float | str | list[int]
SLOWEST, FASTEST = 1e-15, 1e6  # radians per position
CLOSE = 2e-6  # relative; the error of powers and products in float32
DIGITS = (3, 4, 5, 6, 9)
# YaRN's slopes. llama.cpp always uses these.
BETA_FAST, BETA_SLOW = 32.0, 1.0


@dataclass
class GGUFRope:
    """RoPE in GGUF.

    Attributes:
        keys: Metadata keys of the architecture.
        tensors: Tensors by llama.cpp's names.
    """

    keys: dict[str, Number] = field(default_factory=dict)
    tensors: dict[str, Floats] = field(default_factory=dict)


def express_rope(checkpoint: Checkpoint, row: Architecture) -> GGUFRope:
    """Express all RoPE tables of a checkpoint in GGUF.

    Raises:
        UnsupportedError: If a file of this architecture cannot express them.
    """
    if row.position != "rope" or not checkpoint.config.rope_dim:
        return GGUFRope()
    for name, tensor in checkpoint.tensors.items():
        if name.startswith("rope.") and not _are_usual(tensor.array(), has_zeros=row.varied):
            raise UnsupportedError(f"tensor {name} has frequencies of no base: GGUF cannot express them")
    is_local = [any(layer.rope == table and layer.window for layer in checkpoint.config.layers) for table in (0, 1)]
    tables = [checkpoint.tensors[f"rope.{table}.inv_freq"].array() for table in range(len(checkpoint.config.rope_dim))]
    if len(tables) > (2 if row.two_ropes else 1):
        raise UnsupportedError(f"a GGUF file of this architecture cannot express {len(tables)} RoPE tables")
    local = tables.pop() if row.two_ropes and (len(tables) == 2 or is_local[0]) else None
    rope = _express_table(checkpoint, row, tables[0]) if tables else GGUFRope({"rope.freq_base": 10000.0})
    rope.keys["rope.dimension_count"] = checkpoint.config.rope_dim[0]
    if row.varied:
        rope.keys["rope.dimension_count_swa"] = checkpoint.config.rope_dim[-1]
    if SECTIONS in row.keys:
        rope.keys[SECTIONS] = _sections(checkpoint)
    if local is not None:
        base = _base(local)
        if base is None:
            raise UnsupportedError("a GGUF file cannot scale the RoPE frequencies of layers with a sliding window")
        rope.keys["rope.freq_base_swa"] = base
    return rope


def _sections(checkpoint: Checkpoint) -> list[int]:
    """The pairs that rotate by time, height and width of images: those of config.json, or the usual thirds.

    They do not affect text, but llama.cpp refuses a file without them.
    """
    n_pairs = checkpoint.config.rope_dim[0] // 2
    for where in (("config", "text_config"), ("config",)):
        for key in ("rope_parameters", "rope_scaling"):
            listed = _nested(checkpoint.metadata, *where, key, "mrope_section")
            is_list = isinstance(listed, list) and all(type(n) is int and 0 <= n <= n_pairs for n in listed)
            if is_list and len(listed) == 3 and sum(listed) == n_pairs:
                return [*listed, 0]
    return [*((n_pairs + 2 - part) // 3 for part in range(3)), 0]


def _nested(values: Any, *keys: str) -> Any:
    """The value at a path of keys in nested objects; None if there is none."""
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _express_table(checkpoint: Checkpoint, row: Architecture, found: Floats) -> GGUFRope:
    config = checkpoint.config
    if row.varied:  # llama.cpp requires the factors
        is_turned = found > 0
        bases = [base for base in _bases(found) if _same(_powers(base, len(found))[is_turned], found[is_turned])]
        base = (*bases, _base_of_factors(found))[0]
        factors = gemma4.factors_of(found, _powers(base, len(found)), CLOSE)
        return GGUFRope({"rope.freq_base": base}, {ROPE_FACTORS["freqs"]: factors})
    factor = config.rope_attention_factor[0]
    attention_keys: dict[str, Number] = {"rope.scaling.attn_factor": factor} if factor != 1.0 else {}
    long = checkpoint.tensors.get("rope.0.inv_freq_long")
    if long is not None:
        if "long" not in row.rope_tensors:
            raise UnsupportedError("a GGUF file of this architecture cannot express RoPE frequencies for long contexts")
        base = _base_of_factors(found)
        tensors = {ROPE_FACTORS["short"]: _factors(base, found), ROPE_FACTORS["long"]: _factors(base, long.array())}
        original = config.rope_original_context[0]
        keys: dict[str, Number] = {
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": original,
        }
        return GGUFRope({"rope.freq_base": base, **keys, **attention_keys}, tensors)
    plain = _base(found)
    if plain is not None:
        return GGUFRope({"rope.freq_base": plain, **attention_keys})
    if (linear := _linear(found)) is not None:
        base, scale = linear
        linear_keys: dict[str, Number] = {"rope.scaling.type": "linear", "rope.scaling.factor": scale}
        return GGUFRope({"rope.freq_base": base, **linear_keys, **attention_keys})
    if "freqs" in row.rope_tensors:  # factors express any frequencies
        base = _base_of_factors(found)
        return GGUFRope({"rope.freq_base": base, **attention_keys}, {ROPE_FACTORS["freqs"]: _factors(base, found)})
    yarn = _yarn(found)
    if yarn is None:
        raise UnsupportedError(
            "a GGUF file of this architecture cannot express these RoPE frequencies: it supports plain, linearly scaled"
            " and YaRN ones"
        )
    if row.latent:
        attention_keys[LOG_MULTIPLIER] = latent.log_multiplier(config, yarn["rope.scaling.factor"])
        return GGUFRope({**yarn, "rope.scaling.type": "yarn", **attention_keys})
    usual = 1 + 0.1 * math.log(yarn["rope.scaling.factor"])  # llama.cpp multiplies by this value
    attention = {} if math.isclose(factor, usual, rel_tol=CLOSE) else {"rope.scaling.attn_factor": factor / usual}
    return GGUFRope({**yarn, "rope.scaling.type": "yarn", **attention})


def _are_usual(found: Floats, *, has_zeros: bool) -> bool:
    """Whether frequencies can be those of a base. has_zeros: Some, but not the first, can be 0."""
    if has_zeros and len(found) and found[0] > 0:
        found = found[found != 0]
    return bool(((found > SLOWEST) & (found < FASTEST)).all())


def _powers(base: float, count: int) -> Floats:
    """The unscaled frequencies of a base."""
    return make_rope("default", {"rope_theta": base}, 2 * count, 1).inv_freq


def _same(one: Floats, other: Floats) -> bool:
    return np.allclose(one, other, rtol=CLOSE, atol=0)


def _round(value: float) -> Iterator[float]:
    """Roundings of a value, fewest digits first, because people write short numbers."""
    for digits in DIGITS:
        yield float(np.float32(f"{value:.{digits - 1}e}"))


def _bases(found: Floats) -> Iterator[float]:
    """Candidates for the base, assuming that the first two frequencies have the same scale."""
    if len(found) < 2 or not found[1]:
        yield 10000.0
        return
    guess = float(found[0]) / float(found[1])
    if 1.0 < guess < 1e30 ** (1 / len(found)):
        yield from _round(guess ** len(found))


def _base(found: Floats) -> float | None:
    """The base of unscaled frequencies, or None."""
    return next((base for base in _bases(found) if _same(_powers(base, len(found)), found)), None)


def _linear(found: Floats) -> tuple[float, float] | None:
    """(base, divisor of all frequencies), or None."""
    for base in _bases(found):
        for factor in _round(1 / float(found[0])):
            if _same(_powers(base, len(found)) / np.float32(factor), found):
                return base, factor
    return None


def _base_of_factors(found: Floats) -> float:
    """A base for frequencies with factors. Any base works."""
    return next(iter(_bases(found)), 10000.0)


def _factors(base: float, found: Floats) -> Floats:
    factors: Floats = _powers(base, len(found)) / found
    return factors


def _yarn(found: Floats) -> dict[str, float] | None:
    """The keys of YaRN with the usual slopes, or None."""
    count = len(found)
    for base in _bases(found):
        ratios = _powers(base, count).astype(np.float64) / found
        n_kept = int(np.argmax(ratios > 1 + CLOSE))
        n_ramp = int(np.argmax(ratios > ratios[-1] * (1 - CLOSE)))
        if ratios[-1] <= 1 + CLOSE or not n_kept or n_ramp < n_kept:
            continue
        original = _original_context(base, 2 * count, n_kept - 1, n_ramp)
        for factor in _round(float(ratios[-1])):
            keys = {"rope_theta": base, "factor": factor, "original_max_position_embeddings": original}
            options = {"beta_fast": BETA_FAST, "beta_slow": BETA_SLOW, "truncate": True, "attention_factor": 1.0}
            try:
                if original and _same(make_rope("yarn", {**keys, **options}, 2 * count, 1).inv_freq, found):
                    names = ("rope.freq_base", "rope.scaling.factor", "rope.scaling.original_context_length")
                    return dict(zip(names, keys.values(), strict=True))
            except ExportError:
                continue
    return None


def _original_context(base: float, dim: int, low: int, high: int) -> int:
    """An original context for which YaRN's ramp begins at frequency `low` and ends at `high`; 0 if none exists."""

    def context(index: float, beta: float) -> float:
        """The context in which the frequency `index` makes exactly `beta` rotations."""
        return beta * 2 * math.pi * math.pow(base, 2 * index / dim)

    least = max(context(low, BETA_FAST) if low else 1.0, context(high - 1, BETA_SLOW))
    most = min(context(low + 1, BETA_FAST), context(high, BETA_SLOW), 2.0**24)
    power = 2 ** math.ceil(math.log2(least))  # most contexts are powers of two
    found = power if power < most else math.ceil(math.sqrt(least * most))
    return found if least < found < most else 0
