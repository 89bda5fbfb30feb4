"""`llamac bench`: the work of a step, the measuring loops, the table and the JSON, refused plans, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recurrent_models import both_mixers, mamba2_layers, parts, short_convs, states_alone

import llamac
from builders import checkpoint, llama_config, write_model
from commands import Command
from llamac import _core
from llamac.arguments import NUMERICS, Numerics
from llamac.engine.inspection import benchmark
from llamac.engine.inspection.benchmark import BenchmarkPlan, LimitMeter, Limits, Work, main_dtype, work_of
from llamac.errors import ArgumentError
from llamac.export.checkpoint import Checkpoint, LayerConfig
from llamac.export.flat.plan import make_plan
from llamac.export.flat.stream import write_file
from llamac.export.targets import atomic_file
from processes import TIMEOUT, heed_signals

RUNS_HERE = [name for name, supported in _core.isas() if supported]
FAST = ("--prompt", "8", "--decode", "2", "--rounds", "1", "--threads", "1")

# ---- the measuring loops


@pytest.mark.parametrize("isa", RUNS_HERE)
def test_measure_read_counts_its_bytes(isa: str) -> None:
    block: Any = np.full(100_000, 0.5, np.float32)
    for threads in (1, 2, 3):
        for streams in (1, 2, 4):
            read = _core.measure_read(block, 3, threads=threads, streams=streams, isa=isa)
            # whole runs of every stream of every thread
            assert read == 3 * threads * (100_000 // threads // (64 * streams)) * 64 * streams * 4


@pytest.mark.parametrize("isa", RUNS_HERE)
@pytest.mark.parametrize("dtype", [number for _, number in _core.dtypes()])
def test_measure_multiply_counts_its_multiply_adds(isa: str, dtype: int) -> None:
    for numerics in range(len(NUMERICS)):
        one = _core.measure_multiply(dtype, 1, numerics=numerics, isa=isa)
        assert one > 0
        assert _core.measure_multiply(dtype, 3, numerics=numerics, isa=isa) == 3 * one
        assert _core.measure_multiply(dtype, 1, numerics=numerics, threads=2, isa=isa) == 2 * one


def test_every_dtype_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "PASS_SECONDS", 0.0)
    monkeypatch.setattr(benchmark, "PASS_BYTES", 0)
    names = [name for name, _ in _core.dtypes()]
    limits = LimitMeter(np.ones(1000, np.float32), names, 1, "scalar").measure()
    assert list(limits.multiply) == names
    assert min(limits.multiply.values()) > 0


def test_wrong_arguments_of_the_loops_are_refused() -> None:
    block: Any = np.ones(1000, np.float32)
    with pytest.raises(ArgumentError, match="streams is 3, expected 1, 2 or 4"):
        _core.measure_read(block, 1, streams=3)
    with pytest.raises(ArgumentError, match="threads is 0"):
        _core.measure_read(block, 1, threads=0)
    for threads in (1025, 2000):
        with pytest.raises(ArgumentError, match=f"threads is {threads}, expected 1 to 1024"):
            _core.measure_read(block, 1, threads=threads)
        with pytest.raises(ArgumentError, match=f"threads is {threads}, expected 1 to 1024"):
            _core.measure_multiply(1, 1, threads=threads)
    with pytest.raises(ArgumentError, match="dtype is 0"):
        _core.measure_multiply(0, 1)
    with pytest.raises(ArgumentError, match="passes is -1, expected 0 to 1048576"):
        _core.measure_multiply(1, -1)
    with pytest.raises(ArgumentError, match="numerics is 2, expected 0 or 1"):
        _core.measure_multiply(1, 1, numerics=2)
    with pytest.raises(ArgumentError, match='isa "sse9"'):
        _core.measure_multiply(1, 1, isa="sse9")


@pytest.mark.parametrize("numerics", NUMERICS)
def test_limits_are_those_of_the_numerics_that_are_measured(
    tiny_llama: Path, numerics: Numerics, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = set()

    def multiply(dtype: int, passes: int, *, numerics: int, threads: int, isa: str) -> int:
        measured.add(numerics)
        return 1 << 30

    monkeypatch.setattr(_core, "measure_multiply", multiply)
    with llamac.load(tiny_llama) as model:
        benchmark.measure(model, BenchmarkPlan([1], [2], steps=1, rounds=1, numerics=numerics))
    assert measured == {NUMERICS.index(numerics)}


# ---- the work of a step


def matrices(model: llamac.Model) -> list[Any]:
    return [t for t in model.file.tensors if len(t.shape) == 2 and not t.name.endswith("embedding.weight")]


def test_the_work_of_a_step_with_an_untied_output(tiny_llama: Path) -> None:
    """LLaMA with its own output: 2 layers, 6 heads, 2 KV heads of 8, vocabulary 301."""
    with llamac.load(tiny_llama) as model:
        whole = sum(t.bytes for t in model.file.tensors if t.name != "token_embedding.weight")
        strip = 4 * 16 * 48
        kv = 2 * 2 * 2 * 8 * 4  # bytes of a position: layers, keys and values, heads, dimensions, f32
        work = work_of(model, kv_dtype="f32", rows=1, batch=1, start=10)
        assert work.bytes == whole + strip + 11 * kv
        products = sum(t.shape[0] * t.shape[1] for t in matrices(model))
        attention = 2 * 2 * 6 * 8  # per position: layers, both products, heads, dimensions
        assert work.multiply_adds == {"f32": products + 11 * attention}
        # in q8, a byte for each number, a scale of 2 bytes for each 32 numbers of a key, and one for each value
        work = work_of(model, kv_dtype="q8", rows=1, batch=1, start=10)
        assert work.bytes == whole + strip + 11 * (kv / 4 + 2 * 2 * (2 + 2))
        # three sequences share the weights; 4 steps see 2.5 positions on average
        work = work_of(model, kv_dtype="f16", rows=1, batch=3, start=0, steps=4)
        assert work.bytes == whole + 3 * strip + 3 * 2.5 * kv / 2
        # only a prompt's last row gets logits
        work = work_of(model, kv_dtype="f32", rows=5, batch=1, start=0)
        assert work.bytes == whole + 5 * strip + 5 * kv
        assert work.multiply_adds["f32"] == 5 * products - 4 * 301 * 48 + (1 + 2 + 3 + 4 + 5) * attention


def test_the_work_of_a_step_with_a_tied_output(tiny_gpt2: Path) -> None:
    with llamac.load(tiny_gpt2) as model:
        whole = sum(t.bytes for t in model.file.tensors if t.name != "position_embedding.weight")
        strip = 2 * 16 * 40
        work = work_of(model, kv_dtype="f16", rows=1, batch=1, start=0)
        assert work.bytes == whole + 2 * strip + 2 * 2 * 5 * 8 * 2
        assert work.multiply_adds == {
            "bf16": sum(t.shape[0] * t.shape[1] for t in matrices(model)) + 301 * 40,
            "f32": 2 * 2 * 5 * 8,
        }
        assert main_dtype(model) == "bf16"


def test_the_work_of_a_step_with_experts_and_a_window(tmp_path: Path) -> None:
    """A row uses one of 4 experts, and two rows use 7/16 of them on average; a row sees the last 3 positions."""
    layer = LayerConfig("experts", 20, rope=0, window=3, n_experts=4, n_experts_used=1)
    path = write_model(tmp_path / "m.bin", checkpoint(replace(llama_config(), layers=(layer,))))
    with llamac.load(path) as model:
        experts = sum(t.bytes for t in model.file.tensors if ".experts." in t.name)
        others = sum(t.bytes for t in model.file.tensors if ".experts." not in t.name and "embedding" not in t.name)
        strip, kv = 4 * 16 * 48, 2 * 2 * 8 * 4
        work = work_of(model, kv_dtype="f32", rows=1, batch=1, start=10)
        assert work.bytes == others + experts / 4 + strip + 3 * kv
        products = sum(t.shape[0] * t.shape[1] / (4 if ".experts." in t.name else 1) for t in matrices(model))
        assert work.multiply_adds == {"f32": products + 3 * 2 * 6 * 8}
        work = work_of(model, kv_dtype="f32", rows=2, batch=1, start=1)
        assert work.bytes == others + experts * 7 / 16 + 2 * strip + 3 * kv
        assert work.multiply_adds["f32"] == 2 * products - 301 * 48 + (2 + 3) * 2 * 6 * 8


@pytest.mark.parametrize("made", [parts, mamba2_layers, both_mixers, states_alone])
def test_only_layers_with_attention_read_the_cache(made: Callable[[], Checkpoint], tmp_path: Path) -> None:
    with llamac.load(write_model(tmp_path / "m.bin", made())) as model:
        first, later = (work_of(model, kv_dtype="f32", rows=1, batch=1, start=start) for start in (0, 20))
        attending = [layer for layer in model.file.layers if layer["mixer"].startswith("attention")]
        heads, kv_heads, width = (model.config[name] for name in ("n_heads", "n_kv_heads", "head_dim"))
        with model.session(context=21) as session:  # of the layers that have keys
            cache = session.observe(range(3, 23), ["cache_k"])
    assert len(attending) == sum(rows.any() for rows in cache.values())
    assert later.bytes - first.bytes == 20 * len(attending) * 2 * kv_heads * width * 4
    counts = (sum(work.multiply_adds.values()) for work in (later, first))
    assert next(counts) - next(counts) == 20 * len(attending) * 2 * heads * width


def test_shares_relate_to_the_slower_limit() -> None:
    limits = Limits(read=100.0, multiply={"q4": 50.0, "f32": 10.0})
    work = Work(200.0, {"q4": 100.0, "f32": 5.0})
    assert limits.seconds(work) == (2.0, 2.5)
    case = benchmark.Case("decode", 1, 0, 0, 2, 2, work, lambda: 0.0, [5.0, 10.0, 2.5], [limits] * 3)
    result = case.result()
    assert (result["limit"], result["share_of_limit"], result["share_of_limit_spread"]) == ("multiply", 0.5, [0.25, 1])
    assert (result["tok_s"], result["tok_s_spread"]) == (0.4, [0.2, 0.8])
    assert (result["share_of_read"], result["share_of_peak"]) == (0.4, 0.5)
    assert (result["gb_s"], result["mac_s"]) == (40.0 / 1e9, 21.0)


# ---- the command


def test_the_json_has_every_setting(llamac_command: Command, tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "speed.json"
    options = ("--threads", "1,2", "--prompt", "3,20", "--decode", "4", "--context", "0,600", "--batch", "1,3")
    done = llamac_command("bench", tiny_llama, *options, "--rounds", "2", "--isa", "scalar", "--json", out)
    assert (done.code, done.err) == (0, "")
    report = json.loads(out.read_text())
    found = [(r["threads"], r["phase"], r["prompt"], r["context"], r["batch"]) for r in report["results"]]
    assert found == [
        (threads, *case)
        for threads in (1, 2)
        for case in (
            *(("prefill", prompt, 0, 1) for prompt in (3, 20)),
            *(("decode", 0, context, batch) for context in (0, 600) for batch in (1, 3)),
        )
    ]
    for result in report["results"]:
        assert result["tok_s_spread"][0] <= result["tok_s"] <= result["tok_s_spread"][1]
        assert result["share_of_limit"] > 0
        assert result["limit"] in ("read", "multiply")
    assert report["read_gb_s"] > 0
    assert report["mac_per_s"] > 0
    assert [entry["threads"] for entry in report["limits"]] == [1, 2]
    assert report["model"]["dtype"] == "f32"
    assert (report["memory"]["context"], report["memory"]["sequences"]) == (600, 3)
    assert (report["isa"], report["kv"]) == ("scalar", "f32")


def test_steps_can_end_at_the_end_of_the_context(tiny_llama: Path) -> None:
    """With the whole context, the measured steps end where the context ends."""
    plan = BenchmarkPlan(threads=[1], prompts=(), steps=4, contexts=(600,), rounds=1)
    with llamac.load(tiny_llama) as model:
        assert plan.start(600, model) == 596
        (result,) = benchmark.measure(model, plan)["results"]
        assert result["bytes"] == round(work_of(model, kv_dtype="f32", rows=1, batch=1, start=596, steps=4).bytes)


def test_models_with_states_are_measured_without_a_context(tmp_path: Path) -> None:
    """Each round begins with an empty sequence, because a state cannot be cut."""
    plan = BenchmarkPlan(threads=[1], prompts=(), steps=2, contexts=(0, 70), rounds=2)
    with llamac.load(write_model(tmp_path / "m.bin", short_convs())) as model:
        assert [result["context"] for result in benchmark.measure(model, plan)["results"]] == [0, 70]


@pytest.mark.parametrize("columns", [40, 80])
def test_the_table_fits_the_terminal(
    llamac_command: Command, monkeypatch: pytest.MonkeyPatch, tiny_gpt2: Path, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    done = llamac_command("bench", tiny_gpt2, *FAST, "--context", "500")
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= columns
    assert "\x1b" not in done.out
    assert lines[0].startswith("tiny: bf16, ")
    assert lines[2].startswith("memory: ")
    prefill, decode = lines[-2:]
    assert prefill.split()[1:3] == ["prefill" if columns == 80 else "prompt", "8"]
    assert decode.split()[1:4] == (["decode", "at", "500"] if columns == 80 else ["at", "500", "1"])
    assert all("%" in line for line in (prefill, decode))


def test_json_on_standard_output_is_the_only_output(llamac_command: Command, tiny_llama: Path) -> None:
    done = llamac_command("bench", tiny_llama, *FAST, "--decode", "0", "--json", "-")
    assert (done.code, done.err) == (0, "")
    assert [result["phase"] for result in json.loads(done.out)["results"]] == ["prefill"]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--prompt", "601"), ["prompt is 601", "1 to 600, the model's context"]),
        (("--context", "0,601"), ["context is 601", "0 to 600, the model's context"]),
        (("--context", "-1"), ["context is -1"]),
        (("--decode", "601"), ["decode is 601"]),
        (("--batch", "0"), ["batch is 0", "at least 1"]),
        (("--threads", "1,0"), ["threads is 0", "at least 1"]),
        (("--rounds", "0"), ["rounds is 0", "at least 1"]),
        (("--prompt", "", "--decode", "0"), ["nothing to measure"]),
        (("--threads", "1,9999"), ["threads is 9999, expected 1 to"]),
        (("--isa", "sse9"), ["'sse9'"]),
        (("--json", "/no/such/folder/speed.json"), ["--json /no/such/folder/speed.json", "cannot be written"]),
        (("--json", "/"), ["--json /", "is a directory"]),
        (("--json", "/tmp/a", "--roofline", "/tmp/../tmp/a"), ["--json and --roofline name the same file"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_impossible_plans_are_refused_in_one_line(
    llamac_command: Command,
    monkeypatch: pytest.MonkeyPatch,
    tiny_llama: Path,
    options: tuple[str, ...],
    parts: list[str],
) -> None:
    """They are refused before anything is measured."""
    monkeypatch.delattr(benchmark, "_measure_rounds")
    llamac_command("bench", tiny_llama, *options).refuses_with(*parts)


def test_an_unknown_isa_in_the_environment_is_an_error_only_if_used(
    llamac_command: Command, monkeypatch: pytest.MonkeyPatch, tiny_llama: Path
) -> None:
    monkeypatch.setenv("LLAMAC_ISA", "sse9")
    assert llamac_command("bench", tiny_llama, *FAST, "--isa", "scalar").code == 0
    monkeypatch.delattr(benchmark, "_measure_rounds")
    llamac_command("bench", tiny_llama, *FAST).refuses_with("LLAMAC_ISA is 'sse9'")


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose name has an escape sequence and a lone surrogate."""
    made = checkpoint(llama_config())
    texts = {"metadata": json.dumps({"name": "\x1b[2Jé\ud800"}).encode()}
    path = tmp_path_factory.mktemp("named") / "model.bin"
    with atomic_file(path) as file:
        write_file(file, make_plan(made, "f32", texts))
    return path


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_model_names_are_escaped(named: Path, tmp_path: Path, encoding: str) -> None:
    out = tmp_path / "speed.json"
    environment = {**os.environ, "PYTHONIOENCODING": encoding}

    def bench(*options: object) -> bytes:
        command = [sys.executable, "-m", "llamac", "bench", named, *FAST, "--decode", "0", *options]
        done = subprocess.run(list(map(str, command)), capture_output=True, env=environment, timeout=TIMEOUT)
        assert (done.returncode, done.stderr) == (0, b"")
        return done.stdout

    assert bench("--json", out).decode(encoding).startswith(r"\x1b[2Jé\ud800: f32, ")
    for text in (out.read_bytes(), bench("--json", "-")):
        assert json.loads(text.decode("utf-8"))["model"]["name"] == "\x1b[2Jé?"


def test_a_malformed_list_is_wrong_usage(llamac_command: Command, tiny_llama: Path) -> None:
    done = llamac_command("bench", tiny_llama, "--threads", "1,two")
    assert (done.code, done.out) == (2, "")
    assert "'1,two' is not a list of integers" in done.err


ANNOUNCED = """
    from llamac.engine.inspection import benchmark
    from llamac.__main__ import main
    work = benchmark._measure_rounds
    benchmark._measure_rounds = lambda *arguments: (print("measuring", flush=True), work(*arguments))[1]
    main()
"""


def test_ctrl_c_ends_bench_quietly(tmp_path: Path) -> None:
    """The signal arrives during a prompt that takes seconds; no report is written."""
    model = write_model(tmp_path / "model.bin", checkpoint(llama_config(context=8192)))
    out = tmp_path / "speed.json"
    arguments = ("bench", model, "--prompt", "8192", "--rounds", "1000", "--json", out)
    command = [sys.executable, "-c", textwrap.dedent(ANNOUNCED), *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed_signals) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"measuring\n"
        program.send_signal(signal.SIGINT)
        printed, errors = program.communicate(timeout=TIMEOUT)
    assert (program.returncode, printed, errors) == (130, b"", b"")
    assert not out.exists()
