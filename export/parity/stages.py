"""The ladder: the stages that a comparison covers, in the order in which a model computes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from llamac.export.checkpoint import LayerConfig, ModelConfig

# (stage, layer) as in `llamac.Session.observe`; the layer is 0 for stages outside the layers. "weights" are the
# attention weights, the softmax of the engine's stage "scores": other implementations give no access to scores.
Key: TypeAlias = tuple[str, int]

OF_A_LAYER = (
    *("attn_norm", "q", "k", "v", "cache_k", "cache_v", "weights", "attn_mix", "attn_out"),
    *("ffn_norm", "ffn", "block"),
)
OF_CACHE = ("cache_k", "cache_v")
OF_ATTENTION = ("q", "k", "v", *OF_CACHE, "weights")  # a recurrent layer has none of these
OF_MIXER, OF_NETWORK = ("attn_norm", *OF_ATTENTION, "attn_mix", "attn_out"), ("ffn_norm", "ffn")
OUTSIDE = ("embedding", "output_norm", "logits")
# What an encoder has in place of logits: the embedding before it is scaled to length 1, or a cross-encoder's score. It
# has one row for all positions.
OF_TEXT = ("pooled", "score")
# Stages whose rows have as many numbers in every layer. Rows of the others end with zeros if other layers are wider.
OF_THE_STREAM = ("attn_norm", "attn_out", *OF_NETWORK, "block", *OUTSIDE, *OF_TEXT)
# Stages that have a row of numbers for each head.
OF_QUERY_HEADS, OF_KV_HEADS = ("q", "weights", "attn_mix"), ("k", "v", "cache_k", "cache_v")


@dataclass(frozen=True)
class Rung:
    """One step of the ladder.

    Attributes:
        number: Its number.
        title: What it compares.
        stages: The stages that it compares, in the order of the graph.
        every_layer: Whether it compares all layers. Otherwise it compares the first one that has the stage.
        absent: Why a model has none of its stages.
    """

    number: int
    title: str
    stages: tuple[str, ...] = ()
    every_layer: bool = False
    absent: str = "no layer has this"


LOAD, GREEDY, SAMPLED = Rung(0, "load"), Rung(11, "greedy tokens"), Rung(12, "sampled tokens")
LADDER = (
    LOAD,
    Rung(1, "first norm", ("embedding", "attn_norm")),
    Rung(2, "Q, K, V after RoPE", ("q", "k", "v")),
    Rung(3, "KV cache", ("cache_k", "cache_v")),
    Rung(4, "attention weights", ("weights",)),
    Rung(5, "attention output", ("attn_mix", "attn_out")),
    Rung(6, "FFN", ("ffn_norm", "ffn")),
    Rung(7, "block", ("block",)),
    Rung(8, "every block", OF_A_LAYER, every_layer=True),
    Rung(9, "final norm", ("output_norm",)),
    Rung(10, "logits", ("logits",)),
    GREEDY,
    SAMPLED,
)


_OF_ENCODER = {
    3: Rung(3, "KV cache", OF_CACHE, absent="an encoder keeps none: it computes a text as a whole"),
    10: Rung(10, "embedding or score", OF_TEXT),
}
ENCODER_LADDER = tuple(_OF_ENCODER.get(rung.number, rung) for rung in LADDER if rung not in (GREEDY, SAMPLED))


def ladder_of(config: ModelConfig) -> tuple[Rung, ...]:
    """The rungs of a model."""
    return ENCODER_LADDER if config.two_sided else LADDER


def keys_in_order(config: ModelConfig) -> list[Key]:
    """Every stage of a model in the order of the graph."""
    stages = [stage for stage in OF_A_LAYER if not (config.two_sided and stage in OF_CACHE)]
    layers = enumerate(config.layers)
    of_layers = [(stage, index) for index, record in layers for stage in stages if _has(record, stage)]
    last = ("score" if config.scores_pairs else "pooled") if config.two_sided else "logits"
    return [("embedding", 0), *of_layers, ("output_norm", 0), (last, 0)]


def _has(record: LayerConfig, stage: str) -> bool:
    """Whether a layer has a stage."""
    if stage in OF_ATTENTION and record.mixer not in ("attention", "attention_mamba2"):
        return False
    return not (record.mixer == "none" and stage in OF_MIXER) and not (record.ffn == "none" and stage in OF_NETWORK)
