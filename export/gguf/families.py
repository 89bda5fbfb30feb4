"""GGUF's names: one row per architecture, and what llama.cpp calls the tensors. Reader, writer and benchmarks use them.

A row says what the metadata leave unsaid because llama.cpp has it in its source: the graph, the defaults of keys, and
how its converter rearranges a checkpoint's rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Architecture:
    """One general.architecture.

    family: what Hugging Face calls it. others: families that are this architecture, too. keys: what may be in the
    metadata beside COMMON_KEYS, with the values of absent ones. paired: rotated pairs are neighbours in the files, so
    that rows of q and k are put back into halves. window_every: with a sliding window, every so-manieth layer sees all
    positions; 0: none does. nope_every: every so-manieth layer is not rotated; 0: all are. two_ropes: layers with a
    window have frequencies of their own. deep_scale: with this number of layers attention is scaled by
    (dim / n_heads)^-0.5, not by head_dim^-0.5. expert_weights: 1 if those of the experts in use are divided by their
    sum. shared_width: where there is no width of experts, those in use share the network's.

    What llama.cpp can load, which only `write` asks for; reading is more generous. fused: modules that must lie in
    one tensor (see FUSED). biases: whether matrices have biases: "any" may, "qkv", those three may, "all" must.
    output: whether the output matrix is in the file: it "may" be, it "must", also where it repeats the embedding, or it
    is "never". rope_tensors: kinds of ROPE_FACTORS. square: whether all heads together are as wide as the model.
    ignores_window: whether the sliding window of the file is not computed.
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
    nope_every: int = 0
    two_ropes: bool = False
    deep_scale: int = 0
    expert_weights: int = 0
    shared_width: bool = False
    keys: Mapping[str, object] = field(default_factory=dict)
    fused: tuple[str, ...] = ()
    biases: str = "qkv"
    output: str = "may"
    rope_tensors: tuple[str, ...] = ()
    square: bool = False
    ignores_window: bool = False


# Of any architecture; those without a default must be there.
REQUIRED = object()
COMMON_KEYS: dict[str, object] = {
    "context_length": REQUIRED,
    "embedding_length": REQUIRED,
    "block_count": REQUIRED,
    "attention.head_count": REQUIRED,
    "feed_forward_length": None,
    "attention.head_count_kv": None,
    "attention.key_length": None,
    "attention.value_length": None,
    "attention.layer_norm_epsilon": None,
    "attention.layer_norm_rms_epsilon": None,
}
ROPE_KEYS: dict[str, object] = {
    "rope.dimension_count": None,
    "rope.freq_base": 10000.0,
    "rope.scale_linear": None,  # of the first files
    "rope.scaling.type": None,
    "rope.scaling.factor": None,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.original_context_length": None,
    "rope.scaling.yarn_ext_factor": None,
    "rope.scaling.yarn_attn_factor": None,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}
# Of some architectures: the second factor of YaRN; Granite's switch of RoPE, which elsewhere means nothing.
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
IS_ROTATED = "rope.scaling.finetuned"
# What means nothing for the graph, whatever it says.
HARMLESS_KEYS = frozenset(["vocab_size", "tensor_data_layout", IS_ROTATED, "pooling_type", "embedding_length_out"])
# What means nothing with this value; any other is not computed here.
NEUTRAL_KEYS: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.temperature_scale": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_gating_func": (0, 1),
    "expert_weights_scale": (0, 1),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    LOG_MULTIPLIER: (0,),
    "attention.sliding_window": (0,),
}

_WINDOW: dict[str, object] = {"attention.sliding_window": 0, "attention.sliding_window_pattern": None}
_EXPERTS: dict[str, object] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_feed_forward_length": None,
    "expert_weights_norm": None,
}
_LLAMA = Architecture(
    "llama",
    others=("mistral", "mixtral"),
    paired=True,
    expert_weights=1,
    keys={**_WINDOW, **_EXPERTS},
    biases="any",
    rope_tensors=("freqs", "long", "short"),
    ignores_window=True,
)
_GEMMA = Architecture("gemma", activation="gelu_tanh", scaled_embedding=True, output="never")

