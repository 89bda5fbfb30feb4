"""Rows of the table of families: decoders of 2021 to 2023, with layer norms and a plain network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llamac.export.hf.families_gated import LLAMA
from llamac.export.hf.families_layer_norm import GPT2
from llamac.export.hf.family import Family, Module
from llamac.export.hf.family_parts import EMBEDDING, L, attention, norm

H = "h.{l}."
# Names by which transformers reads keys that have others in config.json.
_GPT2_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}
_NO_ROPE_KEYS = {"rope_scaling": None, "rope_parameters": None}


def _of(name: str, *parts: str, **options: Any) -> Module:
    return Module(H + name, tuple(L + part for part in parts), **options)


_QKV = ("attn_q", "attn_k", "attn_v")

# Falcon 7B has one KV head. Attention and the network read the same normed rows.
FALCON = Family(
    model_type="falcon",
    architectures=("FalconForCausalLM",),
    bare="FalconModel",
    prefix="transformer.",
    modules=(
        Module("word_embeddings", ("token_embedding",)),
        _of("input_layernorm", "attn_norm", bias="always", only="sequential"),
        _of("input_layernorm", "attn_norm", "ffn_norm", bias="always", only="parallel", shared=True),
        _of("post_attention_layernorm", "ffn_norm", bias="always", only="sequential"),
        _of("self_attention.query_key_value", *_QKV, interleaved="groups", bias="bias"),
        _of("self_attention.dense", "attn_out", bias="bias"),
        _of("mlp.dense_h_to_4h", "ffn_up", bias="bias"),
        _of("mlp.dense_4h_to_h", "ffn_down", bias="bias"),
        Module("ln_f", ("output_norm",), bias="always"),
    ),
    keys={
        "vocab_size": 65024,
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "num_kv_heads": None,
        "max_position_embeddings": 2048,
        "layer_norm_epsilon": 1e-5,
        "ffn_hidden_size": None,
        "activation": "gelu",
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
        "bias": False,
        "multi_query": True,
        "parallel_attn": True,
        "new_decoder_architecture": False,
        "num_ln_in_parallel_attn": None,
    },
    fixed={"alibi": False, "apply_residual_connection_post_layernorm": False},
    harmless=("ff_factor", "ffn_factor"),
    norm="layer",
    ffn="plain",
    activation="activation",
    ignored=(*LLAMA.ignored, r"h\.\d+\.self_attention\.rotary(_emb)?\.inv_freq"),
)
# Falcon 40B and 180B have a norm for each of the two.
FALCON_NORMS = {
    "falcon": replace(
        FALCON,
        modules=(
            *(module for module in FALCON.modules if "layernorm" not in module.name),
            _of("ln_attn", "attn_norm", bias="always"),
            _of("ln_mlp", "ffn_norm", bias="always"),
        ),
    )
}

# Position only has an effect on scores, by ALiBi, and the embedding has a norm.
BLOOM = Family(
    model_type="bloom",
    architectures=("BloomForCausalLM",),
    bare="BloomModel",
    prefix="transformer.",
    modules=(
        Module("word_embeddings", ("token_embedding",)),
        Module("word_embeddings_layernorm", ("embedding_norm",), bias="always"),
        _of("input_layernorm", "attn_norm", bias="always"),
        _of("self_attention.query_key_value", *_QKV, interleaved="heads", bias="always"),
        _of("self_attention.dense", "attn_out", bias="always"),
        _of("post_attention_layernorm", "ffn_norm", bias="always"),
        _of("mlp.dense_h_to_4h", "ffn_up", bias="always"),
        _of("mlp.dense_4h_to_h", "ffn_down", bias="always"),
        Module("ln_f", ("output_norm",), bias="always"),
    ),
    keys={
        "vocab_size": 250880,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "max_position_embeddings": 2048,  # seq_length, which transformers does not read
        "n_inner": None,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    fixed={"hidden_act": "gelu_pytorch_tanh", "apply_residual_connection_post_layernorm": False},
    harmless=(
        *("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi"),
        *("skip_bias_add", "skip_bias_add_qkv", "slow_but_exact"),
    ),
    norm="layer",
    ffn="plain",
    position="none",
    alibi=True,
    old_keys={
        "n_embed": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "seq_length": "max_position_embeddings",
    },
)

_B = "blocks.{l}."
MPT = Family(
    model_type="mpt",
    architectures=("MptForCausalLM", "MPTForCausalLM"),
    bare="MptModel",
    prefix="transformer.",
    modules=(
        Module("wte", ("token_embedding",)),
        Module(f"{_B}norm_1", (f"{L}attn_norm",)),
        Module(f"{_B}attn.Wqkv", tuple(L + part for part in _QKV)),
        Module(f"{_B}attn.out_proj", (f"{L}attn_out",)),
        Module(f"{_B}norm_2", (f"{L}ffn_norm",)),
        Module(f"{_B}ffn.up_proj", (f"{L}ffn_up",)),
        Module(f"{_B}ffn.down_proj", (f"{L}ffn_down",)),
        Module("norm_f", ("output_norm",)),
    ),
    keys={
        "vocab_size": 50368,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "max_position_embeddings": 2048,
        "n_inner": None,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "attention_multiplier": None,
    },
    fixed={
        "hidden_act": "gelu",
        "expansion_ratio": 4,
        "no_bias": True,
        "norm_type": "low_precision_layernorm",
        "logit_scale": None,
        "attn_config.alibi": True,
        "attn_config.alibi_bias_max": 8,  # transformers computes with this value in any case
        "attn_config.attn_type": "multihead_attention",
        "attn_config.clip_qkv": None,
        "attn_config.prefix_lm": False,
        "attn_config.qk_ln": False,
    },
    harmless=(
        *("emb_pdrop", "embedding_fraction", "init_config", "init_device", "learned_pos_emb", "tokenizer_name"),
        *("verbose", "attn_config.attn_impl", "attn_config.attn_uses_sequence_id"),
    ),
    norm="layer",
    plain_norms=(f"{L}attn_norm.bias", f"{L}ffn_norm.bias", "output_norm.bias"),
    ffn="plain",
    position="none",
    alibi=True,
    objects=("attn_config",),
    old_keys={
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "max_seq_len": "max_position_embeddings",
        "attn_config.softmax_scale": "attention_multiplier",
    },
)

# The first two rows of the position embedding belong to no position.
OPT = Family(
    model_type="opt",
    architectures=("OPTForCausalLM",),
    bare="OPTModel",
    prefix="model.decoder.",
    modules=(
        EMBEDDING,
        Module("embed_positions", ("position_embedding",)),
        norm("self_attn_layer_norm", "attn_norm", bias="always"),
        *attention("enable_bias")[:3],
        Module(f"{L}self_attn.out_proj", (f"{L}attn_out",), bias="enable_bias"),
        norm("final_layer_norm", "ffn_norm", bias="always"),
        Module(f"{L}fc1", (f"{L}ffn_up",), bias="enable_bias"),
        Module(f"{L}fc2", (f"{L}ffn_down",), bias="enable_bias"),
        Module("final_layer_norm", ("output_norm",), bias="always"),
    ),
    keys={
        "vocab_size": 50272,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 2048,
        "ffn_dim": 3072,
        "activation_function": "relu",
        "tie_word_embeddings": True,
        "enable_bias": True,
        "word_embed_proj_dim": None,
    },
    fixed={
        "do_layer_norm_before": True,
        "layer_norm_elementwise_affine": True,
        "_remove_final_layer_norm": False,
        "layer_norm_eps": 1e-5,
        "learned_embeddings": True,  # of Galactica, like the next
        "scale_embeddings": False,
    },
    harmless=("activation_dropout", "dropout", "layerdrop", "init_std"),
    norm="layer",
    ffn="plain",
    position="learned",
    position_offset=2,
    activation="activation_function",
    renamed=((r"^decoder\.", "model.decoder."),),
)

GPTJ = Family(
    model_type="gptj",
    architectures=("GPTJForCausalLM",),
    bare="GPTJModel",
    prefix="transformer.",
    modules=(
        Module("wte", ("token_embedding",)),
        _of("ln_1", "attn_norm", "ffn_norm", bias="always", shared=True),
        *(_of(f"attn.{x}_proj", f"attn_{x}") for x in ("q", "k", "v", "out")),
        _of("mlp.fc_in", "ffn_up", bias="always"),
        _of("mlp.fc_out", "ffn_down", bias="always"),
        Module("ln_f", ("output_norm",), bias="always"),
    ),
    keys={
        "vocab_size": 50400,
        "hidden_size": 4096,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "max_position_embeddings": 2048,
        "n_inner": None,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "tie_word_embeddings": False,
        "rotary_dim": 64,
    },
    fixed={"rotary": True, "scale_attn_weights": True, **_NO_ROPE_KEYS},
    norm="layer",
    placement="parallel",
    ffn="plain",
    pairs="neighbors",
    default_rope={"rope_theta": 10000.0},
    activation="activation_function",
    ignored=(*LLAMA.ignored, *GPT2.ignored),
    head_bias="always",
    old_keys=_GPT2_NAMES,
)

# GPT-J whose q, v and k are one matrix, divided into four blocks for training on four devices.
CODEGEN = replace(
    GPTJ,
    model_type="codegen",
    architectures=("CodeGenForCausalLM",),
    bare="CodeGenModel",
    modules=(
        *GPTJ.modules[:2],
        _of("attn.qkv_proj", "attn_q", "attn_v", "attn_k", interleaved="four_blocks"),
        *GPTJ.modules[5:],
    ),
    fixed={"scale_attn_weights": True, **_NO_ROPE_KEYS},
    harmless=("n_ctx",),
    ignored=(*LLAMA.ignored, r"h\.\d+\.attn\.causal_mask"),
)

# GPT-2 with one KV head, or with the rows of q, k and v head by head.
GPT_BIGCODE = Family(
    model_type="gpt_bigcode",
    architectures=("GPTBigCodeForCausalLM",),
    bare="GPTBigCodeModel",
    prefix="transformer.",
    modules=tuple(
        replace(module, transposed=False, interleaved="groups" if len(module.parts) == 3 else "")
        for module in GPT2.modules
    ),
    keys={
        "vocab_size": 50257,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 1024,
        "n_inner": None,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "multi_query": True,
    },
    fixed={"scale_attn_weights": True},
    harmless=(
        *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "num_key_value_heads"),
        *("inference_runner", "max_batch_size", "pad_key_length", "pre_allocate_kv_cache", "validate_runner_input"),
    ),
    norm="layer",
    ffn="plain",
    position="learned",
    activation="activation_function",
    ignored=(*LLAMA.ignored, *GPT2.ignored),
    old_keys=_GPT2_NAMES,
)

# Scores are not divided, and every second layer has a window.
GPT_NEO = Family(
    model_type="gpt_neo",
    architectures=("GPTNeoForCausalLM",),
    bare="GPTNeoModel",
    prefix="transformer.",
    modules=(
        Module("wte", ("token_embedding",)),
        Module("wpe", ("position_embedding",)),
        _of("ln_1", "attn_norm", bias="always"),
        *(_of(f"attn.attention.{x}_proj", f"attn_{x}") for x in "qkv"),
        _of("attn.attention.out_proj", "attn_out", bias="always"),
        _of("ln_2", "ffn_norm", bias="always"),
        _of("mlp.c_fc", "ffn_up", bias="always"),
        _of("mlp.c_proj", "ffn_down", bias="always"),
        Module("ln_f", ("output_norm",), bias="always"),
    ),
    keys={
        "vocab_size": 50257,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "max_position_embeddings": 2048,
        "intermediate_size": None,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
        "window_size": 256,
        "attention_types": None,
        "attention_layers": None,
    },
    harmless=("resid_dropout", "embed_dropout"),
    norm="layer",
    ffn="plain",
    position="learned",
    attention_scale=1.0,
    windows="global_every",
    window_every=2,
    window_key="window_size",
    activation="activation_function",
    ignored=(*LLAMA.ignored, r"h\.\d+\.attn\.attention\.(bias|masked_bias)"),
    old_keys={"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"},
)
