"""Prefixes on disk: pages of the KV cache in a folder that processes share, and that outlives them.

A page is a file named after the model and all tokens up to the page's end, and after a group of layers. So a page is
stored once however many prefixes contain it, no index can be out of date, and any file can vanish at any time: a
prefix then ends before it. Files appear complete, by a rename, and are read with their checksums.

A group of layers whose state cannot be cut, as a window or a recurrent state, needs only its last files: a prefix can
be restored at each length at which every group has what the next token needs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import stat
import struct
import threading
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llamac import _core
from llamac.engine.cache.kv_identity import kv_identity
from llamac.engine.cache.session_file import fill_page
from llamac.errors import ArgumentError, LlamacError, SessionFileError
from llamac.format.private_files import STALE_S, TEMPORARY, open_regular, remove_abandoned, replacing

if TYPE_CHECKING:
    from llamac.engine.session import Session

MAGIC = b"LLAMACPG"
HEADER = struct.Struct("<8sII32s32s")  # magic, version, group, key, SHA-256 of the page
VERSION = 1
SUFFIX = ".page"
MAX_BYTES = 4 << 30
READERS = 2  # threads that read prefixes
MAX_WAITING = 512  # pages that wait to be written; further ones are not stored


@dataclass
class StoreStats:
    """Counts since the folder was opened by this process.

    Attributes:
        hits: Prefixes that were restored.
        hit_tokens: Their tokens.
        read_bytes: Bytes of pages that were read.
        written_bytes: Bytes of files that were written.
        evictions: Files that were deleted for the limit.
        errors: Files that were damaged, could not be written, or were given up because the disk is slow.
        bytes: Bytes of all files, as this process knows.
    """

    hits: int = 0
    hit_tokens: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    evictions: int = 0
    errors: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class _Page:
    """A page that waits to be written.

    Attributes:
        path: Its file.
        group: Its group of layers.
        key: The hash of all tokens up to its end.
        used: When it was used, in nanoseconds.
        content: The page.
    """

    path: Path
    group: int
    key: bytes
    used: int
    content: _core.Page


@dataclass(frozen=True)
class Loaded:
    """The pages of a prefix, in memory.

    Attributes:
        length: Its tokens.
        pages: The pages of the first group, then those of the next one, ...
        paths: Their files.
        indexes: Their places in the prefix.
    """

    length: int
    pages: list[_core.Page]
    paths: list[Path]
    indexes: list[int]


Loading = Future[Loaded | None]


class PrefixStore:
    """A folder of pages. One thread at a time uses it; threads of its own read and write."""

    def __init__(self, session: Session, folder: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> None:
        """Open a folder, which is created if it does not exist.

        Args:
            session: A session of the model. It must stay open longer than the store.
            folder: The folder.
            max_bytes: Most bytes of its files. What was used longest ago is deleted. Between two looks at the folder,
                each process may write an eighth more.

        Raises:
            OSError: If there is no such folder and it cannot be created.
        """
        identity = kv_identity(session)
        self._core = session._core
        self._root = identity.digest()
        self._positions = identity.page_positions
        self._groups = identity.groups
        page_bytes = sum(group[3] for group in self._groups)
        if max_bytes < page_bytes:
            raise ArgumentError(f"prefix_dir_bytes is {max_bytes}, expected at least {page_bytes}, a page")
        self._max_bytes = max_bytes
        self.folder = Path(folder)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.stats = StoreStats()
        self._written = 0  # bytes since the last look at the folder
        self._waiting: queue.Queue[_Page | None] = queue.Queue()
        self._writer: threading.Thread | None = None
        self._readers: ThreadPoolExecutor | None = None
        self._trim()

    # ---- finding

    def longest(self, ids: array[int], at_least: int = 0) -> int:
        """The longest prefix of some ids that can be restored; 0 if it is shorter than `at_least`.

        At least one id is left to compute.
        """
        keys = self._keys(ids, (len(ids) - 1) // self._positions)
        known: dict[Path, bool] = {}

        def exists(page: int, group: int) -> bool:
            path = self._path(keys[page], group)
            if path not in known:
                known[path] = _is_own_file(path)
            return known[path]

        n = 0
        whole = [g for g, (window, *_) in enumerate(self._groups) if not window]
        while n < len(keys) and all(exists(n, g) for g in whole):
            n += 1
        while n and n * self._positions >= at_least:
            if all(exists(page, g) for g in range(len(self._groups)) for page in self._needed(g, n)):
                return n * self._positions
            n -= 1
        return 0

    def begin(self, ids: array[int], at_least: int) -> Loading | None:
        """Begin to read the longest prefix of some ids, in a thread. None if it is shorter than `at_least`."""
        length = self.longest(ids, at_least)
        if length < at_least:
            return None
        if self._readers is None:
            self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="llamac-prefix-reader")
        try:
            return self._readers.submit(self.load, ids, length)
        except RuntimeError:  # the system refuses another thread
            self.stats.errors += 1
            return None

    def load(self, ids: array[int], length: int) -> Loaded | None:
        """Read a prefix that `longest` has found. None if a file is gone or damaged by now, or there is no memory."""
        n = length // self._positions
        keys = self._keys(ids, n)
        found = Loaded(length, [], [], [])
        try:
            for g in range(len(self._groups)):
                for index in self._needed(g, n):
                    found.paths.append(self._path(keys[index], g))
                    found.indexes.append(index)
                    found.pages.append(self._read(found.paths[-1], keys[index], g))
        except MemoryError:
            return None
        except SessionFileError:
            self.stats.errors += 1
            with contextlib.suppress(OSError):
                os.unlink(found.paths[-1])
            return None
        except OSError:
            return None
        return found

    def restore(self, ids: array[int], loaded: Loaded, to: _core.Session, sequence: int) -> None:
        """Make a sequence of another session of the model hold a prefix that was read."""
        n = loaded.length // self._positions
        starts = array("i", [next(iter(self._needed(g, n)), 0) * self._positions for g in range(len(self._groups))])
        _core.restore(to, sequence, ids[: loaded.length], starts, loaded.pages)
        now = time.time_ns()
        for path, page in zip(loaded.paths, loaded.indexes, strict=True):
            _mark_used(path, now - page)
        self.stats.hits += 1
        self.stats.hit_tokens += loaded.length
        self.stats.read_bytes += sum(page.nbytes for page in loaded.pages)

    # ---- keeping

    def keep(self, ids: array[int], source: _core.Session, sequence: int) -> None:
        """Store the whole pages of a sequence, which begins with these ids. A thread writes those that are missing."""
        keys = self._keys(ids, len(ids) // self._positions)
        now = time.time_ns()
        for g, start in enumerate(_core.first_positions(source, sequence)):
            for page in range(-(-start // self._positions), len(keys)):
                path = self._path(keys[page], g)
                if _is_own_file(path):
                    _mark_used(path, now - page)
                elif self._waiting.qsize() >= MAX_WAITING:
                    self.stats.errors += 1
                else:
                    self._write(_Page(path, g, keys[page], now - page, _core.hold_page(source, sequence, g, page)))

    def drain(self) -> bool:
        """Wait until no page waits to be written, and takes memory. Returns whether one did."""
        waited = self._waiting.unfinished_tasks > 0
        self._waiting.join()
        return waited

    def close(self) -> None:
        """Write what waits, and end the threads."""
        if self._readers is not None:
            self._readers.shutdown(cancel_futures=True)
            self._readers = None
        if self._writer is not None:
            self._waiting.put(None)
            self._writer.join()
            self._writer = None

    # ---- names

    def _keys(self, ids: array[int], count: int) -> list[bytes]:
        """The keys of the first pages: each is a hash of the key before it and of the page's tokens."""
        keys, key, n = [], self._root, self._positions
        for page in range(count):
            key = hashlib.sha256(key + ids[page * n : (page + 1) * n].tobytes()).digest()
            keys.append(key)
        return keys

    def _path(self, key: bytes, group: int) -> Path:
        return self.folder / f"{key.hex()}-{group}{SUFFIX}"

    def _needed(self, group: int, n: int) -> range:
        """The pages of a group that a sequence of n pages must hold."""
        window = self._groups[group][0]
        first = max(0, n * self._positions + 1 - window) // self._positions if window else 0
        return range(first, n)

    # ---- files

    def _read(self, path: Path, key: bytes, group: int) -> _core.Page:
        with open(path, "rb", opener=lambda name, flags: open_regular(Path(name), flags)) as file:
            header = file.read(HEADER.size)
            if len(header) < HEADER.size:
                raise SessionFileError(f"{path} ends after {len(header)} bytes")
            magic, version, its_group, its_key, digest = HEADER.unpack(header)
            if (magic, version, its_group, its_key) != (MAGIC, VERSION, group, key):
                raise SessionFileError(f"{path} is not the page that its name says")
            page = _core.take_page(self._core, group)
            fill_page(file, page, digest.hex(), "the page", str(path))
        return page

    def _write(self, page: _Page) -> None:
        if self._writer is None:
            writer = threading.Thread(target=self._write_all, name="llamac-prefixes", daemon=True)
            try:
                writer.start()
            except RuntimeError:  # the system refuses another thread
                self.stats.errors += 1
                return
            self._writer = writer
        self._waiting.put(page)

    def _write_all(self) -> None:
        while (item := self._waiting.get()) is not None:
            try:
                self._write_one(item)
            except (OSError, LlamacError, MemoryError):
                self.stats.errors += 1
            finally:
                del item  # the page
                self._waiting.task_done()
        self._waiting.task_done()

    def _write_one(self, page: _Page) -> None:
        if _is_own_file(page.path):
            return
        copy = bytearray(page.content.nbytes)
        _core.copy_page(self._core, page.group, page.content, 0, self._positions, copy)
        with replacing(page.path, sync=False) as file:
            file.write(HEADER.pack(MAGIC, VERSION, page.group, page.key, hashlib.sha256(copy).digest()))
            file.write(copy)
        _mark_used(page.path, page.used)
        size = HEADER.size + len(copy)
        self.stats.written_bytes += size
        self.stats.bytes += size
        self._written += size
        if self.stats.bytes > self._max_bytes or self._written > self._max_bytes // 8:
            self._trim()

    def _trim(self) -> None:
        """Look at the folder. If its files exceed the limit, delete those that were used longest ago."""
        found, incomplete = [], []
        for entry in _entries(self.folder):
            status = entry.stat(follow_symlinks=False)
            if entry.name.startswith(TEMPORARY):
                incomplete.append(Path(entry.path))
            elif entry.name.endswith(SUFFIX):
                found.append((status.st_mtime_ns, status.st_size, entry.path))
        remove_abandoned(incomplete, STALE_S)
        total = sum(size for _, size, _ in found)
        if total > self._max_bytes:
            for _, size, path in sorted(found):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                    self.stats.evictions += 1
                total -= size
                if total <= self._max_bytes * 9 // 10:
                    break
        self.stats.bytes, self._written = total, 0


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """The regular files of a folder. Others can delete them in the meantime."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False):
                    entry.stat(follow_symlinks=False)  # is cached
                    yield entry


def _is_own_file(path: Path) -> bool:
    """Whether there is a file of this user, and not a link."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _mark_used(path: Path, when: int) -> None:
    """Set the time of a file's last use, which decides what is deleted first.

    Callers give later pages of a prefix earlier times, by nanoseconds: they are useless without the pages before them.
    """
    with contextlib.suppress(OSError):
        os.utime(path, ns=(when, when))
