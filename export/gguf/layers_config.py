"""Reads the layers of a GGUF file from its metadata: their networks, windows, RoPE and placement of norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from llamac.export.checkpoint import LayerConfig
from llamac.export.gguf.families import IS_ROTATED, ORIGINAL_CONTEXT, QUERY_BETA, QUERY_CONTEXT, Architecture
from llamac.export.gguf.keys import LIMITS, Keys

_WINDOW_KEY = "attention.sliding_window"
SIGMOID = 2  # of expert_gating_func


def layers_of(
    keys: Keys, row: Architecture, n_layers: int, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[LayerConfig, ...]:
    """The layers, with attention as their mixer; none if a key is wrong."""
    if not 1 <= n_layers <= LIMITS["n_layers"]:
        keys.wrong("block_count", f"an integer from 1 to {LIMITS['n_layers']}")
        return ()
    n_experts, n_used = _expert_counts(keys, row)
    expert_weights = keys.flag("expert_weights_norm") if n_experts else None
    router = _router(keys, row, n_experts)
    has_experts = [n_experts > 0 and f"blk.{layer}.ffn_gate_inp.weight" in shapes for layer in range(n_layers)]
    widths = _widths(keys, row, has_experts, n_used)
    windows = _windows(keys, row, n_layers)
    if keys.problems:
        return ()
    placements = _placements(keys, row, n_layers, shapes)
    ropes = _ropes(keys, row, windows, has_experts)
    query = _scaled_queries(keys, row)
    layers = []
    for layer in range(n_layers):
        found = LayerConfig(
            "experts" if has_experts[layer] else row.ffn,
            widths.experts[layer] if has_experts[layer] else widths.dense[layer],
            window=windows[layer],
            rope=ropes[layer],
            placement=placements[layer],
            sinks=int(f"blk.{layer}.attn_sinks.weight" in shapes),
            activation_limit=row.activation_limit,
            up_offset=row.up_offset,
            output_gate="element" if row.gates_by_tensors and f"blk.{layer}.attn_gate.weight" in shapes else "none",
            sub_norms=int(row.ternary),
            **query,
        )
        if has_experts[layer]:
            weights = row.expert_weights if expert_weights is None else int(expert_weights)
            has_bias = f"blk.{layer}.exp_probs_b.bias" in shapes
            eps = float(np.float32(row.weights_eps)) if weights and router["router"] == "sigmoid" else 0.0
            found = replace(
                found,
                n_experts=n_experts,
                n_experts_used=n_used,
                expert_weights=weights,
                plain_experts=int(row.ffn == "plain"),
                router_choice_bias=int(has_bias),
                expert_weights_eps=eps,
                **_shared_expert(keys, row, layer, widths, shapes),
                **router,
            )
        layers.append(found)
    return tuple(layers)


class _Widths(NamedTuple):
    """Per layer, the width of its network, of one of its experts, and of its shared expert."""

    dense: tuple[int, ...]
    experts: tuple[int, ...]
    shared: tuple[int, ...]


def _expert_counts(keys: Keys, row: Architecture) -> tuple[int, int]:
    """The number of experts of a layer, and of those that a row uses."""
    n_experts = n_used = 0
    if "expert_count" in row.keys:
        n_experts, n_used = keys.size("expert_count", least=0), keys.size("expert_used_count", least=0)
    if not n_used <= n_experts <= LIMITS["n_experts"] or (n_experts and not n_used):
        keys.wrong("expert_used_count", f"at least 1 and at most expert_count ({n_experts})")
    return n_experts, n_used


def _widths(keys: Keys, row: Architecture, has_experts: list[bool], n_used: int) -> _Widths:
    n_layers = len(has_experts)
    key, shared_key = "expert_feed_forward_length", "expert_shared_feed_forward_length"
    has_expert_width = key in row.keys and keys.value(key) is not None
    has_shared_width = not row.shared_expert or keys.value(shared_key) is not None
    is_dense_unused = has_expert_width and has_shared_width and all(has_experts)
    dense = () if is_dense_unused else keys.sizes("feed_forward_length", n_layers, int(not row.single_part))
    if row.halves_ffn:
        dense = tuple(max(1, width // 2) for width in dense)
    experts = keys.sizes(key, n_layers) if has_expert_width else dense
    if row.shared_width and not has_expert_width and n_used:
        experts = tuple(max(1, width // n_used) for width in dense)
    shared: tuple[int, ...] = (0,) * n_layers
    if row.shared_expert:
        shared = keys.sizes(shared_key, n_layers) if has_shared_width else dense
    return _Widths(dense, experts, shared)


def _placements(keys: Keys, row: Architecture, n_layers: int, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Each layer's placement of norms."""
    is_parallel = "use_parallel_residual" in row.keys and keys.flag("use_parallel_residual") is not False
    if row.family == "stablelm":
        return ["pre" if f"blk.{layer}.ffn_norm.weight" in shapes else "parallel" for layer in range(n_layers)]
    if is_parallel:
        return ["parallel"] * n_layers
    return [row.first_placement or row.placement, *[row.placement] * (n_layers - 1)]


