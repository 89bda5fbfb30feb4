"""Imports llguidance, the optional library behind guides, and turns its messages into errors."""

from __future__ import annotations

import re
from typing import Any

from llamac.errors import ArgumentError, UnsupportedError

INSTALL = 'guides need the package llguidance, which is not installed: pip install "llamac[guided]"'


def llguidance() -> Any:
    """The library.

    Raises:
        UnsupportedError: If it is not installed.
    """
    try:
        import llguidance
    except ImportError:
        raise UnsupportedError(INSTALL) from None
    return llguidance


def checked_text(text: str, name: str, most: int | None = None) -> str:
    """Return a text that the library can read.

    Args:
        text: The text.
        name: What the user calls it.
        most: The most characters that it may have; None: any number.

    Raises:
        ArgumentError: If it contains a lone surrogate, or is too long.
    """
    if most is not None and len(text) > most:
        raise ArgumentError(f"{name} has {len(text):,} characters, expected at most {most:,}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ArgumentError(f"{name} contains a lone surrogate, which is not a character") from None
    return text


def problem(grammar: str) -> str:
    """What is wrong with a grammar in llguidance's form, in one line; an empty string if nothing is."""
    is_error, messages = llguidance().LLMatcher.validate_grammar_with_warnings(grammar)
    return _one_line(messages[0]) if is_error else ""


def check(grammar: str, name: str) -> str:
    """Return a grammar in llguidance's form.

    Args:
        grammar: The grammar.
        name: What the user calls it.

    Raises:
        ArgumentError: If it is wrong. The message shows the place.
    """
    if found := problem(grammar):
        raise ArgumentError(f"{name} cannot be used: {found}")
    return grammar


def _one_line(message: str) -> str:
    """A message of the library without its excerpt from the grammar."""
    lines = message.strip().splitlines()
    first = re.sub(r"^(?:at )?(\d+)\((\d+)\):", r"line \1, column \2:", lines[0])
    detail = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "")
    column = next((line.index("^") - 3 for line in lines if line.strip() == "^" * len(line.strip())), None)
    if not detail or column is None:
        return first
    wrapped = re.match(r"line .*invalid regex (.*) \(in regex\)", first)
    return f"{wrapped[1] if wrapped else 'the regular expression'}: {detail}, at character {column}"
