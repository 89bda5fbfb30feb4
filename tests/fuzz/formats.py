"""Mutations of files by their structure, as a hostile writer makes them, with lengths and checksums recomputed.

Each function takes a file's bytes and returns those of a changed file. If it cannot parse a file, it changes bytes.
"""

from __future__ import annotations

import io
import pickletools
import random
import re
import struct
import zipfile
from collections.abc import Iterator
from typing import Any, NamedTuple

from fuzz.mutate import MAX_BYTES, NUMBERS, Parts, mutated_bytes, mutated_document, mutated_safetensors

# ---- GGUF

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 8: (32, 34), 12: (256, 144), 14: (256, 210)}
_BLOCKS |= {20: (32, 18), 28: (1, 8), 30: (1, 2), 34: (256, 54), 39: (32, 17)}
_WORDS = (b"llama", b"gpt2", b"bert", b"gemma4", b"qwen2", b"llama-bpe", b"default", b"", b"<0x-1>", b"\xff")
_WORDS += (b"a" * 2000,)


class _Value(NamedTuple):
    """A GGUF value.

    Attributes:
        kind: GGUF's value type.
        content: The bytes of a scalar or a string; of an array, (value type of the elements, their contents).
    """

    kind: int
    content: Any


class _Head(NamedTuple):
    version: int
    entries: list[tuple[bytes, _Value]]
    tensors: list[tuple[bytes, list[int], int, int]]
    data: bytes


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise ValueError("truncated")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, code: str) -> int:
        found: int = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]
        return found

    def string(self) -> bytes:
        return self.take(self.number("Q"))

    def value(self, kind: int, depth: int = 0) -> _Value:
        if kind == 8:
            return _Value(kind, self.string())
        if kind == 9 and depth < 5:
            inner, count = self.number("I"), self.number("Q")
            if count > len(self.data):
                raise ValueError("too many elements")
            return _Value(kind, (inner, [self.value(inner, depth + 1).content for _ in range(count)]))
        return _Value(kind, self.take(_SIZES[kind]))


def mutated_gguf(data: bytes, rng: random.Random) -> bytes:
    """A GGUF file with one entry or tensor changed, and mostly with the offsets that its tensors need."""
    try:
        head = _gguf_head(data)
    except (ValueError, KeyError, struct.error):
        return mutated_bytes(data, rng)
    if head.tensors and rng.random() < 0.4:
        _change_tensors(head.tensors, rng)
    elif head.entries:
        _change_entries(head.entries, rng)
    if rng.random() < 0.6:
        head = _laid_out(head, rng)
    return _gguf_bytes(head)


