"""Records real runs of the command line as a picture: `python docs/make_run.py` writes docs/run.svg.

A test records the runs again and compares all but the figures that depend on the machine's speed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html import escape, unescape
from pathlib import Path
from typing import NamedTuple

PICTURE = Path(__file__).with_name("run.svg")
COMMANDS = (
    ["run", "-i", "Once upon a time", "-n", "120", "-t", "0.8", "-s", "7"],
    ["check", "--data"],
)
COLUMNS = 100
ADVANCE, LINE_HEIGHT, MARGIN, TITLE_HEIGHT = 8.43, 20, 16, 32  # pixels, of a monospaced font of 14 pixels
CONTINUED = "continued"  # the class of a wrapped line's later parts
COLORS = {"command": "#8ae234", "out": "#eeeeec", "err": "#999993"}


class Line(NamedTuple):
    """One line of the terminal. kind: a key of `COLORS`."""

    kind: str
    text: str


def record() -> list[Line]:
    """Run the commands and return what a terminal shows."""
    return [line for arguments in COMMANDS for line in _run(arguments)]


def _run(arguments: list[str]) -> Iterator[Line]:
    shown = " ".join(f'"{word}"' if " " in word else word for word in arguments)
    done = subprocess.run([sys.executable, "-m", "llamac", *arguments], capture_output=True, text=True, check=True)
    for kind, text in (("command", f"$ llamac {shown}"), ("out", done.stdout), ("err", done.stderr)):
        for line in text.splitlines():
            yield Line(kind, line)


def draw(lines: list[Line]) -> str:
    """The terminal as an SVG picture, which loads nothing: the reader's own monospaced font serves."""
    parts = [
        (line.kind if start == 0 else f"{line.kind} {CONTINUED}", line.text[start : start + COLUMNS])
        for line in lines
        for start in range(0, max(1, len(line.text)), COLUMNS)
    ]
    width = round(COLUMNS * ADVANCE + 2 * MARGIN)
    height = TITLE_HEIGHT + len(parts) * LINE_HEIGHT + MARGIN
    rules = "".join(f" .{kind} {{ fill: {color}; }}" for kind, color in COLORS.items())
    rows = [
        f'<text class="{kind}" x="{MARGIN}" y="{TITLE_HEIGHT + (row + 1) * LINE_HEIGHT - 6}"'
        f' textLength="{round(len(text) * ADVANCE, 1)}">{escape(text, quote=False)}</text>'
        for row, (kind, text) in enumerate(parts)
    ]
    buttons = [
        f'<circle cx="{MARGIN + 6 + 20 * place}" cy="16" r="6" fill="{color}"/>'
        for place, color in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
            f"<style>text {{ font: 14px monospace; white-space: pre; }}{rules}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#232629"/>',
            *buttons,
            *rows,
            "</svg>\n",
        ]
    )


def lines_of(picture: str) -> list[Line]:
    """The lines that a picture shows, joined where it wraps them."""
    lines: list[Line] = []
    for kind, continued, text in re.findall(r'<text class="(\w+)( \w+)?".*?>(.*?)</text>', picture):
        lines.append(Line(kind, (lines.pop().text if continued else "") + unescape(text)))
    return lines


if __name__ == "__main__":
    PICTURE.write_text(draw(record()), "utf-8")
