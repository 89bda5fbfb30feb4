"""The parity cases of models with images: their language models, with texts; see family_cases.

transformers computes the logits with the whole model. Its vision tower is tiny and sees no image.
"""

from __future__ import annotations

from golden.case_table import FULL, SLIDING, cases_of, decoder
from golden.cases import YARN, Case
from golden.latent_cases import LATENT_CASES
from golden.recurrent_cases import LFM3, RECURRENT_CASES
from golden.routed_cases import GROUPS, LLAMA4
from golden.tiny_checkpoints import Config, changed

# Text is at the same position in all sections. Heads have 14 dimensions, or 10 where they cannot be wider.
_SECTIONS: Config = {"mrope_section": [3, 2, 2], "mrope_interleaved": True}
_YARN: Config = {**YARN, "truncate": True}
_TOWER: Config = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 2,
    "patch_size": 2,
    "spatial_merge_size": 1,
    "temporal_patch_size": 1,
}


def _nested(text_type: str, start: Config, tower: Config, **variants: Config) -> dict[str, Case]:
    """Cases with the keys of the language model in text_config."""

    outside = ("architectures", "model_type", "tie_word_embeddings", "torch_dtype", "alignment_intermediate_size")

    def text_config(**changes: object) -> Config:
        text = changed(start, **dict.fromkeys(outside), **changes)
        return {**text, "model_type": text_type}

    config = {key: start[key] for key in outside if key in start}
    config |= {"text_config": text_config(), "vision_config": tower}
    nested = {name: {"text_config": text_config(**changes)} for name, changes in variants.items()}
    # in transformers' Llama 4, the key outside ties nothing
    tied: dict[str, Config] = {} if text_type == "llama4_text" else {"tied": {"tie_word_embeddings": True}}
    return cases_of(config, **nested, **tied)


_QWEN2 = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
_OLD_SECTIONS: Config = {"type": "mrope", "mrope_section": [2, 2, 1]}
_QWEN2_VARIANTS: dict[str, Config] = {
    "max_window_layers": {"max_window_layers": 2},
    "layer_types": {"layer_types": [SLIDING, FULL, FULL]},
    "rope_theta": {"rope_theta": 10000.0},
    "rms_norm_eps": {"rms_norm_eps": 1e-5},
    "yarn": {"rope_scaling": {**_YARN, "mrope_section": [2, 2, 1]}},
}
_QWEN3 = {"head_dim": 14, "attention_bias": True, "rope_scaling": {**_SECTIONS, "rope_type": "default"}}
_QWEN3_VARIANTS: dict[str, Config] = {
    "attention_bias": {"attention_bias": False},
    "rope_theta": {"rope_theta": 10000.0},
    "rms_norm_eps": {"rms_norm_eps": 1e-5},
    "yarn": {"rope_scaling": {**_YARN, **_SECTIONS}},
}
_QWEN3_TOWER: Config = {
    **_TOWER,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 4,
    "out_hidden_size": 40,
}

_IDEFICS3_TOWER: Config = {
    "hidden_size": 8,
    "image_size": 4,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "patch_size": 2,
}
_LLAMA4_TOWER: Config = {
    **_IDEFICS3_TOWER,
    "intermediate_size": 32,
    **dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 8),
}
_LFM3_TOWER: Config = {
    **_TOWER,
    "layer_types": ["full_attention"],
    "num_attention_heads": 2,
    "num_heads": None,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
}
_CLIP: Config = {**_IDEFICS3_TOWER, "model_type": "clip_vision_model", "projection_dim": 8}
_SIGLIP: Config = {**_IDEFICS3_TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
_LLAMA_VARIANTS: dict[str, Config] = {"attention_bias": {"attention_bias": False}, "yarn": {"rope_scaling": _YARN}}
_GLM_ROPE: Config = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [1, 2, 1]}

