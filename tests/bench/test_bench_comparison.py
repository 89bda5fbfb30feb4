"""The verdicts of `llamac bench --compare`, on made-up times: what noise hides, what it does not, refused files."""

from __future__ import annotations

import json
import math
import os
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commands import Command
from llamac.engine.inspection import benchmark, comparison
from llamac.engine.inspection.benchmark import summary
from llamac.errors import ArgumentError
from processes import TIMEOUT, UNCOUNTED

# ---- one comparison


@pytest.mark.parametrize(
    ("degrees", "value"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (30, 2.0423)]
)
def test_quantiles_are_those_of_the_tables(degrees: int, value: float) -> None:
    assert comparison.t_quantile(0.95, degrees) == pytest.approx(value, abs=1e-4)
    assert comparison.t_quantile(0.5, 1) == pytest.approx(1)


def test_an_interval_is_that_of_the_definition() -> None:
    first, second = [2.0, 3.0, 2.5], [1.0, 1.2, 1.3]
    gains = [math.log(a / b) for a, b in zip(first, second, strict=True)]
    mean = sum(gains) / 3
    half = 4.30265 * math.sqrt(sum((gain - mean) ** 2 for gain in gains) / 2 / 3)
    found = comparison.compare(first, second)
    assert (found.pairs, found.verdict) == (3, "faster")
    expected = [math.exp(mean + side * half) for side in (-1, 0, 1)]
    assert [found.low, found.ratio, found.high] == pytest.approx(expected)
    turned = comparison.compare(second, first)
    assert turned.verdict == "slower"
    assert turned.ratio == pytest.approx(1 / found.ratio)


def pairs(random_: random.Random, ratio: float, count: int, drift: float, noise: float) -> tuple[list[float], ...]:
    """Alternating times of two programs: the machine drifts, which affects both of a pair, and each run has noise."""
    first, second = [], []
    for _ in range(count):
        machine = math.exp(random_.gauss(0, drift))
        first.append(machine * math.exp(random_.gauss(0, noise)))
        second.append(machine / ratio * math.exp(random_.gauss(0, noise)))
    return first, second


def test_equal_programs_differ_about_as_often_as_the_confidence_says() -> None:
    random_ = random.Random(1)
    verdicts = [comparison.compare(*pairs(random_, 1.0, 5, 0.2, 0.02)).verdict for _ in range(2000)]
    assert 0.03 < sum(verdict != "no difference can be shown" for verdict in verdicts) / 2000 < 0.07


def test_pairs_show_what_the_noise_of_the_machine_would_hide() -> None:
    """3% are shown although the machine's own speed varies by 20%, but not if the runs are not of one pair."""
    random_ = random.Random(2)
    found, apart = [], []
    for _ in range(200):
        first, second = pairs(random_, 1.03, 7, 0.2, 0.005)
        found.append(comparison.compare(first, second).verdict)
        apart.append(comparison.compare(first, second[3:] + second[:3]).verdict)
    assert found.count("faster") >= 198
    assert apart.count("faster") <= 20


def test_one_pair_shows_nothing_and_none_is_an_error() -> None:
    found = comparison.compare([2.0, 3.0], [1.0])
    assert (found.ratio, found.low, found.high, found.pairs) == (2.0, None, None, 1)
    assert found.verdict == "no difference can be shown"
    for first, second in (([], []), ([1.0], []), ([1.0], [0.0])):
        with pytest.raises(ArgumentError, match="times to compare must be positive"):
            comparison.compare(first, second)


# ---- reports


def report(factor: float = 1.0, machine: float = 1.0, **changed: Any) -> dict[str, Any]:
    """A report with two rows of five rounds each.

    Args:
        factor: What the times of the second row are multiplied by.
        machine: What all times are multiplied by, those of the limits too.
        changed: Other values at the top level.
    """
    noise = [1.0, 1.01, 0.99, 1.005, 0.995]
    rows = []
    for prompt, times in ((64, 1.0), (0, factor)):
        facts = {
            "phase": "prefill" if prompt else "decode",
            "threads": 2,
            "prompt": prompt,
            "context": 0,
            "batch": 1,
            "sampling": "",
        }
        work = {"tokens": prompt or 1, "bytes": 1000, "multiply_adds": 500}
        seconds = [machine * times * n for n in noise]
        limits = {f"{name}_seconds": [machine * n / 2 for n in reversed(noise)] for name in ("read", "multiply")}
        rows.append(summary({**facts, **work, "seconds": seconds, **limits}))
    facts = {"llamac": "1", "isa": "scalar", "kv": "f16", "numerics": "exact", "decode": 32, "rounds": 5}
    model = {"id": "a", "name": "m", "dtype": "q8"}
    return {**facts, "model": model, "results": rows, **changed}


