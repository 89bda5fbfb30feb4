"""Configurations of small models that together use everything that the graph can compute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from builders import llama_config
from llamac.export.checkpoint import LayerConfig, ModelConfig

PLACEMENTS = ("pre", "post", "sandwich", "parallel")
QK_NORMS = ("none", "head", "whole", "layer_head")
SCALES: dict[str, Any] = {"embedding_scale": 1.7, "residual_scale": 0.6, "logit_scale": 0.3}
CAPS: dict[str, Any] = {"attention_soft_cap": 2.0, "logit_soft_cap": 3.0}
EXPERTS: dict[str, Any] = {"n_experts": 5, "n_experts_used": 2}


def cases() -> Iterator[tuple[str, ModelConfig]]:
    """All combinations of placement, norms and FFN; alternating windows, caps and scales. A model's layers differ."""
    choices = product(PLACEMENTS, QK_NORMS, ("gated", "plain", "experts"), ("rms", "layer"))
    for i, (placement, qk_norm, ffn, norm) in enumerate(choices):
        experts: dict[str, Any] = {**EXPERTS, "expert_weights": i // 2 % 2} if ffn == "experts" else {}
        first = LayerConfig(ffn, 50, rope=0, placement=placement, window=(0, 1, 7, 40)[i // 3 % 4], **experts)
        second = LayerConfig("gated", 37, rope=-1, placement=PLACEMENTS[i % 4])
        yield (
            f"{placement}-{qk_norm}-{ffn}-{norm}",
            replace(
                llama_config(dim=40, n_heads=4, n_kv_heads=2),
                norm=norm,
                qk_norm=qk_norm,
                # scores of a few units, so that the cap does not flatten them
                attention_scale=0.3 if qk_norm != "none" else 0.005,
                layers=(first, second, replace(first, rope=0, ffn_dim=51)),
                **(SCALES if i % 5 else {}),
                **(CAPS if i % 3 else {}),
            ),
        )


def extended_cases() -> Iterator[tuple[str, ModelConfig]]:
    """Sinks, scaled queries, limited gates, offsets, squared ReLU, norms after RoPE, shared and biased experts."""
    base = replace(llama_config(dim=40, n_heads=4, n_kv_heads=2), qk_norm="head", attention_scale=0.3)
    gated = LayerConfig("gated", 50, rope=0, window=7, sinks=1)
    limited = replace(gated, activation_limit=1.5, up_offset=1.0)
    experts = replace(limited, ffn="experts", expert_weights=1, **EXPERTS)
    scaled = replace(gated, query_beta=0.4, query_context=11, sinks=0)
    yield "sinks", replace(base, layers=(gated, replace(gated, window=0)), attention_soft_cap=2.0)
    yield "limits", replace(base, layers=(limited, replace(gated, up_offset=-0.5)), activation="quick_gelu")
    yield "biased experts", replace(base, layers=(experts, limited), activation="quick_gelu", norm="layer")
    shared = replace(experts, shared_ffn_dim=70)
    gated_shared = replace(shared, shared_gate=1, shared_ffn_dim=19, activation_limit=0.0, placement="parallel")
    yield "shared experts", replace(base, layers=(shared, gated_shared, gated), **SCALES)
    yield (
        "biased shared experts",
        replace(base, layers=(replace(gated_shared, placement="sandwich"), shared), norm="layer"),
    )
    yield "scaled queries", replace(base, layers=(scaled, replace(scaled, rope=-1, window=0, sinks=1)))
    yield "norms after rope", replace(base, layers=(gated, scaled), qk_norm_after_rope=1)
    inner = replace(gated, sub_norms=1)
    yield (
        "sub-norms",
        replace(base, layers=(inner, replace(inner, placement="post", ffn="plain", output_gate="element", ffn_dim=70))),
    )
    yield "relu2", replace(base, layers=(replace(gated, ffn="plain"), experts), activation="relu2")


def layered_cases() -> Iterator[tuple[str, ModelConfig]]:
    """Layers that differ as those of Gemma 4 do, routers with sigmoids and groups, and gated attention."""
    base = replace(llama_config(dim=40, n_heads=4, n_kv_heads=2), head_dim=16, qk_norm="head", attention_scale=0.3)
    narrow = LayerConfig("gated", 50, rope=0, window=7, head_dim=10, v_norm="head", layer_scale=0.6)
    wide = LayerConfig("gated", 37, rope=0, n_kv_heads=1, v_is_k=1, v_norm="head", placement="sandwich")
    shared = replace(narrow, kv_source=0, v_norm="none", layer_scale=1.4, window=0)
    unrotated = replace(wide, v_norm="none", rope=-1)
    yield "keys as values", replace(base, layers=(narrow, wide, shared, unrotated), **SCALES)
    mixed = replace(
        wide, ffn="experts", shared_ffn_dim=30, expert_norms=1, expert_factors=1, expert_weights=1, **EXPERTS
    )
    other = replace(mixed, v_is_k=0, placement="post", expert_weights=0, shared_ffn_dim=70)
    plain = replace(mixed, placement="pre", expert_norms=0, shared_gate=1)
    yield "experts beside a network", replace(base, layers=(mixed, other, plain), **SCALES)
    yield "layer norms of experts", replace(base, layers=(mixed, other), norm="layer", activation="gelu_tanh")
    embedded = tuple(replace(layer, layer_embedding_dim=9) for layer in (narrow, wide, shared))
    yield "layer embeddings", replace(base, layers=embedded, **SCALES)
    layers = tuple(
        replace(narrow, placement=placement, layer_scale=0.5 + i, ffn=ffn, layer_embedding_dim=20)
        for i, (placement, ffn) in enumerate(zip(PLACEMENTS, ("gated", "plain") * 2, strict=True))
    )
    plain = LayerConfig("plain", 50, rope=0, window=7)
    curved = (plain, replace(plain, ffn_dim=37, rope=-1, placement="parallel"), replace(plain, placement="post"))
    yield "xielu", replace(base, layers=curved, activation="xielu")
    yield "scaled layers", replace(base, layers=layers, norm="layer", qk_norm="layer_head")
    gated = LayerConfig("experts", 50, rope=0, output_gate="element", n_experts=12, n_experts_used=3)
    grouped = replace(
        gated, router="sigmoid", router_choice_bias=1, n_expert_groups=4, n_expert_groups_used=2, expert_weights=1,
        expert_weights_eps=0.25, expert_scale=2.5, shared_ffn_dim=30,
    )  # fmt: skip
    biased = replace(gated, router_choice_bias=1, n_expert_groups=3, n_expert_groups_used=1)
    lone: dict[str, Any] = {"mixer": "none", "rope": -1, "output_gate": "none", "plain_experts": 1}
    parts = (
        replace(narrow, ffn="none", ffn_dim=0),
        replace(grouped, **lone),
        replace(biased, shared_ffn_dim=19, **lone),
        LayerConfig("plain", 50, mixer="none"),
        LayerConfig("none", 0, output_gate="element", rope=0),
        LayerConfig("none", 0, output_gate="head", rope=0, window=5),
    )
    yield "layers of one part", replace(base, layers=parts, activation="relu2", expert_dim=23, **SCALES)
    chunked = LayerConfig(
        "experts", 50, rope=0, window=7, window_chunks=1, router="sigmoid", expert_weights_first=1, shared_ffn_dim=30,
        n_experts=5, n_experts_used=1,
    )  # fmt: skip
    unchunked = LayerConfig("gated", 37, rope=-1, query_beta=0.4, query_context=11, query_offset=1)
    layers = (chunked, unchunked, replace(chunked, window=40, n_experts_used=2, expert_scale=1.5))
    yield "chunks", replace(base, layers=layers, qk_norm="rotated_head", qk_norm_after_rope=1)
    yield "routers", replace(base, layers=(grouped, replace(biased, expert_weights=1), biased))
    first = replace(biased, expert_weights_first=1, placement="sandwich")
    distant = LayerConfig("plain", 50, window=9)
    layers = (replace(distant, window=0), distant, replace(distant, placement="parallel", sinks=1))
    of_distances = replace(base, layers=layers, position="none", bias_distance=31, embedding_norm=1, rope_dim=())
    of_distances = replace(of_distances, rope_original_context=(), rope_attention_factor=())
    yield "distances", replace(of_distances, attention_soft_cap=2.0, **SCALES)
    yield "layer norms and distances", replace(of_distances, norm="layer", qk_norm="none")
    yield "mapped experts", replace(base, layers=(grouped, first, replace(first, placement="parallel")), expert_dim=70)


COMBINATIONS = dict(cases())
FEATURES = dict(extended_cases()) | dict(layered_cases())
CASES = COMBINATIONS | FEATURES
