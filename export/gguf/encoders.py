"""GGUF architectures of encoders: their table rows, and llama.cpp's names of their tensors.

llama.cpp runs BERT and ModernBERT with the tanh form of GELU; llamac computes the exact one, as in training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llamac.errors import UnsupportedError
from llamac.export import pooling
from llamac.export.gguf.architecture import EXPERTS
from llamac.export.gguf.families import ARCHITECTURES, Architecture, gguf_name

if TYPE_CHECKING:
    from llamac.export.gguf.config import GGUFConfig

_CAUSAL: dict[str, object] = {"attention.causal": False}
_DENSE = ("dense_2.weight", "dense_3.weight")  # of sentence-transformers' modules
_SCORE = ("cls", "cls.output")  # of RoBERTa's cross-encoders
_ROTARY_BERT = Architecture(
    "jina_embeddings_v3",
    norm="layer",
    ffn="plain",
    activation="gelu_erf",
    placement="normed",
    two_sided=True,
    keys=_CAUSAL,
)
NO_SHARED_BIAS = (
    "the file lacks the bias that the experts of a layer share, because llama.cpp's converter leaves it out: "
    "embeddings differ from those of the original model"
)

ENCODERS = {
    "bert": Architecture(
        "bert",
        norm="layer",
        position="learned",
        ffn="plain",
        activation="gelu_erf",
        placement="normed",
        two_sided=True,
        keys=_CAUSAL,
    ),
    "nomic-bert": Architecture("nomic_bert", norm="layer", placement="normed", two_sided=True, keys=_CAUSAL),
    "nomic-bert-moe": replace(
        _ROTARY_BERT,
        family="nomic_bert",
        keys={**_CAUSAL, **EXPERTS, "moe_every_n_layers": None},
    ),
    "jina-bert-v3": _ROTARY_BERT,
    "eurobert": Architecture("eurobert", two_sided=True, keys=_CAUSAL),
    "llama-embed": replace(
        ARCHITECTURES["llama"],
        family="llama_bidirec",
        others=(),
        two_sided=True,
        keys={**ARCHITECTURES["llama"].keys, **_CAUSAL},
    ),
    "modern-bert": Architecture(
        "modernbert",
        norm="layer",
        activation="gelu_erf",
        first_placement="normed_attn",
        window_every=3,
        global_first=True,
        two_ropes=True,
        zero_norm_biases=True,
        two_sided=True,
        keys={
            **_CAUSAL,
            "attention.sliding_window": 0,
            "attention.sliding_window_pattern": None,
            "rope.freq_base_swa": 10000.0,  # llama.cpp's default is the other base; no published model has that
            "hidden_activation": None,
        },
    ),
    "gemma-embedding": replace(
        ARCHITECTURES["gemma3"],
        others=(),
        two_sided=True,
        keys={
            **ARCHITECTURES["gemma3"].keys,
            **_CAUSAL,
            **dict.fromkeys(f"dense_{number}_feat_{end}" for number in (2, 3) for end in ("in", "out")),
        },
    ),
}


def encoder_fields(row: Architecture, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The fields of the config that only encoders have.

    Raises:
        UnsupportedError: If the file is a cross-encoder without the two layers of RoBERTa's, or with several scores.
    """
    if not row.two_sided:
        return {}
    types = shapes.get("token_types.weight", ())
    dense = [shapes[name][0] for name in _DENSE if name in shapes]
    fields: dict[str, Any] = {"two_sided": 1, "n_types": types[0] if len(types) > 1 else len(types)}
    if any(name.startswith("cls.") for name in shapes):
        return fields | _score_fields(row, shapes)
    return fields | {"pooled_dim": tuple(dense), "pooled_activation": ("none",) * len(dense)}


def _score_fields(row: Architecture, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The fields of a cross-encoder. llama.cpp gives the logit; the score is its sigmoid, as in sentence-transformers.

    llama.cpp's converter leaves out the first of BERT's two layers, so that files of BERT's cross-encoders are useless.
    """
    first, last = (shapes.get(f"{name}.weight", ()) for name in _SCORE)
    has_both = len(first) == 2 and (len(last) == 1 or (len(last) == 2 and last[0] == 1))
    if row.family != "bert" or not has_both:
        raise UnsupportedError(
            "the GGUF file is a cross-encoder, but not one of RoBERTa with cls.weight and cls.output.weight "
            "that give one score: use the Hugging Face directory"
        )
    return {"scores_pairs": 1, "pooled_dim": (first[0], 1), "pooled_activation": ("tanh", "sigmoid")}


def score_metadata() -> dict[str, Any]:
    """Of a cross-encoder: RoBERTa separates texts by two EOS tokens, gives both type 0, and pools the first row."""
    return {pooling.METADATA_KEY: "cls", "pair_separators": 2, "pair_type": 0}


def stored_name(name: str, config: GGUFConfig) -> str:
    """llama.cpp's name of one of our tensors. In BERT's layers, the norms follow the sums."""
    *layer, module, kind = name.split(".")
    if layer == ["pooled"] and config.model.scores_pairs:
        return f"{_SCORE[int(module)]}.{kind}"
    if layer == ["pooled"]:
        return f"dense_{int(module) + 2}.{kind}"
    if config.row.first_placement and name == "layers.0.attn_norm.weight":
        return "token_embd_norm.weight"
    if not config.row.two_sided or config.row.placement != "normed":
        return gguf_name(name, config.row)
    if module == "type_embedding":
        return f"token_types.{kind}"
    if module == "ffn_norm":
        return f"blk.{layer[1]}.attn_output_norm.{kind}"
    if module not in ("attn_norm", "output_norm"):
        return gguf_name(name, config.row)
    after = (int(layer[1]) if layer else len(config.model.layers)) - 1
    return f"token_embd_norm.{kind}" if after < 0 else f"blk.{after}.layer_output_norm.{kind}"
