"""Rules of a grammar in llguidance's variant of Lark, in which special tokens are symbols of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llamac.guided.schemas import WHITE_SPACE, simplified
from llamac.text.tokenizer import Tokenizer

ANY_TEXT = r"/(.|\n)*/"


class Rules:
    """The rules of a grammar while it is written.

    Attributes:
        lines: The rules.
        has_tokens: Whether they name special tokens.
        closings: Tokens that end free text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Begin a grammar for the texts of a tokenizer."""
        self.lines: list[str] = []
        self.has_tokens = False
        self.closings: list[tuple[int, ...]] = []
        self._tokenizer = tokenizer
        names = sorted(tokenizer.special_names, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def add(self, prefix: str, body: str, options: str = "") -> str:
        """Add a rule under a new name, which begins with a prefix; return the name. Terminals are in capitals."""
        name = f"{prefix}_{len(self.lines)}"
        self.lines.append(f"{name}{options}: {body}")
        return name

    @property
    def text(self) -> str:
        """The symbol of any text."""
        if f"TEXT: {ANY_TEXT}" not in self.lines:
            self.lines.append(f"TEXT: {ANY_TEXT}")
        return "TEXT"

    def literals(self, text: str) -> str:
        """A text as strings and special tokens."""
        found, at = [], 0
        for match in self._special.finditer(text):
            token = self._tokenizer.id_of(match[0])
            if token is not None:
                found += [quoted(text[at : match.start()]), f"<[{token}]>"]
                at, self.has_tokens = match.end(), True
        return " ".join(part for part in (*found, quoted(text[at:])) if part != '""')

    def until(self, closing: str, body: str = "") -> str:
        """Text up to and with the first occurrence of a closing text.

        Args:
            closing: The text.
            body: What the text before it matches, as an expression of terminals. Empty: anything.
        """
        end = self.literals(closing)
        tokens = tuple(self._tokenizer.encode(closing, add_special=False, parse_special=True))
        if tokens not in self.closings:
            self.closings.append(tokens)
        if end.startswith("<["):
            return f"{self.add('TEXT', body) if body else self.text} {end}"
        before, mark, after = end.partition(" <[")
        if mark:  # a terminal cannot contain a special token, and text can end with what comes before it
            return f"{self.add('TEXT', f'({body or ANY_TEXT}) {before}')}{mark}{after}"
        return self.add("until", f"{f'({body})' if body else ANY_TEXT} {end}", "[lazy]")


def quoted(text: str) -> str:
    """A text as a string of a grammar."""
    return json.dumps(text, ensure_ascii=False)


def json_value(schema: Mapping[str, Any]) -> str:
    """JSON that matches a schema, inside of a rule."""
    options = {"whitespace_pattern": WHITE_SPACE, "lenient": False}
    return "%json " + json.dumps({**simplified(schema), "x-guidance": options})
