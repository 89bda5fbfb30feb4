"""The core's scalar kernels as a library: the reference for kernels on a GPU."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llamac import _core

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    *("tests/gpu/reference.c", "tests/gpu/layer_reference.c"),
    *("csrc/kernels_scalar.c", "csrc/dtype.c", "csrc/rope.c", "csrc/router.c"),
)
FLAGS = ("-std=c11", "-O0", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-w", "-shared", "-fPIC")

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def same_bits(x: Floats, y: Floats) -> bool:
    """Whether two arrays have the same bits, apart from those of NaNs."""
    return bool(np.all((x.view(np.uint32) == y.view(np.uint32)) | (np.isnan(x) & np.isnan(y))))


def build(folder: Path) -> ctypes.CDLL:
    """The library, compiled into a folder."""
    path = folder / "reference.so"
    compiler = shlex.split(os.environ.get("CC") or "cc")
    includes = [f"-I{ROOT / name}" for name in ("csrc", "tests/c")]
    subprocess.run([*compiler, *FLAGS, *includes, *(ROOT / s for s in SOURCES), "-lm", "-o", path], check=True)
    return ctypes.CDLL(str(path))


class Reference:
    """The kernels of products."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def matrix(self, dtype: int, rows: int, columns: int, seed: int, limit: float = 0.01) -> Bytes:
        """A random matrix in strips. limit: of row scales and f16 scales."""
        strips = np.zeros(_core.matrix_bytes(dtype, rows, columns), np.uint8)
        size = rows, columns, ctypes.c_float(limit), ctypes.c_uint64(seed)
        self.library.reference_fill(dtype, _pointer(strips), *size)
        return strips

    def product(
        self,
        dtype: int,
        w: Bytes,
        x: Floats,
        y: Floats,
        *,
        fast: bool = False,
        rounds_inputs: bool = False,
        scales: Floats | None = None,
        bias: Floats | None = None,
        row_weights: Floats | None = None,
        accumulate: bool = False,
        accumulate_copy: bool = False,
        copy: Floats | None = None,
    ) -> None:
        """y (m, rows) = the product of x (m, columns) with w (rows, columns), as struct gemm."""
        shape = y.shape[1], x.shape[1]
        factors = _pointer(scales), _pointer(bias), _pointer(row_weights), int(accumulate), int(accumulate_copy)
        arguments = _pointer(x), len(x), int(fast), int(rounds_inputs), *factors, _pointer(y), _pointer(copy)
        self.library.reference_product(dtype, _pointer(w), *shape, *arguments)

    def gather(self, dtype: int, w: Bytes, row: int, columns: int) -> Floats:
        """A row of a matrix."""
        y = np.zeros(columns, np.float32)
        self.library.reference_gather(dtype, _pointer(w), int(row), columns, _pointer(y))
        return y


def _pointer(array: NDArray[np.generic] | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data if array is not None else None)
