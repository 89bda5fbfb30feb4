"""The parity cases of families with gated delta nets; see family_cases."""

from __future__ import annotations

from golden.case_table import FULL, LINEAR, cases_of, decoder
from golden.cases import YARN, Case
from golden.tiny_checkpoints import Config

_ROPE: Config = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
# Text is at the same position in all three sections.
_SECTIONS: Config = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
_DELTA_NET: Config = {
    "num_hidden_layers": 3,
    "head_dim": 16,
    "attention_bias": True,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 3,
}
_EXPERTS: Config = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 36,
}
_QWEN3_5: Config = {
    **_DELTA_NET,
    "rope_theta": None,
    "rope_parameters": {**_ROPE, **_SECTIONS},
    "attn_output_gate": True,
}
# A key that differs in each case.
_OTHER: dict[str, Config] = {
    "full_attention_interval": {"full_attention_interval": 3},
    "layer_types": {"layer_types": [FULL, LINEAR, LINEAR]},
    "linear_num_key_heads": {"linear_num_key_heads": 4},
    "linear_num_value_heads": {"linear_num_value_heads": 2},
    "linear_key_head_dim": {"linear_key_head_dim": 32},
    "linear_value_head_dim": {"linear_value_head_dim": 16},
    "linear_conv_kernel_dim": {"linear_conv_kernel_dim": 4},
    "attention_bias": {"attention_bias": False},
    "head_dim": {"head_dim": 12},
    "rms_norm_eps": {"rms_norm_eps": 1e-5},
    "tied": {"tie_word_embeddings": True},
}

# Without a base, attention has no RoPE.
_OLMO: Config = {
    **{key: value for key, value in _DELTA_NET.items() if key not in ("head_dim", "full_attention_interval")},
    # transformers divides convolutions into three equal parts when it saves them
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 32,
    "layer_types": [FULL, LINEAR, LINEAR],
    "rope_theta": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": None},
}

_OLMO_HEADS = ("num_key_heads", "num_value_heads", "key_head_dim")
_NOT_OLMO = {"head_dim", "full_attention_interval", "layer_types", *(f"linear_{x}" for x in _OLMO_HEADS)}

DELTA_NET_CASES: dict[str, Case] = {
    **cases_of(
        decoder("olmo_hybrid", "OlmoHybridForCausalLM", **_OLMO),
        **{name: _OTHER[name] for name in _OTHER if name not in _NOT_OLMO},
        linear_num_key_heads={"linear_num_key_heads": 2},
        linear_num_value_heads={"linear_num_value_heads": 8},
        linear_key_head_dim={"linear_key_head_dim": 16},
        layer_types={"layer_types": [LINEAR, FULL, LINEAR]},
        default_layer_types={"layer_types": None},
        no_negative_eigenvalues={"linear_allow_neg_eigval": False},
        rope={"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        yarn={"rope_parameters": {**YARN, "rope_theta": 500.0}},
        default_widths={
            **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim")),
            "linear_value_head_dim": None,
            "hidden_size": 128,
            "num_attention_heads": 2,
        },
    ),
    **cases_of(
        decoder(
            "qwen3_next",
            "Qwen3NextForCausalLM",
            **_DELTA_NET,
            **_EXPERTS,
            partial_rotary_factor=0.5,
            norm_topk_prob=False,
            mlp_only_layers=[0],
        ),
        **_OTHER,
        partial_rotary_factor={"partial_rotary_factor": 0.25},
        odd_rope={"head_dim": 12, "partial_rotary_factor": 0.25},
        rope_theta={"rope_theta": 10000.0},
        norm_topk_prob={"norm_topk_prob": True},
        decoder_sparse_step={"decoder_sparse_step": 2},
        mlp_only_layers={"mlp_only_layers": [1]},
        num_experts_per_tok={"num_experts_per_tok": 3},
        shared_expert_intermediate_size={"shared_expert_intermediate_size": 30},
    ),
    **cases_of(
        decoder("qwen3_5_text", "Qwen3_5ForCausalLM", **_QWEN3_5),
        **_OTHER,
        partial_rotary_factor={"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.25}},
        odd_rope={"head_dim": 12, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.25}},
        rope_theta={"rope_parameters": {**_ROPE, "rope_theta": 10000.0}},
        no_rope_parameters={"rope_parameters": None},
        yarn={"rope_parameters": {**_ROPE, **_SECTIONS, **YARN, "truncate": True}},
    ),
    **cases_of(
        decoder("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", **{**_QWEN3_5, "num_hidden_layers": 2}, **_EXPERTS),
        layer_types={"layer_types": [FULL, LINEAR]},
        linear_num_value_heads={"linear_num_value_heads": 2},
        num_experts_per_tok={"num_experts_per_tok": 3},
        shared_expert_intermediate_size={"shared_expert_intermediate_size": 30},
        attention_bias={"attention_bias": False},
    ),
}
