"""Sources of an export: files that need their directory, damaged numbers, models that a target cannot hold."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vocab_samples import tokenizer_json, write_json

import llamac
from builders import checkpoint, gpt2_config, llama_config
from golden.cases import CASES
from golden.tiny_checkpoints import tensors, write_checkpoint, write_safetensors
from llamac.errors import ExportError, UnsupportedError
from llamac.export.convert import export
from llamac.export.llama2c.write import write_llama2c
from torch_samples import write_torch

LLAMA, GPT2 = CASES["llama"].config, CASES["gpt2"].config

# ---- files of a directory


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_next_to_their_config_denote_the_directory(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", LLAMA)
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
        write_torch(folder / name, tensors(LLAMA))
    write_json(folder, tokenizer=tokenizer_json())
    export(folder, tmp_path / "folder.bin", probe_source=None)
    report = export(folder / name, tmp_path / "file.bin", probe_source=None)
    assert (tmp_path / "file.bin").read_bytes() == (tmp_path / "folder.bin").read_bytes()
    assert report.tokenizer == "model"


def test_unused_weights_of_a_directory_are_refused_with_advice(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", LLAMA)
    write_torch(folder / "pytorch_model.bin", tensors(LLAMA))
    for name in ("pytorch_model.bin", "config.json", "model-00001-of-00002.safetensors"):
        if not (folder / name).exists():
            (folder / name).write_bytes((folder / "model.safetensors").read_bytes())
        with pytest.raises(ExportError, match=r"pass the directory, .*model$"):
            export(folder / name, tmp_path / "out.bin")


def test_weights_without_a_config_are_refused_with_advice(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", tensors(LLAMA))
    write_torch(tmp_path / "pytorch_model.bin", tensors(LLAMA))
    write_torch(tmp_path / "consolidated.00.pth", tensors(LLAMA))
    for name in ("model.safetensors", "pytorch_model.bin", "consolidated.00.pth"):
        with pytest.raises(ExportError, match=r"holds only weights: pass a Hugging Face directory"):
            export(tmp_path / name, tmp_path / "out.bin")


def test_the_tokenizers_name_is_resolved_inside_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_json(write_checkpoint(tmp_path / "model", LLAMA), tokenizer=tokenizer_json())
    monkeypatch.chdir(folder)
    for given in (None, ".", "../model/../model"):
        report = export(".", tmp_path / "out.bin", tokenizer=given, probe_source=None, overwrite=True)
        assert report.tokenizer == "model"
        with llamac.load(tmp_path / "out.bin") as model:
            assert model.metadata["tokenizer"] == {"source": "model"}


# ---- numbers


def write_with(folder: Path, bits: int) -> Path:
    """A float32 LLaMA in which one number has these bits."""
    found = tensors(LLAMA)
    weight = found["model.layers.1.mlp.up_proj.weight"]
    weight.view("<u4")[3, 5] = bits
    write_checkpoint(folder, LLAMA)
    write_safetensors(folder / "model.safetensors", found)
    return folder


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FA00001, 0x7F800000, 0xFF800000])  # NaN, signalling NaN, infinities
@pytest.mark.parametrize("to", ["llamac", "hf", "q4", "no probes", "transformers"])
def test_tensors_that_are_not_finite_are_named(bits: int, to: str, tmp_path: Path) -> None:
    if to == "transformers":
        pytest.importorskip("transformers")
    folder = write_with(tmp_path / "model", bits)
    arguments: dict[str, dict[str, Any]] = {
        "llamac": {},
        "hf": {"to": "hf"},
        "q4": {"dtype": "q4"},
        "no probes": {"probe_source": None},
        "transformers": {"probe_source": "transformers"},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # NumPy's
        with pytest.raises(ExportError, match=r"tensor layers\.1\.ffn_up\.weight holds numbers that are not finite"):
            export(folder, tmp_path / "out", **arguments[to])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("number", "dtype"), [(3e38, "f32"), (3e38, "bf16"), (1e25, "f32")])
def test_weights_that_overflow_are_named(number: float, dtype: str, tmp_path: Path) -> None:
    folder = write_with(tmp_path / "model", int(np.float32(number).view(np.uint32)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(ExportError, match=r"overflows: the largest weight .*, in tensor layers\.1\.ffn_up\.weight"):
            export(folder, tmp_path / "out.bin", dtype=dtype)
    assert not (tmp_path / "out.bin").exists()


# ---- models that llama2.c cannot express


def test_a_model_of_another_family_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as caught:
        write_llama2c(checkpoint(gpt2_config()), tmp_path / "out.bin", [])
    assert str(caught.value) == (
        "llama2.c's format supports only LLaMA models; this one has norm layer, position learned,"
        " activation gelu_tanh, ffn plain"
    )


def test_problems_of_one_kind_share_a_line(tmp_path: Path) -> None:
    made = checkpoint(llama_config())
    layers = tuple(replace(layer, window=8) for layer in made.config.layers)
    made.config = replace(made.config, layers=layers)
    for index in range(2):
        made.tensors[f"layers.{index}.attn_q.bias"] = made.tensors["output_norm.weight"]
    with pytest.raises(UnsupportedError) as caught:
        write_llama2c(made, tmp_path / "out.bin", [])
    lines = str(caught.value).splitlines()
    assert sum("bias" in line for line in lines) == 1
    assert any("layers.0.attn_q.bias (and 1 more): llama2.c has no biases" in line for line in lines)
    assert any("layer 0 has window 8 (and 1 more): llama2.c's layers are" in line for line in lines)


def test_export_refuses_another_family_in_one_line(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", GPT2)
    with pytest.raises(UnsupportedError) as caught:
        export(folder, tmp_path / "out.bin", to="llama2c")
    assert "\n" not in str(caught.value)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "gpt2"
