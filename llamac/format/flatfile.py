"""The flat file: maps it, reads its records, and packs records for the writer.

The names, types and offsets of all fields come from the C core's table (`_core.fields`), which the core's own checks
also use. docs/format.md is the specification.
"""

from __future__ import annotations

import copy
import errno
import functools
import hashlib
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamac import _core
from llamac.errors import ArgumentError, BusyError, ClosedError, LlamacError, ModelError, UnsupportedError
from llamac.format.strict_json import parse_object
from llamac.format.strips import unpack_tensor
from llamac.progress import Progress, silent

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Digest = bytes  # an alias for classes with a member named bytes

MEMORY = ("map", "populate", "huge")
MADV_POPULATE_READ = 22  # since Linux 5.14; Python has no name for it
POPULATE_BYTES = 64 << 20  # bytes to read between checks for Ctrl-C
HASH_BYTES = 1 << 24  # of a step of a hash

MAGIC = b"\x89llamac\n"
UNHASHED = bytes(32)  # in place of a tensor's SHA-256: it has not been computed
ALIGNMENT = 64
SECTIONS = _core.section_names()

# struct codes of the core's field types (enum llamac_type): u32, i32, f32, u64, bytes, text
_CODES = ("I", "i", "f", "Q", "s", "s")
_TEXT = 5


def without_logits(config: Mapping[str, Any]) -> str | None:
    """What a model without a next token is: "an encoder" or "a reranker"; None: a language model or a drafter."""
    if config["two_sided"]:
        return "an encoder"
    return "a reranker" if config["scores_pairs"] else None


@dataclass(frozen=True)
class Field:
    """A member of a record.

    Attributes:
        name: Its name.
        type: Its type, an index into `_CODES`.
        offset: Its offset in the record, in bytes.
        count: Its number of elements, or its size in bytes if it is text or bytes.
        low: The least valid number.
        high: The largest valid number.
        names: The names of an enumeration's values low, low + 1, ...; otherwise empty.
    """

    name: str
    type: int
    offset: int
    count: int
    low: float
    high: float
    names: tuple[str, ...]

    @functools.cached_property
    def layout(self) -> struct.Struct:
        """The layout of the member's elements."""
        return struct.Struct(f"<{self.count}{_CODES[self.type]}")


def _field_table() -> dict[str, tuple[Field, ...]]:
    table: dict[str, list[Field]] = {}
    for record, name, kind, offset, count, low, high, names in _core.fields():
        values = tuple(names.split(",")) if names else ()
        table.setdefault(record, []).append(Field(name, kind, offset, count, low, high, values))
    return {record: tuple(fields) for record, fields in table.items()}


FIELDS = _field_table()
_MEMBERS = {record: {member.name: member for member in members} for record, members in FIELDS.items()}
RECORD_BYTES = {record: _core.record_bytes(record) for record in FIELDS}
_TENSOR_HASH = next(field.offset for field in FIELDS["tensor"] if field.name == "sha256")
# header fields with only one valid value
VERSION, NUMERICS = (
    next(int(field.low) for field in FIELDS["header"] if field.name == name) for name in ("version", "numerics")
)


def unpack_record(record: str, data: bytes | memoryview) -> dict[str, Any]:
    """Unpack a record.

    Args:
        record: The record's name.
        data: Its bytes.

    Returns:
        The members by name: numbers, lists of numbers, bytes or str. An enumeration's value is its name.
    """
    values: dict[str, Any] = {}
    for member in FIELDS[record]:
        found = member.layout.unpack_from(data, member.offset)
        value: Any = found[0] if len(found) == 1 else list(found)
        if member.type == _TEXT:
            value = value.rstrip(b"\0").decode("ascii", "replace")
        elif member.names and isinstance(value, list):
            value = [_name(member, item) for item in value]
        elif member.names:
            value = _name(member, value)
        values[member.name] = value
    return values


def _name(member: Field, value: int) -> int | str:
    """The name of an enumeration's value; the value itself if it has none."""
    return member.names[value - int(member.low)] if member.low <= value <= member.high else value


