"""GGUF architectures: one table row each, and llama.cpp's tensor names. Reader, writer and benchmarks share them.

`architecture` describes the columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from llamac.export.gguf import gemma4
from llamac.export.gguf.architecture import EXPERTS as _EXPERTS
from llamac.export.gguf.architecture import REQUIRED as REQUIRED
from llamac.export.gguf.architecture import Architecture as Architecture
from llamac.export.gguf.families_read import GRANITE_SCALES, READ_ONLY, SECTIONS
from llamac.export.gguf.families_routed import ROUTED, SIGMOID_KEYS

# The tensor with ffn_gate and ffn_up of all experts of a layer.
GATE_UP_EXPERTS = "ffn_gate_up_exps"
# Keys of every architecture.
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
ORIGINAL_CONTEXT = "rope.scaling.original_context_length"
ROPE_KEYS: dict[str, object] = {
    "rope.dimension_count": None,
    "rope.freq_base": 10000.0,
    "rope.scale_linear": None,  # in early files
    "rope.scaling.type": None,
    "rope.scaling.factor": None,
    "rope.scaling.attn_factor": 1.0,
    ORIGINAL_CONTEXT: None,
    "rope.scaling.yarn_ext_factor": None,
    "rope.scaling.yarn_attn_factor": None,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}
# Keys of some architectures: YaRN's second factor; Granite's switch for RoPE, which others ignore.
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
IS_ROTATED = "rope.scaling.finetuned"
QUERY_BETA = "attention.temperature_scale"
QUERY_CONTEXT = "attention.temperature_length"
# Of models with images: features of images for layers, which a token of text does not have.
_IMAGES: dict[str, object] = {SECTIONS: None, "n_deepstack_layers": None}
# The fields of a layer with a state, by key. The width of all heads of v together has a key; that of one head has none.
STATE_FIELDS = {
    "ssm.conv_kernel": "conv_width",
    "ssm.state_size": "state_key_dim",
    "ssm.group_count": "state_key_heads",
    "ssm.time_step_rank": "state_heads",
}
# Granite 4 without such layers has these keys, too; they do not affect its graph.
STATE_KEYS = (*STATE_FIELDS, "ssm.inner_size")
# Keys that do not affect the graph.
HARMLESS_KEYS = frozenset(
    ["vocab_size", "tensor_data_layout", IS_ROTATED, "pooling_type", "embedding_length_out", "classifier.output_labels"]
)
# Keys that do not affect the graph with one of these values. Other values are not supported.
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
_DELTA_NET = Architecture(
    "qwen3_next",
    qk_norm="head",
    expert_weights=1,
    shared_expert=True,
    delta_net=True,
    mtp=True,
    keys={
        **_EXPERTS,
        **dict.fromkeys(STATE_KEYS, REQUIRED),
        "expert_shared_feed_forward_length": None,
        "full_attention_interval": 4,
        "attention.recurrent_layers": None,
        "nextn_predict_layers": 0,
    },
    names={"ffn_norm": "post_attention_norm", "delta_beta": "ssm_ba", "delta_a": "ssm_ba"},
)
_LATENT: dict[str, object] = {
    "attention.q_lora_rank": None,
    "attention.kv_lora_rank": REQUIRED,
    "attention.key_length_mla": None,
    "attention.value_length_mla": None,
    "rope.dimension_count": REQUIRED,
}
_DEEPSEEK = Architecture(
    "deepseek_v2",
    latent="neighbors",
    others=("deepseek_v3", "kimi_k2", "kimi_k25", "glm4_moe_lite", "sarvam_mla"),
    plain_shared=True,
    weights_eps=1e-20,
    mtp=True,
    keys={**_LATENT, **SIGMOID_KEYS, LOG_MULTIPLIER: 0.0, QUERY_BETA: 0.0, QUERY_CONTEXT: None},
    biases="none",
    needs_shared=True,
)
_BITNET = Architecture("bitnet", ternary=True, read_only=True)
_LFM2 = Architecture(
    "lfm2",
    others=("lfm2_vl",),
    qk_norm="head",
    short_conv=True,
    keys={"shortconv.l_cache": REQUIRED},
    names={"output_norm": "token_embd_norm"},
)
# Its attention has no RoPE. The converter nevertheless writes keys of RoPE, and permutes the rows of q and k.
_NEMOTRON_H = Architecture(
    "nemotron_h",
    position="none",
    ffn="plain",
    activation="relu2",
    paired=True,
    mamba2=True,
    single_part=True,
    keys={
        **dict.fromkeys(STATE_KEYS, REQUIRED),
        **dict.fromkeys(("rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor")),
    },
    names={"ffn_norm": "attn_norm"},
)
_LLAMA = Architecture(
    "llama",
    others=(
        *("mistral", "mixtral", "idefics3", "smolvlm", "iquestcoder", "internlm2", "internlm3"),
        *("mistral3", "llava", "llava_next"),
    ),
    paired=True,
    expert_weights=1,
    keys={**_WINDOW, **_EXPERTS},
    biases="any",
    rope_tensors=("freqs", "long", "short"),
    ignores_window=True,
)
_QWEN3_MOE = Architecture(
    "qwen3_moe", others=("qwen3_vl_moe",), qk_norm="head", expert_weights=1, shared_width=True, keys=_EXPERTS
)
_GPT2 = Architecture(
    "gpt2",
    norm="layer",
    position="learned",
    ffn="plain",
    activation="gelu_tanh",
    fused=("attn_qkv",),
    biases="all",
    square=True,
)
_GEMMA = Architecture("gemma", activation="gelu_tanh", scaled_embedding=True, output="never")

ARCHITECTURES = {
    "llama": _LLAMA,
    "mistral3": replace(
        _LLAMA,
        family="ministral3",
        others=(),
        keys={**_LLAMA.keys, LOG_MULTIPLIER: 0.0, QUERY_BETA: 0.0},
    ),
    "arcee": Architecture("arcee", ffn="plain", activation="relu2", paired=True, rope_tensors=("freqs",)),
    "bitnet": _BITNET,
    "bitnet-b1.58": replace(_BITNET, activation="relu2"),
    "gpt2": _GPT2,
    "starcoder": replace(_GPT2, family="gpt_bigcode"),
    "qwen2": Architecture("qwen2", others=("qwen2_vl", "qwen2_5_vl", "internvl", "llava_onevision", "ovis2", "mimo")),
    # the second tensor has the rows of "yes" and "no" of a reranker's output matrix
    "qwen3": Architecture("qwen3", others=("qwen3_vl",), qk_norm="head", ignored=("cls.output.weight",)),
    "qwen2moe": Architecture(
        "qwen2_moe",
        shared_width=True,
        shared_expert=True,
        keys={**_EXPERTS, "expert_shared_feed_forward_length": None},
    ),
    "qwen3moe": _QWEN3_MOE,
    "qwen2vl": Architecture("qwen2_vl", others=("qwen2_5_vl",), keys=_IMAGES),
    "qwen3vl": Architecture("qwen3_vl", qk_norm="head", keys=_IMAGES),
    "qwen3vlmoe": replace(_QWEN3_MOE, family="qwen3_vl_moe", others=(), keys={**_EXPERTS, **_IMAGES}),
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
    "gemma4": replace(
        _GEMMA,
        family="gemma4_text",
        others=("gemma4", "gemma4_unified_text", "gemma4_unified"),
        placement="sandwich",
        qk_norm="head",
        window_every=6,
        two_ropes=True,
        attention_scale=1.0,
        expert_weights=1,
        varied=True,
        keys={**_WINDOW, **_EXPERTS, **gemma4.KEYS},
        names={f"shared_ffn_{part}": f"ffn_{part}" for part in ("gate", "up", "down")},
        fused=(GATE_UP_EXPERTS,),
        biases="none",
        output="may",
        rope_tensors=("freqs",),
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
    "olmo2": Architecture(
        "olmo2",
        others=("olmo3",),
        placement="post",
        qk_norm="whole",
        window_every=4,
        two_ropes=True,
        keys={**_WINDOW, "rope.freq_base_swa": None},
        output="must",
        square=True,
    ),
    "olmoe": Architecture("olmoe", qk_norm="whole", keys=_EXPERTS, output="must", square=True, all_heads=True),
    # the tensors say whether q and k have norms and whether the residual is parallel
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
        others=("granitemoehybrid", "minicpm"),
        paired=True,
        keys={**GRANITE_SCALES, IS_ROTATED: True, **dict.fromkeys(STATE_KEYS)},
        biases="any",
        rope_tensors=("freqs", "long", "short"),
    ),
    "granitemoe": Architecture(
        "granitemoe",
        paired=True,
        expert_weights=1,
        keys={**GRANITE_SCALES, **_EXPERTS},
        biases="any",
        rope_tensors=("freqs", "long", "short"),
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        paired=True,
        expert_weights=1,
        mamba2=True,
        shared_by_tensors=True,
        keys={
            **GRANITE_SCALES,
            **_EXPERTS,
            **dict.fromkeys(STATE_KEYS, REQUIRED),
            IS_ROTATED: True,
            "expert_shared_feed_forward_length": None,
        },
        rope_tensors=("freqs", "long", "short"),
    ),
    "mamba2": Architecture(
        "mamba2",
        position="none",
        mamba2=True,
        only_mamba2=True,
        single_part=True,
        keys=dict.fromkeys(STATE_KEYS, REQUIRED),
    ),
    # llama.cpp's converter writes the norm without a suffix
    "falcon-h1": Architecture(
        "falcon_h1",
        beside=True,
        keys=dict.fromkeys(STATE_KEYS, REQUIRED),
        names={"ffn_norm.weight": "ffn_norm"},
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": replace(
        _NEMOTRON_H,
        router="sigmoid",
        weights_eps=1e-20,
        shared_by_tensors=True,
        keys={**_NEMOTRON_H.keys, **SIGMOID_KEYS, "expert_shared_feed_forward_length": None},
    ),
    "jais2": Architecture("jais2", norm="layer", ffn="plain", activation="relu2", biases="all", output="must"),
    "smollm3": Architecture("smollm3", paired=True, nope_every=4),
    "gpt-oss": Architecture(
        "gpt_oss",
        activation="quick_gelu",
        window_every=2,
        activation_limit=7.0,
        up_offset=1.0,
        expert_weights=1,
        keys={**_WINDOW, **_EXPERTS},
        names={"ffn_norm": "post_attention_norm"},
        biases="all",
        output="must",
    ),
    "seed_oss": Architecture("seed_oss", names={"ffn_norm": "post_attention_norm"}),
    "starcoder2": Architecture(
        "starcoder2",
        norm="layer",
        ffn="plain",
        activation="gelu_tanh",
        keys=_WINDOW,
        biases="all",
        square=True,
        ignores_window=True,
    ),
    "exaone4": Architecture(
        "exaone4",
        others=("exaone4_5",),
        placement="post",
        qk_norm="head",
        window_every=4,
        rotates="windowed_if_any",
        mtp=True,
        mtp_like=0,
        keys={**_WINDOW, "nextn_predict_layers": 0},
        rope_tensors=("freqs",),
        square=True,
        window_depth=64,
        writes_mtp=False,
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", qk_norm="head", qk_norm_after_rope=True),
    "ernie4_5": Architecture("ernie4_5", paired=True),
    "chatglm": Architecture("glm", paired=True, fused=("ffn_up",), square=True),
    "glm4": Architecture("glm4", others=("glm4v", "glm46v"), placement="sandwich", paired=True, fused=("ffn_up",)),
    "cohere2": Architecture(
        "cohere2",
        others=("cohere2_vision", "aya_vision"),
        norm="layer",
        placement="parallel",
        paired=True,
        window_every=4,
        rotates="windowed",
        zero_norm_biases=True,
        multiplies_logits=True,
        keys={**_WINDOW, "logit_scale": 0.0},
        output="never",
        square=True,
    ),
    "qwen3next": _DELTA_NET,
    "qwen35": replace(
        _DELTA_NET,
        family="qwen3_5_text",
        others=("qwen3_5",),
        shared_expert=False,
        tiled=True,
        names={"ffn_norm": "post_attention_norm"},
        keys={
            **{key: value for key, value in _DELTA_NET.keys.items() if "expert" not in key},
            SECTIONS: None,
        },
    ),
    "qwen35moe": replace(
        _DELTA_NET,
        family="qwen3_5_moe_text",
        others=("qwen3_5_moe",),
        tiled=True,
        names={"ffn_norm": "post_attention_norm"},
        keys={**_DELTA_NET.keys, SECTIONS: None},
    ),
    "minicpm3": Architecture(
        "minicpm3",
        latent="halves",
        embedding_scale=12.0,
        branch_scale=1.4,
        logit_dim=256,
        keys=_LATENT,
        biases="none",
        rope_tensors=("long", "short"),
    ),
    "deepseek2": _DEEPSEEK,
    "mistral4": replace(
        _DEEPSEEK,
        family="mistral4",
        others=(),
        mtp=False,
    ),
    **ROUTED,
    **READ_ONLY,
    "lfm2": _LFM2,
    "lfm3": replace(
        _LFM2,
        family="lfm3",
        others=("lfm3_vl",),
        placement="sandwich",
        two_ropes=True,
        needs_factors=True,
        keys={
            **_LFM2.keys,
            **dict.fromkeys((*_WINDOW, "rope.freq_base_swa"), REQUIRED),
        },
        names={},
    ),
    "lfm2moe": replace(
        _LFM2,
        family="lfm2_moe",
        others=(),
        router="sigmoid",
        weights_eps=1e-6,
        expert_weights=1,
        keys={**_LFM2.keys, **_EXPERTS, "leading_dense_block_count": 0, "expert_gating_func": REQUIRED},
    ),
    "phi2": Architecture(
        "phi",
        norm="layer",
        ffn="plain",
        activation="gelu_tanh",
        placement="parallel",
        biases="all",
        output="must",
        square=True,
    ),
}

# Those that the writer can write. The language model of a model with images has the architecture of models without.
WRITTEN = {name: row for name, row in ARCHITECTURES.items() if row.is_written and not _IMAGES.keys() <= row.keys.keys()}

# llama.cpp's names of our modules where they differ. It writes "blk.N." for "layers.N.".
_NAMES = {
    "token_embedding": "token_embd",
    "position_embedding": "position_embd",
    "attn_out": "attn_output",
    "attn_post_norm": "post_attention_norm",
    "ffn_post_norm": "post_ffw_norm",
    "ffn_router": "ffn_gate_inp",
    "shared_gate": "ffn_gate_inp_shexp",
    "shared_ffn_gate": "ffn_gate_shexp",
    "shared_ffn_up": "ffn_up_shexp",
    "shared_ffn_down": "ffn_down_shexp",
    "ffn_router_choice": "exp_probs_b",
    "conv_in": "shortconv.in_proj",
    "conv_taps": "shortconv.conv",
    "conv_out": "shortconv.out_proj",
    "delta_qkv": "attn_qkv",
    "delta_z": "attn_gate",
    "delta_beta": "ssm_beta",
    "delta_a": "ssm_alpha",
    "delta_conv": "ssm_conv1d",
    "delta_dt": "ssm_dt",
    "delta_norm": "ssm_norm",
    "delta_out": "ssm_out",
    "mamba_z": "ssm_in",
    "mamba_xbc": "ssm_in",
    "mamba_dt": "ssm_in",
    "mamba_conv": "ssm_conv1d",
    "mamba_step": "ssm_dt",
    "mamba_norm": "ssm_norm",
    "mamba_out": "ssm_out",
    "layer_embedding": "per_layer_token_embd",
    "layer_embedding_in": "per_layer_model_proj",
    "layer_embedding_norm": "per_layer_proj_norm",
    "layer_embedding_gate": "inp_gate",
    "layer_embedding_out": "proj",
    "layer_embedding_post_norm": "post_norm",
    "shared_ffn_post_norm": "post_ffw_norm_1",
    "experts_norm": "pre_ffw_norm_2",
    "experts_post_norm": "post_ffw_norm_2",
}
# Names of weights in a layer that do not end in ".weight".
_WHOLE_NAMES = {
    "delta_decay": "ssm_a",
    "mamba_decay": "ssm_a",
    "mamba_skip": "ssm_d",
    "ffn_router_norm": "ffn_gate_inp.scale",
    "expert_factors": "ffn_down_exps.scale",
}
# Tensors with scaling factors of RoPE frequencies.
ROPE_FACTORS = {"freqs": "rope_freqs.weight", "long": "rope_factors_long.weight", "short": "rope_factors_short.weight"}
# Modules that can share one tensor, concatenated along the output dimension. The second name is also a module's own.
FUSED = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_up": ("ffn_gate", "ffn_up")}


def key_name(architecture: str, key: str) -> str:
    """The full name of an architecture's key. The keys of xIELU have no prefix."""
    return key if key.startswith("xielu.") else f"{architecture}.{key}"


