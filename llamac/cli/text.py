"""What commands print: text for a terminal, and JSON.

Strings from files are escaped, so that they cannot move the cursor or fake a line. Lines are wrapped at the terminal's
width.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from typing import Any

UNLIMITED = 10_000  # columns

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


def error_text(error: BaseException) -> str:
    """The message of an error. Errors of the system begin with the name of the file."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename or repr('')}: {error.strerror}"
    return str(error) or type(error).__name__


def safe_error(text: str) -> str:
    """Escape an error message, which is a line, or a line and a list indented by two spaces."""
    return "\n  ".join(map(safe_line, text.split("\n  ")))


def output_width() -> int:
    """Columns of the terminal. Lines in a file or a pipe are not cut."""
    is_set = os.environ.get("COLUMNS", "").isdigit()
    return shutil.get_terminal_size().columns if is_set or sys.stdout.isatty() else UNLIMITED


def cut(line: str, width: int) -> str:
    """Return the line, or its beginning and "...", in at most `width` columns. A wide character takes two."""
    from tqdm.utils import disp_len, disp_trim

    start: str = line[: width + 1]  # enough to see whether the line fits
    return line if disp_len(start) <= width else disp_trim(start, width - 3) + "..."


def wrapped(line: str, width: int, indent: int) -> list[str]:
    """A line as lines of at most `width` columns; all but the first are indented. A longer word stays whole."""
    indentation = " " * min(indent, width // 3)
    return textwrap.wrap(
        line, width, subsequent_indent=indentation, break_long_words=False, break_on_hyphens=False
    ) or [line]


def json_text(facts: dict[str, Any]) -> str:
    """Format JSON in ASCII. Control and bidirectional characters are escaped; lone surrogates become question marks."""
    valid = json.loads(json.dumps(facts, ensure_ascii=False).encode(errors="replace"))
    return json.dumps(valid, indent=2) + "\n"


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    if "\udc80" <= character <= "\udcff":  # a byte of a file name that is not UTF-8
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()
