"""Says how a tensor of a file differs from the original's, in words: which numbers, and what was done to them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llamac.export.checkpoint import LazyTensor
from llamac.format.strips import CODE_BITS, FLOATS, LAYOUTS, to_dtype

Floats = NDArray[np.float32]
Tensors = Mapping[str, LazyTensor]

MOST_NAMED = 8  # numbers in a list
ROUNDED = "its numbers are rounded"
# To recognize another model's weights: the most tensors and the rows that are read, and the share that must differ.
SAMPLED, ROWS_READ, MOSTLY = 32, 4, 0.5
LARGEST = 64 << 20  # bytes of a tensor of the sample in float32: some formats are read as a whole
# The largest error of a number in b bits is this times 2^-b, of the row's largest number. Rounding alone causes a
# quarter of that; calibration moves numbers further.
OF_QUANTIZING = 4.0


class TensorDifferences:
    """The tensors of a file that differ from the original's.

    Attributes:
        how: How each of them differs, in the original's order.
    """

    def __init__(self, own: Tensors, original: Tensors, names: Sequence[str]) -> None:
        """Compare tensors.

        Args:
            own: The file's.
            original: The original's.
            names: The tensors to compare, all of them in `original`.
        """
        self._own, self._original = own, original
        self.how = {name: how for name in names if (how := self._how(name))}

    def is_rounded(self, name: str) -> bool:
        """Whether a tensor of `how` has the original's numbers but for rounding."""
        return self.how[name].startswith(ROUNDED)

    def _how(self, name: str) -> str:
        """How a tensor differs; "" if it does not."""
        if name not in self._own:
            return "the file does not have it"
        tensor, original = self._own[name], self._original[name]
        if tensor.shape != original.shape:
            return f"it has shape {tensor.shape}, expected {original.shape}"
        own, expected = tensor.array(), original.array()
        if np.array_equal(own, expected):
            return ""
        if not np.isfinite(own).all():
            return f"{np.count_nonzero(~np.isfinite(own))} of its numbers are not finite"
        if not own.any():
            return "all of its numbers are 0"
        return (
            self._other_tensor(own)
            or _rounded(tensor.dtype, own, expected)
            or _reordered(own, expected)
            or _moved(own, expected)
            or _place(own, expected)
        )

    @functools.cached_property
    def _names_by_start(self) -> dict[tuple[tuple[int, ...], bytes], str]:
        """The original's tensors by their shapes and first rows."""
        return {(tensor.shape, _start(tensor.read(0, 1))): name for name, tensor in self._original.items()}

    def _other_tensor(self, own: Floats) -> str:
        other = self._names_by_start.get((own.shape, _start(own[:1])))
        if other is None or not np.array_equal(own, self._original[other].array()):
            return ""
        return f"it has the numbers of {other}"


