"""Packs tensors into float strips and unpacks all strips with NumPy, as docs/format.md specifies them and without the C
core."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16]

FLOATS = ("f32", "f16", "bf16")
QUANTIZED = ("q8", "q6", "q4", "q4s", "q3", "q2", "t2")  # by llamac's quantizer
STRIP_ROWS = 16
LINE_BYTES = 64
BLOCK_COLUMNS = 128  # columns whose scales and codes are stored together
GROUP_COLUMNS = 32  # a matrix is padded to a multiple of this
CODEBOOK = (-32, -23, -18, -14, -11, -8, -5, -2, 0, 3, 6, 9, 12, 16, 21, 26)  # of 4-bit codes
CODEBOOKS = {"q4": CODEBOOK, "q4s": CODEBOOK, "q3": (-19, -13, -8, -4, -1, 2, 6, 10), "q2": (-12, -5, -1, 4)}
CODEBOOKS["t2"] = (-2, -1, 0, 1)  # plus the grid of the scale 1, which is not stored
# The smallest magnitude that each dtype cannot hold; 16-bit floats would round it to infinity.
BF16_OVERFLOW = float.fromhex("0x1.ffp127")
OVERFLOW = {"f16": 65520.0, "bf16": BF16_OVERFLOW} | dict.fromkeys(QUANTIZED, 2.0**120)
CODE_BITS = {"q8": 8, "q6": 6, "q4": 4, "q4s": 4, "q3": 3, "q2": 2, "t2": 2}
OFFSETS = {"q8": 128, "q6": 32}  # a code of these is stored plus this
IQ4_CODEBOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4_CODEBOOK = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


class Layout(NamedTuple):
    """How strips store a type of GGUF.

    Attributes:
        bits: The bits of a code.
        offset: Subtracted from codes that have no codebook.
        codebook: The values that codes stand for, if they are not linear.
        has_minimums: Whether spans have a minimum besides their scale.
        scales: NumPy's type of the scales and minimums; "e8m0" is a byte e that stands for 2^(e - 128).
        has_super_scales: Whether an f16 scales the scales of 256 columns, and another one their minimums.
        scale_columns: Columns of a span, which share a scale.
    """

    bits: int
    offset: int = 0
    codebook: tuple[int, ...] = ()
    has_minimums: bool = False
    scales: str = "f2"
    has_super_scales: bool = False
    scale_columns: int = GROUP_COLUMNS

    @property
    def values(self) -> tuple[int, ...]:
        """What each code stands for."""
        return self.codebook or tuple(code - self.offset for code in range(1 << self.bits))

    @property
    def block_columns(self) -> int:
        """Columns whose scales and codes are stored together."""
        return 256 if self.has_super_scales else BLOCK_COLUMNS


LAYOUTS = {
    "q4_0": Layout(4, offset=8),
    "q4_1": Layout(4, has_minimums=True),
    "q5_0": Layout(5, offset=16),
    "q5_1": Layout(5, has_minimums=True),
    "q8_0": Layout(8, offset=128),
    "q4_k": Layout(4, has_minimums=True, scales="i1", has_super_scales=True),
    "q5_k": Layout(5, has_minimums=True, scales="i1", has_super_scales=True),
    "q6_k": Layout(6, offset=32, scales="i1", has_super_scales=True, scale_columns=16),
    "iq4_nl": Layout(4, codebook=IQ4_CODEBOOK),
    "iq4_xs": Layout(4, codebook=IQ4_CODEBOOK, scales="i1", has_super_scales=True),
    "mxfp4": Layout(4, codebook=FP4_CODEBOOK, scales="e8m0"),
}


def to_dtype(numbers: NDArray[np.float32], dtype: str) -> Numbers:
    """Round to the nearest f16 or bf16, ties to even; bf16 as its 16 bits. f32 is returned unchanged."""
    import numpy as np

    if dtype == "f32":
        return numbers
    if dtype == "f16":
        with np.errstate(over="ignore"):  # callers refuse overflow
            return numbers.astype(np.float16)
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def pack_strips(rows: NDArray[np.float32], dtype: str) -> bytes:
    """Pack rows (n, columns) of a matrix into float strips of 16 rows, padded with zeros."""
    import numpy as np

    n, columns = rows.shape
    strips = -(-n // STRIP_ROWS)
    numbers = to_dtype(rows, dtype)  # first: narrower numbers transpose faster
    padded_columns = columns if dtype == "f32" else columns + columns % 2
    padded = np.zeros((strips * STRIP_ROWS, padded_columns), numbers.dtype)
    padded[:n, :columns] = numbers
    return np.ascontiguousarray(padded.reshape(strips, STRIP_ROWS, padded_columns).transpose(0, 2, 1)).tobytes()


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
    if dtype in LAYOUTS:
        return _unpack_blocks(data, LAYOUTS[dtype], rows, columns)
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
    return 16 if dtype in ("q4", "q3", "q2") else 32


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
    bits = CODE_BITS[dtype]
    block_scales, codes, at = [], [], LINE_BYTES
    for first in range(0, columns, BLOCK_COLUMNS):
        groups = min(BLOCK_COLUMNS // GROUP_COLUMNS, -(-(columns - first) // GROUP_COLUMNS))
        n_scales = groups * GROUP_COLUMNS // width
        if dtype == "t2":
            block_scales.append(np.ones((len(strips), STRIP_ROWS, n_scales), np.int8))
        else:
            scales = strips[:, at : at + n_scales * STRIP_ROWS].view(np.int8).reshape(-1, n_scales, STRIP_ROWS)
            block_scales.append(scales.transpose(0, 2, 1))
            at += -(-n_scales * STRIP_ROWS // LINE_BYTES) * LINE_BYTES
        size = groups * GROUP_COLUMNS * STRIP_ROWS * bits // 8
        stored = _codes(strips[:, at : at + size], bits)
        at += size
        if dtype in OFFSETS:
            codes.append(stored.astype(np.int16) - OFFSETS[dtype])
        else:
            offsets = np.repeat(block_scales[-1] & 3, width, axis=2)
            codes.append(np.array(CODEBOOKS[dtype], np.int16)[stored] + offsets)
    return (
        row_scales,
        np.concatenate(block_scales, axis=2).reshape(len(strips) * STRIP_ROWS, -1)[:rows],
        np.concatenate(codes, axis=2).reshape(len(strips) * STRIP_ROWS, -1)[:rows, :columns],
    )


def _unpack_blocks(data: bytes, layout: Layout, rows: int, columns: int) -> NDArray[np.float32]:
    """Unpack a matrix of a GGUF type: scale * code + minimum in float32, which rounds at most once."""
    import numpy as np

    strips = np.frombuffer(data, np.uint8).reshape(-(-rows // STRIP_ROWS), -1)
    spans_per_group = GROUP_COLUMNS // layout.scale_columns
    parts, at = [], 0
    for first in range(0, columns, layout.block_columns):
        groups = -(-min(layout.block_columns, columns - first) // GROUP_COLUMNS)
        spans, start = groups * spans_per_group, at
        pieces = []
        kinds = [("f2", 1)] * (1 + layout.has_minimums) if layout.has_super_scales else []
        for kind, count in kinds + [(layout.scales, spans)] * (1 + layout.has_minimums):
            size = count * STRIP_ROWS * (2 if kind == "f2" else 1)
            pieces.append(_scales(strips[:, at : at + size], kind))
            at += size
        at = start - (start - at) // LINE_BYTES * LINE_BYTES  # whole lines
        size = groups * layout.bits * LINE_BYTES
        codes = np.array(layout.values, np.float32)[_codes(strips[:, at : at + size], layout.bits)]
        at += size
        if layout.has_super_scales:
            half = len(pieces) // 2
            pieces = [by * scales for by, scales in zip(pieces[:half], pieces[half:], strict=True)]
            pieces[1:] = [-minimums for minimums in pieces[1:]]
        scale, *minimums = (np.repeat(piece, layout.scale_columns, axis=2) for piece in pieces)
        parts.append(scale * codes + minimums[0] if minimums else scale * codes)
    weights: NDArray[np.float32] = np.concatenate(parts, axis=2).reshape(-1, sum(part.shape[2] for part in parts))
    return weights[:rows, :columns]


def _scales(stored: NDArray[np.uint8], kind: str) -> NDArray[np.float32]:
    """Scales or minimums of a block: (strips, 16 rows, spans)."""
    import numpy as np

    numbers = np.ascontiguousarray(stored).view("u1" if kind == "e8m0" else f"<{kind}")
    numbers = numbers.reshape(len(stored), -1, STRIP_ROWS).transpose(0, 2, 1)
    if kind == "e8m0":
        powers: NDArray[np.float32] = np.ldexp(np.float32(1), numbers.astype(np.int32) - 128)
        return powers
    return np.asarray(numbers, np.float32)


def _codes(stored: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """The codes of a block as stored: (strips, 16 rows, columns)."""
    import numpy as np

    shape = (len(stored), STRIP_ROWS, -1)
    lines = stored.reshape(len(stored), -1, bits, STRIP_ROWS, 4)  # strip, group, line, row, byte
    codes: NDArray[np.uint8]
    if bits == 8:
        codes = lines.transpose(0, 3, 1, 2, 4).reshape(shape)
    elif bits < 4:
        # strip, group, line, row, byte, (high nibble, column / 8 % 2)
        low = lines[:, :, :2, :, :, None, None] >> np.array([[0, 2], [4, 6]], np.uint8) & np.uint8(3)
        codes = low.transpose(0, 3, 1, 2, 6, 5, 4).reshape(shape)
        if bits == 3:  # strip, group, row, byte, (high nibble, column / 8)
            third = lines[:, :, 2, :, :, None, None] >> np.array([[0, 1, 2, 3], [4, 5, 6, 7]], np.uint8) & np.uint8(1)
            codes = codes | third.transpose(0, 2, 1, 5, 4, 3).reshape(shape) << 2
    else:
        low = lines[:, :, :4]
        codes = np.stack((low & 15, low >> 4), axis=3).transpose(0, 4, 1, 2, 3, 5).reshape(shape)
    if bits in (5, 6):
        width = bits - 4
        shifts = np.arange(0, 8, width, dtype=np.uint8)
        high = lines[:, :, 4:, ..., None] >> shifts & np.uint8((1 << width) - 1)  # strip, group, line, row, byte, bits
        codes = codes | high.transpose(0, 3, 1, 2, 5, 4).reshape(shape) << 4
    return codes
