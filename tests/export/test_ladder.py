"""The ladder of `llamac check --against`: captures, comparisons, the table, and every family against transformers.

Stored captures in golden/captures make most of it run without torch (golden/make_captures.py writes them).
"""

from __future__ import annotations

import functools
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llamac
from builders import write_model
from captures import (
    Fault,
    Floats,
    both,
    changed,
    check_stored,
    climb,
    configured,
    exchanged,
    misread,
    numpy_capture,
    recorded,
    to_neighbors,
)
from commands import Command
from golden.make_captures import FOLDER, NAMES, captured, question_of
from golden.parity_table import cases, make_folder
from llamac.errors import ArgumentError, ExportError
from llamac.export.checkpoint import Checkpoint
from llamac.export.convert import export
from llamac.export.flat.model import model_config
from llamac.export.hf import model as hf
from llamac.export.hf.families import FAMILIES
from llamac.export.parity import draws
from llamac.export.parity.capture import Capture, read_capture, write_capture
from llamac.export.parity.compare import Tolerance, compare_tokens, difference, tolerance_of
from llamac.export.parity.engine_run import run_engine
from llamac.export.parity.question import make_question
from llamac.export.parity.replay import checkpoint_of
from llamac.export.parity.report import check_parity
from llamac.export.parity.stages import LADDER, Key, keys_in_order
from llamac.export.parity.transformers_run import run_transformers

BASES = [name for name in FAMILIES if name in cases()]
# Falcon's layouts of queries, keys and values, and the order of its branches.
VARIANTS = [f"falcon-{name}" for name in ("multi_query", "parallel_attn", "new_decoder_architecture", "one_norm")]
STORED = FOLDER / "llama.safetensors"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def folder(root: Path) -> Callable[[str], Path]:
    """The Hugging Face directory of a case."""
    return functools.cache(lambda name: make_folder(root, name))


# ---- captures


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_climbs_the_ladder_against_stored_captures(model_file: Callable[[str], Path], name: str) -> None:
    capture = read_capture(FOLDER / f"{name}.safetensors")
    assert capture.question == question_of(name)
    report = check_stored(model_file(name), capture, LADDER)
    assert [result.tokens.n_equal for result in report.rungs if result.tokens] == [3, 3]


def test_a_capture_survives_its_file(tmp_path: Path) -> None:
    capture = read_capture(STORED)
    write_capture(tmp_path / "c", replace(capture, problems=("missing keys: a",)))
    again = read_capture(tmp_path / "c")
    assert (again.source, again.question, again.config) == (capture.source, capture.question, capture.config)
    assert again.problems == ("missing keys: a",)
    assert again.stages.keys() == capture.stages.keys()
    for key, rows in capture.stages.items():
        assert again.stages[key].tobytes() == rows.tobytes()
        assert again.stages[key].shape == rows.shape
    for way, chosen in capture.chosen.items():
        assert again.chosen[way].ids == chosen.ids
        assert again.chosen[way].logits is not None
        assert np.array_equal(again.chosen[way].logits, chosen.logits)  # type: ignore[arg-type]


def test_damaged_captures_are_refused(tmp_path: Path, folder: Callable[[str], Path]) -> None:
    data = STORED.read_bytes()
    for damaged in (data[:-1], data[:100], b"", data.replace(b'\\"format\\": 1', b'\\"format\\": 2')):
        (tmp_path / "c").write_bytes(damaged)
        with pytest.raises(ExportError, match="c "):
            read_capture(tmp_path / "c")
    capture = read_capture(STORED)
    values: tuple[dict[str, Any], ...] = ({"config": ["llama"]}, {"problems": [3]})
    of_question: tuple[dict[str, Any], ...] = ({"steps": "x"}, {"seed": "x"}, {"ids": "x"}, {"steps": 12})
    for wrong in (*values, *({"question": replace(capture.question, **changes)} for changes in of_question)):
        write_capture(tmp_path / "c", replace(capture, **wrong))
        with pytest.raises(ExportError, match="c is not a capture that this version reads"):
            read_capture(tmp_path / "c")
    with pytest.raises(ExportError, match="is not a capture: `llamac check MODEL --against DIR --capture FILE`"):
        read_capture(folder("llama") / "model.safetensors")


