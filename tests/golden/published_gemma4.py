"""The contents of config.json of published checkpoints of Gemma 4; see published_configs."""

from __future__ import annotations

from golden.published_newer import published_config
from golden.tiny_checkpoints import Config

_TEXT: Config = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "tie_word_embeddings": True,
}


def _layer_types(n_layers: int, every: int) -> list[str]:
    return ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(n_layers)]


def _with_images(model_type: str, architecture: str, text: Config, **outside: object) -> Config:
    return {
        "architectures": [architecture],
        "audio_config": None,
        "audio_token_id": 258881,
        "boa_token_id": 256000,
        "boi_token_id": 255999,
        "dtype": "bfloat16",
        "eoa_token_id": 258883,
        "eoa_token_index": 258883,
        "eoi_token_id": 258882,
        "eos_token_id": [1, 106],
        "image_token_id": 258880,
        "initializer_range": 0.02,
        "model_type": model_type,
        "text_config": text,
        "tie_word_embeddings": True,
        "transformers_version": "5.5.0.dev0",
        "video_token_id": 258884,
        "vision_config": {"model_type": f"{model_type}_vision"},
        "vision_soft_tokens_per_image": 280,
        **outside,
    }


_12B = published_config(
    "gemma4_unified_text",
    "Gemma4UnifiedForCausalLM",
    (3840, 15360, 48, 16, 262144),
    **_TEXT,
    attention_k_eq_v=True,
    layer_types=_layer_types(48, 6),
    max_position_embeddings=262144,
    num_global_key_value_heads=1,
    num_key_value_heads=8,
    num_kv_shared_layers=0,
    sliding_window=1024,
    use_bidirectional_attention="vision",
    use_double_wide_mlp=False,
)
_NO_EXPERTS: Config = {
    "enable_moe_block": False,
    "expert_intermediate_size": None,
    "moe_intermediate_size": None,
    "num_experts": None,
    "top_k_experts": None,
    "vocab_size_per_layer_input": 262144,
}
_31B = published_config(
    "gemma4_text",
    "Gemma4ForCausalLM",
    (5376, 21504, 60, 32, 262144),
    **_TEXT,
    **_NO_EXPERTS,
    attention_k_eq_v=True,
    hidden_size_per_layer_input=0,
    layer_types=_layer_types(60, 6),
    max_position_embeddings=262144,
    num_global_key_value_heads=4,
    num_key_value_heads=16,
    num_kv_shared_layers=0,
    sliding_window=1024,
    use_bidirectional_attention="vision",
    use_double_wide_mlp=False,
)
_E2B = published_config(
    "gemma4_text",
    "Gemma4ForCausalLM",
    (1536, 6144, 35, 8, 262144),
    **_TEXT,
    **_NO_EXPERTS,
    attention_k_eq_v=False,
    hidden_size_per_layer_input=256,
    layer_types=_layer_types(35, 5),
    max_position_embeddings=131072,
    num_global_key_value_heads=None,
    num_key_value_heads=1,
    num_kv_shared_layers=20,
    sliding_window=512,
    use_bidirectional_attention=None,
    use_double_wide_mlp=True,
)
_26B = {
    **_31B,
    "enable_moe_block": True,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "layer_types": _layer_types(30, 6),
    "moe_intermediate_size": 704,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "top_k_experts": 8,
}
GEMMA4: dict[str, Config] = {
    "gemma-4-26B-A4B-text": _26B,
    "gemma-4-31B-text": _31B,
    "gemma-4-E2B-text": _E2B,
    "gemma-4-31B": _with_images("gemma4", "Gemma4ForConditionalGeneration", _31B),
    "gemma-4-E2B": _with_images("gemma4", "Gemma4ForConditionalGeneration", _E2B, audio_config={"hidden_size": 1024}),
    "gemma-4-12B-text": _12B,
    "gemma-4-12B": _with_images("gemma4_unified", "Gemma4UnifiedForConditionalGeneration", _12B),
}
