"""Shows answers as they arrive: with Markdown where rich is installed, and as plain text in a pipe."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from llamac.cli.options import Group
from llamac.cli.text import safe_text
from llamac.cli.tools import CALL, OneLine
from llamac.tools.message import Delta, ToolCallDelta

DIM, NORMAL = "\x1b[2m", "\x1b[0m"
FENCE = re.compile(r"^ {0,3}(```|~~~)", re.MULTILINE)


def add_reasoning(group: Group, when: str = "") -> None:
    """Add --reasoning. when: Begins its help."""
    group.add_argument(
        "--reasoning",
        choices=("show", "hide"),
        help=f"{when}show or hide the text between <think> and </think> (default: show it on a terminal)",
    )


def shows_reasoning(options: argparse.Namespace) -> bool:
    """Whether to show reasoning on standard output."""
    return sys.stdout.isatty() if options.reasoning is None else bool(options.reasoning == "show")


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
        has_colors = os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")
        self._dims = self._is_terminal and has_colors
        self._line = OneLine()
        self._last = ""  # the kind of the last part that was shown

    def show(self, deltas: Iterable[Delta]) -> None:
        """Show an answer while it is generated, and end its line."""
        self._last = ""
        try:
            for delta in deltas:
                if delta.tool_call is not None:
                    self._write_call(delta.tool_call)
                elif delta.content is not None:
                    self._separate("content")
                    self._write(delta.content, False)
                elif delta.reasoning is not None and self._shows_reasoning:
                    self._separate("reasoning")
                    self._write(delta.reasoning, True)
            self._last = self._last or "content"
        finally:
            if self._last:
                self._write("\n", False)

    def _separate(self, kind: str) -> None:
        """Begin a new line after a part of another kind."""
        if self._last not in ("", kind):
            self._write("\n\n" if self._last == "reasoning" else "\n", False)
        self._last = kind

    def _write_call(self, piece: ToolCallDelta) -> None:
        """Show a piece of a call. Each call has its own line."""
        if piece.name is not None:
            self._separate(f"call {piece.index}")
            self._write(f"{CALL}{piece.name} ", False)
            self._line = OneLine()
        self._write(self._line.push(piece.arguments), False)

    def _write(self, text: str, is_reasoning: bool) -> None:
        text = safe_text(text) if self._is_terminal else text
        sys.stdout.write(f"{DIM}{text}{NORMAL}" if is_reasoning and self._dims else text)
        sys.stdout.flush()


class MarkdownScreen(Screen):
    """Markdown on a terminal. Each block is drawn again as it grows, and for the last time when it is complete."""

    def show(self, deltas: Iterable[Delta]) -> None:
        """Show an answer while it is generated."""
        from rich.console import Console

        with no_echo():
            self._show(deltas, Block(Console(highlight=False)))

    def _show(self, deltas: Iterable[Delta], block: Block) -> None:
        self._last = ""
        try:
            for delta in deltas:
                if delta.content is not None:
                    if self._last:
                        self._separate("")
                    block.add(safe_text(delta.content))
                    continue
                block.end()
                if delta.tool_call is not None:
                    self._write_call(delta.tool_call)
                elif delta.reasoning is not None and self._shows_reasoning:
                    self._separate("reasoning")
                    self._write(delta.reasoning, True)
        finally:
            block.end()
            if self._last:
                self._write("\n", False)


class Block:
    """The Markdown that is not complete yet. Ctrl-C waits until a drawing is complete, or lines would stay twice."""

    def __init__(self, console: Any) -> None:
        self._console = console
        self._live: Any = None
        self._text = ""

    def add(self, text: str) -> None:
        """Show further text."""
        with undivided():
            self._add(text)

    def end(self) -> None:
        """Show the rest for the last time."""
        with undivided():
            self._end()

    def _add(self, text: str) -> None:
        from rich.live import Live

        whole, self._text = split_blocks(self._text + text)
        if self._live is None:
            self._live = Live(console=self._console, transient=True, refresh_per_second=12)
            self._live.start()
        if whole:
            self._live.update("")
            self._live.console.print(_markdown(whole))
            self._live.console.print()
        self._live.update(_markdown(self._text))

    def _end(self) -> None:
        if self._live is not None:
            self._live.update("")
            self._live.stop()
            self._live = None
        if self._text.strip():
            self._console.print(_markdown(self._text))
        self._text = ""


def _markdown(text: str) -> Any:
    """Markdown whose lines end where those of the text do: models write verses and lists without its marks."""
    from rich.markdown import Markdown

    found = Markdown(text)
    for token in found.parsed:
        for part in token.children or ():
            if part.type == "softbreak":
                part.type = "hardbreak"
    return found


@contextlib.contextmanager
def undivided() -> Iterator[None]:
    """Let Ctrl-C wait for the end of what is done in it."""
    pressed: list[tuple[Any, ...]] = []
    before = signal.signal(signal.SIGINT, lambda *event: pressed.append(event)) or signal.SIG_DFL
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed and callable(before):
        before(*pressed[0])


@contextlib.contextmanager
def no_echo() -> Iterator[None]:
    """Keep the terminal from showing keys, `^C` among them: each would move the cursor within what is drawn."""
    if not sys.stdin.isatty():
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    after = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, after)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def split_blocks(text: str) -> tuple[str, str]:
    """Split Markdown into complete blocks and the rest. A blank line ends a block, but not inside a code fence."""
    end = at = 0
    while (found := text.find("\n\n", at)) >= 0:
        at = found + 2
        if len(FENCE.findall(text[:found])) % 2 == 0:
            end = at
    return text[:end], text[end:]
