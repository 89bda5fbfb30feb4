"""JSON of checkpoints, read without guessing: an object, no key twice, no number that is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llamac.errors import ExportError
from llamac.export.files import read_small


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ExportError names the file and what is wrong with it."""
    return parse_object(read_small(path), str(path))


def parse_object(data: bytes, name: str) -> dict[str, Any]:
    """`data` as a JSON object; ExportError with `name` if it is none."""
    try:
        document = json.loads(data.decode(), object_pairs_hook=_without_duplicates, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{name} is no valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise ExportError(f"{name} holds no JSON object")
    return document


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for name, value in pairs:
        if name in document:
            raise ValueError(f"the key {name!r:.80} is there more than once")
        document[name] = value
    return document


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")
