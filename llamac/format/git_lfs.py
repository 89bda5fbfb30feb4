"""Git LFS pointers, which replace large files in a working copy until they are downloaded."""

from __future__ import annotations

from pathlib import Path

from llamac.errors import ExportError

HEAD_BYTES = 64  # enough to recognize a pointer
_POINTER = b"version https://git-lfs.github.com/spec/"


def check_not_pointer(path: Path, head: bytes) -> None:
    """Check that a file is not a pointer.

    Args:
        path: The file, for the error message.
        head: The first bytes of the file.

    Raises:
        ExportError: If it is a pointer.
    """
    if head.startswith(_POINTER):
        raise ExportError(f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder")
