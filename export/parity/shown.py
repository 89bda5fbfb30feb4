"""What can be wrong with a model file, with a correction that a few numbers of the capture show.

Attention's weights show windows, sinks and the number of heads. Queries and keys show RoPE's frequencies: the angle
between what was rotated and the reference. As in `fitted`, `causes` computes the stage with each correction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamac.export.checkpoint import Checkpoint, LazyTensor
from llamac.export.equations import rms_norm
from llamac.export.parity.capture import Capture
from llamac.export.parity.changes import Suspect, with_record
from llamac.export.parity.compare import EXACT, Tolerance
from llamac.export.parity.observed import unrotated
from llamac.export.parity.replay import replay, replayed_difference
from llamac.export.parity.stages import Key

Array = NDArray[np.float64]

SAME = 2e-3  # relative difference of frequencies that are called equal
SHARES = (1.0, 0.5, 0.25, 0.75, 0.4, 0.3)  # of a head's numbers that RoPE can rotate
FREQUENCIES_SHOWN = 4


def shown(checkpoint: Checkpoint, reference: Capture, key: Key) -> Iterator[Suspect]:
    """Yield the suspects of a stage whose corrections the reference's stages show.

    Args:
        checkpoint: The file.
        reference: The capture, in the engine's form; the stages before `key` agree with it.
        key: The first stage that differs.
    """
    stage, layer = key
    if checkpoint.config.layers[layer].mixer not in ("attention", "attention_mamba2"):
        return
    if stage in ("q", "k"):
        yield from _rope(checkpoint, reference, key)
        yield from _qk_norms(checkpoint, reference, layer)
    if stage in ("q", "k", "weights"):
        yield from _heads(checkpoint, reference, key)
    if stage == "weights":
        yield from _windows(checkpoint, reference, layer)
        yield from _sinks(checkpoint, reference, layer)


# ---- the weights of attention


def _windows(checkpoint: Checkpoint, reference: Capture, layer: int) -> Iterator[Suspect]:
    """The window whose edge the zeros of the weights show. Weights that are too small for float32 are zeros, too."""
    record = checkpoint.config.layers[layer]
    seen = reference.stages["weights", layer].max(axis=1) > 0
    rows = np.arange(len(seen))
    reach = rows - seen.argmax(axis=1) + 1
    widest = int(reach.max())
    starts = np.flatnonzero((reach == 1) & (rows > 0))  # chunks begin anew
    shown = [(int(starts[0]), 1)] if len(starts) else []
    shown += [(widest, 0)] if widest < len(rows) else []
    own = record.window, int(bool(record.window_chunks))
    for window, chunks in shown:
        if (window, chunks) != own:
            text = f"layer {layer} has {_text_of(*own)}; it should have {_text_of(window, chunks)}"
            yield Suspect(text, with_record(checkpoint, layer, window=window, window_chunks=chunks))


def _text_of(window: int, chunks: int) -> str:
    if not window:
        return "no window"
    return f"windows that begin at multiples of {window}" if chunks else f"a window of {window} positions"


def _sinks(checkpoint: Checkpoint, reference: Capture, layer: int) -> Iterator[Suspect]:
    """The sinks that the sums of the weights show: what is left of 1 is theirs."""
    sums = reference.stages["weights", layer].astype(np.float64).sum(axis=2)
    if sums.shape[1] != (checkpoint.config.layers[layer].n_heads or checkpoint.config.n_heads):
        return
    name = f"layers.{layer}.attn_sinks.weight"
    scores = replay(checkpoint, reference, ("scores", layer)).reshape(len(sums), sums.shape[1], -1)
    with np.errstate(all="ignore"):
        largest = scores.max(axis=2)
        logits = np.log((1 - sums) / sums) + largest + np.log(np.exp(scores - largest[..., None]).sum(axis=2))
        sinks = logits[sums.argmin(axis=0), np.arange(sums.shape[1])]  # where they are least rounded
    if not np.isfinite(sinks).all():
        return
    has_own = bool(checkpoint.config.layers[layer].sinks)
    text = f"{name} is wrong" if has_own else f"layer {layer} lacks sinks ({name})"
    tensors = checkpoint.tensors | {name: LazyTensor.of(sinks.astype(np.float32))}
    yield Suspect(
        f"{text}: the sums of the attention weights show others",
        replace(with_record(checkpoint, layer, sinks=1), tensors=tensors),
    )


def _heads(checkpoint: Checkpoint, reference: Capture, key: Key) -> Iterator[Suspect]:
    """Another number of heads of another width, in matrices of the same shapes."""
    layer, config = key[1], checkpoint.config
    record = config.layers[layer]
    own, head_dim = record.n_heads or config.n_heads, record.head_dim or config.head_dim
    n_heads = reference.stages["weights", layer].shape[1]
    width, keys = own * head_dim, (record.n_kv_heads or config.n_kv_heads) * head_dim
    if n_heads == own or record.kv_lora_rank or width % n_heads or keys % (width // n_heads):
        return
    new_dim = width // n_heads
    values: dict[str, Any] = {"n_heads": n_heads, "n_kv_heads": keys // new_dim, "head_dim": new_dim}
    is_usual = math.isclose(config.attention_scale, head_dim**-0.5, rel_tol=1e-6)
    scale = new_dim**-0.5 if is_usual else config.attention_scale
    changed = with_record(replace(checkpoint, config=replace(config, attention_scale=scale)), layer, **values)
    text = f"the heads of layer {layer} are {own} of {head_dim} numbers; they should be {n_heads} of {new_dim}"
    if record.rope < 0:
        yield Suspect(text, changed)
        return
    for suspect in _rope(with_record(changed, layer, rope=-1), reference, key):
        yield Suspect(text, suspect.checkpoint)


# ---- RoPE


def _rope(checkpoint: Checkpoint, reference: Capture, key: Key) -> Iterator[Suspect]:
    """The frequencies, the factor and the number of rotated dimensions with which queries or keys agree."""
    layer, config = key[1], checkpoint.config
    record = config.layers[layer]
    expected = reference.stages[key].astype(np.float64)
    if config.qk_norm != "none" and config.qk_norm_after_rope:
        return
    table = record.rope
    own_dim = config.rope_dim[table] if table >= 0 else 0
    head_dim = record.head_dim or config.head_dim
    found = unrotated(checkpoint, reference, key, replay(checkpoint, reference, key))
    if found.shape != expected.shape:
        return
    ours, theirs = (rows.reshape(len(rows), -1, head_dim) for rows in (found, expected))
    dims = {2 * round(share * head_dim / 2) for share in SHARES} if not record.kv_lora_rank else set()
    for rope_dim in [own_dim, *sorted(dims - {own_dim}, reverse=True)]:
        if not 2 <= rope_dim <= head_dim:
            continue
        inv_freq, factor = _frequencies(ours, theirs, rope_dim // 2)
        if not np.isfinite(inv_freq).all() or not math.isfinite(factor):
            continue
        text = f"layer {layer} has no RoPE" if table < 0 else ""
        if own_dim and rope_dim != own_dim:
            text = f"RoPE rotates {own_dim} numbers of each head; it should rotate {rope_dim}"
        name = f"rope.{max(table, 0)}.inv_freq"
        text = text or _text_of_frequencies(checkpoint, name, inv_freq, factor, max(table, 0))
        changed = _with_table(checkpoint, layer, rope_dim, inv_freq, factor)
        if _fits_others(checkpoint, changed, reference, key):
            yield Suspect(text, changed)


def _fits_others(checkpoint: Checkpoint, changed: Checkpoint, reference: Capture, key: Key) -> bool:
    """Whether what else a changed table rotates agrees with it: a wrong matrix of one layer looks like a factor.

    These are the layer's keys or queries, and the queries and keys of earlier layers, unless these differ either way.
    """
    layer, table = key[1], changed.config.layers[key[1]].rope
    for other in range(layer + 1):
        for stage in ("q", "k"):
            one = stage, other
            if one == key or one not in reference.stages or changed.config.layers[other].rope != table:
                continue
            if replayed_difference(changed, reference, one, Tolerance(EXACT)).is_within:
                continue
            if other == layer or replayed_difference(checkpoint, reference, one, Tolerance(EXACT)).is_within:
                return False
    return True


def _frequencies(ours: Array, theirs: Array, half: int) -> tuple[Array, float]:
    """The frequency of each pair, (half), and the factor of all. ours and theirs (n, heads, head_dim)."""
    one, other = (rows[..., :half] + 1j * rows[..., half : 2 * half] for rows in (ours, theirs))
    products = (one.conj() * other).sum(axis=1)  # (n, half)
    squares = (abs(one) ** 2).sum(axis=1)
    factor = float(abs(products).sum() / max(squares.sum(), np.finfo(np.float64).tiny))
    phases = np.angle(products)
    inv_freq = phases[1].copy()
    for position in range(2, len(phases)):  # each position refines what the ones before it have shown
        error = phases[position] - position * inv_freq
        error -= 2 * np.pi * np.round(error / (2 * np.pi))
        inv_freq += error / position
    return inv_freq, factor


def _with_table(checkpoint: Checkpoint, layer: int, rope_dim: int, inv_freq: Array, factor: float) -> Checkpoint:
    """The checkpoint whose layer rotates with these frequencies: its table's, or those of a new one."""
    config, table = checkpoint.config, checkpoint.config.layers[layer].rope
    lists = [list(x) for x in (config.rope_dim, config.rope_original_context, config.rope_attention_factor)]
    if table < 0:
        table = len(config.rope_dim)
        for numbers, value in zip(lists, (rope_dim, 0, 1.0), strict=True):
            numbers.append(value)
    lists[0][table], lists[2][table] = rope_dim, factor
    names = [f"rope.{table}.inv_freq{end}" for end in ("", "_long")]
    tensors = checkpoint.tensors | {
        name: LazyTensor.of(inv_freq.astype(np.float32))
        for name in names
        if name == names[0] or name in checkpoint.tensors
    }
    fields = ("rope_dim", "rope_original_context", "rope_attention_factor")
    values: dict[str, Any] = dict(zip(fields, map(tuple, lists), strict=True))
    return with_record(replace(checkpoint, config=replace(config, **values), tensors=tensors), layer, rope=table)


