"""What each tensor and each layer costs: the same as a file in which only they are quantized; errors; `check`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import llamac
from builders import checkpoint, gpt2_config, llama_config, some_ids, write_model
from captures import changed
from commands import Command
from golden.make_captures import FOLDER
from golden.parity_table import make_folder
from llamac.errors import ArgumentError
from llamac.export.convert import export
from llamac.export.hf import model as hf
from llamac.export.parity import transformers_run
from llamac.export.parity.capture import read_capture
from llamac.export.quality.measures import Reference
from llamac.export.quality.tensors import Cost, costs, layer_part, most, part_of

WINDOWS = [some_ids(20, 1)]


def measured(base: Path, model: Path, part: Callable[[str], str] = part_of) -> list[Cost]:
    with llamac.load(base, kv_dtype="f32") as one, llamac.load(model) as two, Reference(one, WINDOWS) as reference:
        return costs(one, two, reference, part)


def divergence(base: Path, out: Path, *quantized: str) -> float:
    """The divergence of a file in which only these tensors are q4."""
    export(base, out, dtype="f32", dtype_map=[(name, "q4") for name in quantized], probe_source=None, overwrite=True)
    with (
        llamac.load(base, kv_dtype="f32") as one,
        llamac.load(out, kv_dtype="f32") as two,
        Reference(one, WINDOWS) as reference,
    ):
        return reference.compare(two).kl_mean


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_costs_are_those_of_files_with_one_quantized_tensor_or_layer(family: str, tmp_path: Path) -> None:
    """GPT-2's output is tied: its embedding is quantized in both places."""
    made = checkpoint(gpt2_config() if family == "gpt2" else llama_config())
    base = write_model(tmp_path / "base.bin", made)
    model, one = tmp_path / "q4.bin", tmp_path / "one.bin"
    export(base, model, dtype="q4", pure=True, probe_source=None)
    found = {cost.name: cost for cost in measured(base, model)}
    assert list(found) == [name for name, tensor in made.tensors.items() if len(tensor.shape) == 2]
    for name in ("token_embedding.weight", "layers.1.attn_v.weight"):
        assert found[name].nats == divergence(base, one, name) > 0
    assert found["layers.1.attn_v.weight"][:3] == ("layers.1.attn_v.weight", 1, ("q4",))
    assert found["token_embedding.weight"].layer is None
    layers = {cost.name: cost for cost in measured(base, model, layer_part)}
    assert layers["layers.0"].nats == divergence(base, one, "layers.0.*")
    assert layers["layers.0"].bytes == sum(cost.bytes for cost in found.values() if cost.layer == 0)
    assert layers["token_embedding.weight"] == found["token_embedding.weight"]
    assert [cost.nats for cost in most(found.values(), 3)] == sorted((c.nats for c in found.values()), reverse=True)[:3]


def test_the_experts_of_a_layer_are_one_part() -> None:
    names = ("layers.3.experts.0.ffn_up.weight", "layers.3.experts.11.ffn_up.weight", "layers.3.ffn_router.weight")
    assert [part_of(name) for name in names] == ["layers.3.experts.*.ffn_up.weight"] * 2 + [names[2]]
    assert [layer_part(name) for name in (*names, "output.weight")] == ["layers.3"] * 3 + ["output.weight"]


def test_equal_models_have_no_costs_and_others_are_refused(tmp_path: Path) -> None:
    source = write_model(tmp_path / "base.bin", checkpoint(llama_config()))
    assert measured(source, source) == []
    other = write_model(tmp_path / "other.bin", checkpoint(llama_config(ffn=80)))
    with pytest.raises(ArgumentError, match=r"layers\.0\.ffn_gate\.weight is \(76, 48\) in the base, but \(80, 48\)"):
        measured(source, other)
    deeper = write_model(tmp_path / "deeper.bin", checkpoint(llama_config(n_layers=3)))
    with pytest.raises(ArgumentError, match=r"only the model has a tensor layers\.2\.attn_k\.weight"):
        measured(source, deeper)


# ---- the commands


