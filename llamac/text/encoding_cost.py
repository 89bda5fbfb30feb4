"""Decides whether encoding with a tokenizer is proven to take time and memory in proportion to every text.

This holds for the tokenizers of known models. Any other tokenizer encodes in a separate process (isolated_encoder.py).
"""

from __future__ import annotations

import binascii
import struct
from collections.abc import Sequence
from typing import Any

from llamac.text.tokenizer_json import steps

MAX_STEPS = 64  # steps of normalizer and pre-tokenizer together
MAX_GROWTH = 64  # characters that a normalizer can make from one; SentencePiece's tables make 18
MAX_NAME = 64  # characters of affixes, and of the token for unknown words, which encoding can repeat for every word
MAX_PIECE = 128  # characters of a unigram model's longest piece; the model tries all lengths at each position
MAX_PIECES_BYTES = 1 << 22  # bytes of a unigram model's pieces; each byte takes 350 bytes of memory
MAX_WORD = 256  # characters of a word that WordPiece splits, in quadratic time
# Steps that take linear time and expand a text by a constant factor at most. Unicode's normal forms expand a character
# at most 18 times, and only once.
_LINEAR_STEPS = frozenset(
    [
        *("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents", "Strip", "BertNormalizer", "ByteLevel"),
        *("Prepend", "Replace", "Precompiled", "Split", "Punctuation", "Digits", "Whitespace", "WhitespaceSplit"),
        *("BertPreTokenizer", "Metaspace", "CharDelimiterSplit", "UnicodeScripts", "FixedLength"),
    ]
)


def cost_problem(document: dict[str, Any]) -> str:
    """Explain why encoding with a tokenizer.json is not proven to be linear in the text. Empty if it is proven."""
    normalizers = list(steps(document.get("normalizer")))
    every = [*normalizers, *steps(document.get("pre_tokenizer"))]
    if len(every) > MAX_STEPS:
        return f"it has {len(every)} steps"
    for step in every:
        if step.get("type") not in _LINEAR_STEPS:
            return f"the step {step.get('type')!r:.40} is not analyzed"
        pattern = step.get("pattern")
        regex = pattern.get("Regex") if isinstance(pattern, dict) else None
        if regex is not None and (problem := _regex_problem(str(regex))):
            return problem
    return _growth_problem(normalizers) or _model_problem(document["model"])


def make_linear(document: dict[str, Any]) -> None:
    """Replace regular expressions that take quadratic time with equivalents that take linear time (`LINEAR`).

    Args:
        document: A tokenizer.json, which is changed.
    """
    for step in (*steps(document.get("normalizer")), *steps(document.get("pre_tokenizer"))):
        pattern: Any = step.get("pattern")
        regex = pattern.get("Regex") if isinstance(pattern, dict) else None
        splits = step.get("type") == "Split" and step.get("behavior") == "Isolated" and not step.get("invert")
        if isinstance(regex, str) and (splits or step.get("type") == "Replace"):
            from llamac.text.vocabulary.pre_tokenizers import LINEAR

            pattern["Regex"] = LINEAR.get(regex, regex)


def _regex_problem(regex: str) -> str:
    # imported here because many tokenizers, such as the built-in ones, have no expressions
    from llamac.text.regex_cost import regex_problem
    from llamac.text.vocabulary.pre_tokenizers import PROVEN_BY_HAND

    return "" if regex in PROVEN_BY_HAND else regex_problem(regex)


def _growth_problem(normalizers: Sequence[dict[str, Any]]) -> str:
    size = 1  # characters that one character can become
    for step in normalizers:
        if step["type"] == "Prepend":
            size += len(str(step.get("prepend")))
        elif step["type"] == "Replace":
            size *= max(1, len(str(step.get("content"))))
        elif step["type"] == "Precompiled":
            size *= max(1, _longest_replacement(str(step.get("precompiled_charsmap"))))
        if size > MAX_GROWTH:
            return f"its normalizer can turn one character into more than {MAX_GROWTH}"
    return ""


def _longest_replacement(charsmap: str) -> int:
    try:
        data = binascii.a2b_base64(charsmap)
        (size,) = struct.unpack_from("<I", data)
        return max(map(len, data[4 + size :].decode().split("\0")))
    except (ValueError, struct.error):
        return MAX_GROWTH + 1


def _model_problem(model: dict[str, Any]) -> str:
    for name in ("unk_token", "end_of_word_suffix", "continuing_subword_prefix"):
        if len(str(model.get(name))) > MAX_NAME:
            return f"its {name} has more than {MAX_NAME} characters"
    limit = model.get("max_input_chars_per_word", 100)
    if type(limit) is not int or limit > MAX_WORD:
        return f"it splits words of more than {MAX_WORD} characters"
    if model.get("type") == "Unigram":
        pieces = [str(entry[0]) for entry in model["vocab"]]
        if max(map(len, pieces), default=0) > MAX_PIECE:
            return f"a piece has more than {MAX_PIECE} characters"
        if sum(len(piece.encode(errors="replace")) for piece in pieces) > MAX_PIECES_BYTES:
            return f"its pieces have more than {MAX_PIECES_BYTES} bytes"
    return ""
