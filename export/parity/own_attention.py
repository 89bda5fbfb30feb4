"""Notes the attention of modules that compute it themselves instead of calling transformers' attention function.

MPNet's modules have a matrix for each of queries, keys and values, and these are the stages. Falcon's and GPT-Neo's put
keys and values into the cache, and return the attention weights. Only their queries after RoPE are nowhere to be seen:
they are computed again from the matrix's output, with transformers' own functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

# Classes that split the heads of a matrix's output, and the attributes that are this matrix and the cache's layer.
SPLITTING = {"FalconAttention": ("query_key_value", "layer_idx"), "GPTNeoSelfAttention": ("q_proj", "layer_id")}
# The families that have these classes. Their only other way to compute attention shows no weights.
EAGER = ("falcon", "gpt_neo")


class Notebook(Protocol):
    """What receives the notes: `transformers_run.Calls`."""

    def note(self, stage: str, layer: int, tensor: Any) -> None:
        """Note the rows (1, m, ...) of a pass."""

    def note_weights(self, layer: int, weights: Any) -> None:
        """Note attention weights (1, heads, m, k)."""

    def note_attention(self, module: Any, query: Any, key: Any, value: Any, weights: Any) -> None:
        """Note a call of attention. query (1, heads, m, d); key and value (1, kv_heads, k, d), m <= k."""


def own_attention(module: Any) -> bool:
    """Whether a module computes attention itself."""
    return _has_matrices(module) or (type(module).__name__ in SPLITTING and hasattr(module, "_split_heads"))


def _has_matrices(module: Any) -> bool:
    """Whether its matrices are q, k, v and o, as MPNet's."""
    return all(hasattr(module, name) for name in ("q", "k", "v", "o", "dropout"))


def note_own_attention(notebook: Notebook, attention: Any, layer: int) -> list[Any]:
    """Note the stages of attention that does not call the attention function; returns the handles of the hooks."""
    note = _note_matrices if _has_matrices(attention) else _note_split
    return note(notebook, attention, layer)


def _note_matrices(notebook: Notebook, attention: Any, layer: int) -> list[Any]:
    def noting(stage: str) -> Callable[..., None]:
        return lambda _, args, output: notebook.note(stage, layer, output)

    handles = [getattr(attention, stage).register_forward_hook(noting(stage)) for stage in ("q", "k", "v")]
    weights = attention.dropout.register_forward_pre_hook(lambda _, args: notebook.note_weights(layer, args[0]))
    return [*handles, weights]


def _note_split(notebook: Notebook, attention: Any, layer: int) -> list[Any]:
    matrix, place = (getattr(attention, name) for name in SPLITTING[type(attention).__name__])
    products: list[Any] = []

    def of_attention(_: Any, args: tuple[Any, ...], options: dict[str, Any], output: tuple[Any, Any]) -> None:
        cached, query = options["layer_past"].layers[place], _queries(attention, products.pop(), options)
        # Falcon repeats keys and values for each head of queries
        step = cached.keys.shape[1] // getattr(attention, "num_kv_heads", cached.keys.shape[1])
        notebook.note_attention(attention, query, cached.keys[:, ::step], cached.values[:, ::step], output[1])

    return [
        matrix.register_forward_hook(lambda _, args, output: products.append(output)),
        attention.register_forward_hook(of_attention, with_kwargs=True),
    ]


def _queries(attention: Any, product: Any, options: dict[str, Any]) -> Any:
    """The queries (1, heads, m, d) after RoPE. product (1, m, ...): of the matrix."""
    if not hasattr(attention, "query_key_value"):
        return attention._split_heads(product, attention.num_heads, attention.head_dim)
    heads = attention._split_heads(product)[0].transpose(1, 2)
    rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    return rotate(heads, heads, *options["position_embeddings"])[0]
