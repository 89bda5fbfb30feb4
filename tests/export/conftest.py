"""Fixtures of several tests of the exporters: the files of a module's cases, and cases with their captures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from captures import numpy_capture
from golden.parity_table import cases, make_folder
from llamac.export.checkpoint import Checkpoint
from llamac.export.convert import export
from llamac.export.hf import model as hf
from llamac.export.parity.capture import Capture


@pytest.fixture(scope="module")
def model_file(folder: Callable[[str], Path]) -> Callable[[str], Path]:
    """The exported file of a case of the module's own fixture `folder`."""

    @functools.cache
    def path(name: str) -> Path:
        target = folder(name).with_suffix(".bin")
        export(folder(name), target, probe_source=None)
        return target

    return path


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Checkpoint, Capture]]:
    """The checkpoint of a case, and the capture of the float64 forward pass."""
    root = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def made(name: str) -> tuple[Checkpoint, Capture]:
        checkpoint = hf.read(make_folder(root, name), [])
        return checkpoint, numpy_capture(checkpoint, cases()[name])

    return made
