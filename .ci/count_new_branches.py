"""Pytest plugin for .ci/package: stops counting the branches of a parametrized test once its cases take no new ones.

Counting can double the time of a test. In the threads and processes that a test starts, it never stops. Counters are
saved when the tests end, and again when the process exits.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator

import coverage
import pytest

MOST = 8  # consecutive cases without a new branch
without: Counter[str] = Counter()  # for each test, how many consecutive cases have just taken no new branch


def n_branches() -> int:
    """Return how many branches this process has taken so far. coverage has no public function for this."""
    current = coverage.Coverage.current()
    collector = None if current is None else current._collector
    return 0 if collector is None else sum(len(branches) for branches in collector.data.values())


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    test = item.nodeid.partition("[")[0]
    trace, before = sys.gettrace(), n_branches()
    if without[test] == MOST:
        sys.settrace(None)
    yield
    sys.settrace(trace)
    if without[test] < MOST:
        without[test] = without[test] + 1 if n_branches() == before else 0


def pytest_sessionfinish() -> None:
    """Save the counters now: pytest-xdist kills a worker that takes more than ten seconds to exit, as Ray can."""
    current = coverage.Coverage.current()
    if current is not None:
        current.save()
