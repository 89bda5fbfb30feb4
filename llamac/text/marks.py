"""Marks texts that llamac itself wrote into messages and that count as the chat template's: the tokens around calls.

While a template is rendered, a placeholder stands for each of them. Placeholders are random, so that no message can
contain one. A template that changes or cuts a placeholder is an error, because the prompt would have parts of it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import quote

from llamac.errors import ChatTemplateError
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

    @classmethod
    def joined(cls, between: str, texts: Sequence[str]) -> MarkedText:
        """Join texts, some of which can have parts that count as the template's."""
        found: list[tuple[str, bool]] = []
        for text in texts:
            found += [(between, False)] if found else []
            found += text.pieces if isinstance(text, MarkedText) else [(text, False)]
        return cls(found)


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
        # The number stands inside, so that both ends of a placeholder are characters of the prefix.
        half = _PREFIX_LENGTH // 2
        made = f"{self._prefix[:half]}{chr(_FIRST + len(self._texts) % _COUNT)}{self._prefix[half:]}"
        self._texts[made] = text
        return made

    def restored(self, rendered: str, origins: bytes, template: str, variables: object) -> tuple[str, bytes]:
        """A rendered text with the original texts in place of placeholders, and the origin of each character.

        Args:
            rendered: The text.
            origins: The origin of each of its characters.
            template: The template.
            variables: Its variables, which are plain data.

        Raises:
            ChatTemplateError: If the text has a part of a placeholder.
        """
        if not self._texts:
            return rendered, origins
        texts, kinds, done = [], [], 0
        for found in re.finditer("|".join(map(re.escape, self._texts)), rendered):
            text = self._texts[found[0]]
            texts += [rendered[done : found.start()], text]
            kinds += [origins[done : found.start()], bytes([TEMPLATE]) * len(text)]
            done = found.end()
        texts.append(rendered[done:])
        self._check_rest("\0".join(texts[::2]), [template, *_strings(variables)])
        return "".join(texts), b"".join([*kinds, origins[done:]])

    def _check_rest(self, rest: str, given: list[str]) -> None:
        """Check that no character of the prefix is left in a text, except those that the given strings have, too."""
        rest = rest.lower()
        left = [forms for forms in map(_forms, self._prefix) if any(form in rest for form in forms)]
        if not left:
            return
        known = "\0".join(given).lower()
        for placeholder in self._texts:
            known = known.replace(placeholder, "")
        if any(all(form not in known for form in forms) for forms in left):
            raise ChatTemplateError(
                "the chat template changes or cuts the tool calls of earlier messages, which llamac writes into their "
                "content because the template writes no calls: leave out tool_calls and write them into the content"
            )


def _forms(character: str) -> list[str]:
    """A character as it is, and as it is escaped in JSON, Python and URLs, in lower case."""
    return [
        character,
        *(form.lower() for form in (json.dumps(character)[1:-1], ascii(character)[1:-1], quote(character))),
    ]


def _strings(value: Any) -> Iterator[str]:
    """Yield the strings in plain data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for pair in value.items():
            yield from _strings(pair)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
