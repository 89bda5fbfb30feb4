"""Reads files of torch.save without PyTorch and without running code from them.

Such a file is a ZIP archive. data.pkl is a pickle that describes how to rebuild the tensors; data/0, data/1, ... are
their storages. Before PyTorch 1.6 it was a series of pickles (magic number, version, system info, tensors, storage
names), followed by the storages, each after its element count. Only the names that state dicts of plain tensors need
can be looked up, and they resolve to objects of this module.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from llamac.errors import ExportError, LlamacError, UnsupportedError
from llamac.export.hf.torch_pickle import Dict, unpickle
from llamac.export.stored import StoredTensor, are_sizes
from llamac.format.git_lfs import HEAD_BYTES, check_not_pointer

MAX_PICKLE_BYTES = 1 << 26
OLD_MAGIC = 0x1950A86A20F9469CFC6C
OLD_VERSION = 1001
STORAGE_DTYPES = {
    "DoubleStorage": "f64",
    "FloatStorage": "f32",
    "HalfStorage": "f16",
    "BFloat16Storage": "bf16",
    "LongStorage": "i64",
    "IntStorage": "i32",
    "ShortStorage": "i16",
    "CharStorage": "i8",
    "ByteStorage": "u8",
    "BoolStorage": "bool",
}
DTYPE_BYTES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "bool": 1}


def read_torch(path: Path) -> dict[str, StoredTensor]:
    """Read the tensors of a state dict by name.

    Raises:
        UnsupportedError: If the pickle needs more than tensors.
        ExportError: If the file is damaged.
    """
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
        check_not_pointer(path, head)
        try:
            if head[:1] == b"\x80" and OLD_MAGIC.to_bytes(10, "little") in head[:24]:
                return _Old(path, file).tensors()
            if head[:4] != b"PK\x03\x04":
                raise ExportError(f"{path} is not a file of torch.save: neither a ZIP archive nor old pickles")
            with zipfile.ZipFile(file) as archive:
                return _Archive(path, file, archive).tensors()
        except LlamacError:
            raise
        except Exception as error:  # zipfile and pickle raise all kinds of errors for damaged files, even OSError
            raise ExportError(f"{path} is damaged: {type(error).__name__}: {error}") from None


# A pickle only gets tuples: its instructions cannot change their content.


class _StorageClass(NamedTuple):
    """Represents one of torch's storage classes."""

    dtype: str


class _Storage(NamedTuple):
    """A storage in the file, or a part of one: its name, number of elements and first element."""

    dtype: str
    key: str
    numbers: int
    first: int = 0


class _Tensor(NamedTuple):
    """The unchecked arguments of torch._utils._rebuild_tensor_v2 that describe a tensor."""

    storage: Any
    offset: Any
    shape: Any
    strides: Any


class _Function(NamedTuple):
    """Represents one of torch's functions."""

    call: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.call(*arguments)


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any) -> _Tensor:
    return _Tensor(storage, offset, shape, strides)


def _rebuild_tensor_v2(
    storage: Any, offset: Any, shape: Any, strides: Any, requires_grad: Any, hooks: Any, metadata: Any = None
) -> _Tensor:
    return _Tensor(storage, offset, shape, strides)  # the other arguments concern training


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data  # the other arguments concern training and Python attributes


def _rebuild_ordered_dict() -> Dict:
    return Dict()


