"""Reads the keys of config.json by which the layers of Gemma 4 differ: heads, shared keys and values, embeddings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llamac.export.checkpoint import LayerConfig
from llamac.export.hf.keys import LIMITS, Keys
from llamac.export.hf.rope import FULL, SLIDING
from llamac.export.shared_keys import with_shared_keys

LAYER_VOCABULARY = "vocab_size_per_layer_input"
OVERRIDES = {"num_key_value_heads": "n_kv_heads", "head_dim": "head_dim"}


@dataclass(frozen=True)
class Heads:
    """The heads of keys and values in a layer."""

    n_kv_heads: int
    head_dim: int


def kind_of(layer: LayerConfig) -> str:
    """The kind of a layer: FULL or SLIDING."""
    return SLIDING if layer.window else FULL


def heads_by_kind(
    keys: Keys, row: Mapping[str, Any], layers: Sequence[LayerConfig], usual: Heads, n_heads: int
) -> dict[str, Heads]:
    """The heads of each kind of layers. usual: those of layers with a window.

    transformers saves them as `per_layer_config`, which takes precedence.
    """
    width = keys.size("global_head_dim", "head_dim", row["global_head_dim"])
    own = keys.size("num_global_key_value_heads", "n_kv_heads", usual.n_kv_heads, nullable=True)
    full = Heads(own if keys.flag("attention_k_eq_v", row["attention_k_eq_v"]) else usual.n_kv_heads, width)
    given = keys.value("per_layer_config")
    found = {FULL: full, SLIDING: usual} if given is None else _overridden(keys, given, layers, usual)
    if any(n_heads % heads.n_kv_heads for heads in found.values()):
        keys.wrong("num_global_key_value_heads", f"a divisor of num_attention_heads ({n_heads})")
    return found


def _overridden(keys: Keys, given: Any, layers: Sequence[LayerConfig], usual: Heads) -> dict[str, Heads]:
    """The heads that an object with other values for some layers describes."""
    found: dict[str, set[Heads]] = {FULL: set(), SLIDING: set()}
    others = given if isinstance(given, dict) else {}
    numbered = {name: values for name, values in others.items() if re.fullmatch("[0-9]{1,9}", name)}
    by_layer = {int(name): values for name, values in numbered.items() if _are_heads(values)}
    n_read = len(by_layer)
    for index, layer in enumerate(layers):
        values = {OVERRIDES[key]: value for key, value in by_layer.pop(index, {}).items()}
        found[kind_of(layer)].add(replace(usual, **values))
    n_read -= len(by_layer)
    if not isinstance(given, dict) or n_read < len(given) or any(len(heads) > 1 for heads in found.values()):
        names = " and ".join(OVERRIDES)
        keys.wrong("per_layer_config", f"{names} of some of {len(layers)} layers, equal for layers of one kind")
        return {FULL: usual, SLIDING: usual}
    return {kind: next(iter(heads), usual) for kind, heads in found.items()}


def _are_heads(values: Any) -> bool:
    """Whether a layer's other values are numbers of its heads."""
    return isinstance(values, dict) and all(
        key in OVERRIDES and type(value) is int and 1 <= value <= LIMITS[OVERRIDES[key]]
        for key, value in values.items()
    )


def varied_layers(
    keys: Keys, row: Mapping[str, Any], layers: list[LayerConfig], heads: Mapping[str, Heads]
) -> list[LayerConfig]:
    """The layers with their heads, and with the source of their keys and values."""
    largest = largest_heads(heads)
    k_is_v = keys.flag("attention_k_eq_v", row["attention_k_eq_v"])
    n_shared = keys.integer("num_kv_shared_layers", 0, len(layers) - 1) or 0
    shared = with_shared_keys(layers, n_shared)
    if shared is None:
        keys.wrong("num_kv_shared_layers", "less: a kind of layers has no keys and values of its own")
        return layers
    is_wide = keys.flag("use_double_wide_mlp", row["use_double_wide_mlp"])
    embedding_dim, experts = _layer_embedding_dim(keys, row), _experts(keys, row)
    found = []
    for layer in shared:
        own = heads[kind_of(layer)]
        layer = replace(
            layer,
            n_kv_heads=0 if own.n_kv_heads == largest.n_kv_heads else own.n_kv_heads,
            head_dim=0 if own.head_dim == largest.head_dim else own.head_dim,
            layer_embedding_dim=embedding_dim,
        )
        if layer.kv_source >= 0:
            layer = replace(layer, ffn_dim=layer.ffn_dim * (2 if is_wide else 1))
        elif k_is_v and not layer.window:
            layer = replace(layer, v_is_k=1)
        found.append(replace(layer, shared_ffn_dim=layer.ffn_dim, **experts) if experts else layer)
    return found


def _experts(keys: Keys, row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of layers with experts besides their network; {} without experts."""
    sizes = {"num_experts": "n_experts", "top_k_experts": "n_experts_used", "moe_intermediate_size": "ffn_dim"}
    has_experts = "enable_moe_block" in row and keys.flag("enable_moe_block", row["enable_moe_block"])
    if not has_experts:
        for key in sizes if "enable_moe_block" in row else ():
            keys.value(key)
        return {}
    found = {field: keys.size(key, field) for key, field in sizes.items()}
    if found["n_experts_used"] > found["n_experts"]:
        keys.wrong("top_k_experts", f"at most num_experts, {found['n_experts']}")
    return {"ffn": "experts", "expert_weights": 1, "expert_norms": 1, "expert_factors": 1, **found}


def _layer_embedding_dim(keys: Keys, row: Mapping[str, Any]) -> int:
    """The width of the layers' embeddings of the token; 0: they have none."""
    key = "hidden_size_per_layer_input"
    if key not in row:
        return 0
    found = keys.integer(key, 0, int(LIMITS["layer_embedding_dim"]))
    if key in keys.nulls:
        keys.wrong(key, "an integer")
    dim: int = row[key] if found is None else found
    rows, vocab_size = layer_embedding_rows(keys, row), keys.values.get("vocab_size", 1)
    if dim and rows < vocab_size:
        keys.wrong(LAYER_VOCABULARY, f"at least vocab_size ({vocab_size})")
    return dim


def layer_embedding_rows(keys: Keys, row: Mapping[str, Any]) -> int:
    """The rows of the layers' embeddings of the token; 0: the family has none."""
    return keys.size(LAYER_VOCABULARY, "vocab_size", row[LAYER_VOCABULARY]) if LAYER_VOCABULARY in row else 0


def largest_heads(heads: Mapping[str, Heads]) -> Heads:
    """The most heads and the largest width of any kind, for the config record."""
    return Heads(max(one.n_kv_heads for one in heads.values()), max(one.head_dim for one in heads.values()))
