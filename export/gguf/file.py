"""A GGUF model as it lies on disk: one file or several parts of one, their metadata, and where every tensor is.

Whatever a file claims is checked here, once: types, dimensions, that each tensor lies inside its file and shares no
byte with another one. Parts are found by the names that llama.cpp's splitter gives, and by the numbers inside them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from llamac.errors import ExportError
from llamac.export.checkpoint import LazyTensor
from llamac.export.gguf.metadata import GGUFMetadata, TensorEntry, Value, read_head
from llamac.export.gguf.tensor_types import NumberType, lazy_tensor, number_type

DEFAULT_ALIGNMENT = 32
MAX_PARTS = 9999
MAX_NUMBERS = 1 << 48
_PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file. shape: rows first, as NumPy has it. offset: of its first byte in the file."""

    name: str
    type: NumberType
    shape: tuple[int, ...]
    path: Path
    offset: int

    def vector(self) -> LazyTensor:
        """All its numbers in a row."""
        return lazy_tensor(self.path, self.type, (math.prod(self.shape),), self.offset)

    def matrix(self) -> LazyTensor:
        """Its rows, those of all matrices of a stack one after another."""
        return lazy_tensor(self.path, self.type, (math.prod(self.shape[:-1]), self.shape[-1]), self.offset)


@dataclass(frozen=True)
class GGUFFile:
    """A model. paths: of its parts. values: the metadata. tensors: by GGUF's names."""

    paths: tuple[Path, ...]
    values: dict[str, Value]
    tensors: dict[str, Tensor]


def open_gguf(path: Path) -> GGUFFile:
    """The model of which `path` is the file, or any one part.

    Raises ModelError for a damaged file, and ExportError for one whose tensors make no sense or are of types that
    cannot be read, and for parts that are missing or do not go together.
    """
    metadata, entries = read_head(path)
    parts = _parts(path, metadata)
    if len(parts) == 1:
        return GGUFFile((path,), metadata.values, _tensors(path, metadata, entries))
    tensors: dict[str, Tensor] = {}
    values: dict[str, Value] = {}
    for number, part in enumerate(parts):
        metadata, entries = read_head(part)
        _check_part(part, metadata, number, len(parts))
        if number == 0:
            values = metadata.values
        for name, tensor in _tensors(part, metadata, entries).items():
            if name in tensors:
                raise ExportError(f"{part}: tensor {name!r} is in an earlier part, too")
            tensors[name] = tensor
    total = _whole_number(values, "split.tensors.count")
    if total not in (None, len(tensors)):
        raise ExportError(
            f"{parts[0]}: all parts together should have {total} tensors (split.tensors.count), but have {len(tensors)}"
        )
    return GGUFFile(tuple(parts), values, tensors)


# ---- parts


def _parts(path: Path, metadata: GGUFMetadata) -> list[Path]:
    """The files of the model that `path` is, or is a part of. Raises ExportError with the names of missing ones."""
    count = _whole_number(metadata.values, "split.count") or 1
    if count == 1:
        return [path]
    if count > MAX_PARTS:
        raise ExportError(f"{path} claims to be one of {count} parts (split.count), at most {MAX_PARTS} are believed")
    name = _PART_NAME.fullmatch(path.name)
    if name is None or int(name[3]) != count:
        raise ExportError(
            f"{path} is one of {count} parts: they must be named NAME-00001-of-{count:05}.gguf and so on, to be found"
        )
    parts = [path.with_name(f"{name[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        named = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise ExportError(f"{path} is one of {count} parts, of which these are missing beside it: {named}")
    return parts


def _check_part(path: Path, metadata: GGUFMetadata, number: int, count: int) -> None:
    found = [_whole_number(metadata.values, key) for key in ("split.no", "split.count")]
    if found != [number, count]:
        raise ExportError(
            f"{path} should be part {number} of {count}, counted from 0, but says that it is {found[0]} of {found[1]}"
            " (split.no, split.count): the parts were renamed or do not belong together"
        )


def _whole_number(values: dict[str, Value], key: str) -> int | None:
    value = values.get(key)
    if value is not None and (type(value) is not int or value < 0):
        raise ExportError(f"the GGUF file's {key} is {value!r:.40}, expected a whole number")
    return value if isinstance(value, int) else None


# ---- tensors


def _tensors(path: Path, metadata: GGUFMetadata, entries: Iterable[TensorEntry]) -> dict[str, Tensor]:
    """The tensors of one file. Raises ExportError with all that are wrong."""
    alignment = metadata.values.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & alignment - 1:
        raise ExportError(f"{path}: general.alignment is {alignment!r:.40}, expected a power of two")
    start = -(-metadata.end // alignment) * alignment
    room = path.stat().st_size - start
    problems: list[str] = []
    beyond: list[str] = []
    found: dict[str, Tensor] = {}
    places: list[tuple[int, int, str]] = []
    for entry in entries:
        try:
            kind = number_type(entry.type)
            size = _bytes(entry, kind, alignment, room)
        except _TruncatedError as error:
            beyond.append(f"{entry.name!r:.80}: {error}")
            continue
        except ExportError as error:
            problems.append(f"{entry.name!r:.80}: {error}")
            continue
        found[entry.name] = Tensor(entry.name, kind, entry.dims[::-1], path, start + entry.offset)
        places.append((entry.offset, entry.offset + size, entry.name))
    places.sort()
    for (_, end, one), (begin, _, other) in itertools.pairwise(places):
        if begin < end:
            problems.append(f"{other!r:.80}: it shares bytes with {one!r:.80}")
    problems += beyond[:1]  # of a download that was broken off all tensors may be
    if len(beyond) > 1:
        problems.append(f"{len(beyond) - 1} more lie beyond the file's end: get it again")
    if problems:
        more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        raise ExportError(f"{path}: tensors cannot be read:\n  " + "\n  ".join([*problems[:20], *more]))
    return found


class _TruncatedError(ExportError):
    """A tensor lies beyond the file's end."""


def _bytes(entry: TensorEntry, kind: NumberType, alignment: int, room: int) -> int:
    """The bytes of a tensor's data. Raises ExportError if they are not where the entry says."""
    numbers = math.prod(entry.dims)
    if not 0 < numbers <= MAX_NUMBERS:
        raise ExportError(f"its dimensions are {' x '.join(map(str, entry.dims))}, which no weights have")
    if entry.dims[0] % kind.block:
        raise ExportError(f"its rows of {entry.dims[0]} numbers are no whole {kind.name} blocks of {kind.block}")
    if entry.offset % alignment:
        raise ExportError(f"its offset is {entry.offset}, no multiple of the alignment {alignment}")
    size = kind.row_bytes(numbers)
    if entry.offset > room or size > room - entry.offset:
        raise _TruncatedError(
            f"it would end at byte {entry.offset + size} of the data, but the file has {max(room, 0)}: it is truncated"
        )
    return size
