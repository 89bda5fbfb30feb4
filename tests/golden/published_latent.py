"""The contents of config.json of published checkpoints with multi-head latent attention; see published_configs."""

from __future__ import annotations

from golden.published_newer import published_config
from golden.tiny_checkpoints import Config

_LONGROPE = [
    *(1.0591234137867171, 1.1241891283591912, 1.2596935748670968, 1.5380380402321725),
    *(2.093982484148734, 3.1446935121267696, 4.937952647693647, 7.524541999994549),
    *(10.475458000005451, 13.062047352306353, 14.85530648787323, 15.906017515851266),
    *(16.461961959767827, 16.740306425132907, 16.87581087164081, 16.940876586213285),
]
_DEEPSEEK: Config = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "seq_aux": True,
    "tie_word_embeddings": False,
    "v_head_dim": 128,
}


def _yarn(mscale: float) -> Config:
    return {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": mscale,
        "mscale_all_dim": mscale,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    }


LATENT: dict[str, Config] = {
    "MiniCPM3-4B": published_config(
        "minicpm3",
        "MiniCPM3ForCausalLM",
        (2560, 6400, 62, 40, 73448),
        bos_token_id=1,
        dim_model_base=256,
        eos_token_id=[2, 73440],
        hidden_act="silu",
        kv_lora_rank=256,
        max_position_embeddings=32768,
        num_key_value_heads=40,
        q_lora_rank=768,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        rms_norm_eps=1e-5,
        rope_scaling={
            "long_factor": _LONGROPE,
            "original_max_position_embeddings": 32768,
            "short_factor": _LONGROPE,
            "type": "longrope",
        },
        scale_depth=1.4,
        scale_emb=12,
    ),
    "DeepSeek-V2-Lite": published_config(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        (2048, 10944, 27, 16, 102400),
        **_DEEPSEEK,
        bos_token_id=100000,
        eos_token_id=100001,
        first_k_dense_replace=1,
        moe_intermediate_size=1408,
        n_group=1,
        n_routed_experts=64,
        n_shared_experts=2,
        norm_topk_prob=False,
        num_experts_per_tok=6,
        num_key_value_heads=16,
        q_lora_rank=None,
        rope_scaling=_yarn(0.707),
        routed_scaling_factor=1.0,
        scoring_func="softmax",
        topk_group=1,
        topk_method="greedy",
    ),
}
