"""The kernels of layers give the bits of the core's scalar kernels, on the emulated device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu.layer_reference import KV_DTYPES, LayerReference, Query
from gpu.reference import Bytes, Floats, same_bits
from numpy.typing import NDArray

from device_arrays import get, put
from llamac.format.strips import pack_strips
from llamac.gpu import layer_launches as layers
from llamac.gpu.driver import Properties
from llamac.gpu.emulator.emulator import Emulator
from llamac.gpu.launches import Embedding, Form, Matrix, input_row_bytes, layer_inputs, pack
from llamac.gpu.layer_launches import (
    AttentionKind,
    Cache,
    HeadNorm,
    HeadNorms,
    HeadShape,
    Norm,
    Packed,
    Router,
    Rows,
    Run,
)
from llamac.gpu.sources import kernel_files

FILES = [
    path
    for path in kernel_files()
    if path.stem.split("_")[0] in ("rows", "pack", "heads", "experts", "attend", "embed")
]
PAGE = 64
SPECIAL = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, -0.0, 0.0, 88.5, -90.0], np.float32)


@pytest.fixture
def reference(core_kernels: ctypes.CDLL) -> LayerReference:
    return LayerReference(core_kernels)


SHUFFLED, CHECKED = dict[str, Any](seed=1), dict[str, Any](checked=True)


@pytest.fixture(params=[SHUFFLED, CHECKED], ids=["shuffled", "checked"])
def device(request: pytest.FixtureRequest, emulator: Callable[..., Emulator]) -> Emulator:
    return emulator(FILES, **request.param)


def address(device: Emulator, values: NDArray[Any] | None) -> int:
    return 0 if values is None else int(put(device, values))


def rows_of(
    device: Emulator,
    positions: list[int],
    table_of: list[int],
    last_table_of: list[int] | None = None,
    ends: list[int] | None = None,
) -> Rows:
    ends = [position + 1 for position in positions] if ends is None else ends
    arrays = (np.array(x, np.int32) for x in (positions, table_of, last_table_of or table_of, ends))
    return Rows(len(positions), *(address(device, x) for x in arrays))


# ---- rows


@pytest.mark.parametrize("is_rms", [True, False])
@pytest.mark.parametrize("width", [1, 17, 96, 1000])
def test_norms_and_branches(reference: LayerReference, device: Emulator, width: int, is_rms: bool) -> None:
    random = np.random.default_rng(width)
    x, branch = random.standard_normal((2, 3, width), np.float32)
    weight, bias, branch_weight, branch_bias = random.standard_normal((4, width), np.float32)
    x[2, -1] = np.nan
    used = None if is_rms else bias, None if is_rms else branch_bias
    norm = Norm(address(device, weight), address(device, used[0]), 1e-5, is_rms)
    branch_norm = Norm(address(device, branch_weight), address(device, used[1]), 1e-5, is_rms)
    at, y = address(device, x), address(device, x)

    for chosen, stride in ([2, 0], 0), ([1, 0], 2 * width):  # of x, and of every second row of it
        indices = address(device, np.array(chosen, np.int32))
        layers.norm(device, 2, width, norm, at, y, indices=indices, strides=(stride, 0))
        expected = [reference.norm(x[r], weight, used[0], 1e-5, is_rms=is_rms) for r in (2, 0)]
        assert same_bits(get(device, y, np.float32, (2, width)), np.array(expected))
    apart = address(device, np.zeros((2, 2 * width), np.float32))
    layers.norm(device, 2, width, norm, at + 4 * width, apart + 4 * width, strides=(0, 2 * width))
    expected = [reference.norm(x[r], weight, used[0], 1e-5, is_rms=is_rms) for r in (1, 2)]
    found = get(device, apart, np.float32, (2, 2 * width))
    assert same_bits(found[:, width:], np.array(expected))
    assert not found[:, :width].any()

    total, branch_at = address(device, x), address(device, branch)
    for scale in (1.0, 0.7):
        layers.add_and_norm(device, 3, width, at, branch_at, scale, branch_norm, total, norm, y)
        normed = [reference.norm(b, branch_weight, used[1], 1e-5, is_rms=is_rms) for b in branch]
        sums = np.array(normed) * np.float32(scale) + x
        assert same_bits(get(device, total, np.float32, (3, width)), sums)
        expected = [reference.norm(row, weight, used[0], 1e-5, is_rms=is_rms) for row in sums]
        assert same_bits(get(device, y, np.float32, (3, width)), np.array(expected))
        layers.add(device, 3, width, total, branch_at, scale, None, total)  # in place
        assert same_bits(get(device, total, np.float32, (3, width)), branch * np.float32(scale) + sums)


@pytest.mark.parametrize("activation", range(1, 7))
def test_activations(reference: LayerReference, device: Emulator, activation: int) -> None:
    random = np.random.default_rng(activation)
    gate, up = (8 * random.standard_normal((2, 700), np.float32)).astype(np.float32)
    gate[: SPECIAL.size], up[SPECIAL.size : 2 * SPECIAL.size] = SPECIAL, SPECIAL
    for has_gate in (True, False):
        for limit, offset in ((None, 0.0), (5.0, 1.0), (float("inf"), 1.0)):
            at = address(device, up)
            gate_at, is_clamped, most = address(device, gate if has_gate else None), limit is not None, limit or 0.0
            shape = 2, 350, activation
            layers.activate(device, *shape, gate_at, at, is_clamped=is_clamped, limit=most, up_offset=offset)
            g, u = (gate, up) if has_gate else (up, up)
            if limit is not None:
                g, u = reference.clamp(g, -np.inf, limit, 0.0), reference.clamp(u, -limit, limit, offset)
            expected = reference.activate(activation, g, u if has_gate else None)
            assert same_bits(get(device, at, np.float32, up.size), expected)
    row_weights = np.array([0.3, -1.7], np.float32)
    for gate_of in (gate, None):
        at, gate_at = address(device, up), address(device, gate_of)
        layers.activate(device, 2, 350, activation, gate_at, at, row_weights=address(device, row_weights))
        u, g = (x.reshape(2, 350) * row_weights[:, None] for x in (up, up if gate_of is None else gate_of))
        expected = reference.activate(activation, g.reshape(-1), None if gate_of is None else u.reshape(-1))
        assert same_bits(get(device, at, np.float32, up.size), expected)


@pytest.mark.parametrize("form", [Form.INT8, Form.INT16, Form.FAST])
def test_rows_are_packed_as_they_are_computed(device: Emulator, form: Form) -> None:
    random = np.random.default_rng(form)
    x, weight = random.standard_normal((3, 300), np.float32), random.standard_normal(300, np.float32)
    x[1, 200] = np.inf
    size = 3 * input_row_bytes(form, 300)
    y, *inputs = (address(device, np.zeros(n, np.uint8)) for n in (x.nbytes, size, size))

    def check() -> None:
        pack(device, form, y, 3, 300, inputs[1])
        found = [get(device, at, np.uint8, size) for at in inputs]
        assert found[0].tobytes() == found[1].tobytes()

    packed, other = Packed(form, inputs[0]), Form.INT16 if form is Form.INT8 else Form.INT8
    both = [packed, Packed(other, address(device, np.zeros(3 * input_row_bytes(other, 300), np.uint8)))]
    norm, from_x = Norm(address(device, weight), 0, 1e-5, True), address(device, x)
    layers.norm(device, 3, 300, norm, from_x, y, packed=[packed])
    check()
    layers.norm(device, 3, 300, norm, from_x, y, packed=both[::-1])
    check()
    layers.norm(device, 3, 300, norm, from_x, y, packed=both)
    layers.activate(device, 3, 300, 1, address(device, x), y, packed=packed)
    check()


def test_scales_and_soft_caps(reference: LayerReference, device: Emulator) -> None:
    y = (50 * np.random.default_rng(1).standard_normal(500, np.float32)).astype(np.float32)
    y[: SPECIAL.size] = SPECIAL
    for factor, cap in ((0.3, 0.0), (1.0, 30.0), (0.125, 5.0)):
        at = address(device, y)
        layers.scale(device, y.size, at, factor, cap)
        assert same_bits(get(device, at, np.float32, y.size), reference.scale(y, factor, cap))


def test_gates_learned_activations_and_inputs_of_layers(reference: LayerReference, device: Emulator) -> None:
    random = np.random.default_rng(3)
    y, gates = (8 * random.standard_normal((2, 500), np.float32)).astype(np.float32)
    y[: SPECIAL.size], gates[SPECIAL.size : 2 * SPECIAL.size] = SPECIAL, SPECIAL
    for group in (1, 20):
        at = address(device, y)
        layers.gate(device, y.size, at, address(device, gates), group)
        assert same_bits(get(device, at, np.float32, y.size), reference.gate(y, gates[: y.size // group].repeat(group)))

    up, gate = random.standard_normal((3, 100), np.float32), random.standard_normal((3, 40), np.float32)
    out = address(device, gate)
    layers.activate(device, 3, 40, 1, address(device, gate), address(device, up) + 4 * 30, stride=100, output=out)
    parts = np.ascontiguousarray(up[:, 30:70])
    expected = reference.activate(1, gate.reshape(-1), parts.reshape(-1))
    assert same_bits(get(device, out, np.float32, expected.size), expected)

    alphas, at = np.array([0.3, -0.7], np.float32), address(device, y)
    pointer = address(device, alphas)
    layers.activate(device, 2, 250, 7, 0, at, alphas=(pointer, pointer + 4))
    assert same_bits(get(device, at, np.float32, y.size), reference.xielu(y, alphas))

    n_layers, dim, tokens = 3, 20, np.array([4, 0], np.int32)
    table = random.standard_normal((5, n_layers * dim), np.float32)
    products, weight = random.standard_normal((2, n_layers, dim), np.float32), random.standard_normal(dim, np.float32)
    strips = np.frombuffer(pack_strips(table, "f32"), np.uint8)
    embedding = Embedding(Matrix(address(device, strips), 1, 5, n_layers * dim))
    norm, in_device = Norm(address(device, weight), 0, 1e-5, True), address(device, tokens)
    for scale in (1.0, 0.7):
        at = address(device, products)
        layer_inputs(device, embedding, 2, in_device, dim, (scale, 4.5, 0.6), norm, at)
        normed = np.array(
            [[reference.norm(x * np.float32(scale), weight, None, 1e-5, is_rms=True) for x in row] for row in products]
        )
        own = table[tokens].reshape(products.shape) * np.float32(4.5)
        assert same_bits(get(device, at, np.float32, products.shape), (own + normed) * np.float32(0.6))


def test_angles_and_query_scales(reference: LayerReference, device: Emulator) -> None:
    positions = [0, 1, 77, 4095, 131071, (1 << 24) - 1]
    inv_freq = (10000.0 ** -(np.arange(40) / 40)).astype(np.float32)
    rows = rows_of(device, positions, [0] * len(positions))
    angles, scales = (address(device, np.zeros((len(positions), n), np.float32)) for n in (80, 1))
    layers.rope_angles(device, rows, address(device, inv_freq), 40, 1.25, angles)
    expected = [reference.angles(position, inv_freq, 1.25) for position in positions]
    assert same_bits(get(device, angles, np.float32, (len(positions), 80)), np.array(expected))
    for offset in (0, 1):
        layers.query_scales(device, rows, 0.125, 0.1, 78, offset, scales)
        scaled = [np.float32(0.125) * reference.query_scale(position + offset, 0.1, 78) for position in positions]
        assert same_bits(get(device, scales, np.float32, len(positions)), np.array(scaled))


# ---- heads and the cache


class Pages:
    """A cache of one layer, on the device and for the reference: tables of runs, `padding` bytes before the layer."""

    def __init__(
        self, reference: LayerReference, device: Emulator, dtype: str, shape: HeadShape, tables: list[list[int]]
    ) -> None:
        self.dtype, self.shape, self.padding = dtype, shape, 64
        self.head_bytes, value_offset = reference.head_bytes(dtype, shape.dim, shape.value_dim)
        count = max(max(table) for table in tables) + 1
        size = -(-(self.padding + shape.n_kv * self.head_bytes) // 64) * 64
        self.host = np.full((count, size), 0xFF, np.uint8)  # NaN wherever nothing is stored
        self.device, self.at, self.size = device, int(put(device, self.host)), size
        self.tables = np.array(tables, np.uint64)
        addresses = np.uint64(self.at) + self.tables * np.uint64(size)
        self.cache = Cache(
            dtype, int(put(device, addresses)), len(tables[0]), self.padding, self.head_bytes, value_offset
        )

    def drop(self, run: int, seen: range) -> None:
        """Leave no address of pages with positions that no row of a run sees."""
        addresses = np.uint64(self.at) + self.tables[run] * np.uint64(self.size)
        pages = np.arange(len(addresses))
        addresses[(pages < seen.start // PAGE) | (pages > (seen.stop - 1) // PAGE)] = 0
        self.device.upload(self.cache.tables + run * addresses.nbytes, addresses.view(np.uint8))

    def head(self, run: int, position: int, head: int) -> Bytes:
        page: Bytes = self.host[int(self.tables[run, position // PAGE])]
        return page[self.padding + head * self.head_bytes :]

    def addresses(self, run: int) -> NDArray[np.uint64]:
        """Of the reference's pages of a run."""
        addresses: NDArray[np.uint64] = np.uint64(self.host.ctypes.data) + self.tables[run] * np.uint64(self.size)
        return addresses

    def upload(self) -> None:
        self.device.upload(self.at, self.host.reshape(-1))

    def downloaded(self) -> Bytes:
        return np.asarray(get(self.device, self.at, np.uint8, self.host.shape))


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8"])
@pytest.mark.parametrize(("dim", "rope_dim"), [(16, 16), (40, 20), (160, 0)])
@pytest.mark.parametrize("kind", list(HeadNorm))
def test_heads_are_normed_rotated_and_stored(
    reference: LayerReference, device: Emulator, dtype: str, dim: int, rope_dim: int, kind: HeadNorm
) -> None:
    random = np.random.default_rng([dim, kind])
    shape, positions, table_of, last_table_of = HeadShape(6, 2, dim, dim), [3, 64, 70], [0, 0, 1], [2, 0, 1]
    q, kv = random.standard_normal((3, 6, dim), np.float32), random.standard_normal((2, 3, 2, dim), np.float32)
    kv[:, 0, 1] *= np.float32(1e5)  # saturates f16
    kv[:, 1, 0, dim // 2] = np.nan
    kv[:, 2, 0] = 0
    kv[1, 2, 1] *= np.float32(1e-32)
    per_head = kind is HeadNorm.LAYER
    q_weight, k_weight = (random.standard_normal((n if per_head else 1, dim), np.float32) for n in (6, 2))
    rows = rows_of(device, positions, table_of, last_table_of)
    inv_freq = (100.0 ** -(np.arange(rope_dim // 2) / (rope_dim or 1))).astype(np.float32)
    angles = np.array([reference.angles(position, inv_freq, 1.5) for position in positions], np.float32)

    for after_rope in (False, True):
        pages = Pages(reference, device, dtype, shape, [[0, 1], [2, 3], [4, 5]])
        norms = HeadNorms(kind, per_head, after_rope, 1e-6, address(device, q_weight), address(device, k_weight))
        norms, v_is_k = norms._replace(v_eps=0.01, v_factor=1.5 if after_rope else 0.0), kind is not HeadNorm.RMS
        values = kv[0 if v_is_k else 1]
        if after_rope:
            values = np.array([[reference.unit_norm(x, 0.01, 1.5) for x in row] for row in values])
        q_at, k_at, v_at = (address(device, x) for x in (q, kv[0], kv[1]))
        angles_at = address(device, angles if rope_dim else None)
        layers.heads(device, rows, shape, norms, q_at, k_at, v_at, angles_at, rope_dim, pages.cache, v_is_k=v_is_k)

        def head(x: Floats, weight: Floats, row: int, i: int, after_rope: bool = after_rope) -> Floats:
            weight = weight[i if per_head else 0]
            for step in ("rope", "norm") if after_rope else ("norm", "rope"):
                if step == "rope" and rope_dim:
                    x = np.append(reference.rotate(x[:rope_dim].copy(), angles[row]), x[rope_dim:])
                elif step == "norm" and kind is not HeadNorm.NONE:
                    x = reference.norm(x.copy(), weight, None, 1e-6, is_rms=kind is HeadNorm.RMS)
            return x.astype(np.float32)

        expected = np.array([[head(q[r, i], q_weight, r, i) for i in range(6)] for r in range(3)])
        assert same_bits(get(device, q_at, np.float32, q.shape), expected)
        keys = np.array([[head(kv[0, r, i], k_weight, r, i) for i in range(2)] for r in range(3)])
        assert same_bits(get(device, k_at, np.float32, keys.shape), keys)
        assert same_bits(get(device, v_at, np.float32, keys.shape), values)
        for r, position in enumerate(positions):
            for table in range(table_of[r], last_table_of[r] + 1):
                for i in range(2):
                    reference.store(dtype, pages.head(table, position, i), position % PAGE, keys[r, i], values[r, i])
        check_pages(pages)
        read = [address(device, np.zeros((3, 3 * dim), np.float32)) for _ in range(2)]
        layers.read_cache(device, rows, shape, pages.cache, read[0], read[1], 3 * dim)
        for which in range(2):
            loaded = np.zeros((3, 3, dim), np.float32)
            for r, position in enumerate(positions):
                for i in range(2):
                    page = pages.head(table_of[r], position, i)
                    loaded[r, i] = reference.load(dtype, page, position % PAGE, dim, dim)[which]
            assert same_bits(get(device, read[which], np.float32, (3, 3, dim)), loaded)


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8"])
def test_heads_of_latent_attention_are_put_together(reference: LayerReference, device: Emulator, dtype: str) -> None:
    random = np.random.default_rng(5)
    shape, stride, positions, table_of = HeadShape(5, 1, 70, 56), 24, [3, 64], [0, 0]
    start, end = random.standard_normal((2, 5, stride), np.float32), random.standard_normal((2, 5, 56), np.float32)
    k, v = random.standard_normal((2, 1, 70), np.float32), random.standard_normal((2, 1, 56), np.float32)
    angles = np.array([reference.angles(position, np.ones(7, np.float32), 1.0) for position in positions], np.float32)
    pages = Pages(reference, device, dtype, shape, [[0, 1]])
    q_at, k_at, v_at = (address(device, x) for x in (np.zeros((2, 5, 70), np.float32), k, v))
    latents = layers.Latents(address(device, start), stride, address(device, end))
    rows, at = rows_of(device, positions, table_of), (q_at, k_at, v_at, address(device, angles), 14)
    layers.heads(device, rows, shape, layers.NO_HEAD_NORMS, *at, pages.cache, latents=latents)

    def joined(first: Floats, rest: Floats, row: int) -> Floats:
        return np.append(reference.rotate(first[:14].copy(), angles[row]), rest).astype(np.float32)

    expected = np.array([[joined(start[r, i], end[r, i], r) for i in range(5)] for r in range(2)])
    keys = np.array([[joined(k[r, 0], v[r, 0], r)] for r in range(2)])
    assert same_bits(get(device, q_at, np.float32, expected.shape), expected)
    assert same_bits(get(device, k_at, np.float32, keys.shape), keys)
    assert same_bits(get(device, v_at, np.float32, v.shape), v)
    read = [address(device, np.ones((2, 80), np.float32)) for _ in range(2)]
    layers.read_cache(device, rows, shape, pages.cache, read[0], read[1], 80)
    loaded = np.zeros((2, 2, 80), np.float32)
    for r, position in enumerate(positions):
        head, slot = pages.head(0, position, 0), position % PAGE
        reference.store(dtype, head, slot, keys[r, 0], v[r, 0])
        loaded[0, r, :70], loaded[1, r, :56] = reference.load(dtype, head, slot, 70, 56)
    check_pages(pages)
    for each, numbers in zip(read, loaded, strict=True):
        assert same_bits(get(device, each, np.float32, (2, 80)), numbers)


def check_pages(pages: Pages) -> None:
    """The pages on the device have the reference's bytes, but for NaNs, which may be other NaNs."""
    found, expected = pages.downloaded(), pages.host
    if pages.dtype == "f32":
        assert same_bits(found.view(np.float32), expected.view(np.float32))
        return
    differing = found.view(np.uint16) != expected.view(np.uint16)
    for x in (found, expected):
        assert (x.view(np.uint16)[differing] & 0x7C00 == 0x7C00).all()
        assert (x.view(np.uint16)[differing] & 0x03FF != 0).all()


# ---- attention


ATTENTIONS: list[tuple[HeadShape, int, float, bool, int | None]] = [
    (HeadShape(4, 2, 128, 128), 0, 0.0, False, None),
    (HeadShape(3, 3, 40, 40), 300, 5.0, False, None),
    (HeadShape(7, 1, 144, 144), 70, 0.0, True, None),
    (HeadShape(36, 1, 72, 56), 0, 0.0, False, None),
    (HeadShape(4, 2, 24, 24), 0, 0.0, False, 33),
    (HeadShape(3, 1, 128, 128), 4, 5.0, False, 2),
]
# Each case in each dtype, and in one dtype with checks of each access, which take 10 times as long.
CASES = [(SHUFFLED, dtype, *case) for case in ATTENTIONS for dtype in KV_DTYPES]
CASES += [(CHECKED, dtype, *case) for case, dtype in zip(ATTENTIONS, (*KV_DTYPES, *KV_DTYPES), strict=True)]
NAMES = ("device", "dtype", "shape", "window", "soft_cap", "has_sinks", "farthest")


@pytest.mark.parametrize(NAMES, CASES, indirect=["device"])
def test_attention(
    reference: LayerReference,
    device: Emulator,
    dtype: str,
    shape: HeadShape,
    window: int,
    soft_cap: float,
    has_sinks: bool,
    farthest: int | None,
) -> None:
    """farthest: If given, rows also see later positions, and scores have a bias for each distance up to it."""
    random = np.random.default_rng([shape.dim, window])
    first_at, far = (253, 767) if shape.n < 36 else (61, 300)  # many heads take long
    runs = [Run(0, 5, first_at), Run(5, 1, 0), Run(6, 1, far), Run(7, 3, 63)]
    lengths = [run.position + run.rows for run in runs]
    first = np.cumsum([0, *(13 for _ in runs)])
    pages = Pages(reference, device, dtype, shape, [list(range(13 * i, 13 * i + 13)) for i in range(len(first) - 1)])
    for index, length in enumerate(lengths):
        for position in range(length):
            k, v = random.standard_normal((2, shape.n_kv, shape.dim), np.float32)
            v = v[:, : shape.value_dim]
            if position == 65:
                k[0, 0], v[0, 1] = np.nan, np.inf  # seen by some rows only
            for i in range(shape.n_kv):
                reference.store(dtype, pages.head(index, position, i), position % PAGE, k[i].copy(), v[i].copy())
    pages.upload()
    for i, run in enumerate(runs):
        pages.drop(i, range(max(0, run.position + 1 - window) if window else 0, lengths[i]))
    positions = [run.position + i for run in runs for i in range(run.rows)]
    run_of = [i for i, run in enumerate(runs) for _ in range(run.rows)]
    ends = [position + 1 if farthest is None else lengths[i] for position, i in zip(positions, run_of, strict=True)]
    rows = rows_of(device, positions, run_of, ends=ends)
    biases = None if farthest is None else random.standard_normal((shape.n, 2 * farthest + 1), np.float32)
    q = random.standard_normal((len(positions), shape.n, shape.dim), np.float32)
    scales = random.random(len(positions), np.float32)
    sinks = random.standard_normal(shape.n, np.float32) if has_sinks else None
    of_mix = len(positions), shape.n, shape.value_dim
    group, mix = shape.n // shape.n_kv, address(device, np.zeros(of_mix, np.float32))

    def query(r: int, i: int) -> Query:
        p, end = positions[r], ends[r]
        visible = range(max(0, p + 1 - window), min(p + window, end)) if window else range(end)
        of_head = pages.addresses(run_of[r]), pages.padding + i // group * pages.head_bytes, q[r, i] * scales[r]
        return Query(*of_head, visible, p, None if biases is None else biases[i].copy())

    def result(r: int, i: int) -> Floats:
        sink = None if sinks is None else sinks[i : i + 1]
        return reference.attend(dtype, query(r, i), soft_cap, sink, shape.value_dim)

    expected = np.array([[result(r, i) for i in range(shape.n)] for r in range(len(positions))])
    added = address(device, biases), farthest or 0
    inputs = layers.AttentionInputs(address(device, q), 0.0, address(device, scales), window, soft_cap, *added)
    forms = (Form.INT8, Form.INT16, Form.FAST, Form.INT8) if shape.value_dim % 128 == 0 else (Form.F32,) * 4
    width = shape.n * shape.value_dim
    divisions = [(multiprocessors, 1 << 24) for multiprocessors in (1, 4, 1000)]
    for (multiprocessors, partial_bytes), form in zip([*divisions, (1000, 0)], forms, strict=True):
        of_device = device.properties._replace(multiprocessors=multiprocessors)
        kind = AttentionKind(shape, window, farthest is not None)
        tiles = layers.attention_tiles(runs, kind, dtype, of_device, partial_bytes)
        partials = address(device, np.zeros(layers.partial_size(tiles, shape) + 4, np.uint8))
        entries = address(device, tiles.entries)
        device.fill(mix, 0, expected.nbytes)
        size = rows.n * input_row_bytes(form, width)
        packed = [address(device, np.zeros(size, np.uint8)) for _ in range(2)]
        to = address(device, sinks), mix, partials, Packed(form, packed[0]) if form is not Form.F32 else None
        layers.attend(device, rows, kind, inputs, pages.cache, tiles, entries, *to)
        assert same_bits(get(device, mix, np.float32, expected.shape), expected)
        if form is not Form.F32:
            pack(device, form, mix, rows.n, width, packed[1])
            assert get(device, packed[0], np.uint8, size).tobytes() == get(device, packed[1], np.uint8, size).tobytes()

    scores = address(device, np.zeros((len(positions), shape.n + 1, 800), np.float32))
    layers.observe_scores(device, rows, shape, inputs, pages.cache, shape.n + 1, 800, scores)
    found = get(device, scores, np.float32, (len(positions), shape.n + 1, 800))
    wanted = np.full_like(found, -np.inf)
    for r in range(len(positions)):
        for i in range(shape.n):
            visible = query(r, i).visible
            scored = reference.scores(dtype, query(r, i), soft_cap)
            wanted[r, i, visible.start : visible.stop] = scored[visible.start :]
    assert same_bits(found, wanted)


def test_many_blocks_are_merged(reference: LayerReference, device: Emulator) -> None:
    random, dim, blocks = np.random.default_rng(1), 20, 300
    partials = random.standard_normal((blocks, 4, 16 + 32), np.float32)
    partials[..., 1] = 1 + random.random((blocks, 4), np.float32)
    partials[..., 2] = 1  # every query sees every block
    rows, mix = rows_of(device, [300 * 256 - 1], [0]), address(device, np.zeros((4, dim), np.float32))
    tiles = address(device, np.array([0, 0, 4, 0], np.int32))
    layers.attend_merge(
        *(device, rows, HeadShape(4, 1, dim, dim), 0, layers.Tiles(np.zeros((1, 4), np.int32), 4, blocks)),
        *(tiles, 0, mix, address(device, partials)),
    )
    assert same_bits(get(device, mix, np.float32, (4, dim)), reference.merge(partials, dim))


def test_divisions_of_attention() -> None:
    def divide(
        runs: list[Run],
        shape: tuple[int, ...] = (32, 8, 128, 128),
        window: int = 0,
        shared_kib: int = 227,
        *,
        two_sided: bool = False,
    ) -> layers.Tiles:
        device = Properties("", (9, 0), 132, shared_kib << 10, 1 << 36, "")
        kind = AttentionKind(HeadShape(*shape), window, two_sided)
        return layers.attention_tiles(runs, kind, "f16", device, 1 << 30)

    decode = divide([Run(0, 1, 9999), Run(1, 1, 5)])
    assert (decode.queries, decode.blocks) == (4, 40)
    assert decode.entries.tolist() == [[1, 0, 4, 0], [0, 0, 4, 0]]
    assert divide([Run(0, 1, 9999)], window=512).blocks == divide([Run(0, 1, 9999)], window=-512).blocks == 3
    assert divide([Run(0, 1, 100)]).blocks == 0
    prompt = divide([Run(0, 512, 0)])
    assert (prompt.queries, prompt.blocks, len(prompt.entries)) == (32, 0, 64)
    assert divide([Run(0, 512, 0)], (32, 8, 256, 256), shared_kib=99).queries == 16
    latent = [divide([Run(0, 1, 9999)], (128, 1, 576, 512), shared_kib=n) for n in (227, 163, 99, 64)]
    assert [(each.queries, len(each.entries)) for each in latent] == [(32, 4), (16, 8), (16, 8), (8, 16)]
    assert divide([Run(0, 64, 9000)])[1:] == (32, 36)
    assert [divide([Run(0, 1, 9999)], window=250, two_sided=both).blocks for both in (False, True)] == [2, 3]
    text = (12, 12, 64, 64)
    assert [divide([Run(0, n, 0)], text, two_sided=True).queries for n in (512, 8, 1)] == [32, 4, 4]


# ---- experts


# Of 60 experts: sigmoids and softmaxes, with and without what goes with them.
ROUTERS = [
    Router(60, 4, True, is_sigmoid=True, eps=0.25, scale=2.5),
    Router(60, 4, False, is_sigmoid=True, n_groups=60, n_groups_used=7),
    Router(60, 7, True, is_sigmoid=True, n_groups=5, n_groups_used=2, scale=0.3),
    Router(60, 7, True, n_groups=3, n_groups_used=1, scale=3.0),
    Router(60, 2, False, n_groups=20, n_groups_used=2),
    Router(60, 5, True),
]


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_scores_groups_and_biases_choose_experts(
    reference: LayerReference, device: Emulator, router: Router, has_bias: bool
) -> None:
    random, rows = np.random.default_rng(router.n_used), 9
    logits = random.integers(-20, 20, (rows, router.n_experts)).astype(np.float32) / 4  # with equal ones
    logits[1, [3, 5]], logits[2, 7], logits[3, :] = np.nan, -np.inf, -200
    bias = (random.integers(-4, 4, router.n_experts) / 8).astype(np.float32) if has_bias else None
    factors = random.standard_normal(router.n_experts, np.float32) if has_bias else None
    experts, weights = (address(device, np.zeros(rows * router.n_used, np.int32)) for _ in range(2))
    at = router._replace(choice_bias=address(device, bias), factors=address(device, factors))
    layers.choose_experts(device, rows, at, address(device, logits), experts, weights)
    chosen = [reference.select(router, bias, row) for row in logits]
    assert get(device, experts, np.int32, (rows, router.n_used)).tolist() == [row[0] for row in chosen]
    expected = np.array([row[1] * (1 if factors is None else factors[row[0]]) for row in chosen], np.float32)
    assert same_bits(get(device, weights, np.float32, expected.shape), expected)


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(("n", "used", "rows"), [(8, 2, 1), (60, 4, 70), (300, 11, 33)])
def test_experts_are_chosen_and_sorted(
    reference: LayerReference, device: Emulator, n: int, used: int, rows: int, normalized: bool
) -> None:
    random = np.random.default_rng([n, used])
    logits = random.integers(-20, 20, (rows, n)).astype(np.float32) / 4  # with equal ones
    if rows > 1:
        logits[1, [3, 5]] = np.nan
    gate = random.standard_normal(rows, np.float32)
    pairs = rows * used
    experts, weights, starts, pair_rows, pair_of, pair_weights = (
        address(device, np.zeros(count, np.int32)) for count in (pairs, pairs, n + 1, pairs, pairs, pairs)
    )
    shared, scratch = address(device, gate), address(device, np.zeros(layers.sort_pairs_scratch(rows, n), np.uint8))
    router = Router(n, used, normalized)
    gates = {"shared_gate": address(device, gate), "shared_weights": shared}
    layers.choose_experts(device, rows, router, address(device, logits), experts, weights, **gates)
    layers.sort_pairs(device, rows, n, used, experts, weights, scratch, starts, pair_rows, pair_of, pair_weights)

    chosen = [reference.select(router, None, row) for row in logits]
    assert get(device, experts, np.int32, (rows, used)).tolist() == [row[0] for row in chosen]
    assert same_bits(get(device, weights, np.float32, (rows, used)), np.array([row[1] for row in chosen]))
    sigmoids = [reference.softmax(np.array([g, 0], np.float32))[0] for g in gate]
    assert same_bits(get(device, shared, np.float32, rows), np.array(sigmoids))
    order = sorted((e, row, i) for row in range(rows) for i, e in enumerate(chosen[row][0]))
    counts = np.bincount([e for e, _, _ in order], minlength=n)
    assert get(device, starts, np.int32, n + 1).tolist() == [0, *np.cumsum(counts).tolist()]
    assert get(device, pair_rows, np.int32, pairs).tolist() == [row for _, row, _ in order]
    of_pairs = np.array([chosen[row][1][i] for _, row, i in order], np.float32)
    assert same_bits(get(device, pair_weights, np.float32, pairs), of_pairs)
    places = get(device, pair_of, np.int32, (rows, used))
    assert all(places[row, i] == pair for pair, (_, row, i) in enumerate(order))

    outputs, added = (random.standard_normal((pairs, 37), np.float32) for _ in range(2))
    is_adapted = np.arange(n, dtype=np.int32) % 2
    added[[pair for pair, (e, _, _) in enumerate(order) if not is_adapted[e]]] = np.nan  # undefined
    y = random.standard_normal((rows, 37), np.float32)
    at, outputs_at = address(device, y), address(device, outputs)
    adapters = layers.ExpertAdapters(address(device, added), experts, address(device, is_adapted))
    for accumulate, adapted in (True, layers.NO_EXPERT_ADAPTERS), (False, adapters):
        layers.combine_experts(
            *(device, rows, used, 37, outputs_at, pair_of, weights, at), accumulate=accumulate, adapters=adapted
        )
        sums = y if accumulate else np.zeros_like(y)
        for i in range(used):
            weight = np.array([row[1][i] for row in chosen])[:, None]
            sums = sums + outputs[places[:, i]] * weight
            if adapted is adapters:
                has_one = is_adapted[[row[0][i] for row in chosen]][:, None] != 0
                sums = np.where(has_one, sums + added[places[:, i]] * weight, sums)
        assert same_bits(get(device, at, np.float32, y.shape), sums.astype(np.float32))
