"""A request to an engine that combines the requests of several candidates."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from llamac.engine.batching.request import Request
from llamac.engine.generation.candidates import STREAMS_ONE, combined
from llamac.engine.generation.output import Completion
from llamac.engine.sampling.params import ResolvedParams
from llamac.errors import ArgumentError


class CandidatesRequest(Request):
    """A request to an engine for several candidates. Each of `candidates` is a separate request."""

    def __init__(self, members: Sequence[Request], params: ResolvedParams) -> None:
        """Combine requests that have not been queued yet.

        Args:
            members: A request for each candidate.
            params: The parameters of the combined request.
        """
        first = members[0]
        super().__init__(first._engine, first._output, first._priority, None, first._order)
        self._params = params
        self._members = list(members)
        for member in members:
            member._join(self)

    @property
    def candidates(self) -> list[Request]:
        """A request for each candidate, in the order of their numbers: iterate them for pieces of text."""
        return list(self._members)

    @property
    def done(self) -> bool:
        """Whether all candidates have ended."""
        return all(member.done for member in self._members)

    def cancel(self) -> None:
        """End all candidates within a step, and keep the generated text."""
        for member in self._members:
            member.cancel()

    def __next__(self) -> str:
        raise ArgumentError(STREAMS_ONE.format(len(self._members)))

    async def __aiter__(self) -> AsyncIterator[str]:
        raise ArgumentError(STREAMS_ONE.format(len(self._members)))
        yield  # makes this function a generator

    def __repr__(self) -> str:
        return f"<llamac.Request: {len(self._members)} candidates, {'ended' if self.done else 'not ended'}>"

    def _result(self) -> Completion:
        for member in self._members:
            if member._failure is not None:
                raise member._failure
        if self._completion is None:
            self._completion = combined([member._result() for member in self._members], self._params)
        return self._completion
