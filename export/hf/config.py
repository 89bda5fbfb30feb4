"""Reads config.json of every family. Every key is supported, known to be harmless, or an error.

Missing values have the defaults of transformers. One error lists all problems of a file. The family's table row says
which keys it has (`families`); a key means the same in every family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from llamac.errors import ExportError, UnsupportedError
from llamac.export.checkpoint import LayerConfig, ModelConfig
from llamac.export.hf import assistant, classic_config, config_gemma4, exaone_config, quantized, ternary
from llamac.export.hf.encoder_config import (
    cross_encoder,
    decoder_row,
    encoder_row,
    left_out,
    parse_encoder,
    pooling_of,
    score_factors,
    type_count,
)
from llamac.export.hf.experts_config import OF_HUNYUAN, shared_factors
from llamac.export.hf.families import ENCODERS, FAMILIES
from llamac.export.hf.family import TERNARY, Family
from llamac.export.hf.family_parts import NOT_APPLIED
from llamac.export.hf.keys import LIMITS, Keys, shortened
from llamac.export.hf.latent_config import attention_factor, latent_attention, minicpm_scales, rotated_part
from llamac.export.hf.layers_config import layers_of
from llamac.export.hf.mamba_config import MAMBA_BIASES, Factor, check_rotated, expert_width, mamba_model, multipliers
from llamac.export.hf.quantized_keys import ADVICE
from llamac.export.hf.query_config import scaled_queries
from llamac.export.hf.rope import FULL, SLIDING, refuse_scaling, rope_parameters, states_base
from llamac.export.rope import Rope

# Keys that must have this value, and the meaning of any other value.
NOT_SUPPORTED: dict[str, tuple[Any, str]] = {
    "quantization_config": (
        None,
        f"quantized weights; every family is read with those of {quantized.NAMES}; otherwise {ADVICE}",
    ),
    "is_encoder_decoder": (False, "an encoder and a decoder"),
    "add_cross_attention": (False, "cross-attention"),
    "cross_attention_hidden_size": (None, "cross-attention"),
    "pruned_heads": ({}, "pruned heads"),
    "rope_interleaved": (False, "RoPE on interleaved pairs"),
    "use_mrope": (False, "multimodal RoPE"),
    "is_causal": (True, "attention to later positions"),
    "scale_attn_by_inverse_layer_idx": (False, "attention scales that differ by layer"),
}
BIASES = (
    *("attention_bias", "attention_out_bias", "mlp_bias", "use_bias", "use_qkv_bias", "qkv_bias", "conv_bias"),
    *("classifier_bias", "enable_bias", "bias"),
    *MAMBA_BIASES,
)
EPS = ("norm_epsilon", "norm_eps", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
AFTER_NORMS = ("use_sandwich_norm", "use_post_norm")  # whether norms follow attention and network, too
# Of OLMo Hybrid's delta nets, for which it has no key.
DELTA_NORM_EPS = float(np.float32(1e-5))
# Keys outside text_config that apply to the language model in it, and keys that only images need.
TIED = "tie_word_embeddings"
OUTSIDE_TEXT = ("model_type", "architectures", TIED, "quantization_config")
OF_IMAGES = (
    *("vision_config", "mm_tokens_per_image"),
    *(
        f"{token}_token_{number}"
        for token in ("boi", "eoi", "image", "boa", "eoa", "audio")
        for number in ("index", "id")
    ),
    *("audio_config", "vision_soft_tokens_per_image"),
    *("multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "vision_feature_layer"),
    *("video_token_id", "vision_token_id", "vision_start_token_id", "vision_end_token_id", "language_model_only"),
    *(f"{token}_{end}_token_id" for token in ("image", "video") for end in ("start", "end")),
    *("scale_factor", "use_reentrant_checkpoints", "_pad_token_id", "projector_hidden_size", "projector_bias"),
    *("do_image_splitting", "downsample_factor", "encoder_patch_size", "max_image_tokens", "max_num_patches"),
    *("max_pixels_tolerance", "max_tiles", "min_image_tokens", "min_tiles", "projector_use_layernorm", "tile_size"),
    *("use_image_special_tokens", "use_thumbnail", "alignment_intermediate_size"),
    *("downsample_ratio", "image_seq_length", "vision_feature_select_strategy"),
    *("adapter_layer_norm_eps", "ignore_index", "image_grid_pinpoints", "use_image_newline_parameter"),
    *("media_placeholder_token_id", "use_unified_vision_chunk", "video_placeholder", "video_token_index"),
    *("projection_hidden_size", "projection_layer_norm_eps", "vision_aspect_ratio", "visual_indicator_token_ids"),
)


@dataclass(frozen=True)
class HfConfig:
    """A parsed config.json.

    Attributes:
        ropes: The RoPE tables.
        tied: Whether the embedding is also the output matrix.
        biases: The kinds of biases (`Module.bias`) that the model has.
        bare: Whether its class is the family's class without an output matrix.
        family: The row that describes its tensors.
        ternary: How ternary matrices are stored; None: the model has none.
        quantization: How quantized matrices of another kind are stored; None: the model has none.
        factors: What multiplies tensors, or each of their rows, by the ends of their canonical names.
        pooling: How an encoder or a cross-encoder pools its tokens.
        positions: The rows of the stored position embedding, and the first of them that is used; (0, 0): all.
        mtp_layer: The MTP layer, if the family's row or keys in config.json describe it.
    """

    model: ModelConfig
    ropes: tuple[Rope, ...]
    tied: bool
    biases: frozenset[str]
    family: Family
    bare: bool = False
    pooling: str = "cls"
    positions: tuple[int, int] = (0, 0)
    ternary: ternary.TernaryConfig | None = None
    quantization: quantized.Quantization | None = None
    factors: Mapping[str, Factor] = field(default_factory=dict)
    mtp_layer: LayerConfig | None = None


def parse_config(values: dict[str, Any], warnings: list[str]) -> HfConfig:
    """Parse a config.json.

    Raises:
        UnsupportedError: If the engine cannot compute the model.
        ExportError: If keys are wrong; the message lists all of them.
    """
    kind = values.get("model_type")
    known = {**FAMILIES, **ENCODERS, **assistant.DRAFTERS}
    if not isinstance(kind, str) or kind not in known:
        what = "config.json has no model_type" if kind is None else f"model_type {kind!r} is not supported"
        raise UnsupportedError(f"{what}; this version imports {', '.join(known)}")
    if kind in assistant.DRAFTERS:
        row = assistant.DRAFTERS[kind]
        found = parse_row(row, text_config(assistant.text_of(values), row, []), warnings)
        return replace(found, model=assistant.with_trunk(found.model, values), tied=False)
    is_two_sided = values.get("use_bidirectional_attention") is True or values.get("is_causal") is False
    is_encoder = kind in ENCODERS and (kind not in FAMILIES or is_two_sided)
    family = encoder_row(values) if is_encoder else decoder_row(values)
    warnings += left_out(values) if is_encoder else ()
    if family.written_as:
        values = text_config(values, family, warnings)
    return parse_row(family, values, warnings)


def parse_row(family: Family, values: dict[str, Any], warnings: list[str]) -> HfConfig:
    """Parse the config of one model of a family."""
    kind = family.model_type
    values = _with_new_names(family, values)
    allowed = NOT_SUPPORTED | {key: (value, f"fixed for {kind}") for key, value in family.fixed.items()}
    unsupported = [
        f"{key} is {shortened(_named(values[key]))} ({what})"
        for key, (value, what) in allowed.items()
        if values.get(key) is not None and values[key] != value and not _is_read(family, key, values[key])
    ]
    if unsupported:
        raise UnsupportedError(f"config.json requires features that llamac does not support: {', '.join(unsupported)}")
    is_bare = _is_bare(family, values.get("architectures"))
    parser = _gpt2 if kind == "gpt2" else _encoder if family.two_sided and family.position == "learned" else _decoder
    config = replace(parser(Keys(values), family, warnings), bare=is_bare)
    quantization = values.get("quantization_config")
    if quantization is not None and quantized.is_read(quantization):
        return replace(config, quantization=quantized.parse(quantization, family, warnings))
    if quantization is None or TERNARY not in family.quantized:
        return config
    return replace(config, ternary=ternary.parse(quantization), model=replace(config.model, rounds_inputs=1))


def _with_new_names(family: Family, values: dict[str, Any]) -> dict[str, Any]:
    """The values under the names of the family's row. ExportError if a value has two names and differs."""
    found = {key: value for key, value in values.items() if key not in family.old_keys}
    for old, new in family.old_keys.items():
        if old in values and values[old] != found.setdefault(new, values[old]):
            raise ExportError(f"config.json: {old} is {shortened(values[old])}, but {new} is {shortened(found[new])}")
    return found