class _File:
    """A file of either format while it is read."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._size = os.path.getsize(path)
        self._begins: dict[str, int] = {}  # where storages begin in the file
        self._ends: dict[str, int] = {}  # and where their members end

    def tensors(self) -> dict[str, StoredTensor]:
        document = self._document()
        # Training scripts wrap the weights in a dict; its other entries do not matter.
        if isinstance(document, dict) and isinstance(document.get("state_dict"), dict):
            document = document["state_dict"]
        if not isinstance(document, dict):
            raise ExportError(f"{self._path} contains a {type(document).__name__}, expected a dict of tensors")
        wrong = [
            name for name, value in document.items() if not isinstance(name, str) or not isinstance(value, _Tensor)
        ]
        if wrong:
            raise ExportError(f"{self._path} contains more than tensors: {', '.join(map(repr, wrong[:10]))}")
        self._check_overlaps()
        return {name: self._checked(name, value) for name, value in document.items()}

    def _document(self) -> Any:
        """The document that the pickle of tensors describes. Fills `_begins` with every storage it refers to."""
        raise NotImplementedError

    def _check_overlaps(self) -> None:
        """Reject overlapping storages, with which a small file could contain any number of weights."""
        spans = sorted((begin, self._ends[key], key) for key, begin in self._begins.items())
        for (_, end, one), (begin, _, other) in itertools.pairwise(spans):
            if begin < end:
                raise ExportError(f"{self._path}: the storages {one} and {other} overlap")

    def _lookup(self, module: str, name: str) -> _StorageClass | _Function:
        """The objects of this module that a few names resolve to."""
        if module == "torch" and name in STORAGE_DTYPES:
            return _StorageClass(STORAGE_DTYPES[name])
        match module, name:
            case "torch._utils", "_rebuild_tensor":
                return _Function(_rebuild_tensor)
            case "torch._utils", "_rebuild_tensor_v2":
                return _Function(_rebuild_tensor_v2)
            case "torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state":
                return _Function(_rebuild_parameter)
            case "collections", "OrderedDict":
                return _Function(_rebuild_ordered_dict)
        raise UnsupportedError(
            f"{self._path} names {module}.{name}, which plain tensors do not need; nothing was run. "
            "Use the model's safetensors file, or rewrite this one from a state dict"
        )

    def _checked(self, name: str, tensor: _Tensor) -> StoredTensor:
        """A tensor that is entirely inside its storage."""
        storage, offset, shape, strides = tensor
        where = f"{self._path}: tensor {name!r}"
        numbers = ((offset,), shape, strides)
        if not isinstance(storage, _Storage) or not all(are_sizes(values, tuple) for values in numbers):
            raise ExportError(f"{where} has a description that torch.save does not write")
        if len(shape) != len(strides):
            raise ExportError(f"{where} has shape {shape}, but strides {strides}")
        end = offset + 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        if 0 not in shape and end > storage.numbers:
            raise ExportError(
                f"{where} of shape {shape} and strides {strides} needs {end} numbers, its storage has {storage.numbers}"
            )
        if math.prod(shape) > storage.numbers:
            raise ExportError(
                f"{where} of shape {shape} has more numbers than its storage of {storage.numbers}: weights are not"
                " expanded"
            )
        first = self._begins[storage.key] + (storage.first + offset) * DTYPE_BYTES[storage.dtype]
        return StoredTensor(self._path, storage.dtype, shape, strides, first)


class _Archive(_File):
    """A ZIP archive."""

    def __init__(self, path: Path, file: BinaryIO, archive: zipfile.ZipFile) -> None:
        super().__init__(path, file)
        self._archive = archive
        pickles = [name for name in archive.namelist() if name == "data.pkl" or name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ExportError(f"{path} is not a file of torch.save: {len(pickles)} members data.pkl, expected one")
        self._root = pickles[0][: -len("data.pkl")]

    def _document(self) -> Any:
        self._check_byte_order()
        member = self._archive.getinfo(self._root + "data.pkl")
        if member.file_size > MAX_PICKLE_BYTES:
            raise ExportError(f"{self._path}: data.pkl has {member.file_size} bytes, limit {MAX_PICKLE_BYTES}")
        self._reject_compressed(member)
        return unpickle(self._archive.read(member), str(self._path), self._lookup, self._storage)

    def _check_byte_order(self) -> None:
        with contextlib.suppress(KeyError):  # older versions do not have this member
            member = self._archive.getinfo(self._root + "byteorder")
            self._reject_compressed(member)
            if member.file_size > 16 or self._archive.read(member) != b"little":
                raise UnsupportedError(f"{self._path} was written on a big-endian machine")

    def _reject_compressed(self, member: zipfile.ZipInfo) -> None:
        """Reject compressed members: they can be a thousand times as large as the file, and cannot be read in place."""
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
            name = member.filename.removeprefix(self._root)
            raise UnsupportedError(f"{self._path}: {name} is compressed; torch.save does not compress")

    def _storage(self, identity: Any) -> _Storage:
        """The storage that a pickle refers to as ("storage", class, key, device, number of elements)."""
        match identity:
            case ("storage", _StorageClass() as kind, str(key), str(), int(numbers)) if numbers >= 0:
                pass
            case _:
                raise ExportError(f"{self._path}: data.pkl has a reference that is not a storage")
        try:
            member = self._archive.getinfo(f"{self._root}data/{key}")
        except KeyError:
            raise ExportError(f"{self._path}: the storage data/{key} is missing") from None
        self._reject_compressed(member)
        needed = numbers * DTYPE_BYTES[kind.dtype]
        if needed != member.file_size:
            raise ExportError(f"{self._path}: the storage data/{key} has {member.file_size} bytes, {needed} needed")
        self._begins[key] = self._data_offset(member)
        self._ends[key] = self._begins[key] + member.file_size
        return _Storage(kind.dtype, key, numbers)

    def _data_offset(self, member: zipfile.ZipInfo) -> int:
        """Where a stored member's bytes begin: after its local header, which contains its own length."""
        self._file.seek(member.header_offset)
        header = self._file.read(30)
        if len(header) < 30 or header[:4] != b"PK\x03\x04":
            raise ExportError(f"{self._path}: the archive's member {member.filename} has no header")
        offset: int = member.header_offset + 30 + sum(struct.unpack("<HH", header[26:]))
        if offset + member.file_size > self._size:
            raise ExportError(f"{self._path}: the archive's member {member.filename} ends after the file")
        return offset


