"""Conversions that do not wait for checksums (drafts), and the thread that finishes them while the process is idle.

A draft is a model in the cache without the hashes of its tensors. Its key is made from the stamps of the source's
files, not from their contents. A thread computes the SHA-256 of the source and of the tensors, then gives the model its
hashes and its final key. It works only while the rest of the process does not, and leaves nothing behind if the process
ends first: the draft stays usable until the system's next start, and the next process that opens it begins again.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from llamac.errors import LlamacError
from llamac.format.flatfile import FlatFile
from llamac.sources.cache import Cache, key_of
from llamac.sources.digests import is_settled, stamps_of

PAUSE_S = 0.25  # between looks at what the rest of the process does
BUSY = 0.1  # the share of a CPU that other threads of an idle process take at most


class Draft(NamedTuple):
    """A conversion that does not wait for checksums.

    Attributes:
        cache: The cache.
        source: The source.
        files: Its files, by name.
        stamps: Their stamps, by name.
        options: The options of the conversion.
    """

    cache: Cache
    source: Path
    files: Mapping[str, Path]
    stamps: Mapping[str, list[int]]
    options: tuple[str | bool, ...]

    @property
    def key(self) -> str:
        """The draft's key."""
        return key_of({name: f"stamp {stamp}" for name, stamp in self.stamps.items()}, *self.options)

    def has_changed(self) -> bool:
        """Whether a file of the source has changed."""
        return stamps_of(self.files) != self.stamps


def draft_of(cache: Cache, source: Path, files: Mapping[str, Path], options: tuple[str | bool, ...]) -> Draft | None:
    """The draft of a conversion; None if the source changed so recently that its stamps do not identify it."""
    stamps = stamps_of(files)
    return Draft(cache, source, files, stamps, options) if all(map(is_settled, stamps.values())) else None


def finish_later(draft: Draft, file: FlatFile) -> None:
    """Start a thread that finishes a draft. `file`, which is the opened draft, gets the hashes, too."""
    opened = weakref.ref(file)

    def run() -> None:
        with contextlib.suppress(LlamacError, OSError):  # the source is gone, the disk is full: the draft stays a draft
            tables = finish(draft, _Idle().wait)
            if tables is not None and (still := opened()) is not None:
                still.adopt(tables)

    with contextlib.suppress(RuntimeError):  # the system refuses a thread: the draft stays a draft
        threading.Thread(target=run, name="llamac-finish", daemon=True).start()


def finish(draft: Draft, pause: Callable[[], object] = lambda: None) -> bytes | None:
    """Give a draft its hashes and its final key.

    Args:
        draft: The draft, which exists.
        pause: Called between steps of a few milliseconds.

    Returns:
        The tables with the hashes; None if the source or the draft has changed, or if another process finishes it.
    """
    cache = draft.cache

    def report(phase: str, done: int, total: int) -> None:
        pause()

    digests = cache.digests(draft.source, draft.files, report)
    path = cache.path(draft.key)
    with contextlib.closing(FlatFile(path)) as file:  # not the caller's: that one may be closed meanwhile
        before = path.stat()
        file.hash_tensors(pause)
        tables = file.tables
    if draft.has_changed():
        return None
    is_finished = cache.publish(draft.key, key_of(digests, *draft.options), draft.files, before, tables)
    return tables if is_finished else None


class _Idle:
    """Waits while the rest of the process computes."""

    def __init__(self) -> None:
        self._at = self._used = 0.0

    def wait(self) -> None:
        """Return if other threads have used little of the time since the last call, else as soon as they do."""
        if not self._at:
            self._look()
            time.sleep(PAUSE_S)
        while self._look() > BUSY:
            time.sleep(PAUSE_S)

    def _look(self) -> float:
        """The share of a CPU that other threads have used since the last look."""
        at, used = time.monotonic(), time.process_time() - time.thread_time()
        share = (used - self._used) / max(at - self._at, 1e-9)
        self._at, self._used = at, used
        return share
