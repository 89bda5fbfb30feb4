"""Matrices of codes and factors, as quantized checkpoints store them.

A number is its code times the factor of its block, in float32. That is exact for factors in bfloat16 and float16, and
rounded once for others. A format can round it to the dtype of the factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamac.errors import ExportError
from llamac.export.checkpoint import LazyTensor
from llamac.export.hf.mxfp4 import CODES as FP4
from llamac.export.stored import WEIGHT_DTYPES, Floats, StoredTensor, as_float32, contiguous_strides
from llamac.format.strips import to_dtype

EXPONENTS = "f8_e8m0"
_BYTES = np.arange(256, dtype=np.uint8)


def _e4m3() -> Floats:
    """The numbers of FP8 E4M3: no infinities, and one NaN of each sign (OCP 8-bit Floating Point, 1.0)."""
    exponents, fractions = (_BYTES >> 3 & 15).astype(np.int32), (_BYTES & 7).astype(np.float32)
    normal = np.ldexp(1 + fractions / 8, exponents - 7)
    found = np.where(exponents > 0, normal, fractions / 512)
    found[(_BYTES & 127) == 127] = np.nan
    return np.where(_BYTES >> 7, -found, found).astype(np.float32)


# The numbers of all codes, by the dtypes of tensors with codes.
CODES: dict[str, Floats] = {
    "f8_e4m3": _e4m3(),
    "i8": _BYTES.view(np.int8).astype(np.float32),
    "f4": FP4,
}


@dataclass(frozen=True)
class ExponentTensor(StoredTensor):
    """Factors that are powers of two: bytes of exponents plus 127, and 255 for NaN (E8M0). `dtype` is f32."""

    @property
    def number_type(self) -> np.dtype[Any]:
        return np.dtype(np.uint8)

    def _decoded(self, numbers: NDArray[Any]) -> Floats:
        powers: Floats = np.ldexp(np.float32(1), numbers.astype(np.int32) - 127)
        powers[numbers == 255] = np.nan
        return powers


@dataclass(frozen=True)
class ScaledTensor(StoredTensor):
    """A view of matrices of codes. `shape`, `dtype` (f32) and `strides` are those of the numbers.

    Attributes:
        name: The tensor of factors, for errors.
        codes: The codes of all matrices, (matrices, rows, columns). Its dtype is a key of CODES. Rows can be followed
            by unused codes; otherwise it is contiguous. The first of two codes of 4 bits is in a byte's low bits.
        scales: The factors, (matrices, rows of blocks, columns of blocks).
        block: The rows and columns of a block. The last blocks can be partial.
        first: The number at which the view starts.
        rounds_to: The dtype that products are rounded to.
        has_zeros: Factors can be 0: those of blocks of zeros.
    """

    name: str
    codes: StoredTensor
    scales: StoredTensor
    block: tuple[int, int]
    first: int = 0
    rounds_to: str = "f32"
    has_zeros: bool = False

    def rows(self, first: int, last: int) -> ScaledTensor:
        return replace(self, shape=(last - first, *self.shape[1:]), first=self.first + first * self.strides[0])

    def lazy(self) -> LazyTensor:
        return LazyTensor(self.shape, self.codes.dtype, self.read)

    def _numbers(self, start: int, shape: tuple[int, int], strides: tuple[int, int]) -> Floats:
        if 0 in shape:
            return np.zeros(shape, np.float32)
        at = self.first + start
        count = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        codes = self._codes(at, count)
        found = CODES[self.codes.dtype].take(np.lib.stride_tricks.as_strided(codes, shape, strides, writeable=False))
        self._multiply(found, at, strides)
        return as_float32(to_dtype(found, self.rounds_to), self.rounds_to)

    def _codes(self, at: int, count: int) -> NDArray[np.uint8]:
        """Codes [at, at + count), a byte each."""
        per_byte = 2 if self.codes.dtype == "f4" else 1
        begin, end = at // per_byte, -(-(at + count) // per_byte)
        data = np.fromfile(self.path, np.uint8, end - begin, offset=self.codes.offset + begin)
        if len(data) != end - begin:
            raise ExportError(f"{self.path} was truncated while it was being read")
        return data if per_byte == 1 else np.stack((data & 15, data >> 4), axis=-1).reshape(-1)[at % 2 :]

    def _multiply(self, numbers: Floats, at: int, strides: tuple[int, int]) -> None:
        """Multiply numbers from `at` on by their factors. One axis goes through rows, the other through columns."""
        of_matrix, of_row, _ = self.codes.strides
        matrix, at = divmod(at, of_matrix)
        row, column = divmod(at, of_row)
        steps = [divmod(step, of_row) if n > 1 else (0, 0) for n, step in zip(numbers.shape, strides, strict=True)]
        if steps[0][0] == 0 and steps[1][1] == 0:  # the first axis goes through columns
            numbers, steps = numbers.T, steps[::-1]
        rows = (row + steps[0][0] * np.arange(numbers.shape[0])) // self.block[0]
        columns = (column + steps[1][1] * np.arange(numbers.shape[1])) // self.block[1]
        low = int(rows[0])
        factors = self._scales(matrix, low, int(rows[-1]) + 1).take(rows - low, axis=0)
        blocks, starts = np.unique(columns, return_index=True)
        with np.errstate(over="ignore"):  # `LazyTensor.finite` reports infinities with the tensor's name
            for block, start, end in zip(blocks, starts, [*starts[1:], len(columns)], strict=True):
                numbers[:, start:end] *= factors[:, block : block + 1]

    def _scales(self, matrix: int, low: int, high: int) -> Floats:
        """The factors of rows [low, high) of blocks."""
        factors = self.scales.part(matrix).read(low, high)
        is_wrong = ~(((factors > 0) | (self.has_zeros & (factors == 0))) & np.isfinite(factors))
        if is_wrong.any():
            raise ExportError(
                f"{self.path}: {self.name} has the factor {factors[is_wrong][0]:g}, expected positive finite numbers: "
                "the file is damaged"
            )
        return factors


def collected(found: Iterable[tuple[str, StoredTensor | str]]) -> dict[str, StoredTensor]:
    """The tensors among (name, tensor or what is wrong with it). ExportError lists everything that is wrong."""
    tensors: dict[str, StoredTensor] = {}
    problems: list[str] = []
    for name, tensor in found:
        if isinstance(tensor, str):
            problems.append(tensor)
        else:
            tensors[name] = tensor
    if problems:
        raise ExportError("the tensors do not match quantization_config:\n  " + "\n  ".join(problems))
    return tensors


Blocks = Callable[[tuple[int, ...], tuple[int, ...]], tuple[int, int] | None]


def is_contiguous(tensor: StoredTensor) -> bool:
    """Whether a tensor is a C-contiguous array, as all are in safetensors files."""
    return tensor.strides == contiguous_strides(tensor.shape)


def scaled(
    name: str, codes: StoredTensor, scale_name: str, scales: StoredTensor | None, blocks: Blocks
) -> ScaledTensor | str:
    """A tensor of codes, (rows, columns) or (matrices, rows, columns), with its factors; or what is wrong with them.

    Args:
        name: The name of the codes.
        codes: Its dtype is a key of CODES. Rows can be followed by unused codes.
        scale_name: The name of the factors.
        scales: The factors; None if there are none.
        blocks: blocks(shape of the codes, shape of the factors) returns the size of a block, or None if the shapes do
            not fit. A single factor has the shape (1, 1), and one for each matrix (matrices, 1, 1).
    """
    if scales is None:
        return f"missing: {scale_name}, the factors of {name}"
    if scales.dtype not in WEIGHT_DTYPES and not isinstance(scales, ExponentTensor):
        return f"dtype: {scale_name} is {scales.dtype}, expected one of {', '.join((*WEIGHT_DTYPES, EXPONENTS))}"
    n_dims = len(codes.shape)
    is_whole = is_contiguous(codes) or (n_dims == 2 and codes.strides[0] > codes.shape[1] and codes.strides[1] == 1)
    if not (is_whole and is_contiguous(scales)):
        return f"strides: {name} has {codes.strides} and {scale_name} {scales.strides}, expected contiguous tensors"
    grid = scales.shape
    if math.prod(grid) == (1 if n_dims == 2 else codes.shape[0]):
        grid = (*codes.shape[:-2], 1, 1)
    block = blocks(codes.shape, grid) if n_dims in (2, 3) and len(grid) == n_dims and 0 not in codes.shape else None
    if block is None or grid[:-2] != codes.shape[:-2]:
        return f"misshaped: {scale_name} is {scales.shape}, which does not fit {name}, {codes.shape}"
    if n_dims == 2:
        per_matrix = codes.shape[0] * codes.strides[0]
        codes_of_all = replace(codes, shape=(1, *codes.shape), strides=(per_matrix, *codes.strides))
        grid = (1, *grid)
    else:
        codes_of_all = codes
    scales = replace(scales, shape=grid, strides=contiguous_strides(grid))
    fields = (codes.shape, codes.strides, codes.offset)
    return ScaledTensor(codes.path, "f32", *fields, scale_name, codes_of_all, scales, block)
