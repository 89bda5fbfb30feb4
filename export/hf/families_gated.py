"""Rows of the table of families: decoders with RMS norms and a gated network."""

from __future__ import annotations

from dataclasses import replace

from llamac.export.hf.family import TERNARY, Family, Module
from llamac.export.hf.family_parts import (
    COMMON,
    EMBEDDING,
    GEMMA_KEYS,
    NOT_APPLIED,
    QWEN_WINDOW,
    L,
    attention,
    mlp,
    norm,
    pre,
    qk_norms,
    sandwich,
    without,
)

LLAMA = Family(
    model_type="llama",
    architectures=("LlamaForCausalLM", "LLaMAForCausalLM"),  # the second: early conversions
    bare="LlamaModel",
    modules=pre(attention("attention_bias"), mlp("mlp_bias")),
    keys={**COMMON, "attention_bias": False, "mlp_bias": False},
    harmless=("activation",),  # of Falcon 3, beside hidden_act
    quantized=(TERNARY,),
)

ARCEE = replace(
    LLAMA,
    model_type="arcee",
    architectures=("ArceeForCausalLM",),
    bare="ArceeModel",
    modules=pre(attention("attention_bias"), mlp("mlp_bias")[1:]),
    keys={**LLAMA.keys, "hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    ffn="plain",
)

# Norms before the two last products of a layer. Checkpoints have ternary weights (`ternary`), or their masters.
BITNET = replace(
    LLAMA,
    model_type="bitnet",
    architectures=("BitNetForCausalLM",),
    bare="BitNetModel",
    modules=pre(
        (*attention("attention_bias"), norm("self_attn.attn_sub_norm", "attn_sub_norm")),
        (*mlp(), norm("mlp.ffn_sub_norm", "ffn_sub_norm")),
    ),
    keys={
        **without(LLAMA.keys, "mlp_bias"),
        "num_key_value_heads": 5,
        "hidden_act": "relu2",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    },
    sizes_of_head=True,
    sub_norms=True,
)

# No gate; an activation with two learned numbers in each layer.
_XIELU = f"{L}mlp.act_fn."
APERTUS = replace(
    LLAMA,
    model_type="apertus",
    architectures=("ApertusForCausalLM",),
    bare="ApertusModel",
    modules=(
        EMBEDDING,
        norm("attention_layernorm", "attn_norm"),
        *attention("attention_bias"),
        *qk_norms(),
        norm("feedforward_layernorm", "ffn_norm"),
        *mlp()[1:],
        Module(f"{_XIELU}alpha_p", (f"{L}ffn_alpha_p",), parameter=True),
        Module(f"{_XIELU}alpha_n", (f"{L}ffn_alpha_n",), parameter=True),
        Module("norm", ("output_norm",)),
    ),
    keys={
        **without(COMMON, "hidden_act"),
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-5,
        "rope_theta": 12000000.0,
        "attention_bias": False,
    },
    fixed={"hidden_act": "xielu", "mlp_bias": False, "post_norm": False, "qk_norm": True},
    fixed_numbers={f"{_XIELU}beta": 0.5, f"{_XIELU}eps": -1e-6},
    qk_norm="head",
    ffn="plain",
    default_rope={
        "rope_type": "llama3",
        "rope_theta": 12000000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
)

# Neighboring dimensions are rotated; heads are as wide as the output matrix of attention requires.
HELIUM = replace(
    LLAMA,
    model_type="helium",
    architectures=("HeliumForCausalLM",),
    bare="HeliumModel",
    modules=pre(attention("attention_bias", out_bias="never"), mlp("mlp_bias")),
    keys={
        **LLAMA.keys,
        "num_key_value_heads": 20,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-8,
        "rope_theta": 100000.0,
    },
    sizes_of_head=True,
    pairs="neighbors",
)

# LLaMA 3 with windows in three of four layers.
CWM = replace(
    LLAMA,
    model_type="cwm",
    architectures=("CwmForCausalLM",),
    bare="CwmModel",
    modules=pre(attention(), mlp("mlp_bias")),
    keys={
        **without(LLAMA.keys, "attention_bias"),
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": 8192,
        "layer_types": None,
    },
    fixed={"attention_bias": False},
    windows="global_every",
    window_every=4,
    default_rope={
        "rope_type": "llama3",
        "rope_theta": 1000000.0,
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)

MISTRAL = Family(
    model_type="mistral",
    architectures=("MistralForCausalLM",),
    bare="MistralModel",
    modules=pre(attention(), mlp()),
    keys={**COMMON, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
)

# Mistral with a kind of attention per layer.
MINISTRAL = replace(
    MISTRAL,
    model_type="ministral",
    architectures=("MinistralForCausalLM",),
    bare="MinistralModel",
    keys={**MISTRAL.keys, "layer_types": None},
)

QWEN2 = Family(
    model_type="qwen2",
    architectures=("Qwen2ForCausalLM",),
    bare="Qwen2Model",
    modules=pre(attention("always", out_bias="never"), mlp()),
    keys={
        **COMMON,
        **QWEN_WINDOW,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "layer_types": None,
    },
    harmless=NOT_APPLIED,
    windows="late",
)

QWEN3 = Family(
    model_type="qwen3",
    architectures=("Qwen3ForCausalLM",),
    bare="Qwen3Model",
    modules=pre((*attention("attention_bias"), *qk_norms()), mlp()),
    keys={**QWEN2.keys, "head_dim": 128, "attention_bias": False},
    harmless=NOT_APPLIED,
    windows="late",
    qk_norm="head",
)

SMOLLM3 = Family(
    model_type="smollm3",
    architectures=("SmolLM3ForCausalLM",),
    bare="SmolLM3Model",
    modules=LLAMA.modules,
    keys={
        **LLAMA.keys,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "rope_theta": 2000000.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": None,  # stored, but has no effect
        "layer_types": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
    },
    windows="unrotated",
)

SEED_OSS = replace(
    LLAMA,
    model_type="seed_oss",
    architectures=("SeedOssForCausalLM",),
    bare="SeedOssModel",
    modules=pre(attention("attention_bias", out_bias="attention_out_bias"), mlp("mlp_bias")),
    keys={
        **LLAMA.keys,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
        "attention_out_bias": False,
    },
)

GRANITE = Family(
    model_type="granite",
    architectures=("GraniteForCausalLM",),
    bare="GraniteModel",
    modules=LLAMA.modules,
    keys={
        **LLAMA.keys,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    },
)

OLMO2 = Family(
    model_type="olmo2",
    architectures=("Olmo2ForCausalLM",),
    bare="Olmo2Model",
    modules=(
        EMBEDDING,
        *attention("attention_bias"),
        *qk_norms(),
        norm("post_attention_layernorm", "attn_post_norm"),
        *mlp(),
        norm("post_feedforward_layernorm", "ffn_post_norm"),
        Module("norm", ("output_norm",)),
    ),
    keys={**COMMON, "rms_norm_eps": 1e-5, "attention_bias": False},
    placement="post",
    qk_norm="whole",
)

PHI3 = Family(
    model_type="phi3",
    architectures=("Phi3ForCausalLM",),
    bare="Phi3Model",
    modules=pre(
        (
            Module(f"{L}self_attn.qkv_proj", (f"{L}attn_q", f"{L}attn_k", f"{L}attn_v")),
            Module(f"{L}self_attn.o_proj", (f"{L}attn_out",)),
        ),
        (
            Module(f"{L}mlp.gate_up_proj", (f"{L}ffn_gate", f"{L}ffn_up")),
            Module(f"{L}mlp.down_proj", (f"{L}ffn_down",)),
        ),
    ),
    keys={
        **COMMON,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 1.0,
        "sliding_window": None,
    },
    fixed={
        "attention_bias": False,
        "mlp_bias": False,
        "lm_head_bias": False,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
    },
    rope_names={"su": "longrope", "yarn": "longrope"},
    odd_rope=True,
)

GEMMA = Family(
    model_type="gemma",
    architectures=("GemmaForCausalLM",),
    bare="GemmaModel",
    modules=pre(attention("attention_bias"), mlp(), plus_one=True),
    keys={**GEMMA_KEYS, "num_key_value_heads": 16},
    fixed={"use_bidirectional_attention": False},
    scaled_embedding=True,
)

GEMMA2 = Family(
    model_type="gemma2",
    architectures=("Gemma2ForCausalLM",),
    bare="Gemma2Model",
    modules=sandwich(attention("attention_bias"), mlp(), plus_one=True),
    keys={
        **GEMMA_KEYS,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_size": None,  # another name, in some checkpoints
        "layer_types": None,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    fixed={"use_bidirectional_attention": False},
    placement="sandwich",
    windows="alternate",
    scaled_embedding=True,
    activation="hidden_activation",
)

GEMMA3_TEXT = Family(
    model_type="gemma3_text",
    architectures=("Gemma3ForCausalLM",),
    bare="Gemma3TextModel",
    modules=sandwich(
        (*attention("attention_bias"), *qk_norms(plus_one=True)),
        mlp(),
        plus_one=True,
    ),
    keys={
        **GEMMA_KEYS,
        # missing in text_config of the larger models
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "_sliding_window_pattern": None,  # the name in newer versions
        "layer_types": None,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,  # stored, but transformers does not apply it
    },
    fixed={"use_bidirectional_attention": False},
    placement="sandwich",
    qk_norm="head",
    windows="pattern",
    two_ropes=True,
    scaled_embedding=True,
    activation="hidden_activation",
)

# Multimodal models: the language model, which text_config describes, is read.
GEMMA3 = replace(
    GEMMA3_TEXT,
    model_type="gemma3",
    architectures=("Gemma3ForConditionalGeneration",),
    bare="Gemma3Model",
    ignored=(*GEMMA3_TEXT.ignored, r"(vision_tower|multi_modal_projector)\..*"),
    renamed=((r"^language_model\.(model\.|lm_head\.)", r"\1"), (r"^(model\.)?language_model\.", "model.")),
    written_as="gemma3_text",
)

# Mistral with YaRN, and queries that grow with their position.
MINISTRAL3 = replace(
    MISTRAL,
    model_type="ministral3",
    architectures=("Ministral3ForCausalLM",),
    bare="Ministral3Model",
    keys={
        **MISTRAL.keys,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
    },
    rope_extras=("llama_4_scaling_beta", "max_position_embeddings"),
    default_rope={
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
)

OLMO3 = replace(
    OLMO2,
    model_type="olmo3",
    architectures=("Olmo3ForCausalLM",),
    bare="Olmo3Model",
    keys={
        **OLMO2.keys,
        "rope_theta": 500000.0,
        "sliding_window": 4096,
        "layer_types": None,
    },
    windows="pattern",
    window_every=4,
    two_ropes=True,
)

# EXAONE 4.5 has an MTP layer, which other programs take for one like the first: with a window and RoPE.
EXAONE4 = replace(
    OLMO2,
    model_type="exaone4",
    architectures=("Exaone4ForCausalLM",),
    bare="Exaone4Model",
    modules=tuple(replace(module, bias="never") for module in OLMO2.modules),
    keys={
        **COMMON,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "layer_types": None,
    },
    harmless=("num_nextn_predict_layers", "_num_mtp_layers", "mtp_share_layers", "mtp_loss_scaling_factor"),
    qk_norm="head",
    windows="pattern",
    rotates="windowed_if_any",
    mtp=(
        Module("mtp.pre_fc_norm_embedding", ("mtp.embedding_norm",)),
        Module("mtp.pre_fc_norm_hidden", ("mtp.hidden_norm",)),
        Module("mtp.fc", ("mtp.in",)),
        Module("mtp.norm", ("mtp.output_norm",)),
    ),
    mtp_key="num_nextn_predict_layers",
    mtp_like=0,
)

HUNYUAN = replace(
    LLAMA,
    model_type="hunyuan_v1_dense",
    architectures=("HunYuanDenseV1ForCausalLM",),
    bare="HunYuanDenseV1Model",
    modules=pre(
        (
            *attention("attention_bias"),
            norm("self_attn.query_layernorm", "attn_q_norm"),
            norm("self_attn.key_layernorm", "attn_k_norm"),
        ),
        mlp(),
    ),
    keys={**without(LLAMA.keys, "mlp_bias"), "rms_norm_eps": 1e-5},
    fixed={
        "use_qk_norm": True,
        "use_cla": False,
        "mlp_bias": False,
        "norm_type": "rms",
        "use_rotary_pos_emb": True,
        "position_embedding_xdrope": False,
    },
    harmless=(
        *("add_classification_head", "attention_head_dim", "cla_share_factor", "class_num", "dense_list"),
        *("enable_lm_head_fp32", "eod_token_id", "group_limited_greedy", "im_end_id", "im_newline_id", "im_start_id"),
        *("mask_init_id", "org_vocab_size", "pad_id", "pool_type", "text_end_id", "text_start_id"),
        # of images, which these models do not have
        *("anyres_pooling_size", "anyres_vit_max_image_size", "anyres_vit_two_views", "num_media_embeds"),
        *("skip_cls_token", "video_end_id", "video_start_id", "vit_add_patchemb_bias", "vit_input_resolution"),
        *("vit_mapping_type", "vit_norm_type", "vit_patch", "vit_path", "vit_remove_prenorm", "vit_token"),
        *("vit_type", "vit_used_rms_norm"),
    ),
    qk_norm="head",
    qk_norm_after_rope=True,
    rope_extras=("alpha", "beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim"),
)

ERNIE = replace(
    LLAMA,
    model_type="ernie4_5",
    architectures=("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),  # the second: published with its own code
    bare="Ernie4_5Model",
    modules=pre(attention("use_bias"), mlp("use_bias")),
    keys={
        **COMMON,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_theta": 500000.0,
        "use_bias": False,
    },
    pairs="neighbors",
)

_GATE_UP = (
    Module(f"{L}mlp.gate_up_proj", (f"{L}ffn_gate", f"{L}ffn_up")),
    Module(f"{L}mlp.down_proj", (f"{L}ffn_down",)),
)

GLM = Family(
    model_type="glm",
    architectures=("GlmForCausalLM",),
    bare="GlmModel",
    modules=pre(attention("attention_bias", out_bias="never"), _GATE_UP),
    keys={
        **COMMON,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    pairs="neighbors",
    odd_rope=True,
)

GLM4 = replace(
    GLM,
    model_type="glm4",
    architectures=("Glm4ForCausalLM",),
    bare="Glm4Model",
    modules=(
        *GLM.modules,
        norm("post_self_attn_layernorm", "attn_post_norm"),
        norm("post_mlp_layernorm", "ffn_post_norm"),
    ),
    placement="sandwich",
)

# No norm has weights, and the embedding is normed.
NANOCHAT = Family(
    model_type="nanochat",
    architectures=("NanoChatForCausalLM",),
    bare="NanoChatModel",
    modules=(
        EMBEDDING,
        *attention("attention_bias"),
        Module(f"{L}mlp.fc1", (f"{L}ffn_up",)),
        Module(f"{L}mlp.fc2", (f"{L}ffn_down",)),
    ),
    keys={
        **COMMON,
        "hidden_act": "relu2",
        "final_logit_softcapping": 15.0,
        "attention_bias": False,
    },
    plain_norms=(*(f"{L}{name}_norm" for name in ("attn", "ffn", "attn_q", "attn_k")), "output_norm"),
    qk_norm="head",
    qk_norm_after_rope=True,
    ffn="plain",
    pairs="swapped",
    normed_embedding=True,
)
