"""A budget of bits: measured costs, the choice of formats, the map that repeats it, errors."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import llamac
from builders import checkpoint, llama_config, write_model
from commands import Command
from llamac.errors import ArgumentError, ExportError
from llamac.export.checkpoint import Checkpoint, LazyTensor
from llamac.export.convert import export
from llamac.export.dtypes import choose_dtypes
from llamac.export.quality.budget import LADDER, Budget, Choice, allocate, dtype_map
from llamac.export.quality.measures import Reference
from llamac.export.texts import built_in_text

ORDER = {dtype: number for number, dtype in enumerate((*LADDER, "f32"))}


@pytest.fixture(scope="module")
def made() -> Checkpoint:
    """A model two of whose matrices matter more than the others."""
    found = checkpoint(llama_config(dim=128, n_heads=4, n_layers=2, ffn=160))
    for name in ("layers.1.attn_out.weight", "layers.0.ffn_down.weight"):
        numbers = found.tensors[name].array()
        found.tensors[name] = LazyTensor.of(numbers * np.float32(4))
    return found


@pytest.fixture(scope="module")
def base(made: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("budget") / "base.bin", made)


@pytest.fixture(scope="module")
def choices(made: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Choice]]:
    return Budget(made).measure(built_in_text(), tmp_path_factory.mktemp("folder"), 1)


# ---- measuring


def test_costs_of_coarse_formats_are_measured_and_the_others_follow_the_errors(
    made: Checkpoint, base: Path, choices: dict[str, list[Choice]], tmp_path: Path
) -> None:
    name = "layers.1.attn_out.weight"
    found = {choice.dtype: choice for choice in choices[name]}
    assert list(found) == [*LADDER, "f32"]
    assert found["f32"].nats == 0
    sequences = Budget(made)._windows(built_in_text())
    assert sum(map(len, sequences)) == 256
    measured = {}
    errors = {}
    for dtype in ("q2", "q3", "q4s", "q6"):
        out = tmp_path / f"{dtype}.bin"
        export(base, out, dtype="f32", dtype_map=[(name, dtype)], probe_source=None)
        with (
            llamac.load(base, kv_dtype="f32") as one,
            llamac.load(out, kv_dtype="f32") as two,
            Reference(one, sequences) as reference,
        ):
            measured[dtype] = reference.compare(two).kl_mean
            errors[dtype] = ((two.file.tensor(name) - one.file.tensor(name)).astype(float) ** 2).sum()
    for dtype in ("q2", "q3", "q4s"):
        assert found[dtype].nats == pytest.approx(measured[dtype], rel=0.006)  # three digits
    assert found["q6"].nats == pytest.approx(measured["q4s"] * errors["q6"] / errors["q4s"], rel=0.006)
    assert found["q6"].nats == pytest.approx(measured["q6"], rel=0.5)  # the divergence grows with the squared error
    assert [choice.bytes for choice in choices[name]] == sorted(choice.bytes for choice in choices[name])


def test_only_weights_that_are_not_quantized_yet_can_be_kept(made: Checkpoint) -> None:
    tensors = {
        name: replace(tensor, dtype="q8") if name == "output.weight" else tensor
        for name, tensor in made.tensors.items()
    }
    budget = Budget(replace(made, tensors=tensors))
    assert budget.dtypes["output.weight"] == list(LADDER)
    assert budget.dtypes["layers.0.attn_q.weight"] == [*LADDER, "f32"]


def test_the_format_of_a_quantized_source_has_a_cost_because_quantizing_again_changes_it(
    made: Checkpoint, choices: dict[str, list[Choice]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "layers.0.ffn_down.weight"
    tensors = {**made.tensors, name: replace(made.tensors[name], dtype="q4s")}
    budget = Budget(replace(made, tensors=tensors))
    monkeypatch.setattr(budget, "parts", {name: [name]})
    assert budget.measure(built_in_text(), tmp_path, 1)[name] == choices[name][:-1]


# ---- spending


def random_parts(seed: int) -> dict[str, list[Choice]]:
    """Parts of different sizes whose costs do not even fall with every step."""
    draw = random.Random(seed)
    parts = {}
    for number in range(9):
        size, nats = draw.choice([16, 64, 300]), draw.choice([0.0, draw.random()])
        parts[f"layers.{number}.x"] = [
            Choice(dtype, size * bits // 4, nats * draw.random() / bits**2)
            for dtype, bits in (("q4s", 17), ("q4", 18), ("q6", 25), ("q8", 33), ("f32", 128))
        ]
    return parts


@pytest.mark.parametrize("seed", range(20))
def test_a_larger_budget_never_narrows_a_part_and_no_budget_is_exceeded(seed: int) -> None:
    parts = random_parts(seed)
    sizes = {part: {choice.dtype: choice.bytes for choice in found} for part, found in parts.items()}
    costs = {part: {choice.dtype: choice.nats for choice in found} for part, found in parts.items()}
    before: dict[str, str] | None = None
    for spare in (0, 1, 7, 50, 100, 101, 333, 1000, 5000, 10**6):
        chosen = allocate(parts, spare)
        assert chosen == allocate(parts, spare)
        spent = sum(sizes[part][dtype] - parts[part][0].bytes for part, dtype in chosen.items())
        assert spent <= spare
        if before is not None:
            assert all(ORDER[before[part]] <= ORDER[chosen[part]] for part in parts)
            assert all(costs[part][before[part]] >= costs[part][chosen[part]] for part in parts)
        before = chosen
    assert before is not None
    assert all(costs[part][dtype] == min(costs[part].values()) for part, dtype in before.items())


def test_bits_go_where_they_save_most() -> None:
    parts = {
        "cheap": [Choice("q4s", 10, 1.0), Choice("q4", 20, 0.5), Choice("q8", 40, 0.4)],
        "dear": [Choice("q4s", 10, 9.0), Choice("q4", 20, 8.9), Choice("q8", 40, 1.0)],
        "free": [Choice("q4s", 10, 0.0), Choice("q8", 40, 0.0)],
    }
    # dear: one step of 30 bytes saves 8.0; cheap: 10 bytes save 0.5, then 20 bytes 0.1
    for spare, expected in ((29, "q4s q4s"), (30, "q4s q8"), (39, "q4s q8"), (40, "q4 q8"), (60, "q8 q8")):
        chosen = allocate(parts, spare)
        assert f"{chosen['cheap']} {chosen['dear']}" == expected
        assert chosen["free"] == "q4s"


def test_the_map_names_every_matrix() -> None:
    made = checkpoint(llama_config(n_layers=3))
    budget = Budget(made)
    parts = list(budget.parts)
    chosen = {part: LADDER[number % 3] for number, part in enumerate(parts)}
    pairs = dtype_map(budget, chosen)
    dtypes = choose_dtypes(budget.tensors, "f32", dtype_map=pairs)
    assert {part: dtypes[part] for part in parts} == chosen
    same = dtype_map(budget, dict.fromkeys(parts, "q6"))
    assert ("layers.*.attn_q.weight", "q6") in same
    assert len(same) == 7 + 2


# ---- export


def test_a_file_keeps_its_budget_and_its_map_repeats_it(llamac_command: Command, base: Path, tmp_path: Path) -> None:
    files: dict[float, dict[str, str]] = {}
    bits_of = []
    for bits in (5.5, 8.0):
        out = tmp_path / f"{bits}.bin"
        report = export(base, out, dtype_map="auto", bits=bits, probe_source=None)
        assert bits - 1 < report.bits_per_weight <= bits
        bits_of.append(report.bits_per_weight)
        with llamac.load(out) as model:
            files[bits] = {record.name: record.dtype for record in model.file.tensors if len(record.shape) == 2}
    assert bits_of[0] < bits_of[1]
    assert all(ORDER[files[5.5][name]] <= ORDER[files[8.0][name]] for name in files[5.5])
    assert len(set(files[5.5].values())) > 1
    done = llamac_command("export", base, tmp_path / "cli.bin", "--dtype-map", "auto", "--bits", 5.5)
    assert (done.code, done.err) == (0, "")
    said = done.out.splitlines()[1]
    assert said.startswith("the same choice: --dtype ")
    options = said.removeprefix("the same choice: ").replace("'", "").split()
    assert llamac_command("export", base, tmp_path / "again.bin", *options).code == 0
    assert (tmp_path / "again.bin").read_bytes() == (tmp_path / "cli.bin").read_bytes()


def test_budgets_that_no_file_can_keep_are_refused_with_numbers(
    llamac_command: Command, base: Path, tmp_path: Path
) -> None:
    def refused(bits: float) -> str:
        with pytest.raises(ArgumentError) as caught:
            export(base, tmp_path / "out.bin", dtype_map="auto", bits=bits)
        return str(caught.value)

    text = refused(2)
    assert text.startswith("bits is 2, but files of this model have ")
    least, most = (float(word) for word in text.split() if word.replace(".", "").isdigit() and word != "2,")
    assert 2.5 < least < 3.5
    assert 32 <= most < 33
    assert refused(most + 1).startswith(f"bits is {most + 1:g}, but")
    for bits in (least, most):  # the numbers that the error names are budgets
        made = export(base, tmp_path / f"{bits}.bin", dtype_map="auto", bits=bits, probe_source=None)
        assert made.bits_per_weight <= bits
    out = tmp_path / "cli.bin"
    llamac_command("export", base, out, "--dtype-map", "auto", "--bits", "nan").refuses_with("--bits is nan")
    llamac_command("export", base, out, "--dtype-map", "auto").refuses_with("--dtype-map 'auto' needs --bits=B")
    llamac_command("export", base, out, "--bits", 5).refuses_with("--bits is for --dtype-map='auto'")
    both = ("--dtype-map", "auto", "--bits", 5)
    llamac_command("export", base, out, *both, "--dtype", "q4").refuses_with("--dtype has no effect")
    llamac_command("export", base, out, *both, "--to", "gguf").refuses_with("--bits is for flat files only")
    llamac_command("export", base, out, *both, "--no-tokenizer").fails_with("needs a tokenizer")
    assert not out.exists()
    (tmp_path / "empty").write_text("")
    with pytest.raises(ExportError, match=r"the text .* is empty"):
        export(base, out, dtype_map="auto", bits=5, bits_text=tmp_path / "empty")
