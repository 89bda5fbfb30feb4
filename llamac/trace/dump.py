"""Writes the stages of a text to a safetensors file, part by part."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from llamac.export.hf.safetensors_file import header_bytes
from llamac.export.targets import atomic_file, check_space

if TYPE_CHECKING:
    from array import array

    from llamac.trace.watching import Part


class Dump:
    """An unfinished file. `open_dump` makes one."""

    def __init__(self, file: BinaryIO, data_at: int, shapes: Mapping[tuple[str, int], tuple[int, ...]]) -> None:
        self._file = file
        self._places: dict[tuple[str, int], tuple[int, int]] = {}  # where a stage begins, and the bytes of a row
        for key, shape in shapes.items():
            row = 4 * math.prod(shape[1:])
            self._places[key] = data_at, row
            data_at += row * shape[0]

    def add(self, part: Part) -> None:
        """Write the stages of a part that the file has."""
        import numpy as np

        for key, (begin, row_bytes) in self._places.items():
            self._file.seek(begin + part.start * row_bytes)
            self._file.write(np.ascontiguousarray(part.stages[key], "<f4").data)


@contextlib.contextmanager
def open_dump(
    path: Path, ids: array[int], shapes: Mapping[tuple[str, int], tuple[int, ...]], about: Mapping[str, str]
) -> Iterator[Dump]:
    """Open a new file that appears under its name when the block succeeds.

    The tensors are `ids` (n, I32) and "{stage}.{layer}" (F32).

    Args:
        path: The file. An existing one is replaced.
        ids: The text.
        shapes: The shape of each stage and layer.
        about: The file's metadata.

    Raises:
        DiskFullError: If the disk does not have enough space.
    """
    import numpy as np

    tensors = [
        ("ids", "I32", (len(ids),)),
        *((f"{name}.{layer}", "F32", shape) for (name, layer), shape in shapes.items()),
    ]
    header = header_bytes(tensors, dict(about))
    check_space(path, len(header) + 4 * sum(math.prod(shape) for _, _, shape in tensors))
    with atomic_file(path, sync=False) as file:
        file.write(header)
        file.write(np.array(ids, "<i4").tobytes())
        yield Dump(file, file.tell(), shapes)
