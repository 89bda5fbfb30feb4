"""The row types of the table of model families (`families` has the table)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from llamac.export.interleaved import interleaved_rows
from llamac.export.latent import rotated_first, rotated_width

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llamac.export.checkpoint import LayerConfig, ModelConfig


# The part of the norm after a layer: the next layer's attn_norm, or output_norm.
AFTER = "{after}"
# The kind of quantization_config whose matrices have ternary weights (`ternary`).
TERNARY = "bitnet"


@dataclass(frozen=True)
class Module:
    """A weight, and possibly a bias, with one name.

    Attributes:
        name: Hugging Face's name without the family's prefix. "{l}" is the layer, "{n}" the number of layers, "{e}" the
            expert, "{h}" the head or, in a drafter, the state; the tensors of all heads or states are concatenated
            in the part.
        parts: The canonical names. Several if one tensor concatenates several matrices along the output dimension.
        transposed: The weight is stored as (in, out).
        parameter: The name is the tensor's own, without ".weight" or ".bias".
        interleaved: The kind of the parts' order (see `interleaved_rows`); "": one part follows the other.
        shared: All parts are this one tensor.
        plus_one: The stored value is the weight minus one; a bias is stored as it is.
        times_root: The stored value is the weight times the square root of the model's width.
        log: The stored value is the logarithm of the negated weight.
        one_row: The vector is stored as a matrix of one row.
        taps: The weight of a convolution, stored as (channels, 1, taps); the part has the weights of all channels for
            the first tap, then for the second.
        rotated: Of latent attention: the last rows of each head are rotated in pairs of "halves" or "neighbors" (see
            `rotated_first`); "": none.
        bucketed: The tensor has a bias for each bucket of distances (see `distances`).
        absorbed: The tensor is latent attention's kv_b (see `latent`).
        pieces: What "{h}" stands for, if not for numbers: of q, k and v of a recurrent layer, whose rows follow one
            another in the part. transformers divides the taps of a convolution differently; their order is the same.
        bias: The config key that says whether a bias exists, or "always", or "never"; "only": there is no weight.
        only: The kind of layers that have the module (see `is_in`); "": all.
    """

    name: str
    parts: tuple[str, ...]
    transposed: bool = False
    parameter: bool = False
    interleaved: str = ""
    shared: bool = False
    plus_one: bool = False
    times_root: bool = False
    log: bool = False
    one_row: bool = False
    taps: bool = False
    rotated: str = ""
    bucketed: bool = False
    absorbed: bool = False
    pieces: tuple[str, ...] = ()
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
            "pre": layer.placement == "pre",
            "sequential": layer.placement != "parallel",
            "mixer": layer.mixer != "none",
            "network": layer.ffn != "none",
            "dense": layer.ffn in ("plain", "gated"),
            "experts": layer.ffn == "experts",
            "mapped": layer.ffn == "experts" and model.expert_dim > 0,
            "qk_norm": model.qk_norm != "none",
            "attention": layer.mixer in ("attention", "attention_mamba2"),
            "embedded": layer.layer_embedding_dim > 0,
            "types": model.n_types > 0,
            "own_kv": layer.kv_source < 0 and model.drafter != "assistant",
            "own_v": layer.kv_source < 0 and not layer.v_is_k and model.drafter != "assistant",
            "clusters": model.n_clusters > 0,
            "delta_net": layer.mixer == "delta_net",
            "latent_q": layer.q_lora_rank > 0,
            "whole_q": layer.q_lora_rank == 0,
            "mamba2": layer.mixer in ("mamba2", "attention_mamba2"),
            "state_norm": "mamba2" in layer.mixer and model.state_norm != "none",
            "short_conv": layer.mixer == "short_conv",
            "gated": layer.output_gate != "none",
            "sandwich": layer.placement == "sandwich",
            "choice_bias": bool(layer.router_choice_bias),
            "shared": layer.shared_ffn_dim > 0,
        }[self.only]

    def unused_names(self, model: ModelConfig, kind: str) -> Iterator[str]:
        """Names of tensors that checkpoints can have for layers that read another layer's keys and values."""
        if self.only.startswith("own_"):
            for index, layer in enumerate(model.layers):
                if layer.kv_source >= 0:
                    yield self.full_name(kind, l=index)

    def kinds(self, biases: Collection[str]) -> tuple[str, ...]:
        """What the module has: "weight", "bias" or both, in a model with these kinds of biases."""
        if self.bias == "only":
            return ("bias",)
        return ("weight", "bias") if self.bias in biases else ("weight",)

    def order(self, model: ModelConfig, layer: LayerConfig, n_rows: int) -> NDArray[np.intp] | None:
        """The numbers of the stored rows in the order of the parts; None: they are stored so."""
        if self.rotated:
            rotated = rotated_width(model, layer)
            is_key = self.parts[0].endswith("attn_kv_a")
            width = rotated + (layer.kv_lora_rank if is_key else layer.qk_nope_head_dim)
            return rotated_first(width, rotated, n_rows, neighbors=self.rotated == "neighbors")
        if not self.interleaved:
            return None
        return interleaved_rows(self.interleaved, len(self.parts), model, layer, n_rows)

    def indices(self, model: ModelConfig) -> Iterator[dict[str, Any]]:
        """Yield the layer, expert and head number of each of the module's tensors, for `full_name` and `part_names`.

        "n" is the number of layers without the MTP layer, "after" is the canonical name of the norm after the layer.
        """
        for index, layer in enumerate(model.all_layers) if self.per_layer else [(0, model.layers[0])]:
            if not self.is_in(model, layer):
                continue
            for expert in range(layer.n_experts) if "{e}" in self.name else [0]:
                for head in range(self.n_heads(model)):
                    after = f"layers.{index + 1}.attn_norm" if index + 1 < len(model.layers) else "output_norm"
                    yield {"l": index, "e": expert, "h": head, "n": len(model.layers), "after": after}

    def n_heads(self, model: ModelConfig) -> int:
        """The number of tensors in a part."""
        if "{h}" not in self.name:
            return 1
        if self.pieces:
            return len(self.pieces)
        if self.parts[0].startswith("drafter."):
            return len(model.eagle_layers)
        return model.n_heads if "attn_q" in self.parts[0] else model.n_kv_heads

    def span(self, model: ModelConfig, layer: LayerConfig, head: int, n_rows: int) -> tuple[int, int]:
        """The rows of a part with n_rows rows that the tensor of a head or piece has."""
        if self.pieces:
            keys = layer.state_key_heads * layer.state_key_dim
            ends = (0, keys, 2 * keys, n_rows)
            return ends[head], ends[head + 1]
        width = n_rows // self.n_heads(model)
        return head * width, (head + 1) * width

    def full_name(self, kind: str, **index: Any) -> str:
        """Hugging Face's name of the "weight" or "bias", without prefix."""
        name = self.name.format(**(index | {"h": self.pieces[index["h"]]} if self.pieces else index))
        return name if self.parameter else f"{name}.{kind}"

    def part_names(self, kind: str, **index: Any) -> tuple[str, ...]:
        """The canonical names of the "weight" or "bias"."""
        return tuple(f"{part.format(**index)}.{kind}" for part in self.parts)


