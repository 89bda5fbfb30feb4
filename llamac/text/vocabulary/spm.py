"""Reads SentencePiece models (tokenizer.model), and derives merges from the scores of pieces.

SentencePiece's BPE repeatedly joins two adjacent pieces whose concatenation is a piece: those with the highest score,
the leftmost of equals. A tokenizer.json lists ranked merges instead. `ranked_merges` converts scores to merges and
raises an error if the two would encode differently.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import heapq
import itertools
import math
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from llamac.errors import TokenizerError
from llamac.text.decoding import SPACE_MARK
from llamac.text.sentencepiece_text import SentencePieceEncoder, protobuf_field
from llamac.text.tokenizer_json import MAX_TOKENS, library_errors
from llamac.text.vocabulary.added import AddedToken, Document, IdLimit, Sidecars, add_tokens, special_tokens
from llamac.text.vocabulary.tokenizer_json import Merge, Vocabulary, bpe_document, canonical_json, token_ids
from llamac.text.vocabulary.unigram import UnigramPiece, normalizer_steps, unigram_document

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # piece types, in SentencePiece and in GGUF

MAX_PIECE = 1024  # characters; the longest in known vocabularies has 128
MAX_MERGED = 1 << 25  # characters of all merges; Gemma 3 has 6 million
MAX_TIES = 1 << 20  # pairs, and characters, with equal scores; bounds the work of checking them

UNIGRAM, BPE = 1, 2  # kinds of SentencePiece models

# Field numbers and types in the messages of a ModelProto. All other fields are ignored.
_PIECE = {1: bytes, 2: bytes, 3: int}  # piece, score, type
_TRAINER = {3: int, 24: int, 41: int, 42: int}  # model_type, treat_whitespace_as_suffix, bos_id, eos_id
# precompiled_charsmap, add_dummy_prefix, remove_extra_whitespaces, escape_whitespaces
_NORMALIZER = {2: bytes, 3: int, 4: int, 5: int}

BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]

# Which texts get a space in front: the first only, or also every text after an added token.
PrependScheme = Literal["first", "always"]


# ---- merges from scores


def ranked_merges(scores: Mapping[str, float], pieces: Mapping[str, int], text_merges: bool = True) -> list[Merge]:
    """List all merges that result in a piece of `scores`, best first.

    Every split of a piece into two other pieces is a merge with that piece's score. Among equal scores, the longer left
    half comes first.

    Args:
        scores: The scores of the pieces that merges can form.
        pieces: The ids of all pieces.
        text_merges: Whether the encoder joins any strings whose concatenation is a piece, as SentencePiece does, even
            if one of them is a single character that is not a piece. Merges cannot express that.

    Raises:
        TokenizerError: If no ranking of merges encodes as the scores do.
    """
    merges: list[Merge] = []
    characters = 0
    for piece in scores:
        if len(piece) > MAX_PIECE:
            raise TokenizerError(
                f"a piece of {len(piece)} characters ({piece[:20]!r}...) is too long: the limit is {MAX_PIECE}"
            )
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                merges.append((left, right))
                characters += len(piece)
            elif text_merges and (cut == 1 or left in pieces) and (cut == len(piece) - 1 or right in pieces):
                lone = left if left not in pieces else right
                raise TokenizerError(
                    f"the piece {piece!r} is joined from {lone!r}, which is not a piece: merges cannot express this"
                )
        if characters > MAX_MERGED:
            raise TokenizerError(f"the vocabulary has too many merges: their limit is {MAX_MERGED} characters in total")
    merges.sort(key=lambda merge: (-scores[merge[0] + merge[1]], -len(merge[0]), pieces[merge[0] + merge[1]]))
    ranks = {merge: rank for rank, merge in enumerate(merges)}
    check_ties(
        _rivals(merges, scores),
        lambda left, right: -scores[left + right] if left + right in scores else None,
        lambda left, right: ranks.get((left, right)),
    )
    return merges


# The cost of joining two strings, or None if they cannot be joined.
Cost = Callable[[str, str], float | None]


def check_ties(rivals: Iterable[tuple[str, str, str]], by_score: Cost, by_rank: Cost) -> None:
    """Check that ranked merges encode as the leftmost rule does where scores are equal.

    The two can differ if (x, y) and (y, z) have equal scores, (y, z) ranks first, and the text contains x + y + z. Runs
    of one character ("----") have many such pairs but rarely a difference, so these texts are encoded both ways.

    Args:
        rivals: All such (x, y, z).
        by_score: The cost of a merge by its score.
        by_rank: The cost of a merge by its rank.

    Raises:
        TokenizerError: If a text is encoded differently.
    """
    texts: set[str] = set()
    runs: dict[str, int] = {}  # the repeated string: its largest number of repetitions
    for count, (x, y, z) in enumerate(rivals):
        if count > MAX_TIES:
            raise TokenizerError("too many pieces have equal scores")
        texts.add(x + y + z)
        unit = _unit(x + y)
        if unit == _unit(y + z):  # a run: check every length up to twice the longest
            runs[unit] = max(runs.get(unit, 0), 2 * len(x + y + z) // len(unit))
    if sum(len(unit) * most * most // 2 for unit, most in runs.items()) > MAX_TIES:
        raise TokenizerError("pieces repeat the same characters too often, with equal scores")
    texts.update(unit * repeats for unit, most in runs.items() for repeats in range(2, most))
    by_score, by_rank = functools.cache(by_score), functools.cache(by_rank)  # runs repeat the same few pairs
    for text in texts:
        if _merge_all(text, by_score) != _merge_all(text, by_rank):
            raise TokenizerError(
                f"pieces with equal scores make the encoding of {text!r} depend on position: merges cannot express this"
            )


def _rivals(merges: Sequence[Merge], scores: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
    """All (x, y, z) for which (x, y) and (y, z) are merges of equal scores, and (y, z) ranks first."""
    for _, group in itertools.groupby(merges, lambda merge: scores[merge[0] + merge[1]]):
        rights: dict[str, list[str]] = {}  # y: every z of an earlier merge (y, z)
        for left, right in group:
            for last in rights.get(right, ()):
                yield left, right, last
            rights.setdefault(left, []).append(right)


def _unit(text: str) -> str:
    """The shortest string whose repetition is `text`."""
    return text[: (text + text).find(text, 1)]


def _merge_all(text: str, cost: Cost) -> list[str]:
    """Join adjacent characters and parts of `text`: the cheapest pair first, the leftmost of equals.

    Args:
        text: The text.
        cost: The cost of joining two strings, or None if they cannot be joined.
    """
    parts: list[str] = list(text)  # a part that was joined to its left neighbor becomes empty
    previous, following = list(range(-1, len(parts) - 1)), list(range(1, len(parts) + 1))
    queue: list[tuple[float, int, str, str]] = []

    def push(index: int) -> None:
        """Queue the pair of part `index` and the next one, if it has a cost."""
        if index >= 0 and following[index] < len(parts):
            left, right = parts[index], parts[following[index]]
            pair_cost = cost(left, right)
            if pair_cost is not None:
                heapq.heappush(queue, (pair_cost, index, left, right))

    for index in range(len(parts)):
        push(index)
    while queue:
        _, index, left, right = heapq.heappop(queue)
        joined = following[index]
        if parts[index] != left or joined == len(parts) or parts[joined] != right:  # one part has changed since
            continue
        parts[index], parts[joined] = left + right, ""
        following[index] = following[joined]
        if following[index] < len(parts):
            previous[following[index]] = index
        push(previous[index])
        push(index)
    return [part for part in parts if part]


# ---- the canonical form of SentencePiece BPE


class Piece(NamedTuple):
    """An entry of a SentencePiece vocabulary. Its id is its index."""

    text: str
    score: float
    type: int


def spm_document(
    pieces: Sequence[Piece],
    *,
    prefix_space: bool,
    added: Sequence[AddedToken],
    space: str = SPACE_MARK,
    text_merges: bool = True,
    scheme: PrependScheme | None = None,
    normalizer: Sequence[Document] = (),
) -> Document:
    """Build a tokenizer.json that encodes as SentencePiece BPE with these pieces does.

    Args:
        pieces: The vocabulary.
        prefix_space: Whether to put a space before the text.
        added: The added tokens.
        space: How pieces write a space.
        text_merges: As for `ranked_merges`.
        scheme: Which texts get the space. It is added after the search for added tokens. None: all texts, before the
            search for `normalized` added tokens.
        normalizer: Normalizer steps to use instead of those that the other arguments imply.

    Raises:
        TokenizerError: If the vocabulary is damaged, or no merges encode as its scores do.
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
            f"the vocabulary has {present} of the 256 byte pieces <0x00> to <0xFF>, expected all or none"
        )
    if not present and unknown is None:
        raise TokenizerError("the vocabulary has neither byte pieces nor a piece for unknown characters")
    return bpe_shell(
        prefix_space=prefix_space,
        added=added,
        unknown=unknown,
        byte_fallback=present == 256,
        space=space,
        scheme=scheme,
        normalizer=normalizer,
        vocab=ids,
        merges=ranked_merges(scores, ids, text_merges),
    )


