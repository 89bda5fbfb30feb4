"""The contents of config.json of published LLaVA models, and of others with images and a choice of language models; see
published_configs."""

from __future__ import annotations

from golden.published_latent import LATENT
from golden.published_newer import NEWER
from golden.tiny_checkpoints import Config, changed


def _llava(kind: str, architecture: str, **text: object) -> Config:
    """Sizes that the language model's class has as defaults are missing."""
    return {
        "architectures": [architecture],
        "ignore_index": -100,
        "image_seq_length": 576,
        "image_token_index": 32000,
        "model_type": kind,
        "pad_token_id": 32001,
        "projector_hidden_act": "gelu",
        "text_config": {"_name_or_path": "", "torch_dtype": "bfloat16", **text},
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vision_config": {"hidden_size": 1024, "model_type": "clip_vision_model", "patch_size": 14},
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }


LLAVA: dict[str, Config] = {
    "llava-1.5-7b-hf": {
        **_llava(
            "llava",
            "LlavaForConditionalGeneration",
            architectures=["LlamaForCausalLM"],
            max_position_embeddings=4096,
            model_type="llama",
            rms_norm_eps=1e-5,
            vocab_size=32064,
        ),
        "vocab_size": 32064,
    },
    "llava-v1.6-mistral-7b-hf": {
        **_llava(
            "llava_next",
            "LlavaNextForConditionalGeneration",
            architectures=["MistralForCausalLM"],
            intermediate_size=14336,
            max_position_embeddings=32768,
            model_type="mistral",
            num_key_value_heads=8,
            rms_norm_eps=1e-5,
            rope_theta=1000000.0,
            sliding_window=None,
            vocab_size=32064,
        ),
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672]],
        "use_image_newline_parameter": True,
        "vocab_size": 32064,
    },
    "llava-onevision-qwen2-7b-ov-hf": {
        **_llava(
            "llava_onevision",
            "LlavaOnevisionForConditionalGeneration",
            hidden_size=3584,
            intermediate_size=18944,
            max_position_embeddings=32768,
            model_type="qwen2",
            num_attention_heads=28,
            num_hidden_layers=28,
            num_key_value_heads=4,
            rope_theta=1000000.0,
            vocab_size=152000,
        ),
        "image_grid_pinpoints": [[384, 384], [384, 768]],
        "use_image_newline_parameter": True,
        "video_token_index": 151647,
        "vision_aspect_ratio": "anyres_max_9",
    },
    "aya-vision-8b": {
        "adapter_layer_norm_eps": 1e-06,
        "alignment_intermediate_size": 28672,
        "architectures": ["AyaVisionForConditionalGeneration"],
        "downsample_factor": 2,
        "image_token_index": 255036,
        "model_type": "aya_vision",
        "text_config": changed(NEWER["c4ai-command-r7b-12-2024"], max_position_embeddings=16384),
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "patch_size": 14},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "Kimi-K2.5 (bf16)": {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "ignore_index": -100,
        "media_placeholder_token_id": 163605,
        "model_type": "kimi_k25",
        "text_config": LATENT["Kimi-K2-Instruct (bf16)"],
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "vision_config": {"model_type": "kimi_k25"},
    },
    "Ovis2-1B-hf": {
        "architectures": ["Ovis2ForConditionalGeneration"],
        "hidden_size": 896,
        "image_token_id": 151665,
        "model_type": "ovis2",
        "text_config": {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "max_window_layers": 21,
            "model_type": "qwen2",
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
        },
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1024, "model_type": "ovis2_vision", "vocab_size": 65536},
        "visual_indicator_token_ids": [151666, 151667, 151668, 151669, 151670],
        "vocab_size": 151936,
    },
}
