"""`llamac inspect` and `llamac check`: what they print, and the errors for files that are not models."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llamac
from builders import bert_config, checkpoint, encoder, llama_config, write_model
from commands import GREEDY, Command
from golden.cases import CASES
from golden.tiny_checkpoints import write_checkpoint
from llamac import models
from llamac.cli.inspect import _gpu_lines, _graph_lines, _kind_lines, _tensor_lines
from llamac.export.checkpoint import LayerConfig
from llamac.export.convert import export

# ---- files that are not models


@pytest.mark.parametrize("command", ["run", "inspect", "check"])
@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (None, ["model.bin: No such file or directory"]),
        (b"", ["model.bin", "empty"]),
        (b"GGUF" + bytes(100), ["model.bin", "GGUF"]),
        (b"PK\3\4" + bytes(100), ["model.bin", "config.json"]),
        (b'\x30\0\0\0\0\0\0\0{"' + b" " * 100, ["model.bin", "Hugging Face directory"]),
        (b"version https://git-lfs.github.com/spec/v1", ["model.bin", "git lfs pull"]),
        (b"Once upon a time there was a text.", ["model.bin", "not a llamac file"]),
        (b"\x89llamac\n" + bytes(1000), ["model.bin"]),
    ],
    ids=["missing", "empty", "gguf", "zip", "safetensors", "pointer", "text", "zeros"],
)
def test_files_that_are_not_models_are_refused_in_one_line(
    llamac_command: Command, tmp_path: Path, command: str, content: bytes | None, parts: list[str]
) -> None:
    path = tmp_path / "model.bin"
    if content is not None:
        path.write_bytes(content)
    llamac_command(command, path, *(("-i", "a") if command == "run" else ())).fails_with(*parts)


@pytest.mark.parametrize("command", ["run", "inspect", "check"])
def test_directories_and_damaged_files_are_refused_in_one_line(
    llamac_command: Command, tiny_llama: Path, tmp_path: Path, command: str
) -> None:
    options = ("-i", "a") if command == "run" else ()
    llamac_command(command, tmp_path, *options).fails_with("is not a Hugging Face directory", "no config.json")
    data = bytearray(tiny_llama.read_bytes())
    (tmp_path / "short.bin").write_bytes(data[:-1])
    llamac_command(command, tmp_path / "short.bin", *options).fails_with("short.bin")
    data[40] ^= 1
    (tmp_path / "flipped.bin").write_bytes(data)
    llamac_command(command, tmp_path / "flipped.bin", *options).fails_with("flipped.bin", "header")


@pytest.mark.parametrize("command", ["run", "inspect", "check", "bench", "export"])
def test_the_error_for_other_files_lists_the_accepted_formats(
    llamac_command: Command, tmp_path: Path, command: str
) -> None:
    (tmp_path / "README.md").write_text("# A project\n\nThis is text, not a model.\n")
    done = llamac_command(command, tmp_path / "README.md", *(["out.bin"] if command == "export" else []))
    done.fails_with("README.md: not a llamac file", "GGUF", "llama2.c", "Hugging Face directory", "hf:ORG/NAME")
    assert "magic" not in done.err


@pytest.mark.parametrize("command", ["run", "inspect", "check"])
def test_pipes_and_devices_are_refused_in_one_line(llamac_command: Command, tmp_path: Path, command: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    llamac_command(command, tmp_path / "pipe").fails_with("pipe is not a regular file")
    llamac_command(command, "/dev/zero").fails_with("/dev/zero is not a regular file")


# ---- inspect

FILE_KEYS = {
    *("file", "file_bytes", "format_version", "numerics", "id", "metadata", "parameters", "bits_per_weight"),
    *("sections", "config", "layers", "rope", "tokenizer", "chat_template", "probes", "tensors"),
    "memory",
}
MACHINE_KEYS = {
    *("llamac", "python", "processor", "isa", "isa_reason", "isas", "threads", "threads_reason", "usable_cpus"),
    *("cgroup_quota", "physical_cores", "fast_cores", "openmp", "tiny_model_bytes", "gpu"),
}


def test_inspect_json_has_every_fact(llamac_command: Command, tiny_gpt2: Path) -> None:
    done = llamac_command("inspect", tiny_gpt2, "--json")
    assert (done.code, done.err) == (0, "")
    facts = json.loads(done.out)
    assert set(facts) == FILE_KEYS
    with llamac.load(tiny_gpt2) as model:
        assert facts["id"] == model.file.id
        assert facts["file_bytes"] == tiny_gpt2.stat().st_size
        tensors = model.file.tensors
        assert [tensor["name"] for tensor in facts["tensors"]] == [tensor.name for tensor in tensors]
        assert facts["parameters"] == sum(int(np.prod(tensor.shape)) for tensor in tensors)
        assert facts["bits_per_weight"] == round(8 * model.weight_bytes / facts["parameters"], 3)
    assert facts["config"]["dim"] == 40
    assert [layer["ffn_dim"] for layer in facts["layers"]] == [70, 70]
    assert facts["tokenizer"]["ids"] == 284
    assert (facts["chat_template"], facts["probes"]) == (False, None)


def test_inspect_shows_the_architecture(llamac_command: Command, tiny_llama: Path) -> None:
    text = llamac_command("inspect", tiny_llama).out
    for part in (
        "2 layers of 48, 6 heads (2 KV) of 8",
        "FFN gated 76",
        "context     600 positions",
        "301 (284 with a token)",
    ):
        assert part in text
    assert "layers.*.attn_q.weight" in text
    assert "layers.1.attn_q.weight" not in text
    assert "layers.1.attn_q.weight" in llamac_command("inspect", tiny_llama, "--tensors").out


def test_inspect_shows_each_kind_of_layer() -> None:
    config = {"dim": 48, "n_heads": 6, "n_kv_heads": 2, "head_dim": 8, "tied_output": 1, "norm": "rms"}
    config |= {"two_sided": 0, "scores_pairs": 0}
    config |= {"norm_eps": 1e-5, "position": "rope", "activation": "silu", "context": 600, "drafter": "none"}
    layers = [
        LayerConfig("gated", 76, window=32),
        LayerConfig("gated", 76, window=32),
        LayerConfig("gated", 152, n_kv_heads=1, head_dim=16, kv_source=1),
        LayerConfig("experts", 16, mixer="short_conv", n_experts=8, n_experts_used=2, shared_ffn_dim=24),
    ]
    assert _graph_lines(config, list(map(vars, layers)))[:4] == [
        "shape       4 layers of 48",
        "            2 x 6 heads (2 KV) of 8, window 32, FFN gated 76",
        "            1 x 6 heads (1 KV) of 16, keys of an earlier layer, FFN gated 152",
        "            1 x short_conv, FFN experts 16 (2 of 8), shared 24",
    ]


def test_inspect_wraps_lines_at_the_width_of_the_terminal(
    llamac_command: Command, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = llamac_command("inspect", tiny_llama).out
    monkeypatch.setenv("COLUMNS", "40")
    lines = llamac_command("inspect", tiny_llama).out.splitlines()
    path = str(tiny_llama)
    assert all(len(line) <= 40 or path in line for line in lines)
    assert " ".join(" ".join(lines).split()) == " ".join(wide.split())


@pytest.mark.parametrize("lines", [_kind_lines, _tensor_lines])
def test_inspect_aligns_tensors_with_long_names(lines: Callable[[dict[str, Any]], list[str]]) -> None:
    names = ["output.weight", "layers.0.layer_embedding_post_norm.weight"]
    found = lines({"tensors": [{"name": name, "dtype": "f32", "shape": [4], "bytes": 16} for name in names]})
    assert len({line.index(" f32 ") for line in found}) == 1


def test_inspect_and_check_know_that_an_encoder_has_no_logits(llamac_command: Command, tmp_path: Path) -> None:
    path = write_model(tmp_path / "bert.bin", encoder(bert_config()), pooling="cls")
    assert "output\n" not in llamac_command("inspect", path).out
    assert "probes     none: an encoder has no logits to compare\n" in llamac_command("check", path).out


def test_inspect_plans_the_memory(llamac_command: Command, tiny_llama: Path) -> None:
    for options, context in (((), 600), (("--context", "70"), 70), (("--context", "5000"), 600)):
        text = llamac_command("inspect", tiny_llama, *options).out
        with llamac.load(tiny_llama) as model:
            plan = model.plan_memory(context=context)
        assert f"\nmemory      {plan.summary()}\n" in text
        memory = json.loads(llamac_command("inspect", tiny_llama, "--json", *options).out)["memory"]
        assert memory == {**plan.as_dict(), "text": plan.summary()}
        assert memory["total"] == sum(
            memory[part] for part in ("weights", "tokenizer", "activations", "logits", "kv", "adapters", "draft")
        )
    llamac_command("inspect", tiny_llama, "--context", "0").refuses_with("--context is 0, expected at least 1")


@pytest.mark.filterwarnings("ignore:.* has no tokenizer")
def test_inspect_plans_the_memory_of_a_source_as_its_conversion(
    llamac_command: Command, tmp_path: Path, cache_folder: Path
) -> None:
    source = write_checkpoint(tmp_path / "hf", CASES["llama"].config)
    planned = json.loads(llamac_command("inspect", source, "--json").out)["memory"]
    with llamac.load(source) as model:
        plan = model.plan_memory(context=64)
    assert planned == {**plan.as_dict(), "text": plan.summary()}


def test_inspect_without_a_model_describes_the_machine(
    llamac_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LLAMAC_ISA", raising=False)
    facts = json.loads(llamac_command("inspect", "--json").out)
    assert set(facts) == MACHINE_KEYS
    assert facts["llamac"] == llamac.__version__
    assert facts["gpu"]["devices"] or facts["gpu"]["problem"]
    text = llamac_command("inspect").out
    assert facts["threads_reason"] in text
    assert f"{facts['isa']}: {facts['isa_reason']}" in text
    assert facts["isa_reason"] == "the best that this processor runs"
    monkeypatch.setenv("LLAMAC_ISA", "scalar")
    facts = json.loads(llamac_command("inspect", "--json").out)
    assert (facts["isa"], facts["isa_reason"]) == ("scalar", "LLAMAC_ISA selects it")
    monkeypatch.setenv("LLAMAC_ISA", "sse9")
    llamac_command("inspect").refuses_with("LLAMAC_ISA is 'sse9'")


@pytest.mark.parametrize(("problem", "last"), [("", ""), ("no driver", "none that --device cuda can use: no driver")])
def test_inspect_shows_gpus_and_what_keeps_them_from_being_used(problem: str, last: str) -> None:
    card = {"number": 0, "name": "Card", "memory_bytes": 5 << 20, "capability": (9, 0)}
    facts = {"devices": [card, {**card, "number": 1}], "driver": "13.0", "cupy": None, "problem": problem}
    assert _gpu_lines(facts) == [
        "GPU        cuda:0, Card, 5 MiB, compute capability 9.0",
        "           cuda:1, Card, 5 MiB, compute capability 9.0",
        "           driver for CUDA 13.0, no CuPy",
        *([f"           {last}"] if problem else []),
    ]


# ---- check


def flipped(path: Path, section: str, out: Path, tensor: str | None = None) -> Path:
    """Write a copy with one bit changed in a section or in a tensor."""
    with llamac.load(path) as model:
        record: Any = model.file.sections[section]
        if tensor is not None:
            record = next(record for record in model.file.tensors if record.name == tensor)
    data = bytearray(path.read_bytes())
    data[record.offset + record.bytes // 2] ^= 4
    out.write_bytes(data)
    return out


def test_check_passes_an_undamaged_file(llamac_command: Command, tiny_llama: Path) -> None:
    done = llamac_command("check", tiny_llama, "--data")
    assert (done.code, done.err) == (0, "")
    assert [line.split()[:2] for line in done.out.splitlines()] == [
        ["structure", "ok:"],
        ["texts", "ok:"],
        ["data", "ok:"],
        ["probes", "none:"],
    ]


def test_check_names_a_damaged_tensor(llamac_command: Command, tiny_llama: Path, tmp_path: Path) -> None:
    path = flipped(tiny_llama, "data", tmp_path / "damaged.bin", "layers.1.ffn_up.weight")
    done = llamac_command("check", path, "--data")
    assert (done.code, done.err) == (1, "")
    damaged = [line for line in done.out.splitlines() if "DAMAGED" in line]
    assert len(damaged) == 1
    assert "tensor layers.1.ffn_up.weight: its SHA-256 does not match" in damaged[0]


def test_check_names_a_damaged_section(llamac_command: Command, tiny_llama: Path, tmp_path: Path) -> None:
    done = llamac_command("check", flipped(tiny_llama, "tokenizer", tmp_path / "damaged.bin"))
    assert done.code == 1
    assert re.fullmatch(r"llamac: error: .*damaged\.bin: section tokenizer: [^\n]*SHA-256[^\n]*\n", done.err)


def test_inspect_describes_rope_tokenizer_and_probes(llamac_command: Command, tmp_path: Path) -> None:
    def facts_of(path: object) -> tuple[dict[str, object], str]:
        return json.loads(llamac_command("inspect", path, "--json").out), llamac_command("inspect", path).out

    facts, text = facts_of("stories")
    assert facts["rope"] == [{"kind": "default", "dim": 32, "original_context": 0, "attention_factor": 1.0}]
    assert facts["probes"] == {"source": "llamac-numpy"}
    assert "rope        default scaling; one table; 32 dimensions, factor 1\n" in text
    assert "probes      reference by llamac-numpy\n" in text
    assert "tokenizer   spm, " in text
    facts, text = facts_of("stories-gpt2")
    assert facts["rope"] == []
    assert "rope" not in text
    assert "tokenizer   bpe, " in text

    for name, kind in (
        ("llama-longrope", "longrope"),
        ("llama-linear", "linear"),
        ("llama-rope_parameters", "default"),
    ):
        write_checkpoint(tmp_path / name, CASES[name].config)
        export(tmp_path / name, tmp_path / f"{name}.bin", probe_source=None)
        facts, text = facts_of(tmp_path / f"{name}.bin")
        assert f"rope        {kind} scaling; " in text
        assert ("a short table up to 16 positions, a long one beyond" in text) == (kind == "longrope")
        assert (facts["probes"], facts["tokenizer"]) == (None, None)
        assert "probes      none\n" in text
        assert "tokenizer   none; " in text
    facts, text = facts_of(write_model(tmp_path / "plain.bin", checkpoint(llama_config())))
    assert "rope        one table; 8 dimensions, factor 1\n" in text


def test_inspect_shows_models_with_a_damaged_tokenizer(llamac_command: Command, tmp_path: Path) -> None:
    for data in (b"{", b"[]", b'{"decoder": 5}', b'{"decoder": {"type": "Sequence", "decoders": 3}}', b"\xff"):
        made = checkpoint(llama_config())
        assert made.tokenizer is not None
        made.tokenizer = (data, *made.tokenizer[1:])
        path = write_model(tmp_path / "odd.bin", made)
        assert "tokenizer   unknown, " in llamac_command("inspect", path).out


def test_check_names_the_source_of_the_reference(llamac_command: Command) -> None:
    assert llamac_command("check", "stories").out.endswith(" of the largest logit, reference by llamac-numpy\n")


def test_inspect_tensors_needs_a_model(llamac_command: Command) -> None:
    llamac_command("inspect", "--tensors").refuses_with("--tensors", "llamac inspect stories --tensors")
    assert "layers.1.attn_q.weight" in llamac_command("inspect", "stories", "--tensors").out


def test_built_in_models_run_by_name(llamac_command: Command) -> None:
    for name in models.NAMES:
        by_name = llamac_command("run", name, "-i", "Once", *GREEDY, "-n", 12, "-q")
        assert by_name.code == 0
        assert by_name == llamac_command("run", models.path(name), "-i", "Once", *GREEDY, "-n", 12, "-q")
        assert llamac_command("check", name).code == 0
    llamac_command("run", "stories-llama").fails_with("stories-llama: No such file or directory")