def _number(record: str, member: Field, value: Any) -> Any:
    """The value of an enumeration's name; other values unchanged."""
    if not member.names or not isinstance(value, str):
        return value
    if value not in member.names:
        raise ArgumentError(f"{record}: {member.name} is {value!r}, expected one of {', '.join(member.names)}")
    return member.names.index(value) + int(member.low)


def pack_record(record: str, values: dict[str, Any]) -> bytes:
    """Pack a record, the inverse of `unpack_record`.

    Args:
        record: The record's name.
        values: The members by name. Missing members and the rest of short lists are zero.

    Raises:
        ArgumentError: If a member is unknown, or a value does not fit or is out of its range.
    """
    known = _MEMBERS[record]
    unknown = values.keys() - known.keys()
    if unknown:
        raise ArgumentError(f"a {record} record has no member {', '.join(sorted(unknown))}")
    data = bytearray(RECORD_BYTES[record])
    for name, value in values.items():
        member = known[name]
        if member.count == 1 and isinstance(value, int | float) and member.low <= value <= member.high:
            member.layout.pack_into(data, member.offset, value)  # most members are such numbers
            continue
        if member.type == _TEXT:
            value = value.encode("ascii")
            if len(value) >= member.count:
                raise ArgumentError(f"{record}: {name} {value!r} is longer than {member.count - 1} bytes")
        items = [_number(record, member, item) for item in (value if isinstance(value, list | tuple) else [value])]
        if len(items) > member.count:
            raise ArgumentError(f"{record}: {name} has {len(items)} elements, at most {member.count} fit")
        if member.type < _TEXT - 1:
            wrong = [item for item in items if not member.low <= item <= member.high]
            if wrong:
                raise ArgumentError(f"{record}: {name} is {wrong[0]}, expected {member.low:g} to {member.high:g}")
            items += [0] * (member.count - len(items))
        member.layout.pack_into(data, member.offset, *items)
    return bytes(data)


@dataclass(frozen=True)
class Section:
    """A section's position and size in the file, in bytes, and its SHA-256."""

    offset: int
    bytes: int
    sha256: Digest


def _unpack_head(tables: bytes) -> tuple[dict[str, Any], dict[str, Section]]:
    """The header's values, and the sections by name."""
    size = RECORD_BYTES["section"]
    header = unpack_record("header", tables[: RECORD_BYTES["header"]])
    starts = range(RECORD_BYTES["header"], RECORD_BYTES["header"] + size * header["n_sections"], size)
    records = [unpack_record("section", tables[start : start + size]) for start in starts]
    return header, {record["name"]: Section(record["offset"], record["bytes"], record["sha256"]) for record in records}


def pack_head(sections: dict[str, Section], header: dict[str, Any]) -> bytes:
    """Pack the header and the section table.

    Args:
        sections: The sections in file order.
        header: The header's values. `n_sections`, `id` and `sha256` follow from the sections.
    """
    table = b"".join(pack_record("section", {"name": name, **vars(section)}) for name, section in sections.items())
    hashes = b"".join(section.sha256 for section in sections.values())
    values = {**header, "n_sections": len(sections), "id": hashlib.sha256(hashes).digest(), "sha256": bytes(32)}
    values["sha256"] = hashlib.sha256(pack_record("header", values) + table).digest()
    return pack_record("header", values) + table


def with_hashes(tables: bytes, digests: Sequence[bytes]) -> bytes:
    """The tables of a flat file with these SHA-256 of its tensors, and with all hashes that follow from them."""
    header, sections = _unpack_head(tables)
    table = sections["tensors"]
    changed = bytearray(tables)
    for index, digest in enumerate(digests):
        place = table.offset + index * RECORD_BYTES["tensor"] + _TENSOR_HASH
        changed[place : place + len(digest)] = digest
    records = changed[table.offset : table.offset + table.bytes]
    found = {"tensors": hashlib.sha256(records).digest(), "data": hashlib.sha256(b"".join(digests)).digest()}
    sections |= {name: replace(sections[name], sha256=digest) for name, digest in found.items()}
    head = pack_head(sections, header)
    changed[: len(head)] = head
    return bytes(changed)


