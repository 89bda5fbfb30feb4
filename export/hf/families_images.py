"""Rows of the table of families: models with images, of which the language model is read.

Gemma 3 and Qwen 3.5 are next to their language models, which transformers also has as separate families.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llamac.export.hf.families_experts import QWEN3_MOE
from llamac.export.hf.families_gated import EXAONE4, GEMMA3, GLM4, LLAMA, MINISTRAL3, MISTRAL, QWEN2, QWEN3
from llamac.export.hf.families_latent import DEEPSEEK_V3, MISTRAL4
from llamac.export.hf.families_layer_norm import COHERE, COHERE2
from llamac.export.hf.families_routed import COHERE2_MOE, GLM4_MOE
from llamac.export.hf.family import Family
from llamac.export.hf.family_parts import COMMON, without

_IGNORED = (*QWEN2.ignored, r"visual\..*")
_SECTIONS = ("mrope_section", "mrope_interleaved")  # all three positions of a token of text are equal
_MROPE = {"mrope": "default"}
_LLAVA_PARTS = r"(vision_tower|multi_modal_projector)\..*|image_newline"


def _with_texts(
    model_type: str, classes: tuple[str, ...], bare: str, texts: tuple[Family, ...], ignored: str, **options: Any
) -> Family:
    """The row for a model whose language model is one of several families; the first is transformers' default."""
    first, *others = (
        replace(
            text,
            architectures=classes,
            bare=bare,
            ignored=(*text.ignored, ignored),
            renamed=GEMMA3.renamed,
            written_as=text.model_type,
            **options,
        )
        for text in texts
    )
    return replace(first, model_type=model_type, other_texts=tuple(others))


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

# Mistral Small 3.1 and 3.2; Ministral 3; Mistral Small 4.
MISTRAL3 = _with_texts(
    "mistral3", ("Mistral3ForConditionalGeneration",), "Mistral3Model", (MISTRAL, MINISTRAL3, MISTRAL4), _LLAVA_PARTS
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

_GLM46V: dict[str, Any] = {"architectures": ("Glm46VForConditionalGeneration",), "bare": "Glm46VModel"}
GLM46V = replace(
    GLM4V,
    model_type="glm46v",
    **_GLM46V,
    other_texts=(replace(GLM4V_MOE, **_GLM46V),),
)

# Cohere 2, in Command A+ with experts. vLLM multiplies the logits by logit_scale, transformers 5.24 does not.
COHERE2_VISION = _with_texts(
    "cohere2_vision",
    ("Cohere2VisionForConditionalGeneration",),
    "Cohere2VisionModel",
    (COHERE2, COHERE2_MOE),
    _LLAVA_PARTS,
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
INTERN_VL = _with_texts(
    "internvl",
    ("InternVLForConditionalGeneration",),
    "InternVLModel",
    tuple(
        replace(text, harmless=(*text.harmless, "debug", "ep_size", "micro_forward", "skip_checkpoint", "use_deepep"))
        for text in (QWEN2, QWEN3, QWEN3_MOE)  # the keys say how InternVL 3.5 was trained
    ),
    _LLAVA_PARTS,
)

# The sizes of the language models' classes in transformers, which configs leave out where a model has the same.
_SIZES = {"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_TEXTS = tuple(
    replace(text, keys={**text.keys, **_SIZES, **sizes})
    for text, sizes in (
        (LLAMA, {"intermediate_size": 11008}),
        (MISTRAL, {"intermediate_size": 14336}),
        (QWEN2, {"intermediate_size": 22016, "vocab_size": 151936}),
        (QWEN3, {"intermediate_size": 22016, "vocab_size": 151936}),
    )
)
_OUTSIDE: dict[str, Any] = {"outside": ("vocab_size",)}
LLAVA = _with_texts("llava", ("LlavaForConditionalGeneration",), "LlavaModel", _TEXTS, _LLAVA_PARTS, **_OUTSIDE)
LLAVA_NEXT = _with_texts(
    "llava_next", ("LlavaNextForConditionalGeneration",), "LlavaNextModel", _TEXTS, _LLAVA_PARTS, **_OUTSIDE
)
LLAVA_ONEVISION = _with_texts(
    "llava_onevision",
    ("LlavaOnevisionForConditionalGeneration",),
    "LlavaOnevisionModel",
    (*_TEXTS[2:], *_TEXTS[:2]),
    _LLAVA_PARTS,
    **_OUTSIDE,
)

# The published logit_scale is 0.25; see COHERE2_VISION.
AYA_VISION = _with_texts(
    "aya_vision", ("AyaVisionForConditionalGeneration",), "AyaVisionModel", (COHERE2, COHERE), _LLAVA_PARTS
)
OVIS2 = _with_texts(
    "ovis2",
    ("Ovis2ForConditionalGeneration",),
    "Ovis2Model",
    tuple(replace(text, keys={**text.keys, "tie_word_embeddings": True}) for text in (QWEN2, QWEN3)),
    r"(vision_tower|visual_embeddings_table)\..*",
    outside=("hidden_size", "vocab_size"),
)
# DeepSeek V3, under Kimi K2's name in published configs.
_KIMI_K25 = _with_texts(
    "kimi_k25",
    ("Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration"),  # the second: published with its own code
    "Kimi_K25Model",
    (replace(DEEPSEEK_V3, keys={**DEEPSEEK_V3.keys, "tie_word_embeddings": True}),),
    r"(vision_tower|mm_projector)\..*",
    old_text_type="kimi_k2",
)
# transformers 5.24 saves the layers under the name that those of the vision tower have
KIMI_K25 = replace(_KIMI_K25, renamed=(*_KIMI_K25.renamed, (r"^model\.blocks\.", "model.layers.")))
