"""Mutations of bytes, of numbers in binary files, and of values in JSON documents."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

Parts = tuple[bytes, ...]

# Numbers at which arithmetic on sizes tends to go wrong.
NUMBERS: tuple[int, ...] = (0, 1, 2, 3, 7, 8, 31, 32, 127, 128, 255, 256, 0x7FFF, 0xFFFF, 1 << 20, 1 << 24)
NUMBERS += ((1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, 1 << 61, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
MAX_BYTES = 1 << 18


def odd_value(rng: random.Random) -> Any:
    """A JSON value that a reader may not expect."""
    number = rng.choice(NUMBERS)
    nested: Any = []
    for _ in range(rng.choice((3, 200))):
        nested = [nested]
    values = [None, True, False, "", "x", "\0", "\ud800", "0", "../x", "a" * 3000, [], {}, {"": None}, nested, number]
    values += [-number, float(number) / 3, -1, 0.0, -0.0, 1e-320, 1e308, 10**400, float("nan"), float("inf")]
    values += [[number], [[]]]
    return rng.choice(values)


def mutated_json(document: Any, rng: random.Random) -> Any:
    """The document with one value or key changed."""
    if not isinstance(document, (dict, list)) or not document or rng.random() < 0.05:
        if isinstance(document, str) and rng.random() < 0.5:
            at = rng.randrange(len(document) + 1)
            inserted = rng.choice(("", "\0", "\ud800", "<0x-1>", "\U0001f600", document))
            return document[:at] + inserted + document[at + 1 :]
        if type(document) in (int, float) and rng.random() < 0.5:
            return document + rng.choice((-1, 1, document))
        return odd_value(rng)
    if isinstance(document, list):
        changed = list(document)
        at = rng.randrange(len(changed))
        match rng.randrange(6):
            case 0:
                del changed[at]
            case 1:
                changed.insert(at, changed[rng.randrange(len(changed))])
            case _:
                changed[at] = mutated_json(changed[at], rng)
        return changed
    entries = dict(document)
    key = rng.choice(list(entries))
    match rng.randrange(8):
        case 0:
            del entries[key]
        case 1:
            entries[rng.choice(("", "x", "\0", key + "x", "__metadata__"))] = entries.pop(key)
        case 2:
            entries[rng.choice(list(entries))] = entries[key]
        case _:
            entries[key] = mutated_json(entries[key], rng)
    return entries


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """The bytes with one change: a flipped bit, another number, a cut, a range copied from elsewhere or repeated."""
    if not data:
        return rng.randbytes(rng.randrange(1, 40))
    found = bytearray(data)
    at = rng.randrange(len(found))
    match rng.randrange(9):
        case 0:
            found[at] ^= 1 << rng.randrange(8)
        case 1:
            found[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        case 2 | 3 | 4:
            size = rng.choice((1, 2, 4, 4, 8, 8))
            at = at // size * size if rng.random() < 0.5 else at
            found[at : at + size] = (rng.choice(NUMBERS) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        case 5:
            del found[at:]
        case 6:
            del found[at : at + rng.choice((1, 4, 8, 100))]
        case 7:
            length = rng.choice((1, 4, 8, 100))
            start = rng.randrange(len(found))
            found[at : at + length] = found[start : start + length]
        case _:
            found[at:at] = found[at : at + rng.choice((1, 4, 8, 100))] * rng.choice((1, 2, 50))
    return bytes(found[:MAX_BYTES])


def mutated_document(data: bytes, rng: random.Random) -> bytes:
    """A JSON file with one change; of anything else, changed bytes."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return mutated_bytes(data, rng)
    text = json.dumps(mutated_json(document, rng), ensure_ascii=rng.random() < 0.8)
    return text.encode("utf-8", "surrogatepass")


def mutated_safetensors(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file with one change in its header, and the header's length corrected."""
    length = int.from_bytes(data[:8], "little")
    header = mutated_document(data[8 : 8 + length], rng)
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


# ---- several files in one string of bytes, as fuzzers need them


def pack(parts: Parts) -> bytes:
    """The files one after another, each but the last preceded by its length."""
    return b"".join(struct.pack("<I", len(part)) + part for part in parts[:-1]) + parts[-1]


def unpack(data: bytes, count: int) -> Parts:
    """The inverse of `pack`, defined for any bytes."""
    parts = []
    for _ in range(count - 1):
        length = int.from_bytes(data[:4], "little")
        parts.append(data[4 : 4 + length])
        data = data[4 + length :]
    return (*parts, data)
