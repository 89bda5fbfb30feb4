"""Rows of the table of families: decoders that combine the parts of other families, or have them under other names."""

from __future__ import annotations

from dataclasses import replace

from llamac.export.hf.families_experts import QWEN3_MOE
from llamac.export.hf.families_gated import GEMMA2, GRANITE, LLAMA, QWEN2
from llamac.export.hf.families_latent import DEEPSEEK_V3
from llamac.export.hf.families_routed import GLM4_MOE, GRANITE_MOE_SHARED
from llamac.export.hf.family import Module
from llamac.export.hf.family_parts import COMMON, L, attention, experts, mlp, norm, pre, qk_norms, without

IQUEST_CODER = replace(
    LLAMA,
    model_type="iquestcoder",
    architectures=("LlamaForCausalLM", "IQuestCoderForCausalLM"),  # the second: published with its own code
    keys={
        **LLAMA.keys,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
    },
    fixed={"clip_qkv": None, "use_sliding_window": False},
    harmless=("sliding_window", "max_window_layers"),
    quantized=(),
)

# In its own code, one key is for the biases of q, k and v, and another for all others.
INTERNLM3 = replace(
    IQUEST_CODER,
    model_type="internlm3",
    architectures=("LlamaForCausalLM", "InternLM3ForCausalLM"),
    modules=pre(attention("attention_bias", out_bias="mlp_bias"), mlp("mlp_bias")),
    keys={**IQUEST_CODER.keys, "num_key_value_heads": 2, "max_position_embeddings": 32768},
    fixed={},
    harmless=(),
    old_keys={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
)

# Not in transformers. Its tensors have the names of its own code; q, k and v are in one.
INTERNLM2 = replace(
    IQUEST_CODER,
    model_type="internlm2",
    architectures=("InternLM2ForCausalLM",),
    bare="InternLM2Model",
    modules=(
        Module("tok_embeddings", ("token_embedding",)),
        norm("attention_norm", "attn_norm"),
        Module(f"{L}attention.wqkv", tuple(f"{L}attn_{x}" for x in "qkv"), interleaved="groups", bias="bias"),
        Module(f"{L}attention.wo", (f"{L}attn_out",), bias="bias"),
        norm("ffn_norm", "ffn_norm"),
        *(
            Module(f"{L}feed_forward.{name}", (f"{L}ffn_{part}",))
            for name, part in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
        ),
        Module("norm", ("output_norm",)),
    ),
    keys={**without(COMMON, "head_dim"), "bias": True},
    fixed={},
    harmless=(),
    sizes_of_head=True,
    renamed=((r"^output\.", "lm_head."),),
    head="output",
)

# Not in transformers: LLaMA with scales of the embedding, the branches and the logits.
MINICPM = replace(
    IQUEST_CODER,
    model_type="minicpm",
    architectures=("MiniCPMForCausalLM",),
    bare="MiniCPMModel",
    modules=pre(attention("attention_bias"), mlp()),
    keys={
        **without(COMMON, "head_dim"),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "scale_emb": 1,
        "scale_depth": 1,
        "dim_model_base": 1,
    },
    fixed={"num_experts": 0},
    harmless=(),
    sizes_of_head=True,
)

# Not in transformers: Qwen 2 with an MTP layer, which is not read.
MIMO = replace(
    QWEN2,
    model_type="mimo",
    architectures=("MiMoForCausalLM",),
    bare="MiMoModel",
    fixed={"attention_bias": True},
    harmless=(*QWEN2.harmless, "num_nextn_predict_layers"),
    ignored=(*QWEN2.ignored, r"mtp_layers\..*"),
)

# Published with names like GPT-2's.
EXAONE3 = replace(
    IQUEST_CODER,
    model_type="exaone",
    architectures=("LlamaForCausalLM", "ExaoneForCausalLM"),
    keys={**IQUEST_CODER.keys, "head_dim": None, "max_position_embeddings": 4096, "rope_theta": 500000.0},
    fixed={},
    harmless=("embed_dropout",),
    old_keys={
        "num_layers": "num_hidden_layers",
        "layer_norm_epsilon": "rms_norm_eps",
        "activation_function": "hidden_act",
    },
    ignored=(*LLAMA.ignored, r"layers\.\d+\.attn\.attention\.rotary\.inv_freq"),
    renamed=(
        (r"^transformer\.wte\.", "model.embed_tokens."),
        (r"^transformer\.ln_f\.", "model.norm."),
        (r"^transformer\.h\.", "model.layers."),
        (r"\.attn\.attention\.out_proj\.", ".self_attn.o_proj."),
        (r"\.attn\.attention\.([qkv]_proj)\.", r".self_attn.\1."),
        (r"\.ln_1\.", ".input_layernorm."),
        (r"\.ln_2\.", ".post_attention_layernorm."),
        (r"\.mlp\.c_fc_0\.", ".mlp.gate_proj."),
        (r"\.mlp\.c_fc_1\.", ".mlp.up_proj."),
        (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
    ),
)

# Gemma 2 without norms after attention and network.
VAULT_GEMMA = replace(
    GEMMA2,
    model_type="vaultgemma",
    architectures=("VaultGemmaForCausalLM",),
    bare="VaultGemmaModel",
    modules=tuple(module for module in GEMMA2.modules if not module.parts[0].endswith("_post_norm")),
    keys=without(GEMMA2.keys, "hidden_act", "sliding_window_size"),
    fixed={},
    placement="pre",
)

# DeepSeek V3's attention without experts.
YOUTU = replace(
    DEEPSEEK_V3,
    model_type="youtu",
    architectures=("YoutuForCausalLM",),
    bare="YoutuModel",
    modules=pre(tuple(module for module in DEEPSEEK_V3.modules if ".self_attn." in module.name), mlp()),
    keys={
        **without(COMMON, "head_dim"),
        "attention_bias": False,
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    fixed={"rope_interleave": True, "mlp_bias": False},
    harmless=("embedding_initializer_range",),
    ffn="gated",
    router="softmax",
    fused=(),
    mtp=(),
    mtp_key="",
)

# Qwen 3 with experts, windows, and a RoPE table for layers with a window.
MELLUM = replace(
    QWEN3_MOE,
    model_type="mellum",
    architectures=("MellumForCausalLM",),
    bare="MellumModel",
    keys={
        **without(COMMON, "rope_theta"),
        "num_key_value_heads": 4,
        "attention_bias": False,
        "num_experts_per_tok": 8,
        "vocab_size": 98304,
        "hidden_size": 2304,
        "intermediate_size": 7168,
        "num_hidden_layers": 28,
        "num_attention_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "sliding_window": 1024,
        "layer_types": None,
        "mlp_layer_types": None,
        "num_experts": 64,
        "moe_intermediate_size": 896,
        "norm_topk_prob": True,
    },
    fixed={"use_sliding_window": True},
    harmless=(
        *("max_window_layers", "num_nextn_predict_layers", "num_mtp_layers"),
        *("mtp_layer_types", "mtp_mlp_layer_types"),
    ),
    windows="none",
    two_ropes=True,
    default_rope={
        "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    ignored=(*QWEN3_MOE.ignored, r"mtp\..*"),
)

# Granite with a sink per head, windows in three of four layers, and layers without RoPE, whose base is 0.
_SINKS = Module(f"{L}self_attn.sinks", (f"{L}attn_sinks",), parameter=True)
GRANITE_SWA = replace(
    GRANITE,
    model_type="granite_swa",
    architectures=("GraniteSWAForCausalLM",),
    bare="GraniteSWAModel",
    modules=(*GRANITE.modules, _SINKS),
    keys={
        **GRANITE.keys,
        "vocab_size": 100352,
        "hidden_size": 2560,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "sliding_window": 128,
        "layer_types": None,
        "layer_rope_theta": None,
    },
    sinks=True,
    windows="global_every",
    window_every=4,
)
GRANITE_MOE_SWA = replace(
    GRANITE_MOE_SHARED,
    model_type="granitemoe_swa",
    architectures=("GraniteMoeSWAForCausalLM",),
    bare="GraniteMoeSWAModel",
    modules=(*GRANITE_MOE_SHARED.modules, _SINKS),
    keys={**GRANITE_MOE_SHARED.keys, "sliding_window": 128, "layer_types": None, "layer_rope_theta": None},
    sinks=True,
    windows="global_every",
    window_every=4,
)

# Granite with norms after attention and network. The logits are multiplied, not divided.
HYPERCLOVA_X = replace(
    GRANITE,
    model_type="hyperclovax",
    architectures=("HyperCLOVAXForCausalLM",),
    bare="HyperCLOVAXModel",
    modules=(
        *GRANITE.modules,
        norm("post_norm1", "attn_post_norm", only="sandwich"),
        norm("post_norm2", "ffn_post_norm", only="sandwich"),
    ),
    keys={**GRANITE.keys, "attention_multiplier": None, "use_post_norm": True},
    multiplied_logits=True,
)

# Hy3 and Sarvam: DeepSeek V3's experts with grouped-query attention, under other names.
HY_V3 = replace(
    GLM4_MOE,
    model_type="hy_v3",
    architectures=("HYV3ForCausalLM",),
    bare="HYV3Model",
    modules=pre(
        (*attention("attention_bias"), *qk_norms()),
        (
            *mlp("mlp_bias", only="dense"),
            *experts("mlp.router.gate", "mlp.experts.{e}", ("gate_proj", "up_proj", "down_proj")),
            *(
                replace(module, name=f"{L}mlp.expert_bias")
                for module in GLM4_MOE.modules
                if module.only == "choice_bias"
            ),
            *(
                Module(f"{L}mlp.shared_mlp.{x}_proj", (f"{L}shared_ffn_{x}",), bias="mlp_bias", only="shared")
                for x in ("gate", "up", "down")
            ),
        ),
    ),
    keys={
        **COMMON,
        "vocab_size": 120832,
        "hidden_size": 4096,
        "intermediate_size": 13312,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 11158840.0,
        "attention_bias": False,
        "mlp_bias": False,
        "num_experts": 192,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1536,
        "router_scaling_factor": 2.826,
        "first_k_dense_replace": 1,
        "mlp_layer_types": None,
    },
    fixed=dict.fromkeys(("qk_norm", "route_norm", "moe_router_enable_expert_bias", "moe_router_use_sigmoid"), True),
    harmless=("enable_moe_fp32_combine", "num_nextn_predict_layers"),
    old_keys={"num_local_experts": "num_experts"},
    ignored=(*LLAMA.ignored, r"layers\.80\..*"),  # predict further tokens
    renamed=(
        (r"\.mlp\.gate\.weight$", ".mlp.router.gate.weight"),
        (r"\.mlp\.e_score_correction_bias$", ".mlp.expert_bias"),
        (r"\.mlp\.shared_experts\.", ".mlp.shared_mlp."),
    ),
    mtp=(),
    mtp_key="",
)
# Keys of Sarvam's own code.
_OF_SARVAM = {
    "score_function": "sigmoid",
    **dict.fromkeys(("moe_router_enable_expert_bias", "use_rmsnorm"), True),
    "use_bias": False,
}
_OF_CHOICE = (r"\.mlp\.gate\.expert_bias$", ".mlp.gate.e_score_correction_bias")
_UNUSED_BY_SARVAM = ("output_dropout", "router_dtype")
SARVAM_MOE = replace(
    GLM4_MOE,
    model_type="sarvam_moe",
    architectures=("Glm4MoeForCausalLM", "SarvamMoEForCausalLM"),  # the second: published with its own code
    keys={
        **without(GLM4_MOE.keys, "partial_rotary_factor"),
        "vocab_size": 262144,
        "intermediate_size": 8192,
        "num_hidden_layers": 19,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 8000000.0,
        "moe_intermediate_size": 1024,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
    },
    fixed={"scoring_func": "sigmoid", **_OF_SARVAM},
    harmless=("num_nextn_predict_layers", "num_mtp_layers", *_UNUSED_BY_SARVAM),
    split=tuple(
        (rf"(layers\.\d+)\.self_attn\.query_key_value\.{kind}", tuple(f"self_attn.{x}_proj.{kind}" for x in "qkv"))
        for kind in ("weight", "bias")
    ),
    split_by_heads=True,
    renamed=(
        (r"^(model\.)?word_embeddings\.", r"\1embed_tokens."),
        (r"\.attention\.", ".self_attn."),
        (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
        (r"\.self_attn\.query_layernorm\.", ".self_attn.q_norm."),
        (r"\.self_attn\.key_layernorm\.", ".self_attn.k_norm."),
        _OF_CHOICE,
    ),
    old_keys={
        "num_local_experts": "n_routed_experts",
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "use_qkv_bias": "attention_bias",
    },
    mtp=(),
    mtp_key="",
)
SARVAM_MLA = replace(
    DEEPSEEK_V3,
    model_type="sarvam_mla",
    architectures=("DeepseekV3ForCausalLM", "SarvamMLAForCausalLM"),  # the second: published with its own code
    keys={
        **DEEPSEEK_V3.keys,
        "vocab_size": 262144,
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "num_hidden_layers": 32,
        "num_attention_heads": 64,
        "num_key_value_heads": None,
        "q_lora_rank": None,
        "n_routed_experts": 128,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    fixed={**DEEPSEEK_V3.fixed, **_OF_SARVAM},
    harmless=(*DEEPSEEK_V3.harmless, *_UNUSED_BY_SARVAM, "q_head_dim"),
    old_keys={"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"}
    | {"num_shared_experts": "n_shared_experts"},
    rope_names={"deepseek_yarn": "yarn"},
    renamed=(_OF_CHOICE,),
    mtp=(),
    mtp_key="",
)
