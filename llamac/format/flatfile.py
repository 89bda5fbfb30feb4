"""The flat file in Python: opening it by mapping, reading its records, and packing records for the writer.

No layout is written down here: names, types and offsets of every field come from the C core's table (`_core.fields`),
which is also what the core's own checks run on. docs/format.md is the specification.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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

Digest = bytes  # for classes with a member named bytes

MEMORY = ("map", "populate", "huge")
MADV_POPULATE_READ = 22  # Linux 5.14; Python has no name for it
POPULATE_STEP = 64 << 20

MAGIC = b"\x89llamac\n"
ALIGNMENT = 64
SECTIONS = _core.section_names()

# struct codes of the core's field types (enum llamac_type): u32, i32, f32, u64, bytes, text
_CODES = ("I", "i", "f", "Q", "s", "s")
_TEXT = 5


@dataclass(frozen=True)
class Field:
    """One member of a record. low, high: range of each number. names: of an enumeration's values low, low + 1, ..."""

    name: str
    type: int
    offset: int
    count: int
    low: float
    high: float
    names: tuple[str, ...]

    @property
    def format(self) -> str:
        """The struct module's format of this member."""
        return f"<{self.count}{_CODES[self.type]}"


def _field_table() -> dict[str, tuple[Field, ...]]:
    table: dict[str, list[Field]] = {}
    for record, name, kind, offset, count, low, high, names in _core.fields():
        values = tuple(names.split(",")) if names else ()
        table.setdefault(record, []).append(Field(name, kind, offset, count, low, high, values))
    return {record: tuple(fields) for record, fields in table.items()}


FIELDS = _field_table()
RECORD_BYTES = {record: _core.record_bytes(record) for record in FIELDS}
# members of the header that have one value only
VERSION, NUMERICS = (
    next(int(field.low) for field in FIELDS["header"] if field.name == name) for name in ("version", "numerics")
)


def unpack_record(record: str, data: bytes | memoryview) -> dict[str, Any]:
    """A record's members by name: numbers, lists of numbers, bytes, texts; an enumeration's value as its name."""
    values: dict[str, Any] = {}
    for member in FIELDS[record]:
        found = struct.unpack_from(member.format, data, member.offset)
        value: Any = found[0] if len(found) == 1 else list(found)
        if member.type == _TEXT:
            value = value.rstrip(b"\0").decode("ascii", "replace")
        elif member.names and isinstance(value, int) and member.low <= value <= member.high:
            value = member.names[value - int(member.low)]
        values[member.name] = value
    return values


def pack_record(record: str, values: dict[str, Any]) -> bytes:
    """The opposite of `unpack_record`. Members left out are zero; lists may be shorter than the member.

    Raises ArgumentError for a number that the core would refuse.
    """
    known = {member.name: member for member in FIELDS[record]}
    unknown = set(values) - set(known)
    if unknown:
        raise ArgumentError(f"a {record} record has no member {', '.join(sorted(unknown))}")
    data = bytearray(RECORD_BYTES[record])
    for name, value in values.items():
        member = known[name]
        if member.names and isinstance(value, str):
            if value not in member.names:
                raise ArgumentError(f"{record}: {name} is {value!r}, expected one of {', '.join(member.names)}")
            value = member.names.index(value) + int(member.low)
        elif member.type == _TEXT:
            value = value.encode("ascii")
            if len(value) >= member.count:
                raise ArgumentError(f"{record}: {name} {value!r} is longer than {member.count - 1} bytes")
        items = list(value) if isinstance(value, list | tuple) else [value]
        if len(items) > member.count:
            raise ArgumentError(f"{record}: {name} has {len(items)} elements, at most {member.count} fit")
        if member.type < _TEXT - 1:
            wrong = [item for item in items if not member.low <= item <= member.high]
            if wrong:
                raise ArgumentError(f"{record}: {name} is {wrong[0]}, expected {member.low:g} to {member.high:g}")
            items += [0] * (member.count - len(items))
        struct.pack_into(member.format, data, member.offset, *items)
    return bytes(data)


@dataclass(frozen=True)
class Section:
    """A section's place in the file and its SHA-256."""

    offset: int
    bytes: int
    sha256: Digest


