"""A plugin of pytest that writes the ids of the tests that were skipped, a line each, to the file $SKIPPED_TESTS.

.ci/package installs what they lack, then runs exactly these tests. A test can run pytest itself, which inherits the
options: only the first process writes.
"""

from __future__ import annotations

import os

import pytest

WRITER = "SKIPPED_TESTS_WRITER"  # in the environment: the process that writes


def pytest_configure(config: pytest.Config) -> None:
    # a worker of pytest-xdist sends its reports to the process that began it
    if not hasattr(config, "workerinput") and WRITER not in os.environ:
        os.environ[WRITER] = str(os.getpid())
        open(os.environ["SKIPPED_TESTS"], "w").close()
        config.pluginmanager.register(Notes())


class Notes:
    """Writes ids as reports come."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.note(report)

    def note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """A skipped module counts as one test, and so does a test that is skipped or fails as expected."""
        if report.skipped and not hasattr(report, "wasxfail"):
            with open(os.environ["SKIPPED_TESTS"], "a") as file:
                print(report.nodeid, file=file)
