"""Decodes token ids to bytes and text, at once or as a stream.

Decoding works on bytes, so a stream of tokens never shows an incomplete UTF-8 character and never loses one.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from llamac.arguments import to_int
from llamac.errors import ArgumentError, UnsupportedError
from llamac.text.packed import is_packed, rest_of
from llamac.text.tokenizer_json import parse_document

SPACE_MARK = "▁"  # SentencePiece writes a space as U+2581
WORD_PIECE_PREFIX = "##"  # begins BERT's tokens that continue a word
NEVER_IN_UTF8 = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))  # bytes that no UTF-8 text contains
_BYTE_PIECE = re.compile("<0x[0-9A-Fa-f]{2}>")
# The replacements that the library's WordPiece decoder makes in each token's string, in this order.
_WORD_PIECE_CLEANUP = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((f" {ending}", ending) for ending in ("n't", "'m")),
    (" do not", " don't"),
    *((f" {ending}", ending) for ending in ("'s", "'ve", "'re")),
)


class DecodeRules(NamedTuple):
    """How tokens become bytes.

    Attributes:
        kind: "bpe": byte-level alphabet; "spm": text, with <0xNN> pieces for bytes; "wpm": BERT's words and ##suffixes.
        byte_fallback: Whether <0xNN> pieces are bytes.
        space_mark: The string that stands for a space.
        first: How the first token differs because encoding may have added a space: it loses a "space" or all space
            "marks", or it is "bare" while other words get a space.
        rest_prefix: The prefix of tokens that continue a word.
        cleanup: Whether spaces before punctuation are dropped.
    """

    kind: Literal["bpe", "spm", "wpm"]
    byte_fallback: bool = False
    space_mark: str | None = None
    first: Literal["space", "marks", "bare"] | None = None
    rest_prefix: str | None = None
    cleanup: bool = False


def decode_rules(decoder: dict[str, Any] | None) -> DecodeRules:
    """Derive the rules from the `decoder` of a tokenizer.json.

    Raises:
        UnsupportedError: If the decoder is unknown.
    """
    if decoder is None:
        return DecodeRules("wpm", first="bare")  # every token is a word
    steps: list[dict[str, Any]] = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return DecodeRules("bpe")
    if kinds == ["WordPiece"]:
        prefix, cleanup = steps[0].get("prefix"), steps[0].get("cleanup")
        return DecodeRules("wpm", first="bare", rest_prefix=str(prefix), cleanup=bool(cleanup))
    byte_fallback, space_mark = False, None
    first: Literal["space", "marks"] | None = None
    for step in steps:
        kind = step.get("type")
        if kind == "ByteFallback":
            byte_fallback = True
        elif kind == "Replace" and (step.get("pattern"), step.get("content")) == ({"String": SPACE_MARK}, " "):
            space_mark = SPACE_MARK
        elif kind == "Metaspace":
            space_mark = str(step.get("replacement", SPACE_MARK))
            if step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True) is True:
                first = "marks"
        elif kind == "Strip" and (step.get("content"), step.get("start"), step.get("stop")) == (" ", 1, 0):
            first = "space"
        elif kind != "Fuse":
            raise UnsupportedError(f"the tokenizer's decoder {json.dumps(step)} is not supported")
    return DecodeRules("spm", byte_fallback, space_mark, first)


def kind_of(data: bytes) -> str:
    """Detect the kind of a tokenizer.json: "bpe", "spm", "wpm" or "unknown". Faster than building a tokenizer."""
    try:
        document = rest_of(data) if is_packed(data) else parse_document(data, "the tokenizer")
        return decode_rules(document.get("decoder")).kind
    except (ValueError, UnsupportedError, AttributeError, TypeError):
        return "unknown"


def byte_alphabet() -> dict[str, int]:
    """Map the characters of byte-level BPE (GPT-2) to bytes: printable Latin-1 to itself, U+0100 on to the rest."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


