"""The contents of config.json of published checkpoints with images; see published_configs."""

from __future__ import annotations

from golden.published_newer import NEWER, published_config
from golden.published_recurrent import RECURRENT
from golden.published_routed import LLAMA4
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


# Of the language model; the last keys are of images.
_SMOL_TEXT: Config = {
    "_flash_attn_2_enabled": True,
    "architectures": ["VLlama3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "use_cache": True,
    "vocab_size": 49280,
    "neftune_noise_alpha": 0.0,
    "perceiver_config": {"model_type": "vllama3"},
    "pixel_shuffle_factor": 4,
    "qk_layer_norms": False,
    "use_resampler": False,
}


def _smol(model_type: str, architecture: str) -> Config:
    return {
        "architectures": [architecture],
        "image_token_id": 49190,
        "model_type": model_type,
        "scale_factor": 4,
        "text_config": _SMOL_TEXT,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_reentrant_checkpoints": False,
        "vision_config": {"hidden_size": 768, "model_type": model_type, "patch_size": 16},
        "vocab_size": 49280,
    }


IMAGES: dict[str, Config] = {
    "SmolVLM-256M": _smol("idefics3", "Idefics3ForConditionalGeneration"),
    "SmolVLM2-256M": _smol("smolvlm", "SmolVLMForConditionalGeneration"),
    "Llama-4-Maverick": {
        "architectures": ["Llama4ForConditionalGeneration"],
        "boi_token_index": 200080,
        "eoi_token_index": 200081,
        "image_token_index": 200092,
        "model_type": "llama4",
        "text_config": {
            **LLAMA4,
            "interleave_moe_layer_step": 2,
            "max_position_embeddings": 1048576,
            "num_local_experts": 128,
            "rope_scaling": None,
            "use_qk_norm": False,
        },
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0.dev0",
        "vision_config": {"hidden_size": 1408, "model_type": "llama4_vision_model", "patch_size": 14},
    },
    "EXAONE-4.5-33B": {
        "architectures": ["Exaone4_5_ForConditionalGeneration"],
        "image_token_id": 67,
        "model_type": "exaone4_5",
        "text_config": changed(
            NEWER["EXAONE-4.0-32B"],
            architectures=None,
            model_type="exaone4_5_text",
            num_nextn_predict_layers=1,
            vocab_size=153600,
        ),
        "tie_word_embeddings": False,
        "video_token_id": 68,
        "vision_config": {"hidden_size": 2048, "model_type": "exaone4_5_vision", "patch_size": 14},
        "vision_end_token_id": 74,
        "vision_start_token_id": 73,
    },
    "LFM3-VL-2B": {
        "architectures": ["Lfm3VlForConditionalGeneration"],
        "image_token_id": 125030,
        "model_type": "lfm3_vl",
        "projector_bias": True,
        "projector_hidden_act": "gelu",
        "projector_hidden_size": 4096,
        "text_config": changed(RECURRENT["LFM3-1.7B"], architectures=None, auto_map=None),
        "tie_word_embeddings": True,
        "video_token_id": 125029,
        "vision_config": {"hidden_size": 1024, "model_type": "lfm3_vl_vision", "patch_size": 16},
        "vision_end_token_id": 125010,
        "vision_start_token_id": 125009,
    },
    "GLM-4.1V-9B": published_config(
        "glm4v",
        "Glm4vForConditionalGeneration",
        (4096, 13696, 40, 32, 151552),
        attention_bias=True,
        attention_dropout=0.0,
        eos_token_id=[151329, 151336, 151338, 151348],
        hidden_act="silu",
        image_end_token_id=151340,
        image_start_token_id=151339,
        image_token_id=151343,
        max_position_embeddings=65536,
        num_key_value_heads=2,
        pad_token_id=151329,
        partial_rotary_factor=0.5,
        rms_norm_eps=1e-5,
        rope_scaling={"type": "default", "mrope_section": [8, 12, 12]},
        rope_theta=10000.0,
        tie_word_embeddings=False,
        video_end_token_id=151342,
        video_start_token_id=151341,
        video_token_id=151344,
        vision_config={"depth": 24, "hidden_size": 1536, "out_hidden_size": 4096, "patch_size": 14},
    ),
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
