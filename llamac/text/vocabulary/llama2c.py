"""llama2.c's tokenizer.bin, read and written: the longest token's length, then per token score, length and bytes."""

from __future__ import annotations

import struct

from llamac.errors import ExportError, TokenizerError
from llamac.text.decoding import SPACE_MARK
from llamac.text.tokenizer import SpecialTokens
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
    """The vocabulary of a llama2.c tokenizer.bin, encoding exactly as llama2.c does, and stopping at BOS, too."""
    pieces = _read_llama2c(data)
    head = [piece.text for piece in pieces[: len(LLAMA2C_HEAD)]]
    if head != LLAMA2C_HEAD:
        wrong = next(
            (i for i, (got, want) in enumerate(zip(head, LLAMA2C_HEAD, strict=False)) if got != want), len(head)
        )
        raise TokenizerError(f"tokenizer.bin: token {wrong} is not {LLAMA2C_HEAD[wrong]!r} as llama2.c has it")
    # The line feeds around <s> and </s> are how the format marks them; the names are shared with every other source.
    pieces[1:3] = [Piece("<s>", 0.0, CONTROL), Piece("</s>", 0.0, CONTROL)]
    # Its encoder knows no names of special tokens: "<s>" in a text is three characters. So none is added.
    document = spm_document(pieces, prefix_space=True, added=[], space=" ", text_merges=False)
    return Vocabulary(canonical_json(document), LLAMA2C_SPECIAL, data)


def _read_llama2c(data: bytes) -> list[Piece]:
    if len(data) < 4:
        raise TokenizerError(f"tokenizer.bin is truncated: it has {len(data)} bytes")
    (longest,) = struct.unpack_from("<i", data)
    if not 0 < longest < 1 << 16:
        raise TokenizerError(
            f"tokenizer.bin begins with the length of the longest token, but {longest} is none: not such a file"
        )
    pieces: list[Piece] = []
    at = 4
    while at < len(data):
        if len(data) - at < 8:
            raise TokenizerError(f"tokenizer.bin is truncated: token {len(pieces)} ends within its head")
        score, length = struct.unpack_from("<fi", data, at)
        at += 8
        if not 0 < length <= len(data) - at:
            raise TokenizerError(f"tokenizer.bin is damaged: token {len(pieces)} at byte {at} has the length {length}")
        if length > longest:
            raise TokenizerError(
                f"tokenizer.bin is damaged: token {len(pieces)} has {length} bytes, its head allows {longest}"
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
    """The bytes of a llama2.c tokenizer.bin for `vocabulary`.

    Scores come from the SentencePiece model or tokenizer.bin it was made from; without one, descending scores are
    made up that give the same merges. Raises ExportError for a vocabulary that the format cannot hold.
    """
    if vocabulary.spm is not None and not looks_like_sentencepiece(vocabulary.spm):
        return vocabulary.spm
    texts, scores = _scored_pieces(vocabulary)
    count = len(token_ids(read_canonical(vocabulary.json, "the tokenizer")))
    if count != len(texts):
        raise ExportError(
            f"the tokenizer has {count} tokens, its SentencePiece model {len(texts)}: llama2.c cannot hold the others"
        )
    texts = [text.replace(SPACE_MARK, " ") for text in texts]
    texts[1:3] = LLAMA2C_HEAD[1:3]
    if texts[: len(LLAMA2C_HEAD)] != LLAMA2C_HEAD:
        raise ExportError(
            "llama2.c needs <unk>, BOS, EOS and the byte pieces as the tokens 0 to 258; this tokenizer has others"
        )
    if len(set(texts)) != len(texts):
        raise ExportError("two tokens of this tokenizer become the same text in llama2.c's tokenizer.bin")
    blobs = [text.encode() for text in texts]
    entries = [struct.pack("<fi", score, len(blob)) + blob for score, blob in zip(scores, blobs, strict=True)]
    return struct.pack("<i", max(map(len, blobs))) + b"".join(entries)


def _scored_pieces(vocabulary: Vocabulary) -> tuple[list[str], list[float]]:
    if (vocabulary.special.bos_id, vocabulary.special.eos_id) != (1, 2):
        raise ExportError("llama2.c needs BOS and EOS to be the tokens 1 and 2")
    if vocabulary.spm is not None:
        pieces = read_model(vocabulary.spm)[0]
        return [piece.text for piece in pieces], [piece.score for piece in pieces]
    model = read_canonical(vocabulary.json, "the tokenizer")["model"]
    if model["type"] != "BPE" or not model["byte_fallback"]:
        raise ExportError("llama2.c holds SentencePiece vocabularies only; this tokenizer is of another kind")
    ids: dict[str, int] = model["vocab"]
    if sorted(ids.values()) != list(range(len(ids))):
        raise ExportError("llama2.c needs token ids without holes")
    made = dict.fromkeys(left + right for left, right in model["merges"])
    scores = {piece: -float(rank) for rank, piece in enumerate(made)}
    if sorted(ranked_merges(scores, ids, text_merges=False)) != sorted(
        (left, right) for left, right in model["merges"]
    ):
        raise ExportError(
            "this tokenizer's merges do not follow from scores of its pieces, which is all that llama2.c has"
        )
    texts = sorted(ids, key=ids.__getitem__)
    lowest = -float(len(made))
    return texts, [scores.get(text, 0.0 if index < len(LLAMA2C_HEAD) else lowest) for index, text in enumerate(texts)]
