"""Encodes text with the library `tokenizers`.

The library's objects are built from a document that `parse_document` has parsed. The library never parses the file
itself, so the two cannot disagree about its content.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from llamac.errors import UnsupportedError
from llamac.text.chat_runs import SpecialNames
from llamac.text.headroom import require_memory
from llamac.text.tokenizer_json import parse_document

if TYPE_CHECKING:
    import tokenizers

    from llamac.text.sentencepiece_text import SentencePieceEncoder

# Texts with this many characters are encoded as a batch, because the library releases the GIL only for batches. Shorter
# texts take at most a millisecond, and the library warns on stderr if a process forks after a batch.
BATCH_CHARACTERS = 2000
# Upper bounds of the library's memory. Measured: 27 bytes per byte of a tokenizer.json, 160 bytes per character, and
# 200 MB of address space for the threads of batches.
BYTES_PER_JSON_BYTE, BYTES_PER_CHARACTER = 40, 256
LIBRARY_BYTES, BATCH_BYTES = 40 << 20, 256 << 20
FLAGS = ("special", "single_word", "lstrip", "rstrip", "normalized")


class Encoder:
    """Encodes with one tokenizer. Threads can share it."""

    def __init__(self, document: dict[str, Any], data: bytes, special: Collection[int]) -> None:
        """
        Args:
            document: A parsed tokenizer.json.
            data: Its text, which is parsed again if a second vocabulary is needed.
            special: Ids of special tokens.
        """
        self.library = build_library(document)
        self._data = data
        self._lock = threading.Lock()
        # The library's object for which special tokens are text; the library's name for this is encode_special_tokens.
        self._plain: tokenizers.Tokenizer | None = None
        self._names = _names_found_by_text(document, special)
        self._search = SpecialNames(sorted(self._names))
        self._normalized = any(entry["special"] and entry["normalized"] for entry in added_tokens(document))
        self._special_ids = _special_ids(self.library, document, special)
        if not self._names:
            self._plain = build_library(document, self.library.model)
            self._plain.encode_special_tokens = True

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Encode text. With `parse_special`, names of special tokens in it become those tokens."""
        library = self.library if parse_special else self._plain or self._plain_for(text)
        ids: list[int] = encode_with(library, text).ids
        if not parse_special and library is not self._plain and self._names and not self._special_ids.isdisjoint(ids):
            # the text does not contain the name, but normalization turns it into the name
            ids = encode_with(self._make_plain(), text).ids
        return ids

    def special_spans(self, text: str) -> list[tuple[int, int]]:
        """Find each part of the text that `encode` with `parse_special` turns into a special token, as (start, end)."""
        found = encode_with(self.library, text)
        return [span for index, span in zip(found.ids, found.offsets, strict=True) if index in self._special_ids]

    def _plain_for(self, text: str) -> tokenizers.Tokenizer:
        """The library's object that treats special tokens in `text` as text.

        It needs a second vocabulary, which is built when text first contains such a name.
        """
        if not self._normalized and next(self._search.find(text), None) is None:
            return self.library
        return self._make_plain()

    def _make_plain(self) -> tokenizers.Tokenizer:
        """The library's object with the second vocabulary, built on first use."""
        with self._lock:
            if self._plain is None:
                require_memory(BYTES_PER_JSON_BYTE * len(self._data), "a second vocabulary of the tokenizer")
                document = parse_document(self._data, "the tokenizer")
                _rename(document, self._names)
                plain = build_library(document)
                plain.encode_special_tokens = True
                self._plain = plain
            return self._plain


