"""The order of an engine's requests, and how many rows each computes in the next step. No computation, no threads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

MAX_ROWS = 256  # of a step: the core computes them as one chunk
ROWS_BESIDE = 64  # rows of prompts beside running streams: they read the weights anyway, and wait no longer than this
LEVEL_S = 10.0  # of waiting that raise a request by one level


class Schedulable(Protocol):
    """What the scheduler knows about a request."""

    @property
    def _ready(self) -> int: ...

    @property
    def _rank(self) -> tuple[float, float, int]: ...


class Ranked(Protocol):
    """What ageing knows about a request.

    Attributes:
        _level: Its priority, and the levels that it gained by waiting.
        _waiting_since: When the wait for its next level began.
    """

    _level: int
    _waiting_since: float


Scheduled = TypeVar("Scheduled", bound=Schedulable)


@dataclass(frozen=True)
class Limits:
    """Limits of a step.

    Attributes:
        rows: Most rows of a step.
        rows_beside: Most rows of prompts while other requests generate.
    """

    rows: int = MAX_ROWS
    rows_beside: int = ROWS_BESIDE


def age(waiting: Iterable[Ranked], running: Iterable[Ranked], now: float) -> bool:
    """Raise each waiting request by one level for every `LEVEL_S` seconds that it waits.

    A request that runs keeps its levels and gains none. So one of a priority that is lower by d comes after those that
    arrive within d * `LEVEL_S` seconds of waiting, and before all later ones, however many they are.

    Args:
        waiting: Requests without a sequence.
        running: Requests with one.
        now: The time, in seconds of a clock that never goes back.

    Returns:
        Whether a request rose.
    """
    has_risen = False
    for request in waiting:
        levels = int((now - request._waiting_since) // LEVEL_S)
        request._level += levels
        request._waiting_since += levels * LEVEL_S
        has_risen = has_risen or levels > 0
    for request in running:
        request._waiting_since = now
    return has_risen


def share_rows(requests: Iterable[Scheduled], limits: Limits) -> list[tuple[Scheduled, int]]:
    """Divide the rows of a step among the running requests.

    Each request that generates computes one row. What is left is shared among those with a prompt to compute: equal
    parts, so that a short prompt does not wait for a long one, then the rest in the order of their ranks.

    Args:
        requests: Running requests, each with at least one id that is ready, not more than `limits.rows`.
        limits: The limits.

    Returns:
        Requests with their number of rows, those that generate first.
    """
    ordered = sorted(requests, key=lambda request: request._rank)
    generating = [request for request in ordered if request._ready == 1]
    prompts = [request for request in ordered if request._ready > 1]
    left = limits.rows - len(generating)
    if generating:
        left = min(left, limits.rows_beside)
    rows = {id(request): 0 for request in prompts}
    while left > 0 and (open_prompts := [r for r in prompts if rows[id(r)] < r._ready]):
        part = max(1, left // len(open_prompts))
        for request in open_prompts:
            taken = min(part, left, request._ready - rows[id(request)])
            rows[id(request)] += taken
            left -= taken
    shares = [(request, 1) for request in generating]
    shares += [(request, rows[id(request)]) for request in prompts if rows[id(request)]]
    return shares
