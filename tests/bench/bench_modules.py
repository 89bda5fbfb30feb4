"""Imports the tools of bench/, which are not installed. Outside a checkout, it skips the tests that need them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "bench").is_dir():
    pytest.skip("bench/ is missing: not a checkout", allow_module_level=True)
sys.path.append(str(ROOT))  # at the end, so that `llamac` is still the installed package


def bench(name: str) -> Any:
    """Import a module of bench/."""
    return importlib.import_module(f"bench.{name}")
