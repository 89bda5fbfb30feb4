"""Marks texts that llamac itself wrote into messages and that count as the chat template's: the tokens around calls.

While a template is rendered, a placeholder stands for each of them. Placeholders are random, so that no message can
contain one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable

from llamac.text.tracked_str import TEMPLATE

_FIRST, _COUNT = 0xF0000, 0xFFFE  # a private use area of Unicode, whose characters templates do not change
_PREFIX_LENGTH = 8  # 127 random bits


class MarkedText(str):
    """A text, and the parts of it that count as the template's.

    Attributes:
        pieces: The parts, one after the other, each with whether it is the template's.
    """

    __slots__ = ("pieces",)
    pieces: tuple[tuple[str, bool], ...]

    def __new__(cls, pieces: Iterable[tuple[str, bool]]) -> MarkedText:
        """Join pieces."""
        found = tuple(pieces)
        self = str.__new__(cls, "".join(text for text, _ in found))
        self.pieces = found
        return self


class Marks:
    """The placeholders of one rendering."""

    def __init__(self) -> None:
        self._prefix = "".join(chr(_FIRST + secrets.randbelow(_COUNT)) for _ in range(_PREFIX_LENGTH))
        self._texts: dict[str, str] = {}  # by placeholder

    def placed(self, messages: object) -> object:
        """The messages with placeholders in their contents. Anything but a list stays as it is."""
        if not isinstance(messages, list):
            return messages
        return [
            {**message, "content": self._placed(message["content"])}
            if isinstance(message, dict) and isinstance(message.get("content"), MarkedText)
            else message
            for message in messages
        ]

    def _placed(self, content: MarkedText) -> str:
        return "".join(self._placeholder(text) if is_ours and text else text for text, is_ours in content.pieces)

    def _placeholder(self, text: str) -> str:
        for known, meaning in self._texts.items():
            if meaning == text:
                return known
        made = self._prefix + chr(_FIRST + len(self._texts) % _COUNT)
        self._texts[made] = text
        return made

    def restored(self, rendered: str, origins: bytes) -> tuple[str, bytes]:
        """A rendered text with the original texts in place of placeholders, and the origin of each character."""
        if not self._texts:
            return rendered, origins
        texts, kinds, done = [], [], 0
        for found in re.finditer("|".join(map(re.escape, self._texts)), rendered):
            text = self._texts[found[0]]
            texts += [rendered[done : found.start()], text]
            kinds += [origins[done : found.start()], bytes([TEMPLATE]) * len(text)]
            done = found.end()
        return "".join([*texts, rendered[done:]]), b"".join([*kinds, origins[done:]])