def _gguf_head(data: bytes) -> _Head:
    cursor = _Cursor(data)
    if cursor.take(4) != b"GGUF":
        raise ValueError("not GGUF")
    version, n_tensors, n_entries = cursor.number("I"), cursor.number("Q"), cursor.number("Q")
    if max(n_tensors, n_entries) > len(data):
        raise ValueError("too many entries")
    entries = [(cursor.string(), cursor.value(cursor.number("I"))) for _ in range(n_entries)]
    tensors = []
    for _ in range(n_tensors):
        name, count = cursor.string(), cursor.number("I")
        if count > 9:
            raise ValueError("too many dimensions")
        tensors.append((name, [cursor.number("Q") for _ in range(count)], cursor.number("I"), cursor.number("Q")))
    return _Head(version, entries, tensors, data[-(-cursor.at // 32) * 32 :])


def _gguf_bytes(head: _Head) -> bytes:
    made = b"GGUF" + struct.pack("<IQQ", head.version, len(head.tensors), len(head.entries))
    for key, value in head.entries:
        made += _string(key) + struct.pack("<I", value.kind & 0xFFFFFFFF) + _content(value)
    for name, dims, kind, offset in head.tensors:
        made += _string(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *(n & (1 << 64) - 1 for n in dims))
        made += struct.pack("<IQ", kind & 0xFFFFFFFF, offset & (1 << 64) - 1)
    return made + bytes(-len(made) % 32) + head.data


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _content(value: _Value) -> bytes:
    if value.kind == 8:
        return _string(value.content)
    if value.kind == 9:
        inner, items = value.content
        return struct.pack("<IQ", inner, len(items)) + b"".join(_content(_Value(inner, item)) for item in items)
    return bytes(value.content)


def _change_entries(entries: list[tuple[bytes, _Value]], rng: random.Random) -> None:
    at = rng.randrange(len(entries))
    key, value = entries[at]
    match rng.randrange(8):
        case 0:
            del entries[at]
        case 1:
            entries[at] = rng.choice(entries)[0], value
        case 2:
            entries[at] = key, rng.choice(entries)[1]
        case 3:
            entries[at] = key, _any_value(rng)
        case _:
            entries[at] = key, _changed(value, rng)


def _any_value(rng: random.Random) -> _Value:
    kind = rng.choice((*_SIZES, 8, 9))
    if kind == 8:
        return _Value(8, rng.choice(_WORDS))
    if kind == 9:
        inner = rng.choice((*_SIZES, 8))
        item = rng.choice(_WORDS) if inner == 8 else _number(_SIZES[inner], rng)
        return _Value(9, (inner, [item] * rng.choice((0, 1, 2, 11))))
    return _Value(kind, _number(_SIZES[kind], rng))


def _number(size: int, rng: random.Random) -> bytes:
    return (rng.choice(NUMBERS) & (1 << 8 * size) - 1).to_bytes(size, "little")


def _changed(value: _Value, rng: random.Random) -> _Value:
    if value.kind == 8:
        return _Value(8, rng.choice(_WORDS) if rng.random() < 0.5 else mutated_bytes(value.content, rng)[:3000])
    if value.kind != 9:
        size = _SIZES[value.kind]
        if rng.random() < 0.5:
            return _Value(value.kind, _number(size, rng))
        near = int.from_bytes(value.content, "little") + rng.choice((-1, 1, 2, 16))
        return _Value(value.kind, (near & (1 << 8 * size) - 1).to_bytes(size, "little"))
    inner, items = value.content
    items = list(items)
    at = rng.randrange(len(items) + 1)
    match rng.randrange(5):
        case 0:
            del items[at : at + rng.choice((1, 1, 40))]
        case 1 if items:
            items.insert(at, rng.choice(items))
        case 2 if inner in _SIZES:
            inner = rng.choice([kind for kind, size in _SIZES.items() if size == _SIZES[inner]])
        case _ if at < len(items):
            items[at] = _changed(_Value(inner, items[at]), rng).content
    return _Value(9, (inner, items))


def _change_tensors(tensors: list[tuple[bytes, list[int], int, int]], rng: random.Random) -> None:
    at = rng.randrange(len(tensors))
    name, dims, kind, offset = tensors[at]
    match rng.randrange(7):
        case 0:
            del tensors[at]
        case 1:
            tensors[at] = rng.choice(tensors)[0] if rng.random() < 0.5 else name + b"x", dims, kind, offset
        case 2:
            tensors[at] = name, dims, rng.choice((*_BLOCKS, *range(45))), offset
        case 3:
            tensors[at] = name, dims, kind, offset + rng.choice((-32, 32, 1, *NUMBERS))
        case 4:
            tensors[at] = name, [*dims, rng.choice((0, 1, 2, 1 << 32))][-5:], kind, offset
        case _ if dims:
            axis = rng.randrange(len(dims))
            dims = list(dims)
            dims[axis] = rng.choice((*NUMBERS, dims[axis] * 2, dims[axis] + 1, 32, 256))
            tensors[at] = name, dims, kind, offset


def _laid_out(head: _Head, rng: random.Random) -> _Head:
    """The file with its tensors one after another and as many bytes of data as they need, unless they are large."""
    offset, tensors = 0, []
    for name, dims, kind, _ in head.tensors:
        block, size = _BLOCKS.get(kind, (1, 4))
        count = 1
        for n in dims:
            count *= n
        tensors.append((name, dims, kind, offset))
        offset += -(-(count // block * size) // 32) * 32
        if offset > 1 << 16:
            return head
    return head._replace(tensors=tensors, data=(head.data + rng.randbytes(64) * (offset // 64 + 1))[:offset])


# ---- PyTorch files

_OPCODES = {code.code.encode("latin-1"): code for code in pickletools.opcodes}
_NAMES = (
    b"os\nsystem\n",
    b"builtins\neval\n",
    b"torch\nFloatStorage\n",
    b"collections\nOrderedDict\n",
    b"builtins\ndict\n",
    b"torch._utils\n_rebuild_tensor_v2\n",
    b"torch._utils\n_rebuild_parameter\n",
    b"torch\nHalfStorage\n",
)


def mutated_archive(data: bytes, rng: random.Random) -> bytes:
    """A ZIP archive with its pickle, or a member's name or contents, changed, and checksums recomputed."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    except Exception:  # zipfile raises many kinds for files that earlier mutations have damaged
        return mutated_bytes(data, rng)
    if not members:
        return mutated_bytes(data, rng)
    at = next((i for i, (name, _) in enumerate(members) if name.endswith("data.pkl") and rng.random() < 0.7), None)
    if at is None:
        at = rng.randrange(len(members))
        name, content = members[at]
        match rng.randrange(4):
            case 0:
                del members[at]
            case 1:
                members.append((name.replace("0", "1"), content))
            case 2:
                members[at] = rng.choice((name + "x", "/" + name, "../" + name, rng.choice(members)[0])), content
            case _:
                members[at] = name, mutated_bytes(content, rng)
    else:
        members[at] = members[at][0], mutated_pickle(members[at][1], rng)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in members:
            archive.filelist = [info for info in archive.filelist if info.filename != name]
            archive.NameToInfo.pop(name, None)
            archive.writestr(name, content, zipfile.ZIP_DEFLATED if rng.random() < 0.02 else zipfile.ZIP_STORED)
    return stream.getvalue()


def mutated_pickle(data: bytes, rng: random.Random) -> bytes:
    """One or more pickles in a row with an instruction removed, repeated, swapped, inserted or changed."""
    steps = list(_steps(data))
    if not steps:
        return mutated_bytes(data, rng)
    at = rng.randrange(len(steps))
    match rng.randrange(8):
        case 0:
            del steps[at]
        case 1:
            steps.insert(at, rng.choice(steps))
        case 2:
            other = rng.randrange(len(steps))
            steps[at], steps[other] = steps[other], steps[at]
        case 3:
            steps.insert(at, _some_step(rng))
        case _:
            steps[at] = _changed_step(steps[at], rng)
    return b"".join(steps)


def _steps(data: bytes) -> Iterator[bytes]:
    """The instructions, and what follows the last valid one as a single piece."""
    stream = io.BytesIO(data)
    while (begin := stream.tell()) < len(data):
        starts = [begin]
        try:
            starts += [start for _, _, start in pickletools.genops(stream) if start is not None][1:]
            end = stream.tell()
        except Exception:  # pickletools raises many kinds
            yield data[begin:]
            return
        for start, stop in zip(starts, [*starts[1:], end], strict=True):
            yield data[start:stop]


def _some_step(rng: random.Random) -> bytes:
    kind = rng.choice(list(_OPCODES))
    match kind:
        case b"c":
            return kind + rng.choice(_NAMES)
        case b"J" | b"r" | b"j":
            return kind + _number(4, rng)
        case b"K" | b"q" | b"h":
            return kind + bytes([rng.choice((0, 1, 2, 5, 255))])
        case b"X":
            return kind + b"\1\0\0\0a"
        case b"\x8a":
            return kind + b"\x08" + _number(8, rng)
    return kind


def _changed_step(step: bytes, rng: random.Random) -> bytes:
    match step[:1]:
        case b"K" | b"M" | b"J" if rng.random() < 0.8:
            return rng.choice((b"J" + _number(4, rng), b"\x8a\x08" + _number(8, rng), b"N", b"\x88", b"G" + bytes(8)))
        case b"X":
            text = rng.choice((b"", b"0", b"1", b"storage", b"state_dict", b"../x", b"\xff", b"cpu", step[5:] * 2))
            return b"X" + struct.pack("<I", len(text)) + text
        case b"c":
            return b"c" + rng.choice(_NAMES)
        case b"q" | b"h":
            return step[:1] + bytes([rng.randrange(60)])
    return _some_step(rng) if rng.random() < 0.5 else mutated_bytes(step, rng)


# ---- protocol buffers


def mutated_message(data: bytes, rng: random.Random, depth: int = 0) -> bytes:
    """A message with a field removed, repeated, moved, retyped or changed, and lengths recomputed."""
    try:
        fields = list(_fields(data))
    except (ValueError, IndexError):
        return mutated_bytes(data, rng)
    if not fields:
        return _field(rng.randrange(1, 50), rng.choice((0, 2)), b"x")
    at = rng.randrange(len(fields))
    number, wire, value = fields[at]
    match rng.randrange(8):
        case 0:
            del fields[at]
        case 1:
            fields.insert(rng.randrange(len(fields) + 1), fields[at])
        case 2:
            fields[at] = rng.choice((1, 2, 3, 4, 5, 24, 41, 42, number + 1)), wire, value
        case 3:
            fields[at] = number, rng.choice((0, 1, 2, 5)), value
        case _ if wire == 2 and depth < 2 and isinstance(value, bytes) and rng.random() < 0.7:
            fields[at] = number, wire, mutated_message(value, rng, depth + 1)
        case _ if wire == 0:
            fields[at] = number, wire, rng.choice(NUMBERS)
        case _:
            changed = struct.pack("<f", rng.choice((0.0, -1e38, float("nan"), float("inf"), -2.0)))
            fields[at] = number, wire, changed if wire == 5 else mutated_bytes(value, rng)
    return b"".join(_field(*entry) for entry in fields)


def _fields(data: bytes) -> Iterator[tuple[int, int, Any]]:
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire, value = tag & 7, 0
        if wire == 0:
            value, at = _varint(data, at)
            yield tag >> 3, wire, value
            continue
        length = 8 if wire == 1 else 4
        if wire == 2:
            length, at = _varint(data, at)
        elif wire not in (1, 5):
            raise ValueError("not a message")
        if length > len(data) - at:
            raise ValueError("truncated")
        yield tag >> 3, wire, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 0x80:
            return value, at


def _field(number: int, wire: int, value: Any) -> bytes:
    if wire == 0:
        return _as_varint(number << 3) + _as_varint(value if isinstance(value, int) else len(value))
    content = value if isinstance(value, bytes) else value.to_bytes(8, "little")
    if wire == 2:
        return _as_varint(number << 3 | 2) + _as_varint(len(content)) + content
    return _as_varint(number << 3 | wire) + content.ljust(8, b"\0")[: 8 if wire == 1 else 4]


def _as_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


# ---- chat templates

_PIECES = """
{{ messages }}|{{ cycler.__init__.__globals__ }}|{{ ''.__class__.__mro__ }}|{{ lipsum(n=99999) }}
{{ range(10**9) | list }}|{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}
{{ 'x' * 10**9 }}|{{ '%999999999d' % 1 }}|{{ '{0.__class__}'.format(1) }}|{{ '{:999999999}'.format(1) }}
{{ messages | map(attribute='__class__') | list }}|{{ 9**9**9 }}|{{ messages[0] | attr('__init__') }}
{% set ns = namespace(a=1) %}{% set ns.__class__ = 1 %}|{{ (messages | tojson) * 999 }}
{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}|{{ self.__init__ }}|{{ loop }}|{% break %}
{{ joiner.__call__ }}|{{ messages.append(1) }}|{{ dict.fromkeys(range(99999), messages) }}
{{ raise_exception(messages) }}|{{ strftime_now('%' * 9999) }}|{{ 'a' | center(10**10) }}
{{ 'ab' | replace('', 'x' * 9999) }}|{% include 'x' %}|{% import 'os' as o %}
{{ messages | sort(attribute='x') }}|{{ [messages] | sum(start=[]) }}|{% generation %}a{% endgeneration %}
{{ 'a' | urlize }}|{{ 'a b' | wordwrap(0) }}|{{ messages | batch(0) | list }}|{{ 1 | round(10**9) }}
{{ messages | xmlattr }}|{{ get_flashed_messages.__globals__ }}|{{ ((((((((((((1)))))))))))) }}
{% raw %}{% endraw %}|{{ '\\ud800' }}|{# #}|{%|}}|{{ caller() }}|{% extends 'x' %}
{% block a %}{{ super() }}{% endblock %}|{{ messages | groupby('role') | list }}|{{ x.y.z }}
"""
TEMPLATE_PIECES = [piece for piece in re.split(r"\n|\|(?={)", _PIECES) if piece]


def mutated_template(data: bytes, rng: random.Random) -> bytes:
    """A template with a piece of Jinja inserted, removed or repeated."""
    text = data.decode("utf-8", "replace")
    at = rng.randrange(len(text) + 1)
    end = min(len(text), at + rng.randrange(1, 30))
    match rng.randrange(5):
        case 0:
            text = text[:at] + text[end:]
        case 1:
            text = text[:at] + text[at:end] * rng.choice((2, 50)) + text[end:]
        case 2:
            token = rng.choice(("(", "[", "{%", "}}", "'", "|", "-", " ~ ", ".x", "[0]", "\0", "\u2028"))
            text = text[:at] + token + text[at:]
        case _:
            text = text[:at] + rng.choice(TEMPLATE_PIECES) + text[at:]
    return text.encode("utf-8", "replace")[:20000]


# ---- by kind of file

_ENDINGS = {
    ".json": mutated_document,
    ".safetensors": mutated_safetensors,
    ".jinja": mutated_template,
    ".model": mutated_message,
}
_BEGINNINGS = {b"GGUF": mutated_gguf, b"PK\3\4": mutated_archive, b"\x80\2": mutated_pickle, b"\x80\4": mutated_pickle}


def mutated(name: str, data: bytes, rng: random.Random) -> bytes:
    """A file of this name with one change, mostly one that fits its format."""
    if rng.random() < 0.8:
        for ending, change in _ENDINGS.items():
            if name.endswith(ending):
                return change(data, rng)
        for beginning, change in _BEGINNINGS.items():
            if data.startswith(beginning):
                return change(data, rng)
    return mutated_bytes(data, rng)


def mutated_parts(names: tuple[str, ...], parts: Parts, rng: random.Random) -> Parts:
    """The files with one to four changes."""
    changed = list(parts)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        index = rng.randrange(len(changed))
        changed[index] = mutated(names[index], changed[index], rng)[:MAX_BYTES]
    return tuple(changed)
