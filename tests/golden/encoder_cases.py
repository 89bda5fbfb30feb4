"""The parity cases of encoders: tiny configs with each family's real keys, and for every key that affects results a
config that differs in it.

As in cases.py, base values are unusual on purpose. A cross-encoder's case ends in "scores".
"""

from __future__ import annotations

from golden.case_table import CONTEXT, cases_of, variant_of
from golden.cases import Case
from golden.tiny_checkpoints import Config, changed

ENCODER_CASES: dict[str, Case] = {}


def _family(start: Config, **variants: Config) -> None:
    ENCODER_CASES.update(cases_of(start, **variants))


def _scorer(name: str, base: str, architecture: str, **changes: object) -> None:
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    ENCODER_CASES.update(variant_of(ENCODER_CASES[base], name, architectures=[architecture], **labels, **changes))


_BERT: Config = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "torch_dtype": "float32",
    "attention_probs_dropout_prob": 0.1,
    "classifier_dropout": None,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 40,
    "initializer_range": 0.02,
    "intermediate_size": 52,
    "layer_norm_eps": 0.05,
    "max_position_embeddings": CONTEXT,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 61,
}
_family(_BERT, hidden_act={"hidden_act": "relu"}, layer_norm_eps={"layer_norm_eps": 1e-12})
_scorer("bert-scores", "bert", "BertForSequenceClassification")

# No token is the padding token: transformers does not count it as a position.
_XLM_ROBERTA = changed(
    _BERT,
    architectures=["XLMRobertaModel"],
    model_type="xlm-roberta",
    bos_token_id=0,
    eos_token_id=2,
    pad_token_id=2,
    output_past=True,
    type_vocab_size=1,
)
_family(
    _XLM_ROBERTA,
    pad_token_id={"pad_token_id": 3},
    hidden_act={"hidden_act": "relu"},
    layer_norm_eps={"layer_norm_eps": 1e-12},
)
_scorer("xlm-roberta-scores", "xlm-roberta", "XLMRobertaForSequenceClassification")

_family(changed(_XLM_ROBERTA, architectures=["RobertaModel"], model_type="roberta"))
_scorer("roberta-scores", "roberta", "RobertaForSequenceClassification")
