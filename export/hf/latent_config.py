"""Reads the keys of config.json that only families with multi-head latent attention have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamac.errors import UnsupportedError
from llamac.export.checkpoint import LayerConfig
from llamac.export.hf.family import Family
from llamac.export.hf.keys import LIMITS, Keys, shortened
from llamac.export.hf.rope import RopeParameters
from llamac.export.latent import NORM_EPS

MULTIPLE = 16  # of the latent's width and of a head of v (docs/format.md)


@dataclass(frozen=True)
class Latent:
    """The widths of latent attention, as config.json states them; q_rank 0: q has no latent."""

    q_rank: int
    kv_rank: int
    nope: int
    rotated: int
    value: int

    @property
    def query_dim(self) -> int:
        """The width of a head of q."""
        return self.nope + self.rotated

    @property
    def head_dim(self) -> int:
        """The width of the key that all heads share."""
        return self.kv_rank + self.rotated

    def fields(self) -> dict[str, Any]:
        """The fields of the layer records."""
        return {
            "q_lora_rank": self.q_rank,
            "kv_lora_rank": self.kv_rank,
            "qk_nope_head_dim": self.nope,
            "v_head_dim": self.value,
            "latent_norm_eps": NORM_EPS,
        }


def latent_attention(keys: Keys, row: Mapping[str, Any], dim: int, n_heads: int, n_kv_heads: int) -> Latent:
    """Read the widths."""

    def size(key: str, default: int | None) -> int:
        meaning = key if key in LIMITS else "qk_nope_head_dim"
        return keys.size(key, meaning, default, nullable=row[key] is None)

    has_no_latent = "q_lora_rank" in keys.nulls or (row["q_lora_rank"] is None and "q_lora_rank" not in keys.values)
    found = Latent(
        q_rank=0 if has_no_latent else size("q_lora_rank", row["q_lora_rank"]),
        kv_rank=size("kv_lora_rank", row["kv_lora_rank"]),
        nope=size("qk_nope_head_dim", row["qk_nope_head_dim"]),
        rotated=size("qk_rope_head_dim", row["qk_rope_head_dim"]),
        value=size("v_head_dim", row["v_head_dim"] or max(1, dim // n_heads)),
    )
    if keys.problems:
        return found
    for key, width in (("kv_lora_rank", found.kv_rank), ("v_head_dim", found.value)):
        if width % MULTIPLE:
            keys.wrong(key, f"a multiple of {MULTIPLE}")
    if found.head_dim > LIMITS["head_dim"]:
        keys.wrong("kv_lora_rank", f"at most {LIMITS['head_dim']:g} together with qk_rope_head_dim")
    if n_kv_heads != n_heads:
        keys.wrong("num_key_value_heads", f"num_attention_heads ({n_heads}): the latent has no groups of heads")
    # transformers computes both from the other keys
    for key, width in (("head_dim", found.rotated), ("qk_head_dim", found.query_dim)):
        if keys.value(key) not in (None, width):
            keys.wrong(key, f"{width}, which follows from the other widths")
    return found


def attention_factor(keys: Keys, parameters: RopeParameters) -> float:
    """What YaRN multiplies the attention scale by: the square of its factor of all dimensions."""
    weight = parameters.values.get("mscale_all_dim")
    if not weight:
        return 1.0
    factor = parameters.values.get("factor")
    if factor is None:
        keys.problems.append("mscale_all_dim needs a factor, which is null")
        return 1.0
    return (1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0) ** 2


def minicpm_scales(keys: Keys, row: Mapping[str, Any], dim: int, n_layers: int) -> dict[str, float]:
    """The scales of MiniCPM's embedding, branches and logits. null means none for the last two."""

    def number(key: str) -> float:
        value = keys.number(key, row[key], LIMITS["logit_scale"])
        if not value:
            keys.wrong(key, "a number above 0")
        return value or 1.0

    depth = 1.0 if "scale_depth" in keys.nulls else number("scale_depth") / math.sqrt(n_layers)
    base = 1.0 if "dim_model_base" in keys.nulls else number("dim_model_base") / dim
    return {"embedding_scale": number("scale_emb"), "residual_scale": depth, "logit_scale": base}