@dataclass(frozen=True)
class TensorRecord:
    """An entry of the tensor table; offset and bytes count from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    sha256: Digest


class FlatFile:
    """A flat file, mapped read-only. Opening it runs the core's check of the whole structure (not of the data).

    core: the core's model over the mapping. Texts are verified against their section's hash when they are asked for.
    memory: when the weights are read: "map" when they are needed; "populate" at once; "huge" at once, into huge pages
    if the kernel has any to give.
    """

    def __init__(self, path: str | Path, memory: str = "map") -> None:
        if memory not in MEMORY:
            raise ArgumentError(f"memory is {memory!r}, expected {', '.join(map(repr, MEMORY))}")
        self.path = Path(path)
        if self.path.is_dir():
            raise ModelError(f"{self.path} is a directory: run `llamac export` on it first")
        if self.path.exists() and not self.path.is_file():
            raise ModelError(
                f"{self.path} is not a regular file: a model file is mapped, it cannot be a pipe or a device"
            )
        with open(self.path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ModelError(f"{self.path}: the file is empty")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            # the core's whole check of structure, hashes and ranges comes first: what follows may trust the tables
            self.core = _core.Model(self._map)
        except LlamacError as error:
            self._map.close()
            raise type(error)(f"{self.path}: {error}") from None
        self._lock = threading.RLock()  # a signal handler may close a file that its thread reads
        self._views = 0  # memoryviews of the mapping in use by `_hash`
        # the core's copy: the file may have changed since it was checked
        self._tables = self.core.tables()
        header_bytes = RECORD_BYTES["header"]
        self.header = unpack_record("header", self._tables[:header_bytes])
        self.sections: dict[str, Section] = {}
        for index in range(self.header["n_sections"]):
            start = header_bytes + index * RECORD_BYTES["section"]
            record = unpack_record("section", self._tables[start : start + RECORD_BYTES["section"]])
            self.sections[record["name"]] = Section(record["offset"], record["bytes"], record["sha256"])
        self.config = unpack_record("config", self._table("config"))
        self._metadata: dict[str, Any] | None = None
        if memory != "map":
            self._populate(memory == "huge")

    def _populate(self, huge: bool) -> None:
        """Reads the whole file into the mapping. In steps, so that Ctrl-C is heard."""
        if not hasattr(mmap, "MADV_WILLNEED") or (huge and not hasattr(mmap, "MADV_HUGEPAGE")):
            raise UnsupportedError("this system lets nobody ask for memory to be populated: use memory='map'")
        if huge:
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE)
            except OSError as error:
                raise UnsupportedError(f"this kernel has no huge pages ({error}): use memory='populate'") from None
        advice = MADV_POPULATE_READ
        for start in range(0, len(self._map), POPULATE_STEP):
            count = min(POPULATE_STEP, len(self._map) - start)
            try:
                self._map.madvise(advice, start, count)
            except OSError as error:
                if error.errno != errno.EINVAL or advice == mmap.MADV_WILLNEED:
                    raise
                advice = mmap.MADV_WILLNEED  # before Linux 5.14: the kernel reads on while we go on
                self._map.madvise(advice, start, count)

    @property
    def buffer(self) -> mmap.mmap:
        """The mapped file. Raises ModelError if the file has been truncated since it was opened."""
        if self._map.closed:
            raise ClosedError(f"{self.path} has been closed")
        self.check_size()
        return self._map

    def check_size(self) -> None:
        """Raises ModelError if the file has been truncated since it was opened.

        Reading a page past the end of a mapped file kills the process with SIGBUS, so every pass and every read calls
        this first. It takes under a microsecond. A file that shrinks after the check still kills the process.
        """
        if not self._map.closed and (size := self._map.size()) < len(self._map):
            raise ModelError(
                f"{self.path}: the file was truncated while it was open: {size} of its {len(self._map)} bytes are left;"
                " restore the file and load it again"
            )

    @property
    def id(self) -> str:
        """The model's id: 64 hexadecimal digits."""
        found: bytes = self.header["id"]
        return found.hex()

    def close(self) -> None:
        """Unmaps the file once its last session is closed. Closing twice is fine.

        Raises BusyError while another thread reads the file in `verify_data`.
        """
        with self._lock:
            self._check_idle()
            self.core.close()
            if self.core.released:
                try:
                    self._map.close()
                except BufferError:
                    raise BusyError(f"{self.path} is mapped until the memoryviews of its buffer are released") from None

    def check_idle(self) -> None:
        """Raises BusyError while another thread reads the file in `verify_data`."""
        with self._lock:
            self._check_idle()

    def _check_idle(self) -> None:
        if self._views:
            raise BusyError(f"{self.path} is being verified by another thread: close it when verify_data has ended")

    def release_pages(self) -> None:
        """Lets go of the file's pages that this process has touched; they come back when they are touched again."""
        self.buffer.madvise(mmap.MADV_DONTNEED)

    def _table(self, name: str) -> bytes:
        """The bytes of section config, layers or tensors, as the core has checked them."""
        section = self.sections[name]
        return self._tables[section.offset : section.offset + section.bytes]

    def section(self, name: str) -> bytes:
        """A section's bytes, checked against its hash. Not for the data section, which may be large."""
        if name not in self.sections or name == "data":
            raise ArgumentError(f"section is {name!r}, expected one of {', '.join(SECTIONS[:-1])}")
        place = self.sections[name]
        data = self.buffer[place.offset : place.offset + place.bytes]
        if hashlib.sha256(data).digest() != place.sha256:
            raise ModelError(f"{self.path}: section {name}: its SHA-256 does not match: the section is damaged")
        return data

    def text(self, name: str) -> str:
        """A section's text, checked against its hash."""
        try:
            return self.section(name).decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: section {name} is not UTF-8: {error}") from None

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata section's JSON object."""
        if self._metadata is None:
            name = f"{self.path}: section metadata"
            self._metadata = parse_object(self.text("metadata"), name, error=ModelError)
        return self._metadata

    @property
    def layers(self) -> list[dict[str, Any]]:
        """The layer records, in order."""
        data, size = self._table("layers"), RECORD_BYTES["layer"]
        return [unpack_record("layer", data[start : start + size]) for start in range(0, len(data), size)]

    @property
    def tensors(self) -> list[TensorRecord]:
        """The tensor table, in order."""
        return list(self._tensors(lambda record: True))

    def _tensors(self, wanted: Callable[[bytes], bool]) -> Iterator[TensorRecord]:
        """The entries of the tensor table whose bytes are wanted."""
        data, size = self._table("tensors"), RECORD_BYTES["tensor"]
        for start in range(0, len(data), size):
            record = data[start : start + size]
            if wanted(record):
                values = unpack_record("tensor", record)
                shape = tuple(values["shape"][: values["n_dims"]])
                place = (values["offset"], values["bytes"], values["sha256"])
                yield TensorRecord(values["name"], values["dtype"], shape, *place)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A tensor as float32 in its own shape, unpacked from strips."""
        field = name.encode("utf-8", "replace") + b"\0"
        record = next(self._tensors(lambda data: data.startswith(field)), None)
        if record is None:
            raise ArgumentError(f"{self.path} has no tensor {name!r}")
        data = self.buffer[record.offset : record.offset + record.bytes]
        return unpack_tensor(data, record.dtype, record.shape)

    def verify_data(self, progress: Progress = silent) -> Iterator[tuple[TensorRecord, str | None]]:
        """Checks every tensor's hash and the padding before it: yields each with what is wrong, or None."""
        start, total = self.sections["data"].offset, self.sections["data"].bytes
        end = start
        progress("verifying", 0, total)
        for record in self.tensors:
            problem = None
            if any(self.buffer[end : record.offset]):
                problem = "the padding before it is not zero"
            elif self._hash(record.offset, record.bytes) != record.sha256:
                problem = "its SHA-256 does not match: it is damaged"
            end = record.offset + record.bytes
            progress("verifying", end - start, total)
            yield record, problem

    def _hash(self, offset: int, count: int, step: int = 1 << 24) -> bytes:
        """The SHA-256 of a part of the file."""
        digest = hashlib.sha256()
        for start in range(offset, offset + count, step):
            with self._view(start, min(start + step, offset + count)) as part:
                digest.update(part)  # without the GIL
        return digest.digest()

    @contextmanager
    def _view(self, start: int, end: int) -> Iterator[memoryview]:
        """A part of the mapping, which no thread can close in the meantime."""
        with self._lock:
            whole = memoryview(self.buffer)
            self._views += 1
        try:
            with whole, whole[start:end] as part:
                yield part
        finally:
            with self._lock:
                self._views -= 1
