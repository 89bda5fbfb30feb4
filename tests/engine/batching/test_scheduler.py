"""How the rows of a step are divided among requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llamac.engine.batching.scheduler import Limits, share_rows

LIMITS = Limits(rows=100, rows_beside=20)


@dataclass
class Pending:
    """A request with this many ids to compute."""

    _ready: int
    order: int
    priority: int = 0

    @property
    def _rank(self) -> tuple[float, float, int]:
        return -self.priority, float("inf"), self.order


def shares(*pending: int, priorities: tuple[int, ...] = ()) -> list[tuple[int, int]]:
    """(index of the request, rows) of each share."""
    priorities = priorities or (0,) * len(pending)
    requests = [Pending(n, i, priority) for i, (n, priority) in enumerate(zip(pending, priorities, strict=True))]
    return [(request.order, rows) for request, rows in share_rows(requests, LIMITS)]


def test_requests_that_generate_compute_one_row_each() -> None:
    assert shares(1, 1, 1) == [(0, 1), (1, 1), (2, 1)]


def test_a_prompt_alone_gets_the_whole_step() -> None:
    assert shares(500) == [(0, 100)]
    assert shares(30) == [(0, 30)]
    assert shares() == []


def test_prompts_leave_room_for_running_streams() -> None:
    assert shares(500, 1, 1) == [(1, 1), (2, 1), (0, 20)]


def test_prompts_share_equally_and_short_ones_leave_the_rest() -> None:
    assert shares(500, 500) == [(0, 50), (1, 50)]
    assert shares(500, 10, 500) == [(0, 45), (1, 10), (2, 45)]
    assert shares(500, 500, 500) == [(0, 34), (1, 33), (2, 33)]


def test_the_highest_priority_gets_what_cannot_be_shared() -> None:
    assert shares(500, 500, 500, priorities=(0, 0, 5)) == [(2, 34), (0, 33), (1, 33)]


def test_random_requests_use_all_rows_and_none_twice() -> None:
    rng = np.random.default_rng(1)
    for _ in range(500):
        pending = [int(n) for n in np.where(rng.random(12) < 0.5, 1, rng.integers(2, 60, 12))]
        found = dict(shares(*pending))
        generating = [i for i, n in enumerate(pending) if n == 1]
        assert all(found[i] == 1 for i in generating)
        assert all(0 < rows <= pending[i] for i, rows in found.items())
        limit = 20 if generating else 100
        prompt_rows = sum(rows for i, rows in found.items() if pending[i] > 1)
        assert prompt_rows == min(limit, sum(n for n in pending if n > 1))
