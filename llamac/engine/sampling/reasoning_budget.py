"""Limits the tokens that a generation spends inside its thinking tags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamac.text.reasoning import TAGS, TOKEN_TAGS, tag_ids, token_name

if TYPE_CHECKING:
    from llamac.engine.model import Model

CLOSING_TAGS = {**TAGS, **TOKEN_TAGS}  # by the opening ones
LOOK_BACK = 32  # number of tokens at the end of a prompt that are searched for an opening tag


class ReasoningBudget:
    """Counts the tokens of the reasoning, and forces the closing tag when the budget is exhausted.

    Reasoning begins with an opening tag, at the end of the prompt or at the beginning of the new text.

    Attributes:
        forced: Tokens that must come next, in order.
    """

    def __init__(self, model: Model, limit: int, prompt: Sequence[int]) -> None:
        """Start counting for a generation.

        Args:
            model: The model.
            limit: Maximum number of tokens between the tags.
            prompt: Ids of the prompt.
        """
        self._tokenizer = model.tokenizer
        self._limit = limit
        self._left: int | None = None  # remaining tokens before the closing tag; None: no opening tag yet
        self._closing = b""
        self._text = b""  # the text since its beginning or since the opening tag
        self._is_over = False
        self.forced: list[int] = []
        tail = b"".join(token_name(self._tokenizer, token) for token in prompt[-LOOK_BACK:]).rstrip()
        opened = next((tag for tag in CLOSING_TAGS if tail.endswith(tag.rstrip().encode())), None)
        if opened is not None:
            self._open(opened)

    def accept(self, token: int) -> None:
        """Record a generated token."""
        if self.forced:
            self.forced.pop(0)
        if self._is_over:
            return
        self._text += token_name(self._tokenizer, token)
        if self._left is not None:
            self._left -= 1
            self._check()
            return
        text = self._text.lstrip()
        opened = next((tag for tag in CLOSING_TAGS if text.startswith(tag.encode())), None)
        if opened is not None:
            self._text = text[len(opened) :]
            self._open(opened)
        elif not any(tag.encode().startswith(text) for tag in CLOSING_TAGS):
            self._is_over = True

    def _open(self, tag: str) -> None:
        self._closing, self._left = CLOSING_TAGS[tag].encode(), self._limit
        self._check()

    def _check(self) -> None:
        """End the reasoning if the model has ended it or the budget is exhausted."""
        assert self._left is not None
        if self._closing in self._text:
            self._is_over = True
        elif self._left <= 0:
            begun = next(n for n in range(len(self._closing), -1, -1) if self._text.endswith(self._closing[:n]))
            rest = self._closing[begun:].decode()
            self.forced = tag_ids(self._tokenizer, rest)
            self._is_over = True
