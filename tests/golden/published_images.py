"""The contents of config.json of published checkpoints with images; see published_configs."""

from __future__ import annotations

from golden.published_newer import published_config
from golden.tiny_checkpoints import Config, changed

_TOKENS: Config = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
}
# Published with all keys in one object.
_QWEN2: Config = published_config(
    "qwen2_vl",
    "Qwen2VLForConditionalGeneration",
    (3584, 18944, 28, 28, 152064),
    **_TOKENS,
    attention_dropout=0.0,
    bos_token_id=151643,
    eos_token_id=151645,
    hidden_act="silu",
    max_position_embeddings=32768,
    max_window_layers=28,
    num_key_value_heads=4,
    rms_norm_eps=1e-6,
    rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
    rope_theta=1000000.0,
    sliding_window=32768,
    tie_word_embeddings=False,
    use_sliding_window=False,
    vision_config={"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "in_chans": 3, "spatial_patch_size": 14},
    vision_token_id=151654,
)
_QWEN2_5 = changed(
    _QWEN2,
    architectures=["Qwen2_5_VLForConditionalGeneration"],
    max_position_embeddings=128000,
    model_type="qwen2_5_vl",
    vision_config={"depth": 32, "hidden_size": 1280, "in_chans": 3, "out_hidden_size": 3584, "window_size": 112},
)
# Saved again by transformers 4.53, which repeats the keys in text_config.
_QWEN2_5_AGAIN: Config = {
    **_QWEN2_5,
    "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
    "text_config": {
        **changed(_QWEN2_5, vision_config=None),
        "image_token_id": None,
        "layer_types": ["full_attention"] * 28,
        "model_type": "qwen2_5_vl_text",
        "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
        "sliding_window": None,
        "video_token_id": None,
    },
    "transformers_version": "4.53.1",
}
_QWEN3_TEXT: Config = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    "rope_theta": 5000000,
    "use_cache": True,
    "vocab_size": 151936,
}


def _qwen3(model_type: str, architecture: str, *, tied: bool, **text: object) -> Config:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "text_config": {**_QWEN3_TEXT, **text, "model_type": f"{model_type}_text"},
        "tie_word_embeddings": tied,
        "transformers_version": "4.57.0.dev0",
        "vision_config": {"deepstack_visual_indexes": [8, 16, 24], "depth": 27, "model_type": model_type},
        **_TOKENS,
    }


IMAGES: dict[str, Config] = {
    "Qwen2-VL-7B": _QWEN2,
    "Qwen2.5-VL-7B": _QWEN2_5,
    "Qwen2.5-VL-7B-again": _QWEN2_5_AGAIN,
    "Qwen3-VL-4B": _qwen3(
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        tied=True,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    ),
    "Qwen3-VL-30B-A3B": _qwen3(
        "qwen3_vl_moe",
        "Qwen3VLMoeForConditionalGeneration",
        tied=False,
        decoder_sparse_step=1,
        hidden_size=2048,
        intermediate_size=6144,
        mlp_only_layers=[],
        moe_intermediate_size=768,
        norm_topk_prob=True,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=48,
        num_key_value_heads=4,
    ),
}
