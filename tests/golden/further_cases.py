"""The parity cases of further families, whose graphs are combinations of other families' parts; see family_cases."""

from __future__ import annotations

from golden.case_table import FULL, SLIDING, cases_of, decoder
from golden.cases import LLAMA3, YARN, Case
from golden.latent_cases import LATENT_CASES
from golden.tiny_checkpoints import Config, changed

# Layers without a window and, with another base, with one.
_TWO_ROPES: Config = {
    FULL: {"rope_type": "default", "rope_theta": 500.0},
    SLIDING: {"rope_type": "default", "rope_theta": 5000.0},
}

# Sinks, and layers without RoPE, whose base is 0.
_GRANITE_SWA: Config = {
    "num_hidden_layers": 3,
    "attention_bias": True,
    "attention_multiplier": 0.15,
    "sliding_window": 7,
    "layer_types": [SLIDING, FULL, SLIDING],
    "layer_rope_theta": [700.0, 0, 700.0],
}
_OTHER_GRANITE: dict[str, Config] = {
    "sliding_window": {"sliding_window": 12},
    "layer_types": {"layer_types": None},
    "layer_rope_theta": {"layer_rope_theta": [700.0, 700.0, 0]},
    "one_base": {"layer_rope_theta": None},
}

_LOGITS: Config = {"embedding_multiplier": 6.0, "logits_scaling": 3.0, "residual_multiplier": 0.22}
_HY: Config = {
    "num_hidden_layers": 3,
    "head_dim": 12,
    "attention_bias": True,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "num_shared_experts": 2,
    "moe_intermediate_size": 20,
    "router_scaling_factor": 2.5,
}
_SARVAM: Config = {
    "num_hidden_layers": 2,
    "head_dim": 12,
    "use_qkv_bias": True,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_shared_experts": 2,
    "moe_intermediate_size": 20,
    "n_group": 2,
    "topk_group": 1,
}

FURTHER_CASES: dict[str, Case] = {
    **cases_of(
        decoder(
            "hyperclovax",
            "HyperCLOVAXForCausalLM",
            **_LOGITS,
            attention_bias=True,
            mlp_bias=True,
            attention_multiplier=0.15,
        ),
        attention_multiplier={"attention_multiplier": None},
        use_post_norm={"use_post_norm": False},
        logits_scaling={"logits_scaling": 1.0},
        residual_multiplier={"residual_multiplier": 1.0},
        rms_norm_eps={"rms_norm_eps": 1.0},
    ),
    **cases_of(
        decoder("hy_v3", "HYV3ForCausalLM", **_HY, mlp_bias=True),
        attention_bias={"attention_bias": False},
        mlp_bias={"mlp_bias": False},
        mlp_layer_types={"mlp_layer_types": ["dense", "sparse", "dense"]},
        num_experts_per_tok={"num_experts_per_tok": 3},
        num_shared_experts={"num_shared_experts": 1},
        router_scaling_factor={"router_scaling_factor": 1.0},
        rope_theta={"rope_theta": 10000.0},
    ),
    **cases_of(
        decoder("sarvam_moe", "Glm4MoeForCausalLM", **_SARVAM),
        use_qk_norm={"use_qk_norm": False},
        attention_bias={"use_qkv_bias": False},
        n_group={"n_group": 3},
        norm_topk_prob={"norm_topk_prob": False},
        routed_scaling_factor={"routed_scaling_factor": 1.0},
        first_k_dense_replace={"first_k_dense_replace": 0},
    ),
    **cases_of(
        changed(LATENT_CASES["deepseek_v3"].config, model_type="sarvam_mla", q_lora_rank=None, head_dim=38),
        q_lora_rank={"q_lora_rank": 20},
        yarn={"rope_scaling": {**YARN, "type": "deepseek_yarn", "rope_type": None}},
        n_group={"n_group": 3},
    ),
    **cases_of(
        decoder("granite_swa", "GraniteSWAForCausalLM", **_GRANITE_SWA, mlp_bias=True, embedding_multiplier=6.0),
        **_OTHER_GRANITE,
        attention_multiplier={"attention_multiplier": 0.3},
        embedding_multiplier={"embedding_multiplier": 1.0},
    ),
    **cases_of(
        decoder(
            "granitemoe_swa",
            "GraniteMoeSWAForCausalLM",
            **_GRANITE_SWA,
            intermediate_size=24,
            num_local_experts=5,
            num_experts_per_tok=2,
            shared_intermediate_size=36,
        ),
        layer_rope_theta=_OTHER_GRANITE["layer_rope_theta"],
        no_shared_expert={"shared_intermediate_size": 0},
        num_experts_per_tok={"num_experts_per_tok": 3},
    ),
    **cases_of(
        decoder("iquestcoder", "LlamaForCausalLM", head_dim=14, attention_bias=True, mlp_bias=True),
        mlp_bias={"mlp_bias": False},
        rms_norm_eps={"rms_norm_eps": 1e-5},
    ),
    **cases_of(
        decoder("internlm3", "LlamaForCausalLM", head_dim=14, attention_bias=True, mlp_bias=True),
        biases={"attention_bias": False, "mlp_bias": False},
        rms_norm_eps={"rms_norm_eps": 1e-5},
    ),
    **cases_of(
        decoder("exaone", "LlamaForCausalLM", rope_scaling=LLAMA3),
        head_dim={"head_dim": 14},
        rope_theta={"rope_theta": 10000.0},
        rms_norm_eps={"rms_norm_eps": 1e-5},
    ),
    **cases_of(
        decoder(
            "vaultgemma",
            "VaultGemmaForCausalLM",
            hidden_act=None,
            hidden_activation="gelu_pytorch_tanh",
            head_dim=10,
            attention_bias=True,
            query_pre_attn_scalar=30,
            sliding_window=7,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=30.0,
        ),
        attention_bias={"attention_bias": False},
        hidden_activation={"hidden_activation": "silu"},
        query_pre_attn_scalar={"query_pre_attn_scalar": 10},
        layer_types={"layer_types": [FULL, SLIDING]},
        attn_logit_softcapping={"attn_logit_softcapping": None},
        final_logit_softcapping={"final_logit_softcapping": 10.0},
    ),
    **cases_of(
        decoder(
            "mellum",
            "MellumForCausalLM",
            num_hidden_layers=3,
            head_dim=12,
            attention_bias=True,
            rope_theta=None,
            rope_parameters=_TWO_ROPES,
            sliding_window=7,
            layer_types=[SLIDING, FULL, SLIDING],
            mlp_layer_types=["dense", "sparse", "sparse"],
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=20,
        ),
        attention_bias={"attention_bias": False},
        rope_of_windows={"rope_parameters": {**_TWO_ROPES, SLIDING: _TWO_ROPES[FULL]}},
        yarn={"rope_parameters": {**_TWO_ROPES, FULL: {**YARN, "rope_theta": 500.0, "truncate": True}}},
        sliding_window={"sliding_window": 12},
        layer_types={"layer_types": None},
        mlp_layer_types={"mlp_layer_types": ["sparse", "sparse", "dense"]},
        num_experts_per_tok={"num_experts_per_tok": 3},
        norm_topk_prob={"norm_topk_prob": False},
    ),
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
