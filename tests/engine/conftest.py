"""Fixtures for the engine's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import llamac
from builders import byte_ids, checkpoint, llama_config, script_checkpoint, write_model

Script = Callable[..., llamac.Model]


@pytest.fixture
def model(tiny_llama: Path) -> Iterator[llamac.Model]:
    """A random LLaMA, opened."""
    with llamac.load(tiny_llama) as model:
        yield model


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[llamac.Model]:
    """A model of one layer with full attention and one with a window of 20 positions."""
    config = replace(llama_config(dim=36, n_heads=6, n_kv_heads=2, n_layers=2), context=2000)
    config = replace(config, layers=(config.layers[0], replace(config.layers[1], window=20)))
    path = write_model(tmp_path_factory.mktemp("windowed") / "model.bin", checkpoint(config))
    with llamac.load(path) as model:
        yield model


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
