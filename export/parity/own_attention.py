"""Notes the attention of modules that compute it themselves instead of calling transformers' attention function.

MPNet's modules have a matrix for each of queries, keys and values, and these are the stages. Those of Falcon, GPT-Neo,
BLOOM and MPT put keys and values into the cache, and return the attention weights. Only their queries are nowhere to be
seen: they are computed again from the matrix's output, with transformers' own functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


def _of_falcon(attention: Any, product: Any, options: dict[str, Any]) -> Any:
    heads = attention._split_heads(product)[0].transpose(1, 2)
    rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    return rotate(heads, heads, *options["position_embeddings"])[0]


def _of_gpt_neo(attention: Any, product: Any, options: dict[str, Any]) -> Any:
    return attention._split_heads(product, attention.num_heads, attention.head_dim)


def _of_bloom(attention: Any, product: Any, options: dict[str, Any]) -> Any:
    return attention._reshape(product)[0]


def _of_mpt(attention: Any, product: Any, options: dict[str, Any]) -> Any:
    return product.chunk(3, dim=2)[0].unflatten(2, (attention.n_heads, attention.head_dim)).transpose(1, 2)


@dataclass(frozen=True)
class _Splitting:
    """A class that splits the heads of a matrix's output.

    Attributes:
        matrix, place: The attributes that are this matrix and the cache's layer.
        queries: The queries (1, heads, m, d) after RoPE, from the module, the matrix's output (1, m, ...), and the
            options of the module's call.
        cache: The option that is the cache.
    """

    matrix: str
    place: str
    queries: Callable[[Any, Any, dict[str, Any]], Any]
    cache: str = "layer_past"


SPLITTING = {
    "FalconAttention": _Splitting("query_key_value", "layer_idx", _of_falcon),
    "GPTNeoSelfAttention": _Splitting("q_proj", "layer_id", _of_gpt_neo),
    "BloomAttention": _Splitting("query_key_value", "layer_idx", _of_bloom),
    "MptAttention": _Splitting("Wqkv", "layer_idx", _of_mpt, "cache"),
}
# The families that have these classes. They have no other way to compute attention, or one that shows no weights.
EAGER = ("falcon", "gpt_neo", "bloom", "mpt")


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
    splitting = SPLITTING.get(type(module).__name__)
    return _has_matrices(module) or (splitting is not None and hasattr(module, splitting.matrix))


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
    splitting = SPLITTING[type(attention).__name__]
    products: list[Any] = []

    def of_attention(_: Any, args: tuple[Any, ...], options: dict[str, Any], output: tuple[Any, Any]) -> None:
        cached = options[splitting.cache].layers[getattr(attention, splitting.place)]
        query = splitting.queries(attention, products.pop(), options)
        # Falcon repeats keys and values for each head of queries
        step = cached.keys.shape[1] // getattr(attention, "num_kv_heads", cached.keys.shape[1])
        notebook.note_attention(attention, query, cached.keys[:, ::step], cached.values[:, ::step], output[1])

    return [
        getattr(attention, splitting.matrix).register_forward_hook(lambda _, args, output: products.append(output)),
        attention.register_forward_hook(of_attention, with_kwargs=True),
    ]
