"""Fixtures of the tests that export the cases of a module's own fixture `folder`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from llamac.export.convert import export


@pytest.fixture(scope="module")
def model_file(folder: Callable[[str], Path]) -> Callable[[str], Path]:
    """The exported file of a case."""

    @functools.cache
    def path(name: str) -> Path:
        target = folder(name).with_suffix(".bin")
        export(folder(name), target, probe_source=None)
        return target

    return path
