"""SentencePiece's unigram models: of all ways to cut a text into pieces, the one with the highest sum of scores.

The library `tokenizers` has that model, and also the tables of character replacements. It applies these to whole
characters as a reader sees them, SentencePiece to code points: rare sequences of combining marks differ, in the same
way as in transformers.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from llamac.errors import TokenizerError, UnsupportedError
from llamac.tokenizer import SPACE_MARK

from .vocab_added import Added, Document


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
) -> Document:
    """A tokenizer.json that encodes as a SentencePiece unigram model does.

    unknown: the id of the piece for unknown characters. one_space: spaces at both ends are left out, and several become
    one. replacements: SentencePiece's table, empty for none.
    """
    if unknown is None:
        raise TokenizerError("the unigram vocabulary has no piece for unknown characters")
    undo: list[Document] = [_replace({"String": SPACE_MARK}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix_space:
        undo.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "added_tokens": [token.document() for token in sorted(added)],
        "normalizer": {"type": "Sequence", "normalizers": normalizer_steps(prefix_space, one_space, replacements)},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": undo},
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": [[piece.text, piece.score] for piece in pieces],
            "byte_fallback": byte_fallback,
        },
    }


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
        steps.append(_replace({"Regex": rf"{SPACE_MARK}+\z"}, ""))
    return steps


def _replace(pattern: Mapping[str, str], content: str) -> Document:
    return {"type": "Replace", "pattern": dict(pattern), "content": content}


def check_unigram(trainer: Mapping[int, Any], normalizer: Mapping[int, Any], has_others: bool) -> None:
    """UnsupportedError for what cannot be represented; `has_others`: there are user-defined or unused pieces."""
    problems = {
        "user-defined or unused pieces": has_others,
        "unescaped spaces": not normalizer.get(5, 1),
        "spaces at the end of words": bool(trainer.get(24, 0)),
    }
    for problem, present in problems.items():
        if present:
            raise UnsupportedError(
                f"the SentencePiece unigram model has {problem}, which is not supported; use the model's tokenizer.json"
            )
