"""A tensor in a file, described by offset, dtype and strides. It is read some rows at a time, never mapped."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llamac.errors import ExportError
from llamac.export.checkpoint import LazyTensor

Floats = NDArray[np.float32]

# How many of the source's numbers are in memory at once, in addition to the requested rows.
BLOCK_NUMBERS = 1 << 22

MAX_DIMS = 64  # as in torch

# Each stored dtype: its NumPy type in the file, and the dtype in which a flat file stores it exactly.
WEIGHT_DTYPES = {"f64": ("<f8", "f32"), "f32": ("<f4", "f32"), "f16": ("<f2", "f16"), "bf16": ("<u2", "bf16")}

INTEGERS = {"i64": "<i8", "i32": "<i4"}


@dataclass(frozen=True)
class StoredTensor:
    """A strided array of numbers in a file.

    Readers of untrusted files check that shape and strides stay inside the file before they create one.

    Attributes:
        dtype: A key of WEIGHT_DTYPES. A tensor of another dtype can be described, but not read.
        strides: In numbers, one per dimension, none negative.
        offset: The position of the first number, in bytes.
        is_by_rows: Only rows are read: `transposed` would swap the shape alone.
    """

    is_by_rows: ClassVar[bool] = False
    path: Path
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def number_type(self) -> np.dtype[Any]:
        """The type of a number in the file."""
        return np.dtype(WEIGHT_DTYPES[self.dtype][0])

    @property
    def transposed(self) -> StoredTensor:
        """The same numbers with the dimensions reversed."""
        return replace(self, shape=self.shape[::-1], strides=self.strides[::-1])

    def rows(self, first: int, last: int) -> StoredTensor:
        """Rows [first, last) along the first dimension."""
        offset = self.offset + first * self.strides[0] * self.number_type.itemsize
        return replace(self, shape=(last - first, *self.shape[1:]), offset=offset)

    def every(self, step: int, first: int) -> StoredTensor:
        """Every `step`-th row, from row `first` on. `step` divides the number of rows."""
        rows = self.rows(first, self.shape[0])
        return replace(
            rows, shape=(self.shape[0] // step, *self.shape[1:]), strides=(step * self.strides[0], *self.strides[1:])
        )

    def part(self, index: int) -> StoredTensor:
        """The tensor at `index` of the first dimension."""
        return replace(self.rows(index, index + 1), shape=self.shape[1:], strides=self.strides[1:])

    def lazy(self) -> LazyTensor:
        """As a checkpoint's tensor. It must have one or two dimensions and a dtype of WEIGHT_DTYPES."""
        return LazyTensor(self.shape, WEIGHT_DTYPES[self.dtype][1], self.read)

    def read(self, first: int, last: int) -> Floats:
        """Rows [first, last) as float32, (last - first, columns); for a vector, its elements."""
        if len(self.shape) == 1:
            return self._matrix(first, last, 1, 0)[:, 0]
        return self._matrix(first, last, self.shape[1], self.strides[1])

    def _matrix(self, first: int, last: int, columns: int, stride: int) -> Floats:
        """Rows [first, last) of a matrix whose columns are `stride` numbers apart.

        Reads a block of columns at a time, because the rows of a transposed matrix are spread over all of its bytes.
        """
        result = np.empty((last - first, columns), np.float32)
        step = max(1, columns if stride <= 1 else BLOCK_NUMBERS // stride)
        for start in range(0, columns, step):
            shape = (last - first, min(columns, start + step) - start)
            numbers = self._numbers(first * self.strides[0] + start * stride, shape, (self.strides[0], stride))
            result[:, start : start + shape[1]] = numbers
        return result

    def _numbers(self, start: int, shape: tuple[int, int], strides: tuple[int, int]) -> Floats:
        """The numbers from `start` on, with this shape and these strides, as float32."""
        kind = self.number_type
        if 0 in shape:
            return np.zeros(shape, np.float32)
        count = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        flat = np.fromfile(self.path, kind, count, offset=self.offset + start * kind.itemsize)
        if len(flat) != count:
            raise ExportError(f"{self.path} was truncated while it was being read")
        in_bytes = (strides[0] * kind.itemsize, strides[1] * kind.itemsize)
        return self._decoded(np.lib.stride_tricks.as_strided(flat, shape, in_bytes, writeable=False))

    def _decoded(self, numbers: NDArray[Any]) -> Floats:
        """Numbers of the file as float32."""
        return as_float32(numbers, self.dtype)


def as_float32(numbers: NDArray[np.generic], dtype: str) -> Floats:
    """Numbers of a file as float32. `dtype` is a key of WEIGHT_DTYPES."""
    if dtype == "bf16":
        bits = numbers.astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    # a float64 beyond float32 becomes infinite, which `LazyTensor.finite` reports with the tensor's name
    with np.errstate(over="ignore", invalid="ignore"):
        return numbers.astype(np.float32, copy=False)


def read_bytes(tensor: StoredTensor, first: int, last: int, width: int) -> NDArray[np.uint8]:
    """The first `width` bytes of rows [first, last) of a tensor of bytes."""
    stride = tensor.strides[0]
    if last == first:
        return np.zeros((0, width), np.uint8)
    count = (last - first - 1) * stride + width
    flat = np.fromfile(tensor.path, np.uint8, count, offset=tensor.offset + first * stride)
    if len(flat) != count:
        raise ExportError(f"{tensor.path} was truncated while it was being read")
    return np.lib.stride_tricks.as_strided(flat, (last - first, width), (stride, 1), writeable=False)


def integers(tensor: StoredTensor) -> NDArray[np.int64]:
    """The numbers of a vector whose dtype is a key of INTEGERS."""
    kind = np.dtype(INTEGERS[tensor.dtype])
    in_bytes = replace(tensor, strides=(tensor.strides[0] * kind.itemsize,))
    rows = read_bytes(in_bytes, 0, tensor.shape[0], kind.itemsize)
    return np.ascontiguousarray(rows).view(kind)[:, 0].astype(np.int64)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a C-contiguous array."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def are_sizes(values: Any, container: type[list[Any]] | type[tuple[Any, ...]]) -> bool:
    """Whether untrusted `values` is a list or tuple (`container`) of sizes, for at most MAX_DIMS dimensions."""
    if not isinstance(values, container) or len(values) > MAX_DIMS:
        return False
    return all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors have the same numbers. Tensors that cannot be compared are not equal."""
    if one == other:
        return True
    if one.shape != other.shape or len(one.shape) != 2 or {one.dtype, other.dtype} - set(WEIGHT_DTYPES):
        return False
    if 0 in one.shape:  # an empty matrix is reported as misshaped
        return False
    pairs = zip(one.lazy().chunks(), other.lazy().chunks(), strict=True)
    return all(np.array_equal(rows, others) for (_, rows), (_, others) in pairs)
