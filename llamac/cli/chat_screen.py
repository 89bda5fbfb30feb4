"""What `llamac chat` shows: answers as they arrive, with Markdown where rich is installed, and plain text in a pipe."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterable
from typing import Any

from llamac.cli.text import safe_text
from llamac.text.reasoning import Part

DIM, NORMAL = "\x1b[2m", "\x1b[0m"
FENCE = re.compile(r"^ {0,3}(```|~~~)", re.MULTILINE)


def make_screen(*, markdown: bool, reasoning: bool) -> Screen:
    """The screen for standard output."""
    if sys.stdout.isatty() and markdown and importlib.util.find_spec("rich") is not None:
        return MarkdownScreen(reasoning)
    return Screen(reasoning)


class Screen:
    """Plain text. On a terminal, reasoning is dim and control characters are escaped."""

    def __init__(self, reasoning: bool) -> None:
        self._shows_reasoning = reasoning
        self._is_terminal = sys.stdout.isatty()
        has_colours = os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")
        self._dims = self._is_terminal and has_colours

    def show(self, parts: Iterable[Part]) -> None:
        """Show an answer while it is generated, and end its line."""
        was_reasoning, is_empty = False, True
        try:
            for part in parts:
                if part.is_reasoning and not self._shows_reasoning:
                    continue
                is_empty = False
                if was_reasoning and not part.is_reasoning:
                    self._write("\n\n", False)
                was_reasoning = part.is_reasoning
                self._write(part.text, part.is_reasoning)
            is_empty = False
        finally:
            if not is_empty:
                self._write("\n", False)

    def _write(self, text: str, is_reasoning: bool) -> None:
        text = safe_text(text) if self._is_terminal else text
        sys.stdout.write(f"{DIM}{text}{NORMAL}" if is_reasoning and self._dims else text)
        sys.stdout.flush()


class MarkdownScreen(Screen):
    """Markdown on a terminal. Each block is drawn again as it grows, and for the last time when it is complete."""

    def show(self, parts: Iterable[Part]) -> None:
        """Show an answer while it is generated."""
        from rich.console import Console
        from rich.live import Live
        from rich.markdown import Markdown

        console = Console(highlight=False)
        block, was_reasoning = "", False
        live: Any = None
        try:
            for part in parts:
                if part.is_reasoning:
                    if self._shows_reasoning:
                        was_reasoning = True
                        self._write(part.text, True)
                    continue
                if was_reasoning:
                    self._write("\n\n", False)
                    was_reasoning = False
                block += safe_text(part.text)
                whole, block = split_blocks(block)
                if live is None:
                    live = Live(console=console, transient=True, refresh_per_second=12)
                    live.start()
                if whole:
                    live.update("")
                    live.console.print(Markdown(whole))
                    live.console.print()
                live.update(Markdown(block))
        finally:
            if live is not None:
                live.update("")
                live.stop()
            if block.strip():
                console.print(Markdown(block))
            elif was_reasoning:
                self._write("\n", False)


def split_blocks(text: str) -> tuple[str, str]:
    """Split Markdown into complete blocks and the rest. A blank line ends a block, but not inside a code fence."""
    end = at = 0
    while (found := text.find("\n\n", at)) >= 0:
        at = found + 2
        if len(FENCE.findall(text[:found])) % 2 == 0:
            end = at
    return text[:end], text[end:]
