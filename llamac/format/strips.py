"""Unpacks stored tensors with NumPy, as docs/format.md specifies them and without the C core."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FLOATS = ("f32", "f16", "bf16")
QUANTIZED = ("q8", "q4", "q4s")
STRIP_ROWS = 16
LINE_BYTES = 64
BLOCK_COLUMNS = 128  # columns whose scales and codes are stored together
GROUP_COLUMNS = 32  # a matrix is padded to a multiple of this
CODEBOOK = (-32, -23, -18, -14, -11, -8, -5, -2, 0, 3, 6, 9, 12, 16, 21, 26)  # of 4-bit codes
Q8_OFFSET = 128  # a q8 code is stored plus this


def unpack_tensor(data: bytes, dtype: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Unpack a stored tensor.

    Args:
        data: Its bytes. A matrix is stored in strips, a vector as plain float32.
        dtype: Its number format.
        shape: Its dimensions, (n,) or (rows, columns).

    Returns:
        The numbers in this shape, float32.
    """
    import numpy as np

    if len(shape) == 1:
        vector: NDArray[np.float32] = np.frombuffer(data, np.float32).copy()
        return vector
    rows, columns = shape
    if dtype in QUANTIZED:
        row_scales, block_scales, codes = unpack_quantized(data, dtype, shape)
        integers = np.repeat(block_scales, scale_columns(dtype), axis=1)[:, :columns].astype(np.int16) * codes
        weights: NDArray[np.float32] = integers.astype(np.float32) * row_scales[:, None]
        return weights
    numbers = np.frombuffer(data, {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[dtype])
    if dtype == "bf16":
        numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
    strips = numbers.reshape(-(-rows // STRIP_ROWS), -1, STRIP_ROWS)  # (strip, column, row)
    matrix = strips.transpose(0, 2, 1).reshape(-1, strips.shape[1])[:rows, :columns]
    result: NDArray[np.float32] = np.ascontiguousarray(matrix, np.float32)
    return result


def scale_columns(dtype: str) -> int:
    """The number of columns that share a block scale in a quantized dtype."""
    return 16 if dtype == "q4" else 32


def unpack_quantized(
    data: bytes, dtype: str, shape: tuple[int, ...]
) -> tuple[NDArray[np.float32], NDArray[np.int8], NDArray[np.int16]]:
    """Unpack a quantized matrix. A weight is the product of its row scale, its block scale and its code.

    Args:
        data: The stored bytes.
        dtype: The number format, one of `QUANTIZED`.
        shape: (rows, columns).

    Returns:
        The row scales, shape (rows,); the block scales, shape (rows, blocks); the codes, shape (rows, columns).
    """
    import numpy as np

    rows, columns = shape
    strips = np.frombuffer(data, np.uint8).reshape(-(-rows // STRIP_ROWS), -1)
    row_scales = strips[:, :LINE_BYTES].copy().view(np.float32).reshape(-1)[:rows]
    width = scale_columns(dtype)
    bits = 8 if dtype == "q8" else 4
    block_scales, codes, at = [], [], LINE_BYTES
    for first in range(0, columns, BLOCK_COLUMNS):
        groups = min(BLOCK_COLUMNS // GROUP_COLUMNS, -(-(columns - first) // GROUP_COLUMNS))
        n_scales = groups * GROUP_COLUMNS // width
        scales = strips[:, at : at + n_scales * STRIP_ROWS].view(np.int8).reshape(-1, n_scales, STRIP_ROWS)
        block_scales.append(scales.transpose(0, 2, 1))
        at += -(-n_scales * STRIP_ROWS // LINE_BYTES) * LINE_BYTES
        size = groups * GROUP_COLUMNS * STRIP_ROWS * bits // 8
        lines = strips[:, at : at + size].reshape(len(strips), -1, STRIP_ROWS, 4).transpose(0, 2, 1, 3)
        at += size
        if dtype == "q8":
            codes.append(lines.reshape(len(strips), STRIP_ROWS, -1).astype(np.int16) - Q8_OFFSET)
        else:
            nibbles = np.stack((lines & 15, lines >> 4), axis=3).reshape(len(strips), STRIP_ROWS, -1)
            offsets = np.repeat(block_scales[-1] & 3, width, axis=2)
            codes.append(np.array(CODEBOOK, np.int16)[nibbles] + offsets)
    return (
        row_scales,
        np.concatenate(block_scales, axis=2).reshape(len(strips) * STRIP_ROWS, -1)[:rows],
        np.concatenate(codes, axis=2).reshape(len(strips) * STRIP_ROWS, -1)[:rows, :columns],
    )