def bpe_shell(
    *,
    prefix_space: bool,
    added: Sequence[AddedToken],
    unknown: str | None,
    byte_fallback: bool,
    space: str = SPACE_MARK,
    scheme: PrependScheme | None = None,
    normalizer: Sequence[Document] = (),
    vocab: Mapping[str, int] | None = None,
    merges: Iterable[Merge] = (),
) -> Document:
    """Build the tokenizer.json of `spm_document` from a vocabulary and merges that have been checked.

    Args:
        prefix_space: As for `spm_document`, like all arguments that are not listed here.
        added: The added tokens.
        unknown: The piece for unknown characters.
        byte_fallback: Whether there are byte pieces.
        space: How pieces write a space.
        scheme: Which texts get the space.
        normalizer: Normalizer steps to use instead.
        vocab: The ids of the pieces.
        merges: The merges, best first.
    """
    scheme = None if normalizer else scheme
    steps: list[Document] = [{"type": "Prepend", "prepend": space}] if prefix_space and scheme is None else []
    decoders: list[Document] = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if space != " ":
        steps.append({"type": "Replace", "pattern": {"String": " "}, "content": space})
        decoders.insert(0, {"type": "Replace", "pattern": {"String": space}, "content": " "})
    if prefix_space:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    by_words = prefix_space and scheme is not None
    return bpe_document(
        vocab or {},
        merges,
        added,
        normalizer=None if by_words else {"type": "Sequence", "normalizers": [*normalizer] or steps},
        pre_tokenizer=_prefixing(space, scheme) if by_words and scheme is not None else None,
        decoder={"type": "Sequence", "decoders": decoders},
        unknown=unknown,
        byte_fallback=byte_fallback,
    )


