"""A GGUF model on disk: one file or all parts of a split one, with metadata and the position of every tensor.

This module checks everything that a file states: types, dimensions, and that each tensor is inside its file and
overlaps no other. It finds parts by the names that llama.cpp's splitter gives them, and by the part numbers in them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llamac.errors import ExportError
from llamac.export.checkpoint import LazyTensor
from llamac.export.gguf.tensor_types import NumberType, lazy_tensor, number_type
from llamac.export.stored import StoredTensor, contiguous_strides, integers
from llamac.format.gguf_metadata import GGUFHead, GGUFMetadata, TensorEntry, Value, read_head
from llamac.format.gguf_parts import MAX_PARTS, parse_part_name

DEFAULT_ALIGNMENT = 32
OF_INTEGERS = ("d2t", "masked_embd_ordering")  # tensors that can have integers: ids of tokens, in drafters
MAX_NUMBERS = 1 << 48


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file.

    Attributes:
        name: GGUF's name.
        type: Its number format.
        shape: Its dimensions in NumPy's order, rows first.
        path: The file.
        offset: The position of its first byte in the file.
    """

    name: str
    type: NumberType
    shape: tuple[int, ...]
    path: Path
    offset: int

    def vector(self) -> LazyTensor:
        """The tensor as a vector."""
        return lazy_tensor(self.path, self.type, (math.prod(self.shape),), self.offset)

    def matrix(self) -> LazyTensor:
        """The tensor as one matrix; the matrices of a stack are concatenated."""
        return lazy_tensor(self.path, self.type, (math.prod(self.shape[:-1]), self.shape[-1]), self.offset)

    def integers(self) -> NDArray[np.int64]:
        """The numbers of a vector of integers."""
        dtype, shape = self.type.name.lower(), self.shape
        return integers(StoredTensor(self.path, dtype, shape, contiguous_strides(shape), self.offset))


@dataclass(frozen=True)
class GGUFFile:
    """A model.

    Attributes:
        paths: Its files.
        values: The metadata, by key.
        tensors: The tensors by GGUF's names.
    """

    paths: tuple[Path, ...]
    values: dict[str, Value]
    tensors: dict[str, Tensor]


def open_gguf(path: Path, head: GGUFHead | None = None) -> GGUFFile:
    """Open a model.

    Args:
        path: Its file, or any part of it.
        head: The head of this file, if it has been read.

    Raises:
        ModelError: If a file is damaged.
        ExportError: If tensors are invalid or of unsupported types, or if parts are missing or do not match.
    """
    metadata, entries = head or read_head(path)
    parts = _parts(path, metadata)
    if len(parts) == 1:
        return GGUFFile((path,), metadata.values, _tensors(path, metadata, entries, metadata.values))
    tensors: dict[str, Tensor] = {}
    values: dict[str, Value] = {}
    for number, part in enumerate(parts):
        metadata, entries = read_head(part)
        _check_part(part, metadata, number, len(parts))
        if number == 0:
            values = metadata.values
        for name, tensor in _tensors(part, metadata, entries, values).items():
            if name in tensors:
                raise ExportError(f"{part}: tensor {name!r} is also in an earlier part")
            tensors[name] = tensor
    total = _whole_number(values, "split.tensors.count")
    if total not in (None, len(tensors)):
        raise ExportError(
            f"{parts[0]}: split.tensors.count is {total}, but all parts together have {len(tensors)} tensors"
        )
    return GGUFFile(tuple(parts), values, tensors)


# ---- parts


def _parts(path: Path, metadata: GGUFMetadata) -> list[Path]:
    """All files of the model that `path` belongs to. ExportError names the missing ones."""
    count = _whole_number(metadata.values, "split.count") or 1
    if count == 1:
        return [path]
    if count > MAX_PARTS:
        raise ExportError(f"{path}: split.count is {count}, expected at most {MAX_PARTS}")
    name = parse_part_name(path.name)
    if name is None or name.n_parts != count:
        raise ExportError(f"{path} is one of {count} parts: name them NAME-00001-of-{count:05}.gguf and so on")
    parts = [path.with_name(part) for part in name.all_names()]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        named = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise ExportError(f"{path} is one of {count} parts; missing in its folder: {named}")
    return parts


