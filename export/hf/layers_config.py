"""Reads the keys of config.json that describe the layers of a decoder: mixers, RoPE, windows and networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llamac.errors import UnsupportedError
from llamac.export.checkpoint import LayerConfig
from llamac.export.hf.classic_config import local_layers
from llamac.export.hf.experts_config import experts_of, plain_experts
from llamac.export.hf.family import Family
from llamac.export.hf.keys import LIMITS, Keys, is_number
from llamac.export.hf.mamba_config import (
    check_state_widths,
    granite_experts,
    mamba_layers,
    mamba_only_layers,
    single_part_layers,
)
from llamac.export.hf.query_config import tuned_queries
from llamac.export.hf.rope import FULL, SLIDING, states_base
from llamac.export.hf.short_conv_config import network_width, short_convs

# The fields of a gated delta net's layer, and their keys.
DELTA_NET = {
    "state_key_heads": "linear_num_key_heads",
    "state_heads": "linear_num_value_heads",
    "state_key_dim": "linear_key_head_dim",
    "state_value_dim": "linear_value_head_dim",
    "conv_width": "linear_conv_kernel_dim",
}
LINEAR, CHUNKED = "linear_attention", "chunked_attention"
# Families with experts that have one of these keys can have layers without experts.
KEYS_OF_DENSE_LAYERS = {
    "decoder_sparse_step",
    "enable_moe_block",
    "first_k_dense_replace",
    "mlp_layer_types",
    "moe_layer_start_index",
    "num_dense_layers",
}


def layers_of(keys: Keys, family: Family, dim: int) -> list[LayerConfig]:
    """The layer records: windows, experts, and RoPE table 0 for layers with RoPE."""
    row = family.keys
    if "hybrid_override_pattern" in row:
        return single_part_layers(keys, family, dim)
    if "state_size" in row:
        return mamba_only_layers(keys, family, dim)
    n_layers = keys.size("num_hidden_layers", "n_layers", row.get("num_hidden_layers"))
    ffn_dim = _network_width(keys, family, dim)
    if keys.problems:
        return []
    rotated = _rotated(keys, family, n_layers)
    windows = _windows(keys, family, rotated)
    if family.rotates == "windowed" or (family.rotates == "windowed_if_any" and "sliding_window" not in keys.nulls):
        rotated = [window > 0 for window in windows]
    experts = experts_of(keys, family, ffn_dim, n_layers) if family.ffn == "experts" else {}
    if "prefix_dense_sliding_window_pattern" in row and _prefix_pattern(keys, family) == 1:
        # layers without experts then have RoPE in any case
        rotated = [is_rotated or layer not in experts for layer, is_rotated in enumerate(rotated)]
    networks = _networks(keys, family, n_layers, ffn_dim, experts)
    mixers = _mixers(keys, family, dim, rotated, windows)
    return [replace(network, **mixer) for network, mixer in zip(networks, mixers, strict=True)]


def _network_width(keys: Keys, family: Family, dim: int) -> int:
    """The width of networks without experts; 1 if all layers have experts."""
    row = family.keys
    if "moe_intermediate_size" in row and KEYS_OF_DENSE_LAYERS.isdisjoint(row):
        return 1
    width = network_width(keys, family, dim)
    if "shared_intermediate_size" in row and family.ffn != "experts":
        width = keys.size("shared_intermediate_size", "ffn_dim", row["shared_intermediate_size"])
    return width


def _networks(
    keys: Keys, family: Family, n_layers: int, ffn_dim: int, experts: Mapping[int, LayerConfig]
) -> list[LayerConfig]:
    """Each layer's network, without a mixer. `experts`: those of layers with experts, by layer."""
    row = family.keys
    if "prefix_dense_intermediate_size" in row:
        ffn_dim = keys.size("prefix_dense_intermediate_size", "ffn_dim", ffn_dim, nullable=True)
    if "intermediate_size_mlp" in row:
        ffn_dim = keys.size("intermediate_size_mlp", "ffn_dim", row["intermediate_size_mlp"])
    kind = "gated" if family.ffn == "experts" else family.ffn
    dense = LayerConfig(kind, ffn_dim, sub_norms=int(family.sub_norms))
    if "num_local_experts" in row and "mamba_d_state" in row:
        experts = granite_experts(keys, row, n_layers, ffn_dim)
    if "moe_every_n_layers" in row:
        experts = plain_experts(keys, row, dense, n_layers)
    limit = keys.number("swiglu_limit", row["swiglu_limit"], LIMITS["activation_limit"]) if "swiglu_limit" in row else 0
    gate: dict[str, Any] = {"activation_limit": limit or 0.0, "up_offset": family.up_offset}
    return [replace(experts.get(layer, dense), **gate) for layer in range(n_layers)]


