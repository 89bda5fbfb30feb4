"""Unigram models: of all ways to cut a text into pieces, the one with the highest sum of scores.

The library `tokenizers` has that model, and also SentencePiece's tables of character replacements. It applies these to
whole characters as a reader sees them, SentencePiece to code points, and it adds scores with 64 bits instead of 32.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from llamac.errors import TokenizerError
from llamac.text.decoding import SPACE_MARK
from llamac.text.vocabulary.added import Added, Document


class UnigramPiece(NamedTuple):
    """One entry of a vocabulary; its id is its place."""

    text: str
    score: float


def unigram_document(
    pieces: Sequence[UnigramPiece],
    added: Iterable[Added],
    *,
    unknown: int | None,
    byte_fallback: bool,
    prefix_space: bool,
    one_space: bool,
    replacements: bytes,
    words: bool = False,
) -> Document:
    """A tokenizer.json that encodes as a SentencePiece unigram model does.

    unknown: the id of the piece for unknown characters. one_space: spaces at both ends are left out, and several become
    one. replacements: SentencePiece's table, empty for none. words: each word is cut into pieces by itself, as the
    tokenizer.json files of T5 and XLM-RoBERTa have it, instead of the whole text; equal sums can be decided otherwise.
    """
    if unknown is None:
        raise TokenizerError("the unigram vocabulary has no piece for unknown characters")
    undo: list[Document] = [_replace({"String": SPACE_MARK}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix_space:
        undo.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    steps = normalizer_steps(prefix_space, one_space, replacements)
    if words:
        steps = normalizer_steps(False, False, replacements)[:-1]
    return {
        "added_tokens": [token.document() for token in sorted(added)],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": _words(prefix_space) if words else None,
        "decoder": {"type": "Sequence", "decoders": undo},
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": [[piece.text, piece.score] for piece in pieces],
            "byte_fallback": byte_fallback,
        },
    }


def _words(prefix_space: bool) -> Document:
    """The pre-tokenizer that leaves out white space and puts U+2581 in front of each word, or else between them."""
    metaspace = {
        "type": "Metaspace",
        "replacement": SPACE_MARK,
        "prepend_scheme": "always" if prefix_space else "never",
        "split": True,
    }
    return {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]}


def normalizer_steps(prefix_space: bool, one_space: bool, replacements: bytes) -> list[Document]:
    """What SentencePiece does to a text before it cuts it: see `unigram_document`."""
    steps: list[Document] = []
    if replacements:
        table = base64.b64encode(replacements).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": table})
    if one_space:
        steps += [_replace({"Regex": r"\A +"}, ""), _replace({"Regex": " {2,}"}, " ")]
    if prefix_space:
        steps.append({"type": "Prepend", "prepend": SPACE_MARK})
    steps.append(_replace({"String": " "}, SPACE_MARK))
    if one_space:
        steps.append(_replace({"Regex": rf"(?<!{SPACE_MARK}){SPACE_MARK}+\z"}, ""))
    return steps


def _replace(pattern: Mapping[str, str], content: str) -> Document:
    return {"type": "Replace", "pattern": dict(pattern), "content": content}
