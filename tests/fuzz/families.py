"""Valid checkpoints of a few kilobytes: the samples from which the fuzzing of Hugging Face directories and GGUF files
starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gguf_samples import write_gguf

from fuzz.mutate import Parts
from golden.cases import CASES
from golden.family_cases import FAMILY_CASES
from golden.tiny_checkpoints import Config, Tensors, changed, random_tensor, write_safetensors
from llamac.export.hf import model as hf
from llamac.export.hf.config import parse_config
from llamac.export.hf.families import FAMILIES, HEAD

SMALL = {
    "vocab_size": 11,
    "hidden_size": 8,
    "n_embd": 8,
    "intermediate_size": 12,
    "n_inner": 12,
    "num_attention_heads": 2,
    "n_head": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "moe_intermediate_size": 12,
    "num_experts": 2,
    "num_local_experts": 2,
    "rotary_pct": 0.5,
    "partial_rotary_factor": 0.5,
}
NAMES = ("mistral", "qwen2", "gemma2", "phi3", "gpt_neox", "gpt2", "mixtral", "olmo2")
GGUF_NAMES = ("mistral-yarn", "gemma3_text", "phi3", "gpt_neox", "mixtral")


def _config(name: str) -> Config:
    config = {**CASES, **FAMILY_CASES}[name].config
    config = changed(config, **{key: value for key, value in SMALL.items() if key in config})
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict) and "short_factor" in scaling:
        config["rope_scaling"] = {**scaling, "short_factor": [1.0], "long_factor": [1.5]}
    return config


def _weights(config: Config) -> Tensors:
    """Random tensors with the names and shapes of the config's family."""
    parsed, family = parse_config(config, []), FAMILIES[config["model_type"]]
    shapes = hf.canonical_shapes(parsed.model)
    weights: Tensors = {}
    for module in (*family.modules, *(() if parsed.tied else (HEAD,))):
        for place in module.indices(parsed.model):
            for kind in module.kinds(parsed.biases):
                parts = [shapes[part] for part in module.part_names(kind, **place)]
                shape = parts[0] if module.shared else (sum(part[0] for part in parts), *parts[0][1:])
                heads = module.n_heads(parsed.model)
                shape = (shape[0] // heads, *shape[1:]) if heads > 1 else shape
                name = ("" if module is HEAD else family.prefix) + module.full_name(kind, **place)
                weights[name] = random_tensor(name, shape[::-1] if module.transposed else shape)
    return weights


def _stacked(weights: Tensors) -> Tensors:
    """The weights with the experts of a layer in three-dimensional tensors, as newer versions store them."""
    others = {name: values for name, values in weights.items() if ".experts." not in name}
    for layer in sorted({name.split(".experts.")[0] for name in weights if ".experts." in name}):
        count = sum(name.startswith(f"{layer}.experts.") for name in weights) // 3
        w1, w2, w3 = (np.stack([weights[f"{layer}.experts.{e}.w{i}.weight"] for e in range(count)]) for i in (1, 2, 3))
        others[f"{layer}.experts.gate_up_proj"] = np.concatenate([w1, w3], axis=1)
        others[f"{layer}.experts.down_proj"] = w2
    return others


def directories(folder: Path) -> Iterator[Parts]:
    """The contents of config.json and model.safetensors, for several families."""
    for name in (*NAMES, "stacked"):
        config = _config("mixtral" if name == "stacked" else name)
        weights = _weights(config)
        write_safetensors(folder / "sample", _stacked(weights) if name == "stacked" else weights)
        yield json.dumps(config).encode(), (folder / "sample").read_bytes()


def gguf_files(folder: Path) -> Iterator[Parts]:
    """GGUF files of several families."""
    for name in GGUF_NAMES:
        config = _config(name)
        write_gguf(folder / f"{name}.gguf", config, _weights(config))
        yield ((folder / f"{name}.gguf").read_bytes(),)
