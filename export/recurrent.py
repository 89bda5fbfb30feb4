"""The recurrent layers of the forward pass in NumPy and float64 (`reference`): their matrices, and their equations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from llamac.export.delta_net import convolution, delta_rule, gated_norm, softplus, unit
from llamac.export.equations import sigmoid, silu
from llamac.export.mamba2 import mamba2_norm, ssm_scan
from llamac.export.rounding import Array

if TYPE_CHECKING:
    from llamac.export.checkpoint import Checkpoint, LayerConfig, ModelConfig
    from llamac.export.reference import Observer


class Pass(Protocol):
    """What these layers need of a forward pass; see `reference`."""

    @property
    def checkpoint(self) -> Checkpoint: ...
    @property
    def config(self) -> ModelConfig: ...
    @property
    def spans(self) -> list[slice]: ...
    @property
    def observe(self) -> Observer: ...
    def linear(self, x: Array, name: str) -> Array: ...
    def vector(self, name: str) -> Array: ...


def delta_net(run: Pass, h: Array, layer: int, record: LayerConfig) -> Array:
    """A gated delta net, separately for each sequence. h (n, dim) -> (n, dim)."""
    normed = delta_net_norm(run, *delta_net_read(run, h, layer, record), layer, record)
    run.observe("attn_mix", layer, normed)
    return run.linear(normed.reshape(len(h), -1), f"layers.{layer}.delta_out")


def delta_net_read(run: Pass, h: Array, layer: int, record: LayerConfig) -> tuple[Array, Array]:
    """What each token reads from the states, (n, heads, value_dim), and the gate z, (n, heads * value_dim)."""
    name, keys = f"layers.{layer}", record.state_key_heads * record.state_key_dim
    inputs, z, beta, a = (run.linear(h, f"{name}.delta_{part}") for part in ("qkv", "z", "beta", "a"))
    taps = run.vector(f"{name}.delta_conv.weight").reshape(record.conv_width, -1).T
    decay, dt = (run.vector(f"{name}.{part}") for part in ("delta_decay.weight", "delta_dt.bias"))
    factors = np.exp(decay * softplus(a + dt))
    read = np.empty((len(h), record.state_heads, record.state_value_dim))
    for span in run.spans:
        mixed = silu(convolution(inputs[span], taps))
        q, k = (unit(x.reshape(len(x), -1, record.state_key_dim)) for x in np.split(mixed[:, : 2 * keys], 2, axis=1))
        v = mixed[:, 2 * keys :].reshape(read[span].shape)
        betas = sigmoid(beta[span]) * (2 if run.config.state_beta_doubled else 1)
        read[span] = delta_rule(q, k, v, betas, factors[span])
    return read, z


def delta_net_norm(run: Pass, read: Array, z: Array, layer: int, record: LayerConfig) -> Array:
    """The gated norm of `delta_net_read`: (n, heads, value_dim)."""
    weight = run.vector(f"layers.{layer}.delta_norm.weight")
    return gated_norm(read, z.reshape(read.shape), weight, run.config.state_norm_eps or run.config.norm_eps)


def short_conv(run: Pass, h: Array, layer: int, record: LayerConfig) -> Array:
    """c * convolution(b * x), separately for each sequence. h (n, dim) -> (n, dim).

    Liquid AI, "LFM2 Technical Report" (arXiv:2511.23404), section 2.
    """
    name = f"layers.{layer}"
    b, c, x = np.split(run.linear(h, f"{name}.conv_in"), 3, axis=1)
    taps = run.vector(f"{name}.conv_taps.weight").reshape(record.conv_width, -1).T
    bias = run.checkpoint.tensors.get(f"{name}.conv_taps.bias")
    mixed = np.concatenate([convolution((b * x)[span], taps) for span in run.spans])
    mixed = c * (mixed if bias is None else mixed + bias.array())
    run.observe("attn_mix", layer, mixed)
    return run.linear(mixed, f"{name}.conv_out")


def mamba2(run: Pass, h: Array, layer: int, record: LayerConfig) -> Array:
    """A Mamba 2 layer, separately for each sequence. h (n, dim) -> (n, dim)."""
    mixed = mamba2_gated(run, *mamba2_read(run, h, layer, record), layer, record)
    run.observe("attn_mix", layer, mixed)
    return run.linear(mixed, f"layers.{layer}.mamba_out")


def mamba2_read(run: Pass, h: Array, layer: int, record: LayerConfig) -> tuple[Array, Array]:
    """What each token reads from the states, (n, heads, value_dim), and the gate z, (n, heads * value_dim)."""
    name, config = f"layers.{layer}.mamba", run.config
    keys, values = record.state_key_heads * record.state_key_dim, record.state_heads * record.state_value_dim
    z, inputs, dt = (run.linear(h, f"{name}_{part}") for part in ("z", "xbc", "dt"))
    taps = run.vector(f"{name}_conv.weight").reshape(record.conv_width, -1).T
    bias = run.checkpoint.tensors.get(f"{name}_conv.bias")
    shift, decay, skip = (run.vector(f"{name}_{part}") for part in ("step.bias", "decay.weight", "skip.weight"))
    steps = np.clip(softplus(dt + shift), config.state_step_min, config.state_step_max or None)
    read = np.empty((len(h), record.state_heads, record.state_value_dim))
    for span in run.spans:
        mixed = silu(convolution(inputs[span], taps) + (0.0 if bias is None else bias.array()))
        x, b, c = np.split(mixed, [values, values + keys], axis=1)
        b, c = (part.reshape(len(part), -1, record.state_key_dim) for part in (b, c))
        read[span] = ssm_scan(x.reshape(read[span].shape), b, c, steps[span], decay, skip)
    return read, z


def mamba2_gated(run: Pass, read: Array, z: Array, layer: int, record: LayerConfig) -> Array:
    """The gate and the norm, if there is one, of `mamba2_read`: (n, heads * value_dim)."""
    config = run.config
    weight = None if config.state_norm == "none" else run.vector(f"layers.{layer}.mamba_norm.weight")
    is_before = config.state_norm == "before_gate"
    return mamba2_norm(read.reshape(z.shape), z, weight, record.state_key_heads, config.norm_eps, is_before)
