"""Biases of attention scores by the distance between two positions, as a flat file has them: one for each distance.

Some models have a table with a row per bucket of distances. The buckets are those of T5 (Raffel et al.,
arXiv:1910.10683, section 2.1) for attention to both sides, with 32 buckets and a largest distance of 128. MPNet (Song
et al., arXiv:2004.09297) uses the same buckets.

Others have ALiBi (Press et al., arXiv:2108.12409, section 3): biases that fall linearly with the distance, by a slope
for each head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from llamac.export.checkpoint import LazyTensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

BUCKETS, FARTHEST = 32, 128
# Of ALiBi: the exponent of the last slope. A slope below 2^-64 has no effect.
USUAL_BIAS, MOST_BIAS = 8.0, 64.0
# The flat file's tensor of biases.
BIASES = "distance_bias.weight"
# Of the buckets of one side: the first 8 have one distance each, the others grow by a factor of sqrt(2).
SIDE, SINGLE = BUCKETS // 2, BUCKETS // 4


def bucket(distance: int) -> int:
    """The bucket of a distance, from the query's position to the key's."""
    n = abs(distance)
    # 8 + floor(log(n / 8) / log(128 / 8) * 8), in integers: no rounding at the powers of 2
    index = n if n < SINGLE else min(SIDE - 1, SINGLE + (n * n // SINGLE**2).bit_length() - 1)
    return index + SIDE * (distance > 0)


def by_distance(table: LazyTensor) -> LazyTensor:
    """The biases that a flat file has: (heads * (2 FARTHEST + 1)), those of a head together. table (BUCKETS, heads)."""
    rows = [bucket(distance) for distance in range(-FARTHEST, FARTHEST + 1)]

    def read(first: int, last: int) -> NDArray[np.float32]:
        biases: NDArray[np.float32] = table.array()[rows].T.reshape(-1)[first:last]
        return biases

    return LazyTensor((table.shape[1] * len(rows),), table.dtype, read)


def alibi_slopes(n_heads: int, largest: float) -> tuple[float, ...]:
    """The slope of each head: powers of two, of which the last has the exponent -largest.

    If the number of heads is no power of two, the slopes of the next lower power are followed by every second one of
    the next higher power.
    """

    def powers(n: int) -> list[float]:
        return [2.0 ** (-largest * (i + 1) / n) for i in range(n)]

    lower = _lower_power(n_heads)
    return tuple((powers(lower) + powers(2 * lower)[::2])[:n_heads])


def _lower_power(n_heads: int) -> int:
    """The largest power of two up to a number of heads."""
    return 1 << (n_heads.bit_length() - 1)


def largest_bias(biases: LazyTensor, n_heads: int) -> float:
    """The exponent for which `alibi_slopes` gives the slope of the first head; `USUAL_BIAS` if it is no such slope."""
    of_first = biases.array()[: biases.shape[0] // n_heads]
    slope = -float(of_first[len(of_first) // 2 - 1])
    if not 0 < slope < 1:
        return USUAL_BIAS
    exact = -math.log2(slope) * _lower_power(n_heads)
    return float(round(exact)) if math.isclose(exact, round(exact), rel_tol=1e-5) else exact


def by_slopes(slopes: Sequence[float], farthest: int) -> LazyTensor:
    """The biases that a flat file has: (heads * (2 farthest + 1)), those of a head together."""
    width = 2 * farthest + 1

    def read(first: int, last: int) -> NDArray[np.float32]:
        head, place = np.divmod(np.arange(first, last), width)
        biases: NDArray[np.float32] = (0 - np.array(slopes)[head] * abs(place - farthest)).astype(np.float32)
        return biases

    return LazyTensor((len(slopes) * width,), "f32", read)
