"""The prefixes of an engine's requests: what each restores when it starts, and what it leaves for later requests.

Prefixes come from the prefix cache, from its files, or from a running request. Only the engine's thread uses them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from llamac.engine.batching.request import Request
from llamac.engine.cache.prefix_cache import PrefixCache
from llamac.engine.cache.prefix_loads import PrefixLoads
from llamac.engine.cache.recurrent import can_cut
from llamac.engine.rows import common_prefix, page_floor
from llamac.engine.session import Session


class RequestPrefixes:
    """The prefix cache, if there is one, as the requests of an engine use it."""

    def __init__(self, session: Session, cache: PrefixCache | None) -> None:
        """Create the prefixes of the requests that a session computes."""
        self._session = session
        self._cache = cache
        self._loads = PrefixLoads(cache)
        self._page_positions = session._core.page_size()[0]

    def delay(self, request: Request, running: Iterable[Request], n_free: int) -> bool:
        """Return whether a waiting request should not start yet, because a prefix of it will be there soon.

        Args:
            request: The request.
            running: The requests with a sequence.
            n_free: Number of free sequences.
        """
        return self._is_being_computed(request, running) or self._loads.is_loading(request, n_free)

    def _is_being_computed(self, request: Request, running: Iterable[Request]) -> bool:
        """Return whether a running request will compute a longer prefix of this request than the cache has.

        If such a prefix is already complete, it is added to the cache.
        """
        if request._to_score:
            return False
        if request._group is not None and request._source is None:
            shared = len(request._output.prompt) - 1
            if any(other._group is request._group and other._computed < shared for other in running):
                return True
        if self._cache is None:
            return False
        ids = request._ids
        for other in running:
            shared = page_floor(common_prefix(ids, other._output.prompt), self._page_positions)
            if shared < self._cache.find(ids).shared + self._page_positions:
                continue
            other._marks.add(shared)
            if other._computed < shared:
                return True
            self.keep_marked(other)
        return False

    def restore(self, request: Request, sequence: int, running: Iterable[Request]) -> int:
        """Put the longest known prefix of a request into a free sequence. Returns its length."""
        if request._is_idle or request._to_score:
            return 0
        forked = self._fork_prompt(request, sequence, running)
        if forked or self._cache is None:
            return forked
        match = self._cache.restore(request._ids, self._session._core, sequence, self._loads.take(request))
        request._marks.add(page_floor(len(request._output.prompt), self._page_positions))
        branch = page_floor(match.shared, self._page_positions)
        if branch > match.length:  # no state could be cut there: keep one for the next request
            request._marks.add(branch)
        return match.length

    def _fork_prompt(self, request: Request, sequence: int, running: Iterable[Request]) -> int:
        """Fork the prompt without its last id from another candidate or from the request's source.

        Returns the number of forked positions, 0 if no sequence can be cut there.
        """
        length = len(request._output.prompt) - 1
        if not length:
            return 0
        core = self._session._core
        siblings = (r for r in running if r._group is request._group is not None and not r._dropped)
        sources = [(core, r._running_sequence) for r in siblings]
        sources += [(request._source, 0)] if request._source is not None else []
        for source, index in sources:
            if length <= source.length(index) and can_cut(source, index, length):
                core.fork_from(source, length, index, sequence)
                return length
        return 0

    def keep_marked(self, request: Request) -> None:
        """Add the marked prefixes of a running request that are complete to the prefix cache."""
        if self._cache is None:
            return
        for length in sorted(mark for mark in request._marks if mark <= request._computed):
            request._marks.discard(length)
            is_whole = not request._dropped or length <= request._output.keep
            if is_whole and can_cut(self._session._core, request._running_sequence, length):
                self._cache.keep(request._ids[:length], self._session._core, request._running_sequence)

    def keep_all(self, request: Request) -> None:
        """Add all ids of a request that ends to the prefix cache, if it runs and there is memory."""
        if self._cache is None or request._sequence is None or request._dropped:
            return
        with contextlib.suppress(MemoryError):
            self._cache.keep(request._ids[: request._computed], self._session._core, request._running_sequence)

    def evict(self) -> bool:
        """Free the prefix that matters least. Returns whether there was one."""
        return self._loads.forget() or (self._cache is not None and self._cache.evict())

    def wait(self) -> None:
        """Wait briefly for a prefix that is being read, if there is one."""
        self._loads.wait()

    def drop(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._loads.drop(request)

    def forget_reads(self) -> None:
        """Forget the prefixes that are being read from files."""
        self._loads.clear()

    def clear(self) -> None:
        """Free all prefixes, also those that are being read."""
        self.forget_reads()
        if self._cache is not None:
            self._cache.clear()
