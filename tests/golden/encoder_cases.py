"""The parity cases of encoders: tiny configs with each family's real keys, and for every key that affects results a
config that differs in it.

As in cases.py, base values are unusual on purpose. Names of cross-encoders' cases end in "scores", even of decoders.
"""

from __future__ import annotations

from golden.case_table import CONTEXT, FULL, SLIDING, cases_of, variant_of
from golden.cases import CASES, Case
from golden.family_cases import FAMILY_CASES
from golden.tiny_checkpoints import Config, changed

ENCODER_CASES: dict[str, Case] = {}


def _family(start: Config, **variants: Config) -> None:
    ENCODER_CASES.update(cases_of(start, **variants))


_LABELS: Config = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def _scorer(name: str, base: str, architecture: str, **changes: object) -> None:
    ENCODER_CASES.update(variant_of(ENCODER_CASES[base], name, architectures=[architecture], **_LABELS, **changes))


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

_family(changed(_XLM_ROBERTA, architectures=["CamembertModel"], model_type="camembert"))
_scorer("camembert-scores", "camembert", "CamembertForSequenceClassification")

_DISTILBERT: Config = {
    "architectures": ["DistilBertForMaskedLM"],
    "model_type": "distilbert",
    "torch_dtype": "float32",
    "activation": "gelu",
    "attention_dropout": 0.1,
    "dim": 40,
    "dropout": 0.1,
    "hidden_dim": 52,
    "initializer_range": 0.02,
    "max_position_embeddings": CONTEXT,
    "n_heads": 4,
    "n_layers": 3,
    "pad_token_id": 0,
    "qa_dropout": 0.1,
    "seq_classif_dropout": 0.2,
    "sinusoidal_pos_embds": False,
    "tie_weights_": True,
    "vocab_size": 61,
}
_family(_DISTILBERT, activation={"activation": "relu"}, n_heads={"n_heads": 5})
_scorer("distilbert-scores", "distilbert", "DistilBertForSequenceClassification")

_family(
    changed(
        FAMILY_CASES["arcee"].config,
        architectures=["EuroBertForMaskedLM"],
        model_type="eurobert",
        classifier_pooling="late",
        clf_pooling="late",
        hidden_act="silu",
        mask_token="<|mask|>",
        mask_token_id=3,
    ),
    attention_bias={"attention_bias": False},
    mlp_bias={"mlp_bias": False},
    num_key_value_heads={"num_key_value_heads": 1},
    rope_theta={"rope_theta": 50.0},
    rms_norm_eps={"rms_norm_eps": 1e-5},
)

for _pooling in ("late", "mean", "bos"):
    _scorer(
        f"eurobert-scores-{_pooling}",
        "eurobert",
        "EuroBertForSequenceClassification",
        classifier_pooling=_pooling,
        clf_pooling=None,
    )

# No token has the id 1, which transformers does not count as a position.
_MPNET = changed(
    _BERT,
    architectures=["MPNetModel"],
    model_type="mpnet",
    bos_token_id=0,
    eos_token_id=2,
    pad_token_id=1,
    position_embedding_type=None,
    relative_attention_num_buckets=32,
    type_vocab_size=None,
    use_cache=None,
    vocab_size=131,
)
_family(_MPNET, hidden_act={"hidden_act": "relu"}, layer_norm_eps={"layer_norm_eps": 1e-12})
_scorer("mpnet-scores", "mpnet", "MPNetForSequenceClassification")

_family(
    changed(
        FAMILY_CASES["gemma3_text"].config,
        architectures=["Gemma3TextModel"],
        use_bidirectional_attention=True,
        sliding_window=14,
    ),
    sliding_window={"sliding_window": 8},
    least_window={"sliding_window": 0},  # as transformers saves a window of 1
    layer_types={"layer_types": [SLIDING, SLIDING, FULL, FULL]},
    query_pre_attn_scalar={"query_pre_attn_scalar": 10},
    rope_local_base_freq={"rope_local_base_freq": 20.0},
    rope_theta={"rope_theta": 50.0},
    rms_norm_eps={"rms_norm_eps": 1e-5},
)

