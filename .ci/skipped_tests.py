"""A plugin of pytest that writes the ids of the tests that were skipped, a line each, to the file $SKIPPED_TESTS.

.ci/package installs what they lack, then runs exactly these tests.
"""

from __future__ import annotations

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    open(os.environ["SKIPPED_TESTS"], "w").close()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    note(report)


def note(report: pytest.TestReport | pytest.CollectReport) -> None:
    """A skipped module counts as one test, and so does a test that is skipped or fails as expected."""
    if report.skipped and not hasattr(report, "wasxfail"):
        with open(os.environ["SKIPPED_TESTS"], "a") as file:
            print(report.nodeid, file=file)
