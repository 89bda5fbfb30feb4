"""The parity cases of families with short convolutions; see family_cases."""

from __future__ import annotations

from golden.case_table import FULL, SLIDING, cases_of, decoder
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

_FULL_ROPE: Config = {"rope_type": "proportional", "partial_rotary_factor": 0.6, "rope_theta": 500.0}
_SLIDING_ROPE: Config = {"rope_type": "default", "rope_theta": 100.0}


def _with_rope(full: Config, **of_windows: object) -> Config:
    return {"rope_parameters": {FULL: {**_FULL_ROPE, **full}, SLIDING: {**_SLIDING_ROPE, **of_windows}}}


LFM3: Config = {
    **_LFM2,
    "num_hidden_layers": 5,
    "head_dim": 14,
    "conv_L_cache": 7,
    "sliding_window": 7,
    "layer_types": [CONV, FULL, SLIDING, CONV, FULL],
    "attention_bias": True,
    "rope_theta": None,
    "use_sandwich_norm": True,
    "use_attention_gate": True,
    **_with_rope({}),
}
RECURRENT_CASES: dict[str, Case] = {
    **cases_of(
        decoder("lfm3", "Lfm3ForCausalLM", **LFM3),
        conv_bias={"conv_bias": False},
        conv_L_cache={"conv_L_cache": 4},
        layer_types={"layer_types": [FULL, CONV, CONV, SLIDING, CONV]},
        no_layer_types={"layer_types": None},
        sliding_window={"sliding_window": 12},
        head_dim={"head_dim": 18},
        attention_bias={"attention_bias": False},
        use_sandwich_norm={"use_sandwich_norm": False},
        use_attention_gate={"use_attention_gate": False},
        norm_eps={"norm_eps": 1e-5},
        partial_rotary_factor=_with_rope({"partial_rotary_factor": 0.3}),
        rope_theta=_with_rope({"rope_theta": 20.0}),
        rope_of_windows=_with_rope({}, rope_theta=10000.0),
        default_rope=_with_rope({"rope_type": "default", "partial_rotary_factor": 1.0}),
        no_rope_parameters={"rope_parameters": None},
        tied={"tie_word_embeddings": True},
    ),
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
