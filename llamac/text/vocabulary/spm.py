"""SentencePiece vocabularies: tokenizer.model, and the merges that the scores of pieces stand for.

SentencePiece's BPE joins, of all neighbours whose joint text is a piece, the pair with the highest score, the
leftmost of equals. tokenizer.json ranks pairs instead. `ranked_merges` turns one into the other and refuses what does
not carry over.
"""

from __future__ import annotations

import base64
import contextlib
import heapq
import itertools
import math
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from llamac.errors import TokenizerError
from llamac.text.decoding import SPACE_MARK
from llamac.text.sentencepiece_text import SentencePieceEncoder, protobuf_field
from llamac.text.tokenizer_json import MAX_TOKENS, library_errors
from llamac.text.vocabulary.added import Added, Document, Room, Sidecars, add_tokens, special_tokens
from llamac.text.vocabulary.tokenizer_json import Merge, Vocabulary, bpe_document, canonical_json, token_ids
from llamac.text.vocabulary.unigram import UnigramPiece, normalizer_steps, unigram_document

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # piece types, in SentencePiece and in GGUF

MAX_PIECE = 1024  # characters; the longest in known vocabularies has 128
MAX_MERGED = 1 << 25  # characters of all merges together; Gemma 3 has 6 million
MAX_TIES = 1 << 20  # of pairs and of characters: bounds the work on equal scores

Settings = dict[int, Any]  # {field number: value} of a protocol buffer message
# Types of the fields that are used: text, score and type; kind, separate spaces, BOS, EOS; replacements, then flags.
_PIECE = {1: bytes, 2: bytes, 3: int}
_TRAINER = {3: int, 24: int, 41: int, 42: int}
_NORMALIZER = {2: bytes, 3: int, 4: int, 5: int}

BPE = 2  # the kind of a SentencePiece model

BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]


# Merges from scores.


def ranked_merges(scores: Mapping[str, float], pieces: Mapping[str, int], text_merges: bool = True) -> list[Merge]:
    """All merges into the pieces of `scores`, best first. `pieces` maps every piece of the vocabulary to its id.

    Every way to split a piece into two others is a merge with that piece's score. Among equal scores the longer left
    half comes first; where the leftmost rule could differ from that, both are tried out, and TokenizerError is raised
    if they do. `text_merges` says that pieces are joined by their text alone, as SentencePiece does: then a character
    that is no piece must not be needed.
    """
    merges: list[Merge] = []
    characters = 0
    for piece in scores:
        if len(piece) > MAX_PIECE:
            raise TokenizerError(f"a piece of {len(piece)} characters ({piece[:20]!r}...) is not believable")
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                merges.append((left, right))
                characters += len(piece)
            elif text_merges and (cut == 1 or left in pieces) and (cut == len(piece) - 1 or right in pieces):
                lone = left if left not in pieces else right
                raise TokenizerError(
                    f"the piece {piece!r} is made with {lone!r}, which is no piece: it cannot be represented"
                )
        if characters > MAX_MERGED:
            raise TokenizerError("the pieces can be made of one another in so many ways that no merges are listed")
    merges.sort(key=lambda merge: (-scores[merge[0] + merge[1]], -len(merge[0]), pieces[merge[0] + merge[1]]))
    _check_ties(merges, scores)
    return merges


