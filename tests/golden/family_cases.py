"""The parity cases of all other families: tiny configs with each family's real keys, and for every key that affects
logits a config that differs in it.

As in cases.py, base values are unusual on purpose. Windows and original contexts are shorter than the prompts.
"""

from __future__ import annotations

from golden.case_table import FULL, SLIDING, cases_of, variant_of
from golden.case_table import decoder as _decoder
from golden.cases import LINEAR, LLAMA3, LONGROPE, YARN, Case
from golden.classic_cases import CLASSIC_CASES
from golden.delta_net_cases import DELTA_NET_CASES
from golden.further_cases import FURTHER_CASES
from golden.gemma4_cases import GEMMA4_CASES
from golden.image_cases import IMAGE_CASES
from golden.latent_cases import LATENT_CASES
from golden.mamba_cases import MAMBA_CASES
from golden.recurrent_cases import RECURRENT_CASES
from golden.routed_cases import ROUTED_CASES
from golden.tiny_checkpoints import Config, changed

_cases: dict[str, Case] = {}


def _family(start: Config, **variants: Config) -> None:
    _cases.update(cases_of(start, **variants))


def _variant(name: str, base: str, **changes: object) -> None:
    _cases.update(variant_of(_cases[base], name, **changes))


_family(
    _decoder("arcee", "ArceeForCausalLM", hidden_act="relu2", attention_bias=True, mlp_bias=True),
    attention_bias={"attention_bias": False},
    mlp_bias={"mlp_bias": False},
    hidden_act={"hidden_act": "silu"},
    rms_norm_eps={"rms_norm_eps": 1e-5},
    yarn={"rope_scaling": YARN},
)
_family(
    _decoder("mistral", "MistralForCausalLM", head_dim=14, sliding_window=7),
    sliding_window={"sliding_window": 12},
    no_window={"sliding_window": 4096},
    rope_theta={"rope_theta": 10000.0},
    rms_norm_eps={"rms_norm_eps": 1e-5},
    hidden_act={"hidden_act": "gelu"},
    tied={"tie_word_embeddings": True},
    yarn={"rope_scaling": {**YARN, "truncate": True}},
)
_variant("mistral-head_dim", "mistral", head_dim=None)
_variant("mistral-mha", "mistral", num_key_value_heads=4)

_family(
    _decoder("ministral", "MinistralForCausalLM", head_dim=14, sliding_window=7, layer_types=[SLIDING, FULL]),
    sliding_window={"sliding_window": 12},
    layer_types={"layer_types": [FULL, SLIDING]},
    no_layer_types={"layer_types": None},
    head_dim={"head_dim": 10},
    rope_theta={"rope_theta": 10000.0},
    rms_norm_eps={"rms_norm_eps": 1e-5},
)

_qwen_window: Config = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
_family(
    _decoder("qwen2", "Qwen2ForCausalLM", num_hidden_layers=3, **_qwen_window),
    use_sliding_window={"use_sliding_window": False},
    sliding_window={"sliding_window": 12},
    max_window_layers={"max_window_layers": 2},
    layer_types={"layer_types": [SLIDING, FULL, FULL]},
    rope_theta={"rope_theta": 10000.0},
    rms_norm_eps={"rms_norm_eps": 1e-5},
    tied={"tie_word_embeddings": True},
    yarn={"rope_scaling": YARN},
)
_family(
    _decoder("qwen3", "Qwen3ForCausalLM", num_hidden_layers=3, head_dim=14, attention_bias=True, **_qwen_window),
    use_sliding_window={"use_sliding_window": False},
    max_window_layers={"max_window_layers": 2},
    layer_types={"layer_types": [SLIDING, FULL, FULL]},
    attention_bias={"attention_bias": False},
    head_dim={"head_dim": 10},
    rope_theta={"rope_theta": 10000.0},
    rms_norm_eps={"rms_norm_eps": 1e-5},
    tied={"tie_word_embeddings": True},
    yarn={"rope_scaling": YARN},
)
_family(
    _decoder(
        "smollm3",
        "SmolLM3ForCausalLM",
        num_hidden_layers=4,
        no_rope_layer_interval=2,
        attention_bias=True,
        mlp_bias=True,
        use_sliding_window=False,
    ),
    interval={"no_rope_layer_interval": 3},
    no_rope_layers={"no_rope_layers": [0, 1, 1, 0]},
    window={"use_sliding_window": True, "sliding_window": 7},
    attention_bias={"attention_bias": False},
    mlp_bias={"mlp_bias": False},
    rope_theta={"rope_theta": 10000.0},
    llama3={"rope_scaling": LLAMA3},
)
_variant("smollm3-sliding_window", "smollm3-window", sliding_window=12)
_variant("smollm3-layer_types", "smollm3-window", layer_types=[SLIDING, SLIDING, FULL, FULL])

