"""Reads config.json of encoders, by their rows in `families_encoder` and `families_rotary`."""

from __future__ import annotations

from typing import Any

from llamac.errors import UnsupportedError
from llamac.export.checkpoint import LayerConfig, ModelConfig
from llamac.export.distances import FARTHEST
from llamac.export.hf.classic_config import with_norms
from llamac.export.hf.families import ENCODERS, FAMILIES, RERANKERS, row_of
from llamac.export.hf.families_rotary import VARIANTS
from llamac.export.hf.family import Family
from llamac.export.hf.keys import LIMITS, Keys, shortened
from llamac.export.hf.mamba_config import Factor

# sentence-transformers' names of what turns a cross-encoder's logit into its score.
SCORES = {
    "torch.nn.modules.linear.Identity": "none",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}
# ModernBERT's key for the layers after pooling, and the keys for pooling: also EuroBERT's, and llama_bidirec's.
HEAD_ACTIVATION = "classifier_activation"
POOLING_KEYS = ("classifier_pooling", "pooling")
# Where config.json names it, in the versions of sentence-transformers.
OLD_SCORE, NEW_SCORE = "sbert_ce_default_activation_function", "sentence_transformers"


def encoder_row(values: dict[str, Any]) -> Family:
    """The row of the encoder that a config.json describes, by its model_type and its class."""
    kind = values["model_type"]
    key, value, variant = VARIANTS.get(kind, ("model_type", None, ENCODERS[kind]))
    family = variant if values.get(key) == value else ENCODERS[kind]
    return _scorer_or(family, family.scorer, values)


def left_out(values: dict[str, Any]) -> list[str]:
    """The warning about adapters in the checkpoint of an encoder, if it has some."""
    tasks = values.get("lora_adaptations")
    names = ", ".join(task for task in tasks if isinstance(task, str)) if isinstance(tasks, list) else ""
    if not names:
        return []
    return [
        f"the adapters of the tasks {shortened(names)[1:-1]} are left out; PEFT directories of adapters, such as those "
        "of jinaai/jina-embeddings-v3-hf, can be added to the model with --lora"
    ]


def decoder_row(values: dict[str, Any]) -> Family:
    """The row of the decoder that a config.json describes, by its model_type and its class."""
    kind = values["model_type"]
    return _scorer_or(with_norms(row_of(values) or FAMILIES[kind], values), RERANKERS.get(kind), values)


def _scorer_or(family: Family, scorer: Family | None, values: dict[str, Any]) -> Family:
    """The row that scores pairs if config.json names its class, otherwise the family's row."""
    named = values.get("architectures")
    classes = named if isinstance(named, list) else [named]
    is_scorer = scorer is not None and any(name in scorer.architectures for name in classes)
    return scorer if scorer is not None and is_scorer else family


