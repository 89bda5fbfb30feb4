"""Small hand-made adapters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from golden.tiny_checkpoints import write_safetensors

PREFIX = "base_model.model."


def small_adapter(
    folder: Path, fields: Mapping[str, Any] | None = None, tensors: dict[str, NDArray[np.float32]] | None = None
) -> Path:
    """Write an adapter of rank 2 and alpha 4.

    Args:
        folder: The adapter's directory.
        fields: Further fields of adapter_config.json.
        tensors: The tensors; by default A and B of a query matrix of the LLaMA case.

    Returns:
        The directory.
    """
    folder.mkdir(exist_ok=True)
    numbers = np.random.default_rng(3)
    name = f"{PREFIX}model.layers.0.self_attn.q_proj"
    if tensors is None:
        tensors = {
            f"{name}.lora_A.weight": numbers.standard_normal((2, 40)).astype(np.float32),
            f"{name}.lora_B.weight": numbers.standard_normal((40, 2)).astype(np.float32),
        }
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    values = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **(fields or {})}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder
