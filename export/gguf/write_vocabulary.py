"""Expresses a tokenizer in GGUF metadata: "llama" for SentencePiece, "gpt2" with a named pre-tokenizer for others.

The metadata are read back and must encode the same as the tokenizer: strings made of the whole vocabulary, and
difficult ones. A tokenizer that GGUF's names cannot express is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llamac.errors import LlamacError, UnsupportedError
from llamac.export.checkpoint import Checkpoint
from llamac.export.gguf.write_keys import add_keys
from llamac.text.decoding import SPACE_MARK
from llamac.text.packed import is_packed, rest_of
from llamac.text.special_tokens import SpecialTokens
from llamac.text.template_files import GGUF_TOKENS, TOKENS, texts_of
from llamac.text.tokenizer import Tokenizer
from llamac.text.vocabulary.added import NAMES as TOKEN_NAMES
from llamac.text.vocabulary.canonical import read_canonical
from llamac.text.vocabulary.gguf import from_metadata
from llamac.text.vocabulary.pre_tokenizers import LINEAR, PRE_TOKENIZERS
from llamac.text.vocabulary.spm import (
    BYTE,
    BYTE_PIECES,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    looks_like_sentencepiece,
    read_model,
)
from llamac.text.vocabulary.tokenizer_json import Vocabulary, token_ids

Json = dict[str, Any]
NONE = 0xFFFFFFFF
SAMPLES = 4096
HARD_TEXTS = (
    "Hello, world! It's 12345 o'clock;  WE'LL see...\n\n\tIndented\r\n   \n x",
    "na\u00efve \u00dcber \u65e5\u672c\u8a9e \uc548\ub155 \u0645\u0631\u062d\u0628\u0627 e\u0301 \u00a0\u3000.",
    "\U0001f600\u200d\U0001f680 \U0001f1e9\U0001f1ea",
    "def f(x):\n    return x**2 // 3  # 0x1F == 31\n",
    " a  b   c    d     e\n\n\n  f \t\t g",
    "100,000.50 \u20ac \u2014 \u00bd \u00b2 \u2167",
)


def add_tokenizer(writer: Any, checkpoint: Checkpoint, warnings: list[str]) -> None:
    """Add the checkpoint's tokenizer to a GGUF file.

    Args:
        writer: A `gguf.GGUFWriter`.
        checkpoint: The model.
        warnings: Gets messages about rules that GGUF cannot express.

    Raises:
        UnsupportedError: If GGUF cannot express the tokenizer.
    """
    if checkpoint.tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
        return
    data, special, spm = checkpoint.tokenizer
    if special.after_bos:
        warnings.append(
            f"GGUF has no place for tokens after BOS: a text begins neither with BOS ({special.bos_id}) nor with those"
            f" after it ({', '.join(map(str, special.after_bos))})"
        )
        special = replace(special, add_bos=False, after_bos=())
    document = read_canonical(data, "the tokenizer")
    values = _values(document, special, spm, checkpoint.config.vocab_size)
    values |= _named_tokens(texts_of(checkpoint.metadata, TOKENS), values["tokenizer.ggml.tokens"])
    ours = Tokenizer.from_json(data, special)
    added = document["added_tokens"]
    again = _check(ours, added, {**values, "general.name": checkpoint.metadata.get("name", "")}, warnings)
    if lost := sorted(set(special.stop_ids) - set(again.special.stop_ids)):
        warnings.append(f"GGUF has no place for more stop tokens: {', '.join(map(str, lost))} are left out")
    # the packed form needs no list of a large vocabulary to show its added tokens
    kept = rest_of(again.data) if is_packed(again.data) else read_canonical(again.data, "the tokenizer")
    if lost_spaces := sorted(_swallowing(added) - _swallowing(kept["added_tokens"])):
        warnings.append(
            f"GGUF has no place for tokens that absorb surrounding spaces: {', '.join(lost_spaces[:4])} no longer"
            " will (llama.cpp knows it of models with phi-3 in their names: --name)"
        )
    add_keys(writer, values)


def _values(document: Json, special: SpecialTokens, spm: bytes | None, vocab_size: int) -> dict[str, Any]:
    """The metadata. Ids without a token get placeholders, as in llama.cpp's converter."""
    model = document["model"]
    if model["type"] != "BPE":
        raise UnsupportedError(f"a GGUF file cannot express this tokenizer: it is a {model['type']} model, not BPE")
    is_spm = model["byte_fallback"]
    ids = token_ids(document)
    texts = {index: text for text, index in ids.items()}
    size = max(vocab_size, max(texts) + 1)
    added = {entry["id"]: CONTROL if entry["special"] else USER_DEFINED for entry in document["added_tokens"]}
    types = [added.get(index, NORMAL) if index in texts else UNUSED for index in range(size)]
    for index in (special.bos_id, special.eos_id):
        if index is not None:
            types[index] = CONTROL
    tokens = [texts.get(index, f"[PAD{index}]") for index in range(size)]
    values: dict[str, Any] = {"model": "llama" if is_spm else "gpt2"}
    if is_spm:
        for index, text in enumerate(tokens):
            if text in BYTE_PIECES:
                types[index] = BYTE
        if model["unk_token"] in ids:
            types[ids[model["unk_token"]]] = UNKNOWN
        values |= {"pre": "default", "scores": _scores(tokens, model["merges"], spm), "add_space_prefix": True}
        if not _has_prefix(document):
            values["add_space_prefix"] = False
        tokens = [
            text.replace(" ", SPACE_MARK) if kind == NORMAL else text for text, kind in zip(tokens, types, strict=True)
        ]
    else:
        values |= {"pre": _pre_tokenizer(document), "merges": [" ".join(pair) for pair in model["merges"]]}
    values |= {"tokens": tokens, "token_type": types}
    values["bos_token_id"] = NONE if special.bos_id is None else special.bos_id
    values["eos_token_id"] = NONE if special.eos_id is None else special.eos_id
    for name, index in zip(("eot", "eom"), sorted(set(special.stop_ids) - {special.eos_id}), strict=False):
        values[f"{name}_token_id"] = index
    values |= {"add_bos_token": special.add_bos, "add_eos_token": special.add_eos}
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def _named_tokens(named: Mapping[str, str], tokens: Sequence[str]) -> dict[str, int]:
    """The ids of special tokens that only chat templates refer to by name, such as padding.

    A model's own names are left out: its `eot_token` would become one of GGUF's stop tokens.
    """
    ids = {text: index for index, text in enumerate(tokens)}
    roles = {name.removesuffix("_token"): named.get(name) for name in TOKEN_NAMES}
    return {
        f"tokenizer.ggml.{GGUF_TOKENS.get(role, role)}_token_id": ids[text]
        for role, text in roles.items()
        if text in ids and role not in ("bos", "eos")
    }