@dataclass(frozen=True)
class Family:
    """A model_type.

    Attributes:
        architectures: transformers' classes with an output matrix; the first is the one to write.
        bare: The class without an output matrix.
        modules: The tensors.
        keys: Config keys besides the sizes that every family needs, with their defaults (None: see `config`).
        fixed: Keys that must have this value.
        harmless: Keys without effect on this family.
        objects: Keys for objects, whose keys are named KEY.INNER in the row.
        old_keys: Names of keys in configs of other code.
        outside: Keys that config.json can also have outside text_config, where they do not matter.
        sizes_of_head: head_dim must be hidden_size / heads if config.json has it.
        fixed_numbers: Names of tensors of one number that must have this value.
        layer_numbers: Names of tensors of one number, and the fields of the layer's record that they are.
        prefix: Precedes all names except HEAD's in a complete checkpoint, and none in a bare model's.
        head: The name under which transformers saves the output matrix.
        head_bias: Whether the output matrix has a bias, as in `Module.bias`.
        ignored: Patterns of tensors, without prefix, that are not weights.
        renamed: Patterns in full names and their replacements, for checkpoints of other versions.
        split: Patterns of tensors, without prefix, that are cut into rows for the tensors with these names.
        split_by_heads: These are q, k and v, and have the rows of their heads; otherwise they have equal numbers.
        zeros: Canonical names of matrices without tensors, which are zeros.
        quantized: The kinds of quantization_config that are read.
        text_type: The model_type of text_config in a model with images; "": `written_as`.
        old_text_type: Another model_type of text_config, in configs of earlier versions.
        other_texts: The rows for other language models that text_config can describe, named by their model_type.
        flat_text: The keys of text_config can be in config.json itself.
        norm, placement, ffn: The graph (docs/format.md).
        first_placement: The placement of the first layer, if it is another one.
        delta_net_placement: That of layers with a delta net, if it is another one.
        sub_norms: The inputs of the last matrices of attention and of the network are normed.
        plain_norms: Canonical names of norms, or of their biases, without tensors. Such weights are ones, biases zeros.
        activation: The key of the activation; if the family has two, the one that counts.
        up_offset: Is added to the up branch of the network.
        scaled_embedding: The embedding is scaled by sqrt(dim).
        normed_embedding: The embedding is normed without weights before the first layer.
        multiplied_logits: logits_scaling multiplies the logits; otherwise it divides them.
        state_norm: The norm of Mamba 2 layers (docs/format.md).
        qk_norm, v_norm: The norms of q, k and v (docs/format.md).
        qk_norm_after_rope: The norms of q and k follow RoPE.
        attention_scale: Multiplies q; 0: a key or the width of heads determines it.
        sinks: Each head has a sink.
        output_gate: The result of attention is multiplied by a gate for each element.
        position: "rope", "none" or "learned".
        position_offset: The row of the position embedding that the first position uses.
        padded_positions: The first row of the position embedding in use is the one after the padding token's id.
        biased_distances: Scores have a bias for each bucket of distances.
        alibi: Scores have biases that fall linearly with the distance.
        windows: Which layers have the sliding window if layer_types is missing; "none": no layer. With
            "pattern_and_last", the last one never has it.
        window_every: With a pattern and no key for it, every n-th layer sees all positions.
        window_key: The config key of the window.
        window_chunks: Layers with a window are "chunked_attention".
        rotates: Which layers have RoPE: "all", "windowed" (those with a window), "windowed_if_any" (those, or all if
            sliding_window is null). no_rope_layers takes precedence.
        optional_rope: Layers have no RoPE if config.json has no base of it.
        two_ropes: Layers without a window have a RoPE table of their own.
        pairs: Which rows of q and k RoPE rotates together: "halves" (j, j + n / 2), "neighbors" (2j, 2j + 1),
            "swapped" (j + n / 2, j).
        partial_default: RoPE of the type "default" with partial_rotary_factor is "proportional".
        odd_rope: RoPE can have an odd number of dimensions; one more is then rotated.
        rope_names: Other names of RoPE types.
        rope_extras: Keys in the RoPE object besides those of its type; see `rope`.
        rope_harmless: Keys in the RoPE object that do not matter for text.
        default_rope: rope_parameters if config.json has none.
        router: What turns the router's logits into scores: "softmax" or "sigmoid".
        choice_bias: A softmax router has a bias for the choice of experts, and weights that are divided by their sum.
        weights_eps: Is added to the sum that divides the experts' weights.
        fused: 3-dimensional tensors of all experts, with the names of each expert's parts when stored separately.
        fused_columns: The tensors in `fused` are (experts, inputs, outputs), the parts' outputs alternate, and biases
            are named NAME_bias; `write` does not write them.
        fused_only: transformers reads experts only from the tensors in `fused`; `write` does not write such models.
        fused_turned: Whether the tensors in `fused` are (experts, inputs, outputs): "never", "always", or "by_shape",
            which reads those of transformers 4 and 5.
        stacked: Patterns of matrices, without prefix, that have those of all experts one after the other, and the names
            of these.
        two_sided: An encoder. Its window key counts both sides.
        pair_separators: How many EOS tokens separate the texts of a pair, if tokenizer.json does not say.
        scores_pairs: The model is a cross-encoder: layers after pooling give the score of a pair of texts.
        head_activation: The activation of the first of these layers, unless a key has it.
        head_poolings: The values of the key for a cross-encoder's pooling, and our names for them.
        scorer: The row for the classes that score pairs.
        mtp: The tensors around the MTP layer. Its own are named as `mtp_block` says, or, if the names of `mtp` have
            "{n}", the number of layers, like those of one more layer. Checkpoints can lack all of them. Without a norm
            after the layer, the model's is used.
        mtp_key: The key for the number of MTP layers, which `write` writes; "": there is none.
        mtp_like: Which of the layers with attention the MTP layer is like, unless keys describe it.
        mtp_block: What replaces "layers" in the names of the MTP layer, whose number is 0. With "mtp.", none of its
            names has the prefix.
        mtp_dense: The MTP layer has no experts, windows or other peculiarities of layers.
        written_as: The model_type that `write` writes, if it is another one: of a model with images, its language
            model's.
        written_keys: Further keys that `write` writes if there is no original config.json.
    """

    # names, keys and files
    model_type: str
    architectures: tuple[str, ...]
    bare: str
    modules: tuple[Module, ...]
    keys: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    harmless: tuple[str, ...] = ()
    objects: tuple[str, ...] = ()
    old_keys: Mapping[str, str] = field(default_factory=dict)
    outside: tuple[str, ...] = ()
    sizes_of_head: bool = False
    fixed_numbers: Mapping[str, float] = field(default_factory=dict)
    layer_numbers: Mapping[str, str] = field(default_factory=dict)
    prefix: str = "model."
    head: str = "lm_head"
    head_bias: str = "never"
    ignored: tuple[str, ...] = (
        r"(layers\.\d+\.(self_attn|attention)\.)?rotary_emb(_local)?\.(inv_freq|cos_cached|sin_cached)",
    )
    renamed: tuple[tuple[str, str], ...] = ()
    split: tuple[tuple[str, tuple[str, ...]], ...] = ()
    split_by_heads: bool = False
    zeros: tuple[str, ...] = ()
    quantized: tuple[str, ...] = ()

    # a language model inside of another model
    text_type: str = ""
    old_text_type: str = ""
    other_texts: tuple[Family, ...] = ()
    flat_text: bool = False

    # the graph
    norm: str = "rms"
    placement: str = "pre"
    ffn: str = "gated"
    first_placement: str = ""
    delta_net_placement: str = ""
    sub_norms: bool = False
    plain_norms: tuple[str, ...] = ()
    activation: str = "hidden_act"
    up_offset: float = 0.0
    scaled_embedding: bool = False
    normed_embedding: bool = False
    multiplied_logits: bool = False
    state_norm: str = "none"

    # attention
    qk_norm: str = "none"
    v_norm: str = "none"
    qk_norm_after_rope: bool = False
    attention_scale: float = 0.0
    sinks: bool = False
    output_gate: bool = False

    # positions and windows
    position: str = "rope"
    position_offset: int = 0
    padded_positions: bool = False
    biased_distances: bool = False
    alibi: bool = False
    windows: str = "all"
    window_every: int = 1
    window_key: str = "sliding_window"
    window_chunks: bool = False

    # RoPE
    rotates: str = "all"
    optional_rope: bool = False
    two_ropes: bool = False
    pairs: str = "halves"
    partial_default: bool = False
    odd_rope: bool = False
    rope_names: Mapping[str, str] = field(default_factory=dict)
    rope_extras: tuple[str, ...] = ()
    rope_harmless: tuple[str, ...] = ()
    default_rope: Mapping[str, Any] = field(default_factory=dict)

    # experts
    router: str = "softmax"
    choice_bias: bool = False
    weights_eps: float = 0.0
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    fused_columns: bool = False
    fused_only: bool = False
    fused_turned: str = "never"
    stacked: tuple[tuple[str, str], ...] = ()

    # encoders and rerankers
    two_sided: bool = False
    pair_separators: int = 1
    scores_pairs: bool = False
    head_activation: str = "tanh"
    head_poolings: Mapping[str, str] = field(default_factory=lambda: {"cls": "cls", "mean": "mean"})
    scorer: Family | None = None

    # MTP layers
    mtp: tuple[Module, ...] = ()
    mtp_key: str = ""
    mtp_like: int = -1
    mtp_block: str = "mtp.layers"
    mtp_dense: bool = False

    # writing
    written_as: str = ""
    written_keys: Mapping[str, Any] = field(default_factory=dict)

    def is_plain_norm(self, name: str) -> bool:
        """Whether a canonical tensor belongs to a norm without tensors."""
        general = re.sub(r"^layers\.\d+\.", "layers.{l}.", name)
        return general in self.plain_norms or general.rpartition(".")[0] in self.plain_norms

    def order_of_pairs(self, name: str, rope_dim: int, head_dim: int) -> NDArray[np.intp] | None:
        """The permutation of a head's rows from the family's pairs to halves; None for tensors without one."""
        if self.pairs == "halves" or name.split(".")[-2] not in ("attn_q", "attn_k"):
            return None
        turned = np.arange(rope_dim)
        turned = turned.reshape(-1, 2).T.reshape(-1) if self.pairs == "neighbors" else np.roll(turned, rope_dim // 2)
        return np.concatenate([turned, np.arange(rope_dim, head_dim)])

    def is_ignored(self, full_name: str) -> bool:
        """Whether a stored tensor is not a weight."""
        return any(re.fullmatch(pattern, full_name.removeprefix(self.prefix)) for pattern in self.ignored)

    @property
    def numbered_mtp(self) -> bool:
        """Whether MTP layers are numbered like the others, and follow them."""
        return any("{n}" in module.name for module in self.mtp)

    @property
    def mtp_start(self) -> str:
        """What the names of MTP layers that are not numbered like the others begin with, after `mtp_prefix`."""
        return re.sub("[a-z]+$", "", self.mtp_block)

    @property
    def mtp_prefix(self) -> str:
        """The prefix of these names."""
        return "" if self.mtp_start == "mtp." else self.prefix

    def is_mtp(self, full_name: str, n_layers: int) -> bool:
        """Whether a stored tensor belongs to an MTP layer. n_layers: the number of other layers."""
        if not self.numbered_mtp:
            return bool(self.mtp) and full_name.removeprefix(self.mtp_prefix).startswith(self.mtp_start)
        found = re.match(r"layers\.([0-9]{1,9})\.", full_name.removeprefix(self.prefix))
        return found is not None and int(found[1]) >= n_layers
