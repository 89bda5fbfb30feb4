"""The float64 forward pass of a sequence whose positions shift: the oracle for `Session.shift`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from llamac.arguments import KVDtype
from llamac.export import equations, reference
from llamac.export.checkpoint import Checkpoint, LayerConfig
from llamac.export.reference import Array
from llamac.export.rounding import round_to_cache


@dataclass(frozen=True)
class Shift:
    """Positions [begin, end) are removed once `count` tokens have been computed."""

    count: int
    begin: int
    end: int


@dataclass(frozen=True)
class _Era:
    """The rows between two shifts, and where every token is then; -1: removed."""

    rows: slice
    positions: NDArray[np.int64]


def _eras(n: int, shifts: Sequence[Shift]) -> list[_Era]:
    eras, start = [], 0
    held = list(range(n))  # the token at each position, later tokens included
    for shift in [*shifts, Shift(n, 0, 0)]:
        positions = np.full(n, -1)
        positions[held] = np.arange(len(held))
        eras.append(_Era(slice(start, shift.count), positions))
        del held[shift.begin : shift.end]
        start = shift.count
    return eras


def shifted_logits(
    checkpoint: Checkpoint,
    ids: Sequence[int],
    shifts: Sequence[Shift],
    context: int,
    kv_dtype: KVDtype | None = None,
) -> Array:
    """The logits of every token, (n, vocab_size).

    Without `kv_dtype` nothing is rounded, and the keys are rotated anew after each shift. Otherwise keys and values are
    rounded as a cache of this format stores them, and each shift rotates and rounds the stored keys again.
    """
    config = checkpoint.config
    eras = _eras(len(ids), shifts)
    frequencies = [reference._inverse_frequencies(checkpoint, t, context) for t in range(len(config.rope_dim))]

    def placed(run: Any, x: Array, norm: str, record: LayerConfig, positions: NDArray[np.int64]) -> Array:
        angles = [equations.rope_angles(np.maximum(positions, 0), inverse) for inverse in frequencies]
        return reference._norm_and_rope(replace(run, angles=angles), x, norm, record, not config.qk_norm_after_rope)

    def rotated_again(k: Array, record: LayerConfig, before: _Era, now: _Era) -> Array:
        if record.rope < 0:
            return k
        old, new = (equations.rope_angles(era.positions, frequencies[record.rope]) for era in (before, now))
        return round_to_cache(equations.rotate(k, new - old, 1.0), k, kv_dtype)[0]

    def keys_of_eras(run: Any, k: Array, norm: str, record: LayerConfig) -> list[Array]:
        keys: list[Array] = []
        for i, era in enumerate(eras):
            stored = placed(run, k, norm, record, era.positions)
            if kv_dtype is not None:
                stored = round_to_cache(stored, stored, kv_dtype)[0]
                if i:
                    before = slice(0, era.rows.start)
                    moved = rotated_again(keys[-1], record, eras[i - 1], era)
                    kept = (era.positions == eras[i - 1].positions)[before, None, None]
                    stored[before] = np.where(kept, keys[-1][before], moved[before])
            keys.append(stored)
        return keys

    def attention(run: Any, h: Array, layer: int, record: LayerConfig) -> Array:
        name = f"layers.{layer}"
        head_dim = record.head_dim or config.head_dim

        def project(part: str) -> Array:
            product: Array = run.linear(h, f"{name}.attn_{part}").reshape(len(h), -1, head_dim)
            return product

        q = project("q")
        if record.kv_source < 0:
            v = project("v")
            keys = keys_of_eras(run, project("k"), f"{name}.attn_k_norm", record)
            run.keys_values[layer] = keys, round_to_cache(v, v, kv_dtype)[1]
        keys, v = run.keys_values[record.kv_source if record.kv_source >= 0 else layer]
        sinks = reference._vector(checkpoint, f"{name}.attn_sinks.weight") if record.sinks else None
        mix = np.empty_like(q)
        for era, rotated in zip(eras, keys, strict=True):
            own = era.positions[era.rows]
            queries = placed(run, q[era.rows], f"{name}.attn_q_norm", record, own)
            scale = equations.query_scale(own, record.query_beta, record.query_context, record.query_offset)
            scale = scale[:, None, None]
            repeated = np.repeat(rotated, q.shape[1] // rotated.shape[1], axis=1)
            scores = config.attention_scale * np.einsum("ihd,jhd->ihj", queries * scale, repeated)
            distance = own[:, None] - era.positions[None, :]
            near = (record.window == 0) | (distance < record.window)
            if record.window_chunks:
                near = own[:, None] // record.window == era.positions[None, :] // record.window
            visible = (distance >= 0) & (era.positions >= 0) & near
            scores = np.where(visible[:, None, :], equations.soft_cap(scores, config.attention_soft_cap), -np.inf)
            mix[era.rows] = equations.attention_mix(scores, v, sinks, kv_dtype, era.positions)
        out: Array = run.linear(mix.reshape(len(h), -1), f"{name}.attn_out")
        return out

    config_context = max(config.context, len(ids))  # more tokens than positions
    long = replace(checkpoint, config=replace(config, context=config_context))
    with mock.patch.dict(reference.MIXERS, attention=attention):
        return reference.forward(long, [ids], context=config_context)[0]
