"""What config.json says about a model: its config, and how the checkpoint's tensors are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llamac.export.checkpoint import LayerConfig, ModelConfig
from llamac.export.hf import quantized, ternary
from llamac.export.hf.family import Family
from llamac.export.hf.mamba_config import Factor
from llamac.export.rope import Rope


@dataclass(frozen=True)
class HfConfig:
    """A parsed config.json.

    Attributes:
        ropes: The RoPE tables.
        tied: Whether the embedding is also the output matrix.
        biases: The kinds of biases (`Module.bias`) that the model has.
        bare: Whether its class is the family's class without an output matrix.
        family: The row that describes its tensors.
        ternary: How ternary matrices are stored; None: the model has none.
        quantization: How quantized matrices of another kind are stored; None: the model has none.
        factors: What multiplies tensors, or each of their rows, by the ends of their canonical names.
        pooling: How an encoder or a cross-encoder pools its tokens.
        positions: The rows of the stored position embedding, and the first of them that is used; (0, 0): all.
        layer_embedding_rows: The rows of the stored layer embeddings; those after the vocabulary are not used.
        mtp_layer: The MTP layer, if the family's row or keys in config.json describe it.
        slopes: The slope of each head, by which scores fall with the distance, if the family has them.
    """

    model: ModelConfig
    ropes: tuple[Rope, ...]
    tied: bool
    biases: frozenset[str]
    family: Family
    bare: bool = False
    pooling: str = "cls"
    positions: tuple[int, int] = (0, 0)
    layer_embedding_rows: int = 0
    ternary: ternary.TernaryConfig | None = None
    quantization: quantized.Quantization | None = None
    factors: Mapping[str, Factor] = field(default_factory=dict)
    mtp_layer: LayerConfig | None = None
    slopes: tuple[float, ...] = ()