def _text_of_frequencies(checkpoint: Checkpoint, name: str, inv_freq: Array, factor: float, table: int) -> str:
    """How the frequencies and the factor differ from the file's."""
    own = checkpoint.tensors[name].array().astype(np.float64)
    own_factor = checkpoint.config.rope_attention_factor[table]
    if not np.isclose(factor, own_factor, rtol=SAME):
        return f"rope_attention_factor is {own_factor:.6g}; the capture shows {factor:.5g}"
    start = f"RoPE's frequencies ({name}) "
    ratios = inv_freq / own
    if np.allclose(ratios, ratios[0], rtol=SAME):
        return f"{start}are {1 / ratios[0]:.4g} times as large as they should be"
    if (inv_freq > 0).all() and len(inv_freq) > 1:
        theta = float(inv_freq[-1] ** (-len(inv_freq) / (len(inv_freq) - 1)))
        plain = theta ** (-np.arange(len(inv_freq)) / len(inv_freq))
        if np.allclose(inv_freq, plain, rtol=SAME):
            return f"{start}should be the plain ones of rope_theta {theta:.4g}"
    listed = ", ".join(f"{number:.4g}" for number in inv_freq[:FREQUENCIES_SHOWN])
    more = ", ..." * (len(inv_freq) > FREQUENCIES_SHOWN)
    wrong = np.count_nonzero(~np.isclose(inv_freq, own, rtol=SAME))
    return f"{wrong} of {len(own)} of {start.removesuffix(' ')} are wrong: the capture shows {listed}{more}"


