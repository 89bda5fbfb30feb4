"""The kernels of recurrent layers give the bits of the core's scalar kernels, on the emulated device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from gpu.layer_reference import LayerReference
from gpu.reference import Floats, same_bits
from numpy.typing import NDArray

from device_arrays import get, put
from llamac.gpu import recurrent_launches as recurrent
from llamac.gpu.emulator.emulator import Emulator
from llamac.gpu.passes import SEGMENT
from llamac.gpu.recurrent_launches import Convolution, DeltaNet, Mamba2, States
from llamac.gpu.sources import kernel_files

FILES = [path for path in kernel_files() if path.stem == "recurrent"]
# Rows of two chains: the first continues at position 1, has two segments, and updates its state in place at last;
# the second starts.
SEGMENTS = ((0, 3, 1), (5, 25, 4)), ((3, 5, 0),)
ROWS = 25


@pytest.fixture
def reference(core_kernels: ctypes.CDLL) -> LayerReference:
    return LayerReference(core_kernels)


@pytest.fixture(params=[{"seed": 1}, {"checked": True}], ids=["shuffled", "checked"])
def device(request: pytest.FixtureRequest, emulator: Callable[..., Emulator]) -> Emulator:
    return emulator(FILES, **request.param)


class Pages(NamedTuple):
    """Three states of `floats` numbers after 16 bytes: before the first sequence, and after both."""

    at: int
    host: Floats
    states: States
    positions: int

    def after(self, device: Emulator) -> Floats:
        found = get(device, self.at, np.float32, self.host.shape)
        return np.asarray(found[:, 4:])


def address(device: Emulator, values: NDArray[Any]) -> int:
    return int(put(device, values))


def pages_of(device: Emulator, floats: int, random: np.random.Generator) -> Pages:
    host = random.standard_normal((3, 4 + floats), np.float32)
    at = address(device, host)
    before, first, second = (at + i * host[0].nbytes for i in range(3))
    rows = [(0, 3, before, first), (5, ROWS, first, first), (3, 5, 0, second)]
    positions = np.zeros(ROWS, np.int32)
    for first_row, last, position in (each for sequence in SEGMENTS for each in sequence):
        positions[first_row:last] = np.arange(last - first_row) + position
    segments, starts = np.array(rows, SEGMENT), np.array([0, 2, 3], np.int32)
    states = States(address(device, segments.view(np.uint8)), address(device, starts), 2, 16)
    return Pages(at, host, states, address(device, positions))


@pytest.mark.parametrize(("width", "is_gated"), [(4, False), (3, True), (1, False)])
def test_convolutions(reference: LayerReference, device: Emulator, width: int, is_gated: bool) -> None:
    random, n = np.random.default_rng(width), 150
    x = random.standard_normal((ROWS, 3 if is_gated else 1, n), np.float32)
    x[1, 0, 7] = np.nan
    taps, bias = random.standard_normal((width, n), np.float32), random.standard_normal(n, np.float32)
    pages, out = pages_of(device, 8 + (width - 1) * n, random), address(device, np.zeros((ROWS, n), np.float32))
    layer = Convolution(n, width, is_gated, not is_gated, address(device, taps), address(device, bias), 8)
    recurrent.convolve(device, ROWS, layer, address(device, x), pages.positions, pages.states, out)

    inputs = x[:, 0] * x[:, 2] if is_gated else x[:, 0]
    expected, after = np.zeros((ROWS, n), np.float32), pages.host[:, 4:].copy()
    for sequence, (kept, to) in zip(SEGMENTS, ((0, 1), (2, 2)), strict=True):
        rows = [row for first, last, _ in sequence for row in range(first, last)]
        position = sequence[0][2]
        history = pages.host[kept, 12:].reshape(width - 1, n)
        whole = np.concatenate([history, inputs[rows]])
        missing = max(width - 1 - position, 0)
        found = reference.convolve(whole, taps, bias, missing, is_silu=not is_gated)
        expected[rows] = x[rows, 1] * found if is_gated else found
        whole[:missing] = 0
        after[to, 8:] = whole[len(rows) :].reshape(-1)
    assert same_bits(get(device, out, np.float32, expected.shape), expected)
    assert same_bits(pages.after(device), after)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 16), (48, 80)])
def test_delta_rules(reference: LayerReference, device: Emulator, key_dim: int, value_dim: int) -> None:
    random, key_heads, heads = np.random.default_rng(key_dim), 2, 6
    qk = random.standard_normal((ROWS, 2, key_heads, key_dim), np.float32)
    v, z = random.standard_normal((2, ROWS, heads, value_dim), np.float32)
    gates = (4 * random.standard_normal((2, ROWS, heads), np.float32)).astype(np.float32)
    gates[:, 8, 5] = np.nan, 200
    rates, dt_bias = -random.random(heads, np.float32), random.standard_normal(heads, np.float32)
    norm = random.standard_normal(value_dim, np.float32)
    pages = pages_of(device, heads * key_dim * value_dim, random)
    qkv = np.concatenate([qk.reshape(ROWS, -1), v.reshape(ROWS, -1)], 1)
    layer = DeltaNet(
        *(key_heads, heads, key_dim, value_dim, 1e-6, 0.25, 1.0, 1e-5),
        *(address(device, each) for each in (rates, dt_bias, norm)),
    )
    mix = address(device, np.zeros_like(v))
    recurrent.delta_rule(
        *(device, ROWS, layer, address(device, qkv), address(device, gates[0]), address(device, gates[1])),
        *(address(device, z), pages.states, mix),
    )

    expected, after = np.zeros_like(v), pages.host[:, 4:].copy().reshape(3, heads, -1)
    normed = [
        [[reference.unit_norm(x.copy(), 1e-6, factor) for x in heads_of_row] for heads_of_row in part]
        for part, factor in ((qk[:, 0], 0.25), (qk[:, 1], 1.0))
    ]
    after[1], after[2] = after[0], 0
    for sequence, to in zip(SEGMENTS, (1, 2), strict=True):
        rows = [row for first, last, _ in sequence for row in range(first, last)]
        for h in range(heads):
            keys = np.ascontiguousarray(np.array(normed)[:, rows, h // (heads // key_heads)])
            state = after[to, h].copy()
            out = reference.delta(state, keys, v[rows, h].copy(), gates[:, rows, h].copy(), rates[h], dt_bias[h])
            after[to, h] = state
            rows_out = [reference.norm(row.copy(), norm, None, 1e-5, is_rms=True) for row in out]
            expected[rows, h] = [
                reference.activate(1, z[row, h].copy(), each) for row, each in zip(rows, rows_out, strict=True)
            ]
    assert same_bits(get(device, mix, np.float32, expected.shape), expected)
    assert same_bits(pages.after(device), after.reshape(3, -1))


@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 16), (48, 80)])
def test_scans(reference: LayerReference, device: Emulator, key_dim: int, value_dim: int) -> None:
    random, key_heads, heads = np.random.default_rng(key_dim), 2, 6
    x = random.standard_normal((ROWS, heads, value_dim), np.float32)
    bc = random.standard_normal((ROWS, 2, key_heads, key_dim), np.float32)
    dt = (4 * random.standard_normal((ROWS, heads), np.float32)).astype(np.float32)
    dt[8, 4:] = np.nan, 200
    rates, (dt_bias, skip) = -random.random(heads, np.float32), random.standard_normal((2, heads), np.float32)
    limits = np.array([0.5, 2.5], np.float32)
    pages = pages_of(device, heads * key_dim * value_dim, random)
    xbc = np.concatenate([x.reshape(ROWS, -1), bc.reshape(ROWS, -1)], 1)
    weights = (address(device, each) for each in (rates, dt_bias, skip))
    layer = Mamba2(key_heads, heads, key_dim, value_dim, 0.5, 2.5, *weights)
    mix, step = address(device, np.zeros_like(x)), address(device, np.zeros_like(dt))
    recurrent.scan(device, ROWS, layer, address(device, xbc), address(device, dt), step, pages.states, mix)

    expected, after = np.zeros_like(x), pages.host[:, 4:].copy().reshape(3, heads, -1)
    after[1], after[2] = after[0], 0
    for sequence, to in zip(SEGMENTS, (1, 2), strict=True):
        rows = [row for first, last, _ in sequence for row in range(first, last)]
        for h in range(heads):
            keys = np.ascontiguousarray(bc[rows, :, h // (heads // key_heads)].transpose(1, 0, 2))
            inputs, state = (x[rows, h].copy(), dt[rows, h].copy(), limits), after[to, h].copy()
            expected[rows, h] = reference.scan(state, keys, *inputs, (rates[h], dt_bias[h], skip[h]))
            after[to, h] = state
    assert same_bits(get(device, mix, np.float32, expected.shape), expected)
    assert same_bits(pages.after(device), after.reshape(3, -1))
