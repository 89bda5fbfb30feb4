"""Systems of linear equations of the fits to a capture, which can have numbers that are not finite."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

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
