"""GGUF's blocks in strips and back: the same bits, for every type."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from gguf_blocks import SCALES, Blocks, block_of, dequantized, random_blocks

from llamac import _core
from llamac.errors import ArgumentError
from llamac.export.dtypes import BLOCK_DTYPES, DTYPES
from llamac.format.strips import LAYOUTS, unpack_tensor

NOT_FINITE = (0x7C00, 0xFC00, 0x7E00)


def regroup(dtype: str, blocks: Blocks, columns: int) -> tuple[Blocks, bool]:
    number = DTYPES[dtype]
    strips = np.full(_core.matrix_bytes(number, len(blocks), columns), 0xAA, np.uint8)
    return strips, _core.regroup(number, blocks.data, columns, strips.data)


def ungroup(dtype: str, strips: Blocks, rows: int, columns: int) -> Blocks:
    blocks = np.full((rows, _core.gguf_row_bytes(DTYPES[dtype], columns)), 0xAA, np.uint8)
    _core.ungroup(DTYPES[dtype], strips.data, columns, blocks.data)
    return blocks


def widths(dtype: str) -> tuple[int, ...]:
    """Columns: one block of GGUF, whole blocks of a strip, and a last block that is not whole."""
    return (256, 768) if block_of(dtype)[0] == 256 else (32, 96, 128, 160, 416)


SIZES = [(dtype, rows, columns) for dtype in BLOCK_DTYPES for rows, columns in product((1, 16, 19, 40), widths(dtype))]


def test_the_dtypes_are_those_of_the_gguf_package() -> None:
    assert len(BLOCK_DTYPES) == 11
    assert tuple(LAYOUTS) == BLOCK_DTYPES
    for dtype in BLOCK_DTYPES:
        columns, size = block_of(dtype)
        assert _core.gguf_row_bytes(DTYPES[dtype], 3 * columns) == 3 * size
        assert _core.gguf_row_bytes(DTYPES[dtype], 3 * columns + 8) == 0
    assert [_core.gguf_row_bytes(DTYPES[dtype], 256) for dtype in ("f32", "bf16", "q8", "q4", "q4s")] == [0] * 5
    assert _core.gguf_row_bytes(99, 256) == _core.gguf_row_bytes(-1, 256) == 0


@pytest.mark.parametrize(("dtype", "rows", "columns"), SIZES)
def test_every_bit_comes_back(dtype: str, rows: int, columns: int) -> None:
    blocks = random_blocks(dtype, rows, columns, seed=rows)
    strips, _ = regroup(dtype, blocks, columns)
    assert np.array_equal(ungroup(dtype, strips, rows, columns), blocks)


@pytest.mark.parametrize(("dtype", "rows", "columns"), SIZES)
def test_the_numbers_are_those_of_the_gguf_package(dtype: str, rows: int, columns: int) -> None:
    blocks = random_blocks(dtype, rows, columns, seed=columns)
    strips, finite = regroup(dtype, blocks, columns)
    assert finite
    assert np.array_equal(unpack_tensor(strips.tobytes(), dtype, (rows, columns)), dequantized(blocks, dtype))


@pytest.mark.parametrize("dtype", BLOCK_DTYPES)
def test_no_bit_of_a_block_is_ignored(dtype: str) -> None:
    """Each row is the same block with one bit flipped, whatever the numbers then are."""
    columns, size = block_of(dtype)
    flipped = np.tile(random_blocks(dtype, 1, columns), (8 * size, 1))
    flipped ^= np.packbits(np.eye(8 * size, dtype=np.uint8), axis=1)
    strips, _ = regroup(dtype, flipped, columns)
    assert np.array_equal(ungroup(dtype, strips, 8 * size, columns), flipped)


@pytest.mark.parametrize("dtype", BLOCK_DTYPES)
def test_padding_is_zero(dtype: str) -> None:
    """Bytes that do not change when all bits of the only row change belong to padding."""
    columns = widths(dtype)[-1]
    blocks = random_blocks(dtype, 1, columns)
    strips, _ = regroup(dtype, blocks, columns)
    other, _ = regroup(dtype, ~blocks, columns)
    is_padding = strips == other
    assert is_padding.sum() > len(strips) * 14 // 16
    assert not strips[is_padding].any()


@pytest.mark.parametrize("dtype", BLOCK_DTYPES)
def test_parts_of_a_matrix_can_be_regrouped_separately_from_any_address(dtype: str) -> None:
    columns = widths(dtype)[-1]
    blocks = random_blocks(dtype, 40, columns)
    whole, _ = regroup(dtype, blocks, columns)
    parts = []
    for first, last in ((0, 16), (16, 32), (32, 40)):
        space = np.empty(blocks[first:last].size + 1, np.uint8)
        space[1:] = blocks[first:last].reshape(-1)
        parts.append(regroup(dtype, space[1:].reshape(last - first, -1), columns)[0])
    assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("dtype", BLOCK_DTYPES)
def test_scales_that_are_not_finite_are_reported(dtype: str) -> None:
    width, size = block_of(dtype)
    good = random_blocks(dtype, 18, 2 * width).reshape(18, 2, size)
    for offset, row in product(SCALES.get(dtype, (0,)), (0, 17)):
        for bits in NOT_FINITE:
            bad = good.copy()
            bad[row, 1, offset : offset + 2] = np.frombuffer(np.uint16(bits).tobytes(), np.uint8)
            if dtype == "mxfp4":
                bad[row, 1, 0] = bits >> 8 | 0xFD
            assert not regroup(dtype, bad.reshape(18, -1), 2 * width)[1]


def test_sizes_that_do_not_fit_are_errors() -> None:
    blocks = random_blocks("q4_0", 16, 64)
    strips, number = np.zeros(_core.matrix_bytes(DTYPES["q4_0"], 16, 64), np.uint8), DTYPES["q4_0"]

    def regroup_them(found: Blocks, columns: int, out: Blocks) -> object:
        return _core.regroup(number, found.data, columns, out.data)

    def restore_them(found: Blocks, columns: int, out: Blocks) -> None:
        _core.ungroup(number, out.data, columns, found.data)

    for call in (regroup_them, restore_them):
        with pytest.raises(ArgumentError, match="the blocks have 560 bytes, expected 16 rows of 36"):
            call(np.ascontiguousarray(blocks[:, :35]), 64, strips)
        with pytest.raises(ArgumentError, match=r"columns is 65, expected a GGUF dtype .* and whole blocks"):
            call(blocks, 65, strips)
        with pytest.raises(ArgumentError, match="the strips have 575 bytes, expected 576"):
            call(blocks, 64, strips[1:])
        with pytest.raises(ArgumentError, match="no rows"):
            call(blocks[:0], 64, strips)
    with pytest.raises(ArgumentError, match="dtype is 4 and columns is 64"):
        _core.regroup(4, blocks.data, 64, strips.data)
