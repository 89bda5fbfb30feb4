"""Git LFS: what lies in a working copy in the place of a large file that has not been loaded."""

from __future__ import annotations

from pathlib import Path

from llamac.errors import ExportError

HEAD_BYTES = 64  # enough of a file to know a pointer
_POINTER = b"version https://git-lfs.github.com/spec/"


def refuse_pointer(path: Path, head: bytes) -> None:
    """ExportError if a file that begins like this is a pointer to the real one."""
    if head.startswith(_POINTER):
        raise ExportError(f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder")
