"""Changes of a checkpoint: what a suspect is, and how one is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamac.export.checkpoint import Checkpoint, LazyTensor

Floats = NDArray[np.float32]
Change = Callable[[Floats], Floats]

# What decides each stage, besides the stages before it.
MATRICES = {
    "q": ("attn_q", "attn_q_a", "attn_k_b"),
    "k": ("attn_k", "attn_kv_a"),
    "cache_k": ("attn_k", "attn_kv_a"),
    "v": ("attn_v", "attn_kv_a"),
    "cache_v": ("attn_v", "attn_kv_a"),
    "attn_mix": (
        *("attn_v_b", "attn_gate", "delta_qkv", "delta_z", "delta_a", "delta_beta"),
        *("mamba_xbc", "mamba_z", "mamba_dt", "conv_in"),
    ),
    "attn_out": ("attn_out", "delta_out", "mamba_out", "conv_out"),
    "ffn": (
        *("ffn_gate", "ffn_up", "ffn_down", "ffn_router"),
        *("shared_ffn_gate", "shared_ffn_up", "shared_ffn_down", "shared_gate"),
    ),
}


@dataclass(frozen=True)
class Suspect:
    """A possible fault.

    Attributes:
        sentence: What is wrong with the file.
        checkpoint: The file's checkpoint without the fault.
    """

    sentence: str
    checkpoint: Checkpoint


def with_changed(checkpoint: Checkpoint, names: str | tuple[str, ...], change: Change) -> Checkpoint:
    """The checkpoint with changed tensors; those that it does not have are left out."""
    tensors = dict(checkpoint.tensors)
    for name in (names,) if isinstance(names, str) else names:
        if name in tensors:
            tensors[name] = LazyTensor.of(np.ascontiguousarray(change(tensors[name].array()), np.float32))
    return replace(checkpoint, tensors=tensors)


def configured(checkpoint: Checkpoint, **values: Any) -> Checkpoint:
    return replace(checkpoint, config=replace(checkpoint.config, **values))


def with_record(checkpoint: Checkpoint, layer: int, **values: Any) -> Checkpoint:
    """The checkpoint with other values in a layer's record."""
    layers = list(checkpoint.config.layers)
    layers[layer] = replace(layers[layer], **values)
    return configured(checkpoint, layers=tuple(layers))


def swapped(checkpoint: Checkpoint, one: str, other: str, kinds: tuple[str, ...] = ("weight", "bias")) -> Checkpoint:
    """The checkpoint with two modules' tensors exchanged."""
    tensors = dict(checkpoint.tensors)
    for kind in kinds:
        names = f"{one}.{kind}", f"{other}.{kind}"
        if all(name in tensors for name in names):
            tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]
    return replace(checkpoint, tensors=tensors)


def elsewhere(checkpoint: Checkpoint, module: str, other: str) -> Iterator[Suspect]:
    """That a module's numbers are wrong and those of another one, of the same shapes, are right; or the other way, too.

    Nothing is yielded if the modules have other tensors, or other shapes.
    """
    tensors = checkpoint.tensors
    names = {part: (f"{module}.{part}", f"{other}.{part}") for part in ("weight", "bias")}
    shapes = [
        {part: tensors[name].shape for part, both in names.items() if (name := both[i]) in tensors} for i in (0, 1)
    ]
    if not shapes[0] or shapes[0] != shapes[1]:
        return
    yield Suspect(f"{module} and {other} are exchanged", swapped(checkpoint, module, other))
    text = f"{module} has the wrong numbers: the right ones are in {other}"
    moved = {names[part][0]: tensors[names[part][1]] for part in shapes[0]}
    yield Suspect(text, replace(checkpoint, tensors=tensors | moved))
    yield from weights_alone(checkpoint, module, other)
    if len(moved) > 1:
        text = f"the weights of {module}, but not its biases, are wrong: the right ones are in {other}"
        own, right = names["weight"]
        yield Suspect(text, replace(checkpoint, tensors=tensors | {own: tensors[right]}))


def weights_alone(checkpoint: Checkpoint, one: str, other: str) -> Iterator[Suspect]:
    """That the weights of two modules are exchanged, and their biases are not. Nothing if they have no biases."""
    if all(f"{module}.bias" in checkpoint.tensors for module in (one, other)):
        text = f"the weights of {one} and {other}, but not their biases, are exchanged"
        yield Suspect(text, swapped(checkpoint, one, other, ("weight",)))


def same(one: Any, other: Any) -> bool:
    """Whether two values of a config are equal as the file stores them, in float32."""
    if isinstance(one, tuple) or isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) or isinstance(other, float):
        return bool(np.float32(one) == np.float32(other))
    return bool(one == other)


def text_of(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def is_matrix(name: str, layer: int, module: str) -> bool:
    """Whether a tensor is the matrix `module` of a layer, or of one of its experts."""
    start, end = f"layers.{layer}.", f".{module}.weight"
    return name == start + end[1:] or (name.startswith(f"{start}experts.") and name.endswith(end))


def transposed(weight: Floats) -> Floats:
    """A matrix (out, in) whose numbers were stored in the order of (in, out)."""
    transposed: Floats = weight.reshape(weight.shape[1], weight.shape[0]).T
    return transposed
