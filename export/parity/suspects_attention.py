"""What can be wrong with attention in a model file: how matrices are stored and divided, RoPE, windows and scales."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from llamac.export.checkpoint import Checkpoint, LazyTensor
from llamac.export.parity.changes import (
    MATRICES,
    Floats,
    Suspect,
    configured,
    elsewhere,
    is_matrix,
    same,
    swapped,
    transposed,
    weights_alone,
    with_changed,
    with_record,
)

THETAS = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0)
QKV = ("attn_q", "attn_k", "attn_v")


def of_matrices(checkpoint: Checkpoint, stage: str, layer: int) -> Iterator[Suspect]:
    prefix = f"layers.{layer}"
    for module in MATRICES[stage]:
        names = [name for name in checkpoint.tensors if is_matrix(name, layer, module)]
        if names:
            what = f"{prefix}.{module}.weight" if len(names) == 1 else f"{module} of layer {layer}'s experts"
            text = f"{what} is transposed (a Conv1D's matrix is stored as (in, out))"
            yield Suspect(text, with_changed(checkpoint, tuple(names), transposed))
        for other in (layer - 1, layer + 1):
            yield from elsewhere(checkpoint, f"{prefix}.{module}", f"layers.{other}.{module}")
    if set(MATRICES[stage]) & set(QKV):
        yield from _of_fused(checkpoint, layer)


def _of_fused(checkpoint: Checkpoint, layer: int) -> Iterator[Suspect]:
    """Faults in the division of a matrix that has queries, keys and values."""
    modules = [f"layers.{layer}.{module}" for module in QKV]
    if not all(f"{module}.weight" in checkpoint.tensors for module in modules):
        return
    matrices = [checkpoint.tensors[f"{module}.weight"].array() for module in modules]
    if len({matrix.shape[1] for matrix in matrices}) != 1:
        return
    whole = np.concatenate(matrices)
    text = f"the fused matrix of layer {layer}'s queries, keys and values is transposed (a Conv1D's is (in, out))"
    tensors = dict(checkpoint.tensors)
    bounds = np.cumsum([len(matrix) for matrix in matrices])[:-1]
    for module, part in zip(modules, np.split(transposed(whole), bounds), strict=True):
        tensors[f"{module}.weight"] = LazyTensor.of(np.ascontiguousarray(part))
    yield Suspect(text, replace(checkpoint, tensors=tensors))
    for one, other in ((0, 1), (0, 2), (1, 2)):
        if matrices[one].shape == matrices[other].shape:
            text = f"{modules[one]} and {modules[other]} are exchanged"
            yield Suspect(text, swapped(checkpoint, modules[one], modules[other]))
            yield from weights_alone(checkpoint, modules[one], modules[other])
    config, record = checkpoint.config, checkpoint.config.layers[layer]
    kv_heads, head_dim = record.n_kv_heads or config.n_kv_heads, record.head_dim or config.head_dim
    group = (record.n_heads or config.n_heads) // kv_heads
    if len(whole) != (group + 2) * kv_heads * head_dim:
        return
    order = _by_group(kv_heads, group, head_dim)
    fused, parts = f"the fused matrix of layer {layer} was divided", "in thirds" if group == 1 else "into three parts"
    of_head = "head by head" if group == 1 else "for each head of keys, its queries, its key and its value"
    for text, rows in (
        (f"{fused} {parts}; it holds queries, keys and values {of_head}", order),
        (f"{fused} {of_head}; it holds all queries, then all keys, then all values", np.argsort(order)),
    ):
        for kinds in (("weight",), ("weight", "bias")):
            names = [[f"{module}.{kind}" for module in modules] for kind in kinds]
            if all(name in checkpoint.tensors for some in names for name in some):
                yield Suspect(text, _divided(checkpoint, names, rows))


def _by_group(kv_heads: int, group: int, head_dim: int) -> NDArray[np.intp]:
    """The rows of all queries, then all keys, then all values, in a matrix that has those of a key's head together."""
    rows = np.arange(kv_heads * (group + 2) * head_dim).reshape(kv_heads, group + 2, head_dim)
    return np.concatenate([part.reshape(-1) for part in (rows[:, :group], rows[:, group], rows[:, group + 1])])


def _divided(checkpoint: Checkpoint, names: list[list[str]], rows: NDArray[np.intp]) -> Checkpoint:
    """The checkpoint with these rows of the tensors that each list of names is, one after the other."""
    tensors = dict(checkpoint.tensors)
    for some in names:
        parts = [checkpoint.tensors[name].array() for name in some]
        bounds = np.cumsum([len(part) for part in parts])[:-1]
        for name, part in zip(some, np.split(np.concatenate(parts)[rows], bounds), strict=True):
            tensors[name] = LazyTensor.of(np.ascontiguousarray(part))
    return replace(checkpoint, tensors=tensors)


