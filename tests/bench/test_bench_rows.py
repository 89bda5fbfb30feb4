"""What `llamac bench` adds to prefill and decode: the standard rows, the picture, and peers on the same file."""

from __future__ import annotations

import json
import math
import stat
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import llamac
from builders import checkpoint, llama_config, write_model
from commands import Command
from llamac.cli import bench_peers, bench_roofline
from llamac.engine.inspection import benchmark
from llamac.engine.inspection.benchmark import BenchmarkPlan
from llamac.errors import ArgumentError, LlamacError
from llamac.export import export
from llamac.format.strict_json import parse_object

FAST = ("--prompt", "8", "--decode", "2", "--rounds", "1", "--threads", "1")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    export(write_model(folder / "model.bin", checkpoint(llama_config())), folder / "model.gguf", to="gguf")
    return folder / "model.gguf"


# ---- rows


def test_the_standard_rows_are_measured_unless_rows_are_chosen(llamac_command: Command, gguf: Path) -> None:
    def rows(*options: str) -> tuple[list[tuple[Any, ...]], dict[str, Any]]:
        done = llamac_command("bench", gguf, *FAST, "--no-cache", *options, "--json", "-")
        assert done.code == 0
        report = parse_object(done.out, "report")
        return [(r["phase"], r["context"], r["batch"], r["sampling"]) for r in report["results"]], report

    prefill = ("prefill", 0, 1, "")
    found, report = rows()
    decode = [("decode", 0, 1, ""), ("decode", 0, 8, ""), ("decode", 0, 1, "greedy"), ("decode", 0, 1, "top-p")]
    assert found == [prefill, *decode, ("decode", 600, 1, "")]  # 4096 is beyond the model's context
    assert len(report["import"]["seconds"]) == 1
    assert report["import"]["bytes"] == gguf.stat().st_size
    found, report = rows("--context", "5")
    assert found == [prefill, ("decode", 5, 1, "")]
    assert "import" not in report
    assert rows("--sampling", "top-p")[0] == [prefill, ("decode", 0, 1, ""), ("decode", 0, 1, "top-p")]
    assert rows("--sampling", "")[0] == [prefill, ("decode", 0, 1, "")]


