"""Reads and writes llama2.c's tokenizer.bin.

The file has the longest token's length, then the score, length and bytes of each token.
"""

from __future__ import annotations

import struct

from llamac.errors import ExportError, TokenizerError
from llamac.text.decoding import SPACE_MARK
from llamac.text.special_tokens import SpecialTokens
from llamac.text.tokenizer_json import MAX_TOKENS
from llamac.text.vocabulary.canonical import read_canonical
from llamac.text.vocabulary.spm import (
    BYTE,
    BYTE_PIECES,
    CONTROL,
    NORMAL,
    UNKNOWN,
    Piece,
    looks_like_sentencepiece,
    ranked_merges,
    read_model,
    spm_document,
)
from llamac.text.vocabulary.tokenizer_json import Vocabulary, canonical_json, token_ids

LLAMA2C_HEAD = ["<unk>", "\n<s>\n", "\n</s>\n", *BYTE_PIECES]
LLAMA2C_SPECIAL = SpecialTokens(bos_id=1, add_bos=True, add_eos=False, eos_id=2, stop_ids=(1, 2))


def from_llama2c(data: bytes) -> Vocabulary:
    """Read a llama2.c tokenizer.bin. The vocabulary encodes exactly as llama2.c does, and stops at BOS as well as EOS.

    Args:
        data: The file's content.

    Raises:
        TokenizerError: If the file is damaged.
    """
    pieces = _read_llama2c(data)
    head = [piece.text for piece in pieces[: len(LLAMA2C_HEAD)]]
    if head != LLAMA2C_HEAD:
        wrong = next(
            (i for i, (got, want) in enumerate(zip(head, LLAMA2C_HEAD, strict=False)) if got != want), len(head)
        )
        raise TokenizerError(f"tokenizer.bin: token {wrong} is not {LLAMA2C_HEAD[wrong]!r} as in llama2.c")
    # The format marks <s> and </s> with line feeds. Every other source has the plain names.
    pieces[1:3] = [Piece("<s>", 0.0, CONTROL), Piece("</s>", 0.0, CONTROL)]
    # llama2.c encodes "<s>" in text as three characters, so there are no added tokens.
    document = spm_document(pieces, prefix_space=True, added=[], space=" ", text_merges=False)
    return Vocabulary(canonical_json(document), LLAMA2C_SPECIAL, data)


def _read_llama2c(data: bytes) -> list[Piece]:
    if len(data) < 4:
        raise TokenizerError(f"tokenizer.bin is truncated: it has {len(data)} bytes")
    (longest,) = struct.unpack_from("<i", data)
    if not 0 < longest < 1 << 16:
        raise TokenizerError(
            f"not a tokenizer.bin: it would begin with the length of the longest token, but begins with {longest}"
        )
    pieces: list[Piece] = []
    at = 4
    while at < len(data):
        if len(data) - at < 8:
            raise TokenizerError(f"tokenizer.bin is truncated in the score or length of token {len(pieces)}")
        score, length = struct.unpack_from("<fi", data, at)
        at += 8
        if not 0 < length <= len(data) - at:
            raise TokenizerError(f"tokenizer.bin is damaged: token {len(pieces)} at byte {at} has the length {length}")
        if length > longest:
            raise TokenizerError(
                f"tokenizer.bin is damaged: token {len(pieces)} has {length} bytes, but the longest has {longest}"
            )
        try:
            text = data[at : at + length].decode("utf-8")
        except UnicodeDecodeError:
            raise TokenizerError(f"tokenizer.bin is damaged: token {len(pieces)} is not valid UTF-8") from None
        index = len(pieces)
        if index == MAX_TOKENS:
            raise TokenizerError(f"tokenizer.bin has more than {MAX_TOKENS} tokens")
        kind = UNKNOWN if index == 0 else BYTE if 3 <= index < 259 else NORMAL
        pieces.append(Piece(text, score, kind))
        at += length
    return pieces


def to_llama2c(vocabulary: Vocabulary) -> bytes:
    """Write a vocabulary as a llama2.c tokenizer.bin.

    The scores are those of the original SentencePiece model or tokenizer.bin. Without one, descending scores are
    chosen that give the same merges.

    Returns:
        The file's content.

    Raises:
        ExportError: If the format cannot represent the vocabulary.
    """
    if vocabulary.spm is not None and not looks_like_sentencepiece(vocabulary.spm):
        return vocabulary.spm
    texts, scores = _scored_pieces(vocabulary)
    count = len(token_ids(read_canonical(vocabulary.json, "the tokenizer")))
    if count != len(texts):
        raise ExportError(
            f"the tokenizer has {count} tokens, its SentencePiece model {len(texts)}: llama2.c cannot have the others"
        )
    texts = [text.replace(SPACE_MARK, " ") for text in texts]
    texts[1:3] = LLAMA2C_HEAD[1:3]
    if texts[: len(LLAMA2C_HEAD)] != LLAMA2C_HEAD:
        raise ExportError(
            "llama2.c needs <unk>, BOS, EOS and the byte pieces as tokens 0 to 258; this tokenizer has other ones there"
        )
    if len(set(texts)) != len(texts):
        raise ExportError("two tokens of this tokenizer would have the same string in llama2.c's tokenizer.bin")
    blobs = [text.encode() for text in texts]
    entries = [struct.pack("<fi", score, len(blob)) + blob for score, blob in zip(scores, blobs, strict=True)]
    return struct.pack("<i", max(map(len, blobs))) + b"".join(entries)


def _scored_pieces(vocabulary: Vocabulary) -> tuple[list[str], list[float]]:
    """The strings and the scores of all pieces, by id."""
    if (vocabulary.special.bos_id, vocabulary.special.eos_id) != (1, 2):
        raise ExportError("llama2.c needs BOS and EOS to be the tokens 1 and 2")
    if vocabulary.spm is not None:
        pieces = read_model(vocabulary.spm).pieces
        return [piece.text for piece in pieces], [piece.score for piece in pieces]
    model = read_canonical(vocabulary.json, "the tokenizer")["model"]
    if model["type"] != "BPE" or not model["byte_fallback"]:
        raise ExportError("llama2.c supports SentencePiece vocabularies only; this tokenizer is of another kind")
    ids: dict[str, int] = model["vocab"]
    if sorted(ids.values()) != list(range(len(ids))):
        raise ExportError("llama2.c needs token ids without gaps")
    merged = dict.fromkeys(left + right for left, right in model["merges"])
    scores = {piece: -float(rank) for rank, piece in enumerate(merged)}
    if sorted(ranked_merges(scores, ids, text_merges=False)) != sorted(map(tuple, model["merges"])):
        raise ExportError("llama2.c has scores instead of merges, and no scores give this tokenizer's merges")
    texts = sorted(ids, key=ids.__getitem__)
    lowest = -float(len(merged))
    return texts, [scores.get(text, 0.0 if index < len(LLAMA2C_HEAD) else lowest) for index, text in enumerate(texts)]
