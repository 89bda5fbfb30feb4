"""The parity cases of families with layer norms and a plain network, of 2021 to 2023; see family_cases."""

from __future__ import annotations

from golden.case_table import CONTEXT, cases_of, decoder
from golden.cases import LINEAR, Case
from golden.tiny_checkpoints import Config, changed

# Without the keys that these families do not have.
_OTHERS = dict.fromkeys(("hidden_act", "intermediate_size", "num_key_value_heads", "rms_norm_eps"))
_ABSOLUTE = {**_OTHERS, "rope_theta": None}
# GPT-2's names.
_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


def _gpt2(model_type: str, architecture: str, **keys: object) -> Config:
    config = decoder(model_type, architecture, **_ABSOLUTE, layer_norm_epsilon=0.05, **keys)
    return {_NAMES.get(key, key): value for key, value in config.items()}


_OF_SCORES = {"alibi": True, "alibi_bias_max": 8, "clip_qkv": None}


def _mpt() -> Config:
    config = decoder("mpt", "MptForCausalLM", **_ABSOLUTE, layer_norm_epsilon=0.05, attn_config=_OF_SCORES)
    names = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
    }
    return {names.get(key, key): value for key, value in config.items()}


_GPT2_VARIANTS: dict[str, Config] = {
    "n_inner": {"n_inner": None},
    "activation_function": {"activation_function": "relu"},
    "layer_norm_epsilon": {"layer_norm_epsilon": 1e-5},
}

CLASSIC_CASES: dict[str, Case] = {
    **cases_of(
        decoder(
            "falcon",
            "FalconForCausalLM",
            **_OTHERS,
            activation="gelu",
            layer_norm_epsilon=0.05,
            bias=True,
            num_kv_heads=2,
        ),
        bias={"bias": False},
        activation={"activation": "relu"},
        ffn_hidden_size={"ffn_hidden_size": 52},
        layer_norm_epsilon={"layer_norm_epsilon": 1e-5},
        multi_query={"multi_query": False, "num_kv_heads": None},
        parallel_attn={"parallel_attn": False},
        new_decoder_architecture={"new_decoder_architecture": True},
        one_norm={"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
        num_kv_heads={"new_decoder_architecture": True, "num_kv_heads": None},
        rope_theta={"rope_theta": 10000.0},
        linear={"rope_scaling": LINEAR},
        tied={"tie_word_embeddings": True},
    ),
    **cases_of(
        decoder(
            "bloom",
            "BloomForCausalLM",
            **{**_ABSOLUTE, "max_position_embeddings": None},
            seq_length=CONTEXT,
            layer_norm_epsilon=0.05,
        ),
        layer_norm_epsilon={"layer_norm_epsilon": 1e-5},
        num_attention_heads={"num_attention_heads": 5},
        tied={"tie_word_embeddings": True},
    ),
    **cases_of(
        _mpt(),
        num_attention_heads={"n_heads": 5},
        softmax_scale={"attn_config": {**_OF_SCORES, "softmax_scale": 0.7}},
        layer_norm_epsilon={"layer_norm_epsilon": 1e-5},
        tied={"tie_word_embeddings": True},
    ),
    **cases_of(
        decoder("opt", "OPTForCausalLM", **_ABSOLUTE, activation_function="relu", ffn_dim=52, word_embed_proj_dim=40),
        activation_function={"activation_function": "gelu"},
        enable_bias={"enable_bias": False},
        tied={"tie_word_embeddings": True},
    ),
    **cases_of(
        _gpt2("gptj", "GPTJForCausalLM", activation_function="gelu_new", n_inner=52, rotary_dim=6),
        **_GPT2_VARIANTS,
        rotary_dim={"rotary_dim": 4},
    ),
    **cases_of(
        _gpt2("codegen", "CodeGenForCausalLM", activation_function="gelu_new", n_inner=52, rotary_dim=6),
        **_GPT2_VARIANTS,
        rotary_dim={"rotary_dim": 4},
    ),
    **cases_of(
        _gpt2("gpt_bigcode", "GPTBigCodeForCausalLM", activation_function="gelu", n_inner=52),
        **_GPT2_VARIANTS,
        multi_query={"multi_query": False},
        tied={"tie_word_embeddings": True},
    ),
    **cases_of(
        changed(
            decoder("gpt_neo", "GPTNeoForCausalLM", **{**_ABSOLUTE, "num_hidden_layers": None}),
            activation_function="gelu_new",
            attention_types=[[["global", "local"], 1], [["local"], 1]],
            intermediate_size=52,
            layer_norm_epsilon=0.05,
            num_attention_heads=None,
            num_heads=4,
            num_layers=3,
            window_size=7,
        ),
        activation_function={"activation_function": "relu"},
        attention_types={"attention_types": [[["local"], 2], [["global"], 1]]},
        intermediate_size={"intermediate_size": None},
        layer_norm_epsilon={"layer_norm_epsilon": 1e-5},
        window_size={"window_size": 12},
        tied={"tie_word_embeddings": True},
    ),
}
