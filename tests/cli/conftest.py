"""Fixtures of the tests of commands."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from terminals import Person


@pytest.fixture
def people() -> Iterator[list[Person]]:
    """A list for people at terminals. The processes of those in it are killed if they outlive the test."""
    present: list[Person] = []
    yield present
    for person in present:
        if person.process.poll() is None:
            person.process.kill()
            person.process.wait()