def _check_part(path: Path, metadata: GGUFMetadata, number: int, count: int) -> None:
    found = [_whole_number(metadata.values, key) for key in ("split.no", "split.count")]
    if found != [number, count]:
        raise ExportError(
            f"{path} should be part {number} of {count}, counted from 0, but its keys say {found[0]} of {found[1]}"
            " (split.no, split.count): the parts were renamed or belong to different models"
        )


def _whole_number(values: dict[str, Value], key: str) -> int | None:
    value = values.get(key)
    if value is not None and (type(value) is not int or value < 0):
        raise ExportError(f"the GGUF file's {key} is {value!r:.40}, expected an integer of at least 0")
    return value if isinstance(value, int) else None


# ---- tensors


def _tensors(
    path: Path, metadata: GGUFMetadata, entries: Iterable[TensorEntry], values: dict[str, Value]
) -> dict[str, Tensor]:
    """The tensors of one file. ExportError lists all invalid ones.

    values: The model's metadata. Only the first part of a split model has all of it.
    """
    alignment = metadata.values.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & alignment - 1:
        raise ExportError(f"{path}: general.alignment is {alignment!r:.40}, expected a power of two")
    is_bitnet = str(values.get("general.architecture")).startswith("bitnet")
    start = -(-metadata.end // alignment) * alignment
    data_bytes = path.stat().st_size - start
    problems: list[str] = []
    beyond: list[str] = []
    found: dict[str, Tensor] = {}
    spans: list[tuple[int, int, str]] = []
    for entry in entries:
        try:
            kind = number_type(entry.type, is_bitnet=is_bitnet, of_integers=entry.name in OF_INTEGERS)
            size = _bytes(entry, kind, alignment, data_bytes)
        except _TruncatedError as error:
            beyond.append(f"{entry.name!r:.80}: {error}")
            continue
        except ExportError as error:
            problems.append(f"{entry.name!r:.80}: {error}")
            continue
        found[entry.name] = Tensor(entry.name, kind, entry.dims[::-1], path, start + entry.offset)
        spans.append((entry.offset, entry.offset + size, entry.name))
    spans.sort()
    for (_, end, one), (begin, _, other) in itertools.pairwise(spans):
        if begin < end:
            problems.append(f"{other!r:.80}: it overlaps {one!r:.80}")
    problems += beyond[:1]  # an interrupted download can lack all of them
    if len(beyond) > 1:
        problems.append(f"{len(beyond) - 1} more are beyond the end of the file: download it again")
    if problems:
        more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        raise ExportError(f"{path}: tensors cannot be read:\n  " + "\n  ".join([*problems[:20], *more]))
    return found


class _TruncatedError(ExportError):
    """A tensor is beyond the end of the file."""


def _bytes(entry: TensorEntry, kind: NumberType, alignment: int, data_bytes: int) -> int:
    """The size of a tensor's data. ExportError if the entry is invalid."""
    numbers = math.prod(entry.dims)
    if not 0 < numbers <= MAX_NUMBERS:
        raise ExportError(f"its dimensions are {' x '.join(map(str, entry.dims))}, which no weights have")
    if entry.dims[0] % kind.block:
        raise ExportError(f"its rows have {entry.dims[0]} numbers, expected whole {kind.name} blocks of {kind.block}")
    if entry.offset % alignment:
        raise ExportError(f"its offset is {entry.offset}, not a multiple of the alignment {alignment}")
    size = kind.row_bytes(numbers) + kind.tail
    if entry.offset > data_bytes or size > data_bytes - entry.offset:
        raise _TruncatedError(
            f"it would end at byte {entry.offset + size} of the data, but the file has {max(data_bytes, 0)}:"
            " it is truncated"
        )
    return size
