"""Rows of the table of encoders, whose tokens attend to both sides: they embed texts, or score pairs of texts.

An encoder normalizes its residual stream after each branch (`normed` in docs/format.md). In the canonical form, the
norm of the embedding is the first layer's attn_norm, and the norm after a layer is the next layer's, or output_norm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llamac.export.hf.families_gated import GEMMA3_TEXT as _GEMMA3_TEXT
from llamac.export.hf.families_gated import LLAMA as _LLAMA
from llamac.export.hf.families_gated import QWEN2 as _QWEN2
from llamac.export.hf.families_gated import QWEN3 as _QWEN3
from llamac.export.hf.family import AFTER, Family, Module
from llamac.export.hf.family_parts import L, without

_E = "encoder.layer.{l}."
KEYS: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}
_MODULES = (
    Module("embeddings.word_embeddings", ("token_embedding",)),
    Module("embeddings.position_embeddings", ("position_embedding",)),
    Module("embeddings.token_type_embeddings", ("type_embedding",)),
    Module("embeddings.LayerNorm", ("layers.0.attn_norm",), bias="always"),
    *(
        Module(f"{_E}attention.self.{name}", (f"{L}attn_{name[0]}",), bias="always")
        for name in ("query", "key", "value")
    ),
    Module(f"{_E}attention.output.dense", (f"{L}attn_out",), bias="always"),
    Module(f"{_E}attention.output.LayerNorm", (f"{L}ffn_norm",), bias="always"),
    Module(f"{_E}intermediate.dense", (f"{L}ffn_up",), bias="always"),
    Module(f"{_E}output.dense", (f"{L}ffn_down",), bias="always"),
    Module(f"{_E}output.LayerNorm", (AFTER,), bias="always"),
)
# Heads that predict tokens, and the pooler that embeddings do not use.
POOLER = r"pooler\.dense\..*"
HEADS = (r"embeddings\.(position_ids|token_type_ids)", r"cls\..*", r"lm_head\..*")


def scorer(family: Family, name: str, *layers: str, ignored: tuple[str, ...] = HEADS, **others: Any) -> Family:
    """The row for a class with a head of two layers that gives one score. others: further fields that differ."""
    heads = tuple(Module(layer, (f"pooled.{i}",), bias="always") for i, layer in enumerate(layers))
    return replace(
        family,
        architectures=(name,),
        bare="",
        modules=(*family.modules, *heads),
        ignored=ignored,
        scores_pairs=True,
        **others,
    )


_BERT = Family(
    model_type="bert",
    architectures=("BertForMaskedLM", "BertForPreTraining"),
    bare="BertModel",
    prefix="bert.",
    modules=_MODULES,
    keys={**KEYS, "pad_token_id": 0},
    fixed={"position_embedding_type": "absolute", "is_decoder": False},
    # BERT's first configs describe a pooler that transformers does not have
    harmless=(
        *("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
        *("pooler_size_per_head", "pooler_type", "tie_word_embeddings"),
    ),
    norm="layer",
    placement="normed",
    position="learned",
    two_sided=True,
    ffn="plain",
    ignored=(*HEADS, POOLER),
    renamed=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
)
_XLM_ROBERTA = replace(
    _BERT,
    model_type="xlm-roberta",
    architectures=("XLMRobertaForMaskedLM",),
    bare="XLMRobertaModel",
    prefix="roberta.",
    keys={**KEYS, "pad_token_id": 1},
    harmless=("tie_word_embeddings",),
    renamed=(),
    padded_positions=True,
    pair_separators=2,
)
_ROBERTA = replace(_XLM_ROBERTA, model_type="roberta", architectures=("RobertaForMaskedLM",), bare="RobertaModel")
ROBERTA_HEAD = ("classifier.dense", "classifier.out_proj")

BERT = replace(_BERT, scorer=scorer(_BERT, "BertForSequenceClassification", "pooler.dense", "classifier"))
XLM_ROBERTA = replace(
    _XLM_ROBERTA,
    scorer=scorer(_XLM_ROBERTA, "XLMRobertaForSequenceClassification", *ROBERTA_HEAD, ignored=_BERT.ignored),
)
ROBERTA = replace(
    _ROBERTA, scorer=scorer(_ROBERTA, "RobertaForSequenceClassification", *ROBERTA_HEAD, ignored=_BERT.ignored)
)

_CAMEMBERT = replace(
    _XLM_ROBERTA, model_type="camembert", architectures=("CamembertForMaskedLM",), bare="CamembertModel"
)
CAMEMBERT = replace(
    _CAMEMBERT, scorer=scorer(_CAMEMBERT, "CamembertForSequenceClassification", *ROBERTA_HEAD, ignored=_BERT.ignored)
)

# BERT without token types, under other names.
_D = "transformer.layer.{l}."
_DISTILBERT = replace(
    _BERT,
    model_type="distilbert",
    architectures=("DistilBertForMaskedLM",),
    bare="DistilBertModel",
    prefix="distilbert.",
    modules=(
        *(_MODULES[0], _MODULES[1], _MODULES[3]),
        *(
            Module(f"{_D}attention.{x}_lin", (f"{L}attn_{part}",), bias="always")
            for x, part in zip(("q", "k", "v", "out"), ("q", "k", "v", "out"), strict=True)
        ),
        Module(f"{_D}sa_layer_norm", (f"{L}ffn_norm",), bias="always"),
        Module(f"{_D}ffn.lin1", (f"{L}ffn_up",), bias="always"),
        Module(f"{_D}ffn.lin2", (f"{L}ffn_down",), bias="always"),
        Module(f"{_D}output_layer_norm", (AFTER,), bias="always"),
    ),
    keys={**without(KEYS, "type_vocab_size"), "num_hidden_layers": 6, "pad_token_id": 0},
    fixed={"layer_norm_eps": 1e-12},
    harmless=(
        *("dropout", "qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds", "tie_weights_"),
        "tie_word_embeddings",
    ),
    old_keys={
        "activation": "hidden_act",
        "dim": "hidden_size",
        "hidden_dim": "intermediate_size",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
    },
    ignored=(*HEADS, r"vocab_(transform|layer_norm|projector)\..*"),
    renamed=(),
)
DISTILBERT = replace(
    _DISTILBERT,
    scorer=scorer(
        _DISTILBERT,
        "DistilBertForSequenceClassification",
        *("pre_classifier", "classifier"),
        head_activation="relu",
    ),
)

# LLaMA with attention to both sides.
_EUROBERT = replace(
    _LLAMA,
    model_type="eurobert",
    architectures=("EuroBertForMaskedLM",),
    bare="EuroBertModel",
    keys={
        **_LLAMA.keys,
        "vocab_size": 128256,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
    },
    harmless=(
        "classifier_pooling",
        "clf_pooling",
        *(f"{x}_token" for x in ("bos", "eos", "mask", "pad")),
    ),
    two_sided=True,
    ignored=(*_LLAMA.ignored, r"lm_head\..*"),
    quantized=(),
)
# The pooling "late" is the mean of the logits of all tokens.
EUROBERT = replace(
    _EUROBERT,
    scorer=scorer(
        _EUROBERT,
        "EuroBertForSequenceClassification",
        *("dense", "classifier"),
        ignored=_EUROBERT.ignored,
        keys={**_EUROBERT.keys, "classifier_pooling": "late"},
        old_keys={"clf_pooling": "classifier_pooling"},
        head_activation="gelu_erf",
        head_poolings={"bos": "cls", "mean": "mean", "late": "late"},
    ),
)

# The position embedding's first row in use is always the one after row 1, whatever pad_token_id says.
_MPNET = replace(
    _XLM_ROBERTA,
    model_type="mpnet",
    architectures=("MPNetForMaskedLM",),
    bare="MPNetModel",
    prefix="mpnet.",
    modules=(
        *(_MODULES[0], _MODULES[1], _MODULES[3]),
        Module("encoder.relative_attention_bias", ("distance_bias",), bucketed=True),
        *(
            Module(f"{_E}attention.attn.{x}", (f"{L}attn_{part}",), bias="always")
            for x, part in zip("qkvo", ("q", "k", "v", "out"), strict=True)
        ),
        Module(f"{_E}attention.LayerNorm", (f"{L}ffn_norm",), bias="always"),
        *_MODULES[-3:],
    ),
    keys={**without(KEYS, "type_vocab_size"), "vocab_size": 30527, "pad_token_id": 1},
    fixed={"pad_token_id": 1, "relative_attention_num_buckets": 32},
    biased_distances=True,
)
MPNET = replace(_MPNET, scorer=scorer(_MPNET, "MPNetForSequenceClassification", *ROBERTA_HEAD, ignored=_BERT.ignored))

# EmbeddingGemma. A config.json of Gemma 3 is an encoder's if it says so.
EMBEDDING_GEMMA = replace(
    _GEMMA3_TEXT,
    architectures=(),
    fixed={"use_bidirectional_attention": True},
    two_sided=True,
)


def _two_sided(family: Family) -> Family:
    """The row for a decoder's config.json that says `is_causal` false: transformers then masks no later positions."""
    return replace(
        family,
        fixed={**family.fixed, "is_causal": False, **dict.fromkeys({"use_sliding_window"} & family.keys.keys(), False)},
        two_sided=True,
        ignored=(*family.ignored, r"lm_head\..*"),
        quantized=(),
    )


