"""The head of a GGUF file, read fast and without trust: metadata (keys and values) and the table of tensors.

Versions 2 and 3, all value types, nested arrays included. Every count and length is checked against the bytes that
are left before anything of that size is allocated, so a damaged or hostile file raises `ModelError` and nothing else.
What the tensors' types and offsets mean is `file`'s.
"""

from __future__ import annotations

import mmap
import struct
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from llamac.errors import ModelError

Buffer = bytes | mmap.mmap
Value = bool | int | float | str | list["Value"]

MAGIC = b"GGUF"
MAX_HEAD_BYTES = 1 << 28  # Llama 3's 128k-entry vocabulary with its merges takes 8 MB
MAX_ELEMENTS = 1 << 22  # of all arrays together: what bounds the memory that the decoded values take; Gemma 3 has 1.3 M
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17  # Mixtral's first files had a tensor per expert; DeepSeek's would have 45,000
MAX_NESTING = 4  # arrays of arrays; no known file uses more than one level

_STRING, _ARRAY, _BOOL = 8, 9, 7
# GGUF value type -> struct code; array.array takes the same codes.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}
_STRUCTS = {kind: struct.Struct("<" + code) for kind, code in _SCALARS.items()}
_MIN_ENTRY_BYTES = 8 + 4 + 1  # key length, value type, smallest value
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # name, number of dimensions, one dimension, type, offset
MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class GGUFMetadata:
    """What the head of a GGUF file says. `end` is the file offset of what follows: of the table of tensors."""

    version: int
    tensor_count: int
    values: dict[str, Value]
    end: int


class TensorEntry(NamedTuple):
    """A row of the table of tensors as it stands there, believed in nothing but its lengths.

    dims: the fastest-running first, as GGUF has them. type: GGUF's number. offset: from where the data begins."""

    name: str
    dims: tuple[int, ...]
    type: int
    offset: int


def read_metadata(path: str | Path) -> GGUFMetadata:
    """Read the metadata of the GGUF file `path` (a file without tensors will do).

    Raises ModelError with the name of the field where the file is truncated, damaged or not a GGUF file, and OSError
    where it cannot be opened.
    """
    with _mapped(path) as data:
        return parse_metadata(data, str(path))


def read_head(path: str | Path) -> tuple[GGUFMetadata, list[TensorEntry]]:
    """Metadata and table of tensors; `end` is where the table ends. Errors as `read_metadata`."""
    with _mapped(path) as data:
        return parse_head(data, str(path))


def parse_metadata(data: Buffer, name: str = "GGUF data") -> GGUFMetadata:
    """Read metadata from `data`, which holds a GGUF file from its first byte; `name` is for error messages."""
    return _Reader(data, name).read()


def parse_head(data: Buffer, name: str = "GGUF data") -> tuple[GGUFMetadata, list[TensorEntry]]:
    """Metadata and table of tensors, as `parse_metadata`."""
    reader = _Reader(data, name)
    metadata = reader.read()
    tensors = reader.tensors(metadata.tensor_count)
    return replace(metadata, end=reader.at), tensors


@contextmanager
def _mapped(path: str | Path) -> Iterator[Buffer]:
    with open(path, "rb") as file:
        if file.seek(0, 2) == 0:
            raise ModelError(f"{path}: the file is empty, a GGUF file was expected")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data