def of_rope(checkpoint: Checkpoint, stage: str, layer: int) -> Iterator[Suspect]:
    config, record = checkpoint.config, checkpoint.config.layers[layer]
    yield from _of_pairs(checkpoint, stage, layer)
    for table in range(-1, len(config.rope_dim)):
        if table != record.rope:
            text = f"layer {layer} " + ("has no RoPE" if record.rope < 0 else f"uses RoPE table {record.rope}")
            text += "; it should have none" if table < 0 else f"; it should use table {table}"
            yield Suspect(text, with_record(checkpoint, layer, rope=table))
    if record.rope >= 0:
        rope_dim, name = config.rope_dim[record.rope], f"rope.{record.rope}.inv_freq"
        for theta in THETAS:
            inv_freq = (theta ** -(np.arange(0, rope_dim, 2) / rope_dim)).astype(np.float32)
            text = f"RoPE's frequencies ({name}) should be the plain ones of rope_theta {theta:g}"
            yield Suspect(text, replace(checkpoint, tensors=checkpoint.tensors | {name: LazyTensor.of(inv_freq)}))
    if config.qk_norm != "none":
        after = not config.qk_norm_after_rope
        text = f"the norm of queries and keys comes {'before' if after else 'after'} RoPE; it should be the other way"
        yield Suspect(text, configured(checkpoint, qk_norm_after_rope=int(after)))


def _of_pairs(checkpoint: Checkpoint, stage: str, layer: int) -> Iterator[Suspect]:
    """The conventions of RoPE's pairs. The engine rotates (j, j + n / 2). Keys follow queries, which are right then."""
    config, record = checkpoint.config, checkpoint.config.layers[layer]
    if record.rope < 0:
        return
    rope_dim = config.rope_dim[record.rope]
    neighbors = np.arange(rope_dim).reshape(-1, 2).T.reshape(-1) if rope_dim % 2 == 0 else np.arange(rope_dim)
    head_dim = record.head_dim or config.head_dim
    widths = {"attn_q": head_dim, "attn_k": head_dim}  # the rows of a head
    if record.kv_lora_rank:
        widths = {"attn_q": rope_dim + record.qk_nope_head_dim, "attn_kv_a": head_dim}
    conventions = (
        ("are in neighboring pairs (2j, 2j + 1); the engine rotates halves (j, j + n / 2)", neighbors),
        ("were reordered from neighboring pairs, but the original's pairs are halves", np.argsort(neighbors)),
        ("have the halves of each pair exchanged", np.roll(np.arange(rope_dim), rope_dim // 2)),
    )
    tensors: dict[str, tuple[str, ...]] = {"the rows": ("weight", "bias")}
    if any(f"layers.{layer}.{module}.bias" in checkpoint.tensors for module in widths):
        tensors |= {"the rows of the weights, but not of the biases,": ("weight",), "the biases": ("bias",)}
    modules = [list(widths), ["attn_q"]] if stage == "q" else [list(widths)[1:]]
    for moved, (what, kinds), (text, order) in product(modules, tensors.items(), conventions):
        changed = checkpoint
        for module in moved:
            width = widths[module]
            whole = np.concatenate([order, np.arange(rope_dim, width)])

            def reorder(rows: Floats, width: int = width, whole: NDArray[np.intp] = whole) -> Floats:
                return rows.reshape(-1, width, *rows.shape[1:])[:, whole].reshape(rows.shape)

            names = tuple(f"layers.{layer}.{module}.{kind}" for kind in kinds)
            changed = with_changed(changed, names, reorder)
        yield Suspect(f"wrong RoPE convention: {what} of {' and '.join(moved)} of layer {layer} {text}", changed)


def of_attention(checkpoint: Checkpoint, layer: int) -> Iterator[Suspect]:
    config, record = checkpoint.config, checkpoint.config.layers[layer]
    window = record.window
    for other in (window - 1, window + 1):
        if window and other > 0:
            text = f"the window of layer {layer} is off by one: {window} positions; it should be {other}"
            yield Suspect(text, with_record(checkpoint, layer, window=other))
    for other in sorted({0, *(layer.window for layer in config.layers)} - {window}):
        text = f"layer {layer} has {_window(window)}; it should have {_window(other)}"
        yield Suspect(text, with_record(checkpoint, layer, window=other))
    head_dim = record.head_dim or config.head_dim
    for scale in (head_dim**-0.5, 1.0, 1 / head_dim):
        if not same(scale, config.attention_scale):
            text = f"attention_scale is {config.attention_scale:.6g}; it should be {scale:.6g}"
            yield Suspect(text, configured(checkpoint, attention_scale=scale))
    if config.attention_soft_cap:
        text = f"scores are capped at {config.attention_soft_cap:g}; they should not be"
        yield Suspect(text, configured(checkpoint, attention_soft_cap=0.0))
    if config.bias_distance:
        text = "the biases of distance_bias are in reverse order: those of earlier positions belong to later ones"
        change = lambda rows: rows.reshape(config.n_heads, -1)[:, ::-1].reshape(rows.shape)  # noqa: E731
        yield Suspect(text, with_changed(checkpoint, "distance_bias.weight", change))
    if record.sinks:
        yield Suspect(f"layer {layer} has sinks; it should have none", with_record(checkpoint, layer, sinks=0))


def _window(window: int) -> str:
    return f"a window of {window} positions" if window else "no window"