def deepseek_experts(keys: Keys, family: Family, n_layers: int) -> dict[int, LayerConfig]:
    """The records of the layers with experts: all but the first few."""
    row = family.keys
    n_experts = keys.size("n_routed_experts", "n_experts", row["n_routed_experts"])
    n_used = keys.size("num_experts_per_tok", "n_experts_used", row["num_experts_per_tok"])
    if n_used > n_experts:
        keys.wrong("num_experts_per_tok", f"at most the number of experts, {n_experts}")
    width = keys.size("moe_intermediate_size", "ffn_dim", row["moe_intermediate_size"])
    n_shared = keys.size("n_shared_experts", "n_experts", row["n_shared_experts"])
    scale = keys.number("routed_scaling_factor", row["routed_scaling_factor"], LIMITS["expert_scale"])
    if family.router == "sigmoid":
        router = _sigmoid_router(keys, family, n_experts, n_used)
    else:
        _check_greedy(keys)
        router = {}
    layer = LayerConfig(
        "experts",
        width,
        n_experts=n_experts,
        n_experts_used=n_used,
        expert_scale=float(np.float32(scale or 1.0)),
        shared_ffn_dim=width * n_shared,
        **router,
    )
    return dict.fromkeys(_expert_layers(keys, row, n_layers), layer)


def _expert_layers(keys: Keys, row: Mapping[str, Any], n_layers: int) -> list[int]:
    """The indices of the layers with experts."""
    first = keys.integer("first_k_dense_replace", 0, int(LIMITS["n_layers"]))
    found = list(range(row["first_k_dense_replace"] if first is None else first, n_layers))
    kinds = keys.value("mlp_layer_types") if "mlp_layer_types" in row else None
    if kinds is None:
        return found
    if not isinstance(kinds, list) or len(kinds) != n_layers or any(kind not in ("dense", "sparse") for kind in kinds):
        keys.wrong("mlp_layer_types", f'{n_layers} times "dense" or "sparse"')
        return found
    sparse = [layer for layer, kind in enumerate(kinds) if kind == "sparse"]
    if first is not None and sparse != found:
        keys.wrong("first_k_dense_replace", "the same layers as mlp_layer_types")
    return sparse


def _sigmoid_router(keys: Keys, family: Family, n_experts: int, n_used: int) -> dict[str, Any]:
    """The fields of a router with sigmoids, a bias for the choice, and groups of experts."""
    row = family.keys
    n_groups = keys.integer("n_group", 1, int(LIMITS["n_expert_groups"])) or row["n_group"]
    n_groups_used = keys.integer("topk_group", 1, int(LIMITS["n_expert_groups"])) or row["topk_group"]
    if n_experts % n_groups or n_experts == n_groups > 1:
        keys.wrong("n_group", f"a divisor of the number of experts, {n_experts}, with 2 experts or more in a group")
    elif not n_groups_used <= n_groups or n_groups_used * (n_experts // n_groups) < n_used:
        keys.wrong("topk_group", f"at most {n_groups}, n_group, and enough for {n_used} experts")
    is_normalized = keys.flag("norm_topk_prob", row["norm_topk_prob"])
    has_groups = n_groups_used < n_groups  # otherwise they exclude no expert
    return {
        "router": family.router,
        "router_choice_bias": 1,
        "n_expert_groups": n_groups if has_groups else 0,
        "n_expert_groups_used": n_groups_used if has_groups else 0,
        "expert_weights": int(is_normalized),
        "expert_weights_eps": float(np.float32(family.weights_eps)) if is_normalized else 0.0,
    }


def _check_greedy(keys: Keys) -> None:
    """Check that the experts are chosen without regard to groups."""
    method = keys.value("topk_method")
    for key in ("n_group", "topk_group"):
        keys.integer(key, 1, int(LIMITS["n_expert_groups"]))
    if method not in (None, "greedy"):
        raise UnsupportedError(f"config.json: topk_method is {shortened(method)}; only 'greedy' is supported")
