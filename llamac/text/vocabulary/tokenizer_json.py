"""The canonical form of a vocabulary, and Hugging Face's files: tokenizer.json, and vocab.json with merges.txt.

The canonical form is a tokenizer.json whose bytes depend only on its meaning. It has no post-processor, truncation or
padding; `SpecialTokens` has the tokens that a post-processor would add.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from llamac.errors import LlamacError, TokenizerError, UnsupportedError
from llamac.text.decoding import NEVER_IN_UTF8, SPACE_MARK, WORD_PIECE_PREFIX, byte_alphabet, decode_rules
from llamac.text.encoding_cost import make_linear
from llamac.text.packed import unpack
from llamac.text.special_tokens import SpecialTokens
from llamac.text.tokenizer_json import check_structure
from llamac.text.vocabulary.added import (
    AddedToken,
    Document,
    IdLimit,
    Sidecars,
    add_tokens,
    read_added,
    special_tokens,
)
from llamac.text.vocabulary.pre_tokenizers import LINEAR, PRE_TOKENIZERS

Merge = tuple[str, str]

END_OF_TEXT = "<|endoftext|>"
# The tokenizers whose normalizer transformers makes from tokenizer_config.json, by their names and by model_type; and
# the settings with their defaults.
_BERT_CLASSES = tuple(f"{name}Tokenizer" for name in ("Bert", "DistilBert", "Electra", "MobileBert", "MPNet"))
_BERT_MODELS = ("bert", "distilbert", "electra", "mobilebert", "mpnet", "nomic_bert")
_BERT_SETTINGS = {
    "lowercase": ("do_lower_case", True),
    "strip_accents": ("strip_accents", None),
    "handle_chinese_chars": ("tokenize_chinese_chars", True),
}


class Vocabulary(NamedTuple):
    """A tokenizer in the form that a model file stores.

    Attributes:
        data: The canonical tokenizer.json, or its packed form.
        special: The rules for special tokens.
        spm: The original file with the scores of pieces, a SentencePiece model or a llama2.c tokenizer.bin; None if
            there is none. A tokenizer.json cannot represent scores.
    """

    data: bytes
    special: SpecialTokens
    spm: bytes | None

    @property
    def json(self) -> bytes:
        """The canonical tokenizer.json."""
        return unpack(self.data)


def canonical_json(document: Document) -> bytes:
    """Write a tokenizer.json in canonical form: compact, with sorted keys, the vocabulary by id, and merges as pairs.

    Raises:
        TokenizerError: If a merge is not a pair, or a string has a lone surrogate.
    """
    fixed = {"version": "1.0", "post_processor": None, "padding": None, "truncation": None}
    model = dict(document["model"])
    if "merges" in model:
        model["merges"] = [_merge(entry) for entry in model["merges"]]
    try:
        return json.dumps(
            _sorted({**document, **fixed, "model": model}), ensure_ascii=False, separators=(",", ":")
        ).encode()
    except UnicodeEncodeError:
        raise TokenizerError("the vocabulary contains a lone surrogate") from None


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
    added: Iterable[AddedToken],
    *,
    normalizer: Document | None,
    pre_tokenizer: Document | None,
    decoder: Document,
    unknown: str | None = None,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> Document:
    """Build a tokenizer.json with a BPE model.

    Args:
        vocab: The ids of the pieces.
        merges: The merges, best first.
        added: The added tokens.
        normalizer: The normalizer, or None.
        pre_tokenizer: The pre-tokenizer, or None.
        decoder: The decoder.
        unknown: The piece for unknown characters, or None.
        byte_fallback: Whether unknown characters become byte pieces.
        ignore_merges: Whether a word that is a token becomes that token regardless of the merges.
    """
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
    added: Iterable[AddedToken],
    pre_tokenizer: Document,
    *,
    nfc: bool = False,
    ignore_merges: bool = False,
) -> Document:
    """Build a tokenizer.json for byte-level BPE (`byte_alphabet`).

    Args:
        vocab: As for `bpe_document`, like all arguments that are not listed here.
        merges: The merges, best first.
        added: The added tokens.
        pre_tokenizer: The pre-tokenizer.
        nfc: Whether to compose characters first (Unicode normal form C).
        ignore_merges: As for `bpe_document`.
    """
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
    vocab: Mapping[str, int], merges: Iterable[Merge], added: Iterable[AddedToken], splits: Iterable[str]
) -> Document:
    """Build a tokenizer.json for BPE on plain text with U+2581 for spaces, and byte pieces (Gemma 4).

    Args:
        vocab: The ids of the pieces.
        merges: The merges, best first.
        added: The added tokens.
        splits: Regular expressions that split text into words, as for `split_words`.
    """
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
    vocab: Mapping[str, int], added: Iterable[AddedToken], *, unknown: str, lowercase: bool, strip_accents: bool
) -> Document:
    """Build a tokenizer.json for BERT's WordPiece.

    Args:
        vocab: The ids of the pieces.
        added: The added tokens.
        unknown: The piece for words that cannot be split into pieces.
        lowercase: Whether to convert text to lower case.
        strip_accents: Whether to remove accents.
    """
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
    """Build a pre-tokenizer that splits text with regular expressions, one after another.

    Matches and the text between them become words. Merges do not cross the boundaries of words.

    Args:
        splits: The regular expressions.
        prefix_space: Whether to put a space before the text.
    """
    return {"type": "Sequence", "pretokenizers": [*map(_split, splits), _byte_level(prefix_space)]}


def _split(regex: str) -> Document:
    return {"type": "Split", "pattern": {"Regex": LINEAR.get(regex, regex)}, "behavior": "Isolated", "invert": False}


def from_tokenizer_json(
    document: Document, sidecars: Sidecars, spm: bytes | None = None, id_limit: IdLimit | None = None
) -> Vocabulary:
    """Convert a tokenizer.json to canonical form. The vocabulary encodes exactly as the file specifies.

    Args:
        document: The parsed tokenizer.json, which is changed.
        sidecars: The files next to it, which can list added tokens and name BOS and EOS. The file's own post-processor
            alone decides which tokens are put around a text.
        spm: The SentencePiece model next to it, or None.
        id_limit: The number of ids that the language model has, if known.

    Raises:
        TokenizerError: If the file is damaged or contradicts the sidecar files.
        UnsupportedError: If the tokenizer is of an unsupported kind.
    """
    with _structure("tokenizer.json"):
        _check_model(document)
        check_structure(document)
        _set_berts_normalizer(document, sidecars)
        decode_rules(document.get("decoder"))
        settings = sidecars.settings()
        present = [read_added(entry) for entry in document.get("added_tokens") or []]
        pieces = token_ids({"model": document["model"]})
        added = add_tokens(pieces, present, sidecars, settings, id_limit, size=len(document["model"]["vocab"]))
        document["added_tokens"] = [token.document() for token in added]
        ids = token_ids(document)
        make_linear(document)
        front, back = _post_processor(document.get("post_processor"))
        known = {*ids.values()}
        wrong = [token for token in (*front, *back) if type(token) is not int or token not in known]
        if wrong:
            raise TokenizerError(f"the tokenizer puts the token {wrong[0]!r:.40} around the text, but does not have it")
        settings = {**settings, "add_bos_token": False, "add_eos_token": False}  # transformers 5 does not read them
        special = special_tokens(ids, sidecars, settings, front, back)
        return Vocabulary(canonical_json(document), special, spm)


@contextmanager
def _structure(name: str) -> Iterator[None]:
    """Convert the exceptions of JSON with an unexpected structure to a TokenizerError about `name`."""
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
    """Map every token of a tokenizer.json to its id, including added tokens.

    Raises:
        TokenizerError: If an id is invalid.
    """
    vocab = document["model"]["vocab"]
    ids = dict(vocab) if isinstance(vocab, dict) else {piece: index for index, (piece, _) in enumerate(vocab)}
    ids.update((token["content"], token["id"]) for token in document.get("added_tokens") or [])
    wrong = next((text for text, index in ids.items() if type(index) is not int or not 0 <= index < 1 << 31), None)
    if wrong is not None:
        raise TokenizerError(f"the token {wrong!r} has the id {ids[wrong]!r}")
    return ids


def _set_berts_normalizer(document: Document, sidecars: Sidecars) -> None:
    """Let tokenizer_config.json decide about case, accents and Chinese, as in transformers' classes for BERT."""
    settings, config = sidecars.tokenizer_config, sidecars.config
    kind = settings.get("tokenizer_class") or config.get("tokenizer_class")
    is_bert = str(kind).removesuffix("Fast") in _BERT_CLASSES if kind else config.get("model_type") in _BERT_MODELS
    step = document.get("normalizer")
    if is_bert and isinstance(step, dict) and step.get("type") == "BertNormalizer":
        step |= {name: settings.get(key, default) for name, (key, default) in _BERT_SETTINGS.items()}


