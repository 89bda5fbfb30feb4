"""A plugin of pytest for the suites: marks the exceptions, and writes down what passed.

An exception is strict: a test that passes although it has one fails, and so does a suite without a test for a pattern.
LLAMAC_SUITE names the suite, and LLAMAC_RESULT the file to write.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from exceptions import EXCEPTIONS

SUITE = os.environ.get("LLAMAC_SUITE", "")
COUNTS = {"passed": 0, "failed": 0, "skipped": 0}
FOUND: dict[str, int] = {}  # how many tests each exception stands for


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Mark the exceptions.

    Raises:
        pytest.UsageError: If a pattern stands for no test.
    """
    for pattern, reason in EXCEPTIONS.get(SUITE, {}).items():
        matching = [item for item in items if fnmatchcase(item.nodeid, f"*{pattern}")]
        if not matching:
            raise pytest.UsageError(f"tests/clients/exceptions.py: no test of {SUITE} matches {pattern!r}; remove it")
        for item in matching:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any) -> Iterator[None]:
    """Count the outcome of a test."""
    outcome: Any = yield
    report = outcome.get_result()
    if getattr(report, "wasxfail", "") and report.skipped:
        FOUND[report.wasxfail] = FOUND.get(report.wasxfail, 0) + 1
    elif report.skipped:
        COUNTS["skipped"] += 1
    elif report.failed:
        COUNTS["failed"] += 1
    elif report.when == "call":
        COUNTS["passed"] += 1


def pytest_sessionfinish() -> None:
    """Write the counts."""
    if "LLAMAC_RESULT" in os.environ:
        Path(os.environ["LLAMAC_RESULT"]).write_text(json.dumps({**COUNTS, "exceptions": FOUND}), "utf-8")
