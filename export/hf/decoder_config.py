"""Reads config.json of decoders, and of encoders with RoPE: all families except GPT-2 and BERT's relatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

import numpy as np

from llamac.export.checkpoint import LayerConfig, ModelConfig
from llamac.export.distances import USUAL_BIAS, alibi_slopes
from llamac.export.hf import classic_config, exaone_config
from llamac.export.hf.config_gemma4 import (
    Heads,
    heads_by_kind,
    largest_heads,
    layer_embedding_rows,
    varied_layers,
)
from llamac.export.hf.encoder_config import cross_encoder, pooling_of, score_factors, type_count
from llamac.export.hf.experts_config import OF_HUNYUAN, shared_factors
from llamac.export.hf.family import Family
from llamac.export.hf.family_parts import NOT_APPLIED, ROPE_NOT_APPLIED
from llamac.export.hf.keys import LIMITS, Keys
from llamac.export.hf.latent_config import attention_factor, latent_attention, minicpm_scales, rotated_part
from llamac.export.hf.layers_config import layers_of
from llamac.export.hf.mamba_config import MAMBA_BIASES, Factor, check_rotated, expert_width, mamba_model, multipliers
from llamac.export.hf.parsed_config import HfConfig
from llamac.export.hf.query_config import scaled_queries
from llamac.export.hf.rope import FULL, SLIDING, RopeParameters, refuse_scaling, rope_parameters, states_base
from llamac.export.rope import rope_fields

BIASES = (
    *("attention_bias", "attention_out_bias", "mlp_bias", "use_bias", "use_qkv_bias", "qkv_bias", "conv_bias"),
    *("classifier_bias", "enable_bias", "bias"),
    *MAMBA_BIASES,
)
EPS = ("norm_epsilon", "norm_eps", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
AFTER_NORMS = ("use_sandwich_norm", "use_post_norm")  # whether norms follow attention and network, too
QK_NORMS = ("qk_layernorm", "use_qk_norm")  # whether q and k are normed
# Of OLMo Hybrid's delta nets, for which it has no key.
DELTA_NORM_EPS = float(np.float32(1e-5))


def parse_decoder(keys: Keys, family: Family, checked: AbstractSet[str], warnings: list[str]) -> HfConfig:
    """Read the keys of a decoder.

    Args:
        keys: The keys of config.json.
        family: The decoder's row.
        checked: Keys that have been checked already.
        warnings: Receives warnings.

    Raises:
        UnsupportedError: If the engine cannot compute the model.
        ExportError: If keys are wrong; the message lists all of them.
    """
    row = family.keys
    dim = keys.size("hidden_size", "dim", row.get("hidden_size"))
    n_heads, heads = _heads(keys, family, dim)
    latent = latent_attention(keys, row, dim, n_heads, heads.n_kv_heads) if "kv_lora_rank" in row else None
    fields = _independent_fields(keys, family, warnings)
    context: int = fields["context"]
    layers = layers_of(keys, family, dim)
    fields |= _scales(keys, family, dim, heads.head_dim if latent is None else latent.query_dim)
    mtp_layer = _mtp_layer(keys, family, layers)
    biases = _biases(keys, row, layers)
    layers = _with_placements(layers, family, _placement(keys, family))
    fields |= _fields_of_mixers(keys, family, layers, fields["activation"])
    _check_widths(keys, family, dim, n_heads, heads)
    if "scale_depth" in row:
        fields |= minicpm_scales(keys, row, dim, max(1, len(layers)))
    by_kind = dict.fromkeys((FULL, SLIDING), heads)
    if "global_head_dim" in row and not keys.problems:
        by_kind = heads_by_kind(keys, row, layers, heads, n_heads)
        layers = varied_layers(keys, row, layers, by_kind)
        heads = largest_heads(by_kind)
    position = _position(keys, family)
    slopes = alibi_slopes(n_heads, USUAL_BIAS) if family.alibi else ()
    ropes: dict[str, RopeParameters] = {}
    if position == "rope":
        widths = {kind: own.head_dim if latent is None else latent.rotated for kind, own in by_kind.items()}
        ropes = rope_parameters(keys, family, widths, context, warnings, rotated_part(row, latent))
    if latent is not None:
        fields["attention_scale"] *= attention_factor(keys, ropes[FULL])
        heads = Heads(1, latent.head_dim)  # one KV head, which all heads share
        layers = [replace(layer, **latent.fields()) for layer in layers]
    scaled = scaled_queries(keys, ropes)
    factors = weight_factors(keys, family, layers)
    fields |= cross_encoder(keys, family, dim)
    pooling = pooling_of(keys, family)
    warnings += _not_applied(keys, family)
    keys.finish(checked, readable=(*row, *OF_HUNYUAN))
    layers, ropes = _with_used_ropes(layers, ropes)
    tables = tuple(parameters.table(context) for parameters in ropes.values())
    model = ModelConfig(
        dim=dim,
        n_heads=n_heads,
        n_kv_heads=heads.n_kv_heads,
        head_dim=heads.head_dim,
        position=position,
        layers=tuple(replace(layer, **scaled) for layer in layers),
        bias_distance=max(1, context - 1) if slopes else 0,
        embedding_norm=int(any("embedding_norm" in module.parts for module in family.modules)),
        **fields,
        **rope_fields(tables),
    )
    return HfConfig(
        model,
        tables,
        model.tied_output,
        biases,
        family,
        pooling=pooling,
        positions=(context + family.position_offset, family.position_offset) if family.position_offset else (0, 0),
        layer_embedding_rows=layer_embedding_rows(keys, row),
        factors=factors,
        mtp_layer=mtp_layer,
        slopes=slopes,
    )


def weight_factors(keys: Keys, family: Family, layers: Sequence[LayerConfig]) -> dict[str, Factor]:
    """What multiplies the checkpoint's tensors, or each of their rows, by the ends of their canonical names."""
    row = family.keys
    return multipliers(keys, row, layers) | score_factors(keys, family) | shared_factors(keys, row)


