"""Biases of attention scores by the distance between two positions, from a table with a row per bucket of distances.

The buckets are those of T5 (Raffel et al., arXiv:1910.10683, section 2.1) for attention to both sides, with 32 buckets
and a largest distance of 128. MPNet (Song et al., arXiv:2004.09297) uses the same buckets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llamac.export.checkpoint import LazyTensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

BUCKETS, FARTHEST = 32, 128
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