def _scores(tokens: Sequence[str], merges: Sequence[Sequence[str]], spm: bytes | None) -> list[float]:
    """The pieces' scores if known; otherwise descending ones, which give the same merges."""
    if spm is not None and looks_like_sentencepiece(spm):
        known = {piece.text: piece.score for piece in read_model(spm).pieces}
    else:
        known = {}
        for left, right in merges:
            known.setdefault(left + right, -float(len(known)))
    lowest = min(known.values(), default=0.0) - 1
    return [float(known.get(text, lowest)) for text in tokens]


def _has_prefix(document: Json) -> bool:
    """Whether encoding prepends a space."""
    steps = (document["decoder"] or {}).get("decoders", ())
    return any(step.get("type") == "Strip" and step.get("start") for step in steps)


def _pre_tokenizer(document: Json) -> str:
    """GGUF's name of the pre-tokenizer."""
    nfc = (document["normalizer"] or {}).get("type") == "NFC"
    splits = list(_splits(document["pre_tokenizer"] or {}))
    for name, rules in PRE_TOKENIZERS.items():
        if (
            [LINEAR.get(split, split) for split in rules.splits] == splits
            and rules.nfc == nfc
            and rules.ignore_merges == document["model"]["ignore_merges"]
        ):
            return name
    raise UnsupportedError(
        "a GGUF file cannot express this tokenizer: GGUF has no name for its pre-tokenizer;"
        " --no-tokenizer leaves it out"
    )


def _splits(step: Json) -> Iterator[str]:
    """The regular expressions of a pre-tokenizer. An unknown step yields a string that matches no name."""
    kind = step.get("type")
    if kind == "Sequence":
        for inner in step["pretokenizers"]:
            yield from _splits(inner)
    elif kind == "ByteLevel":
        if step.get("add_prefix_space"):
            yield "a prepended space"
        if step.get("use_regex", True):
            yield PRE_TOKENIZERS["gpt-2"].splits[0]
    elif kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        yield step["pattern"].get("Regex", "a string")
    elif kind == "Digits" and step.get("individual_digits"):
        yield r"\p{N}"
    else:
        yield f"a step of kind {kind}"


# ---- the check


def _swallowing(added: list[Json]) -> set[str]:
    """Added tokens that absorb surrounding spaces."""
    return {entry["content"] for entry in added if entry.get("lstrip") or entry.get("rstrip")}


def _check(ours: Tokenizer, added: list[Json], values: Mapping[str, Any], warnings: list[str]) -> Vocabulary:
    """The tokenizer of the metadata. UnsupportedError with a string that it encodes differently.

    Args:
        ours: The tokenizer that the metadata describe.
        added: Its added tokens.
        values: The metadata.
        warnings: Gets a message if only texts after special tokens are encoded differently.
    """
    try:
        vocabulary = from_metadata(dict(values))
        theirs = Tokenizer.from_json(vocabulary.data, vocabulary.special)
    except LlamacError as error:
        raise UnsupportedError(f"a GGUF file cannot express this tokenizer: {error}") from None
    for name in ("bos_id", "eos_id", "add_bos", "add_eos"):
        one, other = getattr(ours.special, name), getattr(theirs.special, name)
        if one != other:
            raise UnsupportedError(f"a GGUF file cannot express this tokenizer: {name} would be {other}, not {one}")
    added_ids = {entry["id"] for entry in added}
    kinds = values["tokenizer.ggml.token_type"]
    # llama2.c treats "<s>" in a string as three characters; all other formats recognize special tokens
    ids = [index for index in range(ours.n_ids) if index in added_ids or kinds[index] not in (CONTROL, UNKNOWN)]
    for text in (*HARD_TEXTS, *_texts(ours, ids)):
        if ours.encode(text) != theirs.encode(text):
            raise UnsupportedError(
                f"a GGUF file cannot express this tokenizer: {text[:80]!r} would be encoded differently; --no-tokenizer"
                " leaves it out"
            )
    plain = (entry["content"] for entry in added if entry["special"] and entry["content"] not in _swallowing(added))
    text = next((f"{token}a" for token in plain), "")
    if ours.encode(text, parse_special=True) != theirs.encode(text, parse_special=True):
        warnings.append(
            "GGUF has no key for a tokenizer that puts a space only before the first text: llama.cpp also puts one"
            " before each text after a special token, so chat prompts get other tokens"
        )
    return vocabulary


def _texts(tokenizer: Tokenizer, ids: Sequence[int]) -> Iterator[str]:
    """Strings that concatenate tokens of the whole vocabulary."""
    ids = ids[:: max(1, len(ids) // SAMPLES)]
    for first in range(0, len(ids), 64):
        yield tokenizer.decode(ids[first : first + 64])
