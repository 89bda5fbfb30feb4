"""Rows of the table of families: models with images, of which the language model is read.

Gemma 3 and Qwen 3.5 are next to their language models, which transformers also has as separate families.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llamac.export.hf.families_experts import QWEN3_MOE
from llamac.export.hf.families_gated import EXAONE4, GEMMA3, GLM4, LLAMA, MINISTRAL3, MISTRAL, QWEN2, QWEN3
from llamac.export.hf.families_latent import MISTRAL4
from llamac.export.hf.families_layer_norm import COHERE2
from llamac.export.hf.families_routed import COHERE2_MOE, GLM4_MOE
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
    fused_turned="by_shape",
    text_type="qwen3_vl_moe_text",
    written_as="qwen3_moe",
)

# The language model of Ministral 3 is its own, as is that of Mistral Small 4. That of Mistral Small 3.1 and 3.2 is
# Mistral's.
_MISTRAL3: dict[str, Any] = {
    "architectures": ("Mistral3ForConditionalGeneration",),
    "bare": "Mistral3Model",
    "ignored": (*MISTRAL.ignored, r"(vision_tower|multi_modal_projector)\..*"),
    "renamed": GEMMA3.renamed,
}
MISTRAL3 = replace(
    MINISTRAL3,
    model_type="mistral3",
    **_MISTRAL3,
    written_as="ministral3",
    other_texts=(
        replace(MISTRAL, **_MISTRAL3, written_as="mistral"),
        replace(MISTRAL4, **_MISTRAL3, written_as="mistral4"),
    ),
)

# SmolLM2 or LLaMA 3, with keys of images among those of the language model.
IDEFICS3 = replace(
    LLAMA,
    model_type="idefics3",
    architectures=("Idefics3ForConditionalGeneration",),
    bare="Idefics3Model",
    fixed={"qk_layer_norms": False, "use_resampler": False},
    harmless=("neftune_noise_alpha", "perceiver_config", "pixel_shuffle_factor"),
    ignored=(*LLAMA.ignored, r"(vision_model|connector)\..*"),
    renamed=((r"^(model\.)?text_model\.", "model."),),
    written_as="llama",
)
SMOLVLM = replace(
    IDEFICS3,
    model_type="smolvlm",
    architectures=("SmolVLMForConditionalGeneration",),
    bare="SmolVLMModel",
)

GLM4V = replace(
    GLM4,
    model_type="glm4v",
    architectures=("Glm4vForConditionalGeneration",),
    bare="Glm4vModel",
    modules=tuple(replace(x, bias="always" if x.bias == "attention_bias" else x.bias) for x in GLM4.modules),
    keys={
        **without(GLM4.keys, "attention_bias"),
        "head_dim": None,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 1.0,
    },
    fixed={"attention_bias": True},
    sizes_of_head=True,
    rope_harmless=_SECTIONS,
    ignored=_IGNORED,
    renamed=GEMMA3.renamed,
    text_type="glm4v_text",
    flat_text=True,
    written_as="glm4",
)

GLM4V_MOE = replace(
    GLM4_MOE,
    model_type="glm4v_moe",
    architectures=("Glm4vMoeForConditionalGeneration",),
    bare="Glm4vMoeModel",
    keys={
        **without(GLM4_MOE.keys, "use_qk_norm"),
        "vocab_size": 151424,
        "max_position_embeddings": 65536,
        "attention_bias": True,
    },
    fixed={**GLM4_MOE.fixed, "use_qk_norm": False},
    qk_norm="none",
    rope_harmless=_SECTIONS,
    ignored=_IGNORED,
    renamed=GEMMA3.renamed,
    old_keys={"num_local_experts": "n_routed_experts"},
    text_type="glm4v_moe_text",
    flat_text=True,
    written_as="glm4_moe",
)

# Cohere 2, in Command A+ with experts. transformers does not multiply the logits by logit_scale here; others do.
_COHERE_VISION: dict[str, Any] = {
    "architectures": ("Cohere2VisionForConditionalGeneration",),
    "bare": "Cohere2VisionModel",
    "fixed": {**COHERE2.fixed, "logit_scale": 1.0},
    "ignored": (*COHERE2.ignored, r"(vision_tower|multi_modal_projector)\..*"),
    "renamed": GEMMA3.renamed,
}
COHERE2_VISION = replace(
    COHERE2,
    model_type="cohere2_vision",
    keys=without(COHERE2.keys, "logit_scale"),
    **_COHERE_VISION,
    written_as="cohere2",
    other_texts=(
        replace(COHERE2_MOE, keys=without(COHERE2_MOE.keys, "logit_scale"), **_COHERE_VISION, written_as="cohere2_moe"),
    ),
)

EXAONE4_5 = replace(
    EXAONE4,
    model_type="exaone4_5",
    architectures=("Exaone4_5_ForConditionalGeneration",),
    bare="Exaone4_5_Model",
    ignored=_IGNORED,
    renamed=GEMMA3.renamed,
    old_text_type="exaone4_5_text",
    written_as="exaone4",
)

# Qwen 2.5 in InternVL 3, Qwen 3 in InternVL 3.5, as transformers stores them (-HF).
_INTERN_VL: dict[str, Any] = {
    "architectures": ("InternVLForConditionalGeneration",),
    "bare": "InternVLModel",
    "ignored": (*QWEN2.ignored, r"(vision_tower|multi_modal_projector)\..*"),
    "renamed": GEMMA3.renamed,
}
INTERN_VL = replace(
    QWEN2,
    model_type="internvl",
    **_INTERN_VL,
    written_as="qwen2",
    other_texts=(
        replace(QWEN3, **_INTERN_VL, written_as="qwen3"),
        replace(QWEN3_MOE, **_INTERN_VL, written_as="qwen3_moe"),
    ),
)