def encode_with(library: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    """Encode a text with the library's object.

    Raises:
        OutOfMemoryError: If the process's limits do not leave enough memory.
    """
    in_batch = len(text) >= BATCH_CHARACTERS
    require_memory(BYTES_PER_CHARACTER * len(text) + (BATCH_BYTES if in_batch else 1 << 20), "encoding this text")
    if not in_batch:
        return library.encode(text, add_special_tokens=False)
    return library.encode_batch([text], add_special_tokens=False)[0]


def make_encoder(document: dict[str, Any], data: bytes, special: Collection[int]) -> Encoder | SentencePieceEncoder:
    """Build the encoder for a vocabulary.

    Args:
        document: A parsed tokenizer.json.
        data: Its text.
        special: The ids of BOS and EOS.

    Raises:
        OutOfMemoryError: If the process's limits do not leave enough memory.
    """
    require_memory(LIBRARY_BYTES + BYTES_PER_JSON_BYTE * len(data), "the tokenizer")
    settings = document.get("sentencepiece")
    if settings is None:
        return Encoder(document, data, special)
    from llamac.text.sentencepiece_text import SentencePieceEncoder

    return SentencePieceEncoder(settings, build_library(document), len(document["model"]["vocab"]))


def build_library(document: dict[str, Any], model: tokenizers.models.Model | None = None) -> tokenizers.Tokenizer:
    """Build the library's object for a parsed tokenizer.json, without truncation, padding and post-processor.

    Args:
        document: The tokenizer.json. It is not changed.
        model: The model of another object, to share it.
    """
    import tokenizers

    shell = {key: document.get(key) for key in ("normalizer", "pre_tokenizer", "decoder")}
    library = _parsed({**shell, "model": {"type": "BPE", "vocab": {}, "merges": []}})
    library.model = build_model(document["model"]) if model is None else model
    library.add_tokens(
        [
            tokenizers.AddedToken(entry["content"], **{flag: entry[flag] for flag in FLAGS})
            for entry in added_tokens(document)
        ]
    )
    return library


def _parsed(document: dict[str, Any]) -> tokenizers.Tokenizer:
    import tokenizers

    return tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", **document}))


def build_model(model: dict[str, Any]) -> tokenizers.models.Model:
    """Build the library's model for the "model" of a tokenizer.json.

    Raises:
        UnsupportedError: If the kind of model is not supported.
    """
    from tokenizers import models

    kind, vocab = model.get("type", "BPE"), model["vocab"]
    if kind == "BPE":
        if model.get("dropout"):
            raise UnsupportedError("a tokenizer with dropout encodes at random, which is not supported")
        options = ("unk_token", "continuing_subword_prefix", "end_of_word_suffix")
        flags = ("fuse_unk", "byte_fallback", "ignore_merges")
        return models.BPE(vocab, list(map(_merge, model["merges"])), **_given(model, options + flags))
    if kind == "Unigram":
        # parsed, because the library's parser rounds some scores to a neighboring number
        known = {"type": kind, "vocab": vocab, "unk_id": model.get("unk_id")}
        parsed: models.Model = _parsed({"model": {**known, "byte_fallback": bool(model.get("byte_fallback"))}}).model
        return parsed
    if kind == "WordPiece":
        options = ("unk_token", "max_input_chars_per_word", "continuing_subword_prefix")
        return models.WordPiece(vocab, **_given(model, options))
    if kind == "WordLevel":
        return models.WordLevel(vocab, **_given(model, ("unk_token",)))
    raise UnsupportedError(f"a {kind} tokenizer is not supported, only BPE, Unigram, WordPiece and WordLevel")


def reads_other_spellings(document: dict[str, Any], special: Collection[int]) -> bool:
    """Whether a text can become a special token without containing its name.

    This happens if normalization turns the text into the name. It affects only tokens that are matched after
    normalization.
    """
    if document.get("sentencepiece") is not None:
        return False
    is_normalized = any(entry["special"] and entry["normalized"] for entry in added_tokens(document))
    return (is_normalized and document.get("normalizer") is not None) or bool(_names_found_by_text(document, special))


def _special_ids(library: tokenizers.Tokenizer, document: dict[str, Any], special: Collection[int]) -> frozenset[int]:
    """The ids of special tokens, except the token for unknown characters, which any text can produce."""
    model = document["model"]
    is_unigram = model.get("type") == "Unigram"
    unknown = model.get("unk_id") if is_unigram else library.token_to_id(model.get("unk_token") or "")
    ids = {index for index, entry in library.get_added_tokens_decoder().items() if entry.special}
    return frozenset((ids | set(special)) - {unknown})


def _given(model: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Those of the named options that the model sets."""
    return {name: model[name] for name in names if model.get(name) is not None}


def added_tokens(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The added tokens of a tokenizer.json."""
    return document.get("added_tokens") or []


def _names_found_by_text(document: dict[str, Any], special: Collection[int]) -> set[str]:
    """The special tokens that the model itself produces from text that contains their names.

    Such a model looks up words or pieces by their string, or has merges that form a name. If special tokens are to be
    text, it must not find these.
    """
    model = document["model"]
    vocab = model["vocab"]
    pieces = vocab.items() if isinstance(vocab, dict) else _numbered(vocab)
    added = {entry["content"] for entry in added_tokens(document) if entry["special"]}
    if model.get("type", "BPE") != "BPE":
        return {text for text, index in pieces if index in special or text in added}
    formed = set()
    if not added.isdisjoint(vocab):
        formed = {text for text in map("".join, map(_merge, model["merges"])) if text in added}
    if not model.get("ignore_merges"):
        return formed
    names = {text for text, index in pieces if index in special or text in added}
    for left, right in map(_merge, model["merges"]):  # other strings that occur in merges must not change
        names -= {left, right, left + right}
    return names | formed


def _numbered(pieces: list[Any]) -> Iterator[tuple[str, int]]:
    return ((text, index) for index, (text, _) in enumerate(pieces))


def _merge(entry: Any) -> tuple[Any, ...]:
    return tuple(entry.split(" ") if isinstance(entry, str) else entry)


def _rename(document: dict[str, Any], names: set[str]) -> None:
    """Give the tokens `names` secret strings, which no text can contain, and remove their merges."""
    import secrets

    secret = secrets.token_hex(16)
    renamed = {name: secret + name for name in names}
    model = document["model"]
    if isinstance(model["vocab"], list):
        model["vocab"] = [[renamed.get(text, text), score] for text, score in model["vocab"]]
    else:
        model["vocab"] = {renamed.get(text, text): index for text, index in model["vocab"].items()}
    if "merges" in model:
        merges = ((entry, *_merge(entry)) for entry in model["merges"])
        model["merges"] = [entry for entry, left, right in merges if names.isdisjoint((left, right, left + right))]
    if model.get("unk_token") in names:
        model["unk_token"] = renamed[model["unk_token"]]
    for entry in added_tokens(document):
        entry["content"] = renamed.get(entry["content"], entry["content"])
