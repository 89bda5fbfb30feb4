"""Rows of the table of encoders, whose tokens attend to both sides: they embed texts, or score pairs of texts.

An encoder norms its residual stream after each branch (`normed` in docs/format.md). In the canonical form, the norm of
the embedding is the first layer's attn_norm, and the norm after a layer is the next layer's, or output_norm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llamac.export.hf.family import AFTER, Family, Module
from llamac.export.hf.family_parts import L

_E = "encoder.layer.{l}."
_KEYS: dict[str, Any] = {
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
_POOLER = r"pooler\.dense\..*"
_HEADS = (r"embeddings\.(position_ids|token_type_ids)", r"cls\..*", r"lm_head\..*")


def _scorer(family: Family, name: str, *layers: str, ignored: tuple[str, ...] = _HEADS) -> Family:
    """The row for a class with a head of two layers that gives one score."""
    heads = tuple(Module(layer, (f"pooled.{i}",), bias="always") for i, layer in enumerate(layers))
    return replace(
        family,
        architectures=(name,),
        bare="",
        modules=(*family.modules, *heads),
        ignored=ignored,
        scores_pairs=True,
    )


_BERT = Family(
    model_type="bert",
    architectures=("BertForMaskedLM", "BertForPreTraining"),
    bare="BertModel",
    prefix="bert.",
    modules=_MODULES,
    keys={**_KEYS, "pad_token_id": 0},
    fixed={"position_embedding_type": "absolute", "is_decoder": False},
    # BERT's first configs describe a pooler that transformers does not have
    harmless=(
        *("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
        *("pooler_size_per_head", "pooler_type", "tie_word_embeddings"),
    ),
    norm="layer",
    placement="normed",
    ffn="plain",
    ignored=(*_HEADS, _POOLER),
    renamed=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
)
_XLM_ROBERTA = replace(
    _BERT,
    model_type="xlm-roberta",
    architectures=("XLMRobertaForMaskedLM",),
    bare="XLMRobertaModel",
    prefix="roberta.",
    keys={**_KEYS, "pad_token_id": 1},
    harmless=("tie_word_embeddings",),
    renamed=(),
    padded_positions=True,
    pair_separators=2,
)
_ROBERTA = replace(_XLM_ROBERTA, model_type="roberta", architectures=("RobertaForMaskedLM",), bare="RobertaModel")
_ROBERTA_HEAD = ("classifier.dense", "classifier.out_proj")

BERT = replace(_BERT, scorer=_scorer(_BERT, "BertForSequenceClassification", "pooler.dense", "classifier"))
XLM_ROBERTA = replace(
    _XLM_ROBERTA,
    scorer=_scorer(_XLM_ROBERTA, "XLMRobertaForSequenceClassification", *_ROBERTA_HEAD, ignored=_BERT.ignored),
)
ROBERTA = replace(
    _ROBERTA, scorer=_scorer(_ROBERTA, "RobertaForSequenceClassification", *_ROBERTA_HEAD, ignored=_BERT.ignored)
)