def _independent_fields(keys: Keys, family: Family, warnings: list[str]) -> dict[str, Any]:
    """The fields of the config record that follow from a key or two of their own."""
    row = family.keys
    vocab_size = keys.size("vocab_size", "vocab_size", row.get("vocab_size"))
    norm, norm_eps = _norm(keys, family)
    qk_norm = _qk_norm(keys, family)
    return {
        "vocab_size": vocab_size,
        "n_token_ids": vocab_size,
        "context": keys.size("max_position_embeddings", "context", row["max_position_embeddings"]),
        "norm": norm,
        "norm_eps": norm_eps or 0.0,
        "activation": _activation(keys, family),
        "tied_output": _is_tied(keys, family),
        "qk_norm": qk_norm,
        "qk_norm_after_rope": int(family.qk_norm_after_rope and qk_norm != "none"),
        "two_sided": int(family.two_sided),
        "n_types": type_count(keys, family),
        **_soft_caps(keys, family, warnings),
    }


def _norm(keys: Keys, family: Family) -> tuple[str, float | None]:
    """The kind of norms, and their epsilon."""
    row = family.keys
    is_rms = {"rms_norm_eps", "layer_norm_eps"} <= row.keys() and keys.value("rms_norm_eps") is not None
    if is_rms:
        keys.value("layer_norm_eps")  # has no effect then
    eps_key = next((key for key in EPS if key in row and (is_rms or row[key] is not None)), "layer_norm_eps")
    norm_eps = keys.number(eps_key, row.get(eps_key, family.fixed.get(eps_key)), LIMITS["norm_eps"])
    return "rms" if is_rms else family.norm, norm_eps


def _qk_norm(keys: Keys, family: Family) -> str:
    """The kind of norms of q and k. Some families have a key that turns them off."""
    key = next((key for key in QK_NORMS if key in family.keys), "")
    has_norms = keys.flag(key, family.keys[key]) if key else True
    return family.qk_norm if has_norms else "none"


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


def _is_tied(keys: Keys, family: Family) -> bool:
    """Whether the embedding is also the output matrix; always, in models without an output matrix."""
    row = family.keys
    tied = keys.flag("tie_word_embeddings", row["tie_word_embeddings"]) or family.two_sided or family.scores_pairs
    return keys.flag("tie_embedding", tied, nullable=True) if "tie_embedding" in row else tied