def test_rows_are_compared_and_the_machine_too() -> None:
    found = comparison.compare_reports(report(), report(0.8))
    assert [row["verdict"] for row in found["rows"]] == ["no difference can be shown", "faster"]
    assert found["rows"][1]["ratio"] == pytest.approx(1.25)
    assert found["rows"][1]["tok_s"] == [pytest.approx(1.0), pytest.approx(1.25)]
    assert [found[name]["verdict"] for name in ("reading", "multiplying")] == ["no difference can be shown"] * 2
    found = comparison.compare_reports(report(), report(machine=2.0))
    assert [row["verdict"] for row in found["rows"]] == ["slower", "slower"]
    assert (found["reading"]["verdict"], found["reading"]["ratio"]) == ("slower", pytest.approx(0.5))


def test_rows_that_one_report_lacks_are_named() -> None:
    first = report()
    second = report(results=first["results"][:1])
    found = comparison.compare_reports(first, second)
    assert len(found["rows"]) == 1
    assert [[row["phase"] for row in side] for side in found["unmatched"]] == [["decode"], []]
    with pytest.raises(ArgumentError, match="no row in common"):
        comparison.compare_reports(report(results=first["results"][1:]), second)


def test_runs_are_added_to_a_report() -> None:
    found = comparison.merged(report(), report(2.0))
    assert (found["rounds"], len(found["results"][1]["seconds"])) == (10, 10)
    assert found["results"][1]["tok_s"] == pytest.approx((1 / 1.01 + 1 / 2 / 0.99) / 2)
    assert found["results"][0]["tok_s"] == pytest.approx(report()["results"][0]["tok_s"])
    found = comparison.merged(*(report() | {"import": {"seconds": [s], "bytes": 8}} for s in (1.0, 2.0)))
    assert found["import"] == {"seconds": [1.0, 2.0], "bytes": 8}
    for more, error in (
        (report(isa="avx2"), "have isa scalar, these have avx2"),
        (report(model={"id": "b"}), "another model"),
        (report(results=report()["results"][1:]), "its rows are others"),
    ):
        with pytest.raises(ArgumentError, match=error):
            comparison.merged(report(), more)


# ---- the command


def written(folder: Path, *reports: dict[str, Any]) -> list[Path]:
    paths = [folder / f"{number}.json" for number in range(len(reports))]
    for path, content in zip(paths, reports, strict=True):
        path.write_text(json.dumps(content))
    return paths


def test_the_command_compares_two_files(llamac_command: Command, tmp_path: Path) -> None:
    done = llamac_command("bench", "--compare", *written(tmp_path, report(), report(0.8)))
    assert (done.code, done.err) == (0, "")
    assert "2 threads, decode at 0, batch 1: 1.00 -> 1.25 tok/s;\n" in done.out
    assert "  the second is 1.250 times as fast (95%: 1.250 to 1.250): faster\n" in done.out
    assert "no difference can be shown" in done.out
    assert "the machine itself" not in done.out
    done = llamac_command("bench", "--compare", *written(tmp_path, report(), report(machine=2.0)), "--json", "-")
    assert json.loads(done.out)["reading"]["verdict"] == "slower"
    done = llamac_command("bench", "--compare", *written(tmp_path, report(), report(machine=2.0)))
    assert "the machine itself: reading was 0.500 times as fast" in done.out
    assert "measure in alternation, with --append" in done.out