def _post_processor(step: Document | None) -> tuple[list[int], list[int]]:
    """The tokens that a post-processor puts before and after the text."""
    front, back = _around(step) if step else ([], [])
    if len(back) > 1:
        raise UnsupportedError("the tokenizer puts more than one token after the text: not supported")
    return front, back


def _around(step: Document) -> tuple[list[int], list[int]]:
    kind = step.get("type")
    if kind == "ByteLevel":  # changes only offsets
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
    vocab: Document, merges_txt: bytes, sidecars: Sidecars, id_limit: IdLimit | None = None
) -> Vocabulary:
    """Convert a vocab.json and its merges.txt, for byte-level BPE.

    Text is split into words as in GPT-2, or as in Qwen 2 if tokenizer_config.json names its tokenizer.

    Args:
        vocab: The parsed vocab.json.
        merges_txt: The content of merges.txt.
        sidecars: The files next to them.
        id_limit: The number of ids that the language model has, if known.

    Raises:
        TokenizerError: If a file is damaged, or the vocabulary is not byte-level.
        UnsupportedError: If tokenizer_config.json names another kind of tokenizer.
    """
    with _structure("vocab.json or a file next to it"):
        token_ids({"model": {"vocab": vocab}})  # checks the ids
        _check_byte_level(vocab)
        kind = sidecars.tokenizer_config.get("tokenizer_class", "GPT2Tokenizer")
        name = str(kind).removesuffix("Fast")
        if name not in ("GPT2Tokenizer", "CodeGenTokenizer", "Qwen2Tokenizer"):
            raise UnsupportedError(
                f"a {kind} cannot be read from vocab.json and merges.txt alone: its tokenizer.json is needed"
            )
        # The files do not name GPT-2's only special token. Qwen 2 has the same token, but not as BOS.
        roles = ("eos_token", "unk_token", *(("bos_token",) if name != "Qwen2Tokenizer" else ()))
        names = dict.fromkeys(roles, END_OF_TEXT if END_OF_TEXT in vocab else None)
        settings = sidecars.settings(**names)
        added = add_tokens(vocab, [], sidecars, settings, id_limit)
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
            f"vocab.json is not a byte-level vocabulary: {len(missing)} byte symbols are missing ({missing[0]!r}, ...)"
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
