"""The ladder: what is compared, in the order in which a model computes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from llamac.export.checkpoint import LayerConfig

# (stage, layer) as in `llamac.Session.observe`; the layer is 0 for stages outside the layers. "weights" are the
# attention weights, the softmax of the engine's stage "scores": other implementations give no access to scores.
Key: TypeAlias = tuple[str, int]

OF_A_LAYER = (
    *("attn_norm", "q", "k", "v", "cache_k", "cache_v", "weights", "attn_mix", "attn_out"),
    *("ffn_norm", "ffn", "block"),
)
OF_ATTENTION = ("q", "k", "v", "cache_k", "cache_v", "weights")  # a recurrent layer has none of these
OF_MIXER, OF_NETWORK = ("attn_norm", *OF_ATTENTION, "attn_mix", "attn_out"), ("ffn_norm", "ffn")
OUTSIDE = ("embedding", "output_norm", "logits")
# Stages whose rows have as many numbers in every layer. Rows of the others end with zeros if other layers are wider.
OF_THE_STREAM = ("attn_norm", "attn_out", *OF_NETWORK, "block", *OUTSIDE)
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
    """

    number: int
    title: str
    stages: tuple[str, ...] = ()
    every_layer: bool = False


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


def keys_in_order(layers: Sequence[LayerConfig]) -> list[Key]:
    """Every stage of a model in the order of the graph."""
    of_layers = [(stage, index) for index, record in enumerate(layers) for stage in OF_A_LAYER if _has(record, stage)]
    return [("embedding", 0), *of_layers, ("output_norm", 0), ("logits", 0)]


def _has(record: LayerConfig, stage: str) -> bool:
    """Whether a layer has a stage."""
    if stage in OF_ATTENTION and record.mixer not in ("attention", "attention_mamba2"):
        return False
    return not (record.mixer == "none" and stage in OF_MIXER) and not (record.ffn == "none" and stage in OF_NETWORK)
