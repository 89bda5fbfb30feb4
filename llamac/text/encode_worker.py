"""Encodes text in a worker process (worker_main.py), for `IsolatedEncoder`.

Requests are ("load", tokenizer.json, special ids), ("encode", UTF-8, parse_special) and ("spans", UTF-8, True). An
answer is "+" and content (32-bit ids of an encoding, or starts and ends of special tokens), "t" and a TokenizerError's
message, "u" and an UnsupportedError's, or nothing if no tokenizer has been loaded.
"""

from __future__ import annotations

import array
import os
from collections.abc import Callable
from typing import Any

MEMORY = 1 << 31  # bytes of address space: a million tokens take 1 GB, a million characters of text 200 MB


def prepare(needs_sentencepiece: Any) -> Callable[[Any], bytes]:
    """Import everything that requests can need, and return the function that answers them."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import tokenizers.models  # noqa: F401

    if needs_sentencepiece:
        import sentencepiece  # noqa: F401

    from llamac.errors import OutOfMemoryError, TokenizerError, UnsupportedError
    from llamac.text.encoding import make_encoder
    from llamac.text.tokenizer_json import library_errors, parse_document

    encoders: list[Any] = []

    def answer(request: Any) -> bytes:
        kind, data, option = request
        try:
            if kind == "load":
                with library_errors("it cannot be used"):
                    encoders[:] = [make_encoder(parse_document(data, "its tokenizer.json"), data, set(option))]
                return b"+"
            if not encoders:
                return b""
            with library_errors("it cannot encode this text"):
                text = data.decode()
                if kind == "spans":
                    numbers = [number for span in encoders[0].special_spans(text) for number in span]
                else:
                    numbers = encoders[0].encode(text, option)
                return b"+" + array.array("I", numbers).tobytes()
        except UnsupportedError as error:
            return b"u" + str(error).encode(errors="replace")
        except (TokenizerError, OutOfMemoryError) as error:
            return b"t" + str(error).encode(errors="replace")

    return answer
