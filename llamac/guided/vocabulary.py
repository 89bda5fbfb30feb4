"""A tokenizer's tokens as llguidance needs them, and the compiled grammars over them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

from llamac.errors import ArgumentError, UnsupportedError
from llamac.guided.library import llguidance
from llamac.text.tokenizer import Tokenizer, resident_bytes

COMPILED = 64  # grammars that a vocabulary keeps
# The library computes all text that a grammar forces in one step, during which no other thread runs. The fuel limits
# that text, to about 32,000 characters with the least fuel here. So a grammar gets as little fuel as it compiles with.
FUEL, MAX_FUEL = 1 << 16, 1 << 20
OUT_OF_FUEL = "initial lexer configuration (grammar) too big"
# Candidates to complete a text, in this order: first those that can end a value, then those that can continue one.
_MARKS = "".join(mark for mark in map(chr, range(33, 127)) if not mark.isalnum())
_OTHERS = (*_MARKS, *"0123456789", "\n", *map(chr, range(65, 123)), " ")
ENDINGS = (*"}])\"'>;.", *_OTHERS)
# Where those lead to no end: first the marks without which an address or a time does not end.
NEEDED = (*"}])\"@:Z'>;.", *_OTHERS)
_BYTES = (*range(0x80, 0xC0), *range(0xC2, 0xF5))  # of characters that are not ASCII


class Vocabulary:
    """The tokens of a tokenizer for llguidance. Threads can share it.

    A token after the last id means that the text may end here, whichever tokens end a text of the model.

    Attributes:
        n_ids: Ids of the tokenizer.
        single: The token of each byte that has one.
        endings: Tokens of one byte, in the order in which they are tried to complete a text.
        needed: The same tokens, in the order in which they are tried if that order leads to no end.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Read all tokens: about 1 s for 262,000 of them.

        Raises:
            UnsupportedError: If the bytes of a token depend on its place in the text, as in BERT's vocabularies.
        """
        if tokenizer.kind == "wpm":
            raise UnsupportedError("guides do not work with WordPiece tokenizers, whose tokens have no fixed bytes")
        self.n_ids = tokenizer.n_ids
        texts = tokenizer._loaded.texts
        tokens = [b"" if token in texts.special else texts.bytes_of(token) for token in range(self.n_ids)]
        library = llguidance()
        adapter = _Adapter(tokenizer, tokens)
        wrapper = library.TokenizerWrapper(adapter)
        self._library = adapter.library = library.LLTokenizer(wrapper)
        wrapper.tokens = adapter.tokens = []  # the library has its own copy now
        self._compiled: dict[str, Any] = {}
        self._lock = threading.Lock()
        self.single: dict[bytes, int] = {}
        for token, data in enumerate(tokens):
            if len(data) == 1:
                self.single.setdefault(data, token)
        self.endings, self.needed = map(self._in_order, (ENDINGS, NEEDED))

    def _in_order(self, texts: Sequence[str]) -> list[int]:
        order = [*(text.encode() for text in texts), *(bytes([byte]) for byte in _BYTES)]
        return list(dict.fromkeys(self.single[data] for data in order if data in self.single))

    def matcher(self, grammar: str) -> Any:
        """A matcher of llguidance's at the beginning of a text.

        Raises:
            ArgumentError: If no text matches the grammar.
            UnsupportedError: If the grammar is too large.
        """
        with self._lock:
            found = self._compiled.pop(grammar, None)
        if found is None:
            found = self._compile(grammar)
        with self._lock:
            self._compiled[grammar] = found
            while len(self._compiled) > COMPILED:
                del self._compiled[next(iter(self._compiled))]
            return found.deep_copy()

    def _compile(self, grammar: str) -> Any:
        library = llguidance()
        fuel = FUEL
        while True:
            limits = library.LLParserLimits(initial_lexer_fuel=fuel)
            found = library.LLMatcher(self._library, grammar, log_level=0, limits=limits)
            if fuel >= MAX_FUEL or not (found.is_error() and OUT_OF_FUEL in found.get_error()):
                check_matcher(found)
                return found
            fuel *= 2


class _Adapter:
    """The attributes that llguidance's TokenizerWrapper reads."""

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes]) -> None:
        self.tokens = [*tokens, b"<end>"]
        self.eos_token_id = len(tokens)
        self.bos_token_id = None
        self.special_token_ids = [len(tokens)]
        self.library: Any = None
        self._tokenizer = weakref.ref(tokenizer)  # which is the key of this vocabulary below

    def __call__(self, text: str | bytes) -> list[int]:
        """Encode a text that continues another one.

        Many SentencePiece tokenizers put a space before a text. A line feed is a token of its own there, so what
        follows it is encoded as a continuation. Tokens that are not exactly the text are not used.
        """
        tokenizer = self._tokenizer()
        if tokenizer is None:
            return []
        wanted = text.encode() if isinstance(text, str) else text
        for before in ("", "\n"):
            tokens = tokenizer.encode(before + wanted.decode())
            data = [tokenizer.token_bytes(token) for token in tokens]
            start = data.index(b"\n") + 1 if before and b"\n" in data else 0
            if b"".join(data[start:]) == wanted:
                return tokens[start:]
        return [] if self.library is None else list(self.library.greedy_tokenize(wanted.decode()))


def check_matcher(matcher: Any) -> None:
    """Raise the error of a matcher, if it has one.

    Raises:
        ArgumentError: If no text matches the grammar, or the last token does not match.
        UnsupportedError: If a limit of llguidance's was reached.
    """
    if not matcher.is_error():
        return
    message = matcher.get_error().splitlines()[0]
    if message == "NoExtensionBias":
        raise ArgumentError("no text matches the guide")
    if "doesn't satisfy the grammar" in message:
        raise ArgumentError(f"a token does not match the guide: {message}")
    cause = "is too complex or forces too long a text" if "too many expressions" in message else "is too complex"
    raise UnsupportedError(f"the guide's grammar {cause}: {message}")


_vocabularies: weakref.WeakKeyDictionary[Tokenizer, Vocabulary] = weakref.WeakKeyDictionary()
_building = threading.Lock()


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """The vocabulary of a tokenizer, built once."""
    with _building:
        found = _vocabularies.get(tokenizer)
        if found is None:
            before = resident_bytes()
            found = _vocabularies[tokenizer] = Vocabulary(tokenizer)
            tokenizer.table_bytes += max(0, resident_bytes() - before)
        return found
