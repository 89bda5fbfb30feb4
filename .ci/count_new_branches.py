"""A plugin of pytest for .ci/package: stops counting branches in a parametrized test whose cases take no new ones.

Counting can double the time of a test. The threads and processes that a test starts count in all cases.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator

import coverage
import pytest

MOST = 8  # cases in turn without a new branch
without: Counter[str] = Counter()  # such cases of each test, the last ones in turn


def n_branches() -> int:
    """How many branches this process has taken so far, for which coverage has no public function."""
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