def parse_encoder(keys: Keys, family: Family, checked: set[str]) -> tuple[ModelConfig, tuple[int, int]]:
    """Read the keys of BERT and its relatives.

    Args:
        keys: The keys of config.json.
        family: The encoder's row.
        checked: Keys that have been checked already.

    Returns:
        The model's config. The rows of the stored position embedding, and the first of them that is used.

    Raises:
        ExportError: If keys are wrong; the message lists all of them.
    """
    row = family.keys
    dim, n_heads, n_layers, ffn_dim, vocab_size = (
        keys.size(name, meaning, row[name])
        for name, meaning in (
            ("hidden_size", "dim"),
            ("num_attention_heads", "n_heads"),
            ("num_hidden_layers", "n_layers"),
            ("intermediate_size", "ffn_dim"),
            ("vocab_size", "vocab_size"),
        )
    )
    positions = keys.size("max_position_embeddings", "context", row["max_position_embeddings"])
    n_types = keys.size("type_vocab_size", "n_types", row["type_vocab_size"]) if "type_vocab_size" in row else 0
    norm_eps = keys.number("layer_norm_eps", row["layer_norm_eps"], LIMITS["norm_eps"])
    activation = keys.activation(family.activation, row[family.activation])
    padding = keys.integer("pad_token_id", 0, vocab_size - 1)
    first = (row["pad_token_id"] if padding is None else padding) + 1 if family.padded_positions else 0
    if first >= positions:
        keys.wrong("pad_token_id", f"an id below max_position_embeddings ({positions}): positions follow it")
    if not keys.problems and dim % n_heads:
        keys.wrong("num_attention_heads", f"a divisor of hidden_size ({dim})")
    pooled = cross_encoder(keys, family, dim)
    keys.finish(checked | {OLD_SCORE, NEW_SCORE})
    model = ModelConfig(
        dim=dim,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=dim // n_heads,
        vocab_size=vocab_size,
        n_token_ids=vocab_size,
        context=positions - first,
        norm=family.norm,
        position="learned",
        activation=activation,
        tied_output=True,
        norm_eps=norm_eps or 0.0,
        attention_scale=(dim // n_heads) ** -0.5,
        layers=(LayerConfig(family.ffn, ffn_dim, placement=family.placement),) * n_layers,
        two_sided=1,
        n_types=n_types,
        bias_distance=FARTHEST if family.biased_distances else 0,
        **pooled,
    )
    return model, (positions, first)


def type_count(keys: Keys, family: Family) -> int:
    """The number of token types; 0: the model has no embedding of them."""
    if "type_vocab_size" not in family.keys:
        return 0
    found = keys.integer("type_vocab_size", 0, int(LIMITS["n_types"]))
    return int(family.keys["type_vocab_size"]) if found is None else found


def cross_encoder(keys: Keys, family: Family, dim: int) -> dict[str, Any]:
    """The fields of a cross-encoder's model; none for other families.

    Raises:
        UnsupportedError: If there are several scores, or an activation that the engine does not compute.
    """
    if not family.scores_pairs:
        return {}
    score = _score(keys)
    _check_labels(keys)
    if not any("pooled.1" in module.parts for module in family.modules):
        return {"scores_pairs": 1, "pooled_dim": (1,), "pooled_activation": (score,)}
    fields = {"scores_pairs": 1, "pooled_dim": (dim, 1), "pooled_activation": (family.head_activation, score)}
    if HEAD_ACTIVATION not in family.keys:
        return fields
    activation = keys.activation(HEAD_ACTIVATION, family.keys[HEAD_ACTIVATION])
    if activation != "gelu_erf":
        raise UnsupportedError(f"config.json: {HEAD_ACTIVATION} is {activation}; supported is gelu")
    return {**fields, "pooled_activation": (activation, score), "pooled_norm": (1, 0)}


def pooling_of(keys: Keys, family: Family) -> str:
    """How the model pools its tokens, unless the files of sentence-transformers say it."""
    key = next((name for name in POOLING_KEYS if name in family.keys), None)
    if key is None:
        return ("cls" if family.scores_pairs else "mean") if family.two_sided else "last"
    found = keys.value(key)
    names = family.head_poolings
    usual = names[family.keys[key]]
    if found is not None and (not isinstance(found, str) or found not in names):
        keys.wrong(key, " or ".join(names))
        return usual
    return usual if found is None else names[found]


def score_factors(keys: Keys, family: Family) -> dict[str, Factor]:
    """What multiplies the score's matrix: the inverse of a temperature."""
    if "temperature" not in family.keys or not family.scores_pairs:
        return {}
    temperature = keys.number("temperature", family.keys["temperature"])
    if temperature == 0:
        keys.wrong("temperature", "a number above 0")
    return {"0.weight": 1 / temperature if temperature else 1.0}


def _check_labels(keys: Keys) -> None:
    """Refuse a classifier with several classes."""
    names = keys.value("id2label")
    number = len(names) if isinstance(names, dict) else keys.integer("num_labels", 1, int(LIMITS["pooled_dim"])) or 2
    if number != 1:
        raise UnsupportedError(
            f"config.json describes a classifier with {number} classes; supported are cross-encoders with one score"
        )


def _score(keys: Keys) -> str:
    """What turns the logit into the score: as in sentence-transformers, a sigmoid unless config.json says otherwise."""
    settings = keys.value(NEW_SCORE)
    name = settings.get("activation_fn") if isinstance(settings, dict) else None
    name = name if name is not None else keys.value(OLD_SCORE)
    return "sigmoid" if name is None else score_activation(name, "config.json")


def score_activation(name: Any, where: str) -> str:
    """Our name of what turns the logit into the score. where: The file that names it."""
    if not isinstance(name, str) or name not in SCORES:
        known = ", ".join(SCORES)
        raise UnsupportedError(f"{where}: the activation of scores is {shortened(name)}; supported are {known}")
    return SCORES[name]
