"""Reads the head of an untrusted GGUF file: metadata (keys and values) and the tensor table.

It supports versions 2 and 3 and all value types, including nested arrays. Every count and length is checked against the
remaining bytes before memory of that size is allocated, so a damaged or hostile file raises `ModelError` and nothing
else. The file is read, not mapped: a mapping of a file that another process truncates would kill this one (SIGBUS).
`llamac.export.gguf.file` interprets the tensors' types and offsets.
"""

from __future__ import annotations

import os
import struct
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from llamac._core import read_strings
from llamac.errors import ModelError

Value = bool | int | float | str | list["Value"]

MAGIC = b"GGUF"
Result = TypeVar("Result")

MAX_HEAD_BYTES = 1 << 28  # Llama 3's head, with 128k tokens and their merges, has 8 MB
FIRST_READ_BYTES = 1 << 24  # a longer head is read again, twice as far
MAX_ELEMENTS = 1 << 22  # of all arrays together; bounds the memory of the decoded values; Gemma 3 has 1.3 million
MAX_ARRAYS = 1 << 12  # including nested ones
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17  # Mixtral's first files had a tensor per expert; DeepSeek's would have 45,000
MAX_NESTING = 4  # arrays of arrays; known files use one level at most

_STRING, _ARRAY, _BOOL = 8, 9, 7
# GGUF value type -> struct code; array.array takes the same codes.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}
_STRUCTS = {kind: struct.Struct("<" + code) for kind, code in _SCALARS.items()}
_MIN_ENTRY_BYTES = 8 + 4 + 1  # key length, value type, smallest value
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # name, number of dimensions, one dimension, type, offset
MAX_DIMENSIONS = 4
STRINGS = 1 << 13  # that one call of the core reads


@dataclass(frozen=True)
class GGUFMetadata:
    """The metadata of a GGUF file.

    Attributes:
        version: The GGUF version.
        tensor_count: The number of tensors.
        values: The values by key.
        end: The file offset of the byte after the metadata, where the tensor table begins.
    """

    version: int
    tensor_count: int
    values: dict[str, Value]
    end: int


class TensorEntry(NamedTuple):
    """A row of the tensor table. Only its lengths have been checked.

    Attributes:
        name: GGUF's name of the tensor.
        dims: Dimensions in GGUF's order, the fastest-varying first.
        type: GGUF's number of the tensor's type.
        offset: Bytes from the start of the data.
    """

    name: str
    dims: tuple[int, ...]
    type: int
    offset: int


class GGUFHead(NamedTuple):
    """The metadata and the tensor table of a file."""

    metadata: GGUFMetadata
    entries: list[TensorEntry]


def read_metadata(path: str | Path) -> GGUFMetadata:
    """Read the metadata of a GGUF file, which can lack tensors.

    Raises:
        ModelError: If the file is truncated, damaged or not a GGUF file; the message names the field.
        OSError: If the file cannot be opened.
    """
    return _read(path, lambda reader: reader.read())


def read_head(path: str | Path) -> GGUFHead:
    """Read metadata and tensor table. `end` is the end of the table. Errors are those of `read_metadata`."""
    return _read(path, _head)


def parse_metadata(data: bytes, name: str = "GGUF data") -> GGUFMetadata:
    """Parse the metadata of a GGUF file from its first bytes; `name` is for error messages."""
    return _Reader(data, len(data), name).read()


def parse_head(data: bytes, name: str = "GGUF data") -> GGUFHead:
    """Parse metadata and tensor table, like `parse_metadata`."""
    return _head(_Reader(data, len(data), name))


def _head(reader: _Reader) -> GGUFHead:
    metadata = reader.read()
    tensors = reader.tensors(metadata.tensor_count)
    return GGUFHead(replace(metadata, end=reader.at), tensors)


def _read(path: str | Path, parse: Callable[[_Reader], Result]) -> Result:
    """Parse the first bytes of a file, and more of them until the parser has enough."""
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            raise ModelError(f"{path}: the file is empty, expected a GGUF file")
        count = FIRST_READ_BYTES
        while True:
            file.seek(0)
            data = file.read(min(count, size))
            if len(data) < min(count, size):
                size = len(data)  # another process truncated the file
            try:
                return parse(_Reader(data, size, str(path)))
            except _MoreNeeded:
                count *= 2


class _MoreNeeded(Exception):
    """The parser needs bytes of the file that have not been read yet."""