def test_few_runs_and_missing_rows_are_said(llamac_command: Command, tmp_path: Path) -> None:
    short = report()
    row = short["results"][0]
    lists = {name: row[name][:1] for name in ("seconds", "read_seconds", "multiply_seconds")}
    short["results"] = [summary({**row, **lists})]
    done = llamac_command("bench", "--compare", *written(tmp_path, report(), short))
    assert "(one run, so no interval): no difference can be shown" in done.out
    assert "only 1 pair of runs" in done.out
    assert "only in the first: decode at 0 (threads 2, batch 1)" in done.out


def test_what_cannot_be_compared_is_refused(llamac_command: Command, tmp_path: Path) -> None:
    first, second = written(tmp_path, report(), {"results": [{"threads": 1}]})
    llamac_command("bench", "--compare", first, second).refuses_with("1.json is not a report")
    llamac_command("bench", "--compare", first, tmp_path / "none.json").fails_with("none.json: No such file")
    llamac_command("bench", "stories", "--compare", first, first).refuses_with("takes no MODEL")
    for option in (("--append",), ("--peers",), ("--roofline", tmp_path / "x.svg")):
        refused = llamac_command("bench", "--compare", first, first, *option)
        refused.refuses_with(f"--compare measures nothing, so it takes no {option[0]}")
    (tmp_path / "broken.json").write_text("{")
    llamac_command("bench", "--compare", first, tmp_path / "broken.json").refuses_with("is not valid JSON")
    for lacks in ("isa", "model"):
        [part] = written(tmp_path, {name: value for name, value in report().items() if name != lacks})
        llamac_command("bench", "--compare", part, part).refuses_with("0.json is not a report")


@pytest.mark.parametrize(
    "values",
    [{"seconds": [None] * 5}, {"seconds": [1.0] * 4}, {"read_seconds": 3}, {"bytes": 0}, {"multiply_adds": "9"}],
    ids=str,
)
def test_reports_with_other_values_are_refused(llamac_command: Command, tmp_path: Path, values: dict[str, Any]) -> None:
    wrong = report()
    wrong["results"][1] |= values
    llamac_command("bench", "--compare", *written(tmp_path, report(), wrong)).refuses_with("1.json is not a report")


def test_earlier_runs_outlive_a_failed_write(tiny_llama: Path, tmp_path: Path) -> None:
    """As on a full disk: no file can grow beyond 2 KB."""
    out = tmp_path / "speed.json"
    options = ("--prompt", "8", "--decode", "0", "--rounds", "1", "--threads", "1", "--json", out, "--append")
    command = [sys.executable, "-m", "llamac", "bench", *map(str, (tiny_llama, *options))]
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT)
    before = out.read_bytes()
    assert len(before) > 2048

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))

    environment = {**os.environ, **UNCOUNTED}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, preexec_fn=limit, env=environment)
    assert (done.returncode, done.stderr) == (1, f"llamac: error: {out}: File too large\n")
    assert "prefill" in done.stdout  # the new runs are not lost, either
    assert out.read_bytes() == before
    assert list(tmp_path.iterdir()) == [out]


def test_runs_of_several_commands_are_in_one_file(
    llamac_command: Command, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "speed.json"
    options = ("--prompt", "8", "--decode", "0", "--rounds", "1", "--threads", "1", "--json", out, "--append")
    for runs in (1, 2):
        done = llamac_command("bench", tiny_llama, *options)
        assert (done.code, done.err) == (0, "")
        report_ = json.loads(out.read_text())
        assert (report_["rounds"], len(report_["results"][0]["seconds"])) == (runs, runs)
    assert llamac_command("bench", "--compare", out, out).out.count("1.000 times as fast") == 1
    monkeypatch.delattr(benchmark, "_measure_rounds")  # refused before anything is measured
    llamac_command("bench", tiny_llama, *options, "--kv-dtype", "q8").refuses_with(
        f"--append to {out}: its runs have kv"
    )
    llamac_command("bench", tiny_llama, *options, "--context", "3", "--decode", "2").refuses_with(
        f"--append to {out}: its runs have decode 0"
    )
    llamac_command("bench", tiny_llama, *options, "--prompt", "9").refuses_with(
        f"--append to {out}: its rows are others"
    )
    llamac_command("bench", tiny_llama, *options, "--peers").refuses_with("--append adds no runs of peers")
    llamac_command("bench", tiny_llama, "--append").refuses_with("--append needs --json FILE")