# ---- norms of queries and keys


def _qk_norms(checkpoint: Checkpoint, reference: Capture, layer: int) -> Iterator[Suspect]:
    """Norms of queries and keys that the file lacks, with the weights that fit, or that it should not have."""
    config = checkpoint.config
    if config.qk_norm != "none":
        text = f"queries and keys are normed (qk_norm is {config.qk_norm}); they should not be"
        yield Suspect(text, replace(checkpoint, config=replace(config, qk_norm="none")))
        return
    if config.layers[layer].kv_lora_rank or config.layers[layer].kv_source >= 0:
        return
    head_dim = config.layers[layer].head_dim or config.head_dim
    for kind, width in (("head", head_dim), ("whole", 0)):
        tensors = dict(checkpoint.tensors)
        for part in ("q", "k"):
            key = part, layer
            found = unrotated(checkpoint, reference, key, replay(checkpoint, reference, key))
            expected = unrotated(checkpoint, reference, key, reference.stages[key].astype(np.float64))
            if found.shape != expected.shape:
                return
            ours, theirs = (rows.reshape(-1, width or rows.shape[1]) for rows in (found, expected))
            normed = rms_norm(ours, np.ones(ours.shape[1]), config.norm_eps)
            weight = (normed * theirs).sum(axis=0) / np.maximum((normed * normed).sum(axis=0), 1e-30)
            tensors[f"layers.{layer}.attn_{part}_norm.weight"] = LazyTensor.of(weight.astype(np.float32))
        changed = replace(checkpoint, config=replace(config, qk_norm=kind), tensors=tensors)
        text = f"layer {layer} lacks the norms of queries and keys (qk_norm is none; it should be {kind})"
        yield Suspect(text, changed)