def _prefixing(space: str, scheme: str) -> Document:
    """A pre-tokenizer that writes spaces as `space` and puts one before the text.

    SentencePiece does so even if the text begins with a space, but a Metaspace step does not. So the first step
    replaces the text's own spaces, the second prepends a plain space, and the third replaces that one.
    """
    steps = ((space, "never"), (" ", scheme), (space, "never"))
    return {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Metaspace", "replacement": mark, "prepend_scheme": prepend, "split": False}
            for mark, prepend in steps
        ],
    }


def piece_ids(texts: Sequence[str]) -> dict[str, int]:
    """Map the strings of tokens to their ids.

    Raises:
        TokenizerError: If a string is empty or two tokens have the same one.
    """
    ids: dict[str, int] = {}
    for index, text in enumerate(texts):
        if not text or text in ids:
            raise TokenizerError(
                f"tokens {ids[text]} and {index} are both {text!r}" if text else f"token {index} is empty"
            )
        ids[text] = index
    return ids


# ---- SentencePiece's tokenizer.model, a serialized ModelProto


class SentencePieceModel(NamedTuple):
    """What encoding needs of a SentencePiece model. Fields have the names and defaults of SentencePiece.

    Attributes:
        pieces: The vocabulary.
        model_type: UNIGRAM, BPE or another kind.
        bos_id: The id of BOS, or None.
        eos_id: The id of EOS, or None.
        treat_whitespace_as_suffix: Whether words end with U+2581 instead of beginning with it.
        precompiled_charsmap: The table of character replacements; empty for none.
        add_dummy_prefix: Whether to put a space before the text.
        remove_extra_whitespaces: Whether to collapse runs of spaces, and remove them at both ends.
        escape_whitespaces: Whether to replace spaces with U+2581.
    """

    pieces: Sequence[Piece]
    model_type: int = UNIGRAM
    bos_id: int | None = None
    eos_id: int | None = None
    treat_whitespace_as_suffix: bool = False
    precompiled_charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True


