"""The fields of a layer record: which values contradict each other, and which the engine does not compute.

The layers are those of the sample of test_corrupt.
"""

from __future__ import annotations

# A layer with a recurrent state.
RECURRENT: dict[str, float] = {
    "mixer": 2,
    "window": 0,
    "rope": -1,
    "state_key_heads": 2,
    "state_heads": 4,
    "state_key_dim": 16,
    "state_value_dim": 32,
    "conv_width": 4,
}

# Fields of a layer that contradict others, with the message. The first layer is gated, the second has 3 experts.
CONTRADICTIONS: list[tuple[int, dict[str, float], str]] = [
    (0, {"head_dim": 16}, "layer 0: head_dim is 16, expected at most the config's 8"),
    (0, {"n_kv_heads": 2}, "layer 0: n_kv_heads is 2, expected at most the config's 1"),
    (1, {"head_dim": 4}, r"layer 1: rope is 0, but rope_dim\[0\] 8 exceeds head_dim 4"),
    (1, {"kv_source": 1}, "layer 1: kv_source is 1, expected an earlier layer, or -1"),
    (1, {"kv_source": 0, "head_dim": 4, "rope": -1}, "kv_source is 0, expected a layer of attention with its own 1 KV"),
    (1, {"kv_source": 0, "v_norm": 1}, "layer 1: v_is_k is 0 and v_norm is 1, expected 0 with kv_source 0"),
    (0, {"v_is_k": 1}, "layer 0: v_is_k is 1, expected 0 with qk_norm whole"),
    (0, {"query_beta": 0.5}, "layer 0: query_beta is 0.5 with query_context 0, expected both or neither to be 0"),
    (0, {"query_offset": 1}, "layer 0: query_offset is 1, expected 0 with query_context 0"),
    (0, {"window": 0, "window_chunks": 1}, "layer 0: window_chunks is 1, expected 0 with window 0 and two_sided 0"),
    (0, {"expert_weights_first": 1}, "layer 0: expert_weights_first is 1, expected 0 with ffn gated"),
    (0, {"q_lora_rank": 8}, "layer 0: q_lora_rank is 8, expected 0 with kv_lora_rank 0"),
    (0, {"latent_norm_eps": 0.5}, "layer 0: latent_norm_eps is 0.5, expected 0 with kv_lora_rank 0"),
    (0, {"kv_lora_rank": 32, "kv_source": -1}, "layer 0: .*, expected .* with kv_lora_rank 32"),
    (0, {"ffn_dim": 0}, "layer 0: ffn_dim is 0 with ffn gated"),
    (0, {"ffn": 4}, "layer 0: ffn_dim is 20 with ffn none"),
    (0, {"ffn": 1, "up_offset": 1.0}, "layer 0: up_offset is 1, expected 0 with ffn plain"),
    (0, {"router": 1}, "layer 0: router is 1, expected 0 with ffn gated"),
    (0, {"expert_scale": 2.0}, "layer 0: expert_scale is 2, expected 1 with ffn gated"),
    (0, {"shared_ffn_dim": 8}, "layer 0: shared_ffn_dim is 8, expected 0 with ffn gated"),
    (1, {"n_expert_groups": 2, "n_expert_groups_used": 1}, "n_expert_groups is 2 and .* with n_experts 3"),
    (1, {"n_expert_groups": 3, "n_expert_groups_used": 1}, "n_experts_used is 2, expected at most 1, the experts"),
    (1, {"expert_weights_eps": 0.5}, "expert_weights_eps is 0.5, expected 0 unless router is sigmoid and expert_wei"),
    (0, {"expert_weights_eps": 0.5}, "expert_weights_eps is 0.5, expected 0 with ffn gated"),
    (1, {"router_choice_bias": 1}, r"layers\.1\.ffn_router_choice\.bias is missing, with router_choice_bias 1"),
    (1, {"n_expert_groups": 3}, "layer 1: n_expert_groups is 3 and n_expert_groups_used is 0"),
    (1, {"shared_gate": 1}, "layer 1: shared_gate is 1, expected 0 with shared_ffn_dim 0"),
    (0, {"expert_norms": 1}, "layer 0: expert_norms is 1, expected 0 with ffn gated"),
    (1, {"expert_norms": 1}, "layer 1: expert_norms is 1, expected 0 without a shared expert"),
    (1, {"expert_norms": 1, "shared_ffn_dim": 8, "shared_gate": 1}, "layer 1: expert_norms is 1, expected 0 without"),
    (1, {"mixer": 0}, r"layer 1: mixer is 0, expected 1 to 6 \(attention,delta_net,mamba2,short_conv,none,att"),
    (0, {"mixer": 6}, "layer 0: state_key_heads is 0 with mixer attention_mamba2"),
    (0, {**RECURRENT, "mixer": 6, "state_key_dim": 24}, "state_key_dim is 24, expected a multiple of 16"),
    (1, {"mixer": 5, "window": 0}, "layer 1: rope is 0, expected -1 with mixer none"),
    (0, {"mixer": 5, "rope": -1, "window": 0, "ffn": 4, "ffn_dim": 0}, "layer 0: mixer and ffn are none, expected at"),
    (0, {"placement": 2, "ffn": 4, "ffn_dim": 0}, r"layer 0: placement is 2, expected 1 \(pre\) with ffn none"),
    (0, {"plain_experts": 1}, "layer 0: plain_experts is 1, expected 0 with ffn gated"),
    (1, {"plain_experts": 1, "up_offset": 1.0}, "layer 1: up_offset is 1, expected 0 with plain_experts 1"),
    (1, {"plain_experts": 1}, r"layers\.1\.experts\.0\.ffn_gate\.weight does not belong .* with plain_experts 1"),
    (1, {"sub_norms": 1}, "layer 1: n_experts is 3, expected 0 with sub_norms 1"),
    (0, {"sub_norms": 1, "placement": 4}, "layer 0: sub_norms is 1, expected 0 with placement parallel"),
    (0, {"sub_norms": 1}, r"layers\.0\.attn_sub_norm\.weight is missing, with sub_norms 1"),
    (0, {**RECURRENT, "sub_norms": 1}, "layer 0: mixer is 2, expected 1 with sub_norms 1"),
    (0, {"layer_scale": 0.0}, "layer 0: layer_scale is 0, expected 1e-30 to 1000000"),
    (1, {"layer_embedding_dim": 8}, "layer 1: layer_embedding_dim is 8, expected that of layer 0, 0"),
    (0, {"conv_width": 4}, "layer 0: conv_width is 4 with mixer attention"),
    (0, {"conv_width": 17}, "layer 0: conv_width is 17, expected 0 to 16"),
    (0, {"mixer": 4, "rope": -1, "window": 0}, "layer 0: conv_width is 0 with mixer short_conv"),
    (0, {"mixer": 4, "rope": -1, "window": 0, "conv_width": 1}, "layer 0: conv_width is 1 with mixer short_conv"),
    (0, {"conv_width": 3}, "layer 0: conv_width is 3 with mixer attention"),
    (0, {"mixer": 4, "conv_width": 3, "state_heads": 1}, "layer 0: state_heads is 1 with mixer short_conv"),
    (0, {**RECURRENT, "state_heads": 0}, "layer 0: state_heads is 0 with mixer delta_net"),
    (0, {**RECURRENT, "state_heads": 5}, "state_heads is 5, expected a multiple of state_key_heads 2"),
    (0, {**RECURRENT, "state_key_dim": 24}, "state_key_dim is 24, expected a multiple of 16"),
    (0, {**RECURRENT, "state_value_dim": 8}, "state_value_dim is 8, expected a multiple of 16"),
    (
        0,
        {**RECURRENT, "state_heads": 4096, "state_value_dim": 4096},
        "have 16777280 channels together, expected at most",
    ),
    (
        0,
        {**RECURRENT, "state_heads": 4096, "state_key_dim": 4096, "state_value_dim": 240},
        "layer 0: the state has 4026531840 numbers, expected at most 268435456",
    ),
    (0, {**RECURRENT, "mixer": 3, "state_key_heads": 0}, "layer 0: state_key_heads is 0 with mixer mamba2"),
    (0, {**RECURRENT, "mixer": 3, "rope": 0}, "layer 0: rope is 0, expected -1 with mixer mamba2"),
    (0, {"placement": 7}, "layer 0: placement is 7, expected 1 to 6"),
    (0, {**RECURRENT, "window": 3}, "layer 0: window is 3, expected 0 with mixer delta_net"),
    (0, {**RECURRENT, "rope": 0}, "layer 0: rope is 0, expected -1 with mixer delta_net"),
    (
        0,
        RECURRENT,
        r"layers\.0\.attn_q\.weight does not belong to a model of this config, with mixer delta_net|mixer is",
    ),
]

# Fields of a layer that the engine computes for all of their values.
COMPUTED = """
    placement layer_scale window rope n_heads n_kv_heads head_dim kv_source v_is_k v_norm output_gate sinks query_beta
    query_context ffn_dim activation_limit up_offset n_experts n_experts_used router router_choice_bias n_expert_groups
    n_expert_groups_used expert_weights expert_scale expert_weights_eps shared_ffn_dim shared_gate layer_embedding_dim
    state_key_heads state_heads state_key_dim state_value_dim conv_width q_lora_rank kv_lora_rank qk_nope_head_dim
    v_head_dim latent_norm_eps expert_norms expert_factors mixer ffn plain_experts
    sub_norms window_chunks query_offset expert_weights_first
"""
