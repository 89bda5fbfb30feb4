"""SHA-256 of a source's files, remembered together with stamps that show whether a file has changed."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llamac.progress import Progress, silent

READ_BYTES = 1 << 20  # the buffer stays in the processor's cache
# A file that changed less than this before it was read can change again without getting a different time.
SETTLED_NS = 2_000_000_000

_SHA256 = r"[0-9a-f]{64}"


def digests_of(
    files: Mapping[str, Path], known: Mapping[str, Any], progress: Progress = silent
) -> tuple[dict[str, str], dict[str, list[Any]]]:
    """Hash files, except those that have not changed.

    Args:
        files: The files by name.
        known: The stamps that an earlier call returned.
        progress: Called with the phase "reading" and byte counts.

    Returns:
        The SHA-256 of each file, and the stamps to pass as `known` the next time.
    """
    found: dict[str, str] = {}
    stamps: dict[str, list[Any]] = {}
    changed: dict[str, Path] = {}
    for name, path in files.items():
        if digest := remembered_digest(known.get(name), path):
            found[name], stamps[name] = digest, known[name]
        else:
            changed[name] = path
    total, done = sum(path.stat().st_size for path in changed.values()), 0
    for name, path in changed.items():
        stamp = file_stamp(path)
        settled = is_settled(stamp)

        def report(count: int, before: int = done) -> None:
            progress("reading", min(before + count, total), total)

        found[name] = sha256_of_file(path, report)
        done += stamp[2]
        if stamp == file_stamp(path) and settled:
            stamps[name] = [stamp, found[name]]
    return found, stamps


def sha256_of_file(path: Path, report: Callable[[int], object] = lambda count: None) -> str:
    """Compute the SHA-256 of a file.

    Args:
        path: The file.
        report: Called with the number of bytes read, first with 0.

    Returns:
        The SHA-256 in hexadecimal.
    """
    digest, done = hashlib.sha256(), 0
    report(done)
    with open(path, "rb", buffering=0) as file, memoryview(bytearray(READ_BYTES)) as buffer:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            done += count
            report(done)
    return digest.hexdigest()


def sha256_hex(data: bytes) -> str:
    """Compute the SHA-256 of some bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def remembered_digest(entry: Any, path: Path) -> str | None:
    """Return the SHA-256 in a source note's entry if the file has not changed since, else None."""
    is_entry = isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str)
    if is_entry and re.fullmatch(_SHA256, entry[1]) and entry[0] == file_stamp(path):
        return str(entry[1])
    return None


def file_stamp(path: Path) -> list[int]:
    """Numbers that differ if the file has changed. The last one is a time that no program can set."""
    found = path.stat()
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def stamps_of(files: Mapping[str, Path]) -> dict[str, list[int]]:
    """The stamp of each file of a source."""
    return {name: file_stamp(path) for name, path in sorted(files.items())}


def is_settled(stamp: list[int]) -> bool:
    """Whether a file that changes now gets another stamp."""
    return stamp[-1] + SETTLED_NS < time.time_ns()
