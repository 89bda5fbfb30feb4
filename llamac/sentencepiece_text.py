"""Texts to ids by the library sentencepiece, for its models that no tokenizer.json describes exactly.

Such a vocabulary's JSON has the member "sentencepiece" beside those of a tokenizer.json:

    model         the ModelProto, base64: its pieces and its rules
    replacements  its table of character replacements, base64: checked before the library, which does not, reads it
    prefix        "always": every stretch of text between added tokens is encoded as a text of its own;
                  "first": only the first one may get a space in front
    own           ids of the added tokens that the model itself finds in a text
    near          whether the tokenizer.json beside it encodes most texts alike

The names of tokens, and how they become text, are those of the tokenizer.json. Added tokens that the model does not
find itself are looked for here, by the library tokenizers, in the text as it is.
"""

from __future__ import annotations

import base64
import json
import secrets
import threading
from typing import TYPE_CHECKING, Any

from llamac.errors import TokenizerError
from llamac.tokenizer_json import charsmap_problem

if TYPE_CHECKING:
    import sentencepiece
    import tokenizers

_MEMBER = b'"sentencepiece":{'
# Numbers of fields: of ModelProto, and of NormalizerSpec within it.
_NORMALIZER_SPEC = 3
_PRECOMPILED_CHARSMAP, _ADD_DUMMY_PREFIX = 2, 3


def split_document(data: bytes) -> tuple[bytes, dict[str, Any] | None]:
    """The tokenizer.json text in a vocabulary's JSON, and its member "sentencepiece" where it has one."""
    if _MEMBER not in data:
        return data, None
    document = json.loads(data)
    settings = document.pop("sentencepiece", None)
    return json.dumps(document, ensure_ascii=False).encode(), settings


def protobuf_field(number: int, value: int | bytes) -> bytes:
    """A field of a protocol buffer message: a number, or bytes (a text, a message)."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


class SentencePieceText:
    """Encodes as sentencepiece does, with tokens that were added to its model. Threads may share it."""

    def __init__(self, settings: dict[str, Any], added: dict[int, tokenizers.AddedToken]) -> None:
        own = frozenset(settings["own"])
        problem = charsmap_problem(settings["replacements"]) if settings["replacements"] else ""
        if problem:
            raise TokenizerError(f"the model {problem}")
        # What stands at the end of a message is merged into it, and overrules.
        table = protobuf_field(_PRECOMPILED_CHARSMAP, base64.b64decode(settings["replacements"]))
        self._model = base64.b64decode(settings["model"], validate=True) + protobuf_field(_NORMALIZER_SPEC, table)
        self._first = settings["prefix"] == "first"
        self._added = [(token, entry) for token, entry in sorted(added.items()) if token not in own]
        self._whole = self._processor(self._model)
        self._rest: sentencepiece.SentencePieceProcessor | None = None  # without a space in front
        self._finders: dict[bool, tokenizers.Tokenizer | None] = {}
        self._lock = threading.Lock()

    @staticmethod
    def _processor(model: bytes) -> sentencepiece.SentencePieceProcessor:
        import sentencepiece

        return sentencepiece.SentencePieceProcessor(model_proto=model)

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """The ids of `text`; names of special tokens are such tokens where `parse_special` says so."""
        finder = self._finder(parse_special)
        if finder is None:
            return self._stretch(text, 0)
        found = finder.encode(text, add_special_tokens=False)
        ids: list[int] = []
        for index, (start, end) in zip(found.ids, found.offsets, strict=True):
            if index == 0:
                ids += self._stretch(text[start:end], start)
            else:
                ids.append(self._added[index - 1][0])
        return ids

    def _stretch(self, text: str, start: int) -> list[int]:
        processor = self._whole
        if self._first and start:
            if self._rest is None:
                bare = protobuf_field(_NORMALIZER_SPEC, protobuf_field(_ADD_DUMMY_PREFIX, 0))
                self._rest = self._processor(self._model + bare)
            processor = self._rest
        ids: list[int] = processor.encode_as_ids(text)
        return ids

    def _finder(self, parse_special: bool) -> tokenizers.Tokenizer | None:
        """A tokenizer that cuts a text at added tokens: 0 is what lies between them. None where there are none."""
        with self._lock:
            if parse_special not in self._finders:
                self._finders[parse_special] = self._make_finder(parse_special)
            return self._finders[parse_special]

    def _make_finder(self, parse_special: bool) -> tokenizers.Tokenizer | None:
        import tokenizers

        if not any(parse_special or not entry.special for _, entry in self._added):
            return None
        flags = ("special", "single_word", "lstrip", "rstrip")
        between = secrets.token_hex(16)  # a text that no token has
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
