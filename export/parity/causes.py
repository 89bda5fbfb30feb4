"""Finds the cause of a difference: corrects one possible fault after another until the difference vanishes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llamac.errors import LlamacError
from llamac.export.checkpoint import Checkpoint
from llamac.export.equations import rope_angles, rotate
from llamac.export.parity.capture import Capture
from llamac.export.parity.compare import Difference, Tolerance, difference, n_heads
from llamac.export.parity.replay import replay, replayed_difference
from llamac.export.parity.stages import Key
from llamac.export.parity.suspects import Suspect, of_original, suspects

Array = NDArray[np.float64]
# A correction must remove at least this share of the difference.
VANISHES = 0.25
MOST = 4  # causes
# Of the corrections that do not suffice, so many with the least error are tried with each other one.
HALVES = 4
# Stages that a bias is added to.
BIASES = {
    "attn_norm": "attn_norm.bias",
    "q": "attn_q.bias",
    "k": "attn_k.bias",
    "v": "attn_v.bias",
    "attn_out": "attn_out.bias",
    "ffn_norm": "ffn_norm.bias",
    "ffn": "ffn_down.bias",
    "output_norm": "output_norm.bias",
    "logits": "output.bias",
}


@dataclass(frozen=True)
class Cause:
    """An explanation of a difference.

    Attributes:
        sentence: What is wrong.
        left: The relative error that is left once it is corrected.
    """

    sentence: str
    left: float


@dataclass(frozen=True)
class Verdict:
    """What is known about a difference.

    Attributes:
        fault: "file": the file's weights or numbers are wrong, because a float64 pass over them, from the reference's
            inputs, does not give the reference's stage. "engine": the engine's arithmetic is wrong, because such a pass
            from the engine's own inputs does not give the engine's stage. "rounding": both do; small differences of
            the stages before have added up.
        error: The relative error of the pass that decided it.
        causes: For faults of the file, explanations that were tested: correcting any of them alone makes the stage
            agree. A pair of faults is one explanation.
    """

    fault: Literal["file", "engine", "rounding"]
    error: float
    causes: tuple[Cause, ...] = ()


def find_causes(
    checkpoint: Checkpoint,
    engine: Capture,
    reference: Capture,
    first: Difference,
    original: Checkpoint | None = None,
) -> Verdict:
    """Explain the first stage that is out of tolerance.

    Args:
        checkpoint: The engine's file.
        engine: What the engine computed.
        reference: The capture, in the engine's form.
        first: The difference.
        original: What the exporter reads from the original now; None if there is no original.
    """
    key = first.stage, first.layer
    tolerance = first.tolerance
    base = replayed_difference(checkpoint, reference, key, tolerance)
    if base.is_within:
        own = replayed_difference(checkpoint, engine, key, tolerance)
        return Verdict("rounding" if own.is_within else "engine", own.relative)
    limit = replace(tolerance, limit=min(tolerance.limit, VANISHES * base.relative))
    causes = _missing_bias(checkpoint, reference, key, limit)

    def candidates(start: Checkpoint) -> Iterable[Suspect]:
        named = suspects(start, key, reference.config)
        return named if original is None else itertools.chain(named, of_original(start, key, original))

    seen: list[Checkpoint] = []
    alone, halves = _explaining(candidates(checkpoint), reference, key, limit, seen)
    causes += alone
    for half in halves if not causes else []:
        for other in _explaining(candidates(half.checkpoint), reference, key, limit, seen)[0]:
            causes.append(Cause(f"{half.sentence}; and {other.sentence}", other.left))
    return Verdict("file", base.relative, tuple(causes[:MOST]))


def _explaining(
    candidates: Iterable[Suspect], reference: Capture, key: Key, limit: Tolerance, seen: list[Checkpoint]
) -> tuple[list[Cause], list[Suspect]]:
    """The suspects whose correction leaves an error within `limit`, and of the others those that leave the least.

    Their checkpoints are appended to `seen`. Those that were there are not tried again: something else has named them.
    """
    found: list[Cause] = []
    others: list[tuple[float, Suspect]] = []
    for suspect in candidates:
        if suspect.checkpoint in seen or any(suspect.checkpoint == other.checkpoint for _, other in others):
            continue
        try:
            left = replayed_difference(suspect.checkpoint, reference, key, limit)
        except (LlamacError, ValueError, IndexError, KeyError):
            continue  # a correction that does not fit this model
        if left.is_within:
            found.append(Cause(suspect.sentence, left.relative))
            seen.append(suspect.checkpoint)
        else:
            others = sorted([*others, (left.relative, suspect)], key=lambda other: other[0])[:HALVES]
    halves = [suspect for _, suspect in others]
    seen += [suspect.checkpoint for suspect in halves]
    return found, halves


def _missing_bias(checkpoint: Checkpoint, reference: Capture, key: Key, limit: Tolerance) -> list[Cause]:
    """A bias is missing, or wrong, if the same numbers are missing at all positions."""
    stage, layer = key
    if stage not in BIASES or (stage in ("q", "k") and checkpoint.config.qk_norm != "none"):
        return []
    expected, found = reference.stages[key].astype(np.float64), replay(checkpoint, reference, key)
    missing = _unrotated(checkpoint, reference, key, expected - found)
    constant = np.broadcast_to(missing.mean(axis=0), missing.shape)
    corrected = found + _unrotated(checkpoint, reference, key, constant, inverse=True)
    left = difference(key, corrected, expected, n_heads(checkpoint.config, key), limit)
    if not left.is_within:
        return []
    name = BIASES[stage] if stage in ("output_norm", "logits") else f"layers.{layer}.{BIASES[stage]}"
    tensor = checkpoint.tensors.get(name)
    state = "is missing" if tensor is None or not tensor.array().any() else "is wrong"
    return [Cause(f"{name} {state}: the same numbers are missing at all positions", left.relative)]


def _unrotated(checkpoint: Checkpoint, reference: Capture, key: Key, rows: Array, *, inverse: bool = False) -> Array:
    """Rows before RoPE; inversely, after it. Rows of stages without RoPE are unchanged."""
    stage, layer = key
    config, record = checkpoint.config, checkpoint.config.layers[layer]
    if stage not in ("q", "k") or record.rope < 0:
        return rows
    question, table = reference.question, record.rope
    is_long = 0 < config.rope_original_context[table] < question.context
    inv_freq = checkpoint.tensors[f"rope.{table}.inv_freq{'_long' if is_long else ''}"].array().astype(np.float64)
    angles = rope_angles(np.arange(len(question.ids)), inv_freq)
    factor = config.rope_attention_factor[table]
    heads = rows.reshape(len(rows), -1, record.head_dim or config.head_dim)
    turned = rotate(heads, angles, factor) if inverse else rotate(heads, -angles, 1 / factor)
    return turned.reshape(rows.shape)
