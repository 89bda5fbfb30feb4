"""Separates a model's reasoning, which stands between tags, from its answer, while the text arrives in pieces."""

from __future__ import annotations

from typing import NamedTuple

# The opening tag and the closing tag of each known style.
TAGS = {f"<{name}>": f"</{name}>" for name in ("think", "thinking", "thought", "reasoning")}


class Part(NamedTuple):
    """A piece of text.

    Attributes:
        text: The text, without tags.
        is_reasoning: Whether it is part of the reasoning.
    """

    text: str
    is_reasoning: bool


class ReasoningSplitter:
    """Splits a text that arrives in pieces. Reasoning can only stand at the beginning of a text.

    A piece that could be the beginning of a tag is held back. White space around the reasoning is dropped.
    """

    def __init__(self, prompt: str = "") -> None:
        """Begin a text.

        Args:
            prompt: What comes before it. Templates can open the reasoning at the end of the prompt.
        """
        opened = next((tag for tag in TAGS if prompt.rstrip().endswith(tag)), None)
        self._closing = TAGS[opened] if opened else ""
        self._begins = opened is None  # nothing but white space has come
        self._starts_part = True  # the white space at the beginning of a part is dropped
        self._trims = opened is not None
        self._held = ""

    def push(self, piece: str) -> list[Part]:
        """Add a piece; return what is known of it."""
        self._held += piece
        parts: list[Part] = []
        if self._begins:
            text = self._held.lstrip()
            opened = next((tag for tag in TAGS if text.startswith(tag)), None)
            if opened is None and any(tag.startswith(text) for tag in TAGS):
                return parts
            self._begins = False
            if opened is not None:
                self._held, self._closing, self._trims = text[len(opened) :], TAGS[opened], True
        if self._closing:
            text, closing, rest = self._held.partition(self._closing)
            keep = 0 if closing else _overlap(text, self._closing)
            self._emit(parts, text[: len(text) - keep], True)
            self._held = rest if closing else text[len(text) - keep :]
            if not closing:
                return parts
            self._closing, self._starts_part = "", True
        self._emit(parts, self._held, False)
        self._held = ""
        return parts

    def flush(self) -> list[Part]:
        """The text held back, at the end of the text."""
        parts: list[Part] = []
        self._emit(parts, self._held, bool(self._closing))
        self._held = ""
        return parts

    def _emit(self, parts: list[Part], text: str, is_reasoning: bool) -> None:
        if self._starts_part and self._trims:
            text = text.lstrip()
        if text:
            self._starts_part = False
            parts.append(Part(text, is_reasoning))


def _overlap(text: str, tag: str) -> int:
    """The characters at the end of a text that begin a tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
