"""The canonical form of a vocabulary, and the files Hugging Face keeps it in: tokenizer.json, vocab.json + merges.txt.

Canonical is a tokenizer.json whose bytes depend on nothing but its meaning, without post-processor, truncation and
padding: what those would add is in `SpecialTokens`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from llamac.errors import LlamacError, TokenizerError, UnsupportedError
from llamac.text.decoding import NEVER_IN_UTF8, SPACE_MARK, WORD_PIECE_PREFIX, byte_alphabet, decode_rules
from llamac.text.encoding_cost import make_linear
from llamac.text.special_tokens import SpecialTokens
from llamac.text.tokenizer_json import check_structure
from llamac.text.vocabulary.added import (
    Added,
    Document,
    Room,
    Sidecars,
    add_tokens,
    read_added,
    special_tokens,
)
from llamac.text.vocabulary.pre_tokenizers import LINEAR, PRE_TOKENIZERS

Merge = tuple[str, str]

END_OF_TEXT = "<|endoftext|>"


class Vocabulary(NamedTuple):
    """A tokenizer ready for a model file. `spm` is the original file that scores its pieces (a SentencePiece model or a
    llama2.c tokenizer.bin), where there is one: tokenizer.json has no place for scores."""

    json: bytes
    special: SpecialTokens
    spm: bytes | None


def canonical_json(document: Document) -> bytes:
    """The bytes of `document`, a tokenizer.json: compact, keys sorted, the vocabulary by id, merges as pairs."""
    fixed = {"version": "1.0", "post_processor": None, "padding": None, "truncation": None}
    model = dict(document["model"])
    if "merges" in model:
        model["merges"] = [_merge(entry) for entry in model["merges"]]
    try:
        return json.dumps(
            _sorted({**document, **fixed, "model": model}), ensure_ascii=False, separators=(",", ":")
        ).encode()
    except UnicodeEncodeError:
        raise TokenizerError("the vocabulary holds a lone surrogate, which is no character") from None


def _merge(entry: object) -> Sequence[str]:
    if isinstance(entry, tuple):  # a Merge, made by one of the readers
        return entry
    pair = entry.split(" ") if isinstance(entry, str) else entry
    if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(half, str) for half in pair):
        raise TokenizerError(f"the merge {entry!r} does not consist of two pieces")
    return pair


def _sorted(node: Any, key: str = "") -> Any:
    if isinstance(node, dict):
        by_id = key == "vocab" and all(isinstance(value, int) for value in node.values())
        items = sorted(node.items(), key=(lambda item: (item[1], item[0])) if by_id else None)
        return {name: _sorted(value, name) for name, value in items}
    if isinstance(node, list) and key != "merges":
        return [_sorted(value) for value in node]
    return node


def bpe_document(
    vocab: Mapping[str, int],
    merges: Iterable[Merge],
    added: Iterable[Added],
    *,
    normalizer: Document | None,
    pre_tokenizer: Document | None,
    decoder: Document,
    unknown: str | None = None,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> Document:
    """A tokenizer.json with a BPE model. `unknown` is the piece for characters that have none, or None."""
    return {
        "added_tokens": [token.document() for token in sorted(added)],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": byte_fallback,
            "ignore_merges": ignore_merges,
            "vocab": dict(vocab),
            "merges": list(merges),
        },
    }


def byte_level_document(
    vocab: Mapping[str, int],
    merges: Iterable[Merge],
    added: Iterable[Added],
    pre_tokenizer: Document,
    *,
    nfc: bool = False,
    ignore_merges: bool = False,
) -> Document:
    """A tokenizer.json for byte-level BPE (`byte_alphabet`); `nfc` composes characters first."""
    return bpe_document(
        vocab,
        merges,
        added,
        normalizer={"type": "NFC"} if nfc else None,
        pre_tokenizer=pre_tokenizer,
        decoder=_byte_level(),
        ignore_merges=ignore_merges,
    )


def raw_bpe_document(
    vocab: Mapping[str, int], merges: Iterable[Merge], added: Iterable[Added], splits: Iterable[str]
) -> Document:
    """A tokenizer.json for BPE on text that is cut by `splits`, with U+2581 for spaces and byte pieces (Gemma 4)."""
    return bpe_document(
        vocab,
        merges,
        added,
        normalizer={"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK},
        pre_tokenizer={"type": "Sequence", "pretokenizers": [_split(split) for split in splits]},
        decoder={
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        byte_fallback=True,
    )


def word_piece_document(
    vocab: Mapping[str, int], added: Iterable[Added], *, unknown: str, lowercase: bool, strip_accents: bool
) -> Document:
    """A tokenizer.json for BERT's WordPiece; `unknown` is the piece for words that are not made of pieces."""
    return {
        "added_tokens": [token.document() for token in sorted(added)],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": strip_accents,
            "lowercase": lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": WORD_PIECE_PREFIX, "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": unknown,
            "continuing_subword_prefix": WORD_PIECE_PREFIX,
            "max_input_chars_per_word": 100,
            "vocab": dict(vocab),
        },
    }


