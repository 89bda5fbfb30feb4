"""Drafts in an engine: which of the running requests get how many, by prompt lookup, while few requests run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamac.engine.draft_plan import MOST_DRAFTS, Credit, RowCosts, best_count
from llamac.engine.lookup import Lookup

if TYPE_CHECKING:
    from llamac.engine.output import Output
    from llamac.engine.request import Request

MOST_REQUESTS = 4  # with more, the other requests' rows fill a pass


class RequestDrafts:
    """What a request's drafts follow: its text, and what drafts have cost and gained.

    Attributes:
        lookup: The text.
        credit: The budget.
        cost: Of the last pass, in passes without this request's drafts.
    """

    def __init__(self, output: Output) -> None:
        self.lookup = Lookup(output.prompt)
        self.credit = Credit()
        self.cost = 1.0
        self._output = output

    def follow(self) -> None:
        """Add the tokens that have been generated since the last call."""
        for token in self._output.tokens[len(self.lookup.ids) - len(self._output.prompt) :]:
            self.lookup.push(token)


def plan_drafts(requests: Sequence[Request], costs: RowCosts, most: int) -> dict[Request, list[int]]:
    """The drafts of each request in the next pass.

    Args:
        requests: All running requests. Each computes one row.
        costs: The measured cost of rows.
        most: Most drafts of the pass.

    Returns:
        The drafts, for each request; empty if nothing is drafted at all.
    """
    if not 0 < len(requests) <= MOST_REQUESTS or not costs.is_known or costs.is_tiny:
        return {}
    found: dict[Request, list[int]] = {}
    rows = len(requests)
    for request in requests:
        found[request] = []
        output = request._output
        if not output.params.speculation or output.params.guide is not None:
            continue
        drafts = request._drafts = request._drafts or RequestDrafts(output)
        drafts.follow()
        drafts.cost = 1.0
        room = output.context - request._position - 1
        limit = min(most, output.left - 1, room, MOST_DRAFTS + 1 - rows)
        if not drafts.lookup.length or limit < 1:
            continue
        relative = costs.relative
        here = [0.0, *(cost / relative[rows] for cost in relative[rows:])]
        n, _ = best_count(drafts.lookup.rate, here, drafts.credit.left, limit, len(requests))
        if n:
            found[request] = drafts.lookup.draft(n)
            drafts.cost = here[1 + n]
            rows, most = rows + n, most - n
    return found if any(found.values()) else {}