# ---- comparisons


LIMIT = Tolerance(1e-4)


def test_a_difference_is_located() -> None:
    rows = np.random.RandomState(0).standard_normal((6, 12)).astype(np.float32)
    found = rows.copy()
    found[4, 7] += 0.5
    located = difference(("k", 1), found, rows, 3, LIMIT)
    assert (located.position, located.head, located.index, located.is_within) == (4, 1, 3, False)
    assert located.max_error == pytest.approx(0.5)
    assert located.relative == pytest.approx(0.5 / np.abs(rows[4]).max())
    assert located.cosine < 0.999
    part = difference(("cache_k", 1), found, rows[3:], 3, LIMIT)  # a window's cache holds the last positions
    assert (part.position, part.head, part.index) == (4, 1, 3)
    assert difference(("block", 0), np.pad(rows, ((0, 0), (0, 2))), rows, 0, LIMIT).relative == 0  # padded
    assert difference(("block", 0), rows[:, :9], rows, 0, LIMIT).problem.startswith("the engine has (6, 9)")
    assert difference(("block", 0), rows[:5], rows, 0, LIMIT).problem
    typical = difference(("k", 1), found, rows, 3, Tolerance(1e-4, of_median=True))
    assert (typical.relative, typical.position, typical.is_within) == (0, 4, True)
    rows[2, 3] = np.nan
    assert not difference(("block", 0), rows, found, 0, LIMIT).is_within


def test_the_tolerance_follows_the_number_formats() -> None:
    exact = tolerance_of({"f32", "bf16"}, "f32")
    coarser = [tolerance_of({"f32", dtype}, "f32") for dtype in ("q8", "q6_k", "q5_1", "iq4_xs")]
    limits = [exact.limit, *(tolerance.limit for tolerance in coarser)]
    assert sorted(set(limits)) == limits
    assert [exact.of_median, *(tolerance.of_median for tolerance in coarser)] == [False, True, True, True, True]
    assert tolerance_of({"f32", "q8", "q4"}, "f32") == coarser[-1]
    assert exact.limit < tolerance_of({"f32"}, "f16").limit < tolerance_of({"f32"}, "q8").limit
    fewer = [tolerance_of({"f32", "q8", dtype}, "f32") for dtype in ("q4", "q3", "q2")]
    assert fewer[0].limit < fewer[1].limit < fewer[2].limit
    assert all(tolerance.of_median for tolerance in fewer)
    rounded = tolerance_of({"f32", "t2"}, "f32")
    assert coarser[0].limit < rounded.limit < coarser[-1].limit
    assert [tolerance_of({"f32", dtype}, "f32", "fast") for dtype in ("bf16", "q8")] == [rounded, rounded]
    for dtype in ("f16", "q4"):  # fast numerics change nothing, or less than the weights
        assert tolerance_of({"f32", dtype}, "f32", "fast") == tolerance_of({"f32", dtype}, "f32")


def test_close_decisions_excuse_other_tokens(model_file: Callable[[str], Path]) -> None:
    capture = read_capture(STORED)
    with llamac.load(model_file("llama"), kv_dtype="f32", threads=1) as model:
        engine = run_engine(model, capture.question)
    other = replace(
        engine, chosen={way: replace(one, ids=(one.ids[0], one.ids[1] ^ 1, 0)) for way, one in engine.chosen.items()}
    )
    for tolerance, is_clear in ((1e-4, True), (10.0, False)):
        for found in compare_tokens(other, capture, tolerance):
            assert (found.n_equal, found.n_tokens, found.is_clear, found.is_within) == (1, 3, is_clear, not is_clear)
    assert all(found.is_within for found in compare_tokens(engine, capture, 1e-4))
    shorter = {way: replace(one, ids=one.ids[:2]) for way, one in engine.chosen.items()}
    for found in compare_tokens(replace(engine, chosen=shorter), capture, 10.0):
        assert (found.n_equal, found.is_within) == (2, False)


