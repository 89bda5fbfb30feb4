"""The parity cases of Gemma 4, whose layers differ in their heads; see family_cases."""

from __future__ import annotations

from typing import Any

from golden.case_table import CONTEXT, FULL, SLIDING, TOKENS, cases_of, decoder, variant_of
from golden.cases import Case
from golden.tiny_checkpoints import Config

_FULL_ROPE: Config = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 500.0}
_SLIDING_ROPE: Config = {"rope_type": "default", "rope_theta": 100.0}
_GEMMA4: Config = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "attention_bias": True,
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 7,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "num_kv_shared_layers": 1,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 20.0,
    "rope_theta": None,
    "rope_parameters": {FULL: _FULL_ROPE, SLIDING: _SLIDING_ROPE},
    "use_bidirectional_attention": "vision",
}


def _with_rope(**changes: Any) -> Config:
    """Other parameters of the layers that see all positions."""
    return {"rope_parameters": {FULL: {**_FULL_ROPE, **changes}, SLIDING: _SLIDING_ROPE}}


# A key that differs in each case.
_OTHER: dict[str, Config] = {
    "head_dim": {"head_dim": 12},
    "global_head_dim": {"global_head_dim": 24},
    "num_key_value_heads": {"num_key_value_heads": 4},
    "num_global_key_value_heads": {"num_global_key_value_heads": 2},
    "attention_k_eq_v": {"attention_k_eq_v": False},
    "attention_bias": {"attention_bias": False},
    "hidden_activation": {"hidden_activation": "relu"},
    "sliding_window": {"sliding_window": 12},
    "layer_types": {"layer_types": [FULL, SLIDING, SLIDING, FULL]},
    "no_layer_types": {"layer_types": None, "num_kv_shared_layers": None},
    "num_kv_shared_layers": {"num_kv_shared_layers": 2},
    "no_kv_shared_layers": {"num_kv_shared_layers": None},
    "use_double_wide_mlp": {"use_double_wide_mlp": None},
    "final_logit_softcapping": {"final_logit_softcapping": 5.0},
    "rms_norm_eps": {"rms_norm_eps": 0.5},
    "rope_theta": _with_rope(rope_theta=20.0),
    "partial_rotary_factor": _with_rope(partial_rotary_factor=0.75),
    "nothing_rotates": _with_rope(partial_rotary_factor=0.1),
    "factor": _with_rope(factor=4.0),
    "default_rope": _with_rope(rope_type="default", partial_rotary_factor=1.0),
    "rope_of_windows": {"rope_parameters": {FULL: _FULL_ROPE, SLIDING: {**_SLIDING_ROPE, "rope_theta": 10000.0}}},
    "no_rope_parameters": {"rope_parameters": None},
    "tied": {"tie_word_embeddings": True},
}

_EMBEDDINGS: Config = {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 61}
# transformers shares keys and values only among layers with embeddings
_PLAIN: Config = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": None}
_EXPERTS: Config = {
    **_PLAIN,
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 20,
}
_MIXTURE = Case(
    "gemma4_text-26b", decoder("gemma4_text", "Gemma4ForCausalLM", **{**_GEMMA4, **_EXPERTS}), CONTEXT, TOKENS, None
)

GEMMA4_CASES: dict[str, Case] = {
    **cases_of(decoder("gemma4_unified_text", "Gemma4UnifiedForCausalLM", **_GEMMA4), **_OTHER),
    **cases_of(
        decoder("gemma4_text", "Gemma4ForCausalLM", **_GEMMA4, **_EMBEDDINGS),
        hidden_size_per_layer_input={"hidden_size_per_layer_input": 20},
        vocab_size_per_layer_input={"vocab_size_per_layer_input": 70, "hidden_size_per_layer_input": 10},
        no_layer_embeddings=_PLAIN,
        attention_k_eq_v={"attention_k_eq_v": False},
        num_kv_shared_layers={"num_kv_shared_layers": 2},
        use_double_wide_mlp={"use_double_wide_mlp": None},
        hidden_activation={"hidden_activation": "relu"},
        tied={"tie_word_embeddings": True},
        **{"26b": _EXPERTS},
    ),
    **variant_of(_MIXTURE, "gemma4_text-num_experts", num_experts=3),
    **variant_of(_MIXTURE, "gemma4_text-top_k_experts", top_k_experts=3),
    **variant_of(_MIXTURE, "gemma4_text-moe_intermediate_size", moe_intermediate_size=12),
}
