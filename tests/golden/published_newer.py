"""The contents of config.json of published checkpoints of newer families; see published_configs."""

from __future__ import annotations

from golden.tiny_checkpoints import Config

OLD: Config = {"initializer_range": 0.02, "torch_dtype": "bfloat16", "use_cache": True}


def published_config(model_type: str, architecture: str, sizes: tuple[int, ...], **keys: object) -> Config:
    """A config. sizes: hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, vocab_size."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    named = dict(zip(names, sizes, strict=True))
    return {"architectures": [architecture], "model_type": model_type, **named, **OLD, **keys}


NEWER: dict[str, Config] = {
    "gpt-oss-20b": published_config(
        "gpt_oss",
        "GptOssForCausalLM",
        (2880, 2880, 24, 64, 201088),
        attention_bias=True,
        attention_dropout=0.0,
        eos_token_id=200002,
        experts_per_token=4,
        head_dim=64,
        hidden_act="silu",
        initial_context_length=4096,
        layer_types=["sliding_attention", "full_attention"] * 12,
        max_position_embeddings=131072,
        num_experts_per_tok=4,
        num_key_value_heads=8,
        num_local_experts=32,
        output_router_logits=False,
        pad_token_id=199999,
        quantization_config={"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
        rms_norm_eps=1e-5,
        rope_scaling={
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        rope_theta=150000,
        router_aux_loss_coef=0.9,
        sliding_window=128,
        swiglu_limit=7.0,
        tie_word_embeddings=False,
    ),
    "Seed-OSS-36B": published_config(
        "seed_oss",
        "SeedOssForCausalLM",
        (5120, 27648, 64, 80, 155136),
        attention_bias=True,
        attention_dropout=0.1,
        attention_out_bias=False,
        bos_token_id=0,
        eos_token_id=2,
        head_dim=128,
        hidden_act="silu",
        max_position_embeddings=524288,
        mlp_bias=False,
        num_key_value_heads=8,
        pad_token_id=1,
        residual_dropout=0.1,
        rms_norm_eps=1e-6,
        rope_scaling={"rope_type": "default"},
        rope_theta=10000000.0,
        tie_word_embeddings=False,
    ),
    "starcoder2-3b": published_config(
        "starcoder2",
        "Starcoder2ForCausalLM",
        (3072, 12288, 30, 24, 49152),
        attention_dropout=0.1,
        bos_token_id=0,
        embedding_dropout=0.1,
        eos_token_id=0,
        hidden_act="gelu_pytorch_tanh",
        max_position_embeddings=16384,
        norm_epsilon=1e-5,
        norm_type="layer_norm",
        num_key_value_heads=2,
        residual_dropout=0.1,
        rope_theta=999999.4420358813,
        sliding_window=4096,
        use_bias=True,
    ),
}