def _byte_level(prefix_space: bool = False, use_regex: bool = False) -> Document:
    return {"type": "ByteLevel", "add_prefix_space": prefix_space, "trim_offsets": True, "use_regex": use_regex}


def split_words(splits: Iterable[str], prefix_space: bool = False) -> Document:
    """The pre-tokenizer that cuts the text by each regular expression in turn.

    Matches and what lies between them are words; no merge reaches over the edge of a word."""
    return {"type": "Sequence", "pretokenizers": [*map(_split, splits), _byte_level(prefix_space)]}


def _split(regex: str) -> Document:
    return {"type": "Split", "pattern": {"Regex": LINEAR.get(regex, regex)}, "behavior": "Isolated", "invert": False}


def from_tokenizer_json(
    document: Document, sidecars: Sidecars, spm: bytes | None = None, room: Room | None = None
) -> Vocabulary:
    """The vocabulary of the tokenizer.json `document`, encoding exactly as that file says.

    More added tokens, BOS and EOS come from `sidecars`; BOS and EOS from the file's own post-processor where those say
    nothing.
    """
    with _structure("tokenizer.json"):
        _check_model(document)
        check_structure(document)
        decode_rules(document.get("decoder"))
        settings = sidecars.settings()
        present = [read_added(entry) for entry in document.get("added_tokens") or []]
        pieces = token_ids({"model": document["model"]})
        added = add_tokens(pieces, present, sidecars, settings, room, size=len(document["model"]["vocab"]))
        document["added_tokens"] = [token.document() for token in added]
        ids = token_ids(document)
        make_linear(document)
        front, back = _post_processor(document.get("post_processor"))
        known = {*ids.values(), None}
        wrong = [token for token in (front, back) if type(token) not in (int, type(None)) or token not in known]
        if wrong:
            raise TokenizerError(f"the tokenizer puts the token {wrong[0]!r:.40} around a text, which it does not have")
        special = special_tokens(ids, sidecars, settings, front, back)
        return Vocabulary(canonical_json(document), special, spm)


@contextmanager
def _structure(name: str) -> Iterator[None]:
    """What goes wrong when JSON does not have the expected structure, as a TokenizerError about `name`."""
    try:
        yield
    except LlamacError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{name} is damaged: {type(error).__name__}: {error}") from None


def _check_model(document: Document) -> None:
    kind = document["model"].get("type", "BPE")
    if kind not in ("BPE", "Unigram", "WordPiece", "WordLevel"):
        raise UnsupportedError(f"a {kind} tokenizer is not supported, only BPE, Unigram, WordPiece and WordLevel")
    if document["model"].get("dropout"):
        raise UnsupportedError("a tokenizer with dropout encodes at random, which is not supported")


def token_ids(document: Document) -> dict[str, int]:
    """Every token of a tokenizer.json, added ones included, with its id."""
    vocab = document["model"]["vocab"]
    ids = dict(vocab) if isinstance(vocab, dict) else {piece: index for index, (piece, _) in enumerate(vocab)}
    ids.update((token["content"], token["id"]) for token in document.get("added_tokens") or [])
    wrong = next((text for text, index in ids.items() if type(index) is not int or not 0 <= index < 1 << 31), None)
    if wrong is not None:
        raise TokenizerError(f"the token {wrong!r} has the id {ids[wrong]!r}")
    return ids


