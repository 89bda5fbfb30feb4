"""Writes the files of sentence-transformers that surround a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from golden.tiny_checkpoints import random_tensor, write_safetensors

KINDS = "sentence_transformers.models."
TANH, IDENTITY = "torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity"


def modules(*kinds: str) -> list[dict[str, Any]]:
    return [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": KINDS + kind}
        for i, kind in enumerate(kinds)
    ]


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def write_dense(folder: Path, columns: int, rows: int, activation: str, bias: bool) -> None:
    config = {"in_features": columns, "out_features": rows, "bias": bias, "activation_function": activation}
    write_json(folder / "config.json", config)
    tensors = {"linear.weight": random_tensor(folder.name, (rows, columns))}
    if bias:
        tensors["linear.bias"] = random_tensor(folder.name, (rows,))
    write_safetensors(folder / "model.safetensors", tensors)
