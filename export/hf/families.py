"""The model families as Hugging Face stores them: one row each in one table, FAMILIES.

A row says which config keys a family has, what its graph is (docs/format.md), and its tensors: their canonical names,
their names in a checkpoint, and their layout. It is plain data: `config` and `model` read by it, `write` writes by it.
Every row is a constant of a module `families_*`, which the table finds by its type.

ENCODERS has the rows of models that do not generate, in the same form, and RERANKERS those of decoders that only score
pairs of texts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llamac.export.hf import (
    families_alike,
    families_classic,
    families_delta_net,
    families_encoder,
    families_experts,
    families_gated,
    families_gemma4,
    families_images,
    families_latent,
    families_layer_norm,
    families_mamba,
    families_rotary,
    families_routed,
    families_short_conv,
)
from llamac.export.hf.family import Family, Module
from llamac.export.hf.family_parts import HEAD as HEAD

# Modules whose constants are rows.
_MODULES = (
    *(families_gated, families_layer_norm, families_experts, families_delta_net, families_latent),
    *(families_routed, families_mamba, families_short_conv, families_images, families_gemma4),
    *(families_alike, families_classic),
)
_VARIANT_ROWS = [row for _, _, row in families_rotary.VARIANTS.values()]
FAMILIES = {row.model_type: row for module in _MODULES for row in vars(module).values() if isinstance(row, Family)}
ENCODERS = {
    row.model_type: row
    for module in (families_encoder, families_rotary)
    for name, row in vars(module).items()
    if isinstance(row, Family) and not name.startswith("_") and row not in _VARIANT_ROWS
}


def _reranker(family: Family) -> Family:
    """The row for the class whose output matrix gives one score instead of logits."""
    return replace(
        family,
        architectures=(family.architectures[0].replace("ForCausalLM", "ForSequenceClassification"),),
        bare="",
        modules=(*family.modules, Module("score", ("pooled.0",))),
        ignored=(*family.ignored, r"lm_head\..*"),
        scores_pairs=True,
    )


RERANKERS = {
    name: _reranker(FAMILIES[name]) for name in ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3")
}


def row_of(values: dict[str, Any]) -> Family | None:
    """The row of FAMILIES for a config.json, with images for its language model; None: the model_type is unknown."""
    family, text = FAMILIES.get(str(values.get("model_type"))), values.get("text_config")
    if family is None or not isinstance(text, dict):
        return family
    rows = family.other_texts
    return next((row for row in rows if text.get("model_type") == (row.text_type or row.model_type)), family)


# transformers' names of the engine's activations. The first of several names is the one to write.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu_erf",
    "gelu_python": "gelu_erf",
    "relu": "relu",
    "relu2": "relu2",
    "quick_gelu": "quick_gelu",
    "xielu": "xielu",
}
