"""The built-in models: their names and where their files lie. training/ has the recipes that make them."""

from __future__ import annotations

from pathlib import Path

NAMES = ("stories", "stories-gpt2", "helper")
DEFAULT = "stories"
CHAT = "helper"  # what chat, serve and batch use without a model


def path(name: str = DEFAULT) -> Path:
    """Return the path of a built-in model's file. The file is not opened.

    Args:
        name: One of `NAMES`.

    Raises:
        ArgumentError: If no built-in model has this name.
    """
    if name not in NAMES:
        from llamac.errors import ArgumentError

        raise ArgumentError(f"no built-in model is called {name!r}: choose one of {', '.join(NAMES)}")
    return Path(__file__).resolve().parent / f"{name}.bin"
