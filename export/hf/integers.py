"""Matrices of small integers with a factor and a zero for each group of columns in a row, of GPTQ and other formats.

A number is (integer - zero) x factor, in float32. The difference has few bits: in whole blocks of 32 columns of one
group, GGUF's Q4_0, Q5_0 or Q8_0 hold the same numbers, if float16 holds the factors. Such matrices carry these blocks,
so that exports need not round them again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from llamac.errors import ExportError
from llamac.export.checkpoint import LazyTensor
from llamac.export.hf.words import Words
from llamac.export.stored import Floats, StoredTensor, as_float32, integers
from llamac.format.strips import to_dtype

BLOCK_COLUMNS = 32
# GGUF's blocks that hold differences of codes and zeros: the smallest and the largest difference, in this order.
BLOCKS = {"q4_0": (-8, 7), "q5_0": (-16, 15), "q8_0": (-128, 127)}
SCAN_NUMBERS = 1 << 20  # of factors or zeros that are in memory at once while a dtype is chosen


@dataclass(frozen=True)
class IntegerTensor(StoredTensor):
    """Rows of a matrix of integers. `shape` and `dtype` (f32) are those of the numbers; `strides` are not used.

    Attributes:
        name: The tensor of factors, for errors.
        codes: The integers of the whole matrix.
        zeros: The zero of each group, (rows, groups), or one of all.
        scales: The factor of each group, (rows, groups).
        width: The columns of a group; the last one can be smaller.
        group_of: The group of each column instead, a vector of integers.
        first: The first row.
        rounds_to: The dtype that `read` rounds to. Blocks hold the numbers before.
    """

    is_by_rows: ClassVar[bool] = True
    name: str
    codes: Words
    zeros: Words | int
    scales: StoredTensor
    width: int
    group_of: StoredTensor | None = None
    first: int = 0
    rounds_to: str = "f32"

    def rows(self, first: int, last: int) -> IntegerTensor:
        return replace(self, shape=(last - first, *self.shape[1:]), first=self.first + first)

    def lazy(self) -> LazyTensor:
        """As a checkpoint's tensor. It has GGUF's blocks if they hold its numbers; this reads all factors and zeros."""
        if (kept := self._block_dtype()) is None:
            return LazyTensor(self.shape, f"u{self.codes.bits}", self.read)
        return LazyTensor(self.shape, kept, self.read, lambda first, last: self._blocks(kept, first, last))

    def read(self, first: int, last: int) -> Floats:
        if first == last:
            return np.zeros((0, self.shape[1]), np.float32)
        groups = self._groups()
        found: Floats = self._differences(first, last, groups).astype(np.float32)
        with np.errstate(over="ignore"):  # `LazyTensor.finite` reports infinities with the tensor's name
            found *= self._factors(first, last).take(groups, axis=1)
        return as_float32(to_dtype(found, self.rounds_to), self.rounds_to)

    def _groups(self) -> NDArray[np.int64]:
        """The group of each column."""
        if self.group_of is None:
            return np.arange(self.shape[1]) // self.width
        groups, n = integers(self.group_of), self.scales.shape[1]
        if groups.min() < 0 or groups.max() >= n:
            raise ExportError(
                f"{self.path}: a column of {self.name} belongs to group "
                f"{int(groups[(groups < 0) | (groups >= n)][0])}, expected 0 to {n - 1}: the file is damaged"
            )
        return groups

    def _differences(self, first: int, last: int, groups: NDArray[np.int64]) -> NDArray[np.int16]:
        """Integers minus zeros."""
        codes = self.codes.read(self.first + first, self.first + last).astype(np.int16)
        if isinstance(self.zeros, int):
            codes -= np.int16(self.zeros)
        else:
            codes -= self._zeros(self.zeros, first, last).take(groups, axis=1)
        return codes

    def _zeros(self, zeros: Words, first: int, last: int) -> NDArray[np.int16]:
        return zeros.read(self.first + first, self.first + last).astype(np.int16)

    def _factors(self, first: int, last: int) -> Floats:
        """The factors. Some quantizers choose negative ones, and a factor of small numbers can be 0."""
        factors = self.scales.read(self.first + first, self.first + last)
        if not np.isfinite(factors).all():
            wrong = factors[~np.isfinite(factors)][0]
            raise ExportError(
                f"{self.path}: {self.name} has the factor {wrong:g}, expected finite numbers: the file is damaged"
            )
        return factors

    # ---- GGUF's blocks

    def _block_dtype(self) -> str | None:
        """GGUF's type that holds the numbers, if there is one."""
        if self.shape[1] % BLOCK_COLUMNS or self.shape[0] == 0:
            return None
        by_block = self._groups().reshape(-1, BLOCK_COLUMNS)
        if (by_block != by_block[:, :1]).any():
            return None
        low, high, step = 0, (1 << self.codes.bits) - 1, max(1, SCAN_NUMBERS // self.scales.shape[1])
        spans = [(first, min(first + step, self.shape[0])) for first in range(0, self.shape[0], step)]
        if isinstance(self.zeros, int):
            least = most = self.zeros
        else:
            zeros = self.zeros
            ends = [(found.min(), found.max()) for found in (self._zeros(zeros, *span) for span in spans)]
            least, most = int(min(end[0] for end in ends)), int(max(end[1] for end in ends))
        if self.scales.dtype != "f16" and not all(_are_halves(self._factors(*span)) for span in spans):
            return None
        fits = (name for name, (lowest, highest) in BLOCKS.items() if lowest <= low - most and high - least <= highest)
        return next(fits, None)

    def _blocks(self, dtype: str, first: int, last: int) -> NDArray[np.uint8]:
        """Rows [first, last) in GGUF's blocks: the factor in float16, then the differences, from the lowest one on."""
        groups, n = self._groups(), last - first
        codes = self._differences(first, last, groups).reshape(n, -1, BLOCK_COLUMNS)
        halves = self._factors(first, last).astype(np.float16).take(groups[::BLOCK_COLUMNS], axis=1)
        parts = [np.ascontiguousarray(halves).view(np.uint8).reshape(n, -1, 2)]
        if dtype == "q8_0":
            return np.concatenate((*parts, codes.astype(np.int8).view(np.uint8)), axis=2).reshape(n, -1)
        codes = (codes - np.int16(BLOCKS[dtype][0])).astype(np.uint8)
        if dtype == "q5_0":  # the highest bit of each column
            parts.append(np.packbits(codes >> 4, axis=2, bitorder="little"))
        low, high = codes[:, :, : BLOCK_COLUMNS // 2] & 15, codes[:, :, BLOCK_COLUMNS // 2 :] & 15
        return np.concatenate((*parts, low | high << 4), axis=2).reshape(n, -1)


def _are_halves(numbers: Floats) -> bool:
    """Whether float16 holds all numbers exactly."""
    with np.errstate(over="ignore"):
        return bool((numbers.astype(np.float16).astype(np.float32) == numbers).all())