def gguf_name(name: str, row: Architecture | None = None) -> str:
    """llama.cpp's name of one of our tensors. All experts of a layer are stacked in one tensor."""
    names = _NAMES if row is None else {**_NAMES, **row.names}
    *prefix, module, kind = name.split(".")
    if not prefix:
        return f"{names.get(module, module)}.{kind}"
    whole = _WHOLE_NAMES.get(module) or names.get(f"{module}.{kind}")
    if whole:
        return f"blk.{prefix[1]}.{whole}"
    if len(prefix) == 4:  # layers.N.experts.M
        return f"blk.{prefix[1]}.{module}_exps.{kind}"
    return f"blk.{prefix[1]}.{names.get(module, module)}.{kind}"


def fused_name(name: str, wholes: Iterable[str] = FUSED) -> tuple[str, int] | None:
    """llama.cpp's name of the fused tensor, among `wholes`, that contains one of our tensors, and its index there."""
    *prefix, module, kind = name.split(".")
    for whole in wholes:
        if len(prefix) == 2 and module in FUSED.get(whole, ()):
            return f"blk.{prefix[1]}.{whole}.{kind}", FUSED[whole].index(module)
    return None


def fused_expert_name(name: str) -> tuple[str, int] | None:
    """llama.cpp's name of the tensor with both matrices of all experts that one is a part of, and its index there."""
    *prefix, module, kind = name.split(".")
    if len(prefix) != 4 or module not in FUSED["ffn_up"]:
        return None
    return f"blk.{prefix[1]}.{GATE_UP_EXPERTS}.{kind}", FUSED["ffn_up"].index(module)


def expert_name(name: str) -> str:
    """llama.cpp's old name of a single expert's tensor; empty for other tensors."""
    *prefix, module, kind = name.split(".")
    return f"blk.{prefix[1]}.{module}.{prefix[3]}.{kind}" if len(prefix) == 4 else ""
