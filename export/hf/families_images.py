"""Rows of the table of families: models with images, of which the language model is read.

Gemma 3, Ministral 3 and Qwen 3.5 are next to their language models, which transformers also has as separate families.
"""

from __future__ import annotations

from dataclasses import replace

from llamac.export.hf.families_experts import QWEN3_MOE
from llamac.export.hf.families_gated import GEMMA3, QWEN2, QWEN3
from llamac.export.hf.family_parts import COMMON, without

_IGNORED = (*QWEN2.ignored, r"visual\..*")
_SECTIONS = ("mrope_section", "mrope_interleaved")  # all three positions of a token of text are equal
_MROPE = {"mrope": "default"}

QWEN2_VL = replace(
    QWEN2,
    model_type="qwen2_vl",
    architectures=("Qwen2VLForConditionalGeneration",),
    bare="Qwen2VLModel",
    keys={
        **without(QWEN2.keys, "head_dim"),
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "max_window_layers": 80,
    },
    rope_names=_MROPE,
    rope_harmless=_SECTIONS,
    ignored=_IGNORED,
    renamed=GEMMA3.renamed,
    text_type="qwen2_vl_text",
    flat_text=True,
    written_as="qwen2",
)
QWEN2_5_VL = replace(
    QWEN2_VL,
    model_type="qwen2_5_vl",
    architectures=("Qwen2_5_VLForConditionalGeneration",),
    bare="Qwen2_5_VLModel",
    text_type="qwen2_5_vl_text",
)

QWEN3_VL = replace(
    QWEN3,
    model_type="qwen3_vl",
    architectures=("Qwen3VLForConditionalGeneration",),
    bare="Qwen3VLModel",
    keys={
        **COMMON,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 128000,
        "rope_theta": 500000.0,
        "attention_bias": False,
    },
    rope_names=_MROPE,
    rope_harmless=_SECTIONS,
    ignored=_IGNORED,
    renamed=GEMMA3.renamed,
    text_type="qwen3_vl_text",
    written_as="qwen3",
)
QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    model_type="qwen3_vl_moe",
    architectures=("Qwen3VLMoeForConditionalGeneration",),
    bare="Qwen3VLMoeModel",
    keys={
        **QWEN3_VL.keys,
        "num_key_value_heads": 16,
        "head_dim": None,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    fixed={"norm_topk_prob": True},
    rope_names=_MROPE,
    rope_harmless=_SECTIONS,
    ignored=_IGNORED,
    renamed=GEMMA3.renamed,
    fused_turned=True,
    text_type="qwen3_vl_moe_text",
    written_as="qwen3_moe",
)