def from_sentencepiece(data: bytes, sidecars: Sidecars, id_limit: IdLimit | None = None) -> Vocabulary:
    """Read a SentencePiece model. The vocabulary encodes as the library sentencepiece does.

    A text gets BOS unless tokenizer_config.json says otherwise. A text after an added token gets a space in front only
    if that file sets `legacy` or the model is a unigram model.

    Args:
        data: The content of a tokenizer.model.
        sidecars: The files next to it, which list added tokens.
        id_limit: The number of ids that the language model has, if known.

    Raises:
        TokenizerError: If the model or a sidecar file is damaged.
    """
    model = read_model(data)
    pieces, bos, eos = model.pieces, model.bos_id, model.eos_id
    settings = sidecars.settings(
        add_bos_token=bos is not None,
        bos_token=None if bos is None else pieces[bos].text,
        eos_token=None if eos is None else pieces[eos].text,
        unk_token=next((piece.text for piece in pieces if piece.type == UNKNOWN), None),
    )
    if settings.get("add_prefix_space") is not None:
        model = model._replace(add_dummy_prefix=bool(settings["add_prefix_space"]))
    implied = [
        # User-defined pieces match after spaces have been replaced, the others match the original text.
        AddedToken(index, piece.text, special=piece.type != USER_DEFINED, normalized=piece.type == USER_DEFINED)
        for index, piece in enumerate(pieces)
        if piece.type in (CONTROL, UNKNOWN, USER_DEFINED)
    ]
    added = add_tokens(piece_ids([piece.text for piece in pieces]), [], sidecars, settings, id_limit, implied)
    scheme: PrependScheme = "always" if model.model_type != BPE or settings.get("legacy") else "first"
    document = _bpe_document(model, added, scheme)
    if document is None:
        found_by_model = {token.id for token in added if token in implied and not token.special}
        document = library_document(model, added, scheme, found_by_model)
    special = special_tokens(token_ids(document), sidecars, settings)
    return Vocabulary(canonical_json(document), special, data)


def library_document(
    model: SentencePieceModel, added: Sequence[AddedToken], scheme: PrependScheme, found_by_model: Collection[int]
) -> Document:
    """Build a vocabulary that the library sentencepiece encodes with (`SentencePieceEncoder`).

    Args:
        model: The model.
        added: The added tokens.
        scheme: Which texts get the space that `add_dummy_prefix` asks for.
        found_by_model: The ids of the added tokens that the model itself finds in text.

    Raises:
        TokenizerError: If the library rejects the model.
    """
    document = _approximate_document(model, added, scheme)
    is_unigram = document["model"]["type"] == "Unigram"
    document["sentencepiece"] = {
        "model": _base64(_encoding_model(model, found_by_model)),
        "replacements": _base64(model.precompiled_charsmap),
        "prefix": scheme,
        "found_by_model": sorted(found_by_model),
        "similar": model.model_type == (UNIGRAM if is_unigram else BPE),
    }
    import tokenizers

    with library_errors("the SentencePiece model cannot be used"):
        # the library sentencepiece checks the pieces first: tokenizers would crash on some that it rejects
        library = tokenizers.Tokenizer(tokenizers.models.BPE())
        SentencePieceEncoder(document["sentencepiece"], library, len(model.pieces))
    return document


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bpe_document(model: SentencePieceModel, added: Sequence[AddedToken], scheme: PrependScheme) -> Document | None:
    """A tokenizer.json that encodes exactly as the model does, or None if there is none."""
    if (
        model.model_type != BPE
        or model.treat_whitespace_as_suffix
        or model.precompiled_charsmap
        or model.remove_extra_whitespaces
        or not model.escape_whitespaces
        or (model.add_dummy_prefix and any(piece.type == USER_DEFINED for piece in model.pieces))
    ):
        return None
    try:
        document = spm_document(model.pieces, prefix_space=model.add_dummy_prefix, added=added, scheme=scheme)
    except TokenizerError:
        return None
    unused = {piece.text for piece in model.pieces if piece.type == UNUSED}
    if any(left + right in unused for left, right in document["model"]["merges"]):  # sentencepiece splits them again
        return None
    return document


