"""Kernels that only drafters need, on the emulated device: copies of rows, and the logits of some of the tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from gpu.reference import Floats, Reference, same_bits

from device_arrays import get, put
from llamac import _core
from llamac.gpu import drafter_launches, launches
from llamac.gpu.drafter_launches import TILE_BYTES, ClusterMemory, Clusters
from llamac.gpu.emulator.emulator import Emulator
from llamac.gpu.launches import Experts, Form
from llamac.gpu.sources import kernel_files

FILES = [path for path in kernel_files() if path.stem in ("drafter", "pack", "products_float", "products_llamac")]
DTYPES = dict(_core.dtypes())


@pytest.fixture(params=[{"seed": 1}, {"checked": True}], ids=["shuffled", "checked"])
def device(request: pytest.FixtureRequest, emulator: Callable[..., Emulator]) -> Emulator:
    return emulator(FILES, **request.param)


def test_rows_become_parts_of_wider_rows(device: Emulator) -> None:
    x, y = np.arange(3 * 300, dtype=np.float32).reshape(3, 300), np.full((3, 700), -1, np.float32)
    to = int(put(device, y))
    drafter_launches.copy_rows(device, 3, 300, int(put(device, x)), to + 4 * 310, 700)
    y[:, 310:610] = x
    np.testing.assert_array_equal(get(device, to, np.float32, y.shape), y)


@pytest.mark.parametrize("ids", [[0, 1, 2], [298, 299], [7], range(3, 300, 3), range(300), [5, 9, 5, np.nan, -1, 1e9]])
def test_logits_of_a_head_move_to_their_ids(device: Emulator, ids: Iterable[float]) -> None:
    """Among them NaN and infinities. If ids do not ascend, as in a damaged file, nothing outside is read."""
    table, vocab_size, rows = np.array(list(ids), np.float32), 300, 3
    x = np.random.default_rng(1).standard_normal((rows, len(table)), np.float32)
    x[0, 0], x[1, 0], x[2, -1] = np.nan, -np.inf, np.inf
    expected = np.full((rows, vocab_size), -np.inf, np.float32)
    of_head, of_table, to = (int(put(device, each)) for each in (x, table, expected))
    drafter_launches.spread_logits(device, rows, len(table), vocab_size, of_head, of_table, to)
    found = get(device, to, np.float32, expected.shape)
    if (np.diff(table) > 0).all():
        expected[:, table.astype(int)] = x
        assert same_bits(found, expected)


def expected_logits(scores: Floats, products: Floats, ids: Floats, used: int, vocab_size: int) -> Floats:
    """The logits of a row as drafter.c defines them: scores (n), products and ids (n, size)."""
    order = sorted(range(len(scores)), key=lambda c: (not np.isnan(scores[c]), -scores[c], c))[:used]
    inside = products[order].reshape(-1)
    numbers = inside[~np.isnan(inside)]
    logits = np.full(vocab_size, numbers.min() - np.float32(1) if numbers.size else np.nan, np.float32)
    for token, logit in zip(ids[order].reshape(-1), inside, strict=True):
        if 0 <= token < vocab_size:
            logits[int(token)] = logit
    return logits


@pytest.mark.parametrize("dtype", ["f32", "q4"])
def test_clusters_of_each_row_give_its_logits(core_kernels: ctypes.CDLL, device: Emulator, dtype: str) -> None:
    """With equal scores, NaN and infinities, with and without a bias, and ids that are no tokens."""
    reference, number = Reference(core_kernels), DTYPES[dtype]
    random = np.random.default_rng(3)
    for n, size, used, vocab_size, has_bias in (290, 16, 3, 290 * 16, False), (7, 32, 7, 200, True):
        rows, columns = 4, 130
        w = reference.matrix(number, n * size, columns, seed=n)
        bias = random.standard_normal(n * size, np.float32) if has_bias else None
        x = random.standard_normal((rows, columns), np.float32)
        products = np.zeros((rows, n * size), np.float32)
        reference.product(number, w, x, products, bias=bias)
        scores = random.standard_normal((rows, n), np.float32)
        scores[1] = np.round(scores[1])  # many are equal
        scores[2, 1:6] = np.nan, -np.inf, np.inf, 0.0, -0.0
        scores[3] = np.nan
        ids = random.permutation(n * size).astype(np.float32)  # some are more than vocab_size
        ids[5], ids[9] = np.nan, -1

        at, part = int(put(device, w)), _core.matrix_bytes(number, size, columns)
        table = np.zeros((n, 3), np.uint64)
        table[:, 0] = at + part * np.arange(n)
        if bias is not None:
            table[:, 2] = int(put(device, bias)) + 4 * size * np.arange(n)
        form = launches.form_of(number, fast=False)
        inputs = int(put(device, x))
        if form is not Form.F32:
            packed = device.alloc(rows * launches.input_row_bytes(form, columns))
            launches.pack(device, form, inputs, rows, columns, packed)
            inputs = packed
        pairs = rows * used
        memory = ClusterMemory(*map(device.alloc, (TILE_BYTES * pairs, 4 * pairs, 4 * pairs * size)))
        clusters = Clusters(
            Experts(int(put(device, table)), number, size, columns), n, used, int(put(device, ids)), vocab_size
        )
        to = device.alloc(4 * rows * vocab_size)
        drafter_launches.cluster_logits(device, rows, clusters, int(put(device, scores)), inputs, form, memory, to)
        found = get(device, to, np.float32, (rows, vocab_size))
        for r in range(rows):
            each = (n, size)
            expected = expected_logits(scores[r], products[r].reshape(each), ids.reshape(each), used, vocab_size)
            assert same_bits(found[r], expected)