def test_close_decisions_excuse_only_the_tokens_that_were_close() -> None:
    """The first two tokens are close to each other, and the third is not."""
    row = np.log(np.array([0.45, 0.4499, 0.1001], np.float32))
    assert [draws.is_close("greedy", row, token, 7, 3, 1e-3) for token in range(3)] == [True, True, False]
    chosen = draws.choose("sampled", row, 7, 3)
    assert [draws.is_close("sampled", row, token, 7, 3, 1e-3) for token in range(3)] == [
        token == chosen for token in range(3)
    ]
    assert not draws.is_close("greedy", row, 3, 7, 3, 1.0)  # a model with more tokens
    assert all(draws.is_close(way, row, token, 7, 3, 1.0) for way in ("greedy", "sampled") for token in range(3))


def test_draws_are_those_of_the_core(model_file: Callable[[str], Path]) -> None:
    """The witness's sampler is not the core's: both follow docs/sampling.md."""
    ids = cases()["llama"].ids[:20]
    with llamac.load(model_file("llama"), kv_dtype="f32", threads=1) as model:
        logits = model.logits(ids)[-1]
        for seed in range(40):
            tokens = model.generate(ids, temperature=1, max_tokens=1, seed=seed, ignore_eos=True).tokens
            assert tokens == [draws.choose("sampled", logits, seed, len(ids))]


def test_questions_leave_windows_and_stay_in_the_context(model_file: Callable[[str], Path]) -> None:
    with llamac.load(model_file("mistral"), threads=1) as model:
        assert len(make_question(model).ids) == 40
        assert len(make_question(model, n_tokens=500).ids) == model.config["context"] - 8
        with pytest.raises(ArgumentError, match="no tokenizer"):
            make_question(model, text="a")
        with pytest.raises(ArgumentError, match="needs more than 4 tokens"):
            make_question(model, n_tokens=3)
        short = make_question(model, n_tokens=7)
    with llamac.load(model_file("llama-longrope"), threads=1) as model:
        assert len(make_question(model, n_tokens=18).ids) == 8  # 16 positions have the short table
    with llamac.load("stories", threads=1) as model:
        question = make_question(model, text="Once", n_tokens=9)
        assert model.detokenize(question.ids[1:]).split() == ["Once"] * 8
    assert len(short.ids) == 7


# ---- the command


def test_the_command_compares_with_a_capture(llamac_command: Command, model_file: Callable[[str], Path]) -> None:
    done = llamac_command("check", model_file("llama"), "--reference", STORED, "--threads", "1")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[2] == "prompt     12 tokens, the last 3 one by one; then 3 more"
    for rung in LADDER:
        [line] = [line for line in lines if line.startswith(f"{rung.number:>2}  {rung.title} ")]
        assert " ok" in line
    assert "3 of 3 tokens are equal" in lines[-1]


def test_the_command_explains_a_difference(
    llamac_command: Command, model_file: Callable[[str], Path], tmp_path: Path
) -> None:
    capture = read_capture(STORED)
    write_capture(tmp_path / "c", replace(capture, config={}, stages=shifted(capture)))
    done = llamac_command("check", model_file("llama"), "--reference", tmp_path / "c", "--threads", "1")
    assert done.code == 1
    assert "first difference: v of layer 1 at position" in done.out
    assert "cause: layers.1.attn_v.bias is wrong" in done.out
    facts = json.loads(
        llamac_command("check", model_file("llama"), "--reference", tmp_path / "c", "--json", "--threads", "1").out
    )
    assert not facts["is_within"]
    assert facts["first"]["stage"] == "v"
    assert facts["verdict"]["fault"] == "file"
    assert [rung["rung"] for rung in facts["rungs"]] == [rung.number for rung in LADDER]
    assert [rung["rung"] for rung in facts["rungs"] if not rung["is_within"]] == [8]
    assert "NaN" not in json.dumps(facts)


