"""The parity cases of families with short convolutions; see family_cases."""

from __future__ import annotations

from golden.case_table import FULL, cases_of, decoder
from golden.cases import YARN, Case
from golden.tiny_checkpoints import Config

CONV = "conv"
_LFM2: Config = {
    "rms_norm_eps": None,
    "norm_eps": 0.05,
    "hidden_act": None,
    "num_hidden_layers": 3,
    "conv_bias": True,
    "conv_L_cache": 3,
}
_OTHER: dict[str, Config] = {
    "conv_bias": {"conv_bias": False},
    "conv_L_cache": {"conv_L_cache": 5},
    "layer_types": {"layer_types": [FULL, CONV, CONV]},
    "norm_eps": {"norm_eps": 1e-5},
    "rope_theta": {"rope_theta": 10000.0},
    "tie_embedding": {"tie_embedding": True},
}

RECURRENT_CASES: dict[str, Case] = {
    **cases_of(
        decoder(
            "lfm2",
            "Lfm2ForCausalLM",
            **_LFM2,
            layer_types=[CONV, FULL, CONV],
            block_auto_adjust_ff_dim=True,
            block_ffn_dim_multiplier=1.1,
            block_multiple_of=8,
        ),
        **_OTHER,
        block_auto_adjust_ff_dim={"block_auto_adjust_ff_dim": False},
        block_ffn_dim_multiplier={"block_ffn_dim_multiplier": 1.5},
        block_multiple_of={"block_multiple_of": 16},
        block_ff_dim={"block_ff_dim": 30},
        full_attn_idxs={"layer_types": None, "full_attn_idxs": [0, 2]},
        yarn={"rope_theta": None, "rope_parameters": {**YARN, "rope_theta": 500.0, "truncate": True}},
    ),
    **cases_of(
        decoder(
            "lfm2_moe",
            "Lfm2MoeForCausalLM",
            **_LFM2,
            layer_types=[CONV, FULL, CONV],
            num_dense_layers=1,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=20,
            norm_topk_prob=True,
            use_expert_bias=True,
            routed_scaling_factor=1.5,
        ),
        **_OTHER,
        num_dense_layers={"num_dense_layers": 2},
        num_experts_per_tok={"num_experts_per_tok": 3},
        norm_topk_prob={"norm_topk_prob": False},
        use_expert_bias={"use_expert_bias": False},
        routed_scaling_factor={"routed_scaling_factor": 1.0},
    ),
}
