"""Scheduling of an engine's requests: aging, and the rows of each request in a step.

It does not depend on models or threads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

MAX_ROWS = 256  # rows of a step: the core computes them as one chunk
ROWS_BESIDE = 64  # rows of prompts in a step with generating requests, which bounds the delay of their next tokens
LEVEL_S = 10.0  # seconds of waiting that raise a request by one level


class Schedulable(Protocol):
    """A request, as `share_rows` sees it."""

    @property
    def _ready(self) -> int: ...

    @property
    def _rank(self) -> tuple[float, float, int]: ...


class Ranked(Protocol):
    """A request, as `age` sees it.

    Attributes:
        _level: Its priority plus the levels gained by waiting.
        _waiting_since: When the wait for its next level began.
    """

    _level: int
    _waiting_since: float


Scheduled = TypeVar("Scheduled", bound=Schedulable)


@dataclass(frozen=True)
class Limits:
    """Limits of a step.

    Attributes:
        rows: Maximum rows of a step.
        rows_beside: Maximum rows of prompts while other requests generate.
    """

    rows: int = MAX_ROWS
    rows_beside: int = ROWS_BESIDE


def age(waiting: Iterable[Ranked], running: Iterable[Ranked], now: float) -> bool:
    """Raise each waiting request by one level for every `LEVEL_S` seconds that it waits.

    A running request keeps its levels and gains none. A request whose priority is lower by d therefore ranks after
    requests that arrive within d * `LEVEL_S` seconds, and before all later ones, however many there are.

    Args:
        waiting: Requests without a sequence.
        running: Requests with a sequence.
        now: The time, in seconds of a monotonic clock.

    Returns:
        Whether any request was raised.
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

    Each generating request computes one row. The remaining rows go to requests with a prompt to compute: first in equal
    parts, so that a short prompt does not wait for a long one, then the remainder in the order of their ranks.

    Args:
        requests: At most `limits.rows` running requests, each with at least one id to compute.
        limits: The limits.

    Returns:
        Requests with their number of rows; generating requests come first.
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
