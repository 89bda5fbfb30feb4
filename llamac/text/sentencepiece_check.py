"""Checks a ModelProto before the library `sentencepiece` parses it.

The C++ library does not check everything, such as scores that are not numbers, or tables in fields that llamac does not
use. `vocabulary/spm.py` writes the ModelProto in a vocabulary, so it must have exactly the form that is written there.
"""

from __future__ import annotations

import re

from llamac.errors import TokenizerError
from llamac.text.tokenizer_json import MAX_TOKENS

_PIECE_TAG = 0x0A  # field 1, a message
_TEXT_TAG, _SCORE_TAG, _TYPE_TAG = 0x0A, 0x15, 0x18  # fields of a piece: a string, a float, a varint
_LAST_TYPE = 6
# TrainerSpec with model_type, treat_whitespace_as_suffix and byte_fallback, then NormalizerSpec with add_dummy_prefix,
# remove_extra_whitespaces and escape_whitespaces.
_SETTINGS = re.compile(
    rb"\x12\x08\x18[\x01-\x04]\xc0\x01[\x00\x01]\x98\x02[\x00\x01]\x1a\x06\x18[\x00\x01]\x20[\x00\x01]\x28[\x00\x01]"
)


def check_model_proto(data: bytes, n_pieces: int) -> None:
    """Check that a ModelProto has pieces, the settings, and nothing else.

    Args:
        data: The serialized ModelProto.
        n_pieces: The expected number of pieces.

    Raises:
        TokenizerError: If it is different.
    """
    if not 0 < n_pieces <= MAX_TOKENS:
        raise TokenizerError(f"the vocabulary has {n_pieces} pieces, expected 1 to {MAX_TOKENS}")
    at = count = 0
    while at < len(data) and data[at] == _PIECE_TAG:
        start, size = _length(data, at + 1)
        at = start + size
        if at > len(data) or not _is_piece(data[start:at]):
            raise TokenizerError(f"the SentencePiece model is damaged: piece {count} is malformed")
        count += 1
    if not _SETTINGS.fullmatch(data, at):
        raise TokenizerError(f"the SentencePiece model is damaged: its settings, at byte {at}, are malformed")
    if count != n_pieces:
        raise TokenizerError(f"the SentencePiece model has {count} pieces, its tokenizer.json {n_pieces}")


def _is_piece(piece: bytes) -> bool:
    """Whether a message has a string, a finite score and a type, in this order."""
    if len(piece) < 9 or piece[0] != _TEXT_TAG or piece[-7] != _SCORE_TAG or piece[-2] != _TYPE_TAG:
        return False
    if not 1 <= piece[-1] <= _LAST_TYPE or (piece[-3] & 0x7F == 0x7F and piece[-4] & 0x80):  # NaN and infinity
        return False
    start, size = _length(piece, 1)
    try:
        piece[start:-7].decode()
    except UnicodeDecodeError:
        return False
    return 0 < size == len(piece) - 7 - start


def _length(data: bytes, at: int) -> tuple[int, int]:
    """The start and length of a message, from the varint at byte `at`. A damaged varint gives too large a length."""
    if at < len(data) and data[at] < 0x80:
        return at + 1, data[at]
    value = shift = 0
    for index in range(at, min(at + 4, len(data))):
        value |= (data[index] & 0x7F) << shift
        if data[index] < 0x80:
            return index + 1, value
        shift += 7
    return at, len(data) + 1
