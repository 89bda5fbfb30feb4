"""Threads of a flat file's writer: jobs that run ahead of the writer, in order, and SHA-256 computed beside it.

Both keep a bounded number of bytes in memory. They do not change a byte of the result.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")

AHEAD_BYTES = 32 << 20  # of results of jobs that the writer has not taken, and of data that is not hashed
MAX_HASHERS = 4


@dataclass(frozen=True)
class Job(Generic[T]):
    """A part of the work.

    Attributes:
        run: Computes the result; any thread may call it.
        bytes: The approximate size of the result, in bytes.
    """

    run: Callable[[], T]
    bytes: int


def in_order(jobs: Iterator[Job[T]], threads: int) -> Iterator[T]:
    """Yield the jobs' results in order. Threads run the next jobs while the caller uses a result."""
    pending: deque[tuple[Future[T], int]] = deque()
    size = 0
    pool = ThreadPoolExecutor(threads)
    try:
        for job in jobs:
            while pending and size + job.bytes > AHEAD_BYTES:
                future, count = pending.popleft()
                size -= count
                yield future.result()
            pending.append((pool.submit(job.run), job.bytes))
            size += job.bytes
        while pending:
            yield pending.popleft()[0].result()
    finally:
        pool.shutdown(cancel_futures=True)


class Hashers:
    """Computes SHA-256 of tensors, several at once. A context manager.

    Args:
        threads: The number of threads, at most MAX_HASHERS. Each hashes every n-th tensor.
    """

    def __init__(self, threads: int) -> None:
        self._pools = [ThreadPoolExecutor(1) for _ in range(min(threads, MAX_HASHERS))]
        self._next = 0
        self._pending: deque[tuple[Future[None], int]] = deque()
        self._size = 0

    def __enter__(self) -> Hashers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)

    def start(self) -> Hash:
        """Begin the hash of the next tensor."""
        self._next += 1
        return Hash(self, self._pools[self._next % len(self._pools)])

    def wait_for(self, future: Future[None], size: int) -> None:
        """Count bytes that a thread will hash, and wait until few enough are left."""
        self._pending.append((future, size))
        self._size += size
        while self._pending and (self._size > AHEAD_BYTES or self._pending[0][0].done()):
            done, count = self._pending.popleft()
            self._size -= count
            done.result()


class Hash:
    """The SHA-256 of one tensor."""

    def __init__(self, owner: Hashers, pool: ThreadPoolExecutor) -> None:
        self._owner = owner
        self._pool = pool
        self._digest = hashlib.sha256()

    def add(self, data: bytes | memoryview) -> None:
        """Hash more data, later. The caller must not change it."""
        self._owner.wait_for(self._pool.submit(self._digest.update, data), len(data))

    def finish(self) -> Future[bytes]:
        """The digest of all data that was added."""
        return self._pool.submit(self._digest.digest)
