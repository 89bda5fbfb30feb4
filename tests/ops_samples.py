"""What the tests of llamac.ops share: random arrays, matrices in every number format, all ways to compute a call."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gguf_blocks import weights
from numpy.typing import NDArray

from llamac import _core, ops
from llamac.format.strips import LAYOUTS
from openmp import up_to

Floats = NDArray[np.float32]

DTYPES = dict(_core.dtypes())
RUNS_HERE = [name for name, supported in _core.isas() if supported]
THREADS = (1, up_to(2), up_to(3))


def normal(*shape: int, seed: int = 1) -> Floats:
    """Normally distributed numbers."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def some_matrix(dtype: str, rows: int, columns: int) -> ops.Matrix:
    """A random matrix. GGUF's types need whole blocks: up to 256 columns."""
    if dtype not in LAYOUTS:
        return ops.quantize(normal(rows, columns) * np.float32(0.125), dtype)
    data = np.empty(_core.matrix_bytes(DTYPES[dtype], rows, columns), np.uint8)
    assert _core.regroup(DTYPES[dtype], weights(dtype, rows, columns).data, columns, data.data)
    return ops.Matrix(data.data, dtype, (rows, columns))


def columns_of(dtype: str) -> int:
    """A number of columns that fills neither a vector nor a block of inputs, as far as the dtype allows."""
    if dtype not in LAYOUTS:
        return 173
    return 512 if LAYOUTS[dtype].has_super_scales else 160


def on_all_sets(call: Callable[[str], Floats]) -> Floats:
    """The result of a call for each kernel set of this machine, which all have the same bits."""
    results = [call(isa) for isa in RUNS_HERE]
    assert len({result.tobytes() for result in results}) == 1
    return results[0]


def everywhere(call: Callable[[str, int], Floats]) -> Floats:
    """The result of a call for each kernel set and some numbers of threads, which all have the same bits."""
    return on_all_sets(lambda isa: _on_all_threads(lambda threads: call(isa, threads)))


def _on_all_threads(call: Callable[[int], Floats]) -> Floats:
    results = [call(threads) for threads in THREADS]
    assert len({result.tobytes() for result in results}) == 1
    return results[0]


def assert_close(found: Floats, expected: NDArray[np.float64], relative: float) -> None:
    """The largest difference is at most `relative` times the largest expected magnitude."""
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= relative * np.abs(expected).max()
