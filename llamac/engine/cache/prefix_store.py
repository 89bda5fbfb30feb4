"""Prefixes on disk: pages of the KV cache in a folder that processes share and that outlives them.

A page is a file. Its name is a hash of the model and all tokens up to the page's end, and the group of layers. A page
is therefore stored once, regardless of how many prefixes contain it, and there is no index that could be out of date.
Any file can disappear at any time: prefixes then end before it. Files are renamed into place when complete, and
checksums are verified when they are read.

A group of layers with a window needs only its last files. A page of recurrent layers is their state at the page's end,
so they need only the last file; there is one where a sequence kept its state at the end of a page. A prefix can be
restored at each length at which every group has the pages that the next token needs.
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
from llamac.arguments import file_path
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
MAX_WAITING = 1 << 30  # maximum bytes of pages waiting to be written; further ones are dropped
STATES_BYTES = 64 << 20  # maximum bytes of states of recurrent layers that a prefix adds; MIN_STATES are always allowed
MIN_STATES = 2


@dataclass
class StoreStats:
    """Counters since this process opened the folder.

    Attributes:
        hits: Prefixes that were restored.
        hit_tokens: Tokens of these prefixes.
        read_bytes: Bytes of pages read.
        written_bytes: Bytes of files written.
        evictions: Files deleted to keep the limit.
        errors: Files that were damaged, could not be written, or were skipped because the disk is slow.
        bytes: Bytes of all files, as far as this process knows.
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
    """A page that is waiting to be written.

    Attributes:
        path: The path of its file.
        group: The group of layers.
        key: The hash of all tokens up to the page's end.
        used: The time of the last use, in nanoseconds.
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
        length: The number of tokens.
        pages: The pages of the first group, then those of the next group, and so on.
        paths: The files of the pages.
        indexes: The positions of the pages in the prefix, in pages.
    """

    length: int
    pages: list[_core.Page]
    paths: list[Path]
    indexes: list[int]


Loading = Future[Loaded | None]


