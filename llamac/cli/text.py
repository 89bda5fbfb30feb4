"""Escapes strings from files for a terminal or for JSON, so that they cannot move the cursor or fake a line."""

from __future__ import annotations

import json
import re
from typing import Any

# Control characters, line separators, marks that reverse the writing direction, and halves of surrogate pairs.
_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_IN_TEXT = re.compile(f"[{_CONTROLS}]")
_IN_LINE = re.compile(f"[{_CONTROLS}\t\n]")


def safe_text(text: str) -> str:
    """Escape control characters, except tabs and line feeds, as Python does (\\x1b)."""
    return _IN_TEXT.sub(_escape, text)


def safe_line(text: str) -> str:
    """Escape control characters, tabs and line feeds."""
    return _IN_LINE.sub(_escape, text)


def safe_error(text: str) -> str:
    """Escape an error message, which is a line, or a line and a list indented by two spaces."""
    return "\n  ".join(map(safe_line, text.split("\n  ")))


def json_text(facts: dict[str, Any]) -> str:
    """Format JSON in ASCII. Control and bidirectional characters are escaped; lone surrogates become question marks."""
    valid = json.loads(json.dumps(facts, ensure_ascii=False).encode(errors="replace"))
    return json.dumps(valid, indent=2) + "\n"


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    if "\udc80" <= character <= "\udcff":  # a byte of a file name that is not UTF-8
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()
