"""Ternary matrices of GGUF files, which flat files hold exactly as t2: I2_S, TQ1_0 and TQ2_0.

I2_S is a type of bitnet.cpp, not of llama.cpp. 32 bytes have 128 numbers of a row: bits 6 - 2 g and 7 - 2 g of byte i
are number 32 g + i, plus 1. The scale of the whole matrix, a float32, follows the numbers, with 28 bytes of padding. A
TQ block has 256 numbers and, in its last two bytes, a float16 scale of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llamac.errors import ExportError
from llamac.export.checkpoint import LazyTensor

Floats = NDArray[np.float32]

I2_S, I2_S_NUMBER = "I2_S", 36
BLOCK, BLOCK_BYTES, TAIL_BYTES = 128, 32, 32
BLOCKS_WITH_SCALES = ("TQ1_0", "TQ2_0")
TERNARY = (I2_S, *BLOCKS_WITH_SCALES)
DTYPE = "t2"


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix in I2_S from `offset` on. The caller has checked its bounds."""

    path: Path
    shape: tuple[int, int]
    offset: int

    def lazy(self) -> LazyTensor:
        return LazyTensor(self.shape, DTYPE, self.read)

    def read(self, first: int, last: int) -> Floats:
        rows, columns = self.shape
        width = columns // BLOCK * BLOCK_BYTES
        packed = self._bytes(first * width, (last - first) * width).reshape(-1, 1, BLOCK_BYTES)
        codes = packed >> np.array([6, 4, 2, 0], np.uint8)[:, None] & 3
        scale = self._bytes(rows * width, 4).view("<f4")[0]
        if (codes == 3).any() or not np.isfinite(scale):
            raise ExportError(f"{self.path} has an {I2_S} matrix that is not ternary: the file is damaged")
        numbers: Floats = (codes.reshape(last - first, columns).astype(np.float32) - 1) * np.float32(scale)
        return numbers

    def _bytes(self, start: int, count: int) -> NDArray[np.uint8]:
        found = np.fromfile(self.path, np.uint8, count, offset=self.offset + start)
        if len(found) != count:
            raise ExportError(f"{self.path} was truncated while it was read")
        return found


def have_one_scale(blocks: NDArray[np.uint8], block_bytes: int) -> bool:
    """Whether all blocks of each row have the same scale, or 0. blocks: (rows, bytes of a row) of a TQ type."""
    ends = blocks.reshape(len(blocks), -1, block_bytes)[:, :, -2:]
    scales = np.ascontiguousarray(ends).view("<f2")[:, :, 0].astype(np.float32)
    top = scales.max(axis=1, keepdims=True)
    return bool(np.isfinite(scales).all() and ((scales == top) | (scales == 0)).all() and (top >= 0).all())
