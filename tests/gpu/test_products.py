"""Kernels that pack, multiply and embed give the bits of the core's scalar kernels, on the emulated device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from gpu.reference import Bytes, Floats, Reference, same_bits
from numpy.typing import NDArray

from bench.gpu_cards import H200, Recorder
from bench.gpu_products import Product, table
from device_arrays import get, put
from llamac import _core
from llamac.gpu import launches, layer_launches
from llamac.gpu.buffers import MOST_BLOCKS, MOST_OUTPUTS
from llamac.gpu.emulator.emulator import Emulator
from llamac.gpu.launches import Embedding, Epilogue, Experts, Matrix, Part

DTYPES = _core.dtypes()
F32 = dict(DTYPES)["f32"]


@pytest.fixture
def reference(core_kernels: ctypes.CDLL) -> Reference:
    return Reference(core_kernels)


@pytest.fixture
def device(emulator: Callable[..., Emulator]) -> Emulator:
    return emulator()


def upload(device: Emulator, values: NDArray[Any] | None) -> int:
    """The address of a copy on the device; 0 for None."""
    return 0 if values is None else int(put(device, values))


def inputs_of(device: Emulator, dtype: int, x: Floats, fast: bool) -> tuple[int, launches.Form]:
    form = launches.form_of(dtype, fast=fast)
    floats = upload(device, x)
    if form is launches.Form.F32:
        return floats, form
    inputs = device.alloc(len(x) * launches.input_row_bytes(form, x.shape[1]))
    launches.pack(device, form, floats, len(x), x.shape[1], inputs)
    return inputs, form


def check_product(
    reference: Reference, device: Emulator, dtype: int, rows: int, x: Floats, *, fast: bool, plain: bool
) -> None:
    """A product with scales, bias, weights and a copy, which is added to y; or, if it is plain, without them."""
    m, columns = x.shape
    random = np.random.default_rng([dtype, rows, columns, m])
    w = reference.matrix(dtype, rows, columns, seed=dtype + 1)
    y = random.standard_normal((m, rows), np.float32)
    arrays: dict[str, NDArray[Any]] = {"w": w, "y": y}
    options: dict[str, Floats] = {}
    if not plain:
        for name, shape in ("scales", rows), ("bias", rows), ("row_weights", m), ("copy", y.shape):
            options[name] = random.standard_normal(shape).astype(np.float32)
    at = {name: upload(device, values) for name, values in (arrays | options).items()}
    to, w_at, scales_at, bias_at = at["y"], at.pop("w"), at.pop("scales", 0), at.pop("bias", 0)
    inputs, form = inputs_of(device, dtype, x, fast)
    part = Part(Matrix(w_at, dtype, rows, columns, scales_at), at.pop("y"), bias_at)
    adds = not plain and m % 2 == 1  # to the copy
    launches.products(device, [part], inputs, m, form, Epilogue(**at, accumulate=not plain, accumulate_copy=adds))
    reference.product(
        dtype, w, x, y, fast=fast, rounds_inputs=False, **options, accumulate=not plain, accumulate_copy=adds
    )
    assert same_bits(get(device, to, np.float32, y.shape), y)
    if not plain:
        assert same_bits(get(device, at["copy"], np.float32, y.shape), options["copy"])


def forms(dtype: int) -> list[bool]:
    """Whether numerics are fast: both, if it makes a difference."""
    return [False, True] if launches.form_of(dtype, fast=True) is not launches.form_of(dtype, fast=False) else [False]


each_dtype = pytest.mark.parametrize("dtype", [number for _, number in DTYPES], ids=[name for name, _ in DTYPES])


@each_dtype
def test_products_have_the_bits_of_the_core(reference: Reference, device: Emulator, dtype: int) -> None:
    shapes = [(16, 32, 1), (37, 416, 3), (20, 33, 8), (5, 1001, 19), (16, 128, 2), (33, 2300, 1)]
    shapes += [(17, 8400, 8)]  # more columns than have room in shared memory
    shapes += [(140, 300, 70), (16, 97, 129)]  # tiles of many rows
    for rows, columns, m in shapes:
        for fast in forms(dtype):
            x = np.random.default_rng(columns).standard_normal((m, columns), np.float32)
            check_product(reference, device, dtype, rows, x, fast=fast, plain=rows == 16)


@each_dtype
def test_matrices_of_one_launch_have_the_bits_of_the_core(reference: Reference, device: Emulator, dtype: int) -> None:
    """With parts of whole and of unfinished blocks of threads, each with its own bias and scales."""
    columns, heights = 160, (37, 128, 5)
    random = np.random.default_rng(dtype)
    matrices = [reference.matrix(dtype, rows, columns, seed=rows) for rows in heights]
    biases, scales = ([random.standard_normal(rows, np.float32) for rows in heights] for _ in range(2))
    for m, n in (1, 3), (8, 2), (19, 3), (70, 3):
        x = random.standard_normal((m, columns), np.float32)
        inputs, form = inputs_of(device, dtype, x, fast=m == 8)
        expected = [np.zeros((m, rows), np.float32) for rows in heights[:n]]
        parts = []
        for w, bias, factors, y in zip(matrices, biases, scales, expected, strict=False):
            matrix = Matrix(upload(device, w), dtype, y.shape[1], columns, upload(device, factors))
            parts.append(Part(matrix, upload(device, y), upload(device, bias)))
            reference.product(dtype, w, x, y, fast=m == 8, scales=factors, bias=bias)
        launches.products(device, parts, inputs, m, form)
        for part, y in zip(parts, expected, strict=True):
            assert same_bits(get(device, part.y, np.float32, y.shape), y)


@pytest.mark.parametrize("names", launches.MIXED, ids="-".join)
def test_matrices_of_two_dtypes_have_the_bits_of_the_core(
    reference: Reference, device: Emulator, names: tuple[str, str]
) -> None:
    """One row, and parts of both dtypes, with unfinished blocks, and with more columns than have room."""
    numbers = [dict(DTYPES)[name] for name in names]
    for columns, heights in (160, ((37, 16), (5,))), (97, ((5,), (128, 3))), (8400, ((16,), (17,))):
        random = np.random.default_rng(columns)
        x = random.standard_normal((1, columns), np.float32)
        parts, expected, inputs = [], [], []
        for number, rows_of_parts in zip(numbers, heights, strict=True):
            inputs.append(inputs_of(device, number, x, fast=False)[0])
            for rows in rows_of_parts:
                w = reference.matrix(number, rows, columns, seed=rows)
                bias, scales, y = (random.standard_normal(n, np.float32) for n in (rows, rows, (1, rows)))
                matrix = Matrix(upload(device, w), number, rows, columns, upload(device, scales))
                parts.append(Part(matrix, upload(device, y), upload(device, bias)))
                reference.product(number, w, x, y, fast=False, scales=scales, bias=bias)
                expected.append(y)
        launches.mixed_products(device, parts, (inputs[0], inputs[1]))
        for part, y in zip(parts, expected, strict=True):
            assert same_bits(get(device, part.y, np.float32, y.shape), y)


@each_dtype
def test_products_of_extreme_inputs(reference: Reference, device: Emulator, dtype: int) -> None:
    x = np.random.default_rng(1).standard_normal((7, 300), np.float32)
    x[0, 130], x[1, 5], x[2, 299] = np.nan, np.inf, -np.inf
    x[3] *= np.float32(1e-35)  # too small for a scale
    x[4] *= np.float32(1e35)
    x[5, 100:290] = 0
    x[6] = -x[6, 0]  # every code is the largest
    for fast in forms(dtype):
        check_product(reference, device, dtype, 19, x, fast=fast, plain=True)


@each_dtype
def test_products_of_inputs_that_are_rounded(reference: Reference, device: Emulator, dtype: int) -> None:
    """To 8 bits with one scale per row, before they are packed."""
    rows, columns, m = 19, 300, 7
    x = np.random.default_rng(1).standard_normal((m, columns), np.float32)
    x[0, 130], x[1, 5], x[2, 1] = np.nan, -np.inf, 1e35
    x[3] *= np.float32(1e-7)  # less than the least magnitude, 1e-5
    x[5] *= np.float32(2e-6)
    x[4] = np.arange(columns) % 255 - 127  # ties, and codes that are exact
    x[4, :100] += np.float32(0.5)
    w = reference.matrix(dtype, rows, columns, seed=3)
    for fast in forms(dtype):
        form, expected = launches.form_of(dtype, fast=fast), np.zeros((m, rows), np.float32)
        reference.product(dtype, w, x, expected, fast=fast, rounds_inputs=True)
        inputs, y = device.alloc(m * launches.input_row_bytes(form, columns)), upload(device, np.zeros_like(expected))
        launches.round_and_pack(device, form, upload(device, x), m, columns, inputs)
        launches.products(device, [Part(Matrix(upload(device, w), dtype, rows, columns), y)], inputs, m, form)
        assert same_bits(get(device, y, np.float32, expected.shape), expected)


@pytest.mark.parametrize(
    ("dtype", "rows", "m", "kernel"),
    [
        ("q8", 4096, 64, "few"),
        ("q8", 6144, 64, "many, 2 strips"),
        ("q8", 28672, 8, "few"),
        ("q8", 28672, 9, "many, 8 strips"),
        ("q4_k", 6144, 32, "few"),
        ("q4", 4096, 32, "few"),
        ("q4", 4096, 40, "many, 2 strips"),
        ("q4", 6144, 32, "many, 2 strips"),
        ("q4", 4096, 200, "many, 8 strips"),
        ("q4", 4096, 128, "many, 4 strips"),
        ("bf16", 4096, 64, "few"),
        ("bf16", 6144, 64, "many, 8 strips"),
    ],
)
def test_the_kernels_for_many_rows_compute_large_products(
    device: Emulator, monkeypatch: pytest.MonkeyPatch, dtype: str, rows: int, m: int, kernel: str
) -> None:
    """The faster ones on an H200, which have the same bits."""
    launched: list[str] = []

    def launch(name: str, grid: tuple[int, int, int], threads: int, *_: Any) -> None:
        launched.append("few" if "_few" in name else f"many, {threads // 32} strips")

    monkeypatch.setattr(device, "launch", launch)
    monkeypatch.setattr(device, "properties", device.properties._replace(multiprocessors=132))
    number = dict(DTYPES)[dtype]
    part = Part(Matrix(0, number, rows, 4096), 0)
    launches.products(device, [part], 0, m, launches.form_of(number, fast=False))
    assert launched == [kernel]


@each_dtype
@pytest.mark.parametrize("counts", [(2, 0, 19, 1), (80, 0, 65, 3)], ids=["few", "many"])
def test_products_of_experts(reference: Reference, device: Emulator, dtype: int, counts: tuple[int, ...]) -> None:
    """counts: pairs of each expert; the last one is left out."""
    rows, columns = 21, 200
    random = np.random.default_rng(dtype)
    starts = np.cumsum((0, *counts), dtype=np.int32)
    pairs = int(starts[-1])
    x, biases = random.standard_normal((9, columns), np.float32), random.standard_normal((4, rows), np.float32)
    pair_rows = random.integers(0, 9, pairs, np.int32)
    matrices = [reference.matrix(dtype, rows, columns, seed=50 + expert) for expert in range(4)]
    table = np.array([(upload(device, w), 0, upload(device, bias)) for w, bias in zip(matrices, biases, strict=True)])
    table[3, 0] = 0
    expected = np.zeros((pairs, rows), np.float32)
    for expert, w in enumerate(matrices[:3]):
        first, last = starts[expert : expert + 2]
        reference.product(dtype, w, x[pair_rows[first:last]], expected[first:last], bias=biases[expert])

    experts = Experts(upload(device, table.astype(np.uint64)), dtype, rows, columns)
    tiles = device.alloc(12 * launches.most_tiles(4, pairs))
    inputs, form = inputs_of(device, dtype, x, fast=False)
    y = upload(device, np.zeros_like(expected))
    launches.tile_pairs(device, upload(device, starts), 4, pairs, tiles)
    other = upload(device, np.zeros_like(expected))
    launches.expert_products(
        device, [(experts, y), (experts, other)], inputs, upload(device, pair_rows), 4, pairs, tiles, form
    )
    for each in y, other:
        assert same_bits(get(device, each, np.float32, expected.shape), expected)


@each_dtype
def test_products_of_heads(reference: Reference, device: Emulator, dtype: int) -> None:
    """Each head's own strips, and inputs that lie apart."""
    heads, rows, columns, stride = 3, 32, 72, 100
    random = np.random.default_rng(dtype)
    matrices = [reference.matrix(dtype, rows, columns, seed=20 + head) for head in range(heads)]
    table = upload(device, np.array([(upload(device, w), 0, 0) for w in matrices], np.uint64))
    for m in 1, 5, 70:
        x = random.standard_normal((m, heads, stride), np.float32)
        form = launches.form_of(dtype, fast=False)
        inputs = device.alloc(m * heads * launches.input_row_bytes(form, columns))
        launches.pack(device, form, upload(device, x) + 4 * 20, m, columns, inputs, heads, stride)
        expected = np.zeros((heads, m, rows), np.float32)
        for head, w in enumerate(matrices):
            reference.product(dtype, w, np.ascontiguousarray(x[:, head, 20 : 20 + columns]), expected[head])
        y = upload(device, np.zeros_like(expected))
        launches.head_products(device, Experts(table, dtype, rows, columns), heads, inputs, m, form, y)
        assert same_bits(get(device, y, np.float32, (m, heads, rows)), np.ascontiguousarray(expected.swapaxes(0, 1)))