def _post_processor(step: Document | None) -> tuple[int | None, int | None]:
    """The tokens that a post-processor puts in front of and behind a text."""
    fronts, backs = _around(step) if step else ([], [])
    if len(fronts) > 1 or len(backs) > 1:
        raise UnsupportedError("the tokenizer puts more than one token in front of or behind a text: not supported")
    return next(iter(fronts), None), next(iter(backs), None)


def _around(step: Document) -> tuple[list[int], list[int]]:
    kind = step.get("type")
    if kind == "ByteLevel":  # moves offsets only
        return [], []
    if kind in ("BertProcessing", "RobertaProcessing"):
        return [step["cls"][1]], [step["sep"][1]]
    if kind == "TemplateProcessing":
        return _template(step)
    if kind != "Sequence":
        raise UnsupportedError(f"the tokenizer's post-processor {kind} is not supported")
    fronts: list[int] = []
    backs: list[int] = []
    for inner in step["processors"]:
        front, back = _around(inner)
        fronts = front + fronts
        backs = backs + back
    return fronts, backs


def _template(step: Document) -> tuple[list[int], list[int]]:
    fronts: list[int] = []
    backs: list[int] = []
    side = fronts
    for part in step["single"]:
        if "Sequence" in part:
            side = backs
        else:
            side += step["special_tokens"][part["SpecialToken"]["id"]]["ids"]
    return fronts, backs


def from_vocab_and_merges(
    vocab: Document, merges_txt: bytes, sidecars: Sidecars, room: Room | None = None
) -> Vocabulary:
    """The vocabulary of a vocab.json and the merges.txt beside it: byte-level BPE, with GPT-2's way to cut words unless
    tokenizer_config.json names Qwen 2's tokenizer."""
    with _structure("vocab.json or a file beside it"):
        token_ids({"model": {"vocab": vocab}})  # checks the ids
        _check_byte_level(vocab)
        kind = sidecars.tokenizer_config.get("tokenizer_class", "GPT2Tokenizer")
        name = str(kind).removesuffix("Fast")
        if name not in ("GPT2Tokenizer", "CodeGenTokenizer", "Qwen2Tokenizer"):
            raise UnsupportedError(
                f"vocab.json and merges.txt of a {kind} are not enough, its tokenizer.json is needed"
            )
        # The files leave out the name of the one special token of GPT-2; that of Qwen 2 begins no text.
        roles = ("eos_token", "unk_token", *(("bos_token",) if name != "Qwen2Tokenizer" else ()))
        names = dict.fromkeys(roles, END_OF_TEXT if END_OF_TEXT in vocab else None)
        settings = sidecars.settings(**names)
        added = add_tokens(vocab, [], sidecars, settings, room)
        prefix_space = bool(settings.get("add_prefix_space"))
        merges = _read_merges(merges_txt, vocab)
        if name == "Qwen2Tokenizer":
            rules = PRE_TOKENIZERS["qwen2"]
            document = byte_level_document(vocab, merges, added, split_words(rules.splits, prefix_space), nfc=rules.nfc)
        else:
            document = byte_level_document(vocab, merges, added, _byte_level(prefix_space, use_regex=True))
        special = special_tokens(token_ids(document), sidecars, settings)
        return Vocabulary(canonical_json(document), special, None)


def _check_byte_level(vocab: Mapping[str, int]) -> None:
    missing = [char for char, byte in byte_alphabet().items() if char not in vocab and byte not in NEVER_IN_UTF8]
    if missing:
        raise TokenizerError(
            f"vocab.json is no byte-level vocabulary: {len(missing)} byte symbols are missing ({missing[0]!r}, ...)"
        )


def _read_merges(data: bytes, vocab: Mapping[str, int]) -> list[Merge]:
    try:
        lines = data.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"merges.txt is not valid UTF-8: {error.reason} at byte {error.start}") from None
    merges: list[Merge] = []
    for number, line in enumerate(lines, 1):
        line = line.rstrip("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise TokenizerError(
                f"merges.txt, line {number}: {line!r} does not join two tokens of vocab.json to a third"
            )
        merges.append((left, right))
    return merges
