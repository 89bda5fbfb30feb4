"""JSON of checkpoints, read without guessing: an object, no key twice, no number that is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llamac.errors import ExportError

MAX_FILE_BYTES = 1 << 26  # an index of a million tensors; the files read with this have a few kilobytes


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ExportError names the file and what is wrong with it."""
    with open(path, "rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ExportError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    return parse_object(data, str(path))


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
    document = dict(pairs)
    if len(document) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is there more than once")
    return document


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")
