"""The contents of config.json of published checkpoints with Mamba 2 layers; see published_configs."""

from __future__ import annotations

from golden.published_newer import published_config
from golden.tiny_checkpoints import Config

_GRANITE: Config = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 100257,
    "embedding_multiplier": 12,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "init_method": "mup",
    "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "normalization_function": "rmsnorm",
    "output_router_logits": False,
    "pad_token_id": 100256,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": True,
}

MAMBA: dict[str, Config] = {
    "granite-4.0-h-micro": published_config(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        (2048, 8192, 40, 32, 100352),
        **_GRANITE,
        attention_multiplier=0.015625,
        logits_scaling=8,
        mamba_n_heads=64,
        num_experts_per_tok=0,
        num_key_value_heads=8,
        num_local_experts=0,
        shared_intermediate_size=8192,
    ),
    "granite-4.0-h-tiny": published_config(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        (1536, 512, 40, 12, 100352),
        **_GRANITE,
        attention_multiplier=0.0078125,
        logits_scaling=6,
        mamba_n_heads=48,
        num_experts_per_tok=6,
        num_key_value_heads=4,
        num_local_experts=64,
        shared_intermediate_size=1024,
    ),
}
