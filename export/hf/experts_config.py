"""Reads the keys of config.json that describe experts and their router."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from llamac.errors import UnsupportedError
from llamac.export.checkpoint import LayerConfig
from llamac.export.hf.family import Family
from llamac.export.hf.keys import LIMITS, Keys, shortened

# The names of the same number in different families: how many experts there are, are used, and are shared.
EXPERTS = ("n_routed_experts", "num_experts", "moe_num_experts", "num_local_experts")
USED = ("num_experts_per_tok", "moe_topk", "moe_k")
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
SCALES = ("routed_scaling_factor", "route_scale", "router_scaling_factor")  # what multiplies the experts' weights
FIRST = ("first_k_dense_replace", "num_dense_layers")  # how many layers before the others have no experts
# Keys of Hunyuan's own code, which transformers does not read: the experts' width, and the number of shared ones.
OF_HUNYUAN = ("moe_intermediate_size", "num_shared_expert")
# Whether Cohere adds its experts and the shared ones, or halves their sum.
COMBINATION = "shared_expert_combination_strategy"
# Of a shared expert of zeros, which only has a bias. Matrices of every dtype can have this width.
SHARED_WIDTH = 32


def experts_of(keys: Keys, family: Family, ffn_dim: int, n_layers: int) -> dict[int, LayerConfig]:
    """The records of the layers that have experts. ffn_dim: the width of a network without a key of its own."""
    if "interleave_moe_layer_step" in family.keys:
        return _llama4(keys, family, ffn_dim, n_layers)
    if COMBINATION in family.keys:
        return _cohere(keys, family, ffn_dim, n_layers)
    if any(key in family.keys for key in SHARED):
        return _with_shared_experts(keys, family, n_layers)
    return _experts(keys, family, ffn_dim, n_layers)


def _name(row: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """The one of several names that the family uses."""
    return next(name for name in names if name in row)


def used_experts(keys: Keys, key: str, default: int | None, n_experts: int) -> int:
    """How many of the experts a token uses."""
    n_used = keys.size(key, "n_experts_used", default)
    if n_used > n_experts:
        keys.wrong(key, f"at most the number of experts, {n_experts}")
    return n_used


def _once(keys: Keys, *names: str) -> None:
    """Replace lists that repeat a number for each layer by the number."""
    for name in names:
        value = keys.values.get(name)
        if isinstance(value, list) and value and all(number == value[0] for number in value):
            keys.values[name] = value[0]


def _experts(keys: Keys, family: Family, ffn_dim: int, n_layers: int) -> dict[int, LayerConfig]:
    """Experts without a shared one, or with one that has a width of its own."""
    row = family.keys
    used_key = _name(row, USED)
    _once(keys, used_key, *OF_HUNYUAN)
    names = [name for name in ("num_experts", "num_local_experts") if name in keys.values or name in keys.nulls]
    default = row.get("num_experts") or row["num_local_experts"]
    found = [keys.size(name, "n_experts", default) for name in names] or [default]
    if len(set(found)) > 1:
        keys.problems.append("num_experts and num_local_experts differ, expected only one of them")
    n_used = used_experts(keys, used_key, row[used_key], found[0])
    if "moe_intermediate_size" in row:
        ffn_dim = keys.size("moe_intermediate_size", "ffn_dim", row["moe_intermediate_size"])
    shared: dict[str, Any] = {}
    if (key := "shared_expert_intermediate_size") in row:
        shared = {"shared_ffn_dim": keys.size(key, "shared_ffn_dim", row[key]), "shared_gate": 1}
    if (key := "shared_intermediate_size") in row:
        width = keys.integer(key, 0, int(LIMITS["shared_ffn_dim"]))
        shared = {"shared_ffn_dim": row[key] if width is None else width}
    if used_key == "moe_topk":
        shared = {"shared_ffn_dim": ffn_dim}
        for key, value in zip(OF_HUNYUAN, (ffn_dim, 1), strict=True):
            if keys.value(key) not in (None, value):
                keys.wrong(key, f"{value}, with which transformers computes")
    is_normalized = keys.flag("norm_topk_prob", row["norm_topk_prob"]) if "norm_topk_prob" in row else True
    step, dense = 1, set[int]()
    if "decoder_sparse_step" in row:
        step = keys.size("decoder_sparse_step", "n_layers", row["decoder_sparse_step"])
        dense = set(keys.integers("mlp_only_layers", 0, n_layers - 1) or [])
    if "num_dense_layers" in row or "mlp_layer_types" in row:
        dense = set(range(n_layers)).difference(_expert_layers(keys, row, n_layers))
    used: dict[str, Any] = {"n_experts_used": n_used, "expert_weights": int(is_normalized)}
    used |= _router(keys, family, is_normalized)
    layer = LayerConfig("experts", ffn_dim, n_experts=found[0], **used, **shared)
    return {index: layer for index in range(n_layers) if index not in dense and (index + 1) % step == 0}


def _llama4(keys: Keys, family: Family, ffn_dim: int, n_layers: int) -> dict[int, LayerConfig]:
    """Llama 4's experts, whose weights are sigmoids that multiply their inputs, and a shared one of the same width."""
    row = family.keys
    n_experts = keys.size("num_local_experts", "n_experts", row["num_local_experts"])
    n_used = used_experts(keys, "num_experts_per_tok", row["num_experts_per_tok"], n_experts)
    step = keys.size("interleave_moe_layer_step", "n_layers", row["interleave_moe_layer_step"])
    listed = keys.integers("moe_layers", 0, n_layers - 1)
    layer = LayerConfig(
        "experts",
        ffn_dim,
        n_experts=n_experts,
        n_experts_used=n_used,
        router=family.router,
        expert_weights_first=1,
        shared_ffn_dim=ffn_dim,
    )
    return dict.fromkeys(range(step - 1, n_layers, step) if listed is None else listed, layer)