class PrefixStore:
    """A folder of pages. Not thread-safe; it reads and writes in its own threads."""

    def __init__(self, session: Session, folder: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> None:
        """Open a folder, which is created if it does not exist.

        Args:
            session: A session of the model. It must stay open longer than the store.
            folder: The folder.
            max_bytes: Maximum bytes of its files. The least recently used files are deleted. Between two scans of the
                folder, each process may exceed the limit by an eighth.

        Raises:
            OSError: If the folder does not exist and cannot be created.
        """
        identity = kv_identity(session)
        self._core = session._core
        self._root = identity.digest()
        self._positions = identity.page_positions
        self._groups = identity.groups
        page_bytes = sum(group.page_bytes for group in self._groups)
        if max_bytes < page_bytes:
            raise ArgumentError(f"prefix_dir_bytes is {max_bytes}, expected at least {page_bytes}, a page")
        self._max_bytes = max_bytes
        self.folder = file_path(folder, "prefix_dir")
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.stats = StoreStats()
        self._written = 0  # bytes written since the last scan of the folder
        self._waiting: queue.Queue[_Page | None] = queue.Queue()
        self._queued = self._taken = 0  # bytes of pages that were put into the queue, and that the writer has released
        self._writer: threading.Thread | None = None
        self._readers: ThreadPoolExecutor | None = None
        self._trim()

    # ---- finding

    def longest(self, ids: array[int], at_least: int = 0) -> int:
        """Return the length of the longest restorable prefix of ids; 0 if it is shorter than `at_least`.

        The prefix leaves at least one id to compute.
        """
        keys = self._keys(ids, (len(ids) - 1) // self._positions)
        known: dict[Path, bool] = {}

        def exists(page: int, group: int) -> bool:
            path = self._path(keys[page], group)
            if path not in known:
                known[path] = _is_own_file(path)
            return known[path]

        n = 0
        # groups that need every page have those of all shorter prefixes; others need few, so the search stays linear
        whole = [g for g, group in enumerate(self._groups) if not group.is_recurrent and not group.window]
        while n < len(keys) and all(exists(n, g) for g in whole):
            n += 1
        rest = [g for g in range(len(self._groups)) if g not in whole]
        while n and n * self._positions >= at_least:
            if all(exists(page, g) for g in rest for page in self._needed(g, n)):
                return n * self._positions
            n -= 1
        return 0

    def begin(self, ids: array[int], at_least: int) -> Loading | None:
        """Start reading the longest prefix of ids in a thread. Returns None if it is shorter than `at_least`."""
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
        """Read a prefix that `longest` found. Returns None if a file is missing or damaged, or memory runs out."""
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
        """Restore a prefix that was read to a sequence of another session of the model. Takes the pages."""
        n = loaded.length // self._positions
        firsts = [0 if group.is_recurrent else self._needed(g, n).start for g, group in enumerate(self._groups)]
        starts = array("i", [first * self._positions for first in firsts])
        n_bytes = sum(page.nbytes for page in loaded.pages)
        try:
            _core.restore(to, [(sequence, ids[: loaded.length], starts, loaded.pages, 0, [])])
        finally:
            loaded.pages.clear()  # the traceback of an error refers to `loaded`, as long as a caller keeps the error
        now = time.time_ns()
        for path, page in zip(loaded.paths, loaded.indexes, strict=True):
            _mark_used(path, now - page)
        self.stats.hits += 1
        self.stats.hit_tokens += loaded.length
        self.stats.read_bytes += n_bytes

    # ---- keeping

    def keep(self, ids: array[int], source: _core.Session, sequence: int) -> None:
        """Store the whole pages of a sequence that begins with these ids. A thread writes the missing ones."""
        keys = self._keys(ids, len(ids) // self._positions)
        now = time.time_ns()
        for g, start in enumerate(_core.first_positions(source, sequence)):
            whole = range(-(-start // self._positions), len(keys))
            held = {page: page for page in whole}
            if self._groups[g].is_recurrent:
                held = self._states(source, sequence, len(keys))
            for page, index in held.items():
                path = self._path(keys[page], g)
                if _is_own_file(path):
                    _mark_used(path, now - page)
                elif self._queued - self._taken >= MAX_WAITING:
                    self.stats.errors += 1
                else:
                    self._write(_Page(path, g, keys[page], now - page, _core.hold_page(source, sequence, g, index)))

    def _states(self, source: _core.Session, sequence: int, n: int) -> dict[int, int]:
        """Return the last of the first n pages at whose ends a sequence has a state, with the indexes of the states."""
        lengths = enumerate(_core.state_lengths(source, sequence))
        found = {length // self._positions - 1: i for i, length in lengths if length % self._positions == 0}
        most = max(MIN_STATES, STATES_BYTES // self._groups[-1].page_bytes)
        return dict([(page, index) for page, index in found.items() if page < n][:most])

    def drain(self) -> bool:
        """Wait until all pending pages have been written and freed. Returns whether there were any."""
        waited = self._waiting.unfinished_tasks > 0
        self._waiting.join()
        return waited

    def close(self) -> None:
        """Write the pending pages and end the threads."""
        if self._readers is not None:
            self._readers.shutdown(cancel_futures=True)
            self._readers = None
        if self._writer is not None:
            self._waiting.put(None)
            self._writer.join()
            self._writer = None

    # ---- names

    def _keys(self, ids: array[int], count: int) -> list[bytes]:
        """Return the keys of the first pages: each is a hash of the previous key and the page's tokens."""
        keys, key, n = [], self._root, self._positions
        for page in range(count):
            key = hashlib.sha256(key + ids[page * n : (page + 1) * n].tobytes()).digest()
            keys.append(key)
        return keys

    def _path(self, key: bytes, group: int) -> Path:
        return self.folder / f"{key.hex()}-{group}{SUFFIX}"

    def _needed(self, group: int, n: int) -> range:
        """Return the pages of a group that a sequence of n pages requires."""
        if self._groups[group].is_recurrent:
            return range(max(0, n - 1), n)
        window = self._groups[group].window
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
        self._queued += page.content.nbytes
        self._waiting.put(page)

    def _write_all(self) -> None:
        while (item := self._waiting.get()) is not None:
            size = item.content.nbytes
            try:
                self._write_one(item)
            except (OSError, LlamacError, MemoryError):
                self.stats.errors += 1
            finally:
                del item  # the page
                self._taken += size
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
        """Scan the folder. If its files exceed the limit, delete the least recently used ones."""
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
                try:
                    os.unlink(path)
                    self.stats.evictions += 1
                except FileNotFoundError:
                    pass
                except OSError:  # another user's file, or the folder is read-only
                    continue
                total -= size
                if total <= self._max_bytes * 9 // 10:
                    break
        self.stats.bytes, self._written = total, 0


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Iterate over the regular files of a folder. Other processes can delete them at any time."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False):
                    entry.stat(follow_symlinks=False)  # is cached
                    yield entry


def _is_own_file(path: Path) -> bool:
    """Return whether the path is a regular file, not a link, that belongs to this user."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _mark_used(path: Path, when: int) -> None:
    """Set the time of a file's last use, which determines the order of deletion.

    Callers pass slightly earlier times for later pages of a prefix, which are useless without the pages before them.
    """
    with contextlib.suppress(OSError):
        os.utime(path, ns=(when, when))