class _Reader:
    """A cursor over the file. `where` names the field being read, for error messages."""

    def __init__(self, data: Buffer, name: str) -> None:
        self.data = data
        self.name = name
        self.size = min(len(data), MAX_HEAD_BYTES)
        self.at = 0
        self.where = "the header"
        self.elements = 0

    def read(self) -> GGUFMetadata:
        version, tensor_count, count = self._header()
        values: dict[str, Value] = {}
        for index in range(count):
            self.where = f"key {index} of {count}"
            key = self._string()
            if not key or key in values:
                raise self._error(f"the key '{key:.80}' is there twice" if key else "a key is empty")
            self.where = f"'{key:.80}'"
            values[key] = self._value(self._scalar(4), 0)
        return GGUFMetadata(version, tensor_count, values, self.at)

    def tensors(self, count: int) -> list[TensorEntry]:
        """The table of tensors, which follows the metadata."""
        self.where = "the table of tensors"
        if count > (self.size - self.at) // _MIN_TENSOR_BYTES:
            raise self._error(f"{count} tensors do not fit into the file")
        if count > MAX_TENSORS:
            raise self._error(f"{count} tensors, more than {MAX_TENSORS} are not believable")
        found: dict[str, TensorEntry] = {}
        for index in range(count):
            self.where = f"tensor {index} of {count}"
            name = self._string()
            if not name or name in found:
                raise self._error(f"the tensor {name!r:.80} is there twice" if name else "its name is empty")
            self.where = f"tensor {name!r:.80}"
            n_dims = self._scalar(4)
            if not 1 <= n_dims <= MAX_DIMENSIONS:
                raise self._error(f"it has {n_dims} dimensions, expected 1 to {MAX_DIMENSIONS}")
            dims = tuple(self._scalar(10) for _ in range(n_dims))
            found[name] = TensorEntry(name, dims, self._scalar(4), self._scalar(10))
        return list(found.values())

    def _header(self) -> tuple[int, int, int]:
        if self.data[:4] != MAGIC:
            raise self._error("not a GGUF file: it does not begin with 'GGUF'")
        self.at = 4
        version = self._scalar(4)
        if version not in (2, 3):
            if version and version & 0xFFFF == 0:
                raise self._error("the file is big-endian; convert it to little-endian first")
            raise self._error(f"GGUF version {version} is not supported, only 2 and 3")
        tensor_count, count = self._scalar(10), self._scalar(10)
        if count > (self.size - self.at) // _MIN_ENTRY_BYTES:
            raise self._error(f"{count} metadata entries do not fit into the file")
        if count > MAX_KEYS:
            raise self._error(f"{count} metadata entries, more than {MAX_KEYS} are not believable")
        return version, tensor_count, count

    def _error(self, what: str) -> ModelError:
        return ModelError(f"{self.name}: {self.where}, at byte {self.at}: {what}")

    def _take(self, count: int) -> int:
        """Move over `count` bytes and return where they begin."""
        begin = self.at
        if count > self.size - begin:
            if len(self.data) > self.size:
                raise self._error(f"metadata and table of tensors are larger than {MAX_HEAD_BYTES} bytes")
            raise self._error(
                f"{count} bytes are needed, but the file ends after {self.size - begin}: it is truncated or damaged"
            )
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
            raise self._error(f"value type {kind} is unknown")
        return self._bool(self._scalar(kind)) if kind == _BOOL else self._scalar(kind)

    def _bool(self, value: int) -> bool:
        if value > 1:
            raise self._error(f"a boolean is {value}, neither 0 nor 1")
        return value == 1

    def _array(self, depth: int) -> list[Value]:
        kind, count = self._scalar(4), self._scalar(10)
        if depth == MAX_NESTING:
            raise self._error(f"arrays are nested more than {MAX_NESTING} deep")
        self.elements += count
        if self.elements > MAX_ELEMENTS:
            raise self._error(f"an array of {count} elements: more than {MAX_ELEMENTS} in all are not believable")
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            return [self._array(depth + 1) for _ in range(count)]
        if kind not in _SCALARS:
            raise self._error(f"an array of the unknown value type {kind}")
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
        """The hot loop: 400,000 strings in Llama 3's vocabulary. Same checks as `_string`, written out."""
        if count > (self.size - self.at) // 8:
            raise self._error(f"{count} strings do not fit into the file")
        data, at, size = self.data, self.at, self.size
        unpack = _STRUCTS[10].unpack_from
        texts: list[Value] = []
        append = texts.append
        try:
            for _ in range(count):
                begin = at + 8
                (length,) = unpack(data, at)
                at = begin + length
                if at > size:
                    break
                append(str(data[begin:at], "utf-8"))
        except struct.error:  # fewer than 8 bytes were left for a length
            at = size + 1
        except UnicodeDecodeError as error:
            self.at = at
            raise self._error(f"string {len(texts)} of the array is not valid UTF-8 ({error.reason})") from None
        if at > size:
            raise self._error(
                f"string {len(texts)} of {count} ends behind the end of the file: it is truncated or damaged"
            )
        self.at = at
        return texts
