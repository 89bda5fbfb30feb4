"""Checks of arguments' types that every caller shares: a wrong one is an error that names the argument."""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import index
from pathlib import Path
from typing import TypeAlias

from llamac.errors import ArgumentError, ArgumentTypeError

# The number formats of a model file's matrices. (The core knows them, too: the command line does not wait for it.)
DTYPES = ("f32", "f16", "bf16", "q8", "q4", "q4s")
# A LoRA adapter: a PEFT directory, or a pair of one and its strength, which multiplies what it adds.
Adapter: TypeAlias = str | Path | tuple[str | Path, float]


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


def parse_adapters(texts: Iterable[str]) -> list[tuple[Path, float]]:
    """The command line's --lora: DIR or DIR=STRENGTH. A folder of the whole text's name is meant first."""
    found = []
    for text in texts:
        folder, equals, strength = text.rpartition("=")
        if not equals or Path(text).exists():
            found.append((file_path(text, "--lora"), 1.0))
            continue
        try:
            found.append((file_path(folder, "--lora"), float(strength)))
        except ValueError:
            raise ArgumentError(f"--lora {text}: the strength is {strength!r}, expected a number") from None
    return adapters(found)


def adapters(value: Adapter | Iterable[Adapter]) -> list[tuple[Path, float]]:
    """(directory, strength) of each adapter; one may stand alone."""
    if isinstance(value, str | Path):
        value = [value]
    if not isinstance(value, Iterable):
        raise wrong_type("lora", value, "a list of adapters")
    found = []
    for one in value:
        folder, strength = one if isinstance(one, tuple) and len(one) == 2 else (one, 1.0)
        number = real_number(strength, "an adapter's strength")
        if not math.isfinite(number):
            raise ArgumentError(f"the strength of the adapter {folder} is {number}, expected a finite number")
        found.append((file_path(folder, "lora"), number))
    return found