class Table(NamedTuple):
    """Embeddings of a dtype, and their adapter if rank is not 0."""

    w: Bytes
    a: Bytes
    b: Bytes
    rank: int

    def row(self, reference: Reference, dtype: int, row: int, columns: int) -> Floats:
        x = reference.gather(dtype, self.w, row, columns)
        if self.rank:
            factor = reference.gather(F32, self.b, row, self.rank)
            reference.product(F32, self.a, factor[None], x[None], accumulate=True)
        return x


@each_dtype
def test_embeddings_have_the_bits_of_the_core(reference: Reference, device: Emulator, dtype: int) -> None:
    ids, kinds, places = (np.array(x, np.int32) for x in ([39, 0, 17], [2, 0, 1], [0, 19, 5]))
    cases = (33, 1.0, False, False, 0), (300, 3.7, True, False, 0), (256, 0.3, False, True, 0), (50, 2.0, True, True, 5)
    for columns, scale, learned, typed, rank in cases:
        tokens, types, positions = (
            Table(
                reference.matrix(dtype, rows, columns, seed=3),
                reference.matrix(F32, columns, max(rank, 1), seed=4),
                reference.matrix(F32, rows, max(rank, 1), seed=5),
                rank,
            )
            for rows in (40, 3, 20)
        )
        x = np.zeros((3, columns), np.float32)
        for row, token, kind, place in zip(x, ids.tolist(), kinds.tolist(), places.tolist(), strict=True):
            row[:] = tokens.row(reference, dtype, token, columns)
            if scale != 1:
                row *= np.float32(scale)
            if typed:
                row += types.row(reference, dtype, kind, columns)
            if learned:
                row += positions.row(reference, dtype, place, columns)
        first, second, third = (
            Embedding(
                Matrix(upload(device, table.w), dtype, rows, columns),
                *((upload(device, table.a), upload(device, table.b), rank) if rank else (0, 0, 0)),
            )
            for table, rows in ((tokens, 40), (types, 3), (positions, 20))
        )
        at = upload(device, np.zeros_like(x))
        ids_at, kinds_at, places_at = (upload(device, numbers) for numbers in (ids, kinds, places))
        others = second if typed else None, third if learned else None
        launches.embed(device, first, *others, 3, ids_at, kinds_at, places_at, scale, at)
        assert same_bits(get(device, at, np.float32, x.shape), x)


