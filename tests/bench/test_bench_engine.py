"""The tools in bench/ that load an engine: random requests, a trace, the cost of steps, what batches gain."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import llamac
from bench_modules import bench


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


def test_shares_of_draws_are_of_the_pass_and_of_the_whole_step() -> None:
    found = bench("engine_steps").figures(80.0, 15.0, 5.0)
    assert (found["draws"], found["rest"], found["draws_of_step"]) == (15 / 80, 5 / 80, 0.15)
    settings = bench("engine_steps").SETTINGS
    assert settings["top-p"] == {"temperature": 0.8, "top_p": 0.95}


def test_decode_speed_counts_steps_that_compute_one_row_for_each_sequence() -> None:
    step, speed = bench("engine").Step, bench("engine").decode_speed
    prompts = [step(2.0, 64, 0), step(10.0, 16, 4)]  # the last step of the prompts also gives tokens
    steps = [*prompts, step(13.0, 4, 3), step(13.5, 4, 4), step(14.0, 4, 4), step(19.0, 2, 2), step(20.0, 4, 4)]
    assert speed(steps, 4) == 12 / 2.0
    with pytest.raises(ValueError, match="no step computed one row for each of 5"):
        speed(steps, 5)


def test_ratios_of_an_engine_are_of_one_round() -> None:
    engine = bench("engine")
    rounds = [
        engine.Round({1: 10.0, 8: 40.0}, 50.0, 2.0, 0.1, 40),
        engine.Round({1: 20.0, 8: 60.0}, 80.0, 4.0, 0.1, 41),
        engine.Round({1: 20.0, 8: 70.0}, 70.0, 1.0, 0.1, 40),
    ]
    found = engine.summary(rounds)
    assert found["decode"][8] == {
        "tok_s": 60.0,
        "ratio": {"median": 3.5, "least": 3.0, "greatest": 4.0},
        "of_prefill": {"median": 0.8, "least": 0.75, "greatest": 1.0},
    }
    assert found["decode"][1]["ratio"] == {"median": 1.0, "least": 1.0, "greatest": 1.0}
    assert found["prefill_tok_s"] == 70.0
    assert found["shared_prefix"] == {
        "first_s": 2.0,
        "second_s": 0.1,
        "ratio": {"median": 0.05, "least": 0.025, "greatest": 0.1},
    }
    assert found["second_turn"] == {"own_tokens": engine.TURN, "computed_tokens": 41}


def test_an_engine_is_measured_and_saved(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench("stamp"), "RESULTS", tmp_path)
    options = ["--sequences", "1,3", "--tokens", "5", "--prompt", "40", "--shared", "200", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["engine", str(tiny_llama), *options, "--result", "tiny"])
    bench("engine").main()
    [path] = tmp_path.iterdir()
    found = json.loads(path.read_text())["engine"]
    assert list(found["decode"]) == ["1", "3"]
    assert all(one["tok_s"] > 0 for one in found["decode"].values())
    assert found["second_turn"] == {"own_tokens": 40, "computed_tokens": 41}  # and the last token of the answer
    assert "second turn    41 tokens computed, 40 of its own" in capsys.readouterr().out


def test_prompts_of_the_benchmark_do_not_begin_alike() -> None:
    prompt = bench("engine").prompt
    assert len({prompt(16, variant)[0] for variant in range(64)}) == 64