def test_a_context_shorter_than_the_default_rows_is_measured_whole(llamac_command: Command, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.bin", checkpoint(llama_config(context=24)))
    done = llamac_command("bench", path, "--threads", "1", "--rounds", "1", "--context", "0", "--json", "-")
    report = parse_object(done.out, "report")
    assert [(r["phase"], r["prompt"]) for r in report["results"]] == [("prefill", 24), ("decode", 0)]


def test_the_import_has_a_line(llamac_command: Command, gguf: Path) -> None:
    done = llamac_command("bench", gguf, *FAST, "--no-cache")
    assert done.out.splitlines()[-1].startswith("import: ")


def test_draws_are_those_of_the_named_settings(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is followed by one draw, and the steps are those of the row without draws."""
    drawn: list[Any] = []
    plan = BenchmarkPlan(threads=[1], prompts=(), steps=3, samplings=("greedy", "top-p"), rounds=1)
    monkeypatch.setattr(llamac.Session, "sample", lambda self, params: drawn.append((len(self.tokens()), params)))
    with llamac.load(tiny_llama) as model, benchmark.open_session(model, plan, 1) as session:
        cases = list(benchmark.cases(model, session, plan))
        assert [case.sampling for case in cases] == ["", "greedy", "top-p"]
        for case in cases:
            case.run()
    settings = [benchmark.SAMPLINGS[name] for name in plan.samplings]
    assert drawn == [(length, params) for params in settings for length in (1, 2, 3)]
    assert (settings[0].temperature, settings[1].temperature, settings[1].top_p) == (0, 1, 0.9)


def test_groups_have_sequences_of_their_own(tiny_llama: Path) -> None:
    plan = BenchmarkPlan(threads=[1], prompts=(4,), steps=2, contexts=(0, 5), batches=(3, 1), also=[(9, 2)], rounds=1)
    assert plan.groups() == [(0, [1, 3]), (5, [1, 3]), (9, [2])]
    with llamac.load(tiny_llama) as model, benchmark.open_session(model, plan, 1) as session:
        cases = list(benchmark.cases(model, session, plan))
        for case in (*cases, *cases):  # one after the other: no case takes the positions of another one
            assert case.run() > 0
        assert [session.length(sequence) for sequence in range(9)] == [2, 2, 2, 7, 7, 7, 11, 11, 4]


def test_unknown_samplings_are_refused(llamac_command: Command, tiny_llama: Path) -> None:
    llamac_command("bench", tiny_llama, "--sampling", "best").refuses_with("sampling is 'best'", "greedy or top-p")


# ---- the picture


def row(name: str, intensity: float, speed: float, **changed: Any) -> dict[str, Any]:
    facts = {"phase": name, "threads": 2, "prompt": 64, "context": 10, "batch": 1, "sampling": ""}
    return {
        **facts,
        "bytes": 1000,
        "multiply_adds": 1000 * intensity,
        "mac_s": speed,
        "tok_s": 5.0,
        "share_of_limit": 0.5,
        **changed,
    }


REPORT: dict[str, Any] = {
    "model": {"name": 'a <b> & "c" \ud800\x1b', "dtype": "q4"},
    "isa": "scalar",
    "limits": [
        {"threads": 1, "read_gb_s": 1.0, "mac_per_s": {"f32": 1e9}},
        {"threads": 2, "read_gb_s": 10.0, "mac_per_s": {"f32": 5e10, "q4": 1e11}},
    ],
    "results": [
        row("prefill", 100.0, 8e10),
        row("decode", 2.0, 1e10, batch=8),
        row("decode", 2.0, 9e9, sampling="greedy"),
        row("decode", 2.0, 1e9, threads=1),
    ],
}


def test_the_picture_has_a_point_for_each_row_and_a_line_for_each_limit() -> None:
    picture = ElementTree.fromstring(bench_roofline.picture(REPORT))
    space = "{http://www.w3.org/2000/svg}"
    texts = [element.text or "" for element in picture.iter(f"{space}text")]
    assert texts[0] == 'a <b> & "c" \\ud800\\x1b: q4, scalar, 2 threads'
    assert {"reading: 10 GB/s", "f32: 50 G/s", "q4: 100 G/s", "prefill 64", "decode at 10, 8 sequences"} <= set(texts)
    points = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in picture.iter(f"{space}circle")]
    assert len(points) == 3  # those of the largest number of threads
    slope, *peaks = (
        [tuple(map(float, place.split(","))) for place in line.attrib["points"].split()]
        for line in picture.iter(f"{space}polyline")
    )
    # equal factors are equal distances, and the limits are at the places of their numbers
    (x0, y0), (x1, y1) = points[0], points[1]
    per_decade = (x0 - x1) / math.log10(50)
    assert (y1 - y0) / math.log10(8) == pytest.approx(
        (slope[0][1] - slope[1][1]) / (slope[1][0] - slope[0][0]) * per_decade, rel=0.01
    )
    assert slope[1] == peaks[1][0]  # the slope ends where the fastest format's line begins
    assert x1 - peaks[0][0][0] == pytest.approx(per_decade * math.log10(2 / 5), abs=0.3)
    assert all(y > peaks[1][0][1] for _, y in points)  # below the limit: further down


def test_the_picture_is_written(llamac_command: Command, tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "roofline.svg"
    done = llamac_command("bench", tiny_llama, *FAST, "--context", "0", "--roofline", out)
    assert done.code == 0
    assert ElementTree.parse(out).getroot().tag.endswith("svg")
    llamac_command("bench", tiny_llama, "--roofline", tmp_path / "none" / "x.svg").refuses_with("--roofline", "folder")
    llamac_command("bench", tiny_llama, "--roofline", "/").refuses_with("--roofline /", "is a directory")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_figures_outlive_a_file_that_cannot_be_written(
    llamac_command: Command, tiny_llama: Path, tmp_path: Path
) -> None:
    out = tmp_path / "speed.json"
    command = ("bench", tiny_llama, *FAST, "--decode", "0")
    done = llamac_command(*command, "--json", out, "--roofline", "/dev/full")
    assert (done.code, done.err) == (1, "llamac: error: /dev/full: No space left on device\n")
    assert "prefill" in done.out
    assert len(json.loads(out.read_text())["results"]) == 1
    done = llamac_command(*command, "--json", "/dev/full")
    assert (done.code, done.err) == (1, "llamac: error: /dev/full: No space left on device\n")
    assert "prefill" in done.out
    assert llamac_command(*command, "--json", "/dev/null", "--roofline", "/dev/null").code == 0


# ---- peers

FAKE_BENCH = """#!{python}
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert options["-m"].endswith("model.gguf"), options
tasks = [(int(p), 0) for p in options["-p"].split(",") if p != "0"]
tasks += [(0, int(n)) for n in options["-n"].split(",") if n != "0"]
print(json.dumps([{{"n_prompt": p, "n_gen": n, "avg_ts": 1e-6 * int(options["-t"])}} for p, n in tasks]))
"""


@pytest.fixture
def fake_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A llama-bench on the PATH that is slower than any model; no other peer is installed."""
    program = tmp_path / "bin" / "llama-bench"
    program.parent.mkdir()
    program.write_text(FAKE_BENCH.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setattr(bench_peers, "find_spec", lambda name: None)
    return program


def test_peers_are_measured_in_turn_on_the_same_file(llamac_command: Command, gguf: Path, fake_bench: Path) -> None:
    options = ("--prompt", "3,8", "--decode", "2", "--rounds", "3", "--threads", "1,2", "--context", "0", "--no-cache")
    done = llamac_command("bench", gguf, *options, "--peers", "--json", "-")
    assert done.code == 0
    found = json.loads(done.out)["peers"]
    rows = [("prefill", 3), ("prefill", 8), ("decode", 2)]
    assert [(e["threads"], e["phase"], e["tokens"]) for e in found] == [(t, *task) for t in (1, 2) for task in rows]
    for entry in found:
        assert entry["peer"] == "llama-bench"
        assert entry["tok_s"][1] == pytest.approx(1e-6 * entry["threads"])
        assert entry["seconds"][1] == pytest.approx([entry["tokens"] / entry["tok_s"][1]] * 3)
        assert (entry["verdict"], entry["pairs"]) == ("faster", 3)
    done = llamac_command("bench", gguf, *FAST, "--context", "0", "--no-cache", "--peers")
    assert "tok/s, llama-bench 0.00;\n  llamac is " in done.out


def test_without_peers_the_error_says_what_to_install(
    llamac_command: Command, gguf: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(bench_peers, "find_spec", lambda name: None)
    monkeypatch.delattr(benchmark, "_measure_rounds")  # refused before anything is measured
    llamac_command("bench", gguf, "--peers").refuses_with("no peer", "llama-bench", "llama-cpp-python")
    llamac_command("bench", tiny_llama, "--peers").refuses_with("--peers", "MODEL must be a GGUF file")


def test_a_peer_that_fails_is_named(gguf: Path, fake_bench: Path) -> None:
    (peer,) = bench_peers.find(gguf)
    assert peer.seconds(4, [("decode", 8)]) == [pytest.approx(8 / 4e-6)]
    fake_bench.write_text(f"#!{sys.executable}\nimport sys\nprint('loading')\nsys.exit('cannot load it')\n")
    with pytest.raises(LlamacError, match="llama-bench failed with exit status 1: cannot load it"):
        peer.seconds(1, [("prefill", 3)])
    for printed in ("nothing", "[]", '[{"n_prompt": 3}]'):
        fake_bench.write_text(f"#!{sys.executable}\nprint({printed!r})\n")
        with pytest.raises(LlamacError, match="llama-bench printed something unexpected"):
            peer.seconds(1, [("prefill", 3)])


FAKE_PACKAGE = """
class Llama:
    def __init__(self, path, **settings):
        assert path.endswith("model.gguf") and settings["n_threads"] == 2, (path, settings)
        assert settings["n_ctx"] >= 8 and settings["n_batch"] >= 8
        self.left = None
    def reset(self):
        self.left = settings = 0
    def eval(self, tokens):
        assert self.left is not None and tokens
        print("noise of a library")
"""


def test_the_python_package_is_a_peer(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_cpp.py").write_text(FAKE_PACKAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(bench_peers, "find_spec", lambda name: name == "llama_cpp")
    (peer,) = bench_peers.find(gguf)
    assert peer.name == "llama-cpp-python"
    found = peer.seconds(2, [("prefill", 8), ("decode", 3)])
    assert len(found) == 2
    assert min(found) > 0
    monkeypatch.setattr(bench_peers, "find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match="no peer"):
        bench_peers.find(gguf)