def test_the_command_reports_layers_and_tensors(llamac_command: Command, source: Path, tmp_path: Path) -> None:
    model = tmp_path / "q4.bin"
    export(source, model, dtype="q4", probe_source=None)
    common = ("quality", model, "--against", source, "--tokens", 24, "--window", 12, "--cost-tokens", 14)
    [row] = json.loads(llamac_command(*common, "--tensors", "--json").out)["models"]
    assert [one["layer"] for one in row["layers"]] == [None, 0, 1, None]
    assert sorted({one["layer"] for one in row["tensors"] if one["layer"] is not None}) == [0, 1]
    assert len(row["tensors"]) == 2 * 7 + 2
    shown = llamac_command(*common, "--tensors").out
    largest = max(row["tensors"], key=lambda one: one["nats"])
    [table] = shown.split("tensor in MODEL's form\n")[1:]
    assert table.splitlines()[0].split()[-1] == largest["name"].removesuffix(".weight")
    only_layers = llamac_command(*common, "--layers").out
    assert "layer in MODEL's form" in only_layers
    assert "tensor in MODEL's form" not in only_layers
    llamac_command(*common, "--layers", "--cost-tokens", 1).refuses_with("--cost-tokens is 1")


def test_the_base_needs_no_name(llamac_command: Command, llama2c: Path, tmp_path: Path) -> None:
    """A conversion that is not kept has none, and one in the cache can get another one."""
    model = tmp_path / "q4.bin"
    export(llama2c, model, dtype="q4", probe_source=None)
    options = ("--no-cache", "--tokens", 9, "--layers", "--json")
    [row] = json.loads(llamac_command("quality", model, "--against", llama2c, *options).out)["models"]
    assert [one["name"] for one in row["layers"]] == ["token_embedding.weight", "layers.0", "layers.1"]
    assert all(one["nats"] > 0 for one in row["layers"])


@pytest.fixture
def checkpoint_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint. Without transformers: its answers are a stored capture's."""
    capture = read_capture(FOLDER / "llama.safetensors")
    monkeypatch.setattr(transformers_run, "run_transformers", lambda folder, question: capture)
    return make_folder(tmp_path, "llama")


def test_check_names_the_tensors_that_cost_most(
    llamac_command: Command, tmp_path: Path, checkpoint_folder: Path
) -> None:
    folder, model = checkpoint_folder, tmp_path / "q4.bin"
    export(folder, model, dtype="q4", probe_source=None, tokenizer=False)
    common = ("check", model, "--against", folder, "--threads", 1, "--tolerance", 9)
    done = llamac_command(*common)
    assert done.code == 0
    table = done.out.split("tensors that cost most")[1].splitlines()[1:]
    facts = json.loads(llamac_command(*common, "--json").out)
    assert [line.split()[-1] for line in table] == [one["name"] for one in facts["costs"]]
    nats = [one["nats"] for one in facts["costs"]]
    assert len(nats) == 5
    assert nats == sorted(nats, reverse=True)
    assert nats[-1] > 0
    assert "cost most" not in llamac_command(*common, "--costs", 0).out
    llamac_command("check", model, "--costs", 2).refuses_with("--costs needs --against")


def test_check_reports_without_costs_what_other_tensors_differ(
    llamac_command: Command, tmp_path: Path, checkpoint_folder: Path
) -> None:
    """The costs of models whose tensors differ cannot be measured; the comparison names the cause all the same."""
    folder, model = checkpoint_folder, tmp_path / "q8.bin"
    made = hf.read(folder, [])
    made.tensors = {name: tensor for name, tensor in made.tensors.items() if name != "layers.0.ffn_down.bias"}
    write_model(model, made, dtype="q8")
    common = ("check", model, "--against", folder, "--threads", 1)
    note = "costs not measured: only the base has a tensor layers.0.ffn_down.bias: costs need a model that was made "
    done = llamac_command(*common, "--tolerance", 1e-3)
    assert (done.code, done.err) == (1, "")
    assert "first difference: " in done.out
    assert f"note: {note}" in done.out
    facts = json.loads(llamac_command(*common, "--json", "--tolerance", 9).out)
    assert facts["is_within"]
    assert facts["costs"] == []
    assert facts["notes"][-1].startswith(note)


def test_check_names_only_quantized_tensors_as_costly(
    llamac_command: Command, tmp_path: Path, checkpoint_folder: Path
) -> None:
    folder, model = checkpoint_folder, tmp_path / "q8.bin"
    made = changed("rope.0.inv_freq", lambda rows: rows * np.float32(0.5))(hf.read(folder, []))
    write_model(model, made, dtype="q8")
    common = ("check", model, "--against", folder, "--threads", 1, "--json", "--costs", 99)
    costs = json.loads(llamac_command(*common).out)["costs"]
    assert len(costs) > 10
    assert [one["name"] for one in costs if one["dtypes"] != ["q8"]] == []