def _cohere(keys: Keys, family: Family, width: int, n_layers: int) -> dict[int, LayerConfig]:
    """Cohere's experts, whose scores are a softmax over the used ones, or sigmoids, without a bias for the choice.

    The average with the shared experts halves both: the record's scale has the experts' half.
    """
    row = family.keys
    n_experts = keys.size("num_experts", "n_experts", row["num_experts"])
    n_used = used_experts(keys, "num_experts_per_tok", row["num_experts_per_tok"], n_experts)
    n_shared = keys.integer("num_shared_experts", 0, int(LIMITS["n_experts"])) or row["num_shared_experts"]
    is_normalized = keys.flag("norm_topk_prob", row["norm_topk_prob"])
    is_sigmoid = keys.choice("expert_selection_fn", ("softmax", "sigmoid"), row["expert_selection_fn"]) == "sigmoid"
    combination = keys.choice(COMBINATION, ("average", "sum"), row[COMBINATION])
    layer = LayerConfig(
        "experts",
        width,
        n_experts=n_experts,
        n_experts_used=n_used,
        router="sigmoid" if is_sigmoid else "softmax",
        expert_weights=int(is_normalized or not is_sigmoid),
        expert_scale=0.5 if n_shared and combination == "average" else 1.0,
        shared_ffn_dim=width * n_shared,
    )
    return dict.fromkeys(_expert_layers(keys, row, n_layers), layer)


def shared_factors(keys: Keys, row: Mapping[str, Any]) -> dict[str, float]:
    """What multiplies the last matrix of Cohere's shared experts."""
    is_half = COMBINATION in row and keys.value(COMBINATION) in (None, "average")
    return {"shared_ffn_down.weight": 0.5} if is_half else {}


def _router(keys: Keys, family: Family, is_normalized: bool) -> dict[str, Any]:
    """The fields of routers with sigmoids."""
    row = family.keys
    if family.router == "softmax":
        return {}
    has_bias = keys.flag("use_expert_bias", row["use_expert_bias"]) if "use_expert_bias" in row else True
    return {
        "router": family.router,
        "router_choice_bias": int(has_bias),
        "expert_scale": _scale(keys, row),
        "expert_weights_eps": float(np.float32(family.weights_eps)) if is_normalized else 0.0,
    }


def _scale(keys: Keys, row: Mapping[str, Any]) -> float:
    """What multiplies the experts' weights."""
    key = next((name for name in SCALES if name in row), "")
    if not key:
        return 1.0
    scale = keys.number(key, row[key], LIMITS["expert_scale"])
    if scale == 0:
        keys.wrong(key, "a number above 0")
    return float(np.float32(scale or 1.0))


def _with_shared_experts(keys: Keys, family: Family, n_layers: int) -> dict[int, LayerConfig]:
    """Experts, and shared ones of the same width, in all layers or all but the first few."""
    row = family.keys
    experts_key, used_key, shared_key = (_name(row, names) for names in (EXPERTS, USED, SHARED))
    n_experts = keys.size(experts_key, "n_experts", row[experts_key])
    n_used = used_experts(keys, used_key, row[used_key], n_experts)
    width = keys.size("moe_intermediate_size", "ffn_dim", row["moe_intermediate_size"])
    n_shared = keys.integer(shared_key, 0, int(LIMITS["n_experts"]))
    n_shared = row[shared_key] or 0 if n_shared is None else n_shared
    router: dict[str, Any] = {}
    if family.router == "sigmoid":
        router = _sigmoid_router(keys, family, n_experts, n_used)
    elif family.choice_bias:
        router = {"router_choice_bias": 1, "expert_weights": 1}
    elif "norm_topk_prob" in row:
        router = _softmax_router(keys, row)
    else:
        _check_greedy(keys)
    layer = LayerConfig(
        "experts",
        width,
        n_experts=n_experts,
        n_experts_used=n_used,
        expert_scale=_scale(keys, row),
        shared_ffn_dim=_shared_width(keys, row, width * n_shared),
        **router,
    )
    return dict.fromkeys(_expert_layers(keys, row, n_layers), layer)


def _shared_width(keys: Keys, row: Mapping[str, Any], usual: int) -> int:
    """The width of the experts of all rows together: usually their number times that of an expert."""
    key = "moe_shared_expert_intermediate_size"
    return keys.size(key, "shared_ffn_dim", row[key]) if key in row else usual