@dataclass(frozen=True)
class TensorRecord:
    """An entry of the tensor table.

    Attributes:
        name: The tensor's name.
        dtype: Its number format.
        shape: Its dimensions.
        offset: Its position in the file, in bytes.
        bytes: Its size in the file.
        sha256: The SHA-256 of its bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    sha256: Digest


class FlatFile:
    """A flat file, mapped read-only.

    Opening it makes the core check its structure. A section is verified against its hash each time it is read.

    Args:
        path: The file.
        memory: When to read the weights: "map" on first use; "populate" now; "huge" now, into huge pages if the kernel
            has any.
        descriptor: Map this open file, which need not have a name. `path` is then only its name in messages.

    Attributes:
        path: The file.
        core: The core's model of the mapped file.
        header: The header record.
        config: The config record.
        sections: The sections by name.

    Raises:
        OSError: If the file cannot be read.
        ModelError: If it is damaged or not a model file.
        ArgumentError: If `memory` is unknown.
        UnsupportedError: If the system does not support `memory`.
    """

    def __init__(self, path: str | Path, memory: str = "map", *, descriptor: int | None = None) -> None:
        if memory not in MEMORY:
            raise ArgumentError(f"memory is {memory!r}, expected {', '.join(map(repr, MEMORY))}")
        self.path = Path(path)
        self._owns_map = True
        self._map = self._mapped() if descriptor is None else mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        try:
            # the core checks structure, hashes and ranges, so the code below can trust the tables
            self.core = _core.Model(self._map)
        except LlamacError as error:
            self._map.close()
            raise type(error)(f"{self.path}: {error}") from None
        self._lock = threading.RLock()  # reentrant: a signal handler may close the file that its thread reads
        self._views = 0  # memoryviews of the mapping that `_hash` uses
        # the core's copy, because the file may have changed since the check
        self._tables = self.core.tables()
        self.header, self.sections = _unpack_head(self._tables)
        self.config = unpack_record("config", self._table("config"))
        self._metadata: dict[str, Any] | None = None
        if memory != "map":
            self._populate(memory == "huge")

    def _mapped(self) -> mmap.mmap:
        if self.path.is_dir():
            raise ModelError(f"{self.path} is a directory: run `llamac export` on it first")
        if self.path.exists() and not self.path.is_file():
            raise ModelError(
                f"{self.path} is not a regular file: a model file is mapped, so it cannot be a pipe or a device"
            )
        with open(self.path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ModelError(f"{self.path}: the file is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def _populate(self, huge: bool) -> None:
        """Read the whole file into the mapping, in steps between which Ctrl-C can interrupt."""
        if not hasattr(mmap, "MADV_WILLNEED") or (huge and not hasattr(mmap, "MADV_HUGEPAGE")):
            raise UnsupportedError("this system cannot populate mapped memory: use memory='map'")
        if huge:
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE)
            except OSError as error:
                raise UnsupportedError(f"this kernel has no huge pages ({error}): use memory='populate'") from None
        advice = MADV_POPULATE_READ
        for start in range(0, len(self._map), POPULATE_BYTES):
            count = min(POPULATE_BYTES, len(self._map) - start)
            try:
                self._map.madvise(advice, start, count)
            except OSError as error:
                if error.errno != errno.EINVAL or advice == mmap.MADV_WILLNEED:
                    raise
                advice = mmap.MADV_WILLNEED  # before Linux 5.14; the kernel reads in the background
                self._map.madvise(advice, start, count)

    def reopened(self) -> FlatFile:
        """The same mapping with another model of the core, whose tensors can be replaced. Close it before this file."""
        other = copy.copy(self)
        other.core = _core.Model(self.buffer)
        other._owns_map = False
        return other

    @property
    def buffer(self) -> mmap.mmap:
        """The mapped file.

        Raises:
            ClosedError: If the file has been closed.
            ModelError: If the file has been truncated since it was opened.
        """
        if self._map.closed:
            raise ClosedError(f"{self.path} has been closed")
        self.check_size()
        return self._map

    def check_size(self) -> None:
        """Check that the file still has its full size.

        Reading a page past the end of a mapped file kills the process with SIGBUS, so every pass and every read calls
        this first. It takes less than a microsecond. A file that shrinks after the check still kills the process.

        Raises:
            ModelError: If the file has been truncated since it was opened.
        """
        if not self._map.closed and (size := self._map.size()) < len(self._map):
            raise ModelError(
                f"{self.path}: the file was truncated while it was open: {size} of its {len(self._map)} bytes are left;"
                " restore it and load it again"
            )

    @property
    def id(self) -> str:
        """The model's id: 64 hexadecimal digits. The first use for a file without the tensors' hashes computes them."""
        self.hash_tensors()
        found: bytes = self.header["id"]
        return found.hex()

    @property
    def is_hashed(self) -> bool:
        """Whether the hashes of the tensors are known. A conversion in the cache can lack all of them for a while."""
        place = self.sections["tensors"].offset + _TENSOR_HASH
        return self._tables[place : place + len(UNHASHED)] != UNHASHED

    @property
    def tables(self) -> bytes:
        """The bytes of the file before its texts: header, section table, config, layers and tensor table."""
        return self._tables

    def hash_tensors(self, pause: Callable[[], object] = lambda: None) -> None:
        """Compute the hashes of the tensors, if they are not known. The file on the disk does not change.

        Args:
            pause: Called between steps of a few milliseconds. What it raises ends the computation.
        """
        if not self.is_hashed:
            digests = [self._hash(record.offset, record.bytes, pause) for record in self.tensors]
            self.adopt(with_hashes(self._tables, digests))

    def adopt(self, tables: bytes) -> None:
        """Use `tables` of the same file, in which the hashes are known."""
        self._tables = tables
        self.header, self.sections = _unpack_head(tables)

    def close(self) -> None:
        """Unmap the file as soon as its last session is closed. Closing twice is fine.

        Raises:
            BusyError: While another thread verifies the file, or a memoryview of `buffer` exists.
        """
        with self._lock:
            self._check_idle()
            self.core.close()
            if self.core.released and self._owns_map:
                try:
                    self._map.close()
                except BufferError:
                    raise BusyError(f"{self.path} is mapped until the memoryviews of its buffer are released") from None

    def check_idle(self) -> None:
        """Check that no thread verifies the file.

        Raises:
            BusyError: While another thread runs `verify_data`.
        """
        with self._lock:
            self._check_idle()

    def _check_idle(self) -> None:
        if self._views:
            raise BusyError(f"another thread is verifying {self.path}: close the file after verify_data has ended")

    def release_pages(self) -> None:
        """Drop the file's pages from this process's resident memory. They are read again on the next access."""
        self.buffer.madvise(mmap.MADV_DONTNEED)

    def _table(self, name: str) -> bytes:
        """The bytes of section config, layers or tensors, as the core checked them."""
        section = self.sections[name]
        return self._tables[section.offset : section.offset + section.bytes]

    def section(self, name: str) -> bytes:
        """Read a section and check its hash.

        Args:
            name: The section. The data section can be too large, and is an error.

        Raises:
            ModelError: If the section is damaged.
            ArgumentError: If there is no such section.
        """
        if name not in self.sections or name == "data":
            raise ArgumentError(f"section is {name!r}, expected one of {', '.join(SECTIONS[:-1])}")
        record = self.sections[name]
        data = self.buffer[record.offset : record.offset + record.bytes]
        if hashlib.sha256(data).digest() != record.sha256:
            raise ModelError(f"{self.path}: section {name}: its SHA-256 does not match: the section is damaged")
        return data

    def text(self, name: str) -> str:
        """Read a section's text and check its hash.

        Raises:
            ModelError: If the section is damaged or not UTF-8.
        """
        try:
            return self.section(name).decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: section {name} is not UTF-8: {error}") from None

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata section's JSON object, read on first use.

        Raises:
            ModelError: If the section is damaged.
        """
        if self._metadata is None:
            name = f"{self.path}: section metadata"
            self._metadata = parse_object(self.text("metadata"), name, error=ModelError)
        return self._metadata

    @property
    def layers(self) -> list[dict[str, Any]]:
        """The layer records, in order, without the MTP layer's."""
        return self._layers()[: self.config["n_layers"]]

    @property
    def mtp_layers(self) -> list[dict[str, Any]]:
        """The record of the MTP layer, if there is one."""
        return self._layers()[self.config["n_layers"] :]

    def _layers(self) -> list[dict[str, Any]]:
        data, size = self._table("layers"), RECORD_BYTES["layer"]
        return [unpack_record("layer", data[start : start + size]) for start in range(0, len(data), size)]

    @property
    def tensors(self) -> list[TensorRecord]:
        """The tensor table, in order."""
        return list(self._tensors(lambda record: True))

    def _tensors(self, wanted: Callable[[bytes], bool]) -> Iterator[TensorRecord]:
        """The entries of the tensor table for whose bytes `wanted` returns True."""
        data, size = self._table("tensors"), RECORD_BYTES["tensor"]
        for start in range(0, len(data), size):
            record = data[start : start + size]
            if wanted(record):
                values = unpack_record("tensor", record)
                shape = tuple(values["shape"][: values["n_dims"]])
                position = (values["offset"], values["bytes"], values["sha256"])
                yield TensorRecord(values["name"], values["dtype"], shape, *position)

    def stored(self, name: str) -> tuple[TensorRecord, bytes]:
        """Read a tensor's record and its bytes.

        Args:
            name: The tensor's name.

        Raises:
            ArgumentError: If there is no such tensor.
        """
        field = name.encode("utf-8", "replace") + b"\0"
        record = next(self._tensors(lambda data: data.startswith(field)), None)
        if record is None:
            raise ArgumentError(f"{self.path} has no tensor {name!r}")
        return record, self.buffer[record.offset : record.offset + record.bytes]

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Read a tensor.

        Args:
            name: The tensor's name.

        Returns:
            The numbers in the tensor's own shape, float32.

        Raises:
            ArgumentError: If there is no such tensor.
        """
        record, data = self.stored(name)
        return unpack_tensor(data, record.dtype, record.shape)

    def verify_data(self, progress: Progress = silent) -> Iterator[tuple[TensorRecord, str | None]]:
        """Check the hash of every tensor, and that the padding before it is zero.

        Args:
            progress: Called with the phase "verifying" and byte counts.

        Yields:
            Each tensor with a description of its problem, or None.
        """
        start, total = self.sections["data"].offset, self.sections["data"].bytes
        end = start
        progress("verifying", 0, total)
        for record in self.tensors:
            problem = None
            if any(self.buffer[end : record.offset]):
                problem = "the padding before it is not zero"
            elif record.sha256 == UNHASHED:
                problem = "its SHA-256 has not been computed"
            elif self._hash(record.offset, record.bytes) != record.sha256:
                problem = "its SHA-256 does not match"
            end = record.offset + record.bytes
            progress("verifying", end - start, total)
            yield record, problem

    def _hash(self, offset: int, count: int, pause: Callable[[], object] = lambda: None) -> bytes:
        """The SHA-256 of a part of the file. `pause` is called before each step."""
        digest = hashlib.sha256()
        for start in range(offset, offset + count, HASH_BYTES):
            pause()
            with self._view(start, min(start + HASH_BYTES, offset + count)) as part:
                digest.update(part)  # releases the GIL
        return digest.digest()

    @contextmanager
    def _view(self, start: int, end: int) -> Iterator[memoryview]:
        """A part of the mapping. No thread can close the file while the block runs."""
        with self._lock:
            whole = memoryview(self.buffer)
            self._views += 1
        try:
            with whole, whole[start:end] as part:
                yield part
        finally:
            with self._lock:
                self._views -= 1