def _is_read(family: Family, key: str, value: Any) -> bool:
    """Whether a quantization is one that the family's tensors are read from."""
    if key != "quantization_config" or not isinstance(value, dict):
        return False
    return quantized.is_read(value) or value.get("quant_method") in family.quantized


def _named(value: Any) -> Any:
    """A value for a message; of a quantization_config, what names it."""
    return {"quant_method": value["quant_method"]} if isinstance(value, dict) and "quant_method" in value else value


def _is_bare(family: Family, classes: Any) -> bool:
    """Whether config.json names the family's class without an output matrix. UnsupportedError for any other class."""
    if classes in (None, []):
        return False
    known = (*family.architectures, *([family.bare] if family.bare else []))
    names = classes if isinstance(classes, list) else [classes]
    for name in names:
        if name not in known:
            raise UnsupportedError(
                f"config.json: architectures has {shortened(name)}, which is not a {_kind(family)} of the family "
                f"{family.model_type!r}; supported are {', '.join(known)}"
            )
    return family.bare in names


def _kind(family: Family) -> str:
    if family.scores_pairs:
        return "model of scores"
    return "model of embeddings" if family.two_sided else "language model"


def text_config(values: dict[str, Any], family: Family, warnings: list[str]) -> dict[str, Any]:
    """The keys of the language model in a multimodal model."""
    outside, kind = Keys(values), family.text_type or family.written_as
    text = outside.value("text_config")
    if text is None and family.flat_text:
        text = {key: value for key, value in values.items() if key not in OUTSIDE_TEXT}
    if isinstance(text, dict) and text.get("model_type", kind) not in (kind, family.old_text_type or kind):
        kinds = " or ".join(repr(name) for name in (kind, *(row.model_type for row in family.other_texts)))
        raise UnsupportedError(
            f"config.json: the language model's model_type is {shortened(text['model_type'])}; with model_type "
            f"{shortened(values.get('model_type'))}, only {kinds} is supported"
        )
    if not isinstance(text, dict):
        raise ExportError(f"config.json: text_config is {shortened(text)}, expected an object, of the language model")
    # versions of transformers that write text_config keep the keys that an older one wrote, and ignore them
    known = {*text, *family.keys} - {*OUTSIDE_TEXT, *OF_IMAGES} if family.flat_text and text else set()
    known |= {key for key in text if key in values and values[key] == text[key]}
    outside.finish({*OUTSIDE_TEXT, *OF_IMAGES, *known})
    warnings.append("config.json describes a multimodal model: only its language model is read")
    differ = sorted(key for key in known & values.keys() if values[key] != text.get(key))
    if differ:
        warnings.append(f"config.json has other values than its text_config, which counts, of {', '.join(differ)}")
    inner = {key: value for key, value in text.items() if key not in ("model_type", "architectures", TIED, *OF_IMAGES)}
    found = inner | {key: values[key] for key in OUTSIDE_TEXT if key in values}
    # versions of transformers keep this key inside, outside, or, unless it is false, in both; they ignore false inside
    return found | ({TIED: True} if text.get(TIED) is True else {})