class _Old(_File):
    """A file in the format from before PyTorch 1.6."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        super().__init__(path, file)
        file.seek(0)
        # the storages after them are read on demand
        self._pickles = io.BytesIO(file.read(min(self._size, MAX_PICKLE_BYTES)))
        self._storages: dict[str, _Storage] = {}

    def _document(self) -> Any:
        magic, version, machine = self._next(), self._next(), self._next()
        if (magic, version) != (OLD_MAGIC, OLD_VERSION) or not isinstance(machine, dict):
            raise ExportError(
                f"{self._path} is damaged: it does not start like torch.save's files of version {OLD_VERSION}"
            )
        if machine.get("little_endian") is not True:
            raise UnsupportedError(f"{self._path} was written on a big-endian machine")
        document = unpickle(self._pickles, str(self._path), self._lookup, self._storage)
        keys = self._next()
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise ExportError(f"{self._path} is damaged: its list of storages is invalid")
        self._locate_storages(keys, self._pickles.tell())
        return document

    def _next(self) -> Any:
        """The next pickle, which must contain plain values only."""
        return unpickle(self._pickles, str(self._path), self._lookup, self._reject_reference)

    def _reject_reference(self, _: Any) -> Any:
        raise ExportError(f"{self._path} is damaged: a pickle of plain values refers to storages")

    def _storage(self, identity: Any) -> _Storage:
        """The storage referred to as ("storage", class, key, device, number of elements, part).

        part: None, or (name, first element, number of elements)."""
        match identity:
            case ("storage", _StorageClass() as kind, str(key), str(), int(numbers), part) if numbers >= 0:
                whole = self._storages.setdefault(key, _Storage(kind.dtype, key, numbers))
            case _:
                raise ExportError(f"{self._path}: its pickle has a reference that is not a storage")
        if whole != (kind.dtype, key, numbers, 0):
            raise ExportError(f"{self._path}: the storage {key} has two different descriptions")
        match part:
            case None:
                return whole
            case (str(), int(first), int(count)) if first >= 0 and 0 <= count <= numbers - first:
                return whole._replace(numbers=count, first=first)
        raise ExportError(f"{self._path}: a part of the storage {key} is not inside it")

    def _locate_storages(self, keys: list[str], at: int) -> None:
        """Find the storages, which are consecutive from `at` on, in the order of `keys`."""
        if sorted(keys) != sorted(self._storages):
            raise ExportError(f"{self._path} is damaged: its list of storages does not match its tensors")
        for key in keys:
            storage = self._storages[key]
            self._file.seek(at)
            head = self._file.read(8)
            at += 8
            if len(head) < 8 or int.from_bytes(head, "little") != storage.numbers:
                raise ExportError(
                    f"{self._path}: the storage {key} at byte {at} does not have the expected {storage.numbers} numbers"
                )
            self._begins[key] = at
            at += storage.numbers * DTYPE_BYTES[storage.dtype]
            self._ends[key] = at
            if at > self._size:
                raise ExportError(
                    f"{self._path} is truncated: the storage {key} ends at byte {at}, the file at {self._size}"
                )
