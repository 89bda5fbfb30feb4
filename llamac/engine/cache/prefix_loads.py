"""What is read from the disk for requests that wait: beside the engine's thread, which computes others meanwhile."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, wait
from typing import TYPE_CHECKING

from llamac.engine.cache.prefix_cache import MIN_TOKENS
from llamac.engine.rows import common_prefix

if TYPE_CHECKING:
    from llamac.engine.batching.request import Request
    from llamac.engine.cache.prefix_cache import PrefixCache
    from llamac.engine.cache.prefix_store import Loaded, Loading

WAIT_S = 0.02  # that a step without running requests waits for the disk


class PrefixLoads:
    """The reads for waiting requests. Only the engine's thread uses it.

    A request is looked up once, when it could start but for the read.
    """

    def __init__(self, cache: PrefixCache | None) -> None:
        self._cache = cache
        self._reads: dict[Request, Loading | None] = {}  # None: there is nothing to read

    def is_loading(self, request: Request, free: int) -> bool:
        """Whether a prefix of a request is being read, or will be.

        Args:
            request: The request.
            free: Sequences without a request. No more prefixes are read at a time, because they take memory; one is
                also read for a request that waits for a sequence.
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
        """Whether a prefix of this request is read for another one, with whose pages it can then begin."""
        reads = [other for other, read in self._reads.items() if read is not None]
        return any(common_prefix(request._ids, other._output.prompt) >= MIN_TOKENS for other in reads)

    def _is_busy(self) -> bool:
        return any(read is not None and not read.done() for read in self._reads.values())

    def take(self, request: Request) -> Loaded | None:
        """What was read for a request that starts."""
        read = self._reads.pop(request, None)
        return None if read is None or not read.done() else read.result()

    def wait(self) -> None:
        """Wait for a read, for a short time."""
        if self._is_busy():
            wait([read for read in self._reads.values() if read is not None], WAIT_S, FIRST_COMPLETED)

    def forget(self) -> bool:
        """Free the memory of what was read. Returns whether there was anything."""
        found = [request for request, read in self._reads.items() if read is not None]
        for request in found:
            self._reads[request] = None
        return bool(found)

    def drop(self, request: Request) -> None:
        """A request has ended."""
        self._reads.pop(request, None)

    def clear(self) -> None:
        """Forget all requests."""
        self._reads.clear()
