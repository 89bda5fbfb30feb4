"""Reads a canonical tokenizer.json that another program may have written, and checks every field that exporters use.

The library `tokenizers` accepts documents in which fields with a default are missing. `read_canonical` adds them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from llamac.errors import TokenizerError
from llamac.text.tokenizer_json import parse_document
from llamac.text.vocabulary.added import FLAGS, Document

_REQUIRED = object()
# Fields, each with its type, a description of the type, and a default.
_Fields = dict[str, tuple[type | tuple[type, ...], str, Any]]
_OBJECT_OR_NULL = ((dict, type(None)), "an object or null", None)
_FLAG = (bool, "true or false", False)
_DOCUMENT: _Fields = {
    "model": (dict, "an object", _REQUIRED),
    "added_tokens": (list, "an array", []),
    "normalizer": _OBJECT_OR_NULL,
    "pre_tokenizer": _OBJECT_OR_NULL,
    "decoder": _OBJECT_OR_NULL,
}
_MODEL: _Fields = {"type": (str, "a string", "BPE"), "vocab": ((dict, list), "an object or an array", _REQUIRED)}
_BPE: _Fields = {
    "merges": (list, "an array", _REQUIRED),
    "unk_token": ((str, type(None)), "a string or null", None),
    "byte_fallback": _FLAG,
    "ignore_merges": _FLAG,
}
_ADDED: _Fields = {
    "id": (int, "an integer", _REQUIRED),
    "content": (str, "a string", _REQUIRED),
    **dict.fromkeys(FLAGS, _FLAG),
}
_LISTS_OF_STEPS = ("normalizers", "pretokenizers", "decoders")


def read_canonical(data: bytes, name: str) -> Document:
    """Parse a canonical tokenizer.json, with defaults for missing fields and merges as pairs.

    Args:
        data: The text of the tokenizer.json.
        name: Its name in error messages.

    Raises:
        TokenizerError: If a field is missing or has the wrong type. The message names the field and the expected type.
    """
    document = parse_document(data, name)
    problems = list(_complete(document, _DOCUMENT, ""))
    if not problems:
        problems += _complete(document["model"], _MODEL, "model.")
    if not problems and document["model"]["type"] == "BPE":
        problems += _complete(document["model"], _BPE, "model.")
        problems += _check_merges(document["model"])
    for index, entry in enumerate(document["added_tokens"] if not problems else ()):
        problems += _complete(entry, _ADDED, f"added_tokens[{index}].")
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if not problems and document[part] is not None:
            problems += _check_step(document[part], part)
    if problems:
        raise TokenizerError(f"{name}: {problems[0]}")
    if b"\\ud" in data.lower():
        try:
            json.dumps(document, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise TokenizerError(f"{name} contains a lone surrogate, which is not a character") from None
    return document


def _complete(node: Any, fields: _Fields, prefix: str) -> Iterator[str]:
    """Add missing fields, and yield the problems of the others. `prefix` begins the names of fields."""
    if not isinstance(node, dict):
        yield f"{prefix.removesuffix('.')} is {node!r:.40}, expected an object"
        return
    for key, (kind, description, default) in fields.items():
        value = node.get(key)
        if value is None:
            value = node[key] = list(default) if isinstance(default, list) else default
        if value is _REQUIRED:
            yield f"{prefix}{key} is missing, expected {description}"
        elif not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            yield f"{prefix}{key} is {value!r:.40}, expected {description}"


def _check_merges(model: dict[str, Any]) -> Iterator[str]:
    merges = model["merges"]
    for index, entry in enumerate(merges if isinstance(merges, list) else ()):
        pair = entry.split(" ") if isinstance(entry, str) else entry
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(half, str) for half in pair):
            yield f"model.merges[{index}] is {entry!r:.40}, expected two strings"
            return
        merges[index] = pair


def _check_step(step: Any, name: str) -> Iterator[str]:
    if not isinstance(step, dict):
        yield f"{name} is {step!r:.40}, expected an object"
        return
    for key in _LISTS_OF_STEPS:
        if not isinstance(inner := step.get(key, []), list):
            yield f"{name}.{key} is {inner!r:.40}, expected an array"
            return
        for index, each in enumerate(inner):
            yield from _check_step(each, f"{name}.{key}[{index}]")
