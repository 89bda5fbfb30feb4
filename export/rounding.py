"""The rounding of the engine, in NumPy: inputs of products, and what a KV cache holds (docs/determinism.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from llamac.arguments import KVDtype, Numerics
from llamac.format.strips import CODEBOOKS, FLOATS

Array: TypeAlias = NDArray[np.float64]
Floats: TypeAlias = NDArray[np.float32]
KV_PAGE = 64  # positions: KV_PAGE of csrc/kv_layout.h


def rounded_inputs(x: Array, dtype: str, numerics: Numerics) -> Array:
    """Inputs (n, columns) rounded as in the engine's products with quantized weights: integers times a scale.

    docs/format.md, "How products are computed". The arithmetic is float32, so that the integers are the engine's. Fast
    numerics also round the inputs of bf16 weights, to bf16.
    """
    if dtype in FLOATS:
        return round_to_bf16(x) if dtype == "bf16" and numerics == "fast" else x
    is_int8 = dtype in CODEBOOKS
    width, limit = (32, 127) if is_int8 else (128, 16319)
    rounds = eight_bits if numerics == "fast" and not is_int8 else np.rint
    parts = (x[:, first : first + width] for first in range(0, x.shape[1], width))
    return np.concatenate([scaled_integers(part, limit, rounds) for part in parts], axis=1)


def round_rows(x: Array) -> Array:
    """Each row (n, columns) rounded to integers from -127 to 127 times a scale, as BitNet is trained.

    Ma et al., "The Era of 1-bit LLMs" (arXiv:2402.17764), section 2: the absolute maximum of a row becomes 127. The
    arithmetic is float32, so that the integers are the engine's and transformers'.
    """
    numbers = x.astype(np.float32)
    top = np.maximum(np.abs(numbers).max(axis=-1, keepdims=True), np.float32(1e-5))
    factor = np.float32(127) / top
    rounded: Array = (np.rint(numbers * factor) / factor).astype(np.float64)
    return rounded


def round_to_bf16(x: Array) -> Array:
    """x rounded to 8 significant bits, ties to even; 0 below 2^-64."""
    fractions, exponents = np.frexp(x.astype(np.float32).astype(np.float64))
    rounded: Array = np.where(np.abs(x) < 2.0**-64, 0, np.ldexp(np.rint(fractions * 256), exponents - 8))
    return rounded


def eight_bits(x: Floats) -> Floats:
    """Each 32 numbers of the last axis rounded to products of a common whole factor and an integer of 8 bits."""
    parts = []
    for first in range(0, x.shape[-1], 32):
        group = x[..., first : first + 32]
        top = np.abs(group).max(axis=-1, keepdims=True)
        factor = 1 + np.floor(top * (np.float32(1) / np.float32(127.49609375)))
        parts.append(factor * np.rint(group * (np.float32(1) / factor)))
    return np.concatenate(parts, axis=-1)


def scaled_integers(x: Array, limit: int, rounds: Callable[[Floats], Floats] = np.rint) -> Array:
    """x rounded to integers times a scale along the last axis, in float32. The largest magnitude becomes `limit`."""
    numbers = x.astype(np.float32)
    top = np.abs(numbers).max(axis=-1, keepdims=True)
    small = top < np.float32(2.0**-100)
    inverse = np.float32(limit) / np.where(small, np.float32(1), top)
    codes = rounds(numbers * inverse).astype(np.float64)
    return np.where(small, 0, codes * (top / np.float32(limit)))


def round_to_q8(x: Array, span: int) -> Array:
    """As the engine's KV cache in q8: integers of 7 bits times a scale per span of the last dimension."""
    padded = np.pad(x.astype(np.float32), [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % span)])
    spans = padded.reshape(*x.shape[:-1], -1, span)
    exact = np.minimum(np.abs(spans).max(axis=-1, keepdims=True) / np.float32(127), np.float32(65504))
    nearest = exact.astype(np.float16)
    scales = np.where(nearest < exact, np.nextafter(nearest, np.float16(np.inf)), nearest).astype(np.float32)
    codes = np.rint(spans * (1 / np.where(scales > 0, scales, np.float32(1)))).clip(-127, 127)
    rounded: Array = (scales.astype(np.float64) * codes).reshape(padded.shape)[..., : x.shape[-1]]
    return rounded


def round_to_cache(keys: Array, values: Array, kv_dtype: KVDtype | None) -> tuple[Array, Array]:
    """Both (n, heads, d) as the engine's KV cache holds them (docs/determinism.md); None: exactly."""
    if kv_dtype == "q8":
        return round_to_q8(keys, 32), round_to_q8(values, values.shape[-1])
    return _round_floats(keys, kv_dtype), _round_floats(values, kv_dtype)


def _round_floats(x: Array, kv_dtype: KVDtype | None) -> Array:
    if kv_dtype == "f16":
        return np.clip(x.astype(np.float32), -65504, 65504).astype(np.float16).astype(np.float64)
    return x if kv_dtype is None else x.astype(np.float32).astype(np.float64)


def round_numerators(weights: Array, values: Array, positions: NDArray[np.int64] | None = None) -> Array:
    """Softmax weights as attention over a cache in q8 rounds them: times the values' scales, to 8 bits for each page.

    Args:
        weights: Shape (n, heads, m).
        values: Rounded values, shape (m, n_kv_heads, d).
        positions: Where the m keys and values are in the cache; -1: not there. Default: one after another.

    Returns:
        Shape (n, heads, m).
    """
    n, heads, m = weights.shape
    places = np.arange(m) if positions is None else positions
    kept = np.flatnonzero(places >= 0)
    pages = -(-(int(places.max()) + 1) // KV_PAGE)
    scales = np.abs(values).max(axis=-1) / 127  # exact, because the largest code is 127
    scales = np.repeat(scales.T, heads // scales.shape[1], axis=0)  # (heads, m)
    scaled = np.zeros((n, heads, pages * KV_PAGE))
    scaled[..., places[kept]] = (weights * scales)[..., kept]
    rounded = scaled_integers(scaled.reshape(n, heads, pages, KV_PAGE), 255).reshape(scaled.shape)
    result = np.zeros_like(weights)
    result[..., kept] = rounded[..., places[kept]]
    np.divide(result, scales, out=result, where=scales > 0)  # where a scale is 0, so is the result
    return result
