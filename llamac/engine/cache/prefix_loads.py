"""Reads prefixes from disk for waiting requests while the engine's thread computes other requests."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, wait
from typing import TYPE_CHECKING

from llamac.engine.cache.prefix_cache import MIN_TOKENS
from llamac.engine.rows import common_prefix

if TYPE_CHECKING:
    from llamac.engine.batching.request import Request
    from llamac.engine.cache.prefix_cache import PrefixCache
    from llamac.engine.cache.prefix_store import Loaded, Loading

WAIT_S = 0.02  # how long a step without running requests waits for the disk


class PrefixLoads:
    """The reads for waiting requests. Only the engine's thread uses it.

    Each request is looked up once, when only the read delays its start.
    """

    def __init__(self, cache: PrefixCache | None) -> None:
        self._cache = cache
        self._reads: dict[Request, Loading | None] = {}  # None: there is nothing to read
        self._abandoned: set[Loading] = set()  # reads whose pages are not yet free

    def is_loading(self, request: Request, free: int) -> bool:
        """Return whether a request has to wait because a prefix of it is being read or will be read.

        Args:
            request: The request.
            free: Number of free sequences. It limits the number of concurrent reads, which take memory; one read is
                always allowed.
        """
        if self._cache is None or request._to_score or request._is_idle or request._source is not None:
            return False
        if request not in self._reads:
            if self._is_read_for_another(request):
                return True
            if sum(read is not None for read in self._reads.values()) >= max(1, free):
                return self._is_busy()
            self._reads[request] = self._cache.begin(request._ids)
        read = self._reads[request]
        return read is not None and not read.done()

    def _is_read_for_another(self, request: Request) -> bool:
        """Return whether a prefix of this request is being read for another request and can then be shared."""
        reads = [other for other, read in self._reads.items() if read is not None]
        return any(common_prefix(request._ids, other._output.prompt) >= MIN_TOKENS for other in reads)

    def _is_busy(self) -> bool:
        return any(read is not None and not read.done() for read in self._reads.values())

    def take(self, request: Request) -> Loaded | None:
        """Return and forget the prefix that was read for a request that starts."""
        read = self._reads.pop(request, None)
        return None if read is None or not read.done() else read.result()

    def wait(self) -> None:
        """Wait briefly for a read."""
        if self._is_busy():
            wait([read for read in self._reads.values() if read is not None], WAIT_S, FIRST_COMPLETED)

    def forget(self) -> bool:
        """Free the prefixes that were read, and wait briefly for reads that go on. Returns whether there were any."""
        abandoned = self._abandoned.copy()
        for request, read in self._reads.items():
            if read is not None:
                abandoned.add(read)
                self._abandon(read)
                self._reads[request] = None
        wait(abandoned, WAIT_S)
        return bool(abandoned)

    def drop(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._abandon(self._reads.pop(request, None))

    def clear(self) -> None:
        """Forget all requests."""
        for read in self._reads.values():
            self._abandon(read)
        self._reads.clear()

    def _abandon(self, read: Loading | None) -> None:
        if read is not None:
            self._abandoned.add(read)
            read.cancel()
            read.add_done_callback(self._free)

    def _free(self, read: Loading) -> None:
        """Free the pages of an abandoned read that has ended. Its own thread does it, as the engine's may be idle."""
        if not read.cancelled() and not read.exception() and (loaded := read.result()):
            loaded.pages.clear()
        self._abandoned.discard(read)
