"""Formats numbers of bytes."""

from __future__ import annotations


def size_text(count: int) -> str:
    """Format a number of bytes, in powers of 1000."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
