"""Small unsigned integers in words of 32 bits, in the orders in which quantized checkpoints store them.

A matrix of integers is read some rows at a time. Words can hold consecutive columns or consecutive rows, and the tensor
can be stored by columns; then the wanted rows are short runs all over it, and only these are read.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamac.errors import ExportError
from llamac.export.stored import StoredTensor, contiguous_strides

WORD_BITS = 32
# AWQ's kernels unpack two codes at once, from the low and the high half of a word: the place of each of 8 codes.
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Words:
    """A matrix of integers.

    Attributes:
        tensor: The words, i32, contiguous.
        shape: (rows, columns) of the integers.
        bits: Of an integer.
        by_columns: The first dimension of the tensor goes through columns.
        along_rows: A word has integers of consecutive rows, not columns.
        spills: Integers fill words without gaps, and can begin in one word and end in the next.
        places: The places of as many integers among themselves; (): they are in order.
        plus: Added to each integer, modulo its range.
    """

    tensor: StoredTensor
    shape: tuple[int, int]
    bits: int
    by_columns: bool = False
    along_rows: bool = False
    spills: bool = False
    places: tuple[int, ...] = ()
    plus: int = 0

    @property
    def _unit(self) -> tuple[int, int]:
        """The integers and the words that repeat."""
        if not self.spills:
            return WORD_BITS // self.bits, 1
        integers = math.lcm(WORD_BITS // math.gcd(WORD_BITS, self.bits), len(self.places) or 1)
        return integers, integers * self.bits // WORD_BITS

    @property
    def tensor_shape(self) -> tuple[int, int]:
        """The shape that the tensor must have."""
        found = list(self.shape)
        axis = 0 if self.along_rows else 1
        if self.spills and not self.places:
            found[axis] = -(-found[axis] * self.bits // WORD_BITS)
        else:
            integers, words = self._unit
            found[axis] = -(-found[axis] // integers) * words
        return (found[1], found[0]) if self.by_columns else (found[0], found[1])

    def problem(self, name: str) -> str | None:
        """What is wrong with the tensor of this name."""
        found, needed = self.tensor, self.tensor_shape
        if found.dtype != "i32" or found.shape != needed or found.strides != contiguous_strides(needed):
            return f"misshaped: {name} is {found.dtype} {found.shape}, expected i32 {needed}"
        return None

    def read(self, first: int, last: int) -> NDArray[np.uint8]:
        """Rows [first, last) of the integers."""
        integers, words = self._unit
        low, high = (first // integers, -(-last // integers)) if self.along_rows else (first, last)
        spans = [(0, size) for size in self.tensor.shape]
        step = words if self.along_rows else 1
        axis = 1 if self.by_columns else 0
        spans[axis] = (low * step, min(high * step, self.tensor.shape[axis]))
        found = read_region(self.tensor, np.dtype("<u4"), *spans)
        if self.along_rows != self.by_columns:  # the first dimension is the one that words go along
            found = found.T
        start, end = (first - low * integers, last - low * integers) if self.along_rows else (0, self.shape[1])
        unpacked: NDArray[np.uint8] = self._unpacked(np.ascontiguousarray(found))[:, start:end]
        return unpacked.T if self.along_rows else unpacked

    def _unpacked(self, words: NDArray[np.uint32]) -> NDArray[np.uint8]:
        """The integers of words, along the last dimension."""
        per_unit, unit_words = self._unit
        if missing := -words.shape[1] % unit_words:  # of the last integers
            words = np.pad(words, ((0, 0), (0, missing)))
        units = words.reshape(len(words), -1, unit_words)
        found: NDArray[np.uint8] = np.empty((*units.shape[:2], per_unit), np.uint8)
        mask = np.uint32((1 << self.bits) - 1)
        for i in range(per_unit):
            place = i - i % len(self.places) + self.places[i % len(self.places)] if self.places else i
            word, shift = divmod(place * self.bits, WORD_BITS)
            numbers = units[:, :, word] >> np.uint32(shift)
            if shift + self.bits > WORD_BITS:
                numbers |= units[:, :, word + 1] << np.uint32(WORD_BITS - shift)
            if self.plus:
                numbers += np.uint32(self.plus)
            found[:, :, i] = numbers & mask
        return found.reshape(len(words), -1)


def read_region(
    tensor: StoredTensor, kind: np.dtype[Any], rows: tuple[int, int], columns: tuple[int, int]
) -> NDArray[Any]:
    """Rows and columns [first, last) of a contiguous matrix of numbers of a type. Reads no other bytes."""
    (first, last), (left, right) = rows, columns
    pitch, width = tensor.shape[1] * kind.itemsize, (right - left) * kind.itemsize
    start = tensor.offset + first * pitch + left * kind.itemsize
    if width == pitch:
        found = np.fromfile(tensor.path, kind, (last - first) * (right - left), offset=start)
    else:
        with open(tensor.path, "rb", buffering=0) as file:
            runs = (os.pread(file.fileno(), width, start + row * pitch) for row in range(last - first))
            found = np.frombuffer(b"".join(runs), np.uint8)
        found = found[: len(found) // kind.itemsize * kind.itemsize].view(kind)
    if len(found) != (last - first) * (right - left):
        raise ExportError(f"{tensor.path} was truncated while it was being read")
    return found.reshape(last - first, right - left)
