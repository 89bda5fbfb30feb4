"""Unigram models, which split text into the pieces with the highest sum of scores.

The library `tokenizers` implements them and SentencePiece's table of character replacements (charsmap), with two
differences: it applies the table to grapheme clusters instead of code points, and adds scores in 64 bits instead of 32.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from llamac.errors import TokenizerError
from llamac.text.decoding import SPACE_MARK
from llamac.text.vocabulary.added import AddedToken, Document


class UnigramPiece(NamedTuple):
    """An entry of a vocabulary. Its id is its index."""

    text: str
    score: float


def unigram_document(
    pieces: Sequence[UnigramPiece],
    added: Iterable[AddedToken],
    *,
    unknown: int | None,
    byte_fallback: bool,
    prefix_space: bool,
    collapse_spaces: bool,
    charsmap: bytes,
    split_words: bool = False,
) -> Document:
    """Build a tokenizer.json that encodes as a SentencePiece unigram model does.

    Args:
        pieces: The vocabulary.
        added: The added tokens.
        unknown: The id of the piece for unknown characters.
        byte_fallback: Whether unknown characters become byte pieces.
        prefix_space: Whether to put a space before the text.
        collapse_spaces: Whether to collapse runs of spaces, and remove them at both ends.
        charsmap: SentencePiece's table of character replacements; empty for none.
        split_words: Whether to encode each word separately, as the tokenizer.json files of T5 and XLM-RoBERTa do.
            Where several splits have the same sum, the choice can differ from encoding the whole text.

    Raises:
        TokenizerError: If there is no piece for unknown characters.
    """
    if unknown is None:
        raise TokenizerError("the unigram vocabulary has no piece for unknown characters")
    decoders: list[Document] = [_replace({"String": SPACE_MARK}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix_space:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    steps = normalizer_steps(prefix_space, collapse_spaces, charsmap)
    if split_words:  # the pre-tokenizer takes care of spaces
        steps = normalizer_steps(False, False, charsmap)[:-1]
    return {
        "added_tokens": [token.document() for token in sorted(added)],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": _word_splitter(prefix_space) if split_words else None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": [[piece.text, piece.score] for piece in pieces],
            "byte_fallback": byte_fallback,
        },
    }


def _word_splitter(prefix_space: bool) -> Document:
    """A pre-tokenizer that splits at white space, drops it, and puts U+2581 before each word if `prefix_space`."""
    metaspace = {
        "type": "Metaspace",
        "replacement": SPACE_MARK,
        "prepend_scheme": "always" if prefix_space else "never",
        "split": True,
    }
    return {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]}


def normalizer_steps(prefix_space: bool, collapse_spaces: bool, charsmap: bytes) -> list[Document]:
    """List the normalizer steps that SentencePiece applies to text. The arguments are as for `unigram_document`."""
    steps: list[Document] = []
    if charsmap:
        table = base64.b64encode(charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": table})
    if collapse_spaces:
        steps += [_replace({"Regex": r"\A +"}, ""), _replace({"Regex": " {2,}"}, " ")]
    if prefix_space:
        steps.append({"type": "Prepend", "prepend": SPACE_MARK})
    steps.append(_replace({"String": " "}, SPACE_MARK))
    if collapse_spaces:
        steps.append(_replace({"Regex": rf"(?<!{SPACE_MARK}){SPACE_MARK}+\z"}, ""))
    return steps


def _replace(pattern: Mapping[str, str], content: str) -> Document:
    return {"type": "Replace", "pattern": dict(pattern), "content": content}
