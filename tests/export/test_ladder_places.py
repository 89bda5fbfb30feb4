"""The ladder's explanations of tensors in the wrong place, of parts of them, and of several faults at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from captures import Fault, Floats, Planted, assert_named_alone, both, changed, exchanged, misread, to_neighbors
from llamac.export.checkpoint import Checkpoint
from llamac.export.parity.capture import Capture

Given = tuple[Checkpoint, Capture]


def layers_exchanged(checkpoint: Checkpoint) -> Checkpoint:
    """The tensors of layers 0 and 1 in each other's place."""
    places = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
    tensors = {places.get(name[:9], name[:9]) + name[9:]: tensor for name, tensor in checkpoint.tensors.items()}
    return replace(checkpoint, tensors=tensors)


def exchanged_in_a_ring(part: str) -> Fault:
    """A tensor of each of three layers in the place of the one before's."""

    def plant(checkpoint: Checkpoint) -> Checkpoint:
        own = checkpoint.tensors
        moved = {f"layers.{(layer + 1) % 3}.{part}": own[f"layers.{layer}.{part}"] for layer in range(3)}
        return replace(checkpoint, tensors=own | moved)

    return plant


def halves_exchanged(rows: Floats) -> Floats:
    return np.roll(rows, len(rows) // 2, axis=0)


PLANTED = {
    "a later layer's norm": Planted(
        "qwen3",
        exchanged_in_a_ring("attn_norm.weight"),
        ("attn_norm", 0),
        "layers.0.attn_norm has the wrong numbers: the right ones are in layers.1.attn_norm",
        further=("each number of attn_norm of layer 2 is off by a factor of its own, the same at all positions",),
    ),
    "the order of layers": Planted(
        "mistral", layers_exchanged, ("attn_norm", 0), "the tensors of layers 0 and 1 are exchanged"
    ),
    "another layer's matrix": Planted(
        "mistral",
        exchanged("layers.0.attn_v.weight", "layers.1.attn_v.weight"),
        ("v", 0),
        "layers.0.attn_v and layers.1.attn_v are exchanged",
    ),
    "another layer's weights": Planted(
        "qwen2",
        exchanged("layers.0.attn_v.weight", "layers.1.attn_v.weight"),
        ("v", 0),
        "the weights of layers.0.attn_v and layers.1.attn_v, but not their biases, are exchanged",
    ),
    "a norm of all queries": Planted(
        "olmo2",
        changed("layers.1.attn_q_norm.weight", lambda w: w * np.where(np.arange(len(w)) == 3, 2, 1).astype(np.float32)),
        ("q", 1),
        "number 3 of q of layer 1 is 2 times as large as it should be, at all positions: layers.1.attn_q_norm.weight",
    ),
    "a norm of each head's keys": Planted(
        "qwen3",
        changed("layers.1.attn_k_norm.weight", np.ones_like),
        ("k", 1),
        "each number of k of layer 1 is off by a factor of its own, the same at all positions: "
        "layers.1.attn_k_norm.weight is wrong",
    ),
    "a norm of states": Planted(
        "granitemoehybrid",
        changed("layers.0.mamba_norm.weight", np.ones_like),
        ("attn_mix", 0),
        "each number of attn_mix of layer 0 is off by a factor of its own, the same at all positions: "
        "layers.0.mamba_norm.weight is wrong",
    ),
    "pairs of the weights alone": Planted(
        "qwen2",
        changed("layers.1.attn_k.weight", to_neighbors(10)),
        ("k", 1),
        "wrong RoPE convention: the rows of the weights, but not of the biases, of attn_k of layer 1 are in "
        "neighboring pairs",
    ),
    "heads under a norm of all keys": Planted(
        "olmo2",
        both(*(changed(f"layers.1.attn_k.{part}", halves_exchanged) for part in ("weight", "bias"))),
        ("k", 1),
        "the heads of layers.1.attn_k.weight are in another order",
    ),
    "a bias of two outputs": Planted(
        "falcon_h1",
        changed("layers.1.mamba_out.bias", np.negative),
        ("attn_out", 1),
        "layers.1.attn_out.bias or layers.1.mamba_out.bias is wrong: the same numbers are missing at all positions",
    ),
    "a bias of a recurrent layer's output": Planted(
        "nemotron_h",
        changed("layers.0.mamba_out.bias", np.zeros_like),
        ("attn_out", 0),
        "layers.0.mamba_out.bias is missing: the same numbers are missing at all positions",
    ),
    "two in a layer": Planted(
        "mistral",
        both(changed("layers.1.attn_v.weight", misread), changed("layers.1.ffn_down.weight", misread)),
        ("v", 1),
        "layers.1.attn_v.weight is transposed",
        further=("layers.1.ffn_down.weight is transposed",),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_is_named_from_the_capture_alone(given: Callable[[str], Given], tmp_path: Path, name: str) -> None:
    assert_named_alone(tmp_path / "m.bin", given(PLANTED[name].case), PLANTED[name])
