"""The quantizer's kernels: every instruction set gives the bytes of a slow oracle in NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from llamac import _core
from llamac.errors import ArgumentError
from llamac.export.dtypes import DTYPES
from llamac.format.strips import CODEBOOKS, QUANTIZED, scale_columns, unpack_quantized

Floats = NDArray[np.float32]
F = np.float32  # one number

ISAS = [name for name, supported in _core.isas() if supported]
BOOKS = {dtype: np.array(codes) for dtype, codes in CODEBOOKS.items()}
CLIPS = {"q4": F(1.12), "q4s": F(1.12), "q3": F(1.4), "q2": F(1.9)}  # without importance
INFINITY = F(np.inf)
MODES = [(dtype, mode) for dtype in QUANTIZED if dtype != "t2" for mode in ("plain", "importance", "feedback")]
LINEAR = {"q8": (-127, 127), "q6": (-32, 31)}  # the lowest and highest codes of dtypes without a codebook
MODES = [(dtype, mode) for dtype, mode in MODES if mode != "feedback" or dtype not in LINEAR]  # the core refuses it


def normal(*shape: int, seed: int = 0) -> Floats:
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float32)


def quantize(
    isa: str, dtype: str, rows: Floats, importance: Floats | None = None, feedback: Floats | None = None
) -> bytes:
    out = np.empty(_core.matrix_bytes(DTYPES[dtype], *rows.shape), np.uint8)
    weight, shares = (None if numbers is None else numbers.data for numbers in (importance, feedback))
    _core.quantize(DTYPES[dtype], rows.data, out.data, weight, shares, isa)
    return out.tobytes()


# ---- an oracle: one row at a time, one operation at a time, in float32


@dataclass
class Block:
    """The columns of a row that share a scale: targets, original values, weights, and the feedback between them."""

    x: Floats
    original: Floats
    weight: Floats
    feedback: Floats | None
    book: NDArray[np.int64]


def nearest(book: NDArray[np.int64], x: Floats, scale: int) -> NDArray[np.int64]:
    """The nearest code numbers: a code begins at its midpoint with the previous one."""
    positions = x * (F(2) / F(scale)) + F(80)
    starts = book[:-1] + book[1:] + 80 + 2 * (scale & 3)
    found: NDArray[np.int64] = np.searchsorted(starts.astype(np.float32), positions, side="right")
    return found


def tree_sum(terms: Floats) -> np.float32:
    """The sum of 16 numbers: the upper half is added to the lower half, four times."""
    while len(terms) > 1:
        half = len(terms) // 2
        terms = terms[:half] + terms[half:]
    found: np.float32 = terms[0]
    return found


def search_error(block: Block, scale: int, width: int) -> F:
    x, weight = np.zeros(width, np.float32), np.zeros(width, np.float32)
    x[: len(block.x)], weight[: len(block.x)] = block.x, block.weight
    codes = (block.book[nearest(block.book, x, scale)] + (scale & 3)).astype(np.float32)
    difference = x - F(scale) * codes
    terms = weight * (difference * difference)
    return tree_sum(terms) if width == 16 else tree_sum(terms[:16]) + tree_sum(terms[16:])


def assign(block: Block, scale: int) -> tuple[NDArray[np.int64], Floats, F]:
    """(code numbers, values, weighted squared error) of a scale; with feedback, errors are compensated to the right."""
    target, error = block.x.copy(), F(0)
    found, values = np.zeros(len(target), np.int64), np.zeros(len(target), np.float32)
    for i in range(len(target)):
        found[i] = nearest(block.book, target[i : i + 1], scale)[0]
        values[i] = F(scale) * F(block.book[found[i]] + (scale & 3))
        difference = target[i] - values[i]
        error = error + block.weight[i] * (difference * difference)
        if block.feedback is not None:
            target[i + 1 :] += (block.original[i] - values[i]) * block.feedback[i, i + 1 :]
    return found, values, error


def fit(block: Block, width: int, clip: F) -> tuple[int, NDArray[np.int64], Floats]:
    """(scale, code numbers, values) of a block of codes with grids."""
    zeros = np.zeros(len(block.x), np.int64), np.zeros(len(block.x), np.float32)
    peak = np.abs(block.x).max()
    if peak == 0:
        return 0, *zeros
    first_sign = -1 if block.x[np.abs(block.x).argmax()] < 0 else 1
    zero_error = F(0)
    for weight, x in zip(block.weight, block.x, strict=True):
        zero_error = zero_error + weight * (x * x)
    tried = [(zero_error, 0, 0)]
    for offset in range(4):
        for side in (-1, 1):
            sign = first_sign * side
            end = F(-block.book[0] - offset if side < 0 else block.book[-1] + offset)
            low, high = peak / (clip * end), peak / (F(0.64) * end)
            size = int(low) if low < 127 else 124
            size += (sign * offset - size) % 4
            for each in range(size, 128, 4):
                if each and (F(each) <= high or each < 4):
                    tried.append((search_error(block, sign * each, width), len(tried), sign * each))
    if block.feedback is None:
        best = min(tried)[2]
    else:
        errors = [(assign(block, s)[2] if s else zero_error, i, s) for i, (_, _, s) in enumerate(sorted(tried)[:6])]
        best = min(errors)[2]
    return (best, *assign(block, best)[:2]) if best else (0, *zeros)


def fit_linear(block: Block, low: int, high: int) -> tuple[int, NDArray[np.int64], Floats]:
    peak = np.abs(block.x).max()
    best, least, found = 0, INFINITY, np.zeros(len(block.x), np.float32)
    no_clip = [(sign, min(127, int(peak / F(end)) + 1)) for sign, end in ((-1, -low), (1, high))]
    if block.x[np.abs(block.x).argmax()] < 0:
        no_clip = [(-sign, size) for sign, size in no_clip]
    if -low == high:
        no_clip = [(1, no_clip[0][1])]
    sizes = [(sign, size) for sign, most in no_clip for size in range(most, max(1, most - 2) - 1, -1)]
    for scale in [sign * size for sign, size in sizes] if peak > 0 else ():
        codes = np.rint(np.clip(block.x * (F(1) / F(scale)), low, high)).astype(np.float32)
        error = F(0)
        for weight, difference in zip(block.weight, block.x - F(scale) * codes, strict=True):
            error = error + weight * (difference * difference)
        if error < least:
            best, least, found = scale, error, codes
    return best, found.astype(np.int64), F(best) * found


def oracle(
    dtype: str, row: Floats, importance: Floats | None, feedback: Floats | None
) -> tuple[F, list[int], list[int]]:
    """(D, block scales, codes) of a row."""
    width, n = scale_columns(dtype), len(row)
    weight = np.ones(n, np.float32) if importance is None else importance
    largest = F(127 * -LINEAR[dtype][0] if dtype in LINEAR else 124 * -BOOKS[dtype][0])
    peak = np.abs(row).max()
    scale_of_row = F(0) if peak < F(2.0**-100) else peak / largest
    original = row * (largest / peak if scale_of_row else F(0))
    target, errors = original.copy(), np.zeros(n, np.float32)
    scales: list[int] = []
    codes: list[int] = []
    for first in range(0, n, 128):
        end = min(n, first + 128)
        for at in range(first, end, width):
            to = min(end, at + width)
            share = feedback[at:to, at:to] if feedback is not None else None
            linear = dtype in LINEAR
            book = np.zeros(0, np.int64) if linear else BOOKS[dtype]
            block = Block(target[at:to], original[at:to], weight[at:to], share, book)
            clip = F(0) if linear else CLIPS[dtype] + F(0 if importance is None else 0.13)
            scale, found, values = fit_linear(block, *LINEAR[dtype]) if linear else fit(block, width, clip)
            scales.append(scale)
            codes += found.tolist() if linear else (book[found] + (scale & 3)).tolist() if scale else []
            codes += [book[0]] * (to - at) if not linear and not scale else []
            if feedback is not None:
                errors[at:to] = original[at:to] - values
                for i in range(at, to):
                    target[to:end] += errors[i] * feedback[i, to:end]
        if feedback is not None:
            for i in range(first, end):
                target[end:] += errors[i] * feedback[i, end:]
    return scale_of_row, scales, codes


def difficult_rows(columns: int) -> Floats:
    """Normal rows, with outliers, of zeros, tiny, of few different numbers, and with blocks of very different size."""
    rows = normal(18, columns)
    rows[1] *= np.where(np.arange(columns) % 37 == 3, 60, 1)
    rows[2] = 0
    rows[3] *= 1e-34
    rows[4] = np.rint(rows[4])
    rows[5] = np.sign(rows[5])
    rows[6] *= np.float32(2.0) ** -(np.arange(columns) // 16)
    rows[7, columns // 2 :] = 0
    rows[8] = 0
    rows[8, columns // 3] = -2
    rows[9] *= np.float32(2.0**110)
    return rows


@pytest.mark.parametrize("columns", [1, 17, 48, 145])
@pytest.mark.parametrize(("dtype", "mode"), MODES)
def test_every_instruction_set_gives_the_bytes_of_the_oracle(dtype: str, mode: str, columns: int) -> None:
    rows = difficult_rows(columns)
    importance = None if mode == "plain" else np.abs(normal(columns, seed=1)) + F(0.01)
    feedback = np.triu(normal(columns, columns, seed=2) / F(16), 1) if mode == "feedback" else None
    data = {isa: quantize(isa, dtype, rows, importance, feedback) for isa in ISAS}
    units, scales, codes = unpack_quantized(data[ISAS[0]], dtype, rows.shape)
    for r in range(len(rows)):
        unit, row_scales, row_codes = oracle(dtype, rows[r], importance, feedback)
        assert units[r] == unit
        assert scales[r, : len(row_scales)].tolist() == row_scales
        assert codes[r].tolist() == row_codes
    assert len(set(data.values())) == 1, {isa: hash(found) for isa, found in data.items()}


@pytest.mark.parametrize("columns", [15, 16, 31, 33, 128, 129, 333, 1024])
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_all_instruction_sets_give_the_same_bytes(dtype: str, columns: int) -> None:
    rows = np.concatenate([difficult_rows(columns), normal(70, columns, seed=3)])
    importance = np.abs(normal(columns, seed=1))
    feedback = np.triu(normal(columns, columns, seed=2) / F(64), 1) if dtype in CLIPS else None
    for n_rows in (1, 16, len(rows)):
        for ways in ((None, None), (importance, None), (importance, feedback), (None, feedback)):
            assert len({quantize(isa, dtype, rows[:n_rows], *ways) for isa in ISAS}) == 1


def test_rows_do_not_depend_on_their_neighbors() -> None:
    rows = difficult_rows(150)
    feedback = np.triu(normal(150, 150, seed=2) / F(32), 1)
    ones = np.ones(150, np.float32)
    for dtype in CLIPS:
        together = unpack_quantized(quantize(ISAS[0], dtype, rows, ones, feedback), dtype, rows.shape)
        for r in range(len(rows)):
            alone = unpack_quantized(quantize(ISAS[0], dtype, rows[r : r + 1], ones, feedback), dtype, (1, 150))
            for i in range(3):
                np.testing.assert_array_equal(together[i][r], alone[i][0])


def test_an_unknown_kernel_set_is_refused() -> None:
    with pytest.raises(ArgumentError, match='isa "mmx" is not in this build'):
        quantize("mmx", "q4", normal(1, 16))
