"""What a row of the table of model families is made of (`families` holds the table)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llamac.export.checkpoint import LayerConfig, ModelConfig


@dataclass(frozen=True)
class Module:
    """A weight, and perhaps a bias, under one name.

    name: Hugging Face's, without the family's prefix; "{l}" is the layer, "{e}" the expert, "{h}" the head (its tensors
    lie in the part one after another). parts: the canonical names, several where one tensor holds several matrices one
    after another along the output dimension. transposed: the weight is stored as (in, out). by_head: the parts do not
    lie one after another, but head by head: the first head's rows of each part, then the second's. shared: all parts
    are this one tensor. plus_one: what is stored is the weight less one. bias: the config key that says whether there
    is a bias, or "always", or "never". only: the kind of layers that have it (see `is_in`), "" for all.
    """

    name: str
    parts: tuple[str, ...]
    transposed: bool = False
    by_head: bool = False
    shared: bool = False
    plus_one: bool = False
    bias: str = "never"
    only: str = ""

    @property
    def per_layer(self) -> bool:
        return "{l}" in self.name

    def is_in(self, model: ModelConfig, layer: LayerConfig) -> bool:
        """Whether this layer has the module."""
        return {
            "": True,
            "parallel": layer.placement == "parallel",
            "in turn": layer.placement != "parallel",
            "dense": layer.ffn != "experts",
            "experts": layer.ffn == "experts",
            "qk_norm": model.qk_norm != "none",
        }[self.only]

    def places(self, model: ModelConfig) -> Iterator[dict[str, int]]:
        """The numbers that fill the names, for every tensor that a model has of this module."""
        for index, layer in enumerate(model.layers) if self.per_layer else [(0, model.layers[0])]:
            if self.per_layer and not self.is_in(model, layer):
                continue
            for expert in range(layer.n_experts) if "{e}" in self.name else [0]:
                for head in range(self.n_heads(model)):
                    yield {"l": index, "e": expert, "h": head}

    def n_heads(self, model: ModelConfig) -> int:
        """How many tensors make up a part."""
        if "{h}" not in self.name:
            return 1
        return model.n_heads if "attn_q" in self.parts[0] else model.n_kv_heads

    def full_name(self, kind: str, **place: int) -> str:
        """Hugging Face's name, without prefix, of the "weight" or "bias"."""
        return f"{self.name.format(**place)}.{kind}"

    def part_names(self, kind: str, **place: int) -> tuple[str, ...]:
        """The canonical names of the "weight" or "bias"."""
        return tuple(f"{part.format(**place)}.{kind}" for part in self.parts)


@dataclass(frozen=True)
class Family:
    """One model_type.

    prefix: before all names but HEAD's in a complete checkpoint, and before none in a bare model's. architectures:
    transformers' classes with an output matrix, the first is the one to write. bare: its class without. keys: the
    config keys that the family has beside the sizes that all need, and what an absent one means (None: see
    `config`). fixed: keys that must have this value. norm, placement, qk_norm, ffn: of the graph.
    plain_norms: canonical names of norms without tensors: their weights are ones, their biases zeros.
    windows: which layers a sliding window is for, where layer_types does not say it. scaled_embedding: by sqrt(dim).
    odd_rope: RoPE may be of an odd number of dimensions; one more is turned then. activation: its key, the one that
    counts where there are two. rope_names: other names of kinds of RoPE. ignored: patterns of tensors, without prefix,
    that are no weights. renamed: patterns in full names, and what they are replaced with, for checkpoints of other
    versions. fused: 3-dimensional tensors of all experts, and the names that the parts of each expert have where they
    are stored alone. head: what transformers saves the output matrix as. written_as: the model_type of what `write`
    writes, where it is another: a part of the whole.
    """

    model_type: str
    architectures: tuple[str, ...]
    bare: str
    modules: tuple[Module, ...]
    keys: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = "model."
    norm: str = "rms"
    placement: str = "pre"
    qk_norm: str = "none"
    plain_norms: tuple[str, ...] = ()
    ffn: str = "gated"
    windows: str = "all"
    scaled_embedding: bool = False
    odd_rope: bool = False
    activation: str = "hidden_act"
    rope_names: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = (
        r"(layers\.\d+\.(self_attn|attention)\.)?rotary_emb(_local)?\.(inv_freq|cos_cached|sin_cached)",
    )
    renamed: tuple[tuple[str, str], ...] = ()
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    head: str = "lm_head"
    written_as: str = ""

    def is_plain_norm(self, name: str) -> bool:
        """Whether a canonical tensor is one of a plain norm."""
        return re.sub(r"^layers\.\d+\.", "layers.{l}.", name).rpartition(".")[0] in self.plain_norms

    def is_ignored(self, full_name: str) -> bool:
        """Whether a stored tensor is no weight."""
        return any(re.fullmatch(pattern, full_name.removeprefix(self.prefix)) for pattern in self.ignored)
