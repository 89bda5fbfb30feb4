"""Encoders with RoPE in their authors' own form: experts of nomic-bert, and jina-embeddings-v3 with its adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nomic_moe_samples import BASE, DIM, IDS, LAYERS, MOE, VOCAB, moe_rows, moe_tensors
from numpy.typing import NDArray

import llamac
from golden.encoder_cases import ENCODER_CASES
from golden.make_encoders import encoder_checkpoint
from golden.tiny_checkpoints import random_tensor, write_safetensors
from hf_reading import parse
from llamac import ExportError, UnsupportedError
from llamac.export.hf import model as hf
from llamac.export.hf.safetensors_file import read_safetensors
from sentence_folders import write_json


def test_experts_of_nomic_bert(tmp_path: Path) -> None:
    folder, tensors = tmp_path / "moe", moe_tensors()
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", tensors)
    write_json(folder / "config.json", MOE)
    expected = moe_rows(tensors).mean(axis=0)
    llamac.export.export(folder, tmp_path / "moe.bin")
    with llamac.load(tmp_path / "moe.bin") as model:
        assert np.abs(model.embed(IDS) - expected / np.linalg.norm(expected)).max() < 1e-5
    llamac.export.export(folder, tmp_path / "q4.bin", dtype="q4")
    with llamac.load(tmp_path / "q4.bin") as model:
        assert 0.95 < float(model.embed(IDS) @ expected / np.linalg.norm(expected)) < 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_normalize_expert_weights": True}, "moe_normalize_expert_weights is True"),
        ({"expert_choice_router": True}, "expert_choice_router is True"),
        ({"num_shared_experts": 1}, "num_shared_experts is 1"),
        ({"moe_top_k": 5}, "moe_top_k is 5, expected at most the number of experts"),
        ({"moe_every_n_layers": 0}, "moe_every_n_layers is 0, expected an integer from 1"),
    ],
)
def test_other_experts_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((UnsupportedError, ExportError), match=message):
        parse({**MOE, **changes})


def write_adapter(folder: Path, tensors: dict[str, NDArray[np.float32]]) -> tuple[Path, dict[str, NDArray[np.float32]]]:
    """Write a PEFT directory for the embedding and some matrices. Returns it and the tensors with its changes."""
    factors: dict[str, NDArray[np.float32]] = {}
    changed = dict(tensors)
    for layer in range(LAYERS):
        for module, stored in (("self_attn.o_proj", "mixer.out_proj"), ("mlp.fc1", "mlp.fc1"), ("mlp.fc2", "mlp.fc2")):
            name = f"roberta.encoder.layers.{layer}.{stored}.parametrizations.weight.original"
            rows, columns = tensors[name].shape
            a, b = random_tensor(f"{name}.a", (4, columns)), random_tensor(f"{name}.b", (rows, 4))
            factors |= {f"layers.{layer}.{module}.lora_A.weight": a, f"layers.{layer}.{module}.lora_B.weight": b}
            changed[name] = tensors[name] + b @ a
    name = "roberta.embeddings.word_embeddings.parametrizations.weight.original"
    a, b = random_tensor(f"{name}.a", (4, VOCAB)), random_tensor(f"{name}.b", (DIM, 4))
    factors |= {f"embeddings.word_embeddings.lora_embedding_{x}": tensor for x, tensor in (("A", a), ("B", b))}
    changed[name] = tensors[name] + (b @ a).T
    folder.mkdir()
    write_safetensors(
        folder / "adapter_model.safetensors", {f"base_model.model.{key}": values for key, values in factors.items()}
    )
    targets = ["o_proj", "fc1", "fc2", "word_embeddings"]
    write_json(
        folder / "adapter_config.json", {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": targets}
    )
    return folder, changed


def test_jina_embeddings_v3_in_its_first_form(tmp_path: Path) -> None:
    """Its weights are parametrized by adapters of several tasks, which are left out, as without a task."""
    case = ENCODER_CASES["jina_embeddings_v3"]
    folder = encoder_checkpoint(tmp_path / "jina", case)
    expected = hf.read(folder, [])
    before = {name: tensor.array() for name, tensor in expected.tensors.items()}
    tensors = {}
    for name, stored in read_safetensors(folder / "model.safetensors").items():
        weight = stored.lazy().array()
        module = f"roberta.{name.removesuffix('.weight')}"
        if weight.ndim == 2:
            tensors[f"{module}.parametrizations.weight.original"] = weight
            tensors[f"{module}.parametrizations.weight.0.lora_A"] = random_tensor(name, (5, 4, weight.shape[1]))
            tensors[f"{module}.parametrizations.weight.0.lora_B"] = random_tensor(name, (5, weight.shape[0], 4))
        else:
            tensors[f"roberta.{name}"] = weight
    write_safetensors(folder / "model.safetensors", tensors)
    config = {key: value for key, value in case.config.items() if key != "rope_parameters"}
    config |= {"model_type": "xlm-roberta", "position_embedding_type": "rotary", "rotary_emb_base": BASE}
    config |= {"lora_adaptations": ["retrieval.query", "retrieval.passage"], "lora_rank": 4, "lora_alpha": 1}
    config |= {"load_trained_adapters": True, "use_reg_tokens": False, "use_flash_attn": True, "emb_pooler": None}
    for name in ("XLMRobertaModel", "XLMRobertaLoRA"):
        write_json(folder / "config.json", config | {"architectures": [name]})
        warnings: list[str] = []
        found = hf.read(folder, warnings)
        assert found.config == expected.config
        for key, values in before.items():
            np.testing.assert_array_equal(found.tensors[key].array(), values)
        [warning] = warnings
        assert "adapters of the tasks retrieval.query, retrieval.passage are left out" in warning
    adapter, changed = write_adapter(tmp_path / "adapter", tensors)
    llamac.export.export(folder, tmp_path / "base.bin")
    llamac.export.export(folder, tmp_path / "merged.bin", lora=[adapter])
    write_safetensors(folder / "model.safetensors", changed)
    llamac.export.export(folder, tmp_path / "changed.bin")
    with (
        llamac.load(tmp_path / "changed.bin") as model,
        llamac.load(tmp_path / "merged.bin") as merged,
        llamac.load(tmp_path / "base.bin") as base,
        llamac.load(tmp_path / "base.bin", lora=[adapter]) as attached,
    ):
        expected_vector = model.embed(case.ids)
        assert np.abs(merged.embed(case.ids) - expected_vector).max() < 1e-5
        assert np.abs(attached.embed(case.ids) - expected_vector).max() < 1e-5
        assert np.abs(base.embed(case.ids) - expected_vector).max() > 0.01
    write_json(folder / "config.json", config | {"use_reg_tokens": True})
    with pytest.raises(UnsupportedError, match="use_reg_tokens is True"):
        hf.read(folder, [])