class _Reader:
    """A cursor over the first bytes of a file.

    Attributes:
        data: The bytes that have been read.
        total: Size of the whole file.
        where: The field that is being read, for error messages.
    """

    def __init__(self, data: bytes, total: int, name: str) -> None:
        self.data = data
        self.total = total
        self.name = name
        self.size = min(total, MAX_HEAD_BYTES)
        self.at = 0
        self.where = "the header"
        self.elements = 0
        self.arrays = 0

    def read(self) -> GGUFMetadata:
        version, tensor_count, count = self._header()
        values: dict[str, Value] = {}
        for index in range(count):
            self.where = f"key {index} of {count}"
            key = self._string()
            if not key or key in values:
                raise self._error(f"the key '{key:.80}' appears twice" if key else "a key is empty")
            self.where = f"'{key:.80}'"
            values[key] = self._value(self._scalar(4), 0)
        return GGUFMetadata(version, tensor_count, values, self.at)

    def tensors(self, count: int) -> list[TensorEntry]:
        """The tensor table, which follows the metadata."""
        self.where = "the tensor table"
        self._check_count(count, "tensors", _MIN_TENSOR_BYTES, MAX_TENSORS)
        found: dict[str, TensorEntry] = {}
        for index in range(count):
            self.where = f"tensor {index} of {count}"
            name = self._string()
            if not name or name in found:
                raise self._error(f"the tensor {name!r:.80} appears twice" if name else "its name is empty")
            self.where = f"tensor {name!r:.80}"
            n_dims = self._scalar(4)
            if not 1 <= n_dims <= MAX_DIMENSIONS:
                raise self._error(f"it has {n_dims} dimensions, expected 1 to {MAX_DIMENSIONS}")
            dims = tuple(self._scalar(10) for _ in range(n_dims))
            found[name] = TensorEntry(name, dims, self._scalar(4), self._scalar(10))
        return list(found.values())

    def _header(self) -> tuple[int, int, int]:
        if self.data[:4] != MAGIC:
            raise self._error("not a GGUF file: it does not start with 'GGUF'")
        self.at = 4
        version = self._scalar(4)
        if version not in (2, 3):
            if version and version & 0xFFFF == 0:
                raise self._error("the file is big-endian; convert it to little-endian first")
            raise self._error(f"GGUF version {version} is not supported, expected 2 or 3")
        tensor_count, count = self._scalar(10), self._scalar(10)
        self._check_count(count, "metadata entries", _MIN_ENTRY_BYTES, MAX_KEYS)
        return version, tensor_count, count

    def _check_count(self, count: int, items: str, min_bytes: int, limit: int) -> None:
        """Check that a number of items of at least `min_bytes` each can follow in the file."""
        if count > (self.size - self.at) // min_bytes:
            raise self._error(f"{count} {items} do not fit in the file, which is damaged or incomplete")
        if count > limit:
            raise self._error(f"{count} {items}, expected at most {limit}")

    def _error(self, problem: str) -> ModelError:
        return ModelError(f"{self.name}: {self.where}, at byte {self.at}: {problem}")

    def _take(self, count: int) -> int:
        """Advance over `count` bytes and return where they begin."""
        begin = self.at
        if count > self.size - begin:
            if self.total > self.size:
                raise self._error(f"metadata and tensor table have more than {MAX_HEAD_BYTES} bytes")
            raise self._error(
                f"{count} bytes are needed, but the file ends after {self.size - begin}: it is truncated or damaged"
            )
        if begin + count > len(self.data):
            raise _MoreNeeded
        self.at = begin + count
        return begin

    def _scalar(self, kind: int) -> int:
        decoder = _STRUCTS[kind]
        return cast(int, decoder.unpack_from(self.data, self._take(decoder.size))[0])

    def _string(self) -> str:
        length = self._scalar(10)
        begin = self._take(length)
        try:
            return self.data[begin : begin + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._error(f"a string is not valid UTF-8 ({error.reason})") from None

    def _value(self, kind: int, depth: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(depth)
        if kind not in _SCALARS:
            raise self._error(f"unknown value type {kind}")
        return self._bool(self._scalar(kind)) if kind == _BOOL else self._scalar(kind)

    def _bool(self, value: int) -> bool:
        if value > 1:
            raise self._error(f"a boolean is {value}, expected 0 or 1")
        return value == 1

    def _array(self, depth: int) -> list[Value]:
        kind, count = self._scalar(4), self._scalar(10)
        if depth == MAX_NESTING:
            raise self._error(f"arrays are nested more than {MAX_NESTING} deep")
        self.elements += count
        if self.elements > MAX_ELEMENTS:
            raise self._error(f"an array of {count} elements, expected at most {MAX_ELEMENTS} in all arrays together")
        self.arrays += 1 + (count if kind == _ARRAY else 0)
        if self.arrays > MAX_ARRAYS:
            raise self._error(f"an array of {count} arrays, expected at most {MAX_ARRAYS} arrays in all")
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            self.arrays -= count  # each counts itself
            return [self._array(depth + 1) for _ in range(count)]
        if kind not in _SCALARS:
            raise self._error(f"an array of unknown value type {kind}")
        return self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> list[Value]:
        length = count * _STRUCTS[kind].size
        begin = self._take(length)
        numbers: array[Any] = array(_SCALARS[kind], self.data[begin : begin + length])
        if sys.byteorder == "big":
            numbers.byteswap()
        if kind == _BOOL:
            return [self._bool(number) for number in numbers]
        return cast("list[Value]", numbers.tolist())

    def _strings(self, count: int) -> list[Value]:
        """Read an array of strings with the checks of `_string`, in the core: Llama 3 has 400,000 strings."""
        if count > (self.size - self.at) // 8:
            raise self._error(f"{count} strings do not fit in the file, which is damaged or incomplete")
        size, available = self.size, len(self.data)
        texts: list[str] = []
        at, problem = self.at, None
        while problem is None and at <= available and len(texts) < count:  # Ctrl-C can interrupt between the calls
            found, at, problem = read_strings(self.data, at, min(STRINGS, count - len(texts)))
            texts += found
        if problem is not None:
            self.at = at
            raise self._error(f"string {len(texts)} of the array is not valid UTF-8 ({problem})")
        if available < at <= size:
            raise _MoreNeeded
        if at > size:
            raise self._error(
                f"string {len(texts)} of {count} ends beyond the end of the file: it is truncated or damaged"
            )
        self.at = at
        return cast("list[Value]", texts)
