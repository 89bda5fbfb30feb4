"""Rows of the table of GGUF architectures: decoders with sigmoid routers or shared experts, and Apertus."""

from __future__ import annotations

from llamac.export.gguf import llama4
from llamac.export.gguf.architecture import EXPERTS, REQUIRED, Architecture

XIELU_KEYS = {f"xielu.{name}": REQUIRED for name in ("alpha_p", "alpha_n", "beta", "eps")}
# Keys of experts, and of what chooses and weights them. The tensors say which layers have experts.
SIGMOID_KEYS: dict[str, object] = {
    **EXPERTS,
    "expert_shared_count": 0,
    "expert_weights_scale": None,
    "expert_gating_func": None,
    "expert_group_count": None,
    "expert_group_used_count": None,
    "leading_dense_block_count": 0,
    "nextn_predict_layers": 0,
}
_WINDOW: dict[str, object] = {"attention.sliding_window": REQUIRED, "attention.sliding_window_pattern": None}

ROUTED = {
    "apertus": Architecture(
        "apertus",
        ffn="plain",
        activation="xielu",
        qk_norm="head",
        keys=XIELU_KEYS,
        rope_tensors=("freqs",),
        output="must",
    ),
    "llama4": Architecture(
        "llama4_text",
        others=("llama4",),
        qk_norm="rotated_head",
        qk_norm_after_rope=True,
        paired=True,
        nope_every=4,
        window_every=4,
        router="sigmoid",
        shared_by_tensors=True,
        chunked=True,
        keys={
            **EXPERTS,
            llama4.WINDOW_KEY: llama4.CHUNK,
            "attention.sliding_window_pattern": None,
            "interleave_moe_layer_step": REQUIRED,
        },
        rope_tensors=("freqs",),
        needs_shared=True,
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        others=("solar_open",),
        qk_norm="head",
        norms_by_tensors=True,
        router="sigmoid",
        weights_eps=1e-20,
        plain_shared=True,
        mtp=True,
        keys=SIGMOID_KEYS,
        names={"ffn_norm": "post_attention_norm"},
    ),
    "dots1": Architecture(
        "dots1",
        qk_norm="head",
        router="",
        weights_eps=1e-20,
        plain_shared=True,
        keys=SIGMOID_KEYS,
        output="must",
        needs_shared=True,
        all_heads=True,
    ),
    "afmoe": Architecture(
        "afmoe",
        placement="sandwich",
        qk_norm="head",
        scaled_embedding=True,
        window_every=4,
        rotates="windowed",
        router="sigmoid",
        weights_eps=1e-20,
        expert_weights=1,
        plain_shared=True,
        gates_by_tensors=True,
        keys={**SIGMOID_KEYS, **_WINDOW, "rope.freq_base_swa": None},
        read_only=True,
    ),
    "exaone-moe": Architecture(
        "exaone_moe",
        qk_norm="head",
        window_every=4,
        rotates="windowed",
        router="",
        weights_eps=1e-20,
        plain_shared=True,
        keys={**SIGMOID_KEYS, **_WINDOW, "expert_shared_feed_forward_length": None, "rope.freq_base_swa": None},
        rope_tensors=("freqs",),
        output="must",
        needs_shared=True,
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        qk_norm="whole",
        router="",
        expert_weights=1,
        keys={**EXPERTS, "expert_gating_func": None},
        output="must",
    ),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        qk_norm="head",
        qk_norm_after_rope=True,
        expert_weights=1,
        shared_by_tensors=True,
        keys={**EXPERTS, "expert_shared_count": 0, "expert_shared_feed_forward_length": None},
        needs_shared=True,
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        paired=True,
        expert_weights=1,
        shared_by_tensors=True,
        keys={
            **EXPERTS,
            "expert_shared_count": 0,
            "expert_shared_feed_forward_length": None,
            "interleave_moe_layer_step": 1,
            "leading_dense_block_count": 0,
        },
    ),
}
