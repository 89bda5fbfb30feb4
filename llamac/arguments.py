"""Checks of arguments' types that every caller shares: a wrong one is an error that names the argument."""

from __future__ import annotations

from operator import index
from pathlib import Path

from llamac.errors import ArgumentError, ArgumentTypeError


def wrong_type(name: str, value: object, expected: str) -> ArgumentTypeError:
    """The error for an argument of a wrong type."""
    return ArgumentTypeError(f"{name} must be {expected}, not {type(value).__name__}")


def whole_number(value: object, name: str) -> int:
    """An int, or what stands for one (NumPy's integers); no bool, and no float."""
    try:
        if not isinstance(value, bool):
            return index(value)  # type: ignore[arg-type]  # what it is, is asked here
    except TypeError:
        pass
    raise wrong_type(name, value, "a whole number")


def real_number(value: object, name: str) -> float:
    """A float, or what stands for one; no bool, and no text."""
    if hasattr(value, "__float__") or hasattr(value, "__index__"):
        try:
            if not isinstance(value, bool):
                return float(value)  # type: ignore[arg-type]  # the same
        except TypeError:
            pass
    raise wrong_type(name, value, "a number")


def file_path(value: object, name: str) -> Path:
    """A path. ArgumentTypeError for what is neither a text nor a Path, ArgumentError for what no file can be called."""
    if not isinstance(value, str | Path):
        raise wrong_type(name, value, "a text or a Path")
    if not str(value) or "\0" in str(value):
        raise ArgumentError(f"{name} is {str(value)!r}, which is no name of a file")
    return Path(value)
