"""Rows of the table of families: decoders with layer norms, most of them with a plain network."""

from __future__ import annotations

from dataclasses import replace

from llamac.export.hf.families_gated import LLAMA
from llamac.export.hf.family import Family, Module
from llamac.export.hf.family_parts import COMMON, EMBEDDING, L, attention, mlp, norm, pre, qk_norms, without

STARCODER2 = Family(
    model_type="starcoder2",
    architectures=("Starcoder2ForCausalLM",),
    bare="Starcoder2Model",
    modules=(
        EMBEDDING,
        norm("input_layernorm", "attn_norm", bias="always"),
        *attention("use_bias"),
        norm("post_attention_layernorm", "ffn_norm", bias="always"),
        Module(f"{L}mlp.c_fc", (f"{L}ffn_up",), bias="use_bias"),
        Module(f"{L}mlp.c_proj", (f"{L}ffn_down",), bias="use_bias"),
        Module("norm", ("output_norm",), bias="always"),
    ),
    keys={
        **without(COMMON, "rms_norm_eps", "head_dim"),
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_bias": True,
    },
    fixed={"norm_type": "layer_norm", "mlp_type": "default", "scale_attn_weights": True},
    # transformers reads none of these
    harmless=(
        *("activation_function", "attention_softmax_in_fp32", "layer_norm_epsilon", "rms_norm_eps"),
        "scale_attention_softmax_in_fp32",
    ),
    norm="layer",
    ffn="plain",
)

JAIS2 = Family(
    model_type="jais2",
    architectures=("Jais2ForCausalLM",),
    bare="Jais2Model",
    modules=(
        EMBEDDING,
        norm("input_layernorm", "attn_norm", bias="always"),
        *attention("attention_bias"),
        norm("post_attention_layernorm", "ffn_norm", bias="always"),
        *mlp("mlp_bias")[1:],
        Module("norm", ("output_norm",), bias="always"),
    ),
    keys={
        **without(COMMON, "rms_norm_eps"),
        "max_position_embeddings": 8192,
        "hidden_act": "relu2",
        "layer_norm_eps": 1e-5,
        "attention_bias": True,
        "mlp_bias": True,
    },
    norm="layer",
    ffn="plain",
)

# No norm has weights. The canonical form has ones and zeros instead.
OLMO = Family(
    model_type="olmo",
    architectures=("OlmoForCausalLM",),
    bare="OlmoModel",
    modules=(EMBEDDING, *attention("attention_bias"), *mlp()),
    keys={**without(COMMON, "rms_norm_eps"), "attention_bias": False},
    fixed={"clip_qkv": None, "layer_norm_eps": 1e-5},
    norm="layer",
    plain_norms=(L + "attn_norm", L + "ffn_norm", "output_norm"),
)

STABLELM = Family(
    model_type="stablelm",
    architectures=("StableLmForCausalLM",),
    bare="StableLmModel",
    modules=(
        EMBEDDING,
        norm("input_layernorm", "attn_norm", bias="always", only="sequential"),
        norm("input_layernorm", "attn_norm", "ffn_norm", bias="always", only="parallel", shared=True),
        *attention("use_qkv_bias", out_bias="never"),
        *qk_norms("self_attn.{}_layernorm.norms.{h}"),
        norm("post_attention_layernorm", "ffn_norm", bias="always", only="sequential"),
        *mlp(),
        Module("norm", ("output_norm",), bias="always"),
    ),
    keys={
        **without(COMMON, "rms_norm_eps", "head_dim"),
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.25,
        "use_qkv_bias": False,
        "qk_layernorm": False,
        "use_parallel_residual": False,
    },
    fixed={"rotary_scaling_factor": 1},  # an attribute of the first version's class
    norm="layer",
    qk_norm="layer_head",
)

GPT_NEOX = Family(
    model_type="gpt_neox",
    architectures=("GPTNeoXForCausalLM",),
    bare="GPTNeoXModel",
    prefix="gpt_neox.",
    modules=(
        Module("embed_in", ("token_embedding",)),
        norm("input_layernorm", "attn_norm", bias="always"),
        Module(
            f"{L}attention.query_key_value",
            (f"{L}attn_q", f"{L}attn_k", f"{L}attn_v"),
            interleaved="heads",
            bias="attention_bias",
        ),
        Module(f"{L}attention.dense", (f"{L}attn_out",), bias="attention_bias"),
        norm("post_attention_layernorm", "ffn_norm", bias="always"),
        Module(f"{L}mlp.dense_h_to_4h", (f"{L}ffn_up",), bias="always"),
        Module(f"{L}mlp.dense_4h_to_h", (f"{L}ffn_down",), bias="always"),
        Module("final_layer_norm", ("output_norm",), bias="always"),
    ),
    keys={
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "tie_word_embeddings": False,
        "rotary_emb_base": 10000.0,
        "rope_theta": None,  # the name in some versions
        "rotary_pct": 0.25,
        "partial_rotary_factor": None,  # the name in some versions
        "attention_bias": True,
        "use_parallel_residual": True,
    },
    harmless=("num_steps",),  # of training
    norm="layer",
    ffn="plain",
    ignored=(*LLAMA.ignored, r"layers\.\d+\.attention\.(bias|masked_bias)"),
    renamed=((r"^embed_out\.", "lm_head."),),
    head="embed_out",
    odd_rope=True,
)