_family(
    _decoder(
        "gemma",
        "GemmaForCausalLM",
        hidden_size=64,
        head_dim=10,
        hidden_act="gelu",
        rms_norm_eps=0.9,  # large because embeddings are scaled up
        tie_word_embeddings=None,
        attention_bias=True,
    ),
    hidden_act={"hidden_act": "relu"},
    head_dim={"head_dim": 8},
    rms_norm_eps={"rms_norm_eps": 1e-5},
    rope_theta={"rope_theta": 10000.0},
    attention_bias={"attention_bias": False},
    untied={"tie_word_embeddings": False},
)
_gemma2 = _decoder(
    "gemma2",
    "Gemma2ForCausalLM",
    hidden_size=64,
    head_dim=10,
    rms_norm_eps=0.9,
    num_hidden_layers=3,
    hidden_act="gelu_pytorch_tanh",
    hidden_activation="gelu_pytorch_tanh",
    tie_word_embeddings=None,
    query_pre_attn_scalar=30,
    sliding_window=7,
    final_logit_softcapping=20.0,
    attn_logit_softcapping=3.0,
    cache_implementation="hybrid",
)
_family(
    _gemma2,
    query_pre_attn_scalar={"query_pre_attn_scalar": 10},
    sliding_window={"sliding_window": 12},
    final_logit_softcapping={"final_logit_softcapping": 40.0},
    attn_logit_softcapping={"attn_logit_softcapping": 1.0},
    hidden_activation={"hidden_activation": "relu", "hidden_act": None},
    layer_types={"layer_types": [FULL, SLIDING, SLIDING]},
    rms_norm_eps={"rms_norm_eps": 1e-5},
    rope_theta={"rope_theta": 10000.0},
)
_family(
    changed(
        _gemma2,
        model_type="gemma3_text",
        architectures=["Gemma3ForCausalLM"],
        num_hidden_layers=4,
        hidden_act=None,
        final_logit_softcapping=None,
        attn_logit_softcapping=None,
        rope_theta=5000.0,
        rope_local_base_freq=100.0,
        sliding_window_pattern=2,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    query_pre_attn_scalar={"query_pre_attn_scalar": 10},
    sliding_window={"sliding_window": 12},
    sliding_window_pattern={"sliding_window_pattern": 3},
    layer_types={"layer_types": [FULL, SLIDING, SLIDING, FULL]},
    rope_theta={"rope_theta": 100.0},
    rms_norm_eps={"rms_norm_eps": 1e-5},
    rope_local_base_freq={"rope_local_base_freq": 5000.0},
    rope_scaling={"rope_scaling": None},
    final_logit_softcapping={"final_logit_softcapping": 20.0},
    all_sliding={"layer_types": [SLIDING] * 4},
    all_full={"layer_types": [FULL] * 4},
)
_variant(
    "gemma3_text-rope_parameters",
    "gemma3_text-rope_theta",
    rope_theta=None,
    rope_local_base_freq=None,
    rope_scaling=None,
    rope_parameters={
        FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
        SLIDING: {"rope_type": "default", "rope_theta": 100.0},
    },
)

_long = {"type": "longrope", "short_factor": [1.0, 1.25, 1.5], "long_factor": [1.5, 3.0, 5.0]}
_family(
    _decoder(
        "phi3",
        "Phi3ForCausalLM",
        partial_rotary_factor=0.6,
        original_max_position_embeddings=16,
        rope_scaling=_long,
        sliding_window=7,
        attention_bias=False,
    ),
    sliding_window={"sliding_window": 12},
    partial_rotary_factor={
        "partial_rotary_factor": None,
        "rope_scaling": {"type": "longrope", **{key: LONGROPE[key] for key in ("short_factor", "long_factor")}},
    },
    long_factor={"rope_scaling": {**_long, "long_factor": [1.5, 2.0, 9.0]}},
    original_max_position_embeddings={"original_max_position_embeddings": 4},
    rope_scaling={"rope_scaling": None},
    rms_norm_eps={"rms_norm_eps": 1e-5},
    rope_theta={"rope_theta": 10000.0},
    odd={"rope_scaling": None, "partial_rotary_factor": 0.5},
    mha={"num_key_value_heads": 4},
)
_variant("phi3-below", "phi3", original_max_position_embeddings=64)
_variant("phi3-below-short_factor", "phi3-below", rope_scaling={**_long, "short_factor": [1.0, 4.0, 9.0]})

_family(
    _decoder(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        num_key_value_heads=None,
        rms_norm_eps=None,
        rope_theta=None,
        hidden_act="gelu_new",
        layer_norm_eps=0.05,
        rotary_emb_base=500,
        rotary_pct=0.4,
        use_parallel_residual=True,
    ),
    use_parallel_residual={"use_parallel_residual": False},
    rotary_pct={"rotary_pct": 0.6},
    rotary_pct_odd={"rotary_pct": 0.5},
    rotary_pct_default={"rotary_pct": None, "hidden_size": 64, "num_attention_heads": 4},
    rotary_emb_base={"rotary_emb_base": 10000},
    attention_bias={"attention_bias": False},
    layer_norm_eps={"layer_norm_eps": 1e-5},
    hidden_act={"hidden_act": "relu"},
    tied={"tie_word_embeddings": True},
    linear={"rope_scaling": LINEAR},
)
_family(
    _decoder("olmo", "OlmoForCausalLM", rms_norm_eps=None, attention_bias=True, clip_qkv=None),
    attention_bias={"attention_bias": False},
    rope_theta={"rope_theta": 10000.0},
    hidden_act={"hidden_act": "gelu"},
    tied={"tie_word_embeddings": True},
    mha={"num_key_value_heads": 4},
    linear={"rope_scaling": LINEAR},
)
_family(
    _decoder("olmo2", "Olmo2ForCausalLM", num_hidden_layers=3, attention_bias=True),
    attention_bias={"attention_bias": False},
    rms_norm_eps={"rms_norm_eps": 1e-5},
    rope_theta={"rope_theta": 10000.0},
    mha={"num_key_value_heads": 4},
    yarn={"rope_scaling": YARN},
)
_family(
    _decoder(
        "stablelm",
        "StableLmForCausalLM",
        rms_norm_eps=None,
        layer_norm_eps=0.05,
        partial_rotary_factor=0.4,
        use_qkv_bias=True,
        qk_layernorm=True,
        use_parallel_residual=True,
    ),
    use_parallel_residual={"use_parallel_residual": False},
    use_qkv_bias={"use_qkv_bias": False},
    qk_layernorm={"qk_layernorm": False},
    partial_rotary_factor={"partial_rotary_factor": 0.6},
    layer_norm_eps={"layer_norm_eps": 1e-5},
    rope_theta={"rope_theta": 10000.0},
)
_family(
    _decoder(
        "granite",
        "GraniteForCausalLM",
        embedding_multiplier=6.0,
        logits_scaling=3.0,
        residual_multiplier=0.22,
        attention_multiplier=0.15,
        attention_bias=True,
        mlp_bias=True,
    ),
    embedding_multiplier={"embedding_multiplier": 1.0},
    logits_scaling={"logits_scaling": 1.0},
    residual_multiplier={"residual_multiplier": 0.5},
    attention_multiplier={"attention_multiplier": None},
    attention_bias={"attention_bias": False},
    mlp_bias={"mlp_bias": False},
    rope_theta={"rope_theta": 10000.0},
)

_family(
    _decoder("mixtral", "MixtralForCausalLM", head_dim=14, num_local_experts=5, num_experts_per_tok=2),
    num_local_experts={"num_local_experts": 3},
    num_experts_per_tok={"num_experts_per_tok": 3},
    sliding_window={"sliding_window": 7},
    rope_theta={"rope_theta": 10000.0},
    hidden_act={"hidden_act": "gelu"},
)
_family(
    _decoder(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        num_hidden_layers=3,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=36,
        norm_topk_prob=False,
        mlp_only_layers=[0],
        use_sliding_window=False,
        sliding_window=7,
        max_window_layers=2,
    ),
    norm_topk_prob={"norm_topk_prob": True},
    decoder_sparse_step={"decoder_sparse_step": 2},
    mlp_only_layers={"mlp_only_layers": [1]},
    num_experts_per_tok={"num_experts_per_tok": 3},
    shared_expert_intermediate_size={"shared_expert_intermediate_size": 30},
    qkv_bias={"qkv_bias": False},
    window={"use_sliding_window": True},
    layer_types={"use_sliding_window": True, "layer_types": [FULL, SLIDING, SLIDING]},
    rope_theta={"rope_theta": 10000.0},
)
_family(
    _decoder(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        num_hidden_layers=3,
        head_dim=14,
        attention_bias=True,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        mlp_only_layers=[0],
        max_window_layers=48,
    ),
    norm_topk_prob={"norm_topk_prob": False},
    decoder_sparse_step={"decoder_sparse_step": 2},
    mlp_only_layers={"mlp_only_layers": [1]},
    num_experts_per_tok={"num_experts_per_tok": 3},
    window={"use_sliding_window": True, "sliding_window": 7},
    attention_bias={"attention_bias": False},
)
_family(
    _decoder(
        "olmoe",
        "OlmoeForCausalLM",
        intermediate_size=24,
        num_experts=5,
        num_experts_per_tok=2,
        norm_topk_prob=False,
        attention_bias=True,
    ),
    norm_topk_prob={"norm_topk_prob": True},
    num_experts_per_tok={"num_experts_per_tok": 3},
    attention_bias={"attention_bias": False},
    rope_theta={"rope_theta": 10000.0},
)

_family(
    _decoder(
        "gpt_oss",
        "GptOssForCausalLM",
        head_dim=14,
        sliding_window=7,
        layer_types=[SLIDING, FULL],
        num_local_experts=5,
        num_experts_per_tok=2,
        swiglu_limit=3.0,
        attention_bias=True,
        rope_scaling={**YARN, "truncate": False},
    ),
    sliding_window={"sliding_window": 12},
    layer_types={"layer_types": [FULL, SLIDING]},
    num_experts_per_tok={"num_experts_per_tok": 3},
    swiglu_limit={"swiglu_limit": 1.5},
    attention_bias={"attention_bias": False},
    rope_theta={"rope_theta": 10000.0},
    rms_norm_eps={"rms_norm_eps": 1e-5},
    tied={"tie_word_embeddings": True},
)
_family(
    _decoder(
        "seed_oss", "SeedOssForCausalLM", head_dim=14, attention_bias=True, attention_out_bias=True, mlp_bias=True
    ),
    attention_bias={"attention_bias": False},
    attention_out_bias={"attention_out_bias": False},
    mlp_bias={"mlp_bias": False},
    head_dim={"head_dim": 10},
    rope_theta={"rope_theta": 10000.0},
    rms_norm_eps={"rms_norm_eps": 1e-5},
    tied={"tie_word_embeddings": True},
)
_family(
    _decoder(
        "starcoder2",
        "Starcoder2ForCausalLM",
        rms_norm_eps=None,
        norm_epsilon=0.05,
        use_bias=True,
        sliding_window=7,
        hidden_act="gelu_pytorch_tanh",
    ),
    norm_epsilon={"norm_epsilon": 1e-5},
    use_bias={"use_bias": False},
    sliding_window={"sliding_window": 12},
    hidden_act={"hidden_act": "relu"},
    rope_theta={"rope_theta": 10000.0},
    tied={"tie_word_embeddings": True},
)

_ministral3: Config = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
_family(
    _decoder("ministral3", "Ministral3ForCausalLM", head_dim=14, rope_theta=None, rope_parameters=_ministral3),
    llama_4_scaling_beta={"rope_parameters": {**_ministral3, "llama_4_scaling_beta": 0.1}},
    original_max_position_embeddings={"rope_parameters": {**_ministral3, "original_max_position_embeddings": 16}},
    sliding_window={"sliding_window": 7},
    head_dim={"head_dim": 10},
    rms_norm_eps={"rms_norm_eps": 1e-5},
    tied={"tie_word_embeddings": True},
)
_olmo3: Config = {FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}
_family(
    _decoder(
        "olmo3",
        "Olmo3ForCausalLM",
        num_hidden_layers=4,
        attention_bias=True,
        sliding_window=7,
        rope_theta=None,
        rope_parameters={**_olmo3, SLIDING: {"rope_type": "default", "rope_theta": 500.0}},
    ),
    attention_bias={"attention_bias": False},
    sliding_window={"sliding_window": 12},
    layer_types={"layer_types": [FULL, SLIDING, SLIDING, FULL]},
    rope_of_windows={"rope_parameters": {**_olmo3, SLIDING: {"rope_type": "default", "rope_theta": 10000.0}}},
    rope_scaling={"rope_parameters": None, "rope_theta": 500000.0, "rope_scaling": {**YARN, "truncate": True}},
    rms_norm_eps={"rms_norm_eps": 1e-5},
)
_family(
    _decoder(
        "exaone4",
        "Exaone4ForCausalLM",
        num_hidden_layers=4,
        head_dim=14,
        sliding_window=7,
        sliding_window_pattern=4,
    ),
    sliding_window={"sliding_window": 12},
    sliding_window_pattern={"sliding_window_pattern": 2},
    layer_types={"layer_types": [FULL, SLIDING, SLIDING, FULL], "sliding_window_pattern": "GLLG"},
    llama3={"rope_scaling": LLAMA3},
    head_dim={"head_dim": 10},
    rope_theta={"rope_theta": 10000.0},
    tied={"tie_word_embeddings": True},
)
_family(
    _decoder(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        head_dim=14,
        attention_bias=True,
        rope_scaling={"type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0},
    ),
    alpha={"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
    rope_scaling={"rope_scaling": None},
    attention_bias={"attention_bias": False},
    head_dim={"head_dim": 10},
    rope_theta={"rope_theta": 10000.0},
    rms_norm_eps={"rms_norm_eps": 1e-5},
    tied={"tie_word_embeddings": True},
)
_family(
    _decoder("ernie4_5", "Ernie4_5ForCausalLM", head_dim=14, use_bias=True),
    use_bias={"use_bias": False},
    head_dim={"head_dim": 10},
    rope_theta={"rope_theta": 10000.0},
    rms_norm_eps={"rms_norm_eps": 1e-5},
    tied={"tie_word_embeddings": True},
)
for _kind, _class in (("glm", "GlmForCausalLM"), ("glm4", "Glm4ForCausalLM")):
    _family(
        _decoder(_kind, _class, head_dim=20, attention_bias=True, partial_rotary_factor=0.5),
        attention_bias={"attention_bias": False},
        partial_rotary_factor={"partial_rotary_factor": 0.4},
        odd_rope={"head_dim": 14, "partial_rotary_factor": 0.5},
        head_dim={"head_dim": 12},
        rope_theta={"rope_theta": 10000.0},
        rms_norm_eps={"rms_norm_eps": 1e-5},
        tied={"tie_word_embeddings": True},
    )
_family(
    _decoder(
        "cohere2",
        "Cohere2ForCausalLM",
        num_hidden_layers=4,
        rms_norm_eps=None,
        layer_norm_eps=0.05,
        attention_bias=True,
        logit_scale=0.3,
        sliding_window=7,
        sliding_window_pattern=4,
    ),
    sliding_window={"sliding_window": 12},
    sliding_window_pattern={"sliding_window_pattern": 2},
    layer_types={"layer_types": [FULL, SLIDING, SLIDING, FULL]},
    logit_scale={"logit_scale": 1.0},
    attention_bias={"attention_bias": False},
    layer_norm_eps={"layer_norm_eps": 1e-5},
    rope_theta={"rope_theta": 10000.0},
    tied={"tie_word_embeddings": True},
)
_family(
    _decoder(
        "phi",
        "PhiForCausalLM",
        rms_norm_eps=None,
        layer_norm_eps=0.05,
        hidden_act="gelu_new",
        partial_rotary_factor=0.4,
    ),
    partial_rotary_factor={"partial_rotary_factor": 0.6},
    hidden_act={"hidden_act": "relu"},
    layer_norm_eps={"layer_norm_eps": 1e-5},
    rope_theta={"rope_theta": 10000.0},
    tied={"tie_word_embeddings": True},
)
_family(
    _decoder(
        "nanochat",
        "NanoChatForCausalLM",
        hidden_act="relu2",
        attention_bias=True,
        final_logit_softcapping=20.0,
    ),
    attention_bias={"attention_bias": False},
    final_logit_softcapping={"final_logit_softcapping": 5.0},
    hidden_act={"hidden_act": "silu"},
    rms_norm_eps={"rms_norm_eps": 1e-5},
    rope_theta={"rope_theta": 10000.0},
)

FAMILY_CASES: dict[str, Case] = (
    _cases
    | FURTHER_CASES
    | CLASSIC_CASES
    | DELTA_NET_CASES
    | LATENT_CASES
    | ROUTED_CASES
    | RECURRENT_CASES
    | MAMBA_CASES
    | GEMMA4_CASES
    | IMAGE_CASES
)
