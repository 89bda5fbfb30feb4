"""GGUF's number formats: the bytes of a row, and their conversion to floats.

Floats are read like those of every other source. Blocks of the types that flat files have too can be read unchanged.
The `gguf` package dequantizes blocks and decides which other types are supported, so a newer package adds newer types.
It is imported on use: a file of floats and of types that flat files have does not need it. Q8_K, which llama.cpp only
uses in memory, is dequantized here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llamac import _core
from llamac.errors import ExportError
from llamac.export.checkpoint import LazyTensor
from llamac.export.dtypes import BLOCK_DTYPES, DTYPES
from llamac.export.gguf import ternary
from llamac.export.stored import StoredTensor, contiguous_strides

Floats = NDArray[np.float32]
Blocks = NDArray[np.uint8]

FLOATS = {"F64": "f64", "F32": "f32", "F16": "f16", "BF16": "bf16"}
# GGUF's numbers of floats and integers, by name with their bytes, and of the types that flat files have, too.
FLOAT_NUMBERS = {0: ("F32", 4), 1: ("F16", 2), 28: ("F64", 8), 30: ("BF16", 2)}
INTEGER_NUMBERS = {26: ("I32", 4), 27: ("I64", 8)}
BLOCK_NUMBERS = {
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    20: "IQ4_NL",
    23: "IQ4_XS",
    39: "MXFP4",
}
# Numbers of removed and reserved types, which llama.cpp also rejects.
REMOVED = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
# Numbers that are dequantized at once: intermediate arrays stay in the L2 cache.
PIECE_NUMBERS = 1 << 16


@dataclass(frozen=True)
class NumberType:
    """A number format of GGUF.

    Attributes:
        name: GGUF's name.
        block: Numbers per block.
        bytes: Size of a block.
        tail: Bytes that follow the blocks of a tensor.
    """

    name: str
    block: int
    bytes: int
    tail: int = 0

    def row_bytes(self, columns: int) -> int:
        """The size of a row in bytes; `columns` is a multiple of `block`."""
        return columns // self.block * self.bytes


def number_type(number: int, *, is_bitnet: bool = False, of_integers: bool = False) -> NumberType:
    """Look up the number format with GGUF's number.

    Args:
        number: GGUF's number.
        is_bitnet: Whether the file is one of bitnet.cpp, which has a format of its own.
        of_integers: Whether the tensor can have integers.

    Raises:
        ExportError: If the format is unknown or cannot be read.
    """
    if of_integers and number in INTEGER_NUMBERS:
        integer_name, integer_bytes = INTEGER_NUMBERS[number]
        return NumberType(integer_name, 1, integer_bytes)
    if number in FLOAT_NUMBERS:
        float_name, float_bytes = FLOAT_NUMBERS[number]
        return NumberType(float_name, 1, float_bytes)
    if number in BLOCK_NUMBERS:
        return _block_type(BLOCK_NUMBERS[number])
    if is_bitnet and number == ternary.I2_S_NUMBER:
        return NumberType(ternary.I2_S, ternary.BLOCK, ternary.BLOCK_BYTES, ternary.TAIL_BYTES)
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(number)
        block, size = gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        name = REMOVED.get(number)
        what = f"{name}, which GGUF has removed" if name else f"{number}, which is unknown"
        raise ExportError(f"its type is {what}") from None
    if kind.name not in FLOATS and _unpacker(kind.name) is None:
        raise ExportError(f"its type is {kind.name}, which cannot be dequantized")
    return NumberType(kind.name, block, size)


def _block_type(name: str) -> NumberType:
    dtype = DTYPES[name.lower()]
    columns = next(columns for columns in (32, 256) if _core.gguf_row_bytes(dtype, columns))
    return NumberType(name, columns, _core.gguf_row_bytes(dtype, columns))


@dataclass(frozen=True)
class Packed:
    """Consecutive rows of quantized blocks in a file, from `offset` on. The caller has checked their bounds."""

    path: Path
    type: NumberType
    shape: tuple[int, ...]
    offset: int

    def lazy(self) -> LazyTensor:
        """Convert to a tensor of a checkpoint. The shape must have one or two dimensions."""
        dtype = self.type.name.lower()
        has_blocks = dtype in BLOCK_DTYPES and len(self.shape) == 2
        if self.type.name in ternary.BLOCKS_WITH_SCALES and len(self.shape) == 2 and self._has_row_scales():
            dtype = ternary.DTYPE
        return LazyTensor(self.shape, dtype, self.read, self.blocks if has_blocks else None)

    def _has_row_scales(self) -> bool:
        """Whether the scales of all blocks of a row are equal, in every row of a ternary matrix."""
        rows, columns = self.shape
        step = max(1, PIECE_NUMBERS // columns)
        pieces = (self.blocks(first, min(first + step, rows)) for first in range(0, rows, step))
        return all(ternary.have_one_scale(blocks, self.type.bytes) for blocks in pieces)

    def read(self, first: int, last: int) -> Floats:
        """Read rows [first, last) of a matrix, or elements of a vector, as float32."""
        if len(self.shape) == 1:
            return Packed(self.path, self.type, (1, *self.shape), self.offset).read(0, 1)[0, first:last]
        return unpack(self.type, self.blocks(first, last)).reshape(last - first, self.shape[1])

    def blocks(self, first: int, last: int) -> Blocks:
        """Read rows [first, last) of a matrix unchanged: (last - first, bytes of a row)."""
        size = self.type.row_bytes(self.shape[1])
        raw = np.fromfile(self.path, np.uint8, (last - first) * size, offset=self.offset + first * size)
        if len(raw) != (last - first) * size:
            raise ExportError(f"{self.path} was truncated while it was read")
        return raw.reshape(last - first, size)


def lazy_tensor(path: Path, kind: NumberType, shape: tuple[int, ...], offset: int) -> LazyTensor:
    """Describe a vector or matrix in a file, which is read on request."""
    if kind.name in FLOATS:
        return StoredTensor(path, FLOATS[kind.name], shape, contiguous_strides(shape), offset).lazy()
    if kind.name == ternary.I2_S:
        return ternary.PackedMatrix(path, (math.prod(shape[:-1]), shape[-1]), offset).lazy()
    return Packed(path, kind, shape, offset).lazy()


def unpack(kind: NumberType, raw: Blocks) -> Floats:
    """Dequantize whole blocks."""
    unpacker = _unpacker(kind.name)
    assert unpacker is not None
    blocks = raw.reshape(-1, kind.bytes)
    numbers = np.empty((len(blocks), kind.block), np.float32)
    step = PIECE_NUMBERS // kind.block
    # the caller reports NaN and infinity with the tensor's name
    with np.errstate(all="ignore"):
        for first in range(0, len(blocks), step):
            numbers[first : first + step] = unpacker(blocks[first : first + step])
    return numbers.reshape(-1)


@cache
def _unpacker(name: str) -> Callable[[Blocks], Floats] | None:
    """The function that dequantizes (n, bytes of a block) to (n, numbers of a block), or None."""
    if name == "Q8_K":
        return _q8_k
    import gguf

    kind = gguf.GGMLQuantizationType[name]

    def unpacked(blocks: Blocks) -> Floats:
        # as one row: the package processes 16 rows at a time, which would be only 16 blocks
        numbers: Floats = gguf.quants.dequantize(blocks.reshape(1, -1), kind)
        return numbers.reshape(len(blocks), -1)

    try:
        unpacked(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8))
    except NotImplementedError:
        return None
    return unpacked


def _q8_k(blocks: Blocks) -> Floats:
    """Blocks of a float32 scale, 256 int8 numbers, and sums of these that only dot products use."""
    scales = np.ascontiguousarray(blocks[:, :4]).view("<f4")
    numbers: Floats = scales * blocks[:, 4:260].view(np.int8).astype(np.float32)
    return numbers
