"""The row type of the table of GGUF architectures (`families` has the table), and keys that rows share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_ALIBI_BIAS = "attention.max_alibi_bias"
REQUIRED = object()  # the default of keys without one
EXPERTS: dict[str, object] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_feed_forward_length": None,
    "expert_weights_norm": None,
}


@dataclass(frozen=True)
class Architecture:
    """A value of general.architecture.

    Attributes:
        family: Hugging Face's name of it.
        others: Other families that use this architecture.
        keys: Metadata keys besides COMMON_KEYS, with their defaults.
        paired: RoPE pairs are neighbors in the file, so the reader permutes rows of q and k back into halves.
        window_every: Every n-th layer of a model with a sliding window sees all positions; 0: none does.
        global_first: Of these layers, the first is the model's first; otherwise the n-th.
        first_placement: That of the first layer, if it is another one.
        nope_every: Every n-th layer has no RoPE; 0: all layers have it.
        rotates: Which layers have RoPE: "all", "windowed" (those with a window), "windowed_if_any" (those, or all in a
            model without windows).
        dense_rotate: Layers before those with experts have RoPE in any case.
        two_ropes: Layers with a window have separate RoPE frequencies. Without a key for their base, it is the other's.
        qk_norm_after_rope: The norms of q and k follow RoPE.
        two_sided: An encoder (see `encoders`). Its window counts both sides.
        activation_limit, up_offset: See docs/format.md.
        either_norm: Norms are RMS norms if the file has an epsilon for these.
        zero_norm_biases: The file has no biases of layer norms.
        plain_norms: Norms have neither weights nor biases.
        alibi_depth: A model with this many layers has ALiBi in place of RoPE; 0: none has.
        alibi: Scores have ALiBi's biases, whose smallest slope is 2^-alibi; 0: they have none, unless MAX_ALIBI_BIAS is
            a key of the architecture.
        multiplies_logits: The logits are multiplied by logit_scale, not divided.
        names: llama.cpp's names of modules where they differ from other architectures'. A key with a kind, such as
            "ffn_norm.weight", has a name without a suffix.
        or_names: Names of such modules in files that lack the former.
        ignored: Tensors that do not affect the logits.
        deep_scale: A model with this many layers scales attention by (dim / n_heads)^-0.5, not head_dim^-0.5.
        expert_weights: 1 if the weights of the active experts are divided by their sum.
        shared_width: Without a key for their width, the active experts together have the FFN's width.
        halves_ffn: feed_forward_length counts the rows of both first matrices of a layer's network.
        shared_expert: Layers with experts also have one of all rows, with a gate. Without a key for its width, it has
            the FFN's.
        ternary: Layers have norms before their last matrices. If their matrices are ternary, their inputs are rounded.
        latent: Attention has a latent, and its rotated rows are pairs of "halves" or of "neighbors"; "": it has none.
        plain_shared: Layers with experts also have expert_shared_count experts of all rows, without a gate.
        embedding_scale, branch_scale, logit_dim: The embedding is multiplied by the first, branches by the second
            divided by the square root of the number of layers, and logits by the third divided by the model's width; 0:
            they are not, unless a key says so.
        delta_net: Layers have a gated delta net in place of attention, except every n-th, whose attention has a gate.
        short_conv: Layers whose number of KV heads is 0 have a short convolution in place of attention. The tensors say
            whether the others have a gate for each head.
        needs_factors: RoPE rotates a part of each head in layers without a window; a tensor of factors says which.
        mamba2: Layers whose number of KV heads is 0 have Mamba 2 in place of attention.
        only_mamba2: All layers have Mamba 2 and nothing else. The file has 0 heads and networks of width 0.
        beside: All layers have attention and Mamba 2 side by side. The tensors say whether its results have a norm.
        single_part: Those of them that have a feed_forward_length have a network in place of Mamba 2, without a gate,
            like their experts; other layers have no network.
        router, weights_eps: What turns the router's logits into scores if no key says so ("": a key must), and what is
            added to the weights' sum of sigmoids.
        read_only: The writer does not support it.
        halves_shared: Where there is an expert of all rows, the sum of its result and the others' is halved.
        shared_by_tensors: The shape of its tensors says whether layers have an expert of all rows, without a gate.
        gates_by_tensors: The tensors say which layers have a gate for each element of attention's result.
        norms_by_tensors: The tensors say whether q and k have norms.
        tiled: The heads of v in delta nets are sorted (see `delta_net`).
        attention_scale: Multiplies q; 0: a key or the width of heads determines it.
        varied: Layers differ as those of Gemma 4 do (see `gemma4`).
        chunked: Layers are those of Llama 4 (see `llama4`).
        mtp: Of the blocks that predict further tokens, the first is the MTP layer (see `mtp`).
        mtp_like: Which of the layers with attention it is like.
        drafter: The file is of a drafter of this kind (see `drafters`); "": it is of a model.

    The other attributes say what llama.cpp can load. Only the writer uses them; the reader accepts more.

        fused: Modules that must share one tensor (see FUSED). With GATE_UP_EXPERTS, those of all experts must.
        biases: Which matrices can have biases: "any", "qkv", "none", or "all" (all must).
        output: Whether the file has an output matrix: "may", "must" (even if it repeats the embedding), "never".
        rope_tensors: Supported kinds of ROPE_FACTORS.
        square: All heads together must be as wide as the model.
        ignores_window: llama.cpp does not apply the file's sliding window.
        needs_shared: Layers with experts must also have a shared expert.
        all_heads: There must be as many KV heads as heads.
        window_depth: llama.cpp applies a sliding window only to models with this many layers; 0: to all.
        writes_mtp: llama.cpp computes the MTP layer.
    """

    family: str
    others: tuple[str, ...] = ()
    norm: str = "rms"
    position: str = "rope"
    ffn: str = "gated"
    activation: str = "silu"
    placement: str = "pre"
    qk_norm: str = "none"
    paired: bool = False
    scaled_embedding: bool = False
    window_every: int = 0
    global_first: bool = False
    first_placement: str = ""
    nope_every: int = 0
    rotates: str = "all"
    dense_rotate: bool = False
    two_ropes: bool = False
    qk_norm_after_rope: bool = False
    two_sided: bool = False
    activation_limit: float = 0.0
    up_offset: float = 0.0
    either_norm: bool = False
    zero_norm_biases: bool = False
    plain_norms: bool = False
    alibi_depth: int = 0
    alibi: float = 0.0
    multiplies_logits: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    or_names: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    deep_scale: int = 0
    expert_weights: int = 0
    shared_width: bool = False
    halves_ffn: bool = False
    shared_expert: bool = False
    ternary: bool = False
    latent: str = ""
    plain_shared: bool = False
    embedding_scale: float = 0.0
    branch_scale: float = 0.0
    logit_dim: int = 0
    delta_net: bool = False
    short_conv: bool = False
    needs_factors: bool = False
    mamba2: bool = False
    only_mamba2: bool = False
    beside: bool = False
    single_part: bool = False
    router: str = "softmax"
    read_only: bool = False
    halves_shared: bool = False
    shared_by_tensors: bool = False
    gates_by_tensors: bool = False
    norms_by_tensors: bool = False
    weights_eps: float = 0.0
    tiled: bool = False
    attention_scale: float = 0.0
    varied: bool = False
    chunked: bool = False
    mtp: bool = False
    mtp_like: int = -1
    drafter: str = ""
    keys: Mapping[str, object] = field(default_factory=dict)
    fused: tuple[str, ...] = ()
    biases: str = "qkv"
    output: str = "may"
    rope_tensors: tuple[str, ...] = ()
    square: bool = False
    ignores_window: bool = False
    needs_shared: bool = False
    all_heads: bool = False
    window_depth: int = 0
    writes_mtp: bool = True

    @property
    def is_written(self) -> bool:
        """Whether the writer can write it."""
        return not (self.read_only or self.needs_factors)

    @property
    def has_alibi(self) -> bool:
        """Whether scores have ALiBi's biases."""
        return self.alibi > 0 or MAX_ALIBI_BIAS in self.keys

    @property
    def has_predicting_blocks(self) -> bool:
        """Whether the last blocks can predict further tokens."""
        return "nextn_predict_layers" in self.keys and not self.drafter

    @property
    def is_recurrent(self) -> bool:
        """Whether it can have layers without attention."""
        return self.delta_net or self.short_conv or self.mamba2 or self.beside

    def shares_norm(self, placement: str) -> bool:
        """Whether attention and network have one norm, if the layers have this placement."""
        return placement == "parallel" and (self.qk_norm == "layer_head" or self.placement == "parallel")
