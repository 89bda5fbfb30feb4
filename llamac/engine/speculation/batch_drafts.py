"""Drafts in an engine: plans the number of drafts of each request while few requests run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamac.engine.speculation.draft_model import DraftModel, open_drafting
from llamac.engine.speculation.draft_plan import MAX_DRAFTS, Credit, RowCosts, choose
from llamac.engine.speculation.drafter import Drafter
from llamac.engine.speculation.lookup import Lookup
from llamac.errors import CancelledError, DeviceError, LlamacError

if TYPE_CHECKING:
    from llamac.engine.batching.request import Request
    from llamac.engine.generation.output import Output
    from llamac.engine.session import Session
    from llamac.engine.speculation.states import States

MAX_REQUESTS = 4  # with more running requests, their own rows fill a pass
MAX_READ = 64  # prompt tokens that a draft model computes before each step, while other requests wait


class RequestDrafts:
    """The state of a request's drafts: an index of its text, and the cost and gain of drafts so far.

    Attributes:
        lookup: The index of the text.
        credit: The budget.
        draft_cost: The cost of the drafter's passes for the last drafts, in passes without this request's drafts.
        model: What made the last drafts, or None.
    """

    def __init__(self, output: Output) -> None:
        self.lookup = Lookup(output.prompt)
        self.credit = Credit()
        self.draft_cost = 0.0
        self.model: Drafter | None = None
        self._output = output
        self._settled = 0  # number of tokens that the budget accounts for

    def follow(self) -> None:
        """Add the tokens that have been generated since the last call."""
        tokens = self._output.tokens
        for i in range(len(self.lookup.ids) - len(self._output.prompt), len(tokens)):
            self.lookup.push(tokens[i])
            if i >= self._settled:
                self.credit.skip(self.lookup.was_right)
        self._settled = len(tokens)

    def settle(self, cost: float, n_drafts: int, n_accepted: int, requests: int) -> None:
        """Record a pass with drafts for this request.

        Args:
            cost: The cost of the pass, in passes without this request's drafts.
            n_drafts: Number of drafts of this request.
            n_accepted: Number of accepted drafts.
            requests: Number of requests in the pass.
        """
        self.credit.settle(cost + self.draft_cost, 1 + n_accepted / requests)
        self._settled = len(self._output.tokens)
        if self.model is not None:
            self.model.learn(n_accepted, n_drafts)


class Drafters:
    """What drafts in an engine: a draft model, or the session's head. A sequence for each of a few requests."""

    def __init__(self, session: Session, n: int) -> None:
        """Prepare for a session's draft model or head, if it has one. Sessions are opened on first use.

        Args:
            session: The engine's session.
            n: Maximum number of requests with drafts at a time.
        """
        self._session = session
        self._draft_model = session._draft_model
        self._n = n
        self._drafting: Session | None = None
        self._free: list[Drafter] = []
        self._used: dict[Request, Drafter] = {}

    @property
    def enabled(self) -> bool:
        """Whether there is a draft model or a head."""
        return self._draft_model is not None or self._session._head is not None

    @property
    def are_of_head(self) -> bool:
        """Whether drafts come from the session's head, which computes on the session's device."""
        return self._draft_model is None

    def drafter_for(self, request: Request, running: Sequence[Request]) -> Drafter | None:
        """Return what drafts for one of the running requests, at most as many as this has sequences; None: nothing."""
        if not self.enabled:
            return None
        if not self._free and not self._used and not self._open():
            return None
        if request not in self._used:
            for ended in [other for other in self._used if other not in running]:
                self._free.append(self._used.pop(ended))
            self._used[request] = drafter = self._free.pop()
            drafter.follow(request._output.prompt)
        self._used[request].place = request._running_sequence
        return self._used[request]

    def _open(self) -> bool:
        """Make the drafters. Returns whether that was possible."""
        model, head = self._session.model, self._session._head
        if self._draft_model is None and head is not None:
            self._free = [head.drafter(sequence) for sequence in range(self._n)]
        elif self._draft_model is not None:
            try:
                self._drafting = open_drafting(self._draft_model, self._session, self._n)
            except LlamacError:  # the draft model is closed, or there is no memory
                self.disable()
                return False
            self._free = [DraftModel(self._drafting, model.n_token_ids, sequence) for sequence in range(self._n)]
        return True

    def states(self, requests: Sequence[Request], rows: int) -> States | None:
        """Return what receives the hidden states of a pass over requests, if a drafter reads them."""
        if self._draft_model is not None or len(requests) > self._n or not any(map(_may_draft, requests)):
            return None
        drafter = self.drafter_for(requests[0], requests) if self.enabled else None
        return None if drafter is None else drafter.states(rows)

    def keep(self, request: Request, running: Sequence[Request], states: States | None, first: int, n: int) -> None:
        """Note the hidden states of a request's next n tokens, before they count as computed."""
        drafter = self.drafter_for(request, running) if states is not None else None
        if drafter is not None:
            drafter.keep(request._computed, states, first, n)

    def disable(self) -> None:
        """Stop using the draft model or the head."""
        self._draft_model = None
        if self._session._head is not None:
            self._session._head.close()
            self._session._head = None
        self.close()

    def close(self) -> None:
        """Free the session."""
        self._used, self._free = {}, []
        if self._drafting is not None:
            self._drafting.close()
            self._drafting = None


