"""A plugin of pytest for .ci/package: branches are counted in the first cases of each parametrized test only.

Later cases mostly take the same branches, and counting doubles the time of a test. The threads and processes that a
test starts count in all cases.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator

import pytest

COUNTED = 2  # cases of a test
ran: Counter[str] = Counter()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    test = item.nodeid.partition("[")[0]
    ran[test] += 1
    trace = sys.gettrace()
    if ran[test] > COUNTED:
        sys.settrace(None)
    yield
    sys.settrace(trace)
