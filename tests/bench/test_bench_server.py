"""The tools in bench/ that measure the server: what they count."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "bench").is_dir():
    pytest.skip("bench/ is missing: not a checkout", allow_module_level=True)
sys.path.append(str(ROOT))  # at the end, so that `llamac` is still the installed package


def bench(name: str) -> Any:
    """Import a module of bench/."""
    return importlib.import_module(f"bench.{name}")


# ---- the start


def test_a_start_is_measured_to_its_first_answer() -> None:
    found = bench("serve_start").start(sys.executable, [])
    assert 0 < found["accepts"] <= found["ready"] < found["answered"]
    assert found["cpu"] > 0


def test_a_server_that_does_not_start_ends_the_measurement() -> None:
    with pytest.raises(SystemExit, match=r"it does not start: .*missing\.bin"):
        bench("serve_start").start(sys.executable, ["missing.bin"])
