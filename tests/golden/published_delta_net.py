"""The contents of config.json of published checkpoints with gated delta nets; see published_configs."""

from __future__ import annotations

from golden.published_newer import published_config
from golden.tiny_checkpoints import Config

_ATTENTION: Config = {
    "attention_dropout": 0.0,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_QWEN3_5: Config = {
    **_ATTENTION,
    "attention_bias": False,
    "attn_output_gate": True,
    "bos_token_id": None,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "initializer_range": 0.02,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "pad_token_id": None,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "use_cache": True,
    "vocab_size": 248320,
}


def _layer_types(n_layers: int) -> list[str]:
    return ["linear_attention" if (layer + 1) % 4 else "full_attention" for layer in range(n_layers)]


def _with_images(model_type: str, architecture: str, text: Config) -> Config:
    return {
        "architectures": [architecture],
        "image_token_id": 248056,
        "language_model_only": False,
        "model_type": model_type,
        "text_config": text,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "transformers_version": "4.57.0.dev0",
        "video_token_id": 248057,
        "vision_config": {"depth": 27, "model_type": model_type},
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    }


_DENSE: Config = {
    **_QWEN3_5,
    "model_type": "qwen3_5_text",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "layer_types": _layer_types(32),
    "linear_num_value_heads": 32,
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}
_EXPERTS: Config = {
    **_QWEN3_5,
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "layer_types": _layer_types(40),
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "output_gate_type": "swish",
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
}

DELTA_NET: dict[str, Config] = {
    "Qwen3-Next-80B-A3B": published_config(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        (2048, 5120, 48, 16, 151936),
        **_ATTENTION,
        bos_token_id=151643,
        decoder_sparse_step=1,
        eos_token_id=151645,
        linear_num_value_heads=32,
        mlp_only_layers=[],
        moe_intermediate_size=512,
        norm_topk_prob=True,
        num_experts=512,
        num_experts_per_tok=10,
        num_key_value_heads=2,
        output_router_logits=False,
        rope_scaling=None,
        rope_theta=10000000,
        router_aux_loss_coef=0.001,
        shared_expert_intermediate_size=512,
        use_sliding_window=False,
    ),
    "Olmo-Hybrid-7B": published_config(
        "olmo_hybrid",
        "OlmoHybridForCausalLM",
        (3840, 11008, 32, 30, 100352),
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=100257,
        hidden_act="silu",
        layer_types=_layer_types(32),
        linear_allow_neg_eigval=True,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=96,
        linear_num_key_heads=30,
        linear_num_value_heads=30,
        linear_value_head_dim=192,
        max_position_embeddings=65536,
        num_key_value_heads=30,
        pad_token_id=100277,
        rms_norm_eps=1e-6,
        rope_parameters=None,
        tie_word_embeddings=False,
    ),
    "Qwen3.5-9B": _with_images("qwen3_5", "Qwen3_5ForConditionalGeneration", _DENSE),
    "Qwen3.5-9B-text": {**_DENSE, "architectures": ["Qwen3_5ForCausalLM"]},
    "Qwen3.6-35B-A3B": _with_images("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", _EXPERTS),
    "Qwen3.6-35B-A3B-text": {**_EXPERTS, "architectures": ["Qwen3_5MoeForCausalLM"]},
}