def _mixers(
    keys: Keys, family: Family, dim: int, rotated: Sequence[bool], windows: Sequence[int]
) -> list[dict[str, Any]]:
    """The fields of each layer's mixer."""
    row = family.keys
    attention: dict[str, Any] = {
        "sinks": int(family.sinks),
        "output_gate": "element" if family.output_gate else "none",
        "v_norm": family.v_norm,
    }
    tuned = tuned_queries(keys, row)
    mixers = [
        {
            "rope": 0 if is_rotated else -1,
            "window": window,
            "window_chunks": int(family.window_chunks and window > 0),
            **attention,
            **({} if is_rotated else tuned),
        }
        for is_rotated, window in zip(rotated, windows, strict=True)
    ]
    if "linear_num_value_heads" in row:
        mixers = _with_delta_nets(keys, family, mixers)
    if "conv_L_cache" in row:
        mixers = short_convs(keys, family, mixers)
    if "mamba_d_state" in row:
        mixers = mamba_layers(keys, family, mixers, dim)
    return mixers


def _with_delta_nets(keys: Keys, family: Family, attention: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fields of each layer's mixer, where some layers have a gated delta net in place of attention."""
    row, n_layers = family.keys, len(attention)
    sizes = _delta_net_sizes(keys, row)
    if sizes["state_heads"] % sizes["state_key_heads"]:
        keys.wrong("linear_num_value_heads", f"a multiple of linear_num_key_heads ({sizes['state_key_heads']})")
    check_state_widths(keys, DELTA_NET, sizes)
    every_key = "full_attention_interval"
    every = keys.size(every_key, "n_layers", row[every_key]) if every_key in row else min(4, n_layers)
    types = keys.value("layer_types") or [LINEAR if (layer + 1) % every else FULL for layer in range(n_layers)]
    if not isinstance(types, list) or len(types) != n_layers or any(kind not in (FULL, LINEAR) for kind in types):
        keys.wrong("layer_types", f"{FULL} or {LINEAR} for each of {n_layers} layers")
        return attention
    delta_net = {"mixer": "delta_net", **sizes}
    return [delta_net if kind == LINEAR else mixer for kind, mixer in zip(types, attention, strict=True)]


def _delta_net_sizes(keys: Keys, row: Mapping[str, Any]) -> dict[str, int]:
    """The heads of delta nets. OLMo Hybrid's follow from those of attention if they are missing or null."""
    if row["linear_key_head_dim"] is not None:
        return {field: keys.size(key, field, row[key]) for field, key in DELTA_NET.items()}
    n_heads = keys.size("num_attention_heads", "n_heads", row["num_attention_heads"])
    found = {
        field: keys.size(DELTA_NET[field], field, n_heads, nullable=True)
        for field in ("state_key_heads", "state_heads")
    }
    usual = 3 * keys.size("hidden_size", "dim", row["hidden_size"]) // (4 * found["state_key_heads"]) or 1
    key_dim = keys.size(DELTA_NET["state_key_dim"], "state_key_dim", usual, nullable=True)
    value_dim = keys.size(DELTA_NET["state_value_dim"], "state_value_dim", 2 * key_dim, nullable=True)
    width = keys.size(DELTA_NET["conv_width"], "conv_width", row[DELTA_NET["conv_width"]])
    return {**found, "state_key_dim": key_dim, "state_value_dim": value_dim, "conv_width": width}


def _rotated(keys: Keys, family: Family, n_layers: int) -> list[bool]:
    """Which layers have RoPE."""
    if family.position != "rope":
        return [False] * n_layers
    if family.optional_rope:
        return [states_base(keys)] * n_layers
    if "position_embedding_type" in family.keys:
        kind = keys.value("position_embedding_type")
        if kind not in (None, "rope", "nope"):
            keys.wrong("position_embedding_type", "rope, nope or null")
        return [kind == "rope"] * n_layers
    if "layer_rope_theta" in family.keys:
        return _with_a_base(keys, n_layers)
    if "no_rope_layers" not in family.keys:
        return [True] * n_layers
    interval = keys.size("no_rope_layer_interval", "n_layers", family.keys["no_rope_layer_interval"])
    listed = keys.integers("no_rope_layers", 0, 1)
    if listed is None or (not listed and family.window_chunks):  # Llama 4's configs have empty lists
        return [(layer + 1) % interval != 0 for layer in range(n_layers)]
    if len(listed) < n_layers:
        keys.wrong("no_rope_layers", f"one number for each of {n_layers} layers")
        return [True] * n_layers
    return [bool(number) for number in listed[:n_layers]]


def _with_a_base(keys: Keys, n_layers: int) -> list[bool]:
    """Which layers have RoPE, by Granite's list of their bases: 0 means none. The others must be the model's."""
    key = "layer_rope_theta"
    bases = keys.value(key)
    if bases is None:
        return [True] * n_layers
    if not isinstance(bases, list) or len(bases) != n_layers or not all(map(is_number, bases)):
        keys.wrong(key, f"a number for each of {n_layers} layers")
        return [True] * n_layers
    found = {base for base in bases if base}
    if len(found) > 1:
        raise UnsupportedError(f"config.json: {key} has the bases {sorted(found)}; only one, and 0, are supported")
    if found:  # it takes precedence over the other key, and over the RoPE object's
        (base,) = found
        keys.values["rope_theta"] = base
        for name in ("rope_parameters", "rope_scaling"):
            if isinstance(keys.values.get(name), dict):
                keys.values[name] = {**keys.values[name], "rope_theta": base}
    return [base > 0 for base in bases]


def _windows(keys: Keys, family: Family, rotated: list[bool]) -> list[int]:
    """Each layer's window; 0: the layer sees all positions."""
    row, key = family.keys, family.window_key
    if key not in row or "conv_L_cache" in row:  # short_convs reads it
        return [0] * len(rotated)
    default = None if key in keys.nulls else row[key]
    is_used = keys.flag("use_sliding_window", row["use_sliding_window"]) if "use_sliding_window" in row else True
    if family.two_sided and "use_sliding_window" not in row and keys.value(key) == 0:
        keys.values[key] = 1  # transformers saves 0 for a window of the row itself in EmbeddingGemma's kind
    if is_used or keys.value(key) != 0:  # transformers saves 0 for an unused window of Qwen2-MoE
        window = keys.size(key, "window", default or 1, nullable=True)
    if not is_used or (default is None and key not in keys.values):
        window = 0
    if family.two_sided and window:
        window = window // 2 + 1  # half of it on each side, and the row itself
    least = window or 1
    if "sliding_window_size" in row and keys.size("sliding_window_size", "window", least, nullable=True) != least:
        keys.wrong("sliding_window_size", "the same as sliding_window")
    is_sliding = _sliding_layers(keys, family, rotated)
    if "layer_types" in keys.values and any(is_sliding) and not window:
        keys.wrong("layer_types", f"full_attention only: {key} is missing, or use_sliding_window is false")
    return [window if sliding else 0 for sliding in is_sliding]


def _sliding_layers(keys: Keys, family: Family, rotated: list[bool]) -> list[bool]:
    """Which layers have the window, if the model has one: those that a list names, or else the family's rule."""
    n_layers = len(rotated)
    types = _layer_types(keys, family, n_layers)
    by_rule = _sliding_by_rule(keys, family, rotated, is_used=types is None)
    local = local_layers(keys, n_layers) if "attention_types" in family.keys else None
    if local is not None:
        return local
    if types is None:
        return by_rule
    sliding = CHUNKED if family.window_chunks else SLIDING
    if not isinstance(types, list) or len(types) != n_layers or any(kind not in (FULL, sliding) for kind in types):
        keys.wrong("layer_types", f"{FULL} or {sliding} for each of {n_layers} layers")
        return [False] * n_layers
    if family.windows == "pattern_and_last" and types[-1] != FULL:
        keys.wrong("layer_types", f"{FULL} for the last layer")
    return [kind == sliding for kind in types]


def _layer_types(keys: Keys, family: Family, n_layers: int) -> Any:
    """The unchecked list of the layers' types, without those of MTP layers, which EXAONE 4.5 can also list."""
    types = keys.value("layer_types") if "layer_types" in family.keys else None
    predicting = keys.values.get("num_nextn_predict_layers")
    if isinstance(types, list) and type(predicting) is int and len(types) == n_layers + predicting:
        return types[:n_layers]
    return types


def _sliding_by_rule(keys: Keys, family: Family, rotated: list[bool], *, is_used: bool) -> list[bool]:
    """Which layers have the window by the family's rule. The keys of a rule that is not used are checked, too."""
    row, n_layers = family.keys, len(rotated)
    first = _first_sliding(keys, row)
    every_key = "global_attn_every_n_layers"
    every = keys.size(every_key, "n_layers", row[every_key]) if every_key in row else family.window_every
    pattern = every if every_key in row else _pattern(keys, family, is_used=is_used)
    rules = {
        "all": [True] * n_layers,
        "none": [False] * n_layers,
        "late": [layer >= first for layer in range(n_layers)],
        "alternate": [layer % 2 == 0 for layer in range(n_layers)],
        "early_alternate": [layer % 2 == 0 and layer < first for layer in range(n_layers)],
        "pattern": [(layer + 1) % pattern != 0 for layer in range(n_layers)],
        "pattern_after_dense": _after_dense(keys, family, pattern, n_layers),
        "global_every": [layer % every != 0 for layer in range(n_layers)],
        "pattern_and_last": [(layer + 1) % pattern != 0 and layer + 1 < n_layers for layer in range(n_layers)],
        "rotated": rotated,
        "unrotated": [not is_rotated for is_rotated in rotated],
    }
    return rules[family.windows]


def _first_sliding(keys: Keys, row: Mapping[str, Any]) -> int:
    """The first layer with the window in Qwen's models."""
    if "max_window_layers" not in row:
        return 0
    most = int(LIMITS["n_layers"])
    first = keys.integer("max_window_layers", 0, most)
    if first is not None:
        return first
    usual: int = row["max_window_layers"] or 0
    if usual and "max_window_layers" in keys.nulls:
        keys.wrong("max_window_layers", f"an integer from 0 to {most}")
    return usual


def _prefix_pattern(keys: Keys, family: Family) -> int:
    """One of this many of Cohere's layers before those with experts sees all positions."""
    key = "prefix_dense_sliding_window_pattern"
    return keys.size(key, "n_layers", family.keys.get(key, 1))


def _after_dense(keys: Keys, family: Family, pattern: int, n_layers: int) -> list[bool]:
    """Which of Cohere's layers have the window: those without experts, which are first, have a pattern of their own."""
    n_dense = keys.integer("first_k_dense_replace", 0, n_layers) or 0 if "first_k_dense_replace" in family.keys else 0
    of_dense = _prefix_pattern(keys, family)
    dense = [(layer + 1) % of_dense != 0 for layer in range(n_dense)]
    return dense + [(layer + 1) % pattern != 0 for layer in range(n_layers - n_dense)]


def _pattern(keys: Keys, family: Family, *, is_used: bool) -> int:
    """One layer in this many sees all positions. transformers reads only the first of the two names."""
    if "sliding_window_pattern" not in family.keys:
        return family.window_every
    if not is_used and "_sliding_window_pattern" not in family.keys:  # can then be null or a string
        keys.value("sliding_window_pattern")
        keys.value("_sliding_window_pattern")  # transformers 4.53 to 4.57 wrote it, too
        return 1
    every = keys.size("sliding_window_pattern", "n_layers", family.keys["sliding_window_pattern"])
    if keys.size("_sliding_window_pattern", "n_layers", every, nullable=True) != every and is_used:
        expected = f"the same as sliding_window_pattern ({every}), because layer_types is missing"
        keys.wrong("_sliding_window_pattern", expected)
    return every
