"""A beam search as a request of an engine. Each of its sequences is a request, and all advance in the same steps."""

from __future__ import annotations

import copy
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from llamac import _core
from llamac.engine.batching.candidates_request import CandidatesRequest
from llamac.engine.batching.request import Request
from llamac.engine.generation.beam_search import BeamSearch
from llamac.engine.generation.output import Completion, FinishReason, Timings
from llamac.engine.sampling.params import ResolvedParams
from llamac.errors import ArgumentError

NO_STREAM = "a beam search has no text before its end: use result(), or await the request"


class BeamRequest(CandidatesRequest):
    """A request for a beam search. It has one member per beam; each member computes one sequence."""

    def __init__(self, members: Sequence[Request], params: ResolvedParams) -> None:
        super().__init__(members, params)
        first = self._members[0]._output
        self._search = BeamSearch(
            first.sampler, first.prompt, self._engine.model.n_token_ids, first.limit, first.stop_in
        )
        self._live = self._members[:1]  # the members that compute sequences of the search, in their order
        self._reason: FinishReason = "cancelled"  # of sequences that are unfinished when the search ends
        for member in self._members:
            member._beams = self
        self._resume()

    @property
    def candidates(self) -> list[Request]:
        """This request alone: no beam is known before the end."""
        return [self]

    def __next__(self) -> str:
        raise ArgumentError(NO_STREAM)

    async def __aiter__(self) -> AsyncIterator[str]:
        raise ArgumentError(NO_STREAM)
        yield  # makes this function a generator

    @property
    def done(self) -> bool:
        """Whether the search has ended."""
        return self._completion is not None or self._failure is not None

    def cancel(self) -> None:
        """End the search now, and keep its best sequences so far."""
        for member in self._members:
            member._cancelled = True
        self._end_early()
        for member in self._members:
            self._engine._interrupt(member)

    def _result(self) -> Completion:
        return Request._result(self)

    def _completed(self) -> Completion:
        """The best sequences so far. Thread-safe: the engine's thread replaces the lists of a search atomically."""
        output, timings = self._members[0]._output, self._timings()
        found = []
        for rank, beam in enumerate(self._search.results(self._reason)[: self._params.n]):
            one = copy.copy(output)
            one.rank = rank
            one.tokens, one.logprobs = list(beam.tokens), list(beam.logprobs)
            one.finish_reason, one.stopped_by = beam.reason, beam.stopped_by
            found.append(replace(one.completion(timings), score=beam.score))
        first, *others = found
        return replace(first, others=tuple(others))

    def _timings(self) -> Timings:
        return self._members[0]._timings()

    # ---- for the engine's thread

    def _resume(self) -> None:
        """Let the members with a sequence compute it."""
        for member in self._members:
            member._is_idle = member not in self._live

    def _advance(self, core: _core.Session) -> None:
        """Choose the sequences to continue from the logits of all members, and distribute them to the members."""
        before = self._live
        logits = [memoryview(member._deferred_logits) for member in before]  # type: ignore[arg-type]
        parents = self._search.advance(logits)
        heirs: dict[int, Request] = {}  # the members that keep their sequence, by its index
        for parent in parents:
            heirs.setdefault(parent, before[parent])
        free = [member for member in self._members if member not in heirs.values()]
        live = []
        for i, parent in enumerate(parents):
            source = before[parent]
            member = source if i == parents.index(parent) else free.pop(0)
            if member is not source:
                core.fork_from(core, source._computed, source._running_sequence, member._running_sequence)
                member._computed = source._computed
            live.append(member)
        self._live = live
        first = self._members[0]
        first._first_token = first._first_token or time.monotonic()
        for member, beam in zip(live, self._search.beams, strict=True):
            member._output.tokens = list(beam.tokens)
        for member in self._members:
            member._deferred_logits = None
        self._resume()
