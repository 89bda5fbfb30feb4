"""Launches of the kernels of recurrent layers: which kernel, with which grid and shared memory.

As in layer_launches.py: addresses are integers, and each function names the step of the plan that it computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from llamac.gpu.driver import arguments, ceil_div

if TYPE_CHECKING:
    from llamac.gpu.driver import Driver

_HEADS_PER_BLOCK = 4  # WARPS_PER_BLOCK of kernels/recurrent.cu
_COLUMNS = 16  # of a state, of a block of threads: of a delta net
_SCAN_COLUMNS = 32  # of Mamba 2
_SCAN_ROWS = 8
_CONV_ROWS = 16


class States(NamedTuple):
    """The states of a layer that a pass reads and writes."""

    segments: int  # (n) SEGMENT of passes.py, those of a chain side by side
    starts: int  # (chains + 1) int32: the first segment of each chain
    chains: int
    offset: int  # of the layer in a state, in bytes


class Convolution(NamedTuple):
    """A convolution over positions, as the CONVOLVE step describes it."""

    channels: int
    width: int
    is_gated: bool
    is_silu: bool
    taps: int  # (width, channels)
    bias: int  # (channels), or 0
    state_floats: int


class DeltaNet(NamedTuple):
    """The heads of a delta net, as the DELTA_RULE step describes them."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    unit_eps: float
    q_factor: float
    beta_factor: float
    norm_eps: float
    decay: int  # (heads)
    dt_bias: int  # (heads)
    norm: int  # (value_dim)


class Mamba2(NamedTuple):
    """The heads of a layer of Mamba 2, as the SCAN step describes them."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    step_min: float
    step_max: float
    decay: int  # (heads)
    dt_bias: int  # (heads)
    skip: int  # (heads)


def convolve(
    driver: Driver, rows: int, layer: Convolution, inputs: int, positions: int, states: States, output: int
) -> None:
    """CONVOLVE: output (rows, channels). inputs: (rows, channels), or gated (rows, 3, channels)."""
    values = (
        *arguments("piiii", inputs, layer.channels, layer.width, layer.is_gated, layer.is_silu),
        *arguments("ppppp", layer.taps, layer.bias, states.segments, states.starts, positions),
        *arguments("ip", states.offset + 4 * layer.state_floats, output),
    )
    grid = ceil_div(layer.channels, 128), ceil_div(rows, _CONV_ROWS), states.chains
    driver.launch("convolve", grid, 128, values)


def delta_rule(
    driver: Driver, rows: int, layer: DeltaNet, qkv: int, decay: int, beta: int, z: int, states: States, mix: int
) -> None:
    """DELTA_RULE: mix (rows, heads, value_dim), from qkv (rows, channels), which is normed in place.

    Args:
        driver: The device.
        rows: Rows of the pass.
        layer: The heads.
        qkv: The convolved q, k and v.
        decay: (rows, heads) The products of the decays, which are overwritten.
        beta: (rows, heads) Those of the betas.
        z: (rows, heads, value_dim) The gates of the result.
        states: The states of the layer.
        mix: Receives the result.
    """
    key_dim, value_dim, n_keys = layer.key_dim, layer.value_dim, 2 * layer.key_heads
    channels = n_keys * key_dim + layer.heads * value_dim
    values = arguments("piiiiff", qkv, channels, n_keys, layer.key_heads, key_dim, layer.unit_eps, layer.q_factor)
    grid = ceil_div(n_keys, _HEADS_PER_BLOCK), rows, 1
    driver.launch("norm_state_keys", grid, 128, values, shared=4 * _HEADS_PER_BLOCK * key_dim)

    n = rows * layer.heads
    values = arguments("ppiippf", decay, beta, n, layer.heads, layer.decay, layer.dt_bias, layer.beta_factor)
    driver.launch("state_gates", (ceil_div(n, 64), 1, 1), 64, values)

    values = (
        *arguments("piiiipp", qkv, layer.key_heads, layer.heads, key_dim, value_dim, decay, beta),
        *arguments("ppip", states.segments, states.starts, states.offset, mix),
    )
    grid = value_dim // _COLUMNS, layer.heads, states.chains
    driver.launch("delta_rule", grid, 32, values, shared=4 * (2 * _COLUMNS + 6) * key_dim)

    values = arguments("pppfii", mix, z, layer.norm, layer.norm_eps, layer.heads, value_dim)
    grid = ceil_div(layer.heads, _HEADS_PER_BLOCK), rows, 1
    driver.launch("norm_state_heads", grid, 128, values, shared=4 * _HEADS_PER_BLOCK * value_dim)


def scan(driver: Driver, rows: int, layer: Mamba2, xbc: int, decay: int, step: int, states: States, mix: int) -> None:
    """SCAN: mix (rows, heads, value_dim), from xbc (rows, channels).

    Args:
        driver: The device.
        rows: Rows of the pass.
        layer: The heads.
        xbc: The convolved x, B and C.
        decay: (rows, heads) The products of the steps, which become decays.
        step: (rows, heads) Receives the steps.
        states: The states of the layer.
        mix: Receives the result.
    """
    key_dim, value_dim, n = layer.key_dim, layer.value_dim, rows * layer.heads
    values = (
        *arguments("ppiipp", decay, step, n, layer.heads, layer.decay, layer.dt_bias),
        *arguments("ff", layer.step_min, layer.step_max),
    )
    driver.launch("scan_gates", (ceil_div(n, 64), 1, 1), 64, values)

    values = (
        *arguments("piiiippp", xbc, layer.key_heads, layer.heads, key_dim, value_dim, decay, step, layer.skip),
        *arguments("ppip", states.segments, states.starts, states.offset, mix),
    )
    grid = ceil_div(value_dim, _SCAN_COLUMNS), layer.heads, states.chains
    driver.launch("ssm_scan", grid, 32, values, shared=4 * (_SCAN_COLUMNS + 2 * _SCAN_ROWS) * key_dim)
