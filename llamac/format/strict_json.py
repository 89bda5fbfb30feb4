"""Parses untrusted JSON with limits on size, depth and number of values.

Ambiguous documents are errors: duplicate keys, NaN or Infinity, an unexpected kind of value at the top level, and bytes
that are not UTF-8.
"""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

from llamac.errors import ExportError, LlamacError
from llamac.format.small_files import read_small

MAX_BYTES = 1 << 24
MAX_INDEX_BYTES = 1 << 26  # the limit for an index of weights
MAX_VALUES = 1 << 20  # a value takes up to 150 bytes of memory; the largest known index has 0.3 million
MAX_DEPTH = 100  # nested objects and arrays; small enough for recursive functions

INFINITY = {"__float__": "Infinity"}


def read_object(
    path: Path,
    *,
    error: type[LlamacError] = ExportError,
    max_bytes: int = MAX_BYTES,
    max_values: int = MAX_VALUES,
    infinity: bool = False,
) -> dict[str, Any]:
    """Read the JSON object in a file.

    Args:
        path: The file.
        error: The class of the error to raise.
        max_bytes: The largest size of the file.
        max_values: The largest number of values.
        infinity: See `parse_object`.

    Raises:
        LlamacError: Of the class `error`, as for `parse_object`.
        OSError: If the file cannot be read.
    """
    data = read_small(path, max_bytes, error)
    limits: dict[str, Any] = {"max_bytes": max_bytes, "max_values": max_values}
    return parse_object(data, str(path), error=error, infinity=infinity, **limits)


def parse_object(
    data: bytes | str,
    name: str,
    *,
    error: type[LlamacError] = ExportError,
    max_bytes: int = MAX_BYTES,
    max_values: int = MAX_VALUES,
    max_depth: int = MAX_DEPTH,
    infinity: bool = False,
) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        data: JSON, as str or UTF-8.
        name: The document's name in error messages.
        error: The class of the error to raise.
        max_bytes: The largest size of `data`.
        max_values: The largest number of values. They are counted before parsing by commas and opening brackets
            outside strings.
        max_depth: The deepest nesting of objects and arrays.
        infinity: Python writes infinity as Infinity. Read it as `INFINITY`, as transformers 5 writes it.

    Raises:
        LlamacError: Of the class `error`, if `data` is not a JSON object, has a duplicate key or a number that is not
            finite, or exceeds a limit.
    """
    document = _parse(data, name, error, max_bytes, max_values, max_depth, infinity)
    if not isinstance(document, dict):
        raise error(f"{name} is not a JSON object")
    return document


def parse_array(data: bytes | str, name: str, *, error: type[LlamacError] = ExportError) -> list[Any]:
    """Parse a JSON array.

    Args:
        data: JSON, as str or UTF-8.
        name: The document's name in error messages.
        error: The class of the error to raise.

    Raises:
        LlamacError: Of the class `error`, as for `parse_object`.
    """
    document = _parse(data, name, error, MAX_BYTES, MAX_VALUES, MAX_DEPTH)
    if not isinstance(document, list):
        raise error(f"{name} is not a JSON array")
    return document


def _parse(
    data: bytes | str,
    name: str,
    error: type[LlamacError],
    max_bytes: int,
    max_values: int,
    max_depth: int,
    infinity: bool = False,
) -> object:
    if isinstance(data, str):
        data = data.encode(errors="surrogatepass")
    if len(data) > max_bytes:
        raise error(f"{name} has {len(data)} bytes, the limit is {max_bytes}")
    if _separators(data) > max_values and _separators(_without_strings(data)) > max_values:
        raise error(f"{name} has more than {max_values} values")
    if data.startswith(codecs.BOM_UTF8):
        raise error(f"{name} is not valid JSON: it begins with a byte order mark, which JSON does not have")
    try:
        constant = _infinity if infinity else _not_a_number
        document = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=constant)
    except RecursionError:
        raise error(f"{name} is nested more than {max_depth} deep") from None
    except UnicodeDecodeError as problem:
        wrong = f"byte {problem.start} is 0x{data[problem.start]:02x}"
        raise error(f"{name} is not valid JSON, which is in UTF-8: {wrong}") from None
    except ValueError as problem:
        raise error(f"{name} is not valid JSON: {problem}") from None
    _check_depth(document, name, error, max_depth)
    return document


def _separators(data: bytes) -> int:
    return sum(map(data.count, (b",", b"[", b"{")))


def _without_strings(data: bytes) -> bytes:
    """Return a document without the texts in its strings. Needs a few times the memory of the document."""
    import numpy as np

    text = np.frombuffer(data.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    is_inside = np.logical_xor.accumulate(text == ord('"'))
    return text[~is_inside].tobytes()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {key!r:.80}")
            seen.add(key)
    return document


def _not_a_number(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def _infinity(text: str) -> dict[str, str]:
    if text != "Infinity":
        _not_a_number(text)
    return INFINITY


def _check_depth(document: object, name: str, error: type[LlamacError], max_depth: int) -> None:
    level: list[Any] = [document]
    for _ in range(max_depth + 1):
        level = [node for node in level if type(node) is dict or type(node) is list]
        if not level:
            return
        level = [value for node in level for value in (node.values() if type(node) is dict else node)]
    raise error(f"{name} is nested more than {max_depth} deep")