# ---- decoders


def _decoder(keys: Keys, family: Family, warnings: list[str]) -> HfConfig:
    """All families except GPT-2, whose keys all have other names."""
    row = family.keys
    dim = keys.size("hidden_size", "dim", row.get("hidden_size"))
    n_heads = keys.size("num_attention_heads", "n_heads", row.get("num_attention_heads"))
    n_kv_heads = _n_kv_heads(keys, family, n_heads)
    head_dim = _head_dim(keys, family, max(1, dim // n_heads))
    latent = latent_attention(keys, row, dim, n_heads, n_kv_heads) if "kv_lora_rank" in row else None
    rotated_dim = head_dim if latent is None else latent.rotated
    vocab_size = keys.size("vocab_size", "vocab_size", row.get("vocab_size"))
    context = keys.size("max_position_embeddings", "context", row["max_position_embeddings"])
    norm, norm_eps = _norm(keys, family)
    activation = _activation(keys, family)
    tied = _is_tied(keys, family)
    biases = {key for key in BIASES if _is_set(keys, row, key)}
    scales = _scales(keys, family, dim, head_dim if latent is None else latent.query_dim, warnings)
    is_parallel = _is_set(keys, row, "use_parallel_residual")
    is_parallel = classic_config.is_parallel(keys, row) if "parallel_attn" in row else is_parallel
    norm_key = next((key for key in ("qk_layernorm", "use_qk_norm") if key in row), "")
    has_qk_norm = keys.flag(norm_key, row[norm_key]) if norm_key else True
    n_types = type_count(keys, family)
    layers = layers_of(keys, family, dim)
    mtp_layer = _mtp_layer(keys, family, layers)
    is_sandwich = any(_is_set(keys, row, key) for key in AFTER_NORMS)
    scales |= (of_mamba := mamba_model(keys, family, layers, activation))
    if "moe_latent_size" in row:
        scales |= expert_width(keys, layers)
    if "linear_allow_neg_eigval" in row:
        doubled = keys.flag("linear_allow_neg_eigval", row["linear_allow_neg_eigval"])
        scales |= {"state_norm_eps": DELTA_NORM_EPS, "state_beta_doubled": int(doubled)}
    biases -= set() if of_mamba else set(MAMBA_BIASES)
    if "attn_rotary_emb" in row:
        check_rotated(keys, head_dim)
    if "word_embed_proj_dim" in row:
        classic_config.check_widths(keys, dim)
    if not keys.problems:
        _check_heads(keys, family, dim, n_heads, n_kv_heads)
    if "scale_depth" in row:
        scales |= minicpm_scales(keys, row, dim, max(1, len(layers)))
    head_dims = dict.fromkeys((FULL, SLIDING), rotated_dim)
    if "global_head_dim" in row and not keys.problems:
        usual_heads = config_gemma4.Heads(n_kv_heads, head_dim)
        of_kinds = config_gemma4.heads_by_kind(keys, row, layers, usual_heads, n_heads)
        layers = config_gemma4.varied_layers(keys, row, layers, of_kinds)
        head_dims = {kind: one.head_dim for kind, one in of_kinds.items()}
        largest = config_gemma4.largest_heads(of_kinds)
        n_kv_heads, head_dim = largest.n_kv_heads, largest.head_dim
    is_rotated = family.position == "rope" and (not family.optional_rope or states_base(keys))
    if family.optional_rope and not is_rotated:
        refuse_scaling(keys)
    part = rotated_part(row, latent)
    parameters = rope_parameters(keys, family, head_dims, context, warnings, part) if is_rotated else {}
    if latent is not None:  # one KV head, which all heads share
        scales["attention_scale"] *= attention_factor(keys, parameters[FULL])
        n_kv_heads, head_dim = 1, latent.head_dim
        layers = [replace(layer, **latent.fields()) for layer in layers]
    scaled, factors = scaled_queries(keys, parameters), multipliers(keys, row, layers)
    scores, pooling = cross_encoder(keys, family, dim), pooling_of(keys, family)
    factors |= score_factors(keys, family) | shared_factors(keys, row)
    warnings += [
        f"config.json has {key}, which llamac does not apply, as transformers does not: attention is the usual one"
        for key in NOT_APPLIED
        if key in family.harmless and keys.value(key) is not None
    ]
    keys.finish({*NOT_SUPPORTED, *family.fixed, *family.harmless}, readable=(*row, *OF_HUNYUAN))
    kinds = _used_kinds(layers, parameters)
    tables = tuple(parameters[kind].table(context) for kind in kinds)
    placement = "parallel" if is_parallel else "sandwich" if is_sandwich else family.placement
    model = ModelConfig(
        dim=dim,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        n_token_ids=vocab_size,
        context=context,
        norm=norm,
        position=family.position if is_rotated or not family.optional_rope else "none",
        activation=activation,
        tied_output=tied,
        norm_eps=norm_eps or 0.0,
        layers=tuple(
            replace(
                layer,
                placement=_placement(family, index, layer) or placement,
                rope=kinds.index(_rope_kind(layer, parameters)) if layer.rope >= 0 else -1,
                **scaled,
            )
            for index, layer in enumerate(layers)
        ),
        rope_dim=tuple(2 * len(table.inv_freq) for table in tables),
        rope_original_context=tuple(table.original_context for table in tables),
        rope_attention_factor=tuple(table.attention_factor for table in tables),
        qk_norm=family.qk_norm if has_qk_norm else "none",
        qk_norm_after_rope=int(family.qk_norm_after_rope and has_qk_norm),
        two_sided=int(family.two_sided),
        n_types=n_types,
        **scales,
        **scores,
    )
    return HfConfig(
        model,
        tables,
        tied,
        frozenset({"always", *biases}),
        family,
        pooling=pooling,
        positions=(context + family.position_offset, family.position_offset) if family.position_offset else (0, 0),
        factors=factors,
        mtp_layer=mtp_layer,
    )


def _is_set(keys: Keys, row: Mapping[str, Any], key: str) -> bool:
    """Whether a family has a key, and its value is true."""
    return key in row and keys.flag(key, row[key])


def _head_dim(keys: Keys, family: Family, usual: int) -> int:
    """The size of a head. usual: hidden_size / num_attention_heads."""
    if "head_dim" not in family.keys:
        return usual
    default = family.keys["head_dim"]
    head_dim = keys.size("head_dim", "head_dim", default or usual, nullable=default is None)
    if family.sizes_of_head and head_dim != usual:
        keys.wrong("head_dim", f"hidden_size / num_attention_heads ({usual})")
    return head_dim


def _norm(keys: Keys, family: Family) -> tuple[str, float | None]:
    """The kind of norms, and their epsilon."""
    row = family.keys
    is_rms = {"rms_norm_eps", "layer_norm_eps"} <= row.keys() and keys.value("rms_norm_eps") is not None
    if is_rms:
        keys.value("layer_norm_eps")  # has no effect then
    eps_key = next((key for key in EPS if key in row and (is_rms or row[key] is not None)), "layer_norm_eps")
    norm_eps = keys.number(eps_key, row.get(eps_key, family.fixed.get(eps_key)), LIMITS["norm_eps"])
    return "rms" if is_rms else family.norm, norm_eps


def _is_tied(keys: Keys, family: Family) -> bool:
    """Whether the embedding is also the output matrix; always, in models without an output matrix."""
    row = family.keys
    tied = keys.flag("tie_word_embeddings", row["tie_word_embeddings"]) or family.two_sided or family.scores_pairs
    return keys.flag("tie_embedding", tied, nullable=True) if "tie_embedding" in row else tied


def _mtp_layer(keys: Keys, family: Family, layers: Sequence[LayerConfig]) -> LayerConfig | None:
    """The MTP layer of families whose MTP layer differs from the last layer."""
    mtp_layer = LayerConfig("gated", keys.size("intermediate_size", "ffn_dim"), rope=0) if family.mtp_dense else None
    if "mtp_layer_types" in family.keys and layers:
        return exaone_config.mtp_layer(keys, layers)
    return mtp_layer


def _used_kinds(layers: Sequence[LayerConfig], parameters: Mapping[str, Any]) -> list[str]:
    """The kinds of layers whose RoPE tables the model keeps. With two, the first table belongs to full attention."""
    kinds = [kind for kind in parameters if any(_rope_kind(layer, parameters) == kind for layer in layers)]
    return kinds or list(parameters)[:1]


def _placement(family: Family, index: int, layer: LayerConfig) -> str:
    """The placement of a layer for which the family has another one; "": the usual one."""
    if layer.mixer == "delta_net":
        return family.delta_net_placement
    return family.first_placement if index == 0 else ""


def _rope_kind(layer: LayerConfig, parameters: Mapping[str, Any]) -> str:
    """The kind of RoPE table that a layer uses, if any."""
    return SLIDING if layer.window and SLIDING in parameters else FULL


def _n_kv_heads(keys: Keys, family: Family, n_heads: int) -> int:
    """The number of KV heads. null means one per head, even in families where a missing key does not."""
    if "multi_query" in family.keys:
        return classic_config.n_kv_heads(keys, family.keys, n_heads)
    if "num_key_value_heads" not in family.keys:
        return n_heads
    default = None if "num_key_value_heads" in keys.nulls else family.keys["num_key_value_heads"]
    return keys.size("num_key_value_heads", "n_kv_heads", default or n_heads, nullable=True)


def _check_heads(keys: Keys, family: Family, dim: int, n_heads: int, n_kv_heads: int) -> None:
    if n_heads % n_kv_heads:
        keys.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({n_heads})")
    is_stated = any(key in keys.values or family.keys.get(key) for key in ("head_dim", "v_head_dim"))
    if not is_stated and dim % n_heads:
        keys.wrong("num_attention_heads", f"a divisor of hidden_size ({dim}), because head_dim is missing")


def _activation(keys: Keys, family: Family) -> str:
    """The FFN's activation. Gemma has two keys; in Gemma 1, the one that counts can say gelu for the tanh form."""
    if not family.activation:  # gpt-oss: silu(1.702 x) / 1.702
        return "quick_gelu"
    others = [key for key in ("hidden_act", "hidden_activation") if key in family.keys and key != family.activation]
    if not others:
        return keys.activation(family.activation, {**family.fixed, **family.keys}[family.activation])
    found = {}
    for key in (family.activation, *others):
        name = keys.activation(key, family.keys[family.activation], nullable=key in others)
        is_loose = key == "hidden_act" and name == "gelu_erf"
        found[key] = "gelu_tanh" if is_loose else name
    for key in others:
        if key in keys.values and found[key] != found[family.activation]:
            keys.wrong(key, f"the same activation as {family.activation} has")
    return found[family.activation]


def _scales(keys: Keys, family: Family, dim: int, head_dim: int, warnings: list[str]) -> dict[str, Any]:
    """Scales and soft caps of the config record."""
    row = family.keys

    def number(key: str, default: float) -> float:
        """A positive multiplier."""
        if key not in row:
            return default
        usual = default if row[key] is None else row[key]
        value = keys.number(key, usual, LIMITS["logit_scale"], nullable=row[key] is None)
        if value == 0:
            keys.wrong(key, "a number above 0")
        return value or 1.0

    def cap(key: str) -> float:
        """A soft cap. null means none, even in families where a missing key does not."""
        return (keys.number(key, None if key in keys.nulls else row[key], LIMITS["logit_soft_cap"])) or 0.0

    is_scaled = keys.flag("mup_enabled", row["mup_enabled"]) if "mup_enabled" in row else family.scaled_embedding
    caps = {}
    if "final_logit_softcapping" in row:
        caps["logit_soft_cap"] = cap("final_logit_softcapping")
    if "attn_logit_softcapping" in row:
        caps["attention_soft_cap"] = cap("attn_logit_softcapping")
        if family.qk_norm != "none" and caps["attention_soft_cap"]:
            warnings.append(f"config.json: attn_logit_softcapping is ignored, as in transformers' {family.model_type}")
            caps["attention_soft_cap"] = 0.0
    scaling = number("logits_scaling", 1.0)
    return caps | {
        "attention_scale": family.attention_scale
        or number("attention_multiplier", number("query_pre_attn_scalar", head_dim) ** -0.5),
        "embedding_scale": number("embedding_multiplier", dim**0.5 if is_scaled else 1.0),
        "residual_scale": number("residual_multiplier", 1.0),
        "logit_scale": number(
            "logit_scale", number("lm_head_multiplier", scaling if family.multiplied_logits else 1 / scaling)
        ),
    }


# ---- encoders


def _encoder(keys: Keys, family: Family, warnings: list[str]) -> HfConfig:
    model, positions = parse_encoder(keys, family, {*NOT_SUPPORTED, *family.fixed, *family.harmless})
    pooling = pooling_of(keys, family)
    return HfConfig(model, (), True, frozenset({"always"}), family, positions=positions, pooling=pooling)


# ---- GPT-2


def _gpt2(keys: Keys, family: Family, warnings: list[str]) -> HfConfig:
    row = family.keys
    dim, n_heads = keys.size("n_embd", "dim"), keys.size("n_head", "n_heads")
    vocab_size, n_layers = keys.size("vocab_size", "vocab_size"), keys.size("n_layer", "n_layers")
    ffn_dim = keys.size("n_inner", "ffn_dim", 4 * dim, nullable=True)
    # older versions stored the context under both names
    n_ctx = keys.size("n_ctx", "context") if "n_ctx" in keys.values else None
    context = keys.size("n_positions", "context", n_ctx)
    if not keys.problems and dim % n_heads:
        keys.wrong("n_head", f"a divisor of n_embd ({dim})")
    norm_eps = keys.number("layer_norm_epsilon", row["layer_norm_epsilon"], LIMITS["norm_eps"])
    activation = keys.activation(family.activation, row[family.activation])
    tied = keys.flag("tie_word_embeddings", row["tie_word_embeddings"])
    is_scaled = keys.flag("scale_attn_weights", row["scale_attn_weights"])
    keys.finish(NOT_SUPPORTED)
    if n_ctx not in (None, context):
        warnings.append(f"config.json: n_ctx is {n_ctx}, but n_positions is {context}: using n_positions")
    head_dim = dim // n_heads
    model = ModelConfig(
        dim=dim,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        n_token_ids=vocab_size,
        context=context,
        norm=family.norm,
        position="learned",
        activation=activation,
        tied_output=tied,
        norm_eps=norm_eps or 0.0,
        attention_scale=head_dim**-0.5 if is_scaled else 1.0,
        layers=(LayerConfig(family.ffn, ffn_dim),) * n_layers,
    )
    return HfConfig(model, (), tied, frozenset({"always"}), family)
