"""Fault injection: allocations of the core that fail, one after another, in a scenario that is run for each."""

from __future__ import annotations

from llamac import _core


def numbers_of(count: int, most: int) -> list[int]:
    """The numbers, from 1, of the allocations to fail among `count`: at most `most`, spread evenly; 0: all."""
    if not most or most >= count:
        return list(range(1, count + 1))
    return [1 + i * (count - 1) // (most - 1) for i in range(most)]


class Failing:
    """A block in which the allocation with this number fails, in any thread. Negative: all later ones also fail.

    Attributes:
        count: How many allocations there were, once the block has ended.
    """

    def __init__(self, number: int) -> None:
        self.count = 0
        self._number = number

    def __enter__(self) -> Failing:
        _core.fail_allocation(self._number)
        return self

    def __exit__(self, *error: object) -> None:
        self.count = _core.fail_allocation(0)
