"""Encodes text with the library `sentencepiece`, for models that no tokenizer.json describes exactly.

The JSON of such a vocabulary has a member "sentencepiece" in addition to those of a tokenizer.json:

    model           the ModelProto with the pieces and rules, base64
    replacements    its table of character replacements, base64, checked here because the library does not check it
    prefix          "always": each text between added tokens can get a space in front; "first": only the first one
    found_by_model  ids of the added tokens that the model itself finds in text
    similar         whether the tokenizer.json encodes most texts the same way

The strings and bytes of tokens are those of the tokenizer.json. The library `tokenizers` finds the added tokens that
the model does not find itself, in the original text.
"""

from __future__ import annotations

import base64
import json
import secrets
import threading
from typing import TYPE_CHECKING, Any

from llamac.errors import TokenizerError
from llamac.text.encoding import BYTES_PER_CHARACTER, encode_with
from llamac.text.headroom import require_memory
from llamac.text.sentencepiece_check import check_model_proto
from llamac.text.tokenizer_json import charsmap_problem

if TYPE_CHECKING:
    import sentencepiece
    import tokenizers

# Numbers of fields: of ModelProto, and of NormalizerSpec in it.
_NORMALIZER_SPEC = 3
_PRECOMPILED_CHARSMAP, _ADD_DUMMY_PREFIX = 2, 3


def protobuf_field(number: int, value: int | bytes) -> bytes:
    """Encode a field of a protocol buffer message: a number, or bytes (a string or a message)."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _check_types(settings: Any) -> None:
    """Raise TokenizerError if a member is missing or has the wrong type."""
    types = {"model": str, "replacements": str, "prefix": str, "found_by_model": list}
    for name, kind in types.items():
        value = settings.get(name) if isinstance(settings, dict) else None
        if not isinstance(value, kind):
            raise TokenizerError(f"sentencepiece.{name} is {value!r:.40}, expected a {kind.__name__}")
    if not all(type(token) is int for token in settings["found_by_model"]):
        raise TokenizerError("sentencepiece.found_by_model must list token ids")


class SentencePieceEncoder:
    """Encodes with a SentencePiece model and added tokens. Threads can share it."""

    def __init__(self, settings: dict[str, Any], library: tokenizers.Tokenizer, n_pieces: int) -> None:
        """
        Args:
            settings: The member "sentencepiece" of the vocabulary.
            library: The library's object for its tokenizer.json, which has the added tokens.
            n_pieces: The number of tokens of that tokenizer.json without the added ones.
        """
        _check_types(settings)
        self.library = library
        added = library.get_added_tokens_decoder()
        by_model = frozenset(settings["found_by_model"])
        problem = charsmap_problem(settings["replacements"]) if settings["replacements"] else ""
        if problem:
            raise TokenizerError(f"the model {problem}")
        # A message appended to a serialized one is merged into it and takes precedence.
        table = protobuf_field(_PRECOMPILED_CHARSMAP, base64.b64decode(settings["replacements"]))
        model = base64.b64decode(settings["model"], validate=True)
        check_model_proto(model, n_pieces)
        self._model = model + protobuf_field(_NORMALIZER_SPEC, table)
        self._prefix_first_only = settings["prefix"] == "first"
        self._added = [(token, entry) for token, entry in sorted(added.items()) if token not in by_model]
        self._processor = self._load(self._model)
        self._bare_processor: sentencepiece.SentencePieceProcessor | None = None  # adds no space in front
        self._finders: dict[bool, tokenizers.Tokenizer | None] = {}
        self._lock = threading.Lock()

    @staticmethod
    def _load(model: bytes) -> sentencepiece.SentencePieceProcessor:
        import sentencepiece

        return sentencepiece.SentencePieceProcessor(model_proto=model)

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Encode text. With `parse_special`, names of special tokens in it become those tokens."""
        finder = self._finder(parse_special)
        if finder is None:
            return self._encode_between(text, 0)
        found = encode_with(finder, text)
        ids: list[int] = []
        for index, (start, end) in zip(found.ids, found.offsets, strict=True):
            if index == 0:
                ids += self._encode_between(text[start:end], start)
            else:
                ids.append(self._added[index - 1][0])
        return ids

    def special_spans(self, text: str) -> list[tuple[int, int]]:
        """Find special tokens, as `Encoder.special_spans` does. The model itself finds none."""
        finder = self._finder(True)
        if finder is None:
            return []
        found = encode_with(finder, text)
        spans = zip(found.ids, found.offsets, strict=True)
        return [span for index, span in spans if index and self._added[index - 1][1].special]

    def _encode_between(self, text: str, start: int) -> list[int]:
        """Encode text between added tokens that begins at character `start`."""
        processor = self._processor
        if self._prefix_first_only and start:
            if self._bare_processor is None:
                bare = protobuf_field(_NORMALIZER_SPEC, protobuf_field(_ADD_DUMMY_PREFIX, 0))
                self._bare_processor = self._load(self._model + bare)
            processor = self._bare_processor
        require_memory(BYTES_PER_CHARACTER * len(text), "encoding this text")
        ids: list[int] = processor.encode_as_ids(text)
        return ids

    def _finder(self, parse_special: bool) -> tokenizers.Tokenizer | None:
        """A tokenizer that finds added tokens; the id 0 is the text between them. None if there is nothing to find."""
        with self._lock:
            if parse_special not in self._finders:
                self._finders[parse_special] = self._make_finder(parse_special)
            return self._finders[parse_special]

    def _make_finder(self, parse_special: bool) -> tokenizers.Tokenizer | None:
        import tokenizers

        if not any(parse_special or not entry.special for _, entry in self._added):
            return None
        flags = ("special", "single_word", "lstrip", "rstrip")
        between = secrets.token_hex(16)  # a string that no token has
        document = {
            "version": "1.0",
            "added_tokens": [
                {"id": index, "content": entry.content, "normalized": False}
                | {flag: getattr(entry, flag) for flag in flags}
                for index, (_, entry) in enumerate(self._added, 1)
            ],
            "model": {"type": "WordLevel", "vocab": {between: 0}, "unk_token": between},
        }
        finder = tokenizers.Tokenizer.from_str(json.dumps(document))
        finder.encode_special_tokens = not parse_special
        return finder
