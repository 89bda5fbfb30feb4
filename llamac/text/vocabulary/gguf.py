"""Reads the tokenizer of a GGUF file: SentencePiece BPE ("llama"), BPE ("gpt2", "gemma4"), unigram ("t5") or
WordPiece ("bert").

A GGUF file gives only the name of its pre-tokenizer, which splits text into words. `pre_tokenizers` defines the known
names. Unknown names and other kinds of tokenizers are errors.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

from llamac.errors import TokenizerError, UnsupportedError
from llamac.format.gguf_metadata import GGUFHead, Value, read_metadata
from llamac.text.decoding import SPACE_MARK
from llamac.text.special_tokens import SpecialTokens
from llamac.text.tokenizer_json import check_counts
from llamac.text.vocabulary.added import AddedToken, Document
from llamac.text.vocabulary.packing import pack_lines, pack_scores
from llamac.text.vocabulary.pre_tokenizers import PRE_TOKENIZERS
from llamac.text.vocabulary.spm import (
    BPE,
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Piece,
    SentencePieceModel,
    bpe_shell,
    library_document,
    piece_ids,
    spm_document,
)
from llamac.text.vocabulary.tokenizer_json import (
    Merge,
    Vocabulary,
    byte_level_document,
    canonical_json,
    raw_bpe_document,
    split_words,
    word_piece_document,
)
from llamac.text.vocabulary.unigram import UnigramPiece, unigram_document

T = TypeVar("T", bool, int, str)

# The pre-tokenizers of files that name none, by architecture.
_DEFAULT_PRE = {
    "bloom": "bloom",
    "codeshell": "codeshell",
    "command-r": "command-r",
    "falcon": "falcon",
    "gpt2": "gpt-2",
    "gptneox": "olmo",
    "mpt": "mpt",
    "olmo": "olmo",
    "phi2": "phi-2",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2",
    "refact": "refact",
    "starcoder": "starcoder",
    "starcoder2": "starcoder",
}
_PADDING = re.compile(r"\[(?:PAD|EMPTY_)\d+\]")  # placeholders for ids without a token

# Tokens that end a message or text in the models that have them. Files seldom name more than EOS.
_END_NAMES = frozenset(
    [
        "<EOT>",
        "[EOS]",
        "[EOT]",
        "[e~[",
        "_<EOT>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|call|>",
        "<|calls|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|end|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|flush|>",
        "<|im_end|>",
        "<|return|>",
        "<|tool_response>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    ]
)


class ReadAhead(NamedTuple):
    """The parts of a GGUF file that were read before the exporter reads the rest.

    Attributes:
        head: Its head.
        vocabulary: Its vocabulary, or None.
    """

    head: GGUFHead
    vocabulary: Vocabulary | None


def from_gguf(path: str | Path) -> Vocabulary:
    """Read the vocabulary of a GGUF file, which may have no weights.

    Raises:
        ModelError: If the file is damaged.
        TokenizerError: If its tokenizer is damaged.
        UnsupportedError: If its kind of tokenizer is not supported.
    """
    values = read_metadata(path).values
    try:
        return from_metadata(values)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None


def from_metadata(values: dict[str, Value]) -> Vocabulary:
    """Build the vocabulary that a GGUF file's metadata describes.

    Args:
        values: The metadata, by key.

    Raises:
        TokenizerError: If the tokenizer is missing or damaged.
        UnsupportedError: If its kind is not supported.
    """
    kind = _get(values, "model", str, None)
    if kind == "llama":
        return _spm(values)
    if kind == "gpt2":
        return _bpe(values, _get(values, "pre", str, None) or _default_pre(values))
    if kind == "gemma4":
        return _bpe(values, "gemma4")
    if kind == "t5":
        return _unigram(values)
    if kind == "bert":
        return _word_piece(values)
    if kind is None:
        raise TokenizerError("the file has no tokenizer: 'tokenizer.ggml.model' is missing")
    known = {
        "rwkv": "RWKV's",
        "plamo2": "PLaMo's",
        "hybriddna": "DNA sequences",
        "whitespace": "words between spaces",
        "none": "no vocabulary",
        "no_vocab": "no vocabulary",
    }
    raise UnsupportedError(
        f"the GGUF tokenizer '{kind}' ({known.get(kind, 'unknown')}) is not supported, only 'llama', 'gpt2', 'gemma4',"
        " 't5' and 'bert'"
    )


def _default_pre(values: dict[str, Value]) -> str:
    """The pre-tokenizer of a file that names none. Old files do not; each architecture then had only one."""
    architecture = values.get("general.architecture")
    return _DEFAULT_PRE.get(architecture, "default") if isinstance(architecture, str) else "default"


def _get(values: dict[str, Value], name: str, kind: type[T], default: T | None) -> T | None:
    value = values.get(f"tokenizer.ggml.{name}", default)
    if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise TokenizerError(f"'tokenizer.ggml.{name}' is {value!r:.40}, not of the type {kind.__name__}")
    return value


def _list(values: dict[str, Value], name: str, kind: type, count: int | None = None) -> list[Value] | None:
    items = values.get(f"tokenizer.ggml.{name}")
    if items is None:
        return None
    if not isinstance(items, list) or not set(map(type, items)) <= {kind}:
        raise TokenizerError(f"'tokenizer.ggml.{name}' is not an array of the type {kind.__name__}")
    if count is not None and len(items) != count:
        raise TokenizerError(f"'tokenizer.ggml.{name}' has {len(items)} entries for {count} tokens")
    return items


class _Table(NamedTuple):
    """The tokens with scores and types."""

    texts: list[str]
    scores: list[float]
    types: list[int]
    special: dict[int, Piece]  # the tokens whose type is not NORMAL, by id, in ascending order

    def pieces(self) -> list[Piece]:
        """All tokens."""
        return [Piece(*entry) for entry in zip(*self[:3], strict=True)]

    def notable(self, *ids: int | None) -> list[tuple[int, Piece]]:
        """The tokens that are not normal, and those with the given ids, with their ids."""
        more = {index for index in ids if index is not None}.difference(self.special)
        if not more:
            return list(self.special.items())
        found = {**self.special, **{index: self._piece(index) for index in more}}
        return sorted(found.items())

    def _piece(self, index: int) -> Piece:
        return Piece(self.texts[index], self.scores[index], self.types[index])


def _table(values: dict[str, Value]) -> _Table:
    """The tokens with scores and types. Converters fill gaps in the ids with "[PAD<id>]", which never matches text."""
    tokens = cast("list[str] | None", _list(values, "tokens", str))
    if not tokens:
        raise TokenizerError("'tokenizer.ggml.tokens' is missing or empty")
    check_counts(len(tokens), len(_list(values, "merges", str) or ()))
    scores = _list(values, "scores", float, len(tokens)) or [0.0] * len(tokens)
    types = _list(values, "token_type", int, len(tokens)) or [NORMAL] * len(tokens)
    table = _Table(list(tokens), list(cast("list[float]", scores)), list(cast("list[int]", types)), {})
    has_gaps = not all(tokens) or "[PAD" in "".join(tokens)
    for index in [index for index, text in enumerate(tokens) if text[:4] in ("", "[PAD")] if has_gaps else ():
        if not tokens[index]:
            table.texts[index], table.scores[index], table.types[index] = f"[EMPTY_{index}]", 0.0, UNUSED
        elif tokens[index] == f"[PAD{index}]":
            table.types[index] = UNUSED
    special = [index for index, kind in enumerate(table.types) if kind != NORMAL]
    table.special.update((index, table._piece(index)) for index in special)
    return table


def _token_id(values: dict[str, Value], name: str, size: int, default: int | None) -> int | None:
    token = _get(values, f"{name}_token_id", int, default)
    if token is None or 0 <= token < size:
        return token
    if token in (-1, 0xFFFFFFFF):  # both mean "none"
        return None
    raise TokenizerError(f"'tokenizer.ggml.{name}_token_id' is {token}, but there are {size} tokens")


def _special(
    values: dict[str, Value],
    table: _Table,
    bos: int | None = None,
    eos: int | None = None,
    add_bos: bool = False,
    add_eos: bool = False,
) -> SpecialTokens:
    """The rules for BOS, EOS and stop tokens. The arguments are the defaults for keys that the file does not have."""
    size, pieces = len(table.texts), table.texts
    bos = _token_id(values, "bos", size, bos)
    eos = _token_id(values, "eos", size, eos)
    stops = {eos, *(_token_id(values, name, size, None) for name in ("eot", "eom"))} - {None}
    ends = {
        index for index, piece in table.notable() if piece.text in _END_NAMES and piece.type in (CONTROL, USER_DEFINED)
    }
    names = {pieces[index] for index in ends}
    if {"<|return|>", "<|call|>"} <= names or {"<|flush|>", "<|calls|>"} <= names:
        # in these formats <|end|> ends a message, and an answer can have several
        ends = {index for index in ends if pieces[index] != "<|end|>"}
    add_bos = bool(_get(values, "add_bos_token", bool, add_bos and bos is not None))
    add_eos = bool(_get(values, "add_eos_token", bool, add_eos and eos is not None))
    return SpecialTokens(
        bos, add_bos, add_eos, eos, tuple(sorted(token for token in stops | ends if token is not None))
    )


def _added(table: _Table, special: SpecialTokens, rstrip: frozenset[str] = frozenset()) -> list[AddedToken]:
    return [
        AddedToken(
            index,
            piece.text,
            special=piece.type != USER_DEFINED or index in (special.bos_id, special.eos_id),
            rstrip=piece.text in rstrip,
            # a token written with space marks matches only after normalization has replaced the spaces
            normalized=piece.type == USER_DEFINED and SPACE_MARK in piece.text,
        )
        for index, piece in table.notable(special.bos_id, special.eos_id)
        if piece.type in (CONTROL, UNKNOWN, USER_DEFINED) or index in (special.bos_id, special.eos_id)
    ]


def _spm(values: dict[str, Value]) -> Vocabulary:
    if "tokenizer.ggml.scores" not in values:
        raise TokenizerError(
            "'tokenizer.ggml.scores' is missing: a SentencePiece vocabulary cannot encode without scores"
        )
    if _get(values, "remove_extra_whitespaces", bool, False):
        raise UnsupportedError("'tokenizer.ggml.remove_extra_whitespaces' is not supported for the tokenizer 'llama'")
    table = _table(values)
    special = _special(values, table, bos=1, eos=2, add_bos=True)
    name = values.get("general.name")
    added = _added(table, special, _phi3_rstrip(table) if isinstance(name, str) and _is_phi3(name) else frozenset())
    prefix = bool(_get(values, "add_space_prefix", bool, True))
    unknown = next((piece.text for _, piece in table.notable() if piece.type == UNKNOWN), None)

    def shell(byte_fallback: bool) -> Document:
        return bpe_shell(prefix_space=prefix, added=added, unknown=unknown, byte_fallback=byte_fallback)

    packed = pack_scores(*table[:3], unknown is not None, shell)
    if packed is not None:
        return Vocabulary(packed, special, None)
    pieces = table.pieces()
    document: Document
    try:
        document = spm_document(pieces, prefix_space=prefix, added=added)
    except TokenizerError as error:  # damaged, or not expressible as merges: the library decides which
        try:
            model = SentencePieceModel(pieces, BPE, add_dummy_prefix=prefix, remove_extra_whitespaces=False)
            document = library_document(model, added, "always", ())
        except TokenizerError:
            raise error from None
    return Vocabulary(canonical_json(document), special, None)


def _is_phi3(name: str) -> bool:
    return "phi-3" in name.lower() or "phi3" in name.lower()


def _phi3_rstrip(table: _Table) -> frozenset[str]:
    """The tokens of Phi-3 that also take the white space after them: all but three. GGUF has no field for this."""
    names = {piece.text for _, piece in table.notable() if piece.type in (CONTROL, USER_DEFINED)}
    return frozenset(names - {"<unk>", "<s>", "<|endoftext|>"})


def _bpe(values: dict[str, Value], name: str) -> Vocabulary:
    rules = PRE_TOKENIZERS.get(name)
    if rules is None:
        raise UnsupportedError(
            f"the GGUF pre-tokenizer '{name}' is unknown, and the file does not define how it splits text into words"
        )
    table = _table(values)
    special = _special(values, table, add_bos=rules.add_bos)
    added = _added(table, special)

    def document(ids: dict[str, int], merges: list[Merge]) -> Document:
        if rules.raw:
            return raw_bpe_document(ids, merges, added, rules.splits)
        words = split_words(rules.splits)
        return byte_level_document(ids, merges, added, words, nfc=rules.nfc, ignore_merges=rules.ignore_merges)

    lines = cast("list[str]", _list(values, "merges", str) or [])
    packed = pack_lines(table.texts, lines, lambda: document({}, []))
    if packed is not None:
        return Vocabulary(packed, special, None)
    ids = piece_ids(table.texts)
    return Vocabulary(canonical_json(document(ids, _merges(values, ids))), special, None)


def _unigram(values: dict[str, Value]) -> Vocabulary:
    """The tokenizer of T5 or XLM-RoBERTa, equal to the one in their own tokenizer.json files."""
    for name, supported in (("escape_whitespaces", True), ("treat_whitespace_as_suffix", False)):
        if _get(values, name, bool, supported) is not supported:
            raise UnsupportedError(f"'tokenizer.ggml.{name}' is {not supported}, which is not supported")
    if "tokenizer.ggml.scores" not in values:
        raise TokenizerError("'tokenizer.ggml.scores' is missing: a unigram vocabulary cannot encode without scores")
    table = _table(values)
    pieces = table.pieces()
    piece_ids(table.texts)
    special = _special(values, table, eos=1, add_eos=True)
    unknown = next((index for index, piece in enumerate(pieces) if piece.type == UNKNOWN), None)
    if unknown is None:
        unknown = _token_id(values, "unknown", len(pieces), 2)
    collapse_spaces = bool(_get(values, "remove_extra_whitespaces", bool, False))
    document = unigram_document(
        # no word has a space, so a placeholder with one never matches
        [
            UnigramPiece(" " + piece.text, 0.0)
            if piece.type == UNUSED and _PADDING.fullmatch(piece.text)
            else UnigramPiece(piece.text, piece.score)
            for piece in pieces
        ],
        _added(table, special),
        unknown=unknown,
        byte_fallback=any(piece.type == BYTE for piece in pieces),
        prefix_space=bool(_get(values, "add_space_prefix", bool, True)),
        collapse_spaces=collapse_spaces,
        charsmap=_charsmap(values),
        split_words=collapse_spaces,
    )
    return Vocabulary(canonical_json(document), special, None)


def _charsmap(values: dict[str, Value]) -> bytes:
    """SentencePiece's table of character replacements. GGUF stores it as an array of signed or unsigned bytes."""
    items = values.get("tokenizer.ggml.precompiled_charsmap", [])
    if not isinstance(items, list) or not all(type(item) is int and -128 <= item < 256 for item in items):
        raise TokenizerError("'tokenizer.ggml.precompiled_charsmap' is not an array of bytes")
    return bytes(item & 0xFF for item in items)  # type: ignore[operator]


