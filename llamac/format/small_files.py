"""Reads whole regular files up to a size limit."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from llamac.errors import ExportError, LlamacError

MAX_BYTES = 1 << 26  # enough for an index of a million tensors


def read_small(path: Path, limit: int = MAX_BYTES, error: type[LlamacError] = ExportError) -> bytes:
    """Read a regular file.

    Args:
        path: The file.
        limit: The largest size, in bytes.
        error: The class of the error for other files.

    Raises:
        LlamacError: Of the class `error`, if the file is larger than `limit`, or is a pipe or a device.
        OSError: If it cannot be opened or read.
    """
    with open(path, "rb", opener=_without_waiting) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise error(f"{path} is not a regular file")
        if found.st_size <= limit:
            data = file.read(found.st_size + 1)  # read(limit) would allocate `limit` bytes
            if len(data) <= limit:
                return data
    raise error(f"{path} has {found.st_size} bytes, more than the {limit} bytes that a file of this kind can have")


def _without_waiting(path: str, flags: int) -> int:
    """Open a file. If it is a pipe without a writer, do not wait for one."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
