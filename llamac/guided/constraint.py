"""The state of a guide in one generation: which tokens may come next.

A worker thread computes the mask of the next draw while the core computes its logits.
"""

from __future__ import annotations

import copy
import ctypes
import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from llamac.errors import ArgumentError
from llamac.guided.guides import Guide
from llamac.guided.vocabulary import check_matcher, vocabulary_of
from llamac.interrupt import WAIT_S, in_main_thread, interruptible
from llamac.text.reasoning import CALL_END, HEADS, TAGS, TOKEN_TAGS, tag_ids, token_name
from llamac.text.tokenizer import Tokenizer

_CLOSING_TAGS = {**TAGS, **TOKEN_TAGS}  # by the opening ones
WORKERS = 2
PROMPT_TAIL = 16  # tokens at the end of a prompt in which reasoning can be opened or closed
LONGEST_COMPLETION = 256  # tokens of a completion that is looked for at the beginning of a text
MIN_CLOSING = 16  # tokens before the limit from which on each token is checked, beyond twice the shortest text


class Constraint:
    """Follows the tokens of a generation. One thread at a time uses it.

    Reasoning between tags at the beginning is free: the grammar begins after the closing tag. No mask makes a model
    begin it (`openings`).
    """

    def __init__(
        self,
        guide: Guide,
        tokenizer: Tokenizer,
        stop_ids: Iterable[int],
        prompt: Sequence[int],
        *,
        may_force: bool = True,
        may_reason: bool = True,
        banned: Iterable[int] = (),
    ) -> None:
        """Begin a generation.

        Args:
            guide: What the text must match.
            tokenizer: The model's tokenizer.
            stop_ids: Tokens that may end a complete text.
            prompt: Ids of the prompt. Templates can open the reasoning there.
            may_force: Whether tokens may come without a draw where the grammar allows one only.
            may_reason: Whether the text can begin with reasoning.
            banned: Tokens that no completion may have. The mask does not exclude them.

        Raises:
            UnsupportedError: If the tokenizer does not work with guides, or the grammar is too complex.
        """
        self._vocabulary = vocabulary_of(tokenizer)
        self._tokenizer = tokenizer
        self._matcher = self._vocabulary.matcher(guide.grammar)
        n = self._vocabulary.n_ids
        self._value_marks = guide.closings  # tokens that close values
        self._stop_ids = [token for token in stop_ids if token < n]
        self._may_force = may_force
        self._banned = frozenset(banned)
        self._mask = bytearray(4 * (n // 32 + 1))
        self._pending: Future[None] | None = None
        self._forced: list[int] | None = None  # tokens from here on; None: not known
        self._shortest: int | None = None  # tokens of a short text of the grammar; None: no draw has been prepared
        self._planned: list[int] = []  # the rest of the completion that has begun
        self._hopeless: tuple[int, int] | None = None  # a token, and how many after it were not enough to complete
        self._tag: str | None = None  # that opened the running reasoning
        self._reasoning_end: re.Pattern[bytes] | None = None  # what ends it
        self._leaving: list[int] = []  # the tokens that are left of a closing tag that has begun
        self._openings: dict[int, str] = {}  # tokens that may begin the reasoning, and their tags
        self._tail = b""
        self._is_stopped = bool(self._matcher.is_stopped())
        self._read_tags(tokenizer, prompt, may_reason=may_reason)
        self._prepare()

    def fork(self) -> Constraint:
        """A constraint in the same state, which follows other tokens from here on."""
        other = copy.copy(self)
        other._matcher = self._settled().deep_copy()
        other._mask = bytearray(self._mask)
        return other

    def _read_tags(self, tokenizer: Tokenizer, prompt: Sequence[int], *, may_reason: bool) -> None:
        text = tokenizer.decode(prompt[-PROMPT_TAIL:], skip_special=False, start=False).rstrip()
        may_open = may_reason and not text.endswith(tuple(_CLOSING_TAGS.values()))
        for tag in _CLOSING_TAGS:
            if text.endswith(tag.rstrip()):
                self._reason(tag)
            token = self._beginning(tokenizer, tag)
            if token is not None and may_open:
                self._openings[token] = tag
        if self.is_free:
            self._openings = {}

    def _reason(self, tag: str) -> None:
        """Begin the reasoning that this tag opens."""
        self._tag, self._openings = tag, {}
        pattern = HEADS[tag][0] if tag in HEADS else re.escape(_CLOSING_TAGS[tag])
        self._reasoning_end = re.compile(pattern.encode())

    def _beginning(self, tokenizer: Tokenizer, tag: str) -> int | None:
        """The token that begins an opening tag; None if the vocabulary has none, or the grammar has the tag itself."""
        if tag in TAGS:
            return tokenizer.id_of(tag)
        first = tokenizer.encode(tag, parse_special=True)[0]
        is_mark = tokenizer.token_bytes(first).endswith((b">", b"]"))
        return first if is_mark and not self._matcher.validate_tokens([first]) else None

    # ---- what may come next

    @property
    def openings(self) -> list[int]:
        """Tokens that begin reasoning here. The mask excludes them: the model reasons only if it would without a mask.

        Where the answer has a head of its own, the same token begins both, and the mask allows it.
        """
        return [token for token, tag in self._openings.items() if tag not in HEADS]

    @property
    def is_free(self) -> bool:
        """Whether any token may come next: the model reasons."""
        return self._reasoning_end is not None

    @property
    def is_complete(self) -> bool:
        """Whether the text matches, and nothing can follow."""
        return not self.is_free and self._is_stopped

    @property
    def is_accepting(self) -> bool:
        """Whether the text matches."""
        return not self.is_free and bool(self._settled().is_accepting())

    def is_ready(self, timeout: float) -> bool:
        """Wait for the mask, at most `timeout` seconds; whether it is known."""
        return self._pending is None or self._pending.done() or bool(wait([self._pending], timeout).done)

    def mask(self) -> bytearray | None:
        """A bit for each token that may come next, the lowest of a byte first; None: all may. Changes with `accept`.

        Raises:
            UnsupportedError: If the grammar is too complex here.
        """
        if self.is_free:
            return None
        self._settled()
        if (token := self.forced()) is not None:
            self._mask[:] = bytes(len(self._mask))
            self._mask[token // 8] = 1 << token % 8
        return self._mask

    def forced(self) -> int | None:
        """The next token if the mask has only one; None if there is a choice.

        Where a grammar leaves one text, the mask allows one token: the next one if the tokenizer encoded that text.
        """
        if self._leaving:
            return self._leaving[0]
        if self.is_free or self._openings or not self._may_force:
            return None
        if self._forced is None:
            self._forced = _forced_tokens(self._settled())
        return self._forced[0] if self._forced else None

    def accept(self, token: int) -> None:
        """Record a token of the generation. Tokens that end the text change nothing.

        Raises:
            ArgumentError: If the token must not come next.
            UnsupportedError: If the grammar is too complex here.
        """
        if token in self._openings:
            self._reason(self._openings[token])
            self._tail = self._tokenizer.token_bytes(token)
            return
        if self._reasoning_end is not None:
            self._leaving = self._leaving[1:] if self._leaving[:1] == [token] else []
            self._tail = (self._tail + token_name(self._tokenizer, token))[-64:]
            if self._reasoning_end.search(self._tail):
                self._reasoning_end = None
                self._prepare()
            return
        self._openings = {}
        if token in self._stop_ids:
            return
        matcher = self._idle()
        if not matcher.consume_token(token):
            check_matcher(matcher)
            raise ArgumentError(f"the token {token} does not match the guide")
        self._is_stopped = bool(matcher.is_stopped())
        self._forced = self._forced[1:] or None if self._forced and self._forced[0] == token else None
        self._planned = self._planned[1:] if self._planned[:1] == [token] else []
        if self._hopeless is not None and self._hopeless[0] != token:
            self._hopeless = None
        self._prepare()

    # ---- limits

    def within(self, token: int, left: int) -> int:
        """A token after which the text can still be completed, if this is possible.

        A token that would end the text inside the reasoning ends the reasoning.

        Args:
            token: A token that may come next.
            left: Tokens that fit, this one included.

        Returns:
            The token; or one that begins a completion of the text, if the token leaves no room for one.
        """
        if self.is_free and token in self._stop_ids and token_name(self._tokenizer, token) != CALL_END:
            assert self._tag is not None
            self._leaving = tag_ids(self._tokenizer, _CLOSING_TAGS[self._tag] + HEADS.get(self._tag, ("", ""))[1])
            return self._leaving[0]
        if self.is_free or token in self._openings or token in self._stop_ids:
            return token
        matcher = self._settled()
        if self._planned:  # a completion has begun, perhaps in the middle of a closing mark
            return self._planned[0]
        if left > 2 * (self._shortest or 0) + MIN_CLOSING:
            return token
        after = matcher.deep_copy()
        if not after.consume_token(token):
            check_matcher(after)
        if self._completion(after, left - 1) is not None:
            return token
        if self._hopeless is None or self._hopeless[1] != left:  # else the call before has searched from here
            self._planned = self._completion(matcher, left) or []
        if self._planned:
            return self._planned[0]
        self._hopeless = (token, left - 1)
        return token

    def _completion(self, matcher: Any, most: int) -> list[int] | None:
        """Tokens that complete the text, at most this many; None if none were found. Depends on the text alone."""
        found = self._completion_with(matcher, most)
        if found is None and self._value_marks:
            found = self._completion_with(matcher, most, self._value_marks)
        return self._completion_with(matcher, most, in_order=False) if found is None else found

    def _completion_with(
        self, matcher: Any, most: int, value_marks: Sequence[Sequence[int]] = (), *, in_order: bool = True
    ) -> list[int] | None:
        """Tokens that complete the text with closing marks wherever they can stand."""
        marks = [list(mark) for mark in value_marks if self._banned.isdisjoint(mark)]
        end = matcher.deep_copy()
        found: list[int] = []
        taken: list[int] = []
        while not end.is_accepting():
            before, taken = taken, _forced_tokens(end)
            if not taken:  # a text can hold the mark of another, and goes on
                taken = next((mark for mark in marks if mark != before and end.validate_tokens(mark) == len(mark)), [])
            taken = taken or (self._token_that_ends(end) if in_order else self._needed(end, before))
            found += taken
            if len(found) > most or not taken or not self._banned.isdisjoint(taken) or not end.consume_tokens(taken):
                return None
        return found

    def _token_that_ends(self, matcher: Any) -> list[int]:
        """The token that is most likely to lead to the end of a value."""
        single = self._vocabulary.single

        def valid(data: bytes) -> int | None:
            token = single.get(data)
            return token if token is not None and self._is_valid(matcher, token) else None

        letter = valid(b"a")
        if letter is not None:  # in a string of JSON, brackets end nothing
            if (quote := valid(b'"')) is not None:
                return [quote]
            if valid(b"}") is not None and valid(b".") is not None:
                return [letter]
        ending = next(filter(partial(self._is_valid, matcher), self._vocabulary.endings), None)
        return [] if ending is None else [ending]

    def _is_valid(self, matcher: Any, token: int) -> bool:
        return token not in self._banned and matcher.validate_tokens([token]) == 1

    def _needed(self, matcher: Any, before: list[int]) -> list[int]:
        """The token that is most likely to lead to something that a value needs, and not the one before."""
        valid = ([token] for token in self._vocabulary.needed if self._is_valid(matcher, token))
        first = next(valid, [])
        return next(valid, first) if first == before else first

    # ---- the worker

    def _prepare(self) -> None:
        """Compute the mask of the next draw in the background."""
        if not self.is_free and self.forced() is None:
            self._pending = _workers().submit(self._compute_mask)

    def _settled(self) -> Any:
        """The matcher, once the mask is known."""
        if self._pending is not None:
            while not wait([self._pending], WAIT_S).done:
                pass  # Ctrl-C that arrives just before a wait does not end it
            pending, self._pending = self._pending, None
            pending.result()
        return self._matcher

    def _idle(self) -> Any:
        """The matcher, without the mask if the worker has not begun it."""
        if self._pending is not None and self._pending.cancel():
            self._pending = None
        return self._settled()

    def _compute_mask(self) -> None:
        size = len(self._mask)
        buffer = (ctypes.c_char * size).from_buffer(self._mask)
        self._matcher.unsafe_compute_mask_ptr(ctypes.addressof(buffer), size)
        check_matcher(self._matcher)
        if self._shortest is None:
            completion = self._completion(self._matcher, LONGEST_COMPLETION)
            self._shortest = 0 if completion is None else len(completion)
        n = self._vocabulary.n_ids
        may_end = self._mask[n // 8] >> n % 8 & 1
        self._mask[n // 8] &= ~(1 << n % 8)
        for token in self._stop_ids if may_end else ():
            self._mask[token // 8] |= 1 << token % 8
        for token, tag in self._openings.items():
            if tag in HEADS:
                self._mask[token // 8] |= 1 << token % 8


def _forced_tokens(matcher: Any) -> list[int]:
    """The tokens of the text that the grammar forces here, empty if it leaves a choice.

    The library calls the tokenizer for them. It would take the KeyboardInterrupt of a signal handler for an error of
    the tokenizer, so the call runs in a thread in which Python runs no signal handlers.
    """
    if not matcher.compute_ff_bytes():
        return []
    compute: Callable[[], list[int]] = matcher.compute_ff_tokens
    return interruptible(compute, lambda: None) if in_main_thread() else compute()


_pool: ThreadPoolExecutor | None = None
_pool_lock = threading.Lock()


def _workers() -> ThreadPoolExecutor:
    """The threads that compute masks, started on first use."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="llamac-guide")
        return _pool


def _forget_workers() -> None:
    """In a forked process, which has none of its parent's threads."""
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_workers)