def other_weights(own: Tensors, original: Tensors) -> str:
    """Says that a file has another model's numbers; "" if it does not.

    The first rows of some tensors are compared. Damage and wrong conversions change few tensors.
    """
    shared = [
        name
        for name, tensor in original.items()
        if name in own and own[name].shape == tensor.shape and 4 * math.prod(tensor.shape) <= LARGEST
    ]
    sample = shared[:: len(shared) // SAMPLED + 1]
    start, expected = ({name: _first_rows(tensors[name]) for name in sample} for tensors in (own, original))
    differences = TensorDifferences(start, expected, sample)
    count = sum(not differences.is_rounded(name) for name in differences.how)
    if count <= MOSTLY * len(sample):
        return ""
    return (
        f"{count} of {len(sample)} tensors that were compared differ from the directory's by more than rounding: MODEL "
        "was made from another model, or from another revision of it"
    )


def _first_rows(tensor: LazyTensor) -> LazyTensor:
    return replace(LazyTensor.of(tensor.read(0, min(ROWS_READ, tensor.shape[0]))), dtype=tensor.dtype)


def _start(row: Floats) -> bytes:
    return np.ascontiguousarray(row, np.float32).tobytes()


def _rounded(dtype: str, own: Floats, expected: Floats) -> str:
    """Float formats round each number by itself; quantized ones round the numbers of a block together."""
    errors, sizes = np.abs(own.astype(np.float64) - expected), np.abs(expected)
    if dtype in FLOATS:  # f32 can hold numbers that another format has rounded
        form = next((name for name, numbers in _rounded_forms(expected) if np.array_equal(own, numbers)), "")
    else:
        bits = LAYOUTS[dtype].bits if dtype in LAYOUTS else CODE_BITS[dtype]
        form = dtype if (errors <= OF_QUANTIZING * 2.0**-bits * sizes.max(axis=-1, keepdims=True)).all() else ""
    return form and f"{ROUNDED} to {form}, by up to {errors.max() / sizes.max():.1e} of the largest"


def _rounded_forms(numbers: Floats) -> Iterator[tuple[str, Floats]]:
    """Numbers that a float format has rounded or, for bf16, cut, as f32."""
    yield "f16", to_dtype(numbers, "f16").astype(np.float32)
    yield "bf16", (to_dtype(numbers, "bf16").astype(np.uint32) << 16).view(np.float32)
    yield "bf16", (np.ascontiguousarray(numbers).view(np.uint32) & 0xFFFF0000).view(np.float32)


def _reordered(own: Floats, expected: Floats) -> str:
    """Another order of the same numbers: of a matrix as a whole, or of blocks of its rows or columns."""
    if own.ndim == 1:
        return _other_order(own[:, None], expected[:, None], "numbers")
    if np.array_equal(own, expected.T.reshape(own.shape)):
        return "it is transposed"
    return _other_order(own, expected, "rows") or _other_order(own.T, expected.T, "columns")


def _other_order(rows: Floats, wanted: Floats, what: str) -> str:
    places = {row.tobytes(): i for i, row in enumerate(wanted)}
    order = [places.get(row.tobytes(), -1) for row in rows]
    if len(places) < len(rows) or len(set(order)) < len(rows) or -1 in order:
        return ""
    size, blocks = _in_blocks(order)
    blocks_of = "" if size == 1 else f"blocks of {size} "
    return f"its {blocks_of}{what} are in another order: they are the directory's {listed(blocks)}"


def _in_blocks(order: Sequence[int]) -> tuple[int, list[int]]:
    """The size of the largest blocks that an order moves as a whole, and the order of these blocks."""
    n = len(order)
    for size in range(n, 0, -1):
        starts = range(0, n, size)
        if n % size == 0 and all(
            order[i] % size == 0 and list(order[i : i + size]) == list(range(order[i], order[i] + size)) for i in starts
        ):
            return size, [order[i] // size for i in starts]
    return 1, list(order)


def _moved(own: Floats, expected: Floats) -> str:
    """The same numbers times a factor, or plus a number."""
    exact, wanted = own.astype(np.float64), expected.astype(np.float64)
    limit = 1e-6 * np.abs(exact).max()
    factor = float((exact * wanted).sum() / max((wanted * wanted).sum(), np.finfo(np.float64).tiny))
    if np.abs(exact - factor * wanted).max() <= limit:
        return f"its numbers are {factor:.6g} times as large"
    shift = float((exact - wanted).mean())
    if np.abs(exact - wanted - shift).max() <= limit:
        return f"its numbers are larger by {shift:.6g}" if shift > 0 else f"its numbers are smaller by {-shift:.6g}"
    return ""


def _place(own: Floats, expected: Floats) -> str:
    """Where the numbers differ."""
    rows, wanted = own.reshape(len(own), -1), expected.reshape(len(own), -1)
    different = np.flatnonzero((rows != wanted).any(axis=1))
    what = "numbers" if own.ndim == 1 else "rows"
    if len(different) == len(rows):
        return f"all of its {what} differ"
    verb = "differs" if len(different) == 1 else "differ"
    return f"{len(different)} of {len(rows)} {what} {verb}: {listed(different.tolist())}"


def listed(numbers: Sequence[int]) -> str:
    """Integers as a list. Runs of three or more are shortened, and long lists are cut."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs[:MOST_NAMED]]
    return ", ".join(shown) + (", ..." if len(runs) > MOST_NAMED else "")