def _expert_layers(keys: Keys, row: Mapping[str, Any], n_layers: int) -> list[int]:
    """The indices of the layers with experts."""
    if "moe_layer_start_index" in row:
        return _every_few(keys, row, n_layers)
    key = next((name for name in FIRST if name in row), "")
    first = keys.integer(key, 0, int(LIMITS["n_layers"])) if key else None
    found = list(range(row.get(key, 0) if first is None else first, n_layers))
    kinds = keys.value("mlp_layer_types") if "mlp_layer_types" in row else None
    if kinds is None:
        return found
    if not isinstance(kinds, list) or len(kinds) != n_layers or any(kind not in ("dense", "sparse") for kind in kinds):
        keys.wrong("mlp_layer_types", f'{n_layers} times "dense" or "sparse"')
        return found
    sparse = [layer for layer, kind in enumerate(kinds) if kind == "sparse"]
    takes_precedence = "is_moe_layer" in row  # in K-EXAONE, whose configs have both
    if first is not None and sparse != found and not takes_precedence:
        keys.wrong(key, "the same layers as mlp_layer_types")
    return sparse


def _every_few(keys: Keys, row: Mapping[str, Any], n_layers: int) -> list[int]:
    """ERNIE's layers with experts: one in `moe_layer_interval` from a first to a last one; -1 is the model's last."""
    every = keys.size("moe_layer_interval", "n_layers", row["moe_layer_interval"])
    first = keys.integer("moe_layer_start_index", 0, int(LIMITS["n_layers"]))
    last = keys.integer("moe_layer_end_index", -1, int(LIMITS["n_layers"]))
    first = row["moe_layer_start_index"] if first is None else first
    last = n_layers - 1 if last in (None, -1) else last
    return [layer for layer in range(n_layers) if first <= layer <= last and (layer + 1) % every == 0]


def _sigmoid_router(keys: Keys, family: Family, n_experts: int, n_used: int) -> dict[str, Any]:
    """The fields of a router with sigmoids, a bias for the choice, and groups of experts if the family has them."""
    row = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, **family.keys}
    n_groups, n_groups_used = (
        (keys.integer(key, 1, int(LIMITS["n_expert_groups"])) or row[key]) if key in family.keys else 1
        for key in ("n_group", "topk_group")
    )
    if n_experts % n_groups or n_experts == n_groups > 1:
        keys.wrong("n_group", f"a divisor of the number of experts, {n_experts}, with 2 experts or more in a group")
    elif not n_groups_used <= n_groups or n_groups_used * (n_experts // n_groups) < n_used:
        keys.wrong("topk_group", f"at most {n_groups}, n_group, and enough for {n_used} experts")
    is_normalized = "norm_topk_prob" not in family.keys or keys.flag("norm_topk_prob", row["norm_topk_prob"])
    has_groups = n_groups_used < n_groups  # otherwise they exclude no expert
    return {
        "router": family.router,
        "router_choice_bias": 1,
        "n_expert_groups": n_groups if has_groups else 0,
        "n_expert_groups_used": n_groups_used if has_groups else 0,
        "expert_weights": int(is_normalized),
        "expert_weights_eps": float(np.float32(family.weights_eps)) if is_normalized else 0.0,
    }


def _softmax_router(keys: Keys, row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Mistral 4's router. UnsupportedError if groups exclude experts."""
    n_groups, n_groups_used = (
        keys.integer(key, 1, int(LIMITS["n_expert_groups"])) or row[key] for key in ("n_group", "topk_group")
    )
    if n_groups_used < n_groups:
        raise UnsupportedError(
            f"config.json: n_group is {n_groups} and topk_group {n_groups_used}; only equal numbers are supported"
        )
    return {"expert_weights": int(keys.flag("norm_topk_prob", row["norm_topk_prob"]))}


def _check_greedy(keys: Keys) -> None:
    """Check that the experts are chosen without regard to groups."""
    method = keys.value("topk_method")
    for key in ("n_group", "topk_group"):
        keys.integer(key, 1, int(LIMITS["n_expert_groups"]))
    if method not in (None, "greedy"):
        raise UnsupportedError(f"config.json: topk_method is {shortened(method)}; only 'greedy' is supported")


def plain_experts(keys: Keys, row: Mapping[str, Any], dense: LayerConfig, n_layers: int) -> dict[int, LayerConfig]:
    """The records of nomic-bert's layers with experts: the second of each `moe_every_n_layers`."""
    n_experts = keys.size("num_experts", "n_experts", row["num_experts"])
    n_used = used_experts(keys, "moe_top_k", row["moe_top_k"], n_experts)
    every = keys.size("moe_every_n_layers", "n_layers", row["moe_every_n_layers"])
    record = replace(
        dense,
        ffn="experts",
        n_experts=n_experts,
        n_experts_used=min(n_used, n_experts),
        plain_experts=1,
        shared_ffn_dim=SHARED_WIDTH,
    )
    return {layer: record for layer in range(n_layers) if every > 1 and layer % every == 1}