IMAGE_CASES: dict[str, Case] = {
    **cases_of(  # published with all keys in one object
        decoder(
            "qwen2_vl",
            "Qwen2VLForConditionalGeneration",
            num_hidden_layers=3,
            **_QWEN2,
            rope_scaling=_OLD_SECTIONS,
            vision_config={**_TOWER, "embed_dim": 8, "hidden_size": 40, "mlp_ratio": 1},
        ),
        **_QWEN2_VARIANTS,
        tied={"tie_word_embeddings": True},
    ),
    **_nested(
        "qwen2_5_vl_text",
        decoder(
            "qwen2_5_vl",
            "Qwen2_5_VLForConditionalGeneration",
            num_hidden_layers=3,
            **_QWEN2,
            rope_scaling={**_OLD_SECTIONS, "type": "default", "rope_type": "default"},
        ),
        {**_TOWER, "out_hidden_size": 40, "fullatt_block_indexes": [0], "window_size": 4},
        **{name: _QWEN2_VARIANTS[name] for name in ("layer_types", "yarn")},
    ),
    **_nested(
        "llama",
        decoder("idefics3", "Idefics3ForConditionalGeneration", attention_bias=True, mlp_bias=True),
        _IDEFICS3_TOWER,
        **_LLAMA_VARIANTS,
    ),
    **_nested(
        "llama",
        decoder("smolvlm", "SmolVLMForConditionalGeneration", attention_bias=True, mlp_bias=True),
        _IDEFICS3_TOWER,
        rms_norm_eps={"rms_norm_eps": 1e-5},
    ),
    **_nested(  # Mistral Small 3.1; the language model of Ministral 3 has cases of its own
        "mistral",
        decoder("mistral3", "Mistral3ForConditionalGeneration", head_dim=14, sliding_window=7),
        {**_IDEFICS3_TOWER, "head_dim": 4, "model_type": "pixtral"},
        sliding_window={"sliding_window": 12},
        head_dim={"head_dim": 10},
    ),
    **_nested(
        "llama4_text",
        decoder("llama4", "Llama4ForConditionalGeneration", **LLAMA4),
        _LLAMA4_TOWER,
        attention_chunk_size={"attention_chunk_size": 12},
        num_experts_per_tok={"num_experts_per_tok": 2},
    ),
    **_nested(
        "exaone4_5_text",
        decoder(
            "exaone4_5",
            "Exaone4_5_ForConditionalGeneration",
            num_hidden_layers=4,
            head_dim=14,
            sliding_window=7,
            sliding_window_pattern=4,
        ),
        {**_TOWER, "out_hidden_size": 40, "fullatt_block_indexes": [0], "window_size": 4, "num_key_value_heads": 1},
        sliding_window={"sliding_window": 12},
        sliding_window_pattern={"sliding_window_pattern": 2},
    ),
    **_nested(
        "lfm2",
        RECURRENT_CASES["lfm2"].config
        | {"architectures": ["Lfm2VlForConditionalGeneration"], "model_type": "lfm2_vl", "tie_word_embeddings": False},
        {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "num_patches": 4},
        conv_L_cache={"conv_L_cache": 5},
        block_multiple_of={"block_multiple_of": 16},
    ),
    **_nested(
        "lfm3",
        decoder("lfm3_vl", "Lfm3VlForConditionalGeneration", **LFM3),
        _LFM3_TOWER,
        sliding_window={"sliding_window": 12},
        use_attention_gate={"use_attention_gate": False},
    ),
    **_nested(
        "glm4v_text",
        decoder(
            "glm4v",
            "Glm4vForConditionalGeneration",
            rope_theta=None,
            rope_parameters={**_GLM_ROPE, "partial_rotary_factor": 0.8},
        ),
        {**_TOWER, "image_size": 4, "out_hidden_size": 40},
        partial_rotary_factor={"rope_parameters": {**_GLM_ROPE, "partial_rotary_factor": 0.4, "mrope_section": [1, 1]}},
        rms_norm_eps={"rms_norm_eps": 1e-5},
    ),
    **_nested(
        "glm4v_moe_text",
        decoder(
            "glm4v_moe",
            "Glm4vMoeForConditionalGeneration",
            **GROUPS,
            attention_bias=True,
            head_dim=14,
            rope_theta=None,
            rope_parameters={**_GLM_ROPE, "partial_rotary_factor": 0.6},
        ),
        {**_TOWER, "image_size": 4, "out_hidden_size": 40},
        partial_rotary_factor={"rope_parameters": {**_GLM_ROPE, "partial_rotary_factor": 0.3, "mrope_section": [1, 1]}},
        attention_bias={"attention_bias": False},
        n_group={"n_group": 3},
    ),
    **_nested(
        "cohere2",
        decoder(
            "cohere2_vision",
            "Cohere2VisionForConditionalGeneration",
            rms_norm_eps=None,
            layer_norm_eps=0.05,
            logit_scale=1.0,
            sliding_window=7,
            sliding_window_pattern=2,
            alignment_intermediate_size=8,
        ),
        {**_IDEFICS3_TOWER, "model_type": "siglip_vision_model"},
        sliding_window={"sliding_window": 12},
        layer_types={"layer_types": [FULL, SLIDING]},
    ),
    **_nested(
        "qwen2",
        decoder("internvl", "InternVLForConditionalGeneration", num_hidden_layers=3, **_QWEN2, rope_scaling=None),
        {**_IDEFICS3_TOWER, "image_size": [4, 4], "patch_size": [2, 2]},
        **{name: _QWEN2_VARIANTS[name] for name in ("layer_types", "rms_norm_eps")},
    ),
    **_nested(
        "llama",
        decoder("llava", "LlavaForConditionalGeneration", attention_bias=True, mlp_bias=True),
        _CLIP,
        **_LLAMA_VARIANTS,
    ),
    **_nested(
        "mistral",
        decoder("llava_next", "LlavaNextForConditionalGeneration", head_dim=14, sliding_window=7),
        _CLIP,
        sliding_window={"sliding_window": 12},
    ),
    **_nested(
        "qwen2",
        decoder("llava_onevision", "LlavaOnevisionForConditionalGeneration", **{**_QWEN2, "num_hidden_layers": 3}),
        _SIGLIP,
        max_window_layers=_QWEN2_VARIANTS["max_window_layers"],
    ),
    **_nested(
        "cohere2",
        decoder(
            "aya_vision",
            "AyaVisionForConditionalGeneration",
            rms_norm_eps=None,
            layer_norm_eps=0.05,
            logit_scale=1.0,
            sliding_window=7,
            sliding_window_pattern=2,
        ),
        _SIGLIP,
        sliding_window={"sliding_window": 12},
    ),
    **cases_of(  # two of the language model's sizes are also outside
        {
            "architectures": ["Ovis2ForConditionalGeneration"],
            "model_type": "ovis2",
            "hidden_size": 40,
            "text_config": decoder("qwen2", "Qwen2ForCausalLM", **{**_QWEN2, "num_hidden_layers": 3}),
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "vision_config": {**_IDEFICS3_TOWER, "vocab_size": 12},
            "vocab_size": 61,
        },
        tied={"tie_word_embeddings": None},
    ),
    **_nested(
        "glm4v_text",
        decoder(
            "glm46v",
            "Glm46VForConditionalGeneration",
            rope_theta=None,
            rope_parameters={**_GLM_ROPE, "partial_rotary_factor": 0.8},
        ),
        {**_TOWER, "image_size": 4, "out_hidden_size": 40},
        rms_norm_eps={"rms_norm_eps": 1e-5},
    ),
    **_nested(
        "deepseek_v3",
        changed(
            LATENT_CASES["deepseek_v3"].config,
            architectures=["Kimi_K25ForConditionalGeneration"],
            model_type="kimi_k25",
        ),
        {**_IDEFICS3_TOWER, "patch_size": 2, "pos_emb_height": 2, "pos_emb_width": 2, "pos_emb_time": 2},
        n_group={"n_group": 3},
    ),
    **_nested(
        "qwen3_vl_text",
        decoder("qwen3_vl", "Qwen3VLForConditionalGeneration", **_QWEN3),
        _QWEN3_TOWER,
        **_QWEN3_VARIANTS,
        head_dim={"head_dim": 10, "rope_scaling": None},
    ),
    **_nested(
        "qwen3_vl_moe_text",
        decoder(
            "qwen3_vl_moe",
            "Qwen3VLMoeForConditionalGeneration",
            num_hidden_layers=3,
            **_QWEN3,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            mlp_only_layers=[0],
        ),
        _QWEN3_TOWER,
        **{name: _QWEN3_VARIANTS[name] for name in ("attention_bias", "yarn")},
        decoder_sparse_step={"decoder_sparse_step": 2},
        mlp_only_layers={"mlp_only_layers": [1]},
        num_experts_per_tok={"num_experts_per_tok": 3},
    ),
}
