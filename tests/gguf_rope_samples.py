"""RoPE in GGUF files, by the rules of llama.cpp's converter. See gguf_samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from golden.tiny_checkpoints import Config


def rope_scaling(config: Config) -> dict[str, Any]:
    """The RoPE scaling, with its type under the newer key "rope_type"."""
    scaling = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    scaling = dict(scaling.get("full_attention", scaling))
    return {"rope_type": scaling.pop("type", "default"), **scaling}


def rope_base(config: Config) -> float:
    """The base of the RoPE frequencies."""
    scaling = rope_scaling(config)
    base = float(scaling.get("rope_theta") or config.get("rope_theta") or config.get("rotary_emb_base") or 10000.0)
    if scaling.get("alpha"):
        dim = config["head_dim"]
        base *= scaling["alpha"] ** (dim / (dim - 2))
    return base


def llama3_factors(config: Config, scaling: Mapping[str, float]) -> NDArray[np.float32]:
    """The divisors of the RoPE frequencies of Llama 3.1 and its successors."""
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    factors = []
    for i in range(0, dim, 2):
        wave = 2 * math.pi * config["rope_theta"] ** (i / dim)
        if wave < original / high:
            factors.append(1.0)
        elif wave > original / low:
            factors.append(scaling["factor"])
        else:
            smooth = (original / wave - low) / (high - low)
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)
