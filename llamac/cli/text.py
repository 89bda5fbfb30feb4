"""Text of strangers on its way to a terminal: a name in a file shall not move the cursor or pretend to be a line."""

from __future__ import annotations

import json
import re
from typing import Any

# control characters, separators of lines, marks that turn the direction of writing, halves of surrogate pairs
_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_IN_TEXT = re.compile(f"[{_CONTROLS}]")
_IN_LINE = re.compile(f"[{_CONTROLS}\t\n]")


def safe_text(text: str) -> str:
    """Text of several lines, what is not to be printed written as in Python: \\x1b."""
    return _IN_TEXT.sub(_escape, text)


def safe_line(text: str) -> str:
    """The same for what belongs on one line: tabs and line feeds, too."""
    return _IN_LINE.sub(_escape, text)


def safe_error(text: str) -> str:
    """An error's message: one line, or one with a list below it, which is indented by two spaces."""
    return "\n  ".join(map(safe_line, text.split("\n  ")))


def json_text(facts: dict[str, Any], encoding: str = "utf-8") -> str:
    """JSON that is UTF-8 in a stream of any encoding. What JSON can write, but no stream can, becomes question marks:
    halves of surrogate pairs."""
    printable = json.loads(json.dumps(facts, ensure_ascii=False).encode(errors="replace"))
    return json.dumps(printable, indent=2, ensure_ascii=encoding.lower() != "utf-8") + "\n"


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    if "\udc80" <= character <= "\udcff":  # a byte of a file's name that is no UTF-8
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()