@pytest.mark.parametrize("m", [1, 8, 256])
def test_grids_of_the_widest_models_have_no_more_blocks_than_cuda_allows(m: int) -> None:
    """Along y and z. Emulated devices also refuse larger grids."""
    recorder = Recorder(H200)
    for _, dtype in DTYPES:
        form = launches.form_of(dtype, fast=False)
        part = Part(Matrix(256, dtype, MOST_OUTPUTS, 2048), 512)
        launches.products(recorder, [part], 1024, m, form)  # type: ignore[arg-type]
        launches.pack(recorder, form, 256, MOST_BLOCKS, 2048, 512)  # type: ignore[arg-type]
    layer_launches.activate(recorder, MOST_BLOCKS, 2048, 0, 256, 512)  # type: ignore[arg-type]
    assert max(max(launch.grid[1:]) for launch in recorder.launches) == 65_535


def test_the_benchmark_of_products_measures_each_dtype(
    emulator: Callable[..., Emulator], capsys: pytest.CaptureFixture[str]
) -> None:
    products = [Product(dtype, 32, 64, 2, fast) for dtype, fast in (("q4_k", True), ("q4", False), ("f16", False))]
    results = table(emulator(), products, cache_bytes=1)
    assert [result["dtype"] for result in results] == ["q4_k", "q4", "f16"]
    assert all(result["us"] > 0 and result["gb_s"] > 0 and result["tops"] > 0 for result in results)
    assert capsys.readouterr().out.count("32x64") == 3