def _scales(keys: Keys, family: Family, dim: int, head_dim: int) -> dict[str, Any]:
    """The scales of the config record."""
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

    is_scaled = keys.flag("mup_enabled", row["mup_enabled"]) if "mup_enabled" in row else family.scaled_embedding
    scaling = number("logits_scaling", 1.0)
    return {
        "attention_scale": family.attention_scale
        or number("attention_multiplier", number("query_pre_attn_scalar", head_dim) ** -0.5),
        "embedding_scale": number("embedding_multiplier", dim**0.5 if is_scaled else 1.0),
        "residual_scale": number("residual_multiplier", 1.0),
        "logit_scale": number(
            "logit_scale", number("lm_head_multiplier", scaling if family.multiplied_logits else 1 / scaling)
        ),
    }


def _soft_caps(keys: Keys, family: Family, warnings: list[str]) -> dict[str, float]:
    """The soft caps of the config record."""
    row = family.keys

    def cap(key: str) -> float:
        """A soft cap. null means none, even in families where a missing key does not."""
        return (keys.number(key, None if key in keys.nulls else row[key], LIMITS["logit_soft_cap"])) or 0.0

    caps: dict[str, float] = {}
    if "final_logit_softcapping" in row:
        caps["logit_soft_cap"] = cap("final_logit_softcapping")
    if "attn_logit_softcapping" in row:
        caps["attention_soft_cap"] = cap("attn_logit_softcapping")
        if family.qk_norm != "none" and caps["attention_soft_cap"]:
            warnings.append(f"config.json: attn_logit_softcapping is ignored, as in transformers' {family.model_type}")
            caps["attention_soft_cap"] = 0.0
    return caps


# ---- heads


