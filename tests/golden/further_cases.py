"""The parity cases of further families, whose graphs are combinations of other families' parts; see family_cases."""

from __future__ import annotations

from golden.case_table import FULL, SLIDING, cases_of, decoder
from golden.cases import LLAMA3, YARN, Case

FURTHER_CASES: dict[str, Case] = {
    **cases_of(
        decoder(
            "cohere",
            "CohereForCausalLM",
            rms_norm_eps=None,
            layer_norm_eps=0.05,
            attention_bias=True,
            logit_scale=0.3,
        ),
        attention_bias={"attention_bias": False},
        layer_norm_eps={"layer_norm_eps": 1e-5},
        logit_scale={"logit_scale": 0.1},
        rope_theta={"rope_theta": 10000.0},
        tied={"tie_word_embeddings": True},
    ),
    **cases_of(
        decoder(
            "nemotron",
            "NemotronForCausalLM",
            hidden_act="relu2",
            rms_norm_eps=None,
            norm_eps=0.05,
            head_dim=12,
            attention_bias=True,
            mlp_bias=True,
        ),
        attention_bias={"attention_bias": False},
        mlp_bias={"mlp_bias": False},
        hidden_act={"hidden_act": "silu"},
        norm_eps={"norm_eps": 1e-5},
        partial_rotary_factor={"partial_rotary_factor": 1.0},
    ),
    **cases_of(
        decoder("apertus", "ApertusForCausalLM", hidden_act="xielu", attention_bias=True, rope_scaling=LLAMA3),
        attention_bias={"attention_bias": False},
        rms_norm_eps={"rms_norm_eps": 1e-5},
        rope_scaling={"rope_scaling": YARN},
        tied={"tie_word_embeddings": True},
    ),
    **cases_of(
        decoder("helium", "HeliumForCausalLM", attention_bias=True, mlp_bias=True, head_dim=10),
        attention_bias={"attention_bias": False},
        mlp_bias={"mlp_bias": False},
        rms_norm_eps={"rms_norm_eps": 1e-5},
        rope_theta={"rope_theta": 10000.0},
        tied={"tie_word_embeddings": True},
    ),
    **cases_of(
        decoder("cwm", "CwmForCausalLM", num_hidden_layers=3, head_dim=14, sliding_window=7, rope_scaling=LLAMA3),
        sliding_window={"sliding_window": 12},
        layer_types={"layer_types": [SLIDING, FULL, FULL]},
        rope_scaling={"rope_scaling": None},
        rms_norm_eps={"rms_norm_eps": 1e-5},
    ),
    **cases_of(
        decoder(
            "granitemoe",
            "GraniteMoeForCausalLM",
            intermediate_size=24,
            num_local_experts=5,
            num_experts_per_tok=2,
            embedding_multiplier=6.0,
            logits_scaling=3.0,
            residual_multiplier=0.22,
            attention_multiplier=0.15,
            attention_bias=True,
        ),
        num_experts_per_tok={"num_experts_per_tok": 3},
        residual_multiplier={"residual_multiplier": 0.5},
        attention_bias={"attention_bias": False},
        rms_norm_eps={"rms_norm_eps": 1e-5},
    ),
    **cases_of(
        decoder("bitnet", "BitNetForCausalLM", hidden_act="relu2", attention_bias=True),
        attention_bias={"attention_bias": False},
        hidden_act={"hidden_act": "silu"},
        num_key_value_heads={"num_key_value_heads": 1},
        rms_norm_eps={"rms_norm_eps": 1e-5},
        tied={"tie_word_embeddings": True},
        rope_theta={"rope_theta": 10000.0},
    ),
    **cases_of(
        decoder(
            "jais2",
            "Jais2ForCausalLM",
            hidden_act="relu2",
            rms_norm_eps=None,
            layer_norm_eps=0.05,
            attention_bias=True,
            mlp_bias=True,
        ),
        attention_bias={"attention_bias": False},
        mlp_bias={"mlp_bias": False},
        hidden_act={"hidden_act": "silu"},
        layer_norm_eps={"layer_norm_eps": 1e-5},
        yarn={"rope_scaling": {**YARN, "truncate": True}},
    ),
}
