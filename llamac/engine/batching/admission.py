"""Admission of an engine's requests: which of them have a sequence, and which wait for sequences and memory.

Only the engine's thread uses it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from llamac.engine.batching import scheduler
from llamac.engine.batching.request import Request
from llamac.engine.batching.request_prefixes import RequestPrefixes
from llamac.engine.cache.prefix_cache import PrefixCache
from llamac.engine.session import Session
from llamac.engine.speculation.draft_plan import pass_bytes


class Admission:
    """The requests of an engine, and the sequences and pages of the KV cache that they compete for.

    Attributes:
        waiting: Requests without a sequence.
        running: Requests with a sequence.
        preemptions: Number of pauses of running requests.
        prefixes: The prefixes that requests share.
    """

    def __init__(self, session: Session, n_sequences: int, cache: PrefixCache | None) -> None:
        """Create an admission without requests.

        Args:
            session: The session that computes the requests.
            n_sequences: The number of sequences of the session.
            cache: The prefix cache, or None.
        """
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.preemptions = 0
        self.prefixes = RequestPrefixes(session, cache)
        self._session = session
        self._model = session.model
        self._page_positions, self._page_bytes = session._core.page_size()
        self._free_sequences = list(reversed(range(n_sequences)))
        # `_committed` when no waiting request could start. Reset to None when a request ends, pauses, arrives or ages.
        self._full_at: int | None = None

    def add(self, requests: Sequence[Request]) -> None:
        """Add new requests."""
        self.waiting += requests
        self._full_at = None

    def age(self, now: float) -> None:
        """Raise requests that have waited for long (`scheduler.age`)."""
        if scheduler.age(self.waiting, self.running, now):
            self._full_at = None

    # ---- starting

    def admit(self) -> None:
        """Assign sequences to waiting requests, in the order of their ranks.

        A request that cannot start blocks the requests behind it from free sequences and pages. They can still displace
        running requests. Each step tries again unless nothing has changed, so a sequence or a page that the first
        request can use is idle for one step at most.
        """
        if self._full_at is not None and self._committed() >= self._full_at:
            return
        is_first = is_settled = True
        for request in sorted(self.waiting, key=lambda request: request._rank):
            if not is_first and self._displaceable(request) is None:
                continue
            if request._sequence is not None:
                continue  # already started with another member of its unit
            if self.prefixes.delay(request, self.running, len(self._free_sequences)):
                is_settled = False
                continue
            has_started = is_first and self._start_all(unit(request))
            while not has_started and (last := self._displaceable(request)) is not None:
                self._pause(last)
                is_settled = False  # the first request gets any sequences and pages that are left over
                has_started = self._start_all(unit(request))
            is_first = is_first and has_started
        self._full_at = None if is_first or not is_settled else self._committed()

    def _displaceable(self, request: Request) -> Request | None:
        """Return the running request that a waiting one may displace: its level is below the other's own priority.

        Levels gained by waiting thus protect a running request but never displace one.
        """
        last = max(self.running, key=lambda other: other._rank, default=None)
        return last if last is not None and last._level < request._priority else None

    def _start_all(self, requests: list[Request]) -> bool:
        """Start all requests or none. Returns whether there were enough sequences and memory."""
        if len(self._free_sequences) < len(requests):
            return False
        for i, request in enumerate(requests):
            if not self._start(request):
                for started in requests[:i]:
                    self._requeue(started)
                return False
        return True

    def _start(self, request: Request) -> bool:
        """Start a request on a free sequence with its longest known prefix. Returns whether there was memory."""
        sequence = self._free_sequences[-1]
        restored = self.prefixes.restore(request, sequence, self.running)
        request._sequence, request._computed = sequence, restored
        self._free_sequences.pop()
        others = (r for r in self.running if r._beams is None or r._beams is not request._beams)
        if any(others) and not self._make_room(request):
            self._release(request)
            return False
        if request._admitted is None:
            request._admitted = time.monotonic()
            request._output.cached = restored
        self.waiting.remove(request)
        self.running.append(request)
        return True

    # ---- memory

    def _committed(self) -> int:
        """Return the bytes of the pages in use and of the pages that the running requests need soon."""
        missing = sum(request._missing_pages(self._page_positions) for request in self.running)
        return self._model.kv_bytes + missing * self._page_bytes

    def _make_room(self, request: Request) -> bool:
        """Evict prefixes until the pages that the running requests and this one need soon fit the budget.

        A request that continues a restored state in the middle of a page needs a copy of that page.
        """
        budget = self._model.kv_budget
        if budget is None:
            return True
        needed = request._missing_pages(self._page_positions) * self._page_bytes
        while self._committed() + needed > budget:
            if not self.prefixes.evict():
                return False
        return True

    def has_room_for_drafts(self, n_requests: int) -> bool:
        """Return whether the budget has pages for the drafts of `n` requests."""
        budget = self._model.kv_budget
        if budget is None:
            return True
        pages = 2 * (n_requests + 1) * self._page_bytes
        return self._model.kv_bytes + pages + pass_bytes(self._session._core, n_requests) <= budget

    def free_memory(self) -> Request | None:
        """After a step without free pages, evict a prefix, or else pause the request that ranks last.

        Returns:
            That request if no other runs: it has all the memory that there is, and cannot continue.
        """
        if self.prefixes.evict():
            return None
        last = max(self.running, key=lambda request: request._rank)
        if len(self.running) == len(unit(last)):
            return last
        self._pause(last)
        # The request waits until the others need less: a device can have less memory than the budget allows.
        self._full_at = self._committed()
        return None

    # ---- pausing and leaving

    def _pause(self, request: Request) -> None:
        """Preempt a request: free its sequence and memory. It resumes later with the same tokens."""
        self.preemptions += 1
        for member in unit(request):
            self._requeue(member)
        if request._beams is not None:
            request._beams._resume()

    def _requeue(self, request: Request) -> None:
        """Move a running request back to the waiting ones, without its sequence."""
        self._release(request)
        self.running.remove(request)
        self.waiting.append(request)

    def requeue_all(self) -> None:
        """Move all running requests back to the waiting ones, and free all sequences. They resume by recomputing."""
        for request in list(self.running):
            self._requeue(request)
            if request._beams is not None:
                request._beams._resume()
        for sequence in self._free_sequences:  # clears the state of a request whose start failed
            self._session._core.truncate(0, sequence)

    def remove(self, request: Request) -> None:
        """Free all that a request has, and forget it. Removing it twice is fine."""
        self._release(request)
        self.prefixes.drop(request)
        for requests in (self.running, self.waiting):
            if request in requests:
                requests.remove(request)

    def _release(self, request: Request) -> None:
        """Free the sequence of a request, if it has one."""
        if request._sequence is not None:
            self._full_at = None
            self._session._core.truncate(0, request._sequence)
            self._free_sequences.append(request._sequence)
            request._sequence, request._computed, request._dropped, request._deferred_logits = None, 0, 0, None


def unit(request: Request) -> list[Request]:
    """Return the requests that start and pause together with this one: the beams of its search."""
    return [request] if request._beams is None else request._beams._members
