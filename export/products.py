"""Products of rows with a checkpoint's matrices in NumPy and float64, on several threads.

A matrix is read in chunks of rows, so it is never in memory as a whole.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from llamac.arguments import Numerics
from llamac.engine.hardware.machine import plan_threads
from llamac.export.checkpoint import LazyTensor
from llamac.export.rounding import Array, rounded_inputs

# How much of a matrix each thread holds in memory at once, in bytes of float64.
CHUNK_BYTES = 8 << 20
MAX_THREADS = 4
# The multiply-adds of a product that BLAS computes on one thread. On several, BLAS spins until all have finished; if
# other programs use the CPUs, one millisecond becomes a hundred. So `linear` uses threads of its own.
BLAS_MULTIPLY_ADDS = 1 << 18
BLAS_COLUMNS = 256


def linear(x: Array, weight: LazyTensor, bias: LazyTensor | None = None, *, numerics: Numerics | None = None) -> Array:
    """W x + b for every row.

    Args:
        x: Shape (n, in).
        weight: Shape (out, in).
        bias: Shape (out,), or None.
        numerics: Round the inputs as the engine does with these numerics. Default: not at all.

    Returns:
        Shape (n, out).
    """
    if numerics is not None:
        x = rounded_inputs(x, weight.dtype, numerics)
    out, columns = weight.shape
    step = max(1, CHUNK_BYTES // (8 * columns))
    y = np.empty((len(x), out))

    def chunk(first: int) -> None:
        last = min(first + step, out)
        y[:, first:last] = product(x, weight.read(first, last))

    starts = range(0, out, step)
    threads = min(MAX_THREADS, plan_threads().threads, len(starts))
    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(chunk, starts):
                pass  # iterating re-raises what `chunk` raised
    else:
        for first in starts:
            chunk(first)
    return y if bias is None else y + bias.array()


def product(x: Array, rows: NDArray[np.float32]) -> Array:
    """x rows^T: (n, r), in products too small for BLAS to use threads. x (n, columns), rows (r, columns)."""
    n, columns = x.shape
    y = np.zeros((n, len(rows)))
    for first in range(0, columns, BLAS_COLUMNS):
        part = np.ascontiguousarray(x[:, first : first + BLAS_COLUMNS])
        weights = rows[:, first : first + BLAS_COLUMNS].astype(np.float64)
        size = max(1, BLAS_MULTIPLY_ADDS // part.size)
        whole = len(rows) // size * size
        stack = weights[:whole].reshape(-1, size, part.shape[1]).transpose(0, 2, 1)
        y[:, :whole] += np.matmul(part, stack).transpose(1, 0, 2).reshape(n, whole)
        y[:, whole:] += part @ weights[whole:].T
    return y
