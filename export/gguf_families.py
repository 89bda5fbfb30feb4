"""GGUF's names: one row per architecture, and what llama.cpp calls the tensors. Reader, writer and benchmarks use them.

A row says what the metadata leave unsaid because llama.cpp has it in its source: the graph, the defaults of keys, and
how its converter rearranges a checkpoint's rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Architecture:
    """One general.architecture.

    family: what Hugging Face calls it. keys: what may be in the metadata beside COMMON_KEYS, with the values of absent
    ones. paired: rotated pairs are neighbours in the files, so that rows of q and k are put back into halves.
    window_every: with a sliding window, every so-manieth layer sees all positions; 0: none does. nope_every: every
    so-manieth layer is not rotated; 0: all are. deep_scale: with this number of layers, attention is scaled by
    (dim / n_heads)^-0.5 and not by head_dim^-0.5.
    """

    family: str
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
    deep_scale: int = 0
    expert_weights: int = 0
    keys: Mapping[str, object] = field(default_factory=dict)


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
# What means nothing for the graph, whatever it says.
HARMLESS_KEYS = frozenset(
    ["vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "pooling_type", "embedding_length_out"]
)
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
    "rope.scaling.yarn_log_multiplier": (0,),
    "attention.sliding_window": (0,),
}

ARCHITECTURES = {
    "llama": Architecture("llama", paired=True, keys={"attention.scale": 0.0}),
    "gpt2": Architecture("gpt2", norm="layer", position="learned", ffn="plain", activation="gelu_tanh"),
    "qwen2": Architecture("qwen2"),
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
# Modules that may lie in one tensor, one after another along the output dimension.
FUSED = {"attn_qkv": ("attn_q", "attn_k", "attn_v")}


def gguf_name(name: str) -> str:
    """llama.cpp's name of one of our tensors. All experts of a layer share one, in which they follow one another."""
    *place, module, kind = name.split(".")
    if not place:
        return f"{_NAMES.get(module, module)}.{kind}"
    if len(place) == 4:  # layers.N.experts.M
        return f"blk.{place[1]}.{module}_exps.{kind}"
    return f"blk.{place[1]}.{_NAMES.get(module, module)}.{kind}"


def fused_name(name: str) -> tuple[str, int] | None:
    """(llama.cpp's name of the tensor in which one of our tensors may lie together with others, its place there)."""
    *place, module, kind = name.split(".")
    for whole, parts in FUSED.items():
        if module in parts and len(place) == 2:
            return f"blk.{place[1]}.{whole}.{kind}", parts.index(module)
    return None


def expert_name(name: str) -> str:
    """llama.cpp's old name of an expert's tensor, when every expert had its own."""
    *place, module, kind = name.split(".")
    return f"blk.{place[1]}.{module}.{place[3]}.{kind}" if len(place) == 4 else ""
