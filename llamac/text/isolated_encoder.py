"""Text to token ids in a separate process, for tokenizers that could take more time or memory than there is."""

from __future__ import annotations

import array
from typing import Any

from llamac.errors import TokenizerError, UnsupportedError
from llamac.text.encoding import build_library
from llamac.text.worker import Worker

LOADING = 60.0  # seconds
SECONDS = 5.0  # limit of an encoding, and one more for each CHARACTERS_PER_SECOND
CHARACTERS_PER_SECOND = 50_000
MIN_ANSWER, BYTES_PER_BYTE = 1 << 16, 256  # of an answer: the limit, and how much more for each byte of text


class IsolatedEncoder:
    """Encodes like `Encoder`, in a process with limits of time and memory. Threads can share it.

    Attributes:
        library: the library's object for the vocabulary alone. It cannot encode.
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
        self._worker = Worker(
            "llamac.text.encode_worker", "the tokenizer", TokenizerError, "sentencepiece" in document
        )

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """The ids of `text`; names of special tokens in it become those tokens if `parse_special`."""
        data = text.encode()
        request = ("encode", data, parse_special)
        seconds = SECONDS + len(text) / CHARACTERS_PER_SECOND
        limit = MIN_ANSWER + BYTES_PER_BYTE * len(data)
        answer = self._worker.ask(request, seconds, limit)
        if answer == b"":  # a new process
            self._checked(self._worker.ask(self._load_request, LOADING, MIN_ANSWER))
            answer = self._worker.ask(request, seconds, limit)
        ids = array.array("I")
        content = self._checked(answer)
        if len(content) % ids.itemsize:
            raise self._worker.bad_answer()
        ids.frombytes(content)
        return ids.tolist()

    def _checked(self, answer: bytes) -> bytes:
        """The content of an answer that is not an error."""
        kind, content = answer[:1], answer[1:]
        if kind == b"+":
            return content
        if kind not in (b"u", b"t"):
            raise self._worker.bad_answer()
        raise (UnsupportedError if kind == b"u" else TokenizerError)(content.decode(errors="replace"))