def _check_ties(merges: Sequence[Merge], scores: Mapping[str, float]) -> None:
    """Make sure that ranking equal scores gives what taking the leftmost pair gives.

    They can differ where (x, y) and (y, z) have equal scores, (y, z) ranks first, and the text has x, y, z in a row.
    Runs of one character ("----") are full of such pairs, but hardly ever come apart that way; so the texts are
    encoded both ways.
    """
    ranks = {merge: rank for rank, merge in enumerate(merges)}
    texts: set[str] = set()
    runs: dict[str, int] = {}  # what is repeated: how often at most
    for count, (x, y, z) in enumerate(_rivals(merges, scores)):
        if count > MAX_TIES:
            raise TokenizerError("too many pieces have equal scores")
        texts.add(x + y + z)
        unit = _unit(x + y)
        if unit == _unit(y + z):  # a run: every length of it up to twice the longest is tried
            runs[unit] = max(runs.get(unit, 0), 2 * len(x + y + z) // len(unit))
    if sum(len(unit) * most * most // 2 for unit, most in runs.items()) > MAX_TIES:
        raise TokenizerError("pieces repeat the same characters too often, with equal scores")
    texts.update(unit * repeats for unit, most in runs.items() for repeats in range(2, most))
    for text in texts:
        leftmost = _merge_all(text, lambda left, right: -scores[left + right] if left + right in scores else None)
        if leftmost != _merge_all(text, lambda left, right: ranks.get((left, right))):
            raise TokenizerError(
                f"equal scores make the pieces of {text!r} depend on their place, which cannot be represented"
            )


def _rivals(merges: Sequence[Merge], scores: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
    """All (x, y, z) for which (x, y) and (y, z) are merges of equal scores, and (y, z) ranks first."""
    for _, group in itertools.groupby(merges, lambda merge: scores[merge[0] + merge[1]]):
        earlier: dict[str, list[str]] = {}  # y: every z
        for left, right in group:
            for after in earlier.get(right, ()):
                yield left, right, after
            earlier.setdefault(left, []).append(right)


def _unit(text: str) -> str:
    """The shortest string that `text` is a repetition of."""
    return text[: (text + text).find(text, 1)]


def _merge_all(text: str, cost: Callable[[str, str], float | None]) -> list[str]:
    """Join neighbours of `text`, the cheapest pair first, the leftmost of equals, until no pair has a cost."""
    parts: list[str] = list(text)  # a part that was joined to its left neighbour is empty
    before, after = list(range(-1, len(parts) - 1)), list(range(1, len(parts) + 1))
    queue: list[tuple[float, int, str, str]] = []

    def offer(at: int) -> None:
        if at >= 0 and after[at] < len(parts):
            price = cost(parts[at], parts[after[at]])
            if price is not None:
                heapq.heappush(queue, (price, at, parts[at], parts[after[at]]))

    for at in range(len(parts)):
        offer(at)
    while queue:
        _, at, left, right = heapq.heappop(queue)
        gone = after[at]
        if parts[at] != left or gone == len(parts) or parts[gone] != right:  # one of them has changed since
            continue
        parts[at], parts[gone] = left + right, ""
        after[at] = after[gone]
        if after[at] < len(parts):
            before[after[at]] = at
        offer(before[at])
        offer(at)
    return [part for part in parts if part]


# The canonical form of SentencePiece BPE.


class Piece(NamedTuple):
    """One entry of a SentencePiece vocabulary; its id is its place."""

    text: str
    score: float
    type: int


def spm_document(
    pieces: Sequence[Piece],
    *,
    prefix_space: bool,
    added: Sequence[Added],
    space: str = SPACE_MARK,
    text_merges: bool = True,
    scheme: Literal["first", "always"] | None = None,
    normalizer: Sequence[Document] = (),
) -> Document:
    """A tokenizer.json that encodes as SentencePiece BPE with these pieces does.

    `prefix_space`: a space is put in front of a text. `space` is how pieces write a space. `scheme` says whether the
    text behind an added token gets a space in front, too, and leaves texts of added tokens as they are; without it that
    text gets one, and added tokens that are `normalized` are looked for with one in front. `normalizer`: steps that are
    taken instead, where there are any.
    """
    ids = piece_ids([piece.text for piece in pieces])
    for index, piece in enumerate(pieces):
        if not math.isfinite(piece.score):
            raise TokenizerError(f"the score of token {index} is {piece.score}")
    scores = {piece.text: piece.score for piece in pieces if piece.type in (NORMAL, UNUSED) and len(piece.text) > 1}
    unknown = next((piece.text for piece in pieces if piece.type == UNKNOWN), None)
    present = sum(piece in ids for piece in BYTE_PIECES)
    if present not in (0, 256):
        raise TokenizerError(
            f"the vocabulary has {present} of the 256 byte pieces <0x00> to <0xFF>, not all of them or none"
        )
    if not present and unknown is None:
        raise TokenizerError("the vocabulary has neither byte pieces nor a piece for unknown characters")
    scheme = None if normalizer else scheme
    steps: list[Document] = [{"type": "Prepend", "prepend": space}] if prefix_space and scheme is None else []
    undo: list[Document] = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if space != " ":
        steps.append({"type": "Replace", "pattern": {"String": " "}, "content": space})
        undo.insert(0, {"type": "Replace", "pattern": {"String": space}, "content": " "})
    if prefix_space:
        undo.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    by_words = prefix_space and scheme is not None
    return bpe_document(
        ids,
        ranked_merges(scores, ids, text_merges),
        added,
        normalizer=None if by_words else {"type": "Sequence", "normalizers": [*normalizer] or steps},
        pre_tokenizer=_prefixing(space, scheme) if by_words and scheme is not None else None,
        decoder={"type": "Sequence", "decoders": undo},
        unknown=unknown,
        byte_fallback=present == 256,
    )


def _prefixing(space: str, scheme: str) -> Document:
    """A pre-tokenizer that writes spaces as `space` and puts one in front of the text.

    One Metaspace step would not put it in front of a text that begins with a space, as SentencePiece does. So the
    text's own spaces are rewritten before a plain one is put in front, and that one afterwards."""
    steps = ((space, "never"), (" ", scheme), (space, "never"))
    return {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Metaspace", "replacement": mark, "prepend_scheme": prepend, "split": False}
            for mark, prepend in steps
        ],
    }


def piece_ids(texts: Sequence[str]) -> dict[str, int]:
    """Token texts to ids; TokenizerError where two tokens have the same text or one has none."""
    ids: dict[str, int] = {}
    for index, text in enumerate(texts):
        if not text or text in ids:
            raise TokenizerError(
                f"tokens {ids[text]} and {index} are both {text!r}" if text else f"token {index} is empty"
            )
        ids[text] = index
    return ids


# SentencePiece's tokenizer.model: a protocol buffer, of which a few fields matter.


def from_sentencepiece(data: bytes, sidecars: Sidecars, room: Room | None = None) -> Vocabulary:
    """The vocabulary of a SentencePiece model, encoding as the sentencepiece library does.

    Added tokens and their rules come from `sidecars`. BOS is put in front unless tokenizer_config.json says otherwise.
    A space in front of the text behind an added token is put there only where that file says `legacy`, or the model is
    a unigram one.
    """
    pieces, trainer, normalizer = read_model(data)
    bos, eos = (_model_id(trainer.get(field, default), pieces) for field, default in ((41, 1), (42, 2)))
    settings = sidecars.settings(
        add_bos_token=bos is not None,
        bos_token=None if bos is None else pieces[bos].text,
        eos_token=None if eos is None else pieces[eos].text,
        unk_token=next((piece.text for piece in pieces if piece.type == UNKNOWN), None),
    )
    wanted = settings.get("add_prefix_space")
    prefix_space = bool(normalizer.get(3, 1) if wanted is None else wanted)
    implied = [
        # User-defined pieces are looked for after spaces were replaced, the others in the text as it is.
        Added(index, piece.text, special=piece.type != USER_DEFINED, normalized=piece.type == USER_DEFINED)
        for index, piece in enumerate(pieces)
        if piece.type in (CONTROL, UNKNOWN, USER_DEFINED)
    ]
    added = add_tokens(piece_ids([piece.text for piece in pieces]), [], sidecars, settings, room, implied)
    unigram = trainer.get(3, 1) != BPE
    scheme: Literal["first", "always"] = "always" if unigram or settings.get("legacy") else "first"
    document = None if unigram else _bpe_document(pieces, trainer, normalizer, prefix_space, added, scheme)
    if document is None:
        own = {token.id for token in added if token in implied and not token.special}
        document = library_document(pieces, trainer, normalizer, prefix_space, added, scheme, own)
    special = special_tokens(token_ids(document), sidecars, settings)
    return Vocabulary(canonical_json(document), special, data)


def library_document(
    pieces: Sequence[Piece],
    trainer: Settings,
    normalizer: Settings,
    prefix_space: bool,
    added: Sequence[Added],
    scheme: Literal["first", "always"],
    own: Collection[int],
) -> Document:
    """A vocabulary with which the library sentencepiece encodes: see `SentencePieceEncoder`, also for `own`."""
    document = _near_document(pieces, trainer, normalizer, prefix_space, added, scheme)
    kind = trainer.get(3, 1)
    document["sentencepiece"] = {
        "model": _text(_runnable(pieces, trainer, normalizer, own, prefix_space)),
        "replacements": _text(normalizer.get(2, b"")),
        "prefix": scheme,
        "found_by_model": sorted(own),
        "similar": kind in (1, BPE) and (kind == 1) == (document["model"]["type"] == "Unigram"),
    }
    import tokenizers

    with library_errors("the SentencePiece model cannot be used"):
        # the library sentencepiece checks the pieces first: tokenizers would crash on some that it refuses
        SentencePieceEncoder(document["sentencepiece"], tokenizers.Tokenizer(tokenizers.models.BPE()))
    return document


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bpe_document(
    pieces: Sequence[Piece],
    trainer: Settings,
    normalizer: Settings,
    prefix_space: bool,
    added: Sequence[Added],
    scheme: Literal["first", "always"],
) -> Document | None:
    """A tokenizer.json that encodes exactly as the BPE model does; None where there is none."""
    usual = not normalizer.get(2) and not normalizer.get(4, 1) and normalizer.get(5, 1) and not trainer.get(24, 0)
    if not usual or (prefix_space and any(piece.type == USER_DEFINED for piece in pieces)):
        return None
    try:
        document = spm_document(pieces, prefix_space=prefix_space, added=added, scheme=scheme)
    except TokenizerError:
        return None
    unused = {piece.text for piece in pieces if piece.type == UNUSED}
    if any(left + right in unused for left, right in document["model"]["merges"]):  # they are taken apart again
        return None
    return document


def _near_document(
    pieces: Sequence[Piece],
    trainer: Settings,
    normalizer: Settings,
    prefix_space: bool,
    added: Sequence[Added],
    scheme: Literal["first", "always"],
) -> Document:
    """The tokenizer.json that comes closest to a model, as transformers would have it; decoding is exact."""
    one_space, replacements = bool(normalizer.get(4, 1)), normalizer.get(2, b"")
    if trainer.get(3, 1) == BPE:
        steps = normalizer_steps(prefix_space, one_space, replacements) if one_space or replacements else ()
        with contextlib.suppress(TokenizerError):
            return spm_document(pieces, prefix_space=prefix_space, added=added, scheme=scheme, normalizer=steps)
    return unigram_document(
        [UnigramPiece(piece.text, piece.score) for piece in pieces],
        added,
        unknown=next((index for index, piece in enumerate(pieces) if piece.type == UNKNOWN), None),
        byte_fallback=any(piece.type == BYTE for piece in pieces),
        prefix_space=prefix_space,
        one_space=one_space,
        replacements=replacements,
    )


def _runnable(
    pieces: Sequence[Piece], trainer: Settings, normalizer: Settings, own: Collection[int], prefix_space: bool
) -> bytes:
    """The model for the library sentencepiece: only what encoding needs, and without the table of replacements.

    Of user-defined pieces it looks for those in `own`: the others are added tokens like any other."""
    parts = []
    for index, (text, score, kind) in enumerate(pieces):
        kind = CONTROL if kind == USER_DEFINED and index not in own else kind
        piece = protobuf_field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + protobuf_field(3, kind)
        parts.append(protobuf_field(1, piece))
    bytes_too = any(piece.type == BYTE for piece in pieces)
    for part, fields in (
        (2, {3: trainer.get(3, 1), 24: trainer.get(24, 0), 35: int(bytes_too)}),  # the kind, spaces behind words, bytes
        (3, {3: int(prefix_space), 4: normalizer.get(4, 1), 5: normalizer.get(5, 1)}),  # what becomes of spaces
    ):
        parts.append(protobuf_field(part, b"".join(protobuf_field(*field) for field in fields.items())))
    return b"".join(parts)


def looks_like_sentencepiece(data: bytes) -> bool:
    """Whether `data` begins as a SentencePiece model: with a piece (field 1) that begins with its text (field 1).

    A llama2.c tokenizer.bin begins with a length, whose high bytes are zero."""
    return len(data) > 3 and data[0] == 0x0A and data[2] == 0x0A


def _model_id(value: int, pieces: Sequence[Piece]) -> int | None:
    """An id of the trainer's settings, a 32-bit number of which -1 means none."""
    index = value & 0xFFFFFFFF
    return index if index < len(pieces) and pieces[index].type == CONTROL else None


def read_model(data: bytes) -> tuple[list[Piece], Settings, Settings]:
    """The pieces of a ModelProto, and its trainer and normalizer settings."""
    pieces: list[Piece] = []
    trainer: Settings = {}
    normalizer: Settings = {}
    for field, value in _fields(data):
        if field == 1:
            entry = _message(value, _PIECE, "a piece")
            try:
                (score,) = struct.unpack("<f", entry.get(2, b"\0\0\0\0"))
                pieces.append(Piece(entry.get(1, b"").decode("utf-8"), score, entry.get(3, NORMAL)))
            except (UnicodeDecodeError, struct.error):
                raise TokenizerError(f"tokenizer.model is damaged: piece {len(pieces)} cannot be read") from None
        elif field == 2:
            trainer |= _message(value, _TRAINER, "the trainer's settings")
        elif field == 3:
            normalizer |= _message(value, _NORMALIZER, "the normalizer's settings")
        if len(pieces) > MAX_TOKENS:
            raise TokenizerError(f"tokenizer.model has more than {MAX_TOKENS} pieces")
    if not pieces:
        raise TokenizerError("tokenizer.model is no SentencePiece model: it holds no pieces")
    for index, piece in enumerate(pieces):
        if not math.isfinite(piece.score):
            raise TokenizerError(f"tokenizer.model: the score of token {index} is {piece.score}")
    return pieces, trainer, normalizer


def _message(data: Any, types: Mapping[int, type], what: str) -> Settings:
    """The fields of a message inside another one. types: of those that are used."""
    if not isinstance(data, bytes):
        raise TokenizerError(f"tokenizer.model is damaged: {what} is no message")
    found: Settings = {}
    for field, value in _fields(data):
        if not isinstance(value, types.get(field, object)):
            raise TokenizerError(f"tokenizer.model is damaged: field {field} of {what} is of another type")
        found[field] = value
    return found


def _fields(data: bytes) -> Iterator[tuple[Any, Any]]:
    """The fields of a protocol buffer message: an int for varints, bytes for everything else."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if wire == 2:
            length, at = _varint(data, at)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise TokenizerError(f"tokenizer.model is no SentencePiece model: wire type {wire} at byte {at}")
        if length > len(data) - at:
            raise TokenizerError(f"tokenizer.model is truncated or damaged: {length} bytes at byte {at} are not there")
        yield tag >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise TokenizerError("tokenizer.model is truncated: it ends within a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise TokenizerError(f"tokenizer.model is damaged: a number before byte {at} is too long")
