"""Reads what differs between the layers of Gemma 4 in a GGUF file, and undoes what llama.cpp's converter did to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from llamac.errors import ExportError
from llamac.export.checkpoint import LayerConfig, ModelConfig
from llamac.export.shared_keys import with_shared_keys

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llamac.export.gguf.file import Tensor

KEYS: dict[str, object] = {
    "attention.key_length_swa": None,
    "attention.value_length_swa": None,
    "attention.shared_kv_layers": 0,
    "embedding_length_per_layer_input": 0,
    "rope.dimension_count_swa": None,
    "rope.freq_base_swa": None,
    "final_logit_softcapping": 0.0,
}
# The factor of RoPE frequencies that stands for no rotation.
UNROTATED = 1e30
_SCALE = "blk.{}.layer_output_scale.weight"
_OF_KEYS = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight", "attn_k.bias", "attn_v.bias")


class Keys(Protocol):
    """The metadata of an architecture, as `config` reads them."""

    def wrong(self, key: str, expected: str) -> None: ...
    def size(self, key: str, default: int = 1, least: int = 1) -> int: ...
    def sizes(self, key: str, n_layers: int) -> tuple[int, ...]: ...


def varied_layers(
    keys: Keys, layers: tuple[LayerConfig, ...], head_dim: int, n_heads: int, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[LayerConfig, ...], int, int]:
    """The layers with what differs between them, and the most KV heads and the largest width of a head.

    Args:
        keys: The metadata.
        layers: The layers without it.
        head_dim: The width of heads in layers that see all positions.
        n_heads: The number of heads.
        shapes: Shapes of the tensors by name.
    """
    n_kv_heads = keys.sizes("attention.head_count_kv", len(layers)) or (1,) * len(layers)
    of_windows = keys.size("attention.key_length_swa", head_dim)
    if keys.size("attention.value_length_swa", of_windows) != of_windows:
        keys.wrong("attention.value_length_swa", f"the same as attention.key_length_swa ({of_windows})")
    if any(n_heads % number for number in n_kv_heads):
        keys.wrong("attention.head_count_kv", f"divisors of attention.head_count ({n_heads})")
    widths = keys.sizes("feed_forward_length", len(layers)) or (1,) * len(layers)
    embedding = keys.size("embedding_length_per_layer_input", 0, least=0)
    head_dims = [of_windows if layer.window else head_dim for layer in layers]
    most, widest = max(n_kv_heads), max(head_dims)
    found = []
    for index, layer in enumerate(layers):
        layer = replace(
            layer,
            n_kv_heads=0 if n_kv_heads[index] == most else n_kv_heads[index],
            head_dim=0 if head_dims[index] == widest else head_dims[index],
            v_norm="head",
            v_is_k=int(f"blk.{index}.attn_v.weight" not in shapes),
            layer_embedding_dim=embedding,
        )
        if layer.ffn == "experts":
            layer = replace(layer, shared_ffn_dim=widths[index], expert_norms=1, expert_factors=1)
        found.append(layer)
    shared = with_shared_keys(found, min(keys.size("attention.shared_kv_layers", 0, least=0), len(layers) - 1))
    if shared is None:
        keys.wrong("attention.shared_kv_layers", "less: a kind of layers has no keys and values of its own")
    return tuple(shared or found), most, widest


def with_layer_scales(model: ModelConfig, tensors: Mapping[str, Tensor]) -> ModelConfig:
    """The model with the scales of its layers, which are tensors of one number."""
    layers = []
    for index, layer in enumerate(model.layers):
        tensor = tensors.get(_SCALE.format(index))
        if tensor is not None and tensor.shape != (1,):
            raise ExportError(f"the tensor {tensor.name} is {tensor.shape}, expected one number")
        layers.append(layer if tensor is None else replace(layer, layer_scale=float(tensor.vector().array()[0])))
    return replace(model, layers=tuple(layers))


def other_tensors(model: ModelConfig) -> Iterator[str]:
    """Tensors that are fields of the layers, and those that the graph does not use."""
    for index, layer in enumerate(model.layers):
        yield _SCALE.format(index)
        if layer.kv_source >= 0:
            yield from (f"blk.{index}.{name}" for name in _OF_KEYS)


def turned(inv_freq: NDArray[np.float32], factors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Frequencies divided by their factors; 0 where these stand for no rotation."""
    divided: NDArray[np.float32] = np.where(factors >= np.float32(UNROTATED), np.float32(0), inv_freq / factors)
    return divided
