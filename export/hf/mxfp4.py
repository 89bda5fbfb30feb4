"""Reads matrices in MXFP4 as gpt-oss stores them: blocks of 32 codes of 4 bits, and a power of two per block.

OCP Microscaling Formats 1.0: a code is an FP4 E2M1 number, a scale is an E8M0 exponent. Every weight is exact in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from llamac.errors import ExportError
from llamac.export.checkpoint import LazyTensor
from llamac.export.stored import Floats, StoredTensor, read_bytes

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK_BYTES, BLOCK_COLUMNS = 16, 32
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CODES = np.array([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)
NOT_A_NUMBER = 255  # as an exponent


@dataclass(frozen=True)
class Mxfp4Tensor(StoredTensor):
    """A matrix in MXFP4. `shape` and `dtype` are those of the decoded numbers; `strides` and `offset` are the blocks'.

    Attributes:
        scales: The exponents, (rows, columns / 32).
    """

    is_by_rows: ClassVar[bool] = True
    scales: StoredTensor

    def rows(self, first: int, last: int) -> Mxfp4Tensor:
        return replace(
            self,
            shape=(last - first, *self.shape[1:]),
            offset=self.offset + first * self.strides[0],
            scales=_bytes_at(self.scales, first, (last - first, *self.scales.shape[1:])),
        )

    def every(self, step: int, first: int) -> Mxfp4Tensor:
        rows = self.rows(first, self.shape[0])
        n, scales = self.shape[0] // step, rows.scales
        return replace(
            rows,
            shape=(n, *self.shape[1:]),
            strides=(step * self.strides[0], *self.strides[1:]),
            scales=replace(
                scales, shape=(n, *scales.shape[1:]), strides=(step * scales.strides[0], *scales.strides[1:])
            ),
        )

    def lazy(self) -> LazyTensor:
        """As a checkpoint's tensor, with the blocks as GGUF has them."""
        return LazyTensor(self.shape, "mxfp4", self.read, self.gguf_blocks)

    def gguf_blocks(self, first: int, last: int) -> NDArray[np.uint8]:
        """Rows [first, last): blocks of the exponent and 16 bytes, which have the codes of columns j and j + 16."""
        codes, exponents = self._parts(first, last)
        low, high = codes[:, :, : BLOCK_COLUMNS // 2], codes[:, :, BLOCK_COLUMNS // 2 :]
        return np.concatenate((exponents[:, :, None], low | high << 4), axis=2).reshape(last - first, -1)

    def read(self, first: int, last: int) -> Floats:
        codes, exponents = self._parts(first, last)
        numbers = np.ldexp(CODES[codes], (exponents.astype(np.int32) - 127)[:, :, None])
        return numbers.reshape(last - first, -1).astype(np.float32, copy=False)

    def _parts(self, first: int, last: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """The codes, (rows, blocks, 32), and the exponents, (rows, blocks)."""
        blocks = read_bytes(self, first, last, self.shape[1] // 2)
        exponents = read_bytes(self.scales, first, last, self.shape[1] // BLOCK_COLUMNS)
        if (exponents == NOT_A_NUMBER).any():
            raise ExportError(f"{self.path} has MXFP4 scales that are not numbers: the file is damaged")
        codes = np.stack((blocks & 15, blocks >> 4), axis=-1)
        return codes.reshape(last - first, -1, BLOCK_COLUMNS), exponents


def expert_matrix(blocks: StoredTensor, scales: StoredTensor, expert: int) -> Mxfp4Tensor:
    """One expert's matrix (outputs, inputs) of blocks (experts, outputs, n, 16) and scales (experts, outputs, n)."""
    _, outputs, n, _ = blocks.shape
    start = _bytes_at(blocks, expert, (1,))
    return Mxfp4Tensor(
        blocks.path,
        "bf16",
        (outputs, n * BLOCK_COLUMNS),
        (n * BLOCK_BYTES, 0),
        start.offset,
        replace(_bytes_at(scales, expert, (outputs, n)), strides=(n, 1)),
    )


def are_pair(blocks: StoredTensor, scales: StoredTensor | None) -> bool:
    """Whether the tensors are the blocks and the scales of all experts."""
    return (
        scales is not None
        and (blocks.dtype, scales.dtype) == ("u8", "u8")
        and len(blocks.shape) == 4
        and blocks.shape[3] == BLOCK_BYTES
        and scales.shape == blocks.shape[:3]
        and 0 not in blocks.shape
    )


def _bytes_at(tensor: StoredTensor, index: int, shape: tuple[int, ...]) -> StoredTensor:
    """A tensor of bytes that starts at `index` of the first dimension."""
    return replace(tensor, shape=shape, offset=tensor.offset + index * tensor.strides[0])
