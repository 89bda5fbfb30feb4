"""The parity cases of families with sigmoid routers, a bias of the choice or shared experts; see family_cases."""

from __future__ import annotations

from golden.case_table import FULL, SLIDING, cases_of, decoder
from golden.cases import LLAMA3, YARN, Case
from golden.tiny_checkpoints import Config

# One of two groups of experts, in all layers but the first.
_GROUPS: Config = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
_OTHER_GROUPS: dict[str, Config] = {
    "n_group": {"n_group": 3},
    "topk_group": {"n_group": 3, "topk_group": 2},
    "norm_topk_prob": {"norm_topk_prob": False},
    "routed_scaling_factor": {"routed_scaling_factor": 1.8},
    "rms_norm_eps": {"rms_norm_eps": 1e-5},
}


def _renamed(config: Config, **names: str) -> Config:
    return {names.get(key, key): value for key, value in config.items()}


# Chunks shorter than the prompts in the first and the last of three layers, experts in the second and the third.
LLAMA4: Config = {
    "num_hidden_layers": 3,
    "head_dim": 12,
    "intermediate_size": 20,
    "intermediate_size_mlp": 52,
    "attention_bias": True,
    "attention_chunk_size": 7,
    "no_rope_layers": [1, 0, 1],
    "attn_scale": 0.7,
    "floor_scale": 5,
    "num_local_experts": 5,
    "num_experts_per_tok": 1,
    "moe_layers": [1, 2],
}

