"""The tools in bench/ that load an engine: random requests, a trace, the cost of steps."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import llamac

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "bench").is_dir():
    pytest.skip("bench/ is missing: not a checkout", allow_module_level=True)
sys.path.append(str(ROOT))  # at the end, so that `llamac` is still the installed package


def bench(name: str) -> Any:
    """Import a module of bench/."""
    return importlib.import_module(f"bench.{name}")


def test_a_short_soak_leaves_nothing(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["soak", "--minutes", "0.005", "--model", str(tiny_llama)])
    assert bench("soak").main() == 0


def test_prompts_of_a_trace_share_its_prefixes(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mooncake = bench("mooncake")
    trace = [
        {"timestamp": i, "input_length": 512 * len(blocks) - 100, "output_length": 64, "hash_ids": blocks}
        for i, blocks in enumerate([[0, 1, 2], [0, 1, 3], [0, 4]])
    ]
    prompts = mooncake.prompts_of(trace, 16, 200, 500)
    assert [len(prompt) for prompt in prompts] == [89, 89, 57]
    assert prompts[0][:64] == prompts[1][:64]
    assert prompts[0][64:] != prompts[1][64:]
    assert mooncake.reachable(prompts, 32) == (64 + 32) / 235
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, trace)))
    monkeypatch.setattr(sys, "argv", ["mooncake", str(path), "--model", str(tiny_llama), "--shrink", "16"])
    mooncake.main()
    shown = dict(word.split("=") for word in capsys.readouterr().out.split() if "=" in word)
    assert float(shown["cached_share"]) >= round(64 / 235, 4)  # as many digits are printed


def test_steps_are_divided_into_passes_draws_and_scheduling() -> None:
    with llamac.load("stories") as model:
        found = bench("engine_steps").measure(model, 2, 6, {"temperature": 0})
    assert found["pass_ms"] > 0
    assert 0 < found["draws_ms"] < found["pass_ms"]
    assert found["rest_ms"] > 0