def _heads(keys: Keys, family: Family, dim: int) -> tuple[int, Heads]:
    """The number of query heads, and the KV heads. Without attention, one narrow head stands for both."""
    if "state_size" in family.keys:
        return 1, Heads(1, 2)
    n_heads = keys.size("num_attention_heads", "n_heads", family.keys.get("num_attention_heads"))
    return n_heads, Heads(_n_kv_heads(keys, family, n_heads), _head_dim(keys, family, max(1, dim // n_heads)))


def _n_kv_heads(keys: Keys, family: Family, n_heads: int) -> int:
    """The number of KV heads. null means one per head, even in families where a missing key does not."""
    if "multi_query" in family.keys:
        return classic_config.n_kv_heads(keys, family.keys, n_heads)
    if "num_key_value_heads" not in family.keys:
        return n_heads
    default = None if "num_key_value_heads" in keys.nulls else family.keys["num_key_value_heads"]
    return keys.size("num_key_value_heads", "n_kv_heads", default or n_heads, nullable=True)


def _head_dim(keys: Keys, family: Family, usual: int) -> int:
    """The size of a head. usual: hidden_size / num_attention_heads."""
    if "head_dim" not in family.keys:
        return usual
    default = family.keys["head_dim"]
    head_dim = keys.size("head_dim", "head_dim", default or usual, nullable=default is None)
    if family.sizes_of_head and head_dim != usual:
        keys.wrong("head_dim", f"hidden_size / num_attention_heads ({usual})")
    return head_dim


def _check_widths(keys: Keys, family: Family, dim: int, n_heads: int, heads: Heads) -> None:
    """Check the widths that other keys determine."""
    if "attn_rotary_emb" in family.keys:
        check_rotated(keys, heads.head_dim)
    if "word_embed_proj_dim" in family.keys:
        classic_config.check_widths(keys, dim)
    if not keys.problems:
        _check_heads(keys, family, dim, n_heads, heads.n_kv_heads)


def _check_heads(keys: Keys, family: Family, dim: int, n_heads: int, n_kv_heads: int) -> None:
    if n_heads % n_kv_heads:
        keys.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({n_heads})")
    is_stated = any(key in keys.values or family.keys.get(key) for key in ("head_dim", "v_head_dim"))
    if not is_stated and dim % n_heads:
        keys.wrong("num_attention_heads", f"a divisor of hidden_size ({dim}), because head_dim is missing")


# ---- layers


def _placement(keys: Keys, family: Family) -> str:
    """The usual placement of norms, for which some families have keys."""
    row = family.keys
    is_parallel = _is_set(keys, row, "use_parallel_residual")
    if "parallel_attn" in row:
        is_parallel = classic_config.is_parallel(keys, row)
    has_after_norms = any(_is_set(keys, row, key) for key in AFTER_NORMS)
    return "parallel" if is_parallel else "sandwich" if has_after_norms else family.placement


def _with_placements(layers: Sequence[LayerConfig], family: Family, usual: str) -> list[LayerConfig]:
    """The layers with their placements of norms."""
    return [
        replace(layer, placement=_other_placement(family, index, layer) or usual) for index, layer in enumerate(layers)
    ]


def _other_placement(family: Family, index: int, layer: LayerConfig) -> str:
    """The placement of a layer for which the family has another one; "": the usual one."""
    if layer.mixer == "delta_net":
        return family.delta_net_placement
    return family.first_placement if index == 0 else ""


def _fields_of_mixers(keys: Keys, family: Family, layers: Sequence[LayerConfig], activation: str) -> dict[str, Any]:
    """The fields of the config record that only layers with Mamba 2, latent experts or delta nets need."""
    row = family.keys
    fields = mamba_model(keys, family, layers, activation)
    if "moe_latent_size" in row:
        fields |= expert_width(keys, layers)
    if "linear_allow_neg_eigval" in row:
        is_doubled = keys.flag("linear_allow_neg_eigval", row["linear_allow_neg_eigval"])
        fields |= {"state_norm_eps": DELTA_NORM_EPS, "state_beta_doubled": int(is_doubled)}
    return fields


def _mtp_layer(keys: Keys, family: Family, layers: Sequence[LayerConfig]) -> LayerConfig | None:
    """The MTP layer of families whose MTP layer differs from the last layer."""
    mtp_layer = LayerConfig("gated", keys.size("intermediate_size", "ffn_dim"), rope=0) if family.mtp_dense else None
    if "mtp_layer_types" in family.keys and layers:
        return exaone_config.mtp_layer(keys, layers)
    return mtp_layer


def _biases(keys: Keys, row: Mapping[str, Any], layers: Sequence[LayerConfig]) -> frozenset[str]:
    """The kinds of biases (`Module.bias`) that the model has."""
    found = {key for key in BIASES if _is_set(keys, row, key)}
    has_mamba = any("mamba" in layer.mixer for layer in layers)
    return frozenset({"always", *(found if has_mamba else found.difference(MAMBA_BIASES))})


def _is_set(keys: Keys, row: Mapping[str, Any], key: str) -> bool:
    """Whether a family has a key, and its value is true."""
    return key in row and keys.flag(key, row[key])


# ---- RoPE


def _position(keys: Keys, family: Family) -> str:
    """The position encoding. RoPE can be optional: without a base in config.json, the model has none."""
    if not family.optional_rope or states_base(keys):
        return family.position
    refuse_scaling(keys)
    return "none"


def _with_used_ropes(
    layers: Sequence[LayerConfig], ropes: Mapping[str, RopeParameters]
) -> tuple[list[LayerConfig], dict[str, RopeParameters]]:
    """The layers with the numbers of their RoPE tables, and the parameters of the tables that layers use.

    With two tables, the first belongs to full attention. A model whose layers have no RoPE keeps one table.
    """
    kinds = [kind for kind in ropes if any(_rope_kind(layer, ropes) == kind for layer in layers)] or list(ropes)[:1]
    numbered = [
        replace(layer, rope=kinds.index(_rope_kind(layer, ropes)) if layer.rope >= 0 else -1) for layer in layers
    ]
    return numbered, {kind: ropes[kind] for kind in kinds}


def _rope_kind(layer: LayerConfig, ropes: Mapping[str, RopeParameters]) -> str:
    """The kind of RoPE table that a layer uses, if any."""
    return SLIDING if layer.window and SLIDING in ropes else FULL


def _not_applied(keys: Keys, family: Family) -> list[str]:
    """Warnings about keys that transformers ignores, too, although they describe another attention."""
    return [
        f"config.json has {key}, which llamac ignores, as transformers does"
        for key in (*NOT_APPLIED, *ROPE_NOT_APPLIED)
        if key in family.harmless and keys.value(key) is not None
    ]