ROUTED_CASES: dict[str, Case] = {
    **cases_of(
        decoder("llama4_text", "Llama4ForCausalLM", **LLAMA4),
        attention_chunk_size={"attention_chunk_size": 12},
        layer_types={"layer_types": [FULL, "chunked_attention", "chunked_attention"]},
        no_rope_layers={"no_rope_layers": [1, 1, 0]},
        no_rope_layer_interval={"no_rope_layers": [], "no_rope_layer_interval": 3},
        use_qk_norm={"use_qk_norm": False},
        attn_temperature_tuning={"attn_temperature_tuning": False},
        attn_scale={"attn_scale": 0.3},
        floor_scale={"floor_scale": 11},
        moe_layers={"moe_layers": [0, 2]},
        interleave_moe_layer_step={"moe_layers": None, "interleave_moe_layer_step": 3},
        num_experts_per_tok={"num_experts_per_tok": 2},
        intermediate_size={"intermediate_size": 24},
        intermediate_size_mlp={"intermediate_size_mlp": 44},
        attention_bias={"attention_bias": False},
        rms_norm_eps={"rms_norm_eps": 1e-5},
        rope_scaling={"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}},
        # chunks, scaled queries and layers without RoPE as GGUF files have them
        defaults={
            "num_hidden_layers": 4,
            "attention_bias": False,
            "interleave_moe_layer_step": 2,
            "rope_scaling": {**LLAMA3, "high_freq_factor": 1.0},
            **dict.fromkeys(("attention_chunk_size", "no_rope_layers", "attn_scale", "floor_scale", "moe_layers")),
        },
    ),
    **cases_of(
        decoder("glm4_moe", "Glm4MoeForCausalLM", **_GROUPS, head_dim=16, attention_bias=True, use_qk_norm=True),
        **_OTHER_GROUPS,
        use_qk_norm={"use_qk_norm": False},
        attention_bias={"attention_bias": False},
        partial_rotary_factor={"partial_rotary_factor": 0.25},
        first_k_dense_replace={"first_k_dense_replace": 2},
        n_shared_experts={"n_shared_experts": 1},
        num_experts_per_tok={"num_experts_per_tok": 1},
        moe_intermediate_size={"moe_intermediate_size": 24},
        yarn={"rope_scaling": YARN},
    ),
    **cases_of(
        decoder(
            "solar_open",
            "SolarOpenForCausalLM",
            **{**_GROUPS, "first_k_dense_replace": None, "num_hidden_layers": 2},
            intermediate_size=None,
            head_dim=14,
            attention_bias=True,
        ),
        n_group={"n_group": 3},
        attention_bias={"attention_bias": False},
        rms_norm_eps={"rms_norm_eps": 1e-5},
    ),
    **cases_of(
        decoder("dots1", "Dots1ForCausalLM", **_GROUPS, attention_bias=True, sliding_window=7, max_window_layers=1),
        **_OTHER_GROUPS,
        attention_bias={"attention_bias": False},
        sliding_window={"sliding_window": 12},
        max_window_layers={"max_window_layers": 2},
        layer_types={"layer_types": [SLIDING, FULL, FULL]},
        first_k_dense_replace={"first_k_dense_replace": 0},
    ),
    **cases_of(
        decoder(
            "exaone_moe",
            "ExaoneMoeForCausalLM",
            **_renamed(_GROUPS, n_routed_experts="num_experts", n_shared_experts="num_shared_experts"),
            head_dim=12,
            sliding_window=7,
            layer_types=[SLIDING, FULL, SLIDING],
        ),
        **_OTHER_GROUPS,
        layer_types={"layer_types": [SLIDING, SLIDING, FULL]},
        sliding_window={"sliding_window": 12},
        mlp_layer_types={"first_k_dense_replace": None, "mlp_layer_types": ["sparse", "dense", "sparse"]},
        num_shared_experts={"num_shared_experts": 1},
    ),
    **cases_of(
        decoder(
            "minimax_m2",
            "MiniMaxM2ForCausalLM",
            intermediate_size=20,
            head_dim=14,
            rotary_dim=8,
            num_local_experts=6,
            num_experts_per_tok=2,
        ),
        rotary_dim={"rotary_dim": 6},
        whole_heads={"rotary_dim": None},
        num_experts_per_tok={"num_experts_per_tok": 3},
        rms_norm_eps={"rms_norm_eps": 1e-5},
        rope_theta={"rope_theta": 5000.0},
    ),
    **cases_of(
        decoder(
            "granitemoeshared",
            "GraniteMoeSharedForCausalLM",
            intermediate_size=24,
            num_local_experts=5,
            num_experts_per_tok=2,
            shared_intermediate_size=36,
            embedding_multiplier=6.0,
            logits_scaling=3.0,
            residual_multiplier=0.22,
            attention_multiplier=0.15,
            attention_bias=True,
        ),
        shared_intermediate_size={"shared_intermediate_size": 20},
        no_shared_expert={"shared_intermediate_size": 0},
        num_experts_per_tok={"num_experts_per_tok": 3},
        residual_multiplier={"residual_multiplier": 0.5},
    ),
    **cases_of(
        decoder(
            "hunyuan_v1_moe",
            "HunYuanMoEV1ForCausalLM",
            intermediate_size=24,
            head_dim=12,
            num_experts=5,
            moe_topk=2,
            attention_bias=True,
        ),
        moe_topk={"moe_topk": [3, 3]},
        attention_bias={"attention_bias": False},
        rms_norm_eps={"rms_norm_eps": 1e-5},
        alpha={"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
    ),
    **cases_of(
        decoder(
            "flex_olmo",
            "FlexOlmoForCausalLM",
            intermediate_size=24,
            num_experts=5,
            num_experts_per_tok=2,
            attention_bias=True,
        ),  # the norms of branches take back the division of norm_topk_prob
        num_experts_per_tok={"num_experts_per_tok": 3},
        attention_bias={"attention_bias": False},
        rms_norm_eps={"rms_norm_eps": 1e-5},
    ),
    **cases_of(
        decoder(
            "ernie4_5_moe",
            "Ernie4_5_MoeForCausalLM",
            num_hidden_layers=3,
            use_bias=True,
            moe_num_experts=5,
            moe_k=2,
            moe_num_shared_experts=2,
            moe_intermediate_size=20,
            moe_layer_start_index=1,
            moe_layer_end_index=1,
        ),
        use_bias={"use_bias": False},
        moe_k={"moe_k": 3},
        moe_num_shared_experts={"moe_num_shared_experts": 1},
        no_shared_experts={"moe_num_shared_experts": 0},
        moe_layer_start_index={"moe_layer_start_index": 0},
        moe_layer_end_index={"moe_layer_end_index": -1},
        moe_layer_interval={"moe_layer_interval": 3, "moe_layer_end_index": 2},
        rms_norm_eps={"rms_norm_eps": 1e-3},
    ),
}