def _approximate_document(model: SentencePieceModel, added: Sequence[AddedToken], scheme: PrependScheme) -> Document:
    """The tokenizer.json that transformers would make for a model. It decodes exactly, but may encode differently."""
    prefix_space, collapse_spaces = model.add_dummy_prefix, model.remove_extra_whitespaces
    charsmap = model.precompiled_charsmap
    if model.model_type == BPE:
        steps = normalizer_steps(prefix_space, collapse_spaces, charsmap) if collapse_spaces or charsmap else ()
        with contextlib.suppress(TokenizerError):
            return spm_document(model.pieces, prefix_space=prefix_space, added=added, scheme=scheme, normalizer=steps)
    return unigram_document(
        [UnigramPiece(piece.text, piece.score) for piece in model.pieces],
        added,
        unknown=next((index for index, piece in enumerate(model.pieces) if piece.type == UNKNOWN), None),
        byte_fallback=any(piece.type == BYTE for piece in model.pieces),
        prefix_space=prefix_space,
        collapse_spaces=collapse_spaces,
        charsmap=charsmap,
    )


def _encoding_model(model: SentencePieceModel, found_by_model: Collection[int]) -> bytes:
    """A ModelProto with only what encoding needs, without the table of character replacements.

    User-defined pieces outside `found_by_model` become control pieces, which the model does not look for: they are
    ordinary added tokens.
    """
    parts = []
    for index, (text, score, kind) in enumerate(model.pieces):
        kind = CONTROL if kind == USER_DEFINED and index not in found_by_model else kind
        piece = protobuf_field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + protobuf_field(3, kind)
        parts.append(protobuf_field(1, piece))
    byte_fallback = any(piece.type == BYTE for piece in model.pieces)
    trainer = {3: model.model_type, 24: int(model.treat_whitespace_as_suffix), 35: int(byte_fallback)}
    normalizer = {
        3: int(model.add_dummy_prefix),
        4: int(model.remove_extra_whitespaces),
        5: int(model.escape_whitespaces),
    }
    for number, message in ((2, trainer), (3, normalizer)):
        parts.append(protobuf_field(number, b"".join(protobuf_field(*field) for field in message.items())))
    return b"".join(parts)


def looks_like_sentencepiece(data: bytes) -> bool:
    """Whether `data` begins like a SentencePiece model: with a piece (field 1) that begins with its text (field 1).

    A llama2.c tokenizer.bin begins with a length, whose high bytes are zero.
    """
    return len(data) > 3 and data[0] == 0x0A and data[2] == 0x0A


def _control_id(value: int, pieces: Sequence[Piece]) -> int | None:
    """The id of a control piece from a 32-bit field, in which -1 means none."""
    index = value & 0xFFFFFFFF
    return index if index < len(pieces) and pieces[index].type == CONTROL else None


def read_model(data: bytes) -> SentencePieceModel:
    """Parse a ModelProto.

    Raises:
        TokenizerError: If it is damaged.
    """
    pieces: list[Piece] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
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
        raise TokenizerError("tokenizer.model is not a SentencePiece model: it has no pieces")
    for index, piece in enumerate(pieces):
        if not math.isfinite(piece.score):
            raise TokenizerError(f"tokenizer.model: the score of token {index} is {piece.score}")
    return SentencePieceModel(
        pieces,
        model_type=trainer.get(3, UNIGRAM),
        bos_id=_control_id(trainer.get(41, 1), pieces),
        eos_id=_control_id(trainer.get(42, 2), pieces),
        treat_whitespace_as_suffix=bool(trainer.get(24, 0)),
        precompiled_charsmap=normalizer.get(2, b""),
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
        escape_whitespaces=bool(normalizer.get(5, 1)),
    )


def _message(data: Any, types: Mapping[int, type], what: str) -> dict[int, Any]:
    """The fields of an embedded message, by number. The types of those in `types` are checked."""
    if not isinstance(data, bytes):
        raise TokenizerError(f"tokenizer.model is damaged: {what} is not a message")
    found: dict[int, Any] = {}
    for field, value in _fields(data):
        if not isinstance(value, types.get(field, object)):
            raise TokenizerError(f"tokenizer.model is damaged: field {field} of {what} has the wrong type")
        found[field] = value
    return found


def _fields(data: bytes) -> Iterator[tuple[Any, Any]]:
    """The (number, value) pairs of a protocol buffer message: varints as int, everything else as bytes."""
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
            raise TokenizerError(f"tokenizer.model is not a SentencePiece model: wire type {wire} at byte {at}")
        if length > len(data) - at:
            raise TokenizerError(f"tokenizer.model is truncated or damaged: {length} bytes at byte {at} are missing")
        yield tag >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise TokenizerError("tokenizer.model is truncated in the middle of a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise TokenizerError(f"tokenizer.model is damaged: a number before byte {at} is too long")