GPT2 = Family(
    model_type="gpt2",
    architectures=("GPT2LMHeadModel",),
    bare="GPT2Model",
    prefix="transformer.",
    modules=(
        Module("wte", ("token_embedding",)),
        Module("wpe", ("position_embedding",)),
        Module("h.{l}.ln_1", ("layers.{l}.attn_norm",), bias="always"),
        Module(
            "h.{l}.attn.c_attn",
            ("layers.{l}.attn_q", "layers.{l}.attn_k", "layers.{l}.attn_v"),
            transposed=True,
            bias="always",
        ),
        Module("h.{l}.attn.c_proj", ("layers.{l}.attn_out",), transposed=True, bias="always"),
        Module("h.{l}.ln_2", ("layers.{l}.ffn_norm",), bias="always"),
        Module("h.{l}.mlp.c_fc", ("layers.{l}.ffn_up",), transposed=True, bias="always"),
        Module("h.{l}.mlp.c_proj", ("layers.{l}.ffn_down",), transposed=True, bias="always"),
        Module("ln_f", ("output_norm",), bias="always"),
    ),
    keys={
        "n_inner": None,  # four times n_embd
        "n_ctx": None,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
    },
    norm="layer",
    ffn="plain",
    activation="activation_function",
    ignored=(r"h\.\d+\.attn\.(bias|masked_bias)",),
)

PHI = Family(
    model_type="phi",
    architectures=("PhiForCausalLM",),
    bare="PhiModel",
    modules=(
        EMBEDDING,
        norm("input_layernorm", "attn_norm", "ffn_norm", bias="always", shared=True),
        *attention("always")[:3],
        Module(f"{L}self_attn.dense", (f"{L}attn_out",), bias="always"),
        Module(f"{L}mlp.fc1", (f"{L}ffn_up",), bias="always"),
        Module(f"{L}mlp.fc2", (f"{L}ffn_down",), bias="always"),
        Module("final_layernorm", ("output_norm",), bias="always"),
    ),
    keys={
        **without(COMMON, "rms_norm_eps", "head_dim"),
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
    },
    fixed={"qk_layernorm": False},
    norm="layer",
    placement="parallel",
    ffn="plain",
    odd_rope=True,
    head_bias="always",
)

# Norms have no biases. The canonical form has zeros instead.
COHERE2 = Family(
    model_type="cohere2",
    architectures=("Cohere2ForCausalLM",),
    bare="Cohere2Model",
    modules=(
        EMBEDDING,
        norm("input_layernorm", "attn_norm", "ffn_norm", shared=True),
        *attention("attention_bias"),
        *mlp(),
        Module("norm", ("output_norm",)),
    ),
    keys={
        **without(COMMON, "rms_norm_eps"),
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "logit_scale": 0.0625,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "layer_types": None,
    },
    fixed={
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_qk_norm": False,
    },
    harmless=("layer_switch", "order_of_interleaved_layers", "use_parallel_embedding"),
    sizes_of_head=True,
    norm="layer",
    placement="parallel",
    plain_norms=(f"{L}attn_norm.bias", f"{L}ffn_norm.bias", "output_norm.bias"),
    windows="pattern",
    rotates="windowed",
    pairs="neighbors",
)

# Command R and Aya: the same without windows.
COHERE = replace(
    COHERE2,
    model_type="cohere",
    architectures=("CohereForCausalLM",),
    bare="CohereModel",
    keys={
        **without(COHERE2.keys, "sliding_window", "sliding_window_pattern", "layer_types"),
        "rope_theta": 500000.0,
    },
    fixed={"use_qk_norm": False},
    harmless=("model_max_length",),
    windows="all",
    rotates="all",
    sizes_of_head=False,
)

# Norm weights are stored minus one.
NEMOTRON = Family(
    model_type="nemotron",
    architectures=("NemotronForCausalLM",),
    bare="NemotronModel",
    modules=pre(attention("attention_bias"), mlp("mlp_bias")[1:], plus_one=True, bias="always"),
    keys={
        **without(COMMON, "rms_norm_eps"),
        "hidden_act": "relu2",
        "norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
        "mlp_bias": False,
    },
    norm="layer",
    ffn="plain",
    odd_rope=True,
)
