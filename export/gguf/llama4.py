"""Facts of Llama 4 that GGUF files do not state and llama.cpp fixes: chunks of positions, queries scaled by their
position, experts weighted before their networks, and norms of q and k without weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from llamac.export.checkpoint import LayerConfig

if TYPE_CHECKING:
    from llamac.export.gguf.keys import Keys

WINDOW_KEY, CHUNK = "attention.sliding_window", 8192
# Fields of the layers without RoPE.
SCALED_QUERIES: dict[str, Any] = {"query_beta": float(np.float32(0.1)), "query_context": 8192, "query_offset": 1}
UNNORMED_EXPERTS = 128  # a model with this number (Maverick) has no norms of q and k


def chunked_layers(keys: Keys, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """The layers with the fields that the metadata does not state. Their windows are chunks."""
    if keys.size(WINDOW_KEY, least=0) != CHUNK:
        keys.wrong(WINDOW_KEY, f"{CHUNK}, the chunks that llama.cpp computes; models without chunks are not supported")
    return tuple(
        replace(
            layer,
            window_chunks=int(layer.window > 0),
            expert_weights_first=int(layer.ffn == "experts"),
            **({} if layer.rope >= 0 else SCALED_QUERIES),
        )
        for layer in layers
    )


def has_norms(layers: tuple[LayerConfig, ...]) -> bool:
    """Whether q and k have norms."""
    return all(layer.n_experts != UNNORMED_EXPERTS for layer in layers)


def is_plain_norm(name: str) -> bool:
    """Whether a canonical tensor is the weight of a norm that has no weight in the file."""
    return name.endswith((".attn_q_norm.weight", ".attn_k_norm.weight"))
