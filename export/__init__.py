"""Converts checkpoints to flat files and back: `export`, and the `Report` it returns. Their first use imports NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llamac.export.convert import Report, export

__all__ = ["Report", "export"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from llamac.export import convert

    return getattr(convert, name)
