"""What can be wrong with the rest of a layer: its feed-forward network, experts, and how its branches are added."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from llamac.export.checkpoint import Checkpoint, LazyTensor
from llamac.export.equations import ACTIVATIONS
from llamac.export.parity.changes import (
    Floats,
    Suspect,
    configured,
    is_matrix,
    same,
    swapped,
    weights_alone,
    with_record,
)

# How a layer with one norm before each branch can be computed.
PLACEMENTS = {
    "pre": "one after the other, with norms of their inputs (pre-norm)",
    "parallel": "in parallel",
    "normed": "one after the other, each added to the normed residual stream (post-norm)",
    "normed_attn": "one after the other, attention alone added to the normed residual stream",
}


def of_ffn(checkpoint: Checkpoint, layer: int) -> Iterator[Suspect]:
    config, record = checkpoint.config, checkpoint.config.layers[layer]
    for name in ACTIVATIONS:
        if name != config.activation:
            text = f"the activation is {config.activation}; it should be {name}"
            yield Suspect(text, configured(checkpoint, activation=name))
    if record.ffn == "plain":
        return
    changed = checkpoint
    for name in [name for name in checkpoint.tensors if is_matrix(name, layer, "ffn_gate")]:
        module = name.removesuffix(".weight")
        changed = swapped(changed, module, module.removesuffix("gate") + "up")
    yield Suspect(f"ffn_gate and ffn_up of layer {layer} are exchanged", changed)
    yield from weights_alone(checkpoint, f"layers.{layer}.ffn_gate", f"layers.{layer}.ffn_up")
    yield from _of_fused(checkpoint, layer)
    if f"layers.{layer}.shared_ffn_gate.weight" in checkpoint.tensors:
        start = f"layers.{layer}.shared_ffn"
        text = f"{start}_gate and {start}_up are exchanged"
        yield Suspect(text, swapped(checkpoint, f"{start}_gate", f"{start}_up"))
    if record.ffn == "experts":
        normalized = not record.expert_weights
        text = f"the experts' weights {'are not' if normalized else 'are'} divided by their sum; "
        text += "they should be" if normalized else "they should not be"
        yield Suspect(text, with_record(checkpoint, layer, expert_weights=int(normalized)))
        for used in (record.n_experts_used - 1, record.n_experts_used + 1):
            if 0 < used <= record.n_experts:
                text = f"a token uses {record.n_experts_used} experts of layer {layer}; it should use {used}"
                yield Suspect(text, with_record(checkpoint, layer, n_experts_used=used))
        other = "sigmoid" if record.router == "softmax" else "softmax"
        text = f"the router of layer {layer} is a {record.router}; it should be a {other}"
        yield Suspect(text, with_record(checkpoint, layer, router=other))
        first = not record.expert_weights_first
        text = f"the experts' weights of layer {layer} multiply their {'outputs' if first else 'inputs'}; "
        text += f"they should multiply their {'inputs' if first else 'outputs'}"
        yield Suspect(text, with_record(checkpoint, layer, expert_weights_first=int(first)))
        if record.n_expert_groups:
            text = f"layer {layer} chooses experts from {record.n_expert_groups_used} of {record.n_expert_groups} "
            text += "groups; it should choose from all"
            yield Suspect(text, with_record(checkpoint, layer, n_expert_groups=0, n_expert_groups_used=0))


def _of_fused(checkpoint: Checkpoint, layer: int) -> Iterator[Suspect]:
    """Faults in the division of matrices that have gate and up."""
    ways = (
        ("in halves; it holds a row of each in turn", lambda both: (both[0::2], both[1::2])),
        ("row by row; it holds all rows of gate, then all of up", lambda both: _halves(_in_turn(both))),
    )
    for (how, divide), kinds in product(ways, (("weight",), ("weight", "bias"))):
        tensors = dict(checkpoint.tensors)
        for name in [name for name in tensors if is_matrix(name, layer, "ffn_gate")]:
            start = name.removesuffix("ffn_gate.weight")
            for kind in kinds:
                names = f"{start}ffn_gate.{kind}", f"{start}ffn_up.{kind}"
                if all(one in tensors for one in names):
                    parts = divide(np.concatenate([tensors[one].array() for one in names]))
                    tensors |= {
                        one: LazyTensor.of(np.ascontiguousarray(x)) for one, x in zip(names, parts, strict=True)
                    }
        text = f"the fused matrix of layer {layer}'s gate and up was divided {how}"
        yield Suspect(text, replace(checkpoint, tensors=tensors))


def _in_turn(both: Floats) -> Floats:
    """Two halves, a row of each in turn."""
    mixed: Floats = both.reshape(2, -1, *both.shape[1:]).swapaxes(0, 1).reshape(both.shape)
    return mixed


def _halves(rows: Floats) -> tuple[Floats, Floats]:
    return rows[: len(rows) // 2], rows[len(rows) // 2 :]


def of_branches(checkpoint: Checkpoint, layer: int) -> Iterator[Suspect]:
    """How the branches of a layer are added."""
    record = checkpoint.config.layers[layer]
    own = PLACEMENTS.get(record.placement)
    for other, way in PLACEMENTS.items() if own else ():
        if other != record.placement:
            text = f"attention and FFN of layer {layer} are computed {own}; they should be {way}"
            yield Suspect(text, with_record(checkpoint, layer, placement=other))
    if not same(checkpoint.config.residual_scale, 1.0):
        text = f"residual_scale is {checkpoint.config.residual_scale:.6g}; it should be 1"
        yield Suspect(text, configured(checkpoint, residual_scale=1.0))


def of_placements(checkpoint: Checkpoint, layer: int) -> Iterator[Suspect]:
    """Where the norms of a layer's branches are, with the weights that the file has."""
    placement, moved = checkpoint.config.layers[layer].placement, dict(checkpoint.tensors)
    if placement == "sandwich":
        text = f"layer {layer} has norms after its branches; it should not have them"
        yield Suspect(text, with_record(checkpoint, layer, placement="pre"))
    if placement not in ("pre", "post"):
        return
    before, after = ("norm", "post_norm") if placement == "pre" else ("post_norm", "norm")
    for part in ("attn", "ffn"):
        for kind in ("weight", "bias"):
            name = f"layers.{layer}.{part}_{before}.{kind}"
            if name in moved:
                moved[f"layers.{layer}.{part}_{after}.{kind}"] = moved[name]
    ways = {"pre": "before", "post": "after"}
    other = "post" if placement == "pre" else "pre"
    text = f"the norms of layer {layer} come {ways[placement]} its branches; they should come {ways[other]} them"
    yield Suspect(text, replace(with_record(checkpoint, layer, placement=other), tensors=moved))
