"""How requests rise while they wait, and how the rows of a step are divided among them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llamac.engine.batching.scheduler import LEVEL_S, Limits, age, share_rows

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
    assert shares(500, *[1] * 90)[-1] == (0, 10)  # the rest of the step


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


# ---- aging


@dataclass
class Waiting:
    """A request of a priority that came at a time."""

    _level: int
    _waiting_since: float


def test_waiting_raises_by_a_level_in_every_period() -> None:
    request = Waiting(-2, 100.0)
    for now, level in ((100, -2), (100 + LEVEL_S - 1, -2), (100 + LEVEL_S, -1), (100 + 3.5 * LEVEL_S, 1)):
        before = request._level
        assert age([request], [], now) is (level > before)
        assert request._level == level
    age([request], [], 100 + 4 * LEVEL_S)  # the half period counts
    assert request._level == 2


def test_running_keeps_levels_and_gains_none() -> None:
    request = Waiting(0, 0.0)
    age([request], [], 2 * LEVEL_S)
    for seconds in range(0, 1000, 7):
        age([], [request], 2 * LEVEL_S + seconds)
    assert request._level == 2
    paused = request._waiting_since
    age([request], [], paused + LEVEL_S - 1)
    assert request._level == 2
    age([request], [], paused + LEVEL_S)
    assert request._level == 3


def test_an_endless_stream_of_higher_priorities_does_not_starve_a_request() -> None:
    """One request a second is served, and one of priority 3 arrives in each."""
    low = Waiting(0, 0.0)
    waiting = [Waiting(3, 0.0), low]
    for second in range(1, 1000):
        waiting.append(Waiting(3, float(second)))
        age(waiting, [], second)
        served = min(waiting, key=lambda request: (-request._level, waiting.index(request)))
        waiting.remove(served)
        if served is low:
            break
    assert 3 * LEVEL_S <= second <= 3 * LEVEL_S + 1
