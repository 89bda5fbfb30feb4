"""Compares what the engine computed with a capture: the largest errors of each stage, and where they are."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamac.export.checkpoint import ModelConfig
from llamac.export.equations import query_scale
from llamac.export.hf.families import ENCODERS, FAMILIES
from llamac.export.parity import draws
from llamac.export.parity.capture import Capture, Floats
from llamac.export.parity.stages import OF_KV_HEADS, OF_QUERY_HEADS, OF_THE_STREAM, Key, keys_in_order
from llamac.format.strips import FLOATS

# The largest relative error in a stage. With float weights and a KV cache in float32, only the order of sums differs.
# Attention amplifies the difference where scores are large; nothing precedes the first norm.
EXACT, OF_FIRST_NORM = 3e-4, 1e-5
FIRST: tuple[Key, ...] = (("embedding", 0), ("attn_norm", 0))
OF_CACHE = {"f32": EXACT, "f16": 0.02, "q8": 0.25}
# Quantized weights differ from the original ones in every product, and a few positions amplify that without limit:
# these limits, by bits, are for the median position. They only catch gross faults.
OF_BITS = {8: 0.1, 6: 0.25, 5: 0.5, 4: 0.75, 3: 1.5, 2: 5.0}
OF_INPUTS = 0.25  # also for the median: products that round their inputs to 8 bits, with weights that may be exact
EXACT_INPUTS = {"f32", "f16"}  # weights whose products never round inputs that far


@dataclass(frozen=True)
class Tolerance:
    """How much may differ.

    Attributes:
        limit: The largest relative error.
        of_median: Whether it limits the median of all positions. Otherwise it limits every position.
    """

    limit: float
    of_median: bool = False


@dataclass(frozen=True)
class Difference:
    """How much one stage of one layer differs.

    Attributes:
        stage: The stage.
        layer: The layer; 0 for stages outside the layers.
        max_error: max|difference|.
        relative: max|difference| / max|reference| of a position, for the worst or the median position as the tolerance
            says; infinite if a number is not finite, or if the shapes differ.
        cosine: The cosine of the two rows at the position where it is smallest.
        position: The worst position.
        head: The head of the largest difference there; None for stages without heads.
        index: Its index in the head, or in the row. Of "weights", the position that is looked at.
        tolerance: What `relative` may be.
        problem: Why the stages cannot be compared, or "".
    """

    stage: str
    layer: int
    max_error: float
    relative: float
    cosine: float
    position: int
    head: int | None
    index: int
    tolerance: Tolerance
    problem: str = ""

    @property
    def is_within(self) -> bool:
        """Whether the stage is within tolerance."""
        return self.relative <= self.tolerance.limit


@dataclass(frozen=True)
class TokenDifference:
    """How tokens differ.

    Attributes:
        way: "greedy" or "sampled".
        n_equal: How many tokens are equal before the first different one.
        n_tokens: How many tokens there are.
        is_clear: Whether the reference's logits, within tolerance, rule out the engine's first different token. True if
            all are equal.
    """

    way: str
    n_equal: int
    n_tokens: int
    is_clear: bool

    @property
    def is_within(self) -> bool:
        """Whether the tokens are equal, or the first different one was a close decision."""
        return self.n_equal == self.n_tokens or not self.is_clear


def tolerance_of(dtypes: set[str], kv_dtype: str, numerics: str = "exact") -> Tolerance:
    """The tolerance for a model with tensors of these dtypes, a KV cache of this one, and these numerics."""
    bits = [int(found[0]) for dtype in dtypes - {*FLOATS, "t2"} if (found := re.search("[2-8]", dtype))]
    limits = [OF_BITS[n] for n in bits]
    if "t2" in dtypes or (numerics == "fast" and not dtypes <= EXACT_INPUTS):  # t2 has a ternary model's own weights
        limits.append(OF_INPUTS)
    return Tolerance(max(OF_CACHE[kv_dtype], *limits, EXACT), of_median=bool(limits))


def in_engine_form(capture: Capture, config: ModelConfig) -> Capture:
    """A capture with queries and keys as the engine has them: RoPE's pairs in halves, queries not yet scaled.

    Args:
        capture: The capture, as the other implementation computed it.
        config: The engine's model.
    """
    family = (ENCODERS if config.two_sided else FAMILIES).get(str(capture.config.get("model_type")))
    stages = dict(capture.stages)
    for (stage, layer), rows in capture.stages.items():
        if stage not in ("q", "k", "cache_k") or layer >= len(config.layers):
            continue
        record, head_dim = config.layers[layer], config.layers[layer].head_dim or config.head_dim
        exact = rows.astype(np.float64)
        heads = exact.reshape(len(rows), -1, head_dim) if rows.shape[1] % head_dim == 0 else exact[:, None]
        name = "attn_q.weight" if stage == "q" else "attn_k.weight"
        if family is not None and config.rope_dim and heads.shape[2] == head_dim:
            order = family.order_of_pairs(f"layers.{layer}.{name}", config.rope_dim[0], head_dim)
            heads = heads if order is None else heads[:, :, order]
        if stage == "q":
            scale = query_scale(np.arange(len(rows)), record.query_beta, record.query_context, record.query_offset)
            heads = heads / scale[:, None, None]
        stages[stage, layer] = heads.reshape(rows.shape).astype(np.float32)
    return replace(capture, stages=stages)


def compare_stages(engine: Capture, reference: Capture, config: ModelConfig, tolerance: Tolerance) -> list[Difference]:
    """Compare all stages, in the order of the graph.

    Args:
        engine: What the engine computed.
        reference: The capture, in the engine's form.
        config: The engine's model.
        tolerance: What may differ (see `tolerance_of`).
    """
    found = []
    for key in keys_in_order(config):
        limit = Tolerance(OF_FIRST_NORM) if key in FIRST and tolerance == Tolerance(EXACT) else tolerance
        if key not in reference.stages:
            found.append(_incomparable(key, limit, "the capture has no such stage"))
        elif key[0] in OF_THE_STREAM and engine.stages[key].shape != reference.stages[key].shape:
            found.append(_incomparable(key, limit, _shapes(engine.stages[key], reference.stages[key])))
        else:
            found.append(difference(key, engine.stages[key], reference.stages[key], n_heads(config, key), limit))
    return found


def n_heads(config: ModelConfig, key: Key) -> int:
    """The heads of a stage; 0 for stages without heads."""
    stage, layer = key
    record = config.layers[layer]
    if stage == "attn_mix" and record.mixer != "attention":
        return 0 if record.mixer == "attention_mamba2" else record.state_heads
    if stage in OF_QUERY_HEADS:
        return record.n_heads or config.n_heads
    return (record.n_kv_heads or config.n_kv_heads) if stage in OF_KV_HEADS else 0


def difference(key: Key, engine: NDArray[Any], reference: NDArray[Any], heads: int, tolerance: Tolerance) -> Difference:
    """Compare one stage.

    Args:
        key: The stage.
        engine: Shape (n, ...), or more columns if other layers are wider.
        reference: Shape (m, ...) of the last m <= n positions.
        heads: The stage's heads, or 0.
        tolerance: As in `Difference`.
    """
    first = len(engine) - len(reference)
    expected = reference.reshape(len(reference), -1).astype(np.float64)
    found = engine[max(first, 0) :].reshape(len(engine) - max(first, 0), -1)[:, : expected.shape[1]]
    if found.shape != expected.shape or not expected.size:
        return _incomparable(key, tolerance, _shapes(engine, reference))
    errors = np.abs(found - expected)
    scales = np.maximum(np.abs(expected).max(axis=1), np.finfo(np.float32).tiny)
    relative = np.where(np.isfinite(errors).all(axis=1), errors.max(axis=1) / scales, np.inf)
    row = int(relative.argmax())
    column = int(errors[row].argmax())
    width = expected.shape[1] // heads if heads else expected.shape[1]
    return Difference(
        *key,
        max_error=float(errors.max()),
        relative=float(np.median(relative) if tolerance.of_median else relative[row]),
        cosine=_smallest_cosine(found.astype(np.float64), expected),
        position=first + row,
        head=column // width if heads else None,
        index=column % width,
        tolerance=tolerance,
    )


def compare_tokens(engine: Capture, reference: Capture, tolerance: float) -> list[TokenDifference]:
    """Compare the tokens that each implementation chose. The engine's can end early, at logits that are no numbers."""
    found, question = [], reference.question
    for way, expected in reference.chosen.items():
        pairs = list(zip(engine.chosen[way].ids, expected.ids, strict=False))
        equal = next((i for i, (one, other) in enumerate(pairs) if one != other), len(pairs))
        is_clear = True
        if equal < len(pairs):
            assert expected.logits is not None
            row: Floats = expected.logits[equal][: question.n_token_ids]
            token, position = pairs[equal][0], len(question.ids) + equal
            is_clear = not draws.is_close(way, row, token, question.seed, position, tolerance)
        found.append(TokenDifference(way, equal, len(expected.ids), is_clear))
    return found


def _shapes(engine: NDArray[Any], reference: NDArray[Any]) -> str:
    return f"the engine has {engine.shape}, the reference {reference.shape}"


def _incomparable(key: Key, tolerance: Tolerance, problem: str) -> Difference:
    return Difference(*key, np.inf, np.inf, 0.0, 0, None, 0, tolerance, problem)


def _smallest_cosine(found: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """The cosine of the rows that agree least; rows of zeros agree with each other."""
    products = (found * expected).sum(axis=1)
    lengths = np.sqrt((found**2).sum(axis=1) * (expected**2).sum(axis=1))
    return float(np.where(lengths > 0, products / np.where(lengths > 0, lengths, 1), found.any(axis=1) == 0).min())