class TokenTexts:
    """The bytes of tokens, computed on first use. Threads can share it."""

    def __init__(
        self,
        rules: DecodeRules,
        added: Mapping[int, str],
        special: frozenset[int],
        id_count: int,
        text_of: Callable[[int], str | None],
    ) -> None:
        """
        Args:
            rules: How tokens become bytes.
            added: Strings of added tokens, which are decoded literally.
            special: Ids of special tokens.
            id_count: One more than the highest id.
            text_of: Returns an id's string in the vocabulary, or None for an unused id.
        """
        self.rules = rules
        self.special = special
        self.id_count = id_count
        self._added = added
        self._text_of = text_of
        self._alphabet = byte_alphabet() if rules.kind == "bpe" else {}
        self._known: dict[int, bytes] = {}
        # Text of tokens that are complete characters, for decoders that show (False) or skip (True) special tokens.
        self.whole: dict[bool, dict[int, str]] = {False: {}, True: {}}

    def bytes_of(self, token: int) -> bytes:
        if type(token) is not int:  # True and 1.0 equal a known id
            token = self._check(token)
        data = self._known.get(token)
        if data is None:
            data = self._known[token] = self._bytes(self._check(token))
        return data

    def shown_bytes(self, token: int, skip_special: bool) -> bytes:
        data = self.bytes_of(token)
        return b"" if skip_special and token in self.special else data

    def is_first(self, token: int, skip_special: bool) -> bool:
        """Whether a token begins the text if nothing has been shown before it."""
        if skip_special and token in self.special:
            return False
        return bool(self.bytes_of(token)) or (self.rules.first != "space" and self._text(token) is not None)

    def first_bytes(self, token: int) -> bytes:
        """The bytes of a token at the beginning of the text."""
        data = self.bytes_of(token)
        if self.rules.first == "space":
            return data.removeprefix(b" ")
        text = self._text(token)
        if self.rules.first == "bare" and text is not None:
            return self._clean(text).encode()
        is_byte = self.rules.byte_fallback and text is not None and _BYTE_PIECE.fullmatch(text)
        if self.rules.first == "marks" and self.rules.space_mark and text is not None and not is_byte:
            return text.replace(self.rules.space_mark, "").encode()
        return data

    def _check(self, token: int) -> int:
        number = to_int(token, "a token id")
        if not 0 <= number < self.id_count:
            raise ArgumentError(
                f"token id {number} is out of range: the ids of this tokenizer are 0 to {self.id_count - 1}"
            )
        return number

    def _text(self, token: int) -> str | None:
        added = self._added.get(token)  # the library may report an added token's normalized string
        return self._text_of(token) if added is None else added

    def _bytes(self, token: int) -> bytes:
        text, rules = self._text(token), self.rules
        if text is None:
            return b""
        if rules.kind == "bpe":
            alphabet = self._alphabet
            if token in self._added or not all(char in alphabet for char in text):
                return text.encode()  # added tokens are plain text
            return bytes([alphabet[char] for char in text])
        if rules.kind == "wpm":
            rest = text.removeprefix(rules.rest_prefix) if rules.rest_prefix else text
            return self._clean(rest if rest != text else " " + text).encode()
        if rules.byte_fallback and _BYTE_PIECE.fullmatch(text):
            return bytes.fromhex(text[3:5])
        return (text.replace(rules.space_mark, " ") if rules.space_mark else text).encode()

    def _clean(self, text: str) -> str:
        for dirty, clean in _WORD_PIECE_CLEANUP if self.rules.cleanup else ():
            text = text.replace(dirty, clean)
        return text


class StreamDecoder:
    """Decodes token ids one at a time. A character whose bytes span several tokens appears with the last of them.

    The results of `push` and a final `flush`, joined, equal `Tokenizer.decode` of all ids.
    """

    __slots__ = ("_first", "_plain", "_skip_special", "_texts", "_utf8", "_whole")

    def __init__(self, texts: TokenTexts, skip_special: bool, start: bool) -> None:
        self._texts = texts
        self._skip_special = skip_special
        self._whole = texts.whole[skip_special]
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = start and texts.rules.first is not None  # the first token is decoded differently
        self._plain = not self._first  # nothing to drop and no bytes held back: a token's text can be shown at once

    def push(self, token: int) -> str:
        """Decode a token; return the text that it completes, empty while a character is incomplete."""
        if self._plain:
            text = self._whole.get(token)
            if text is not None and type(token) is int:
                return text
        return self._push_bytes(token)

    def _push_bytes(self, token: int) -> str:
        data = self._texts.shown_bytes(token, self._skip_special)
        if self._plain:
            with contextlib.suppress(UnicodeDecodeError):
                self._whole[token] = data.decode()
        elif self._first and self._texts.is_first(token, self._skip_special):
            self._first = False
            data = self._texts.first_bytes(token)
        text = self._utf8.decode(data)
        self._plain = not self._first and not self._utf8.getstate()[0]
        return text

    def flush(self) -> str:
        """End the stream; return the text of the bytes held back: U+FFFD for an incomplete character."""
        text = self._utf8.decode(b"", True)
        self._utf8.reset()
        self._plain = not self._first
        return text
