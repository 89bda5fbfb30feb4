"""The parity cases of families with multi-head latent attention; see family_cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from golden.case_table import cases_of, decoder, variant_of
from golden.cases import LONGROPE, Case
from golden.tiny_checkpoints import Config

# YaRN whose second factor changes the attention scale.
_YARN: Config = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.5,
}
_LATENT: Config = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 16,
    "attention_bias": True,
}
_EXPERTS: Config = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 5,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
}
# Routers with sigmoids: a bias for the choice, and one of two groups of experts.
_SIGMOID: Config = {
    **_EXPERTS,
    "n_routed_experts": 6,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
# Mistral 4's: softmaxes, and queries that grow with their position.
_SOFTMAX: Config = {**_EXPERTS, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
_SCALED: Config = {
    **_YARN,
    "mscale": 1.5,
    "original_max_position_embeddings": 8,
    "rope_theta": 500.0,
    "llama_4_scaling_beta": 0.5,
}
_OTHER_ROUTERS: dict[str, Config] = {
    "first_k_dense_replace": {"first_k_dense_replace": 2},
    "n_shared_experts": {"n_shared_experts": 1},
    "no_shared_experts": {"n_shared_experts": 0},
    "num_experts_per_tok": {"num_experts_per_tok": 1},
    "moe_intermediate_size": {"moe_intermediate_size": 24},
    "n_group": {"n_group": 3},
    "topk_group": {"n_group": 3, "topk_group": 2},
    "no_groups": {"n_group": 1, "topk_group": 1},
    "norm_topk_prob": {"norm_topk_prob": False},
    "routed_scaling_factor": {"routed_scaling_factor": 1.8},
}


def _without(config: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != name}


# A key that differs in each case.
_OTHER: dict[str, Config] = {
    "q_lora_rank": {"q_lora_rank": 12},
    "kv_lora_rank": {"kv_lora_rank": 16},
    "qk_nope_head_dim": {"qk_nope_head_dim": 8},
    "qk_rope_head_dim": {"qk_rope_head_dim": 4},
    "v_head_dim": {"v_head_dim": 32},
    "attention_bias": {"attention_bias": False},
    "rms_norm_eps": {"rms_norm_eps": 1e-5},
    "rope_theta": {"rope_theta": 5000.0},
    "yarn": {"rope_scaling": _YARN},
}


def _with_whole_q(base: Case) -> dict[str, Case]:
    """The case in which q has no latent, which null says."""
    case = next(iter(variant_of(base, f"{base.name}-whole_q").values()))
    return {case.name: replace(case, config={**case.config, "q_lora_rank": None})}


LATENT_CASES: dict[str, Case] = {
    **cases_of(
        decoder("youtu", "YoutuForCausalLM", **_LATENT, pad_token_id=None),
        attention_bias={"attention_bias": False},
        rms_norm_eps={"rms_norm_eps": 1e-5},
        rope_theta={"rope_theta": 10000.0},
    ),
    **cases_of(
        decoder(
            "minicpm3",
            "MiniCPM3ForCausalLM",
            **_LATENT,
            hidden_size=64,
            mlp_bias=True,
            scale_emb=3,
            scale_depth=1.2,
            dim_model_base=20,
        ),
        **_OTHER,
        mlp_bias={"mlp_bias": False},
        scale_emb={"scale_emb": 12},
        scale_depth={"scale_depth": 1.4},
        dim_model_base={"dim_model_base": 10},
        no_v_head_dim={"v_head_dim": None, "hidden_size": 128},
        tied={"tie_word_embeddings": True},
        longrope={"rope_scaling": {**LONGROPE, "short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 3.0, 5.0]}},
    ),
    **cases_of(
        decoder("deepseek_v2", "DeepseekV2ForCausalLM", **_LATENT, **_EXPERTS, mlp_bias=True, topk_method="greedy"),
        **_OTHER,
        mlp_bias={"mlp_bias": False},
        first_k_dense_replace={"first_k_dense_replace": 0},
        n_shared_experts={"n_shared_experts": 1},
        no_shared_experts={"n_shared_experts": 0, "mlp_bias": False},
        num_experts_per_tok={"num_experts_per_tok": 3},
        moe_intermediate_size={"moe_intermediate_size": 24},
    ),
    **cases_of(
        decoder("deepseek_v3", "DeepseekV3ForCausalLM", **_LATENT, **_SIGMOID),
        **_OTHER,
        **_OTHER_ROUTERS,
    ),
    **cases_of(
        decoder("glm4_moe_lite", "Glm4MoeLiteForCausalLM", **_LATENT, **_without(_SIGMOID, "first_k_dense_replace")),
        **_OTHER,
        **_without(_OTHER_ROUTERS, "first_k_dense_replace"),
        mlp_layer_types={"mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    **cases_of(
        decoder("mistral4", "Mistral4ForCausalLM", **_LATENT, **_SOFTMAX, rope_theta=None, rope_parameters=_SCALED),
        **_without(_without(_OTHER, "rope_theta"), "yarn"),
        **{name: changes for name, changes in _OTHER_ROUTERS.items() if "group" not in name},
        llama_4_scaling_beta={"rope_parameters": {**_SCALED, "llama_4_scaling_beta": 0.1}},
        original_max_position_embeddings={"rope_parameters": {**_SCALED, "original_max_position_embeddings": 16}},
        mscale_all_dim={"rope_parameters": {**_SCALED, "mscale_all_dim": 1.0}},
        rope_parameters={"rope_parameters": {**_SCALED, "rope_theta": 5000.0, "partial_rotary_factor": 0.375}},
    ),
}
for _name in ("minicpm3", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4"):
    LATENT_CASES |= _with_whole_q(LATENT_CASES[_name])
