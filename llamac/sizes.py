"""Formats and parses numbers of bytes, and formats numbers of other things."""

from __future__ import annotations

import re

from llamac.arguments import to_int
from llamac.errors import ArgumentError

UNITS = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
}
_NAMES = {name.lower(): size for name, size in UNITS.items()}


def size_text(count: int) -> str:
    """Format a number of bytes, in powers of 1000."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def counted(count: float, noun: str) -> str:
    """Format a number of things, such as "1 token" and "2 tokens"."""
    number = f"{count:g}" if isinstance(count, float) else str(count)
    return f"{number} {noun}" if count == 1 else f"{number} {noun}s"


def parse_size(value: object, name: str) -> int:
    """Convert a number of bytes: an integer, or a text such as "2GiB", "512 MiB" or "1.5GB".

    Raises:
        ArgumentError: If the text is not a size, or the size is less than a byte. `ArgumentTypeError` for other types.
    """
    if not isinstance(value, str):
        count = to_int(value, name)
    else:
        found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*", value, re.ASCII)
        if found is None or found[2].lower() not in _NAMES:
            raise ArgumentError(f"{name} is {value!r}, expected a size such as 2GiB, 512MiB or 1.5GB")
        whole, _, part = found[1].partition(".")
        count = int(whole + part) * _NAMES[found[2].lower()] // 10 ** len(part)
    if count < 1:
        raise ArgumentError(f"{name} is {value!r}, expected at least 1 byte")
    return count
