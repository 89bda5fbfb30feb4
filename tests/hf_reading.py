"""Hugging Face directories and configs that the importer reads without a warning."""

from __future__ import annotations

import json
from pathlib import Path

from golden.tiny_checkpoints import Config
from llamac.export.checkpoint import Checkpoint
from llamac.export.hf import config as hf_config
from llamac.export.hf import model as hf
from llamac.export.hf.parsed_config import HfConfig


def read(folder: Path) -> Checkpoint:
    """The checkpoint of a directory. Reading it must not warn."""
    warnings: list[str] = []
    checkpoint = hf.read(folder, warnings)
    assert warnings == []
    return checkpoint


def parse(config: Config) -> HfConfig:
    """A parsed config. Parsing it must not warn."""
    warnings: list[str] = []
    parsed = hf_config.parse_config(json.loads(json.dumps(config)), warnings)
    assert warnings == []
    return parsed