def _ropes(keys: Keys, row: Architecture, windows: tuple[int, ...], has_experts: list[bool]) -> list[int]:
    """Each layer's RoPE table; -1: none."""
    is_rotated = IS_ROTATED not in row.keys or keys.flag(IS_ROTATED) is not False
    by_window = row.rotates == "windowed" or (row.rotates == "windowed_if_any" and keys.size(_WINDOW_KEY, least=0) > 0)
    ropes = []
    for layer, window in enumerate(windows):
        is_plain = by_window and not window and not (row.dense_rotate and not any(has_experts[: layer + 1]))
        is_skipped = row.nope_every and (layer + 1) % row.nope_every == 0
        has_none = row.position != "rope" or not is_rotated or is_plain or is_skipped
        ropes.append(-1 if has_none else int(row.two_ropes and window > 0))
    return ropes


def _shared_expert(
    keys: Keys, row: Architecture, layer: int, widths: _Widths, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """The fields of a layer's shared expert, and the scale of its routed ones."""
    fields: dict[str, Any] = {"shared_ffn_dim": widths.shared[layer], "shared_gate": int(row.shared_expert)}
    if row.plain_shared:
        fields["shared_ffn_dim"] = widths.experts[layer] * keys.size("expert_shared_count", 0, 0)
    if "expert_weights_scale" in row.keys:
        fields["expert_scale"] = keys.number("expert_weights_scale", LIMITS["expert_scale"]) or 1.0
    if row.shared_by_tensors:
        fields["shared_ffn_dim"] = shapes.get(f"blk.{layer}.ffn_up_shexp.weight", (0,))[0]
    if row.halves_shared and fields["shared_ffn_dim"]:
        fields["expert_scale"] /= 2
    return fields


def _router(keys: Keys, row: Architecture, n_experts: int) -> dict[str, Any]:
    """What turns the router's logits into scores, and the groups of experts."""
    kind = keys.value("expert_gating_func") if "expert_gating_func" in row.keys else 0
    routers = {None: row.router, 0: row.router, 1: "softmax", SIGMOID: "sigmoid"}
    router = "" if isinstance(kind, list) else routers.get(kind, "")
    if not router and n_experts:
        keys.wrong("expert_gating_func", f"1, softmax, or {SIGMOID}, sigmoid")
    groups = dict.fromkeys(("n_expert_groups", "n_expert_groups_used"), 0)
    if "expert_group_count" in row.keys:
        count, used = (keys.size(f"expert_group_{key}", 1) for key in ("count", "used_count"))
        if used > count or n_experts % count or (count > 1 and n_experts == count):
            keys.wrong("expert_group_count", f"a divisor of expert_count ({n_experts})")
        if used < count:  # otherwise they exclude no expert
            groups = {"n_expert_groups": count, "n_expert_groups_used": used}
    return {"router": router or "softmax", **groups}


def _scaled_queries(keys: Keys, row: Architecture) -> dict[str, Any]:
    """The layers' fields for queries that are scaled by their position."""
    beta = keys.number(QUERY_BETA, LIMITS["query_beta"]) if QUERY_BETA in row.keys else None
    if not beta:
        return {}
    key = QUERY_CONTEXT if QUERY_CONTEXT in row.keys and keys.value(QUERY_CONTEXT) else ORIGINAL_CONTEXT
    return {"query_beta": beta, "query_context": keys.size(key)}


def _windows(keys: Keys, row: Architecture, n_layers: int) -> tuple[int, ...]:
    """Each layer's sliding window; 0: none. A list may also have those of layers that predict further tokens."""
    if _WINDOW_KEY not in row.keys:
        return (0,) * n_layers
    window = keys.size(_WINDOW_KEY, least=0)
    window = window // 2 + 1 if row.two_sided and window else window  # half of it on each side, and the row itself
    pattern = keys.value("attention.sliding_window_pattern")
    every: Any = row.window_every if pattern is None else pattern
    is_whole = isinstance(every, list) and len(every) in (n_layers, keys.value("block_count"))
    if is_whole and {*map(type, every)} <= {bool, int}:
        return tuple(window if one else 0 for one in every[:n_layers])
    if type(every) is not int or every < 0:
        keys.wrong("attention.sliding_window_pattern", f"a number, or a boolean for each of {n_layers} layers")
        return (0,) * n_layers
    shift = 0 if row.global_first else 1
    return tuple(0 if every and (layer + shift) % every == 0 else window for layer in range(n_layers))
