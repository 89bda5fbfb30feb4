"""The parity cases of families with Mamba 2 layers; see family_cases."""

from __future__ import annotations

from golden.case_table import FULL, LINEAR, cases_of, decoder, variant_of
from golden.cases import Case
from golden.tiny_checkpoints import Config


def _variants(base: Case, **variants: Config) -> dict[str, Case]:
    """Cases that differ from a variant."""
    found: dict[str, Case] = {}
    for name, changes in variants.items():
        found |= variant_of(base, f"{base.name}-{name}", **changes)
    return found


# Not the base case has limits of steps: transformers does not apply them where it computes one position at a time.
_GRANITE = cases_of(
    decoder(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        num_hidden_layers=3,
        hidden_size=48,
        shared_intermediate_size=44,
        num_local_experts=0,
        layer_types=["mamba", "attention", "mamba"],
        position_embedding_type="rope",
        mamba_n_heads=6,
        mamba_n_groups=2,
        mamba_d_state=16,
        mamba_d_head=16,
        mamba_d_conv=3,
        mamba_expand=2,
        mamba_conv_bias=True,
        mamba_proj_bias=False,
        embedding_multiplier=6.0,
        logits_scaling=3.0,
        residual_multiplier=0.22,
        attention_multiplier=0.15,
        attention_bias=True,
    ),
    position_embedding_type={"position_embedding_type": "nope"},
    attention_bias={"attention_bias": False},
    embedding_multiplier={"embedding_multiplier": 1.0},
    rope_theta={"rope_theta": 10000.0},
    rms_norm_eps={"rms_norm_eps": 1.0},
    tied={"tie_word_embeddings": True},
    layer_types={"layer_types": [FULL, LINEAR, LINEAR]},
    mamba_n_heads={"mamba_n_heads": 3, "mamba_n_groups": 1, "mamba_d_head": "auto"},
    mamba_n_groups={"mamba_n_groups": 3},
    mamba_d_state={"mamba_d_state": 32},
    mamba_d_conv={"mamba_d_conv": 4},
    mamba_expand={"mamba_expand": 1, "mamba_n_heads": 3, "mamba_n_groups": 3},
    mamba_conv_bias={"mamba_conv_bias": False},
    mamba_proj_bias={"mamba_proj_bias": True},
    time_step_limit={"time_step_limit": [0.4, 1.0]},
    dense={
        "num_hidden_layers": 2,
        "hidden_size": 40,
        "layer_types": ["attention"] * 2,
        "mamba_n_heads": 8,
        **dict.fromkeys(("mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand")),
        **dict.fromkeys(("mamba_conv_bias", "mamba_proj_bias")),
    },
    experts={"num_local_experts": 5, "num_experts_per_tok": 2},
)

# The steps of the base case stay above their limit, for the same reason as Granite's.
_NEMOTRON = cases_of(
    decoder(
        "nemotron_h",
        "NemotronHForCausalLM",
        num_hidden_layers=None,
        hidden_act=None,
        rms_norm_eps=None,
        rope_theta=None,
        hybrid_override_pattern="M-*EM",
        head_dim=12,
        layer_norm_epsilon=0.05,
        mlp_hidden_act="relu2",
        mlp_bias=True,
        use_bias=True,
        use_conv_bias=True,
        mamba_num_heads=6,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=16,
        conv_kernel=3,
        time_step_min=1e-6,
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        moe_shared_expert_intermediate_size=28,
        routed_scaling_factor=2.5,
        n_group=2,
        topk_group=1,
        norm_topk_prob=True,
    ),
    hybrid_override_pattern={"hybrid_override_pattern": "-ME*M"},
    layers_block_type={"layers_block_type": ["moe", "full_attention", "mamba", "mlp"], "hybrid_override_pattern": None},
    num_key_value_heads={"num_key_value_heads": 4},
    head_dim={"head_dim": 16},
    intermediate_size={"intermediate_size": 36},
    layer_norm_epsilon={"layer_norm_epsilon": 1e-5},
    mlp_hidden_act={"mlp_hidden_act": "silu"},
    mlp_bias={"mlp_bias": False},
    use_bias={"use_bias": False},
    use_conv_bias={"use_conv_bias": False},
    mamba_num_heads={"mamba_num_heads": 4},
    mamba_head_dim={"mamba_head_dim": 32},
    n_groups={"n_groups": 3},
    ssm_state_size={"ssm_state_size": 32},
    conv_kernel={"conv_kernel": 4},
    time_step_min={"time_step_min": 1.0},
    n_routed_experts={"n_routed_experts": 8},
    num_experts_per_tok={"num_experts_per_tok": 3},
    moe_intermediate_size={"moe_intermediate_size": 24},
    moe_shared_expert_intermediate_size={"moe_shared_expert_intermediate_size": 20},
    routed_scaling_factor={"routed_scaling_factor": 1.0},
    n_group={"n_group": 1},
    topk_group={"topk_group": 2},
    norm_topk_prob={"norm_topk_prob": False},
    experts={"hybrid_override_pattern": "ME*EM", "use_bias": False, "mlp_bias": False},
    dense={
        "hybrid_override_pattern": "M-M*-",
        "use_bias": False,
        "mlp_bias": False,
        **dict.fromkeys(("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group")),
        **dict.fromkeys(("moe_shared_expert_intermediate_size", "routed_scaling_factor", "norm_topk_prob")),
    },
)

MAMBA_CASES: dict[str, Case] = {
    **_NEMOTRON,
    **_GRANITE,
    **_variants(
        _GRANITE["granitemoehybrid-experts"],
        num_experts_per_tok={"num_experts_per_tok": 3},
        shared_intermediate_size={"shared_intermediate_size": 20},
        residual_multiplier={"residual_multiplier": 1.0},
        dense={"layer_types": ["attention"] * 3},
    ),
}
