"""Shared parts of all fits to a capture: linear equations, limits of rows and work, and the wording of results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llamac.export.checkpoint import Checkpoint, LazyTensor
from llamac.export.parity.changes import Suspect

Array = NDArray[np.float64]

# A fit needs this many rows: with fewer, its numbers would absorb the effects of other faults.
MIN_ROWS = 8
# The multiplications that one fit may take: a wide layer would take minutes.
MOST_WORK = 5e11
# Numbers that are not finite, or a tensor that the fit needs and the file lacks or has in another shape, fit nothing.
NO_FIT = (np.linalg.LinAlgError, KeyError, ValueError)


def least_squares(matrix: Array, target: Array, smallest: float | None = None) -> Array:
    """The numbers whose product with a matrix (rows, numbers) is nearest to a target.

    Args:
        matrix: The matrix.
        target: A number for each row, or several columns of them.
        smallest: Smaller singular values, relative to the largest, count as 0; None: those of rounding errors.

    Raises:
        LinAlgError: If a number is not finite. LAPACK would print a message to the standard output.
    """
    if not (np.isfinite(matrix).all() and np.isfinite(target).all()):
        raise np.linalg.LinAlgError("the equations have numbers that are not finite")
    return np.asarray(np.linalg.lstsq(matrix, target, rcond=smallest)[0], np.float64)


class Work:
    """What a fit may still compute. Its cost is counted from shapes, so that it ends alike on all machines."""

    def __init__(self) -> None:
        self._left = MOST_WORK

    def allows(self, multiplications: float) -> bool:
        """Count multiplications, and return whether the limit allows them."""
        self._left -= multiplications
        return self._left >= 0

    @property
    def is_spent(self) -> bool:
        """Whether more was asked for than allowed."""
        return self._left < 0


def with_fitted(checkpoint: Checkpoint, numbers: dict[str, Array]) -> Suspect:
    """That tensors are missing or wrong, and a fit has found their numbers.

    numbers: By the tensors' names, in their shapes.
    """
    texts = []
    for name in numbers:
        own = checkpoint.tensors.get(name)
        texts.append(f"{name} is {'wrong' if own is not None and own.array().any() else 'missing'}")
    text = f"{' and '.join(texts)}: with numbers that are fitted to the capture, the stage agrees"
    tensors = {name: LazyTensor.of(np.ascontiguousarray(x, np.float32)) for name, x in numbers.items()}
    return Suspect(text, replace(checkpoint, tensors=checkpoint.tensors | tensors))
