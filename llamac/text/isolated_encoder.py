"""Encodes text in a separate process, for tokenizers whose time or memory is not proven to be bounded."""

from __future__ import annotations

import array
from typing import Any

from llamac.errors import TokenizerError, UnsupportedError
from llamac.text.encoding import build_library
from llamac.text.worker import Worker

LOADING = 60.0  # seconds
SECONDS = 5.0  # time limit of an encoding, plus a second per CHARACTERS_PER_SECOND
CHARACTERS_PER_SECOND = 50_000
MIN_ANSWER, BYTES_PER_BYTE = 1 << 16, 256  # size limit of an answer, and its increase per byte of text


class IsolatedEncoder:
    """Encodes like `Encoder`, in a process with limits of time and memory. Threads can share it.

    Attributes:
        library: The library's object with the vocabulary only. It cannot encode.
    """

    def __init__(self, document: dict[str, Any], data: bytes, special: set[int]) -> None:
        vocab = document["model"]["vocab"]
        if isinstance(vocab, list):
            ids = {text: index for index, (text, _) in enumerate(vocab)}
            if len(ids) < len(vocab):
                raise TokenizerError("two tokens have the same text")
            vocab = ids
        bare = {"normalizer": None, "pre_tokenizer": None, "model": {"type": "BPE", "vocab": vocab, "merges": []}}
        self.library = build_library({**document, **bare})
        self._load_request = ("load", data, sorted(special))
        self._worker = Worker("llamac.text.encode_worker", "the tokenizer", TokenizerError, "sentencepiece" in document)

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Encode text. With `parse_special`, names of special tokens in it become those tokens."""
        return self._numbers("encode", text, parse_special)

    def special_spans(self, text: str) -> list[tuple[int, int]]:
        """Find special tokens, as `Encoder.special_spans` does."""
        numbers = self._numbers("spans", text, True)
        return list(zip(numbers[::2], numbers[1::2], strict=True))

    def _numbers(self, kind: str, text: str, parse_special: bool) -> list[int]:
        data = text.encode()
        request = (kind, data, parse_special)
        seconds = SECONDS + len(text) / CHARACTERS_PER_SECOND
        limit = MIN_ANSWER + BYTES_PER_BYTE * len(data)
        answer = self._worker.ask(request, seconds, limit)
        if answer == b"":  # a new process, which has no tokenizer yet
            self._checked(self._worker.ask(self._load_request, LOADING, MIN_ANSWER))
            answer = self._worker.ask(request, seconds, limit)
        ids = array.array("I")
        content = self._checked(answer)
        if len(content) % ids.itemsize:
            raise self._worker.bad_answer()
        ids.frombytes(content)
        return ids.tolist()

    def _checked(self, answer: bytes) -> bytes:
        """The content of an answer. Raises the error that the answer reports, if any."""
        kind, content = answer[:1], answer[1:]
        if kind == b"+":
            return content
        if kind not in (b"u", b"t"):
            raise self._worker.bad_answer()
        raise (UnsupportedError if kind == b"u" else TokenizerError)(content.decode(errors="replace"))