def _word_piece(values: dict[str, Value]) -> Vocabulary:
    """BERT's tokenizer. GGUF puts U+2581 before pieces that begin a word; BERT puts ## before all others."""
    table = _table(values)
    pieces = table.pieces()
    texts = list(table.texts)
    for index, piece in enumerate(pieces):
        if piece.text.startswith(SPACE_MARK):
            texts[index] = piece.text[1:]
        elif piece.type not in (CONTROL, UNKNOWN, UNUSED) and not (piece.text[0] == "[" and piece.text[-1] == "]"):
            texts[index] = "##" + piece.text
    size = len(pieces)
    unknown = _token_id(values, "unknown", size, 100)
    bos = _token_id(values, "bos" if "tokenizer.ggml.bos_token_id" in values else "cls", size, 101)
    eos = _token_id(values, "seperator", size, 102)  # sic
    if unknown is None or unknown >= size:
        raise TokenizerError("there is no token for unknown words ('tokenizer.ggml.unknown_token_id')")
    add_bos = bool(_get(values, "add_bos_token", bool, bos is not None))
    add_eos = bool(_get(values, "add_eos_token", bool, eos is not None))
    special = SpecialTokens(bos, add_bos, add_eos, eos, () if eos is None else (eos,))
    lowercase = bool(_get(values, "normalizer.lowercase", bool, True))
    strip_accents = bool(_get(values, "normalizer.strip_accents", bool, lowercase))
    document = word_piece_document(
        piece_ids(texts),
        _added(table._replace(texts=texts), special),
        unknown=texts[unknown],
        lowercase=lowercase,
        strip_accents=strip_accents,
    )
    return Vocabulary(canonical_json(document), special, None)


def _merges(values: dict[str, Value], ids: dict[str, int]) -> list[Merge]:
    merges: dict[Merge, None] = {}  # ordered; the first of equal merges counts
    for index, line in enumerate(_list(values, "merges", str) or []):
        assert isinstance(line, str)
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        if cut < 0 or left not in ids or right not in ids or left + right not in ids:
            raise TokenizerError(f"merge {index} ({line!r}) does not join two tokens of the vocabulary to a third")
        merges[left, right] = None
    if not merges:
        raise TokenizerError("'tokenizer.ggml.merges' is missing or empty")
    return list(merges)