_MODERNBERT: Config = {
    "architectures": ["ModernBertForMaskedLM"],
    "model_type": "modernbert",
    "torch_dtype": "float32",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_dropout": 0.0,
    "classifier_pooling": "mean",
    "cls_token_id": 1,
    "decoder_bias": True,
    "deterministic_flash_attn": False,
    "embedding_dropout": 0.0,
    "eos_token_id": 2,
    "global_attn_every_n_layers": 2,
    "global_rope_theta": 500.0,
    "gradient_checkpointing": False,
    "hidden_activation": "gelu",
    "hidden_size": 40,
    "initializer_cutoff_factor": 2.0,
    "initializer_range": 0.02,
    "intermediate_size": 52,
    "layer_norm_eps": 1e-5,
    "local_attention": 14,
    "local_rope_theta": 100.0,
    "max_position_embeddings": CONTEXT,
    "mlp_bias": True,
    "mlp_dropout": 0.0,
    "norm_bias": False,
    "norm_eps": 0.05,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "sep_token_id": 2,
    "tie_word_embeddings": True,
    "vocab_size": 61,
}
_family(
    _MODERNBERT,
    attention_bias={"attention_bias": False},
    mlp_bias={"mlp_bias": False},
    hidden_activation={"hidden_activation": "relu"},
    norm_eps={"norm_eps": 1e-5},
    local_attention={"local_attention": 8},
    global_attn_every_n_layers={"global_attn_every_n_layers": 3},
    global_rope_theta={"global_rope_theta": 50.0},
    local_rope_theta={"local_rope_theta": 20.0},
    layer_types={"layer_types": [SLIDING, FULL, FULL, SLIDING]},
)

_scorer("modernbert-scores", "modernbert", "ModernBertForSequenceClassification", classifier_bias=True)
_scorer("modernbert-scores-cls", "modernbert", "ModernBertForSequenceClassification", classifier_pooling="cls")

_NOMIC_BERT: Config = {
    "architectures": ["NomicBertModel"],
    "model_type": "nomic_bert",
    "torch_dtype": "float32",
    "attention_probs_dropout_prob": 0.0,
    "head_dim": 10,
    "hidden_act": "silu",
    "hidden_dropout_prob": 0.0,
    "hidden_size": 40,
    "intermediate_size": 52,
    "layer_norm_eps": 0.05,
    "max_position_embeddings": CONTEXT,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
    "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
    "type_vocab_size": 2,
    "vocab_size": 61,
}
_family(
    _NOMIC_BERT,
    hidden_act={"hidden_act": "gelu"},
    layer_norm_eps={"layer_norm_eps": 1e-12},
    rope_theta={"rope_parameters": {"rope_theta": 50.0, "rope_type": "default"}},
)
_scorer("nomic_bert-scores", "nomic_bert", "NomicBertForSequenceClassification")

# Two layers: with three, a row of a long text is so ill-conditioned that transformers itself is off by 1e-4 in float32.
_GTE: Config = {
    "architectures": ["GteModel"],
    "model_type": "gte",
    "torch_dtype": "float32",
    "attention_probs_dropout_prob": 0.0,
    "classifier_dropout": 0.0,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 40,
    "initializer_range": 0.02,
    "intermediate_size": 52,
    "layer_norm_eps": 0.05,
    "max_position_embeddings": CONTEXT,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
    "type_vocab_size": 1,
    "vocab_size": 61,
}
_family(
    _GTE,
    hidden_act={"hidden_act": "relu"},
    layer_norm_eps={"layer_norm_eps": 1e-12},
    rope_theta={"rope_parameters": {"rope_theta": 50.0, "rope_type": "default"}},
    type_vocab_size={"type_vocab_size": 0},
)
_scorer("gte-scores", "gte", "GteForSequenceClassification", type_vocab_size=2)

_JINA_V3: Config = {
    **{key: value for key, value in _GTE.items() if key != "classifier_dropout"},
    "architectures": ["JinaEmbeddingsV3Model"],
    "model_type": "jina_embeddings_v3",
    "num_hidden_layers": 3,
    "pad_token_id": 1,
}
_family(
    _JINA_V3,
    hidden_act={"hidden_act": "relu"},
    layer_norm_eps={"layer_norm_eps": 1e-12},
    rope_theta={"rope_parameters": {"rope_theta": 50.0, "rope_type": "default"}},
)
_scorer("jina_embeddings_v3-scores", "jina_embeddings_v3", "JinaEmbeddingsV3ForSequenceClassification")

for _kind, _class in (
    ("llama", "Llama"),
    ("mistral", "Mistral"),
    ("qwen2", "Qwen2"),
    ("qwen3", "Qwen3"),
    ("gemma", "Gemma"),
    ("gemma2", "Gemma2"),
    ("phi3", "Phi3"),
):
    _decoder = {**CASES, **FAMILY_CASES}[_kind]
    _name = f"{_kind}-scores"
    ENCODER_CASES.update(variant_of(_decoder, _name, architectures=[f"{_class}ForSequenceClassification"], **_LABELS))

# Decoders whose config.json says that they also attend to later positions.
for _kind in ("llama", "qwen2", "qwen3"):
    _two_sided = {**CASES, **FAMILY_CASES}[_kind].config
    _family(changed(_two_sided, is_causal=False, use_sliding_window=False if "qwen" in _kind else None))