def test_numbers_that_are_not_finite_are_located(
    llamac_command: Command, given: Callable[[str], tuple[Checkpoint, Capture]], tmp_path: Path
) -> None:
    """No token can be chosen from such logits, and the report comes all the same."""
    checkpoint, capture = given("llama")
    write_capture(tmp_path / "c", capture)
    for dtype in ("f32", "q4"):
        model = write_model(tmp_path / f"{dtype}.bin", checkpoint, dtype=dtype)
        with llamac.load(model, threads=1) as opened:
            _, numbers = opened.file.stored("layers.1.ffn_norm.weight")
        damaged = numbers[:12] + np.array([np.nan], "<f4").tobytes() + numbers[16:]
        model.write_bytes(model.read_bytes().replace(numbers, damaged))
        common = ("check", model, "--reference", tmp_path / "c", "--threads", "1", "--tolerance", "2")
        done = llamac_command(*common)
        assert (done.code, done.err) == (1, "")
        assert "first difference: ffn_norm of layer 1 at position 0, index 3: relative error inf" in done.out
        assert "DIFFERENT 0 of 2 tokens are equal" in done.out
        facts = json.loads(llamac_command(*common, "--json").out)
        assert (facts["first"]["stage"], facts["first"]["layer"], facts["first"]["relative"]) == ("ffn_norm", 1, None)


def test_a_capture_of_a_model_with_more_ids_or_positions_is_refused(
    llamac_command: Command, model_file: Callable[[str], Path], tmp_path: Path
) -> None:
    capture = read_capture(STORED)
    ids = (*capture.question.ids[:2], 505, *capture.question.ids[3:])
    given: tuple[tuple[dict[str, Any], str], ...] = (
        ({"ids": ids}, "of another model: its prompt has the token id 505, and the model's ids end at 300"),
        ({"new_tokens": 100}, "of another model: it has 112 positions, and the model 64"),
    )
    for changes, problem in given:
        write_capture(tmp_path / "c", replace(capture, question=replace(capture.question, **changes)))
        done = llamac_command("check", model_file("llama"), "--reference", tmp_path / "c")
        done.refuses_with(problem, "compare with a capture of the model's own directory")


def test_a_tolerance_of_zero_accepts_only_equal_numbers(
    llamac_command: Command, model_file: Callable[[str], Path]
) -> None:
    common = ("check", model_file("llama"), "--reference", STORED, "--threads", "1", "--tolerance", "0", "--json")
    done = llamac_command(*common)
    assert done.code == 1
    found = {rung["rung"]: rung for rung in json.loads(done.out)["rungs"]}
    assert not found[8]["is_within"]
    assert found[8]["worst"]["relative"] > 0