ARCHITECTURES = {
    "llama": _LLAMA,
    "mistral3": replace(_LLAMA, others=(), keys={**_LLAMA.keys, LOG_MULTIPLIER: 0.0}),
    "gpt2": Architecture(
        "gpt2",
        norm="layer",
        position="learned",
        ffn="plain",
        activation="gelu_tanh",
        fused=("attn_qkv",),
        biases="all",
        square=True,
    ),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", qk_norm="head"),
    "qwen3moe": Architecture("qwen3_moe", qk_norm="head", expert_weights=1, shared_width=True, keys=_EXPERTS),
    "gemma": _GEMMA,
    "gemma2": replace(
        _GEMMA,
        family="gemma2",
        placement="sandwich",
        window_every=2,
        deep_scale=46,
        keys={
            **_WINDOW,
            "attention.sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": replace(
        _GEMMA,
        family="gemma3_text",
        others=("gemma3",),
        placement="sandwich",
        qk_norm="head",
        window_every=6,
        two_ropes=True,
        deep_scale=62,
        keys={**_WINDOW, "final_logit_softcapping": 0.0, "rope.freq_base_swa": 10000.0},
        output="may",
    ),
    "phi3": Architecture(
        "phi3",
        keys=_WINDOW,
        fused=("attn_qkv", "ffn_up"),
        rope_tensors=("long", "short"),
        square=True,
        ignores_window=True,
    ),
    "gptneox": Architecture(
        "gpt_neox",
        norm="layer",
        ffn="plain",
        activation="gelu_erf",
        keys={"use_parallel_residual": True},
        fused=("attn_qkv",),
        biases="all",
        output="must",
        square=True,
    ),
    "olmo2": Architecture("olmo2", placement="post", qk_norm="whole", output="must", square=True),
    "olmoe": Architecture("olmoe", qk_norm="whole", keys=_EXPERTS, output="must", square=True),
    # norms of q and k, and the parallel residual, are told by the tensors
    "stablelm": Architecture(
        "stablelm",
        norm="layer",
        qk_norm="layer_head",
        keys={"use_parallel_residual": None},
        output="must",
        square=True,
    ),
    "granite": Architecture(
        "granite",
        paired=True,
        keys={
            "attention.scale": 0.0,
            "embedding_scale": 0.0,
            "residual_scale": 0.0,
            "logit_scale": 0.0,
            IS_ROTATED: True,
        },
        biases="any",
        rope_tensors=("freqs", "long", "short"),
    ),
    "smollm3": Architecture("smollm3", paired=True, nope_every=4),
}

# Our names of modules by llama.cpp's, where they differ; "blk.N." stands for "layers.N.".
_NAMES = {
    "token_embedding": "token_embd",
    "position_embedding": "position_embd",
    "attn_out": "attn_output",
    "attn_post_norm": "post_attention_norm",
    "ffn_post_norm": "post_ffw_norm",
    "ffn_router": "ffn_gate_inp",
}
# Tensors that say how RoPE's frequencies are scaled.
ROPE_FACTORS = {"freqs": "rope_freqs.weight", "long": "rope_factors_long.weight", "short": "rope_factors_short.weight"}
# Modules that may lie in one tensor, one after another along the output dimension. The second is named as one of them.
FUSED = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_up": ("ffn_gate", "ffn_up")}


def gguf_name(name: str) -> str:
    """llama.cpp's name of one of our tensors. All experts of a layer share one, in which they follow one another."""
    *place, module, kind = name.split(".")
    if not place:
        return f"{_NAMES.get(module, module)}.{kind}"
    if len(place) == 4:  # layers.N.experts.M
        return f"blk.{place[1]}.{module}_exps.{kind}"
    return f"blk.{place[1]}.{_NAMES.get(module, module)}.{kind}"


def fused_name(name: str, wholes: Iterable[str] = FUSED) -> tuple[str, int] | None:
    """(llama.cpp's name of the tensor in which one of our tensors may lie together with others, its place there), of
    those tensors that `wholes` names."""
    *place, module, kind = name.split(".")
    for whole in wholes:
        if module in FUSED[whole] and len(place) == 2:
            return f"blk.{place[1]}.{whole}.{kind}", FUSED[whole].index(module)
    return None


def expert_name(name: str) -> str:
    """llama.cpp's old name of an expert's tensor, when every expert had its own."""
    *place, module, kind = name.split(".")
    return f"blk.{place[1]}.{module}.{place[3]}.{kind}" if len(place) == 4 else ""
