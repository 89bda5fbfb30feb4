"""The packed form of a tokenizer.json: tokens and merges as tables that need no parsing, the rest as JSON.

A model file stores a BPE tokenizer in this form (docs/format.md). Parsing 14 MB of JSON takes more than a second; the
core opens the tables of 262,144 tokens in 20 ms. `unpack` writes the canonical tokenizer.json again, byte for byte.
"""

from __future__ import annotations

import json
import struct
from array import array
from typing import Any

from llamac import _core
from llamac.errors import LlamacError, TokenizerError
from llamac.format.strict_json import MAX_BYTES, MAX_VALUES, parse_object

MAGIC = b"\x89tokens\n"
_HEADER = struct.Struct("<8s4I40x")  # magic, tokens, merges, bytes of strings, bytes of JSON
_NATIVE = struct.pack("=I", 1) == struct.pack("<I", 1)  # the core reads the tables in place


class OpenedBytes(bytes):
    """A packed tokenizer whose tables have been opened, so that whoever gets it need not open them again.

    Attributes:
        vocabulary: The tables.
    """

    vocabulary: _core.Vocabulary

    def __reduce__(self) -> tuple[type[bytes], tuple[bytes]]:
        return bytes, (bytes(self),)


def is_packed(data: bytes) -> bool:
    """Whether a tokenizer is in packed form, not a tokenizer.json."""
    return data.startswith(MAGIC)


def join(rest: bytes, ends: bytes, merges: bytes, strings: bytes) -> bytes:
    """Write the packed form.

    Args:
        rest: The canonical tokenizer.json without the model's `vocab` and `merges`.
        ends: Where each token's string ends in `strings`, as u32.
        merges: Left, right and joined token of each merge, as u32; the best first.
        strings: The tokens' strings in UTF-8, in the order of their ids. An id without a token has an empty string.
    """
    header = _HEADER.pack(MAGIC, len(ends) // 4, len(merges) // 12, len(strings), len(rest))
    return b"".join((header, ends, merges, strings, rest))


def vocabulary_of(data: bytes) -> _core.Vocabulary:
    """Open the tables of a packed tokenizer.

    Raises:
        TokenizerError: If they are damaged.
    """
    if isinstance(data, OpenedBytes):
        return data.vocabulary
    n_tokens, n_merges, n_strings, _ = _check(data)
    try:
        return _core.Vocabulary(data, _HEADER.size, n_tokens, n_merges, n_strings)
    except LlamacError as error:
        raise TokenizerError(f"the packed tokenizer is damaged: {error}") from None


def rest_of(data: bytes) -> dict[str, Any]:
    """Parse the JSON of a packed tokenizer: a tokenizer.json whose model has no `vocab` and no `merges`.

    Raises:
        TokenizerError: If it is damaged.
    """
    *_, n_rest = _check(data)
    name = "the JSON of the packed tokenizer"
    rest = parse_object(
        data[len(data) - n_rest :], name, error=TokenizerError, max_bytes=MAX_BYTES, max_values=MAX_VALUES
    )
    model = rest.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE" or "vocab" in model or "merges" in model:
        raise TokenizerError(f"{name} has no BPE model without 'vocab' and 'merges'")
    return rest


def document_of(data: bytes) -> dict[str, Any]:
    """The whole tokenizer.json of a packed tokenizer, as objects.

    Raises:
        TokenizerError: If the packed form is damaged.
    """
    rest, vocabulary = rest_of(data), vocabulary_of(data)
    rest["model"]["vocab"] = {text: token for token, text in enumerate(vocabulary.texts()) if text is not None}
    rest["model"]["merges"] = vocabulary.merges()
    return rest


def unpack(data: bytes) -> bytes:
    """The text of the tokenizer.json, from either form.

    Raises:
        TokenizerError: If the packed form is damaged.
    """
    if not is_packed(data):
        return data
    from llamac.text.vocabulary.tokenizer_json import canonical_json  # needed only to write a tokenizer.json

    return canonical_json(document_of(data))


def pack(data: bytes) -> bytes:
    """The packed form of a canonical tokenizer.json; `data` itself if it has none, or if it is packed already.

    Only BPE with one id for each string and one merge for each pair has a packed form.
    """
    if is_packed(data) or not data:
        return data
    from llamac.text.tokenizer_json import parse_document
    from llamac.text.vocabulary.tokenizer_json import canonical_json

    document = parse_document(data, "the tokenizer")
    found = tables(document)
    if found is None or canonical_json(document) != data:
        return data
    model = {key: value for key, value in document["model"].items() if key not in ("vocab", "merges")}
    return join(rest_json({**document, "model": model}), *found)


def rest_json(document: dict[str, Any]) -> bytes:
    """Write the JSON of a packed tokenizer.

    Args:
        document: A tokenizer.json whose model has no `vocab` and no `merges`.

    Raises:
        TokenizerError: If a string has a lone surrogate.
    """
    fixed = {"version": "1.0", "post_processor": None, "padding": None, "truncation": None}
    try:
        return json.dumps({**document, **fixed}, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()
    except UnicodeEncodeError:
        raise TokenizerError("the vocabulary contains a lone surrogate") from None


def tables(document: dict[str, Any]) -> tuple[bytes, bytes, bytes] | None:
    """The tables of the packed form (`join`). None if a tokenizer.json has no packed form."""
    model = document["model"]
    vocab, merges = model.get("vocab"), model.get("merges")
    if not _NATIVE or "sentencepiece" in document or model.get("type", "BPE") != "BPE":
        return None
    if not isinstance(vocab, dict) or not isinstance(merges, list) or not vocab:
        return None
    ids = vocab.values()
    if "" in vocab or any(type(token) is not int for token in ids) or min(ids) < 0 or max(ids) >= 2 * len(vocab) + 64:
        return None
    texts = [""] * (max(ids) + 1)
    for text, token in vocab.items():
        texts[token] = text
    if len(set(ids)) < len(vocab):
        return None
    try:
        strings = _core.string_tables(texts)
    except UnicodeEncodeError:
        return None
    triples = array("I")
    try:
        for entry in merges:
            left, right = entry.split(" ") if isinstance(entry, str) else entry
            triples.extend((vocab[left], vocab[right], vocab[left + right]))
    except (KeyError, ValueError, TypeError):
        return None
    pairs = set(zip(triples[::3], triples[1::3], strict=True))
    return (strings[0], triples.tobytes(), strings[1]) if len(pairs) == len(merges) else None


def _check(data: bytes) -> tuple[int, int, int, int]:
    """The header: the numbers of tokens and merges, the bytes of the strings and of the JSON."""
    if len(data) < _HEADER.size:
        raise TokenizerError(f"the packed tokenizer has {len(data)} bytes, expected at least {_HEADER.size}")
    magic, n_tokens, n_merges, n_strings, n_rest = _HEADER.unpack_from(data)
    size = _HEADER.size + 4 * n_tokens + 12 * n_merges + n_strings + n_rest
    if magic != MAGIC or any(data[24 : _HEADER.size]) or size != len(data):
        raise TokenizerError(f"the packed tokenizer is damaged: it has {len(data)} bytes, its header says {size}")
    if not _NATIVE:
        raise TokenizerError("a packed tokenizer needs a little-endian machine")
    return n_tokens, n_merges, n_strings, n_rest
