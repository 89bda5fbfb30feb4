"""Rows of encoders with RoPE, most of whose checkpoints have code of their own: nomic-bert, gte, jina-embeddings-v3.

`VARIANTS` has the rows for checkpoints that share their model_type with another row.
"""

from __future__ import annotations

from dataclasses import replace

from llamac.export.hf.families_encoder import HEADS, KEYS, POOLER, ROBERTA_HEAD, scorer
from llamac.export.hf.family import AFTER, Family, Module
from llamac.export.hf.family_parts import L, attention, mlp, without

# The network of two matrices of the layers without experts.
_PLAIN = tuple(
    Module(f"{L}mlp.fc{i}", (f"{L}ffn_{part}",), bias="always", only="dense") for i, part in ((1, "up"), (2, "down"))
)

# transformers 5 has other names than the published checkpoints, which have their own code: in config.json, and for
# tensors. Keys of that code that must have these values come first in `fixed`.
_NOMIC_BERT = Family(
    model_type="nomic_bert",
    architectures=("NomicBertForMaskedLM",),
    bare="NomicBertModel",
    prefix="nomic_bert.",
    modules=(
        Module("embeddings.word_embeddings", ("token_embedding",)),
        Module("embeddings.token_type_embeddings", ("type_embedding",)),
        Module("embeddings.LayerNorm", ("layers.0.attn_norm",), bias="always"),
        *attention(),
        Module(f"{L}post_attention_layernorm", (f"{L}ffn_norm",), bias="always"),
        *mlp(),
        Module(f"{L}post_mlp_layernorm", (AFTER,), bias="always"),
    ),
    keys={
        **without(KEYS, "max_position_embeddings"),
        "vocab_size": 30528,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "head_dim": None,
        "rope_theta": 1000.0,
        "tie_word_embeddings": True,
    },
    fixed={
        "activation_function": "swiglu",
        "causal": False,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "parallel_block": False,
        "parallel_block_tied_norm": False,
        "prenorm": False,
        "qkv_proj_bias": False,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "scale_attn_weights": True,
        "use_rms_norm": False,
    },
    harmless=(
        *("dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "max_trained_positions"),
        *("pad_vocab_size_multiple", "use_flash_attn", "use_xentropy"),
    ),
    old_keys={
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
        "rotary_emb_base": "rope_theta",
    },
    norm="layer",
    placement="normed",
    two_sided=True,
    ignored=(*HEADS, POOLER),
    renamed=(
        (r"(^|\.)encoder\.layers\.", r"\1layers."),
        (r"(^|\.)emb_ln\.", r"\1embeddings.LayerNorm."),
        (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.fc11\.", ".up_proj."),
        (r"\.fc12\.", ".gate_proj."),
        (r"\.fc2\.", ".down_proj."),
        (r"\.norm1\.", ".post_attention_layernorm."),
        (r"\.norm2\.", ".post_mlp_layernorm."),
    ),
    split=((r"(layers\.\d+)\.attn\.Wqkv\.weight", tuple(f"self_attn.{x}_proj.weight" for x in "qkv")),),
)
NOMIC_BERT = replace(
    _NOMIC_BERT, scorer=scorer(_NOMIC_BERT, "NomicBertForSequenceClassification", "pooler.dense", "classifier")
)

# Alibaba's gte. Checkpoints with code of their own name it "new", or "gte" with the same keys. transformers 5 computes
# the same, except for the RoPE type "ntk". Its tensors have other names, but it saves them under the published ones.
_GTE = replace(
    _NOMIC_BERT,
    model_type="gte",
    architectures=("GteForMaskedLM", "GteForTokenClassification"),
    bare="GteModel",
    prefix="gte.",
    modules=(
        Module("embeddings.word_embeddings", ("token_embedding",)),
        Module("embeddings.token_type_embeddings", ("type_embedding",), only="types"),
        Module("embeddings.LayerNorm", ("layers.0.attn_norm",), bias="always"),
        *attention("always"),
        Module(f"{L}post_attention_layernorm", (f"{L}ffn_norm",), bias="always"),
        *mlp()[:2],
        Module(f"{L}mlp.down_proj", (f"{L}ffn_down",), bias="always"),
        Module(f"{L}post_mlp_layernorm", (AFTER,), bias="always"),
    ),
    keys={
        **KEYS,
        "vocab_size": 250048,
        "max_position_embeddings": 8192,
        "type_vocab_size": 1,
        "rope_theta": 160000.0,
        "tie_word_embeddings": True,
    },
    fixed={"layer_norm_type": "layer_norm", "position_embedding_type": "rope", "logn_attention_scale": False},
    harmless=("logn_attention_clip1", "pack_qkv", "unpad_inputs", "use_memory_efficient_attention"),
    old_keys={},
    rope_names={"ntk": "ntk_fixed"},
    ignored=(*HEADS, POOLER, r"classifier\..*", r"embeddings\.rotary_emb\..*"),
    pair_separators=2,
    renamed=(
        (r"^new\.", "gte."),
        (r"(^|\.)encoder\.layer\.", r"\1layers."),
        (r"\.attention\.(o_proj|qkv_proj)\.", r".self_attn.\1."),
        (r"\.attn_ln\.", ".post_attention_layernorm."),
        (r"\.mlp_ln\.", ".post_mlp_layernorm."),
    ),
    split=(
        *(
            (rf"(layers\.\d+)\.self_attn\.qkv_proj\.{kind}", tuple(f"self_attn.{x}_proj.{kind}" for x in "qkv"))
            for kind in ("weight", "bias")
        ),
        (r"(layers\.\d+)\.mlp\.up_gate_proj\.weight", ("mlp.up_proj.weight", "mlp.gate_proj.weight")),
    ),
)
_GTE_IGNORED = (*HEADS, r"embeddings\.rotary_emb\..*")


def _gte_scorer(family: Family, name: str) -> Family:
    return replace(family, scorer=scorer(family, name, "pooler.dense", "classifier", ignored=_GTE_IGNORED))


GTE = _gte_scorer(_GTE, "GteForSequenceClassification")
NEW = _gte_scorer(
    replace(
        _GTE,
        model_type="new",
        architectures=("NewForMaskedLM", "NewForTokenClassification"),
        bare="NewModel",
        keys={**_GTE.keys, "vocab_size": 30528, "max_position_embeddings": 2048, "rope_theta": 10000.0},
    ),
    "NewForSequenceClassification",
)

# nomic-embed-text-v2-moe: every other layer has experts without a gate, whose weights are not divided by their sum. All
# of them share one bias, which becomes that of a shared expert of zeros.
_MOE = f"{L}mlp.experts"
NOMIC_MOE = replace(
    _NOMIC_BERT,
    architectures=("NomicBertForPreTraining",),
    modules=(
        *_NOMIC_BERT.modules[:3],
        *attention("always"),
        _NOMIC_BERT.modules[7],
        *_PLAIN,
        Module(f"{L}mlp.router.layer", (f"{L}ffn_router",), only="experts"),
        Module(f"{_MOE}.{{e}}.up_proj", (f"{L}experts.{{e}}.ffn_up",), only="experts"),
        Module(f"{_MOE}.{{e}}.down_proj", (f"{L}experts.{{e}}.ffn_down",), transposed=True, only="experts"),
        Module(_MOE, (f"{L}shared_ffn_down",), bias="only", only="experts"),
        _NOMIC_BERT.modules[-1],
    ),
    keys={
        **_NOMIC_BERT.keys,
        "hidden_act": "gelu",
        "num_experts": 8,
        "moe_top_k": 2,
        "moe_every_n_layers": 2,
    },
    fixed={
        **_NOMIC_BERT.fixed,
        "activation_function": "gelu",
        "expert_choice_router": False,
        "ffn_div": 1,
        "mlp_fc1_bias": True,
        "mlp_fc2_bias": True,
        "moe_normalize_expert_weights": False,
        "num_shared_experts": 0,
        "qkv_proj_bias": True,
    },
    harmless=(*_NOMIC_BERT.harmless, "add_pooling_layer", "moe_impl", "moe_resid_pdrop"),
    ffn="plain",
    zeros=(f"{L}shared_ffn_up.weight", f"{L}shared_ffn_down.weight"),
    pair_separators=2,
    renamed=tuple(pair for pair in _NOMIC_BERT.renamed if r"\.fc" not in pair[0]),
    split=(
        (r"(layers\.\d+)\.attn\.Wqkv\.weight", tuple(f"self_attn.{x}_proj.weight" for x in "qkv")),
        (r"(layers\.\d+)\.attn\.Wqkv\.bias", tuple(f"self_attn.{x}_proj.bias" for x in "qkv")),
    ),
    stacked=(
        (r"(layers\.\d+\.mlp\.experts)\.mlp\.w1", "up_proj.weight"),
        (r"(layers\.\d+\.mlp\.experts)\.mlp\.w2", "down_proj.weight"),
    ),
)

# jina-embeddings-v3 without its adapters: XLM-RoBERTa with RoPE. PEFT directories have the adapters.
_JINA_V3 = replace(
    _NOMIC_BERT,
    model_type="jina_embeddings_v3",
    architectures=("JinaEmbeddingsV3ForMaskedLM",),
    bare="JinaEmbeddingsV3Model",
    prefix="roberta.",
    modules=(
        *_NOMIC_BERT.modules[:3],
        *attention("always"),
        _NOMIC_BERT.modules[7],
        *(replace(module, only="") for module in _PLAIN),
        _NOMIC_BERT.modules[-1],
    ),
    keys={
        **KEYS,
        "vocab_size": 250002,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "max_position_embeddings": 8194,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
        "rope_theta": 20000.0,
        "tie_word_embeddings": True,
    },
    fixed={},
    harmless=("position_embedding_type",),
    old_keys={},
    ffn="plain",
    pair_separators=2,
    renamed=(
        (r"(^|\.)encoder\.layers\.", r"\1layers."),
        (r"(^|\.)emb_ln\.", r"\1embeddings.LayerNorm."),
        (r"\.mixer\.out_proj\.", ".self_attn.o_proj."),
        (r"\.norm1\.", ".post_attention_layernorm."),
        (r"\.norm2\.", ".post_mlp_layernorm."),
    ),
    split=tuple(
        (rf"(layers\.\d+)\.mixer\.Wqkv\.{kind}", tuple(f"self_attn.{x}_proj.{kind}" for x in "qkv"))
        for kind in ("weight", "bias")
    ),
)
JINA_V3 = replace(
    _JINA_V3,
    scorer=scorer(_JINA_V3, "JinaEmbeddingsV3ForSequenceClassification", *ROBERTA_HEAD, ignored=(*HEADS, POOLER)),
)
# The same in its authors' first form, whose tensors also have the adapters of all tasks.
JINA_FLASH = replace(
    _JINA_V3,
    architectures=("XLMRobertaLoRA", "XLMRobertaForMaskedLM"),
    bare="XLMRobertaModel",
    fixed={"position_embedding_type": "rotary", "use_reg_tokens": False},
    harmless=(
        *("emb_pooler", "load_trained_adapters", "lora_adaptations", "lora_alpha", "lora_dropout_p", "lora_rank"),
        *("lora_main_params_trainable", "lora_prompts", "matryoshka_dimensions", "output_past", "task_instructions"),
        *("truncate_dim", "use_flash_attn"),
    ),
    old_keys={"rotary_emb_base": "rope_theta"},
    ignored=(*_JINA_V3.ignored, r".*\.parametrizations\.weight\.0\.lora_[AB]", r"pooler\.dense\..*"),
    renamed=((r"\.parametrizations\.weight\.original$", ".weight"), *_JINA_V3.renamed),
)

# By model_type: a key of config.json, its value, and the row for checkpoints that have it.
VARIANTS: dict[str, tuple[str, object, Family]] = {
    "nomic_bert": ("activation_function", "gelu", NOMIC_MOE),
    "xlm-roberta": ("position_embedding_type", "rotary", JINA_FLASH),
}
