"""A lower bound for the number of tokens in text, computed without encoding it.

A token cannot represent more characters than its own string has, unless the tokenizer drops or joins characters. For
tokenizers that do neither, the bound allows rejecting a long prompt at once. Encoding ten million characters would take
20 seconds and 2 GB.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from llamac._core import Vocabulary
from llamac.text.decoding import NEVER_IN_UTF8, byte_alphabet
from llamac.text.tokenizer_json import steps

# The code points with the property White_Space, which added tokens with `lstrip` or `rstrip` also take.
_SPACES = "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029"
_SPACES += "\u202f\u205f\u3000"
# NFC composes up to four code points into one, and up to three times as many bytes of UTF-8.
_COMPOSED = 4


class TokenBound(NamedTuple):
    """How much text a token can represent.

    Attributes:
        longest: The length of the longest token, in characters or bytes; 0 if no bound is known.
        as_bytes: Whether lengths are bytes of UTF-8.
        composes: Whether encoding composes characters first (NFC).
        swallows_spaces: Whether an added token can take any number of adjacent spaces.
    """

    longest: int = 0
    as_bytes: bool = False
    composes: bool = False
    swallows_spaces: bool = False

    def least(self, text: str) -> int:
        """A lower bound for the number of tokens in `text`; 0 if none is known."""
        if not self.longest:
            return 0
        size = len(text.encode(errors="surrogatepass")) if self.as_bytes else len(text)
        if self.swallows_spaces:
            size -= sum(text.count(space) * (len(space.encode()) if self.as_bytes else 1) for space in _SPACES)
        longest = self.longest if text.isascii() or not self.composes else _COMPOSED * self.longest
        return -(-size // longest)


def token_bound(document: dict[str, Any], vocabulary: Vocabulary | None = None) -> TokenBound:
    """Compute the bound for a tokenizer.json. It is 0 for tokenizers that can drop or join characters.

    Args:
        document: The tokenizer.json.
        vocabulary: Its vocabulary, if `document` has none.
    """
    normalizers = list(steps(document.get("normalizer")))
    pre_tokenizers = list(steps(document.get("pre_tokenizer")))
    if "sentencepiece" in document or not all(map(_keeps_length, normalizers)) or not all(map(_keeps, pre_tokenizers)):
        return TokenBound()
    model = document["model"]
    as_bytes = any(step.get("type") == "ByteLevel" for step in (*normalizers, *pre_tokenizers))
    pieces: Collection[str] | _Strings
    if vocabulary is not None:
        pieces, longest = _Strings(vocabulary), vocabulary.longest
    else:
        pieces = model["vocab"] if isinstance(model["vocab"], dict) else {entry[0] for entry in model["vocab"]}
        longest = max(map(len, pieces), default=0)
    if model.get("type", "BPE") not in ("BPE", "Unigram") or model.get("continuing_subword_prefix"):
        return TokenBound()
    if not (_has_all_bytes(pieces) if as_bytes else _falls_back_to_bytes(model, pieces)):
        return TokenBound()  # unknown characters are dropped, or many of them become one token
    added = document.get("added_tokens") or []
    prepended = sum(len(step["prepend"].encode()) for step in normalizers if step.get("type") == "Prepend")
    longest_added = max((len(entry["content"].encode()) for entry in added), default=0)
    return TokenBound(
        longest=max(longest, longest_added + prepended),
        as_bytes=as_bytes,
        composes=any(step.get("type") == "NFC" for step in normalizers),
        swallows_spaces=any(entry.get("lstrip") or entry.get("rstrip") for entry in added),
    )


class _Strings(NamedTuple):
    vocabulary: Vocabulary

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and self.vocabulary.find(text) is not None


def _has_all_bytes(pieces: Any) -> bool:
    return all(char in pieces for char, byte in byte_alphabet().items() if byte not in NEVER_IN_UTF8)


def _falls_back_to_bytes(model: dict[str, Any], pieces: Any) -> bool:
    return bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in pieces for byte in range(256))


def _keeps_length(step: dict[str, Any]) -> bool:
    """Whether a normalizer drops no characters and joins no more of them than NFC does."""
    kind, pattern, content = step.get("type"), step.get("pattern"), step.get("content")
    if kind == "Replace" and isinstance(pattern, dict) and isinstance(content, str):
        found = pattern.get("String")
        return isinstance(found, str) and len(found) == len(content) and len(found.encode()) <= len(content.encode())
    return kind in ("NFC", "Prepend", "ByteLevel")


def _keeps(step: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer keeps all characters."""
    kind = step.get("type")
    if kind in ("Split", "Punctuation"):
        return step.get("behavior") != "Removed"
    return kind in ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength")