def test_fast_numerics_have_a_tolerance_and_are_named(
    llamac_command: Command, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model = tmp_path / "bf16.bin"
    export(folder("llama"), model, dtype="bf16", probe_source=None)
    common = ("check", model, "--threads", "1", "--numerics", "fast")
    with llamac.load(model, threads=1) as opened:
        write_capture(tmp_path / "c", numpy_capture(checkpoint_of(opened), cases()["llama"]))
    done = llamac_command(*common, "--reference", tmp_path / "c")
    assert (done.code, done.err) == (0, "")
    assert "KV cache in f32; fast numerics\n" in done.out
    assert "tolerance  0.25 of the largest number at the same position, for the median position: inputs" in done.out
    done = llamac_command(*common, "--reference", tmp_path / "c", "--tolerance", "0.0001")
    assert "the engine's arithmetic is not" in done.out
    assert "try --numerics exact" in done.out
    exact = llamac_command("check", model, "--threads", "1", "--reference", tmp_path / "c")
    assert exact.code == 0
    assert "KV cache in f32\n" in exact.out


def test_a_cache_in_q8_is_for_comparisons(llamac_command: Command, model_file: Callable[[str], Path]) -> None:
    model, q8 = model_file("llama"), ("--kv-dtype", "q8", "--threads", "1")
    done = llamac_command("check", model, "--reference", STORED, *q8)
    assert "KV cache in q8\n" in done.out
    assert "tolerance  0.25 " in done.out
    assert done.code == 0
    llamac_command("check", model, *q8).refuses_with("--kv-dtype q8 needs --against or --reference")


def shifted(capture: Capture) -> dict[tuple[str, int], Floats]:
    """The stages with a constant added to the values of layer 1, as a bias would."""
    return capture.stages | {("v", 1): capture.stages["v", 1] + np.float32(0.25)}


def test_the_command_refuses_contradictions(
    llamac_command: Command, model_file: Callable[[str], Path], tmp_path: Path
) -> None:
    model = model_file("llama")
    both = ("--against", "a", "--reference", "b")
    llamac_command("check", model, *both).refuses_with("--against and --reference")
    llamac_command("check", model, "--reference", STORED, "--capture", "c").refuses_with("--capture needs --against")
    llamac_command("check", model, "--tokens", "9").refuses_with("--tokens needs --against")
    llamac_command("check", model, "--json").refuses_with("--json needs")
    llamac_command("check", model, "--against", tmp_path).refuses_with("not a Hugging Face directory")
    llamac_command("check", "absent", "--against", model).refuses_with(f"is the file {model}", "llamac quality")
    llamac_command("check", model, "--reference", model).fails_with("safetensors")


def test_a_capture_replaces_no_file(
    llamac_command: Command, folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes before minutes of computing, for which this machine has no library."""
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "model.bin").write_bytes(b"precious")
    for path, problem in (
        (tmp_path / "model.bin", "exists: choose another name"),
        (tmp_path / "no" / "c", "no does not"),
    ):
        done = llamac_command("check", "stories", "--against", folder("llama"), "--capture", path)
        done.fails_with(problem)
    assert (tmp_path / "model.bin").read_bytes() == b"precious"


def test_another_model_is_not_compared(llamac_command: Command) -> None:
    done = llamac_command("check", "stories", "--reference", STORED, "--threads", "1")
    assert done.code == 1
    assert "cannot be compared: embedding of layer 0: the engine has (12, 256), the reference (12, 40)" in done.out


@pytest.mark.parametrize(("option", "value"), [("tolerance", "nan"), ("tolerance", "-1"), ("costs", "-1")])
def test_the_command_refuses_numbers_that_mean_nothing(
    llamac_command: Command, folder: Callable[[str], Path], option: str, value: str
) -> None:
    done = llamac_command("check", "stories", "--against", folder("llama"), f"--{option}", value)
    done.refuses_with(f"--{option} is {value}, expected a finite number that is 0 or more")


def test_a_missing_library_is_named(
    llamac_command: Command,
    model_file: Callable[[str], Path],
    folder: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    done = llamac_command("check", model_file("llama"), "--against", folder("llama"))
    done.fails_with("torch and transformers", 'pip install "llamac[parity]"', "--reference")


# ---- transformers


def divided_in_thirds(layer: int) -> Fault:
    """The matrix of a layer that has queries, keys and values head by head, read as all queries, then all keys, ..."""

    def plant(checkpoint: Checkpoint) -> Checkpoint:
        for kind in ("weight", "bias"):
            names = [f"layers.{layer}.attn_{part}.{kind}" for part in "qkv"]
            parts = [checkpoint.tensors[name].array() for name in names]
            heads = [part.reshape(checkpoint.config.n_heads, -1, *part.shape[1:]) for part in parts]
            whole = np.stack(heads, axis=1).reshape(-1, *parts[0].shape[1:])
            for name, part in zip(names, np.split(whole, 3), strict=True):
                checkpoint = changed(name, lambda _, part=part: part)(checkpoint)  # type: ignore[misc]
        return checkpoint

    return plant


@pytest.mark.parametrize("name", [*BASES, *VARIANTS])
def test_every_family_climbs_the_ladder_against_installed_transformers(
    model_file: Callable[[str], Path], folder: Callable[[str], Path], name: str
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    with llamac.load(model_file(name), kv_dtype="f32", threads=1) as model:
        capture = run_transformers(folder(name), make_question(model))
        report = check_parity(model, capture)
        assert set(capture.stages) == set(keys_in_order(model_config(model.file)))
        assert model_config(model.file).vocab_size == capture.stages["logits", 0].shape[1]
    assert report.is_within, report.first
    assert capture.problems == ()


def test_a_model_that_needs_no_rope_has_none_in_transformers_either(
    model_file: Callable[[str], Path], folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """transformers has a base of its own for the null of published configs."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    shutil.copytree(folder("olmo_hybrid"), tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config |= {"rope_parameters": None, "rope_theta": None}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    with llamac.load(model_file("olmo_hybrid"), kv_dtype="f32", threads=1) as model:
        report = check_parity(model, run_transformers(tmp_path / "hf", make_question(model)))
    assert report.is_within, report.first


# Faults of families whose modules compute attention themselves: (case, fault, where it shows first, its cause).
PLANTED: dict[str, tuple[str, Fault, Key, str]] = {
    "pairs of keys": ("falcon", changed("layers.1.attn_k.weight", to_neighbors(10)), ("k", 1), "wrong RoPE"),
    "a matrix divided head by head": (
        "falcon-multi_query",
        divided_in_thirds(1),
        ("q", 1),
        "the fused matrix of layer 1 was divided in thirds; it holds queries, keys and values head by head",
    ),
    "keys and values": (
        "falcon-new_decoder_architecture",
        both(*(exchanged(f"layers.1.attn_k.{kind}", f"layers.1.attn_v.{kind}") for kind in ("weight", "bias"))),
        ("k", 1),
        "layers.1.attn_k and layers.1.attn_v are exchanged",
    ),
    "branches one after the other": (
        "falcon-parallel_attn",
        recorded(0, placement="parallel"),
        ("ffn_norm", 0),
        "placement of layer 0 is parallel in the file; config.json gives pre",
    ),
    "a scale": (
        "gpt_neo",
        configured(attention_scale=0.3),
        ("weights", 0),
        "attention_scale is 0.3 in the file; config",
    ),
    "a window + 1": ("gpt_neo", recorded(1, window=8), ("weights", 1), "window of layer 1 is 8 in the file; config"),
    "a window too many": (
        "gpt_neo",
        recorded(0, window=7),
        ("weights", 0),
        "window of layer 0 is 7 in the file; config",
    ),
    "a matrix of values": (
        "gpt_neo",
        changed("layers.2.attn_v.weight", misread),
        ("v", 2),
        "layers.2.attn_v.weight is tr",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_of_attention_without_transformers_interface_is_named(
    folder: Callable[[str], Path], model_file: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    case, fault, stage, cause = PLANTED[name]
    with llamac.load(model_file(case), kv_dtype="f32", threads=1) as model:
        capture = run_transformers(folder(case), make_question(model))
    report = climb(tmp_path / "m.bin", capture, fault(hf.read(folder(case), [])))
    assert report.first is not None
    assert (report.first.stage, report.first.layer) == stage
    assert report.verdict is not None
    assert [one.sentence for one in report.verdict.causes if one.sentence.startswith(cause)]
    assert report.further == ()


@pytest.mark.parametrize("name", NAMES)
def test_stored_captures_are_those_of_installed_transformers(tmp_path: Path, name: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    stored, live = read_capture(FOLDER / f"{name}.safetensors"), captured(tmp_path, name)
    assert (stored.question, stored.config) == (live.question, live.config)
    for key, rows in live.stages.items():
        assert difference(key, stored.stages[key], rows, 0, LIMIT).is_within, key
    assert {way: one.ids for way, one in stored.chosen.items()} == {way: one.ids for way, one in live.chosen.items()}


def test_another_model_s_directory_is_refused(llamac_command: Command, folder: Callable[[str], Path]) -> None:
    """The prompt has tokens that this directory does not have."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    done = llamac_command("check", "stories", "--against", folder("mistral"))
    done.fails_with("cannot compute the prompt with", "another model's: index out of range")


def test_what_transformers_could_not_load_fails_the_first_rung(
    model_file: Callable[[str], Path], folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """transformers replaces missing tensors by random ones, and only mentions it."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    config = json.loads((folder("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    data = (folder("llama") / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data.replace(b"model.norm.weight", b"model.nurm.weight"))
    with llamac.load(model_file("llama"), kv_dtype="f32", threads=1) as model:
        report = check_parity(model, run_transformers(tmp_path, make_question(model)))
    assert not report.rungs[0].is_within
    assert report.rungs[0].problems == ("missing keys: model.norm.weight", "unexpected keys: model.nurm.weight")
    (tmp_path / "model.safetensors").write_bytes(data[:-1])
    with llamac.load(model_file("llama"), threads=1) as model, pytest.raises(ExportError, match="cannot load"):
        run_transformers(tmp_path, make_question(model))