def _may_draft(request: Request) -> bool:
    """Whether a request can have drafts."""
    params = request._output.params
    return params.speculation and params.guide is None


def plan_drafts(
    requests: Sequence[Request], costs: RowCosts, max_drafts: int, drafters: Drafters
) -> dict[Request, list[int]]:
    """Plan the drafts of each request in the next pass.

    Args:
        requests: All running requests. Each computes one row.
        costs: The measured cost of rows.
        max_drafts: Maximum number of drafts of the pass.
        drafters: What drafts with a model.

    Returns:
        The drafts of each request; empty if there are no drafts at all.

    Raises:
        CancelledError: If the draft model's pass was cancelled.
    """
    if not 0 < len(requests) <= MAX_REQUESTS or not costs.is_known or costs.is_tiny:
        return {}
    found: dict[Request, list[int]] = {}
    rows = len(requests)
    for request in requests:
        found[request] = []
        output = request._output
        if not _may_draft(request):
            continue
        drafts = request._drafts = request._drafts or RequestDrafts(output)
        drafts.follow()
        drafts.draft_cost, drafts.model = 0.0, None
        room = output.context - request._position - 1
        limit = min(max_drafts, output.left - 1, room, MAX_DRAFTS + 1 - rows)
        model = drafters.drafter_for(request, requests)
        if limit < 1 or not (drafts.lookup.length or model):
            continue
        relative = costs.relative
        here = [0.0, *(cost / relative[rows] for cost in relative[rows:])]
        step = costs.step * relative[rows]
        chosen = choose(drafts.lookup, model, here, step, drafts.credit.left, limit, len(requests))
        if chosen.from_model and model is not None:
            drafts.draft_cost, drafts.model = chosen.draft_cost, model
            found[request] = _drafts_of(drafters, model, drafts.lookup, chosen.n, output)
        elif chosen.n:
            found[request] = drafts.lookup.draft(chosen.n)
        if model is not None and drafts.model is None:
            model.skip()
        rows, max_drafts = rows + len(found[request]), max_drafts - len(found[request])
    return found if any(found.values()) else {}


def _drafts_of(drafters: Drafters, model: Drafter, lookup: Lookup, n: int, output: Output) -> list[int]:
    """Return drafts of a model, none while a draft model is still computing the prompt."""
    try:
        return model.draft(lookup.ids, n, output.sampler) if model.catch_up(lookup.ids[:-1], MAX_READ) else []
    except CancelledError:
        raise
    except LlamacError as error:  # no memory, or the draft model has been closed: continue without drafts
        if isinstance(error, DeviceError) and error.lost and drafters.are_of_head:
            raise  # the engine's own session is on this device
        drafters.disable()
        return []
