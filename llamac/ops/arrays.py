"""Checks of the operations' arguments: arrays, kernel sets, threads.

An error names the argument, what was given and what was expected, and says what to do.
"""

from __future__ import annotations

from types import EllipsisType
from typing import TYPE_CHECKING

from llamac import _core
from llamac.arguments import to_float, to_int, wrong_type
from llamac.engine.hardware import machine
from llamac.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Integers = NDArray[np.int32]

NUMBERS = dict(_core.dtypes())  # the core's number of each dtype
MAX_THREADS = 1024
LARGEST = float.fromhex("0x1.fffffep127")  # float32
# Operations of fewer multiply-adds use one thread by default: they take less time than waking another one.
SMALL_WORK = 1 << 22

_default_threads = machine.DefaultThreads(machine.TINY_MODEL_BYTES)


def floats(value: object, name: str, shape: tuple[int | str | EllipsisType, ...], reason: str = "") -> Floats:
    """Check an array of float32.

    Args:
        value: The argument.
        name: Its name in errors.
        shape: Its expected shape. A str stands for any size; `...` at the start for any number of dimensions.
        reason: What the shape depends on, for the error.

    Returns:
        The array, contiguous.

    Raises:
        ArgumentTypeError: If it is not an array of float32, or a masked one.
        ArgumentError: If it has another shape or no elements.
    """
    import numpy as np

    if not isinstance(value, np.ndarray):
        raise wrong_type(name, value, "a NumPy array of float32: use np.array(..., np.float32)")
    _check_mask(value, name)
    if value.dtype != np.float32:
        raise ArgumentTypeError(
            f"{name} is an array of {value.dtype}, expected float32: convert it with .astype(np.float32)"
        )
    sizes = [size for size in shape if not isinstance(size, EllipsisType)]
    has_rank = value.ndim >= len(sizes) if len(sizes) < len(shape) else value.ndim == len(sizes)
    found = value.shape[value.ndim - len(sizes) :]
    if not has_rank or any(isinstance(size, int) and size != n for size, n in zip(sizes, found, strict=True)):
        expected = ", ".join("..." if isinstance(size, EllipsisType) else str(size) for size in shape)
        expected = f"({expected},)" if len(shape) == 1 else f"({expected})"
        raise ArgumentError(f"{name} has shape {value.shape}, expected {expected}{reason and f': {reason}'}")
    if not value.size:
        raise ArgumentError(f"{name} has shape {value.shape}, which holds no numbers: expected at least one")
    return np.ascontiguousarray(value)


def integers(value: object, name: str, size: int | None, low: int, high: int) -> Integers:
    """Check a list or a one-dimensional array of integers from low to high.

    Args:
        value: The argument.
        name: Its name in errors.
        size: Its expected length; None: any but 0.
        low: The least valid number.
        high: The largest valid number.
    """
    import numpy as np

    _check_mask(value, name)
    try:
        numbers = np.asarray(value)
    except ValueError:  # NumPy's error names no argument
        raise ArgumentError(f"{name} holds lists of different lengths, expected integers") from None
    if numbers.size and numbers.dtype.kind not in "iu":
        raise ArgumentTypeError(f"{name} holds numbers of {numbers.dtype}, expected integers")
    if numbers.ndim != 1 or not numbers.size or (size is not None and numbers.size != size):
        expected = "(n,) with at least one number" if size is None else f"({size},): one for each row"
        raise ArgumentError(f"{name} has shape {numbers.shape}, expected {expected}")
    wrong = numbers[(numbers < low) | (numbers > high)]
    if wrong.size:
        raise ArgumentError(f"{name} holds {wrong[0]}, expected {low} to {high}")
    return np.ascontiguousarray(numbers, np.int32)


def _check_mask(value: object, name: str) -> None:
    import numpy as np

    if isinstance(value, np.ma.MaskedArray):
        raise ArgumentTypeError(
            f"{name} is a masked array, whose mask would be ignored: use .filled(...) or .compressed()"
        )


def finite_number(value: object, name: str) -> float:
    """Check a number that is neither infinite nor NaN, as the core's float32 either."""
    number = to_float(value, name)
    if not abs(number) <= LARGEST:
        raise ArgumentError(f"{name} is {number:g}, expected a finite float32, up to 3.4e38")
    return number


def optional(numbers: Floats | None) -> memoryview | None:
    """The memory of an array, for the core."""
    return None if numbers is None else numbers.data


def choice(value: object, name: str, known: tuple[str, ...]) -> int:
    """Return the index of a name in a list of names."""
    if not isinstance(value, str):
        raise wrong_type(name, value, "a str")
    if value not in known:
        raise ArgumentError(f"{name} is {value!r}, expected {' or '.join(map(repr, known))}")
    return known.index(value)


def thread_count(threads: int | None, work: int) -> int:
    """The number of threads of an operation.

    Args:
        threads: The argument; None: this machine's default, or 1 for little work.
        work: The operation's multiply-adds.
    """
    if threads is None:
        return 1 if work < SMALL_WORK else _default_threads.now()
    count = to_int(threads, "threads")
    if not 1 <= count <= MAX_THREADS:
        raise ArgumentError(f"threads is {count}, expected 1 to {MAX_THREADS}, or None for this machine's default")
    return count
