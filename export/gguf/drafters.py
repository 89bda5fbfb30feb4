"""Drafters in GGUF files: EAGLE-3 heads, and Gemma 4's assistants.

A head is a block of LLaMA whose first norm is that of the embedding; the norm of the hidden state is a second one. Its
`d2t` has the ids of the tokens that it drafts, while checkpoints store their distances. An assistant is a Gemma 4 whose
blocks have neither keys nor values, and whose embedding is only the output matrix. llama.cpp does not use the clusters
of its tokens: an assistant from a GGUF file computes the logits of all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from llamac.errors import ExportError
from llamac.export.checkpoint import LazyTensor, ModelConfig
from llamac.export.drafters import ASSISTANT, EAGLE3, EAGLE_STATES, MAX_LAYER, as_assistant, checked_ids
from llamac.export.gguf.architecture import REQUIRED, Architecture
from llamac.export.gguf.families import ARCHITECTURES
from llamac.export.stored import INTEGERS

if TYPE_CHECKING:
    from llamac.export.gguf.file import Tensor
    from llamac.export.gguf.keys import Keys
    from llamac.format.gguf_metadata import Value

_LAYERS = ("target_layers", "extract_layers")  # the second in early files
IDS, STORED_IDS = "drafter.output_ids.weight", "d2t"
# llama.cpp's names of the tensors around the layers of each kind of drafter.
NAMES = {
    EAGLE3: {
        "drafter.in.weight": "fc.weight",
        "drafter.in_norm.weight": "enc.output_norm.weight",
        "drafter.embedding_norm.weight": "blk.0.attn_norm.weight",
    },
    ASSISTANT: {
        "drafter.in.weight": "nextn.pre_projection.weight",
        "drafter.out.weight": "nextn.post_projection.weight",
    },
}

DRAFTERS = {
    "eagle3": Architecture(
        EAGLE3,
        paired=True,
        drafter=EAGLE3,
        keys={
            **dict.fromkeys(_LAYERS),
            "target_hidden_size": REQUIRED,
            "norm_before_residual": False,
            "norm_before_fc": False,
        },
        names={"attn_norm": "attn_norm_2"},
    ),
    "gemma4-assistant": replace(
        ARCHITECTURES["gemma4"],
        family="gemma4_assistant",
        others=("gemma4_unified_assistant",),
        drafter=ASSISTANT,
        keys={**ARCHITECTURES["gemma4"].keys, "embedding_length_out": REQUIRED, "nextn_predict_layers": None},
        names={"output": "token_embd"},
        ignored=("masked_embd_centroids.weight", "masked_embd_ordering"),
    ),
}


def vocabulary_size(values: Mapping[str, Value], name: str) -> int:
    """The size of the vocabulary of a head that has no embedding.

    Raises:
        ExportError: If the file does not say it.
    """
    tokens = values.get("tokenizer.ggml.tokens")
    found = values.get(f"{name}.vocab_size", len(tokens) if isinstance(tokens, list) else None)
    if type(found) is not int or found < 1:
        raise ExportError(f"{name}.vocab_size is {found!r:.40}, expected the number of the model's tokens")
    return found


def drafter_fields(
    keys: Keys, row: Architecture, vocab_size: int, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """The fields of the config that only drafters have. vocab_size: of the model that it drafts for."""
    if row.drafter == ASSISTANT:
        return {"trunk_dim": keys.size("embedding_length_out")}
    if not row.drafter:
        return {}
    if keys.size("block_count") != 1:
        keys.wrong("block_count", "1: llama.cpp has no heads with more layers")
    key = next((key for key in _LAYERS if keys.value(key) is not None), _LAYERS[0])
    layers = keys.value(key)
    are_layers = isinstance(layers, list) and all(type(n) is int and 0 <= n <= MAX_LAYER for n in layers)
    if not are_layers or len(layers) != EAGLE_STATES:
        keys.wrong(key, f"the numbers of {EAGLE_STATES} layers, whose inputs the head reads")
    return {
        "drafter": EAGLE3,
        "trunk_dim": keys.size("target_hidden_size"),
        "eagle_layers": tuple(layers) if are_layers else (0,) * EAGLE_STATES,
        "eagle_vocab_size": shapes.get(STORED_IDS, (vocab_size,))[0],
        "eagle_normed": int(keys.flag("norm_before_residual") or False),
        "eagle_in_norm": "whole" if keys.flag("norm_before_fc") else "none",
    }


def as_drafter(model: ModelConfig, fields: Mapping[str, Any]) -> ModelConfig:
    """A model with the fields of a drafter.

    Raises:
        UnsupportedError: If it is an assistant that has parts that an assistant cannot have.
    """
    if "drafter" in fields:
        return replace(model, **fields)
    return as_assistant(model, fields["trunk_dim"], "embedding_length_per_layer_input, expert_count")


def drafted_ids(tensor: Tensor | None, model: ModelConfig) -> LazyTensor:
    """The ids of the tokens that a head drafts: all, if the file has no list of them.

    Raises:
        ExportError: If the list is not one of different ids in ascending order.
    """
    ids = np.arange(model.eagle_vocab_size)
    if tensor is not None:
        if len(tensor.shape) != 1 or tensor.type.name.lower() not in INTEGERS:
            raise ExportError(f"{STORED_IDS} is {tensor.type.name} {tensor.shape}, expected a vector of I64")
        ids = checked_ids(STORED_IDS, tensor.integers(), model.vocab_size)
    return LazyTensor.of(ids.astype(np.float32))