TWO_SIDED_LLAMA = _two_sided(_LLAMA)
TWO_SIDED_QWEN2 = _two_sided(_QWEN2)
TWO_SIDED_QWEN3 = _two_sided(_QWEN3)

# NVIDIA's LLaMA with attention to both sides. A pair is read as the tokenizer or a chat template writes it.
_LLAMA_BIDIREC = replace(
    TWO_SIDED_LLAMA,
    model_type="llama_bidirec",
    architectures=(),
    bare="LlamaBidirectionalModel",
    keys={**TWO_SIDED_LLAMA.keys, "pooling": "avg", "temperature": 1.0},
    head_poolings={"avg": "mean", "cls": "cls", "last": "last"},
    pair_separators=0,
)
LLAMA_BIDIREC = replace(
    _LLAMA_BIDIREC,
    scorer=replace(
        _LLAMA_BIDIREC,
        architectures=("LlamaBidirectionalForSequenceClassification",),
        bare="",
        modules=(*_LLAMA_BIDIREC.modules, Module("score", ("pooled.0",))),
        scores_pairs=True,
    ),
)

# The norms have no biases. The first layer's attention reads the normed embedding, which the others add to.
_MODERNBERT = Family(
    model_type="modernbert",
    architectures=("ModernBertForMaskedLM",),
    bare="ModernBertModel",
    modules=(
        Module("embeddings.tok_embeddings", ("token_embedding",)),
        Module("embeddings.norm", ("layers.0.attn_norm",)),
        Module(f"{L}attn_norm", (f"{L}attn_norm",), only="pre"),
        Module(f"{L}attn.Wqkv", (f"{L}attn_q", f"{L}attn_k", f"{L}attn_v"), bias="attention_bias"),
        Module(f"{L}attn.Wo", (f"{L}attn_out",), bias="attention_bias"),
        Module(f"{L}mlp_norm", (f"{L}ffn_norm",)),
        Module(f"{L}mlp.Wi", (f"{L}ffn_gate", f"{L}ffn_up"), bias="mlp_bias"),
        Module(f"{L}mlp.Wo", (f"{L}ffn_down",), bias="mlp_bias"),
        Module("final_norm", ("output_norm",)),
    ),
    keys={
        "vocab_size": 50368,
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "max_position_embeddings": 8192,
        "hidden_activation": "gelu",
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "local_attention": 128,
        "global_attn_every_n_layers": 3,
        "layer_types": None,
    },
    fixed={"norm_bias": False, "causal_mask": False, "is_causal": False},
    harmless=(
        *("classifier_activation", "classifier_bias", "classifier_pooling", "decoder_bias"),
        *("deterministic_flash_attn", "initializer_cutoff_factor", "layer_norm_eps", "mlp_dropout"),
        *("position_embedding_type", "reference_compile", "repad_logits_with_grad", "sparse_pred_ignore_index"),
        "sparse_prediction",
    ),
    norm="layer",
    first_placement="normed_attn",
    plain_norms=(f"{L}attn_norm.bias", f"{L}ffn_norm.bias", "output_norm.bias"),
    windows="global_every",
    window_key="local_attention",
    two_ropes=True,
    two_sided=True,
    activation="hidden_activation",
    ignored=(r"(head|decoder|classifier)\..*",),
)
MODERNBERT = replace(
    _MODERNBERT,
    scorer=replace(
        _MODERNBERT,
        architectures=("ModernBertForSequenceClassification",),
        bare="",
        modules=(
            *_MODERNBERT.modules,
            Module("head.dense", ("pooled.0",), bias="classifier_bias"),
            Module("head.norm", ("pooled.0.norm",)),
            Module("classifier", ("pooled.1",), bias="always"),
        ),
        keys={
            **_MODERNBERT.keys,
            "classifier_activation": "gelu",
            "classifier_bias": False,
            "classifier_pooling": "cls",
        },
        ignored=(r"decoder\..*",),
        scores_pairs=True,
    ),
)
