"""Tiny models with recurrent layers, most of them beside attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from builders import checkpoint, gpt2_config
from golden.tiny_checkpoints import random_tensor
from llamac.export.checkpoint import Checkpoint, LayerConfig, LazyTensor, ModelConfig

CONTEXT = 900
GATED = LayerConfig("gated", 40, rope=0, output_gate="element")
DELTA = LayerConfig(
    "gated",
    40,
    mixer="delta_net",
    state_key_heads=2,
    state_heads=4,
    state_key_dim=16,
    state_value_dim=32,
    conv_width=4,
)
SHORT_CONV = LayerConfig("gated", 40, mixer="short_conv", conv_width=3)


def config() -> ModelConfig:
    return replace(
        gpt2_config(dim=32, context=CONTEXT, tied=True),
        norm="rms",
        position="rope",
        activation="silu",
        rope_dim=(4,),
        rope_original_context=(0,),
        rope_attention_factor=(1.0,),
        qk_norm="head",
        layers=(DELTA, GATED, DELTA),
    )


def _with_values(tensor: Any, values: NDArray[Any]) -> Any:
    return type(tensor)(values.shape, "f32", lambda first, last: values[first:last])


def delta_nets() -> Checkpoint:
    """Two layers of Gated DeltaNet around one of gated attention."""
    made = checkpoint(replace(config(), state_norm_eps=0.01, state_beta_doubled=1))
    for layer in (0, 2):
        name = f"layers.{layer}.delta_decay.weight"
        decay = -np.abs(made.tensors[name].read(0, 4)) - np.float32(0.01)
        made.tensors[name] = _with_values(made.tensors[name], decay)
    return made


def short_convs() -> Checkpoint:
    """Two layers with short convolutions, of which one has a bias, around one of attention with a gate per head."""
    last = replace(SHORT_CONV, conv_width=7, placement="sandwich")
    return checkpoint(
        replace(config(), layers=(SHORT_CONV, replace(GATED, output_gate="head"), last)),
        {"layers.0.conv_taps.bias": random_tensor("bias", (32,))},
    )


def states_alone() -> Checkpoint:
    """Two layers with short convolutions, and none with attention."""
    return checkpoint(replace(config(), layers=(SHORT_CONV, SHORT_CONV)))


def both_mixers() -> Checkpoint:
    """Layers with attention and Mamba 2 side by side; the second has norms of whole branches."""
    layer = replace(DELTA, mixer="attention_mamba2", rope=0)
    layers = (layer, replace(layer, placement="sandwich", window=30))
    made = checkpoint(replace(config(), layers=layers, state_norm="before_gate"))
    return _with_decays(made, 0, 1)


def parts() -> Checkpoint:
    """Layers that are only Mamba 2, experts without gates, attention or a network."""
    mamba2 = replace(DELTA, mixer="mamba2", ffn="none", ffn_dim=0)
    experts = LayerConfig(
        "experts", 24, mixer="none", n_experts=4, n_experts_used=2, shared_ffn_dim=20, plain_experts=1, router="sigmoid"
    )
    layers = (mamba2, experts, LayerConfig("none", 0), LayerConfig("plain", 40, mixer="none"), mamba2)
    made = checkpoint(replace(config(), activation="relu2", layers=layers, state_norm="after_gate"))
    return _with_decays(made, 0, 4)


def _with_decays(made: Checkpoint, *layers: int) -> Checkpoint:
    """The checkpoint with negative decays in these layers."""
    for layer in layers:
        decay = np.array([-0.1, -0.2, -0.4, -0.8], np.float32)
        made.tensors[f"layers.{layer}.mamba_decay.weight"] = LazyTensor.of(decay)
    return made


def mamba2_layers() -> Checkpoint:
    """A model whose first and last layers have Mamba 2."""
    mamba2 = replace(DELTA, mixer="mamba2")
    layers = (mamba2, replace(GATED, output_gate="none"), mamba2)
    return _with_decays(checkpoint(replace(config(), layers=layers, state_norm="after_gate")), 0, 2)
