"""Gemma 4's assistants: directories of models that only draft, beside the model whose keys and values they read.

Their config has the language model's config in text_config. All layers read the keys and values of the other model and
have none of their own. They read its embeddings, too: an assistant's own embedding is only the output matrix. With
`use_ordered_embeddings`, the tokens of the output matrix form clusters, and each row computes the logits of a few.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from llamac.errors import ExportError, UnsupportedError
from llamac.export.checkpoint import LazyTensor, ModelConfig
from llamac.export.drafters import as_assistant
from llamac.export.hf.families_gemma4 import GEMMA4_TEXT, GEMMA4_UNIFIED_TEXT
from llamac.export.hf.family import Family, Module
from llamac.export.hf.keys import Keys
from llamac.export.stored import INTEGERS, StoredTensor, integers

ORDERING = "masked_embedding.token_ordering"
OUTPUT, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
CLUSTER_MULTIPLE = 16  # cluster sizes are multiples of this: whole strips of the output matrix
SHARED = "num_kv_shared_layers"
# The keys outside text_config, with transformers' defaults; backbone_hidden_size is required.
OWN: dict[str, Any] = {
    "backbone_hidden_size": None,
    "use_ordered_embeddings": False,
    "num_centroids": 2048,
    "centroid_intermediate_top_k": 32,
}


def _row(text: Family, model_type: str, architecture: str) -> Family:
    return replace(
        text,
        model_type=model_type,
        architectures=(architecture,),
        bare="",
        modules=(
            Module("pre_projection", ("drafter.in",)),  # in place of the embedding
            *text.modules[1:],
            Module("post_projection", ("drafter.out",)),
            Module("masked_embedding.centroids", ("drafter.clusters",), only="clusters"),
        ),
        written_as=text.model_type,
    )


DRAFTERS = {
    row.model_type: row
    for row in (
        _row(GEMMA4_TEXT, "gemma4_assistant", "Gemma4AssistantForCausalLM"),
        _row(GEMMA4_UNIFIED_TEXT, "gemma4_unified_assistant", "Gemma4UnifiedAssistantForCausalLM"),
    )
}


def text_of(values: dict[str, Any]) -> dict[str, Any]:
    """The config without the assistant's own keys, whose text shares no keys and values among its own layers."""
    found = {key: value for key, value in values.items() if key not in OWN}
    text = found.get("text_config")
    if isinstance(text, dict):
        layers = text.get("num_hidden_layers")
        if text.get(SHARED) not in (None, 0, layers):
            raise UnsupportedError(
                f"config.json: {SHARED} is {text[SHARED]!r}, expected num_hidden_layers ({layers!r}): all layers of an "
                "assistant read the keys and values of the model that it drafts for"
            )
        found["text_config"] = {key: value for key, value in text.items() if key != SHARED}
    return found


def with_trunk(model: ModelConfig, values: Mapping[str, Any]) -> ModelConfig:
    """The model as an assistant. values: config.json.

    Raises:
        UnsupportedError: If it has parts that an assistant cannot have.
        ExportError: If its own keys are wrong.
    """
    keys = Keys({key: values[key] for key in OWN if key in values})
    trunk_dim = keys.size("backbone_hidden_size", "dim", None)
    clusters: dict[str, Any] = {}
    if keys.flag("use_ordered_embeddings", False):
        n = keys.size("num_centroids", "n_clusters", OWN["num_centroids"])
        used = keys.size("centroid_intermediate_top_k", "clusters_used", OWN["centroid_intermediate_top_k"])
        if model.vocab_size % n or model.vocab_size // n % CLUSTER_MULTIPLE:
            keys.wrong(
                "num_centroids",
                f"a divisor of vocab_size ({model.vocab_size}) with a multiple of 16 tokens per cluster",
            )
        if used > n:
            keys.wrong("centroid_intermediate_top_k", f"at most num_centroids ({n})")
        clusters = {"n_clusters": n, "clusters_used": used}
    keys.finish(set(OWN))
    return replace(as_assistant(model, trunk_dim, "hidden_size_per_layer_input, enable_moe_block"), **clusters)


def prepared(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors with the output matrix under its own name, and without the order of the tokens."""
    found = {name: tensor for name, tensor in stored.items() if name != ORDERING}
    embedding = found.pop(EMBEDDING, None)
    if embedding is not None:
        found.setdefault(OUTPUT, embedding)
    return found


def in_clusters(
    model: ModelConfig, tensors: dict[str, LazyTensor], stored: Mapping[str, StoredTensor]
) -> dict[str, LazyTensor]:
    """The canonical tensors with the output matrix in the order of the clusters.

    Raises:
        ExportError: If the order is missing, or does not name each token once.
    """
    if not model.n_clusters:
        return tensors
    tensor = stored.get(ORDERING)
    wanted = f"expected the {model.vocab_size} token ids in the order of their clusters"
    if tensor is None or tensor.dtype not in INTEGERS or tensor.shape != (model.vocab_size,):
        found = "is missing" if tensor is None else f"is {tensor.dtype} {tensor.shape}"
        raise ExportError(f"the tensor {ORDERING} {found}, {wanted}")
    order = integers(tensor).astype(np.intp)
    if not np.array_equal(np.sort(order), np.arange(model.vocab_size)):
        raise ExportError(f"the tensor {ORDERING} has wrong numbers, {wanted}")
    ids = LazyTensor.of(order.astype(np.float32))
    return tensors | {
        "output.weight": tensors["output.weight"].in_order(order),
        "drafter.output_ids.weight": ids,
    }
