"""The contents of config.json of published checkpoints with short convolutions; see published_configs."""

from __future__ import annotations

from golden.published_newer import published_config
from golden.tiny_checkpoints import Config

_LFM2: Config = {
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "eos_token_id": 7,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "transformers_version": "4.57.0",
}


def _layer_types(n_layers: int, full: tuple[int, ...]) -> list[str]:
    return ["full_attention" if layer in full else "conv" for layer in range(n_layers)]


_LFM3_TYPES = ["conv", "conv", *["full_attention", "conv", "sliding_attention", "conv"] * 5, "full_attention", "conv"]
RECURRENT: dict[str, Config] = {
    # its RoPE of the type "default" rotates a part of each head
    "LFM3-1.7B": published_config(
        "lfm3",
        "Lfm3ForCausalLM",
        (2048, 7680, 24, 16, 128000),
        auto_map={"AutoConfig": "configuration_lfm3.Lfm3Config"},
        bos_token_id=124894,
        conv_L_cache=7,
        conv_bias=False,
        dtype="bfloat16",
        eos_token_id=124900,
        head_dim=128,
        layer_types=_LFM3_TYPES,
        max_position_embeddings=262144,
        norm_eps=1e-5,
        num_key_value_heads=4,
        pad_token_id=124893,
        rope_parameters={
            "full_attention": {"partial_rotary_factor": 0.5, "rope_theta": 1000000.0, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 10000, "rope_type": "default"},
        },
        sliding_window=256,
        tie_word_embeddings=True,
    ),
    "LFM2-1.2B": published_config(
        "lfm2",
        "Lfm2ForCausalLM",
        (2048, 12288, 16, 32, 65536),
        **_LFM2,
        block_auto_adjust_ff_dim=True,
        block_dim=2048,
        block_ff_dim=12288,
        block_ffn_dim_multiplier=1.0,
        block_mlp_init_scale=1.0,
        block_multiple_of=256,
        block_norm_eps=1e-5,
        block_out_init_scale=1.0,
        block_use_swiglu=True,
        block_use_xavier_init=True,
        conv_dim=2048,
        conv_dim_out=2048,
        conv_use_xavier_init=True,
        full_attn_idxs=[2, 5, 8, 10, 12, 14],
        num_heads=32,
        theta=1000000.0,
        use_pos_enc=True,
    ),
    "LFM2.5-1.2B": published_config(
        "lfm2",
        "Lfm2ForCausalLM",
        (2048, 12288, 16, 32, 65536),
        **_LFM2,
        block_auto_adjust_ff_dim=True,
        block_dim=2048,
        block_ffn_dim_multiplier=1.0,
        block_mlp_init_scale=1.0,
        block_multiple_of=256,
        block_norm_eps=1e-5,
        block_out_init_scale=1.0,
        block_use_swiglu=True,
        block_use_xavier_init=True,
        conv_dim=2048,
        conv_use_xavier_init=True,
        layer_types=_layer_types(16, (2, 5, 8, 10, 12, 14)),
        num_heads=32,
        tie_embedding=True,
        use_pos_enc=True,
    ),
    "LFM2-8B-A1B": published_config(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        (2048, 7168, 24, 32, 65536),
        **_LFM2,
        layer_types=_layer_types(24, (2, 6, 10, 14, 18, 21)),
        moe_intermediate_size=1792,
        norm_topk_prob=True,
        num_dense_layers=2,
        num_experts=32,
        num_experts_per_tok=4,
        routed_scaling_factor=1.0,
        tie_embedding=True,
        use_expert_bias=True,
    ),
}
