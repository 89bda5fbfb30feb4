"""Reads and writes what differs between the layers of Gemma 4 in a GGUF file, as llama.cpp's converter stores it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from llamac.errors import ExportError
from llamac.export.checkpoint import LayerConfig, LazyTensor, ModelConfig
from llamac.export.shared_keys import with_shared_keys

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llamac.export.gguf.file import Tensor
    from llamac.export.gguf.keys import Keys

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


def varied_layers(
    keys: Keys,
    layers: tuple[LayerConfig, ...],
    head_dim: int,
    n_heads: int,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    is_assistant: bool,
) -> tuple[tuple[LayerConfig, ...], int, int]:
    """The layers with what differs between them, and the most KV heads and the largest width of a head.

    Args:
        keys: The metadata.
        layers: The layers without it.
        head_dim: The width of heads in layers that see all positions.
        n_heads: The number of heads.
        shapes: Shapes of the tensors by name.
        is_assistant: Whether all layers read the keys and values of another model.
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
    n_shared = keys.size("attention.shared_kv_layers", 0, least=0)
    if is_assistant and n_shared not in (0, len(layers)):
        keys.wrong("attention.shared_kv_layers", f"block_count ({len(layers)}): an assistant has no keys of its own")
    shared = with_shared_keys(found, 0 if is_assistant else min(n_shared, len(layers) - 1))
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


# ---- writing


def varied_keys(config: ModelConfig) -> dict[str, Any]:
    """The keys that `varied_layers` reads, and those of windows, which llama.cpp requires as a list."""
    layers = config.layers
    n_kv_heads = [layer.n_kv_heads or config.n_kv_heads for layer in layers]
    head_dims = {layer.window > 0: layer.head_dim or config.head_dim for layer in layers}
    widths = [layer.shared_ffn_dim or layer.ffn_dim for layer in layers]
    keys: dict[str, Any] = {
        "attention.head_count_kv": n_kv_heads[0] if len(set(n_kv_heads)) == 1 else n_kv_heads,
        "attention.shared_kv_layers": sum(layer.kv_source >= 0 for layer in layers),
        "attention.sliding_window": max(layer.window for layer in layers) or config.context,
        "attention.sliding_window_pattern": [layer.window > 0 for layer in layers],
        "embedding_length_per_layer_input": layers[0].layer_embedding_dim,
        "feed_forward_length": widths[0] if len(set(widths)) == 1 else widths,
    }
    for name in ("attention.key_length", "attention.value_length"):
        keys |= {name: head_dims.get(False, config.head_dim), f"{name}_swa": head_dims.get(True, config.head_dim)}
    return keys


def obstacles(config: ModelConfig) -> Iterator[str]:
    """The reason why llama.cpp cannot compute layers that share keys: it fixes the layers whose keys they read."""
    first = next((index for index, layer in enumerate(config.layers) if layer.kv_source >= 0), 0)
    for index, layer in enumerate(config.layers):
        expected = first - (2 if layer.window else 1)
        if layer.kv_source not in (-1, expected):
            yield f"layers.{index} must share the keys of layer {expected}, but shares those of {layer.kv_source}"
            return


def scale_tensors(config: ModelConfig) -> dict[str, LazyTensor]:
    """The scales of the layers as tensors of one number."""
    return {
        _SCALE.format(index): LazyTensor.of(np.array([layer.layer_scale], np.float32))
        for index, layer in enumerate(config.layers)
    }


def factors_of(inv_freq: NDArray[np.float32], powers: NDArray[np.float32], close: float) -> NDArray[np.float32]:
    """The factors by which `turned` divides the frequencies of a base.

    Args:
        inv_freq: The model's frequencies.
        powers: Those of the base.
        close: A relative difference from 1 that does not count.
    """
    is_turned = inv_freq > 0
    factors = np.divide(powers, inv_freq, out=np.full_like(powers, UNROTATED), where=is_turned)
    if np.allclose(factors[is_turned], 1, rtol=close, atol=0):
        factors[is_turned] = 1
    return factors


def unscaled(tensor: LazyTensor, number: float) -> LazyTensor:
    """The inverse of `LazyTensor.times`. Of what `times` returns, the same product gives the same bits again."""
    factor = np.float32(number)

    def read(first: int, last: int) -> NDArray[np.float32]:
        found = tensor.read(first, last)
        exact: NDArray[np.float32] = (found.astype(np.float64) / np.float64(factor)).astype(np.float32)
        for step in (np.float32(np.inf), np.float32(-np.inf)):
            near = np.nextafter(exact, step)
            exact = np.where((exact * factor != found) & (near * factor == found), near, exact)
        return exact

    return LazyTensor(tensor.shape, "f32", read)
