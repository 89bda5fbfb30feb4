"""Reads small files whole: no more memory than the file has bytes, and an error for what cannot be such a file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from llamac.errors import ExportError, LlamacError

MAX_BYTES = 1 << 26  # an index of a million tensors; most files that are read so have a few kilobytes


def read_small(path: Path, limit: int = MAX_BYTES, error: type[LlamacError] = ExportError) -> bytes:
    """The content of a file that has at most `limit` bytes. Raises `error` for a longer one."""
    with open(path, "rb") as file:
        found = os.fstat(file.fileno())
        size = found.st_size if stat.S_ISREG(found.st_mode) else limit
        if size <= limit:
            data = file.read(size + 1)  # asked for more than there may be, Python would take the memory for that first
            if len(data) <= limit:
                return data
    raise error(f"{path} has more than {limit} bytes: it is not what its name says")
