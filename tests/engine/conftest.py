"""Fixtures for the engine's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import llamac
from builders import byte_ids, script_checkpoint, write_model

Script = Callable[..., llamac.Model]


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Script]:
    """Make models that generate the tokens of a script, one per position from position 0 on, greedily by default."""
    made: list[llamac.Model] = []

    def make(script: str | list[int], **options: Any) -> llamac.Model:
        ids = byte_ids(script) if isinstance(script, str) else script
        path = tmp_path / f"script{len(made)}.bin"
        write_model(path, script_checkpoint(ids, **options), generation={"temperature": 0})
        made.append(llamac.load(path))
        return made[-1]

    yield make
    for model in made:
        model.close()
