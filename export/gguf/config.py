"""Converts GGUF metadata to a canonical config, following the table row of the architecture.

Missing keys have llama.cpp's defaults. An unknown key of the architecture could change what the model computes, so it
is an error. One error lists all problems.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llamac.errors import UnsupportedError
from llamac.export.checkpoint import LayerConfig, ModelConfig
from llamac.export.distances import MOST_BIAS, USUAL_BIAS, alibi_slopes
from llamac.export.gguf import gemma4, llama4
from llamac.export.gguf.architecture import MAX_ALIBI_BIAS
from llamac.export.gguf.drafters import DRAFTERS, as_drafter, drafter_fields, vocabulary_size
from llamac.export.gguf.encoders import ENCODERS, NO_SHARED_BIAS, encoder_fields
from llamac.export.gguf.families import (
    ARCHITECTURES,
    COMMON_KEYS,
    ROPE_FACTORS,
    ROPE_KEYS,
    Architecture,
)
from llamac.export.gguf.keys import LIMITS, Keys
from llamac.export.gguf.latent import attention_factor, latent_fields
from llamac.export.gguf.layers_config import layers_of
from llamac.export.gguf.mamba2 import mamba2_fields, single_parts, state_fields
from llamac.export.gguf.mtp import with_mtp
from llamac.export.gguf.rope import Floats, rope_tables
from llamac.export.rope import Rope, rope_fields
from llamac.format.gguf_metadata import Value

EMBEDDING = "token_embd.weight"
_RMS_KEY = "attention.layer_norm_rms_epsilon"
XIELU_NUMBERS = {"beta": 0.5, "eps": -1e-6}  # of xIELU, in all models
HIDDEN_ACTIVATIONS = {"gelu": "gelu_erf", "silu": "silu"}
# Scales and caps that only some architectures have.
SCALES = (
    "attention.scale",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)


@dataclass(frozen=True)
class GGUFConfig:
    """The parsed metadata.

    Attributes:
        model: The model's config.
        row: The table row of its architecture.
        ropes: The frequencies of each RoPE table.
        numbers: The numbers that the file has in its metadata and ours are tensors, by their names.
        slopes: ALiBi's slope of each head, if the architecture has them.
    """

    model: ModelConfig
    row: Architecture
    ropes: tuple[Rope, ...]
    numbers: Mapping[str, float] = field(default_factory=dict)
    slopes: tuple[float, ...] = ()


def architecture(values: Mapping[str, Value]) -> tuple[str, Architecture]:
    """Look up the architecture that the metadata names.

    Returns:
        Its name, and its table row.

    Raises:
        UnsupportedError: If it is unknown.
    """
    kind = values.get("general.type", "model")
    name = values.get("general.architecture")
    if kind != "model":
        raise UnsupportedError(f"the GGUF file is not a model: its general.type is {kind!r:.40}")
    known = {**ARCHITECTURES, **ENCODERS, **DRAFTERS}
    if not isinstance(name, str) or name not in known:
        what = "has no general.architecture" if name is None else f"has the architecture {name!r:.40}"
        raise UnsupportedError(f"the GGUF file {what}; this version imports {', '.join(known)}")
    return name, known[name]


def parse_config(
    values: Mapping[str, Value],
    shapes: Mapping[str, tuple[int, ...]],
    tied: bool,
    factors: Mapping[str, Floats],
    warnings: list[str],
) -> GGUFConfig:
    """Parse the metadata of a GGUF file.

    Args:
        values: The metadata.
        shapes: Shapes of the tensors by name.
        tied: Whether the embedding is also the output matrix.
        factors: The RoPE factors in the file, by kind (ROPE_FACTORS).
        warnings: Receives warnings.

    Raises:
        UnsupportedError: If the engine cannot compute the model.
        ExportError: If keys are wrong; the message lists all of them.
    """
    name, row = architecture(values)
    row = _of_depth(values, name, row)
    vocab_size = _vocab_size(values, name, shapes, warnings)
    keys = Keys(values, name, {**COMMON_KEYS, **(ROPE_KEYS if row.position == "rope" else {}), **row.keys})
    dim, n_layers, context = keys.size("embedding_length"), keys.size("block_count"), keys.size("context_length")
    heads = _heads(keys, row, dim, n_layers)
    norm, norm_eps = _norm(keys, name, row)
    scales = {key: keys.number(key) or 0.0 for key in SCALES if key in row.keys}
    if row.has_predicting_blocks:
        n_layers -= min(keys.size("nextn_predict_layers", least=0), n_layers - 1)
    layers, heads = _layers(keys, row, heads, n_layers, shapes)
    if row.two_sided:
        _check_encoder(keys, layers, warnings)
    of_drafter = drafter_fields(keys, row, vocab_size, shapes)
    numbers = _xielu(keys, n_layers) if row.activation == "xielu" else {}
    slopes = _slopes(keys, row, heads.n)
    if row.needs_factors and "freqs" not in factors:
        keys.problems.append(f"the tensor {ROPE_FACTORS['freqs']} is missing: it says which part of each head rotates")
    keys.finish()
    tables = rope_tables(keys, row, heads.rotated, context, factors) if row.position == "rope" else ()
    qk_norm = _qk_norm(row, layers, shapes)
    layers, ropes = _with_used_tables(layers, tables)
    model = ModelConfig(
        dim=dim,
        n_heads=heads.n,
        n_kv_heads=heads.n_kv,
        head_dim=heads.dim,
        vocab_size=vocab_size,
        n_token_ids=vocab_size,
        context=context,
        norm=norm,
        position=row.position,
        activation=_activation(keys, row),
        tied_output=tied,
        norm_eps=norm_eps or 0.0,
        attention_scale=_attention_scale(keys, row, scales, heads.query_dim),
        layers=layers,
        qk_norm=qk_norm,
        qk_norm_after_rope=int(row.qk_norm_after_rope and qk_norm != "none"),
        state_norm=_state_norm(row, shapes),
        **_scale_fields(scales, row, dim, n_layers),
        bias_distance=max(1, context - 1) if slopes else 0,
        embedding_norm=int("embedding_norm" in row.names),
        **encoder_fields(row, shapes),
        **rope_fields(ropes),
    )
    model = as_drafter(model, of_drafter) if row.drafter else model
    return GGUFConfig(with_mtp(model, shapes, row.mtp_like) if row.mtp else model, row, ropes, numbers, slopes)


def _of_depth(values: Mapping[str, Value], name: str, row: Architecture) -> Architecture:
    """The row of a model of this depth, at which some architectures have ALiBi in place of RoPE."""
    if not row.alibi_depth or values.get(f"{name}.block_count") != row.alibi_depth:
        return row
    return replace(row, position="none", alibi=USUAL_BIAS, keys={**row.keys, **dict.fromkeys(ROPE_KEYS)})


def _vocab_size(
    values: Mapping[str, Value], name: str, shapes: Mapping[str, tuple[int, ...]], warnings: list[str]
) -> int:
    """The rows of the embedding; in a file without one, the size that the metadata state."""
    rows = shapes[EMBEDDING][0] if EMBEDDING in shapes else vocabulary_size(values, name)
    declared = values.get(f"{name}.vocab_size", rows)
    if declared != rows:
        warnings.append(f"{name}.vocab_size is {declared}, but the embedding has {rows} rows: using {rows}")
    return rows


@dataclass(frozen=True)
class _Heads:
    """The heads of attention.

    Attributes:
        n: The number of heads.
        n_kv: The number of KV heads.
        dim: The size of a head of K, in the cache.
        query_dim: The size of a head that the scale of scores is made from.
        rotated: How many dimensions of a head RoPE rotates.
        latent: The fields of every layer whose cache holds a latent.
        present: Which layers have attention; empty where each layer has its own number of heads.
    """

    n: int
    n_kv: int
    dim: int
    query_dim: int
    rotated: int
    latent: Mapping[str, Any]
    present: list[bool]


def _heads(keys: Keys, row: Architecture, dim: int, n_layers: int) -> _Heads:
    """Read the heads of attention of a model of this width and depth."""
    n = 1 if row.only_mamba2 else keys.size("attention.head_count")
    n_kv, present = (n, []) if row.varied else _kv_heads(keys, row, n, n_layers)
    head_dim = _head_dim(keys, row, max(1, dim // n))
    if not keys.problems:
        _check_heads(keys, dim, n, n_kv)
    query_dim = dim // n if n_layers == row.deep_scale else head_dim
    latent: dict[str, Any] = {}
    if row.latent:
        rotated, latent = latent_fields(keys, dim, n)
        query_dim, head_dim = rotated + latent["qk_nope_head_dim"], rotated + latent["kv_lora_rank"]
        n_kv = 1
    return _Heads(n, n_kv, head_dim, query_dim, _rope_dim(keys, row, head_dim), latent, present)


def _layers(
    keys: Keys, row: Architecture, heads: _Heads, n_layers: int, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[LayerConfig, ...], _Heads]:
    """The layers, and the largest heads where each layer has its own."""
    layers = _with_mixers(keys, row, layers_of(keys, row, n_layers, shapes), heads.present, shapes)
    if row.varied and layers:
        is_assistant = bool(row.drafter)
        layers, n_kv, dim = gemma4.varied_layers(keys, layers, heads.dim, heads.n, shapes, is_assistant=is_assistant)
        heads = replace(heads, n_kv=n_kv, dim=dim)
    return tuple(replace(layer, **heads.latent) for layer in layers), heads


def _head_dim(keys: Keys, row: Architecture, usual: int) -> int:
    """The size of a head. usual: embedding_length / head_count. Without attention, it is the least one."""
    if row.only_mamba2:
        return 2
    head_dim = keys.size("attention.key_length", usual)
    if not row.latent and keys.size("attention.value_length", head_dim) != head_dim:
        keys.wrong("attention.value_length", f"the same as attention.key_length ({head_dim})")
    return head_dim


def _rope_dim(keys: Keys, row: Architecture, head_dim: int) -> int:
    """How many dimensions of a head RoPE rotates; 0 without RoPE."""
    rope_dim = keys.size("rope.dimension_count", head_dim) if row.position == "rope" else 0
    if rope_dim % 2 or rope_dim > head_dim:
        keys.wrong("rope.dimension_count", f"an even number, at most {head_dim}")
    return rope_dim


def _check_encoder(keys: Keys, layers: tuple[LayerConfig, ...], warnings: list[str]) -> None:
    """Check that rows attend to later rows, and warn about experts that lose a bias."""
    if keys.flag("attention.causal"):
        keys.wrong("attention.causal", "false")
    if any(layer.plain_experts for layer in layers):
        warnings.append(NO_SHARED_BIAS)


def _qk_norm(row: Architecture, layers: tuple[LayerConfig, ...], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The norm of q and k. In some architectures, only the tensors say whether a model has it."""
    if row.chunked:
        has_norms = llama4.has_norms(layers)
    else:
        may_lack_norms = row.norms_by_tensors or row.qk_norm == "layer_head"
        has_norms = not may_lack_norms or "blk.0.attn_q_norm.weight" in shapes
    return row.qk_norm if has_norms else "none"


def _state_norm(row: Architecture, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The norm of Mamba 2 layers."""
    has_norm = row.mamba2 or (row.beside and "blk.0.ssm_norm.weight" in shapes)
    return "after_gate" if has_norm else "none"


def _attention_scale(keys: Keys, row: Architecture, scales: Mapping[str, float], query_dim: int) -> float:
    """What multiplies q. query_dim: the width of its heads."""
    stated = row.attention_scale or scales.get("attention.scale")
    if stated:
        return stated
    usual: float = query_dim**-0.5
    return usual * attention_factor(keys, row) if row.latent else usual


def _with_used_tables(
    layers: tuple[LayerConfig, ...], tables: tuple[Rope, ...]
) -> tuple[tuple[LayerConfig, ...], tuple[Rope, ...]]:
    """The RoPE tables that layers use, or the first, and the layers with the numbers of these tables."""
    used = sorted({layer.rope for layer in layers if layer.rope >= 0}) or list(range(len(tables)))[:1]
    numbered = (replace(layer, rope=used.index(layer.rope) if layer.rope >= 0 else -1) for layer in layers)
    return tuple(numbered), tuple(tables[number] for number in used)


def _norm(keys: Keys, name: str, row: Architecture) -> tuple[str, float | None]:
    """The kind of norms, and their epsilon. name: of the architecture."""
    has_rms = row.either_norm and bool(keys.number(_RMS_KEY, most=LIMITS["norm_eps"]))
    norm = "rms" if has_rms else row.norm
    eps_key = _RMS_KEY if norm == "rms" else "attention.layer_norm_epsilon"
    norm_eps = keys.number(eps_key, most=LIMITS["norm_eps"])
    if norm_eps is None:
        keys.problems.append(f"{name}.{eps_key} is missing")
    return norm, norm_eps


def _check_heads(keys: Keys, dim: int, n_heads: int, n_kv_heads: int) -> None:
    if n_heads % n_kv_heads:
        keys.wrong("attention.head_count_kv", f"a divisor of attention.head_count ({n_heads})")
    if keys.value("attention.key_length") is None and dim % n_heads:
        keys.wrong("attention.head_count", f"a divisor of embedding_length ({dim}), because key_length is missing")


def _scale_fields(scales: Mapping[str, float], row: Architecture, dim: int, n_layers: int) -> dict[str, Any]:
    """The config's scales and caps, except the scale of attention. A scale of 0 means none."""
    embedding = dim**0.5 if row.scaled_embedding else scales.get("embedding_scale") or row.embedding_scale or 1.0
    logit_scale = scales.get("logit_scale") or dim / (row.logit_dim or dim)
    return {
        "embedding_scale": embedding,
        "residual_scale": scales.get("residual_scale") or row.branch_scale / math.sqrt(n_layers) or 1.0,
        "logit_scale": logit_scale ** (1 if row.multiplies_logits else -1),
        "attention_soft_cap": scales.get("attn_logit_softcapping", 0.0),
        "logit_soft_cap": scales.get("final_logit_softcapping", 0.0),
    }


def _kv_heads(keys: Keys, row: Architecture, n_heads: int, n_layers: int) -> tuple[int, list[bool]]:
    """The number of KV heads, and which layers have attention: in some architectures, those without have 0."""
    key = "attention.head_count_kv"
    listed = keys.value(key)
    if row.only_mamba2:
        _check_without_attention(keys, (key, "attention.head_count"))
        return 1, [False] * n_layers
    if not (row.short_conv or row.mamba2) or not isinstance(listed, list):
        return keys.size(key, n_heads), [True] * n_layers
    found = {n for n in listed if n != 0} or {1}
    (n_kv_heads, *others) = found
    if others or type(n_kv_heads) is not int or not 0 < n_kv_heads <= LIMITS["n_kv_heads"] or len(listed) != n_layers:
        keys.wrong(key, f"one number of heads, or 0, for each of {n_layers} layers")
        return 1, [True] * n_layers
    return n_kv_heads, [n != 0 for n in listed]


def _check_without_attention(keys: Keys, counts: tuple[str, ...]) -> None:
    for key in counts:
        if keys.value(key) not in (None, 0):
            keys.wrong(key, "0, since no layer has attention")


def _with_mixers(
    keys: Keys,
    row: Architecture,
    layers: tuple[LayerConfig, ...],
    has_attention: list[bool],
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[LayerConfig, ...]:
    """Give layers what mixes their positions where it is not attention to all of them or to a window."""
    if row.chunked:
        layers = llama4.chunked_layers(keys, layers)
    if row.delta_net:
        layers = _with_delta_nets(keys, layers)
    if row.short_conv:
        layers = _with_short_convs(keys, layers, has_attention, shapes)
    if row.beside:
        both = mamba2_fields(keys) | {"mixer": "attention_mamba2"}
        layers = tuple(replace(layer, **(both | {"rope": layer.rope})) for layer in layers)
    if row.single_part:
        return single_parts(keys, layers, has_attention)
    if not row.mamba2 or all(has_attention):
        return layers
    mamba2 = mamba2_fields(keys)
    return tuple(
        layer if attends else replace(layer, **mamba2) for layer, attends in zip(layers, has_attention, strict=False)
    )


def _slopes(keys: Keys, row: Architecture, n_heads: int) -> tuple[float, ...]:
    """ALiBi's slope of each head, whose smallest is 2 to the power of minus the largest bias; empty without biases."""
    if MAX_ALIBI_BIAS not in row.keys:
        return alibi_slopes(n_heads, row.alibi) if row.alibi else ()
    largest = keys.number(MAX_ALIBI_BIAS, most=MOST_BIAS)
    if largest == 0:
        keys.wrong(MAX_ALIBI_BIAS, "a number above 0: models without ALiBi are not supported for this architecture")
    return alibi_slopes(n_heads, largest) if largest else ()


def _xielu(keys: Keys, n_layers: int) -> dict[str, float]:
    """The learned numbers of each layer's activation. The other two must be those that the engine computes with."""
    found: dict[str, float] = {}
    for name, usual in (("alpha_p", None), ("alpha_n", None), *XIELU_NUMBERS.items()):
        key = f"xielu.{name}"
        value = keys.value(key)
        numbers = value if isinstance(value, list) else [value] * n_layers
        is_right = len(numbers) == n_layers and all(type(n) in (int, float) and abs(n) < 3e38 for n in numbers)
        if not is_right:
            keys.wrong(key, f"a number for each of {n_layers} layers")
        elif usual is not None and not all(math.isclose(number, usual, rel_tol=0.01) for number in numbers):
            keys.wrong(key, f"{usual:g} in all layers")
        elif usual is None:
            found |= {f"layers.{layer}.ffn_{name}.weight": float(number) for layer, number in enumerate(numbers)}
    return found


def _activation(keys: Keys, row: Architecture) -> str:
    """The activation, which only some architectures have a key for."""
    name = keys.text("hidden_activation") if "hidden_activation" in row.keys else None
    if name is None:
        return row.activation
    if name not in HIDDEN_ACTIVATIONS:
        raise UnsupportedError(f"hidden_activation is {name!r:.40}; supported are {', '.join(HIDDEN_ACTIVATIONS)}")
    return HIDDEN_ACTIVATIONS[name]


def _with_delta_nets(keys: Keys, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """The layers with a gated delta net where the file has one, and a gate in the others' attention."""
    fields = state_fields(keys)
    every, listed = keys.size("full_attention_interval"), keys.value("attention.recurrent_layers")
    is_recurrent = [(layer + 1) % every != 0 for layer in range(len(layers))] if listed is None else listed
    if not isinstance(is_recurrent, list) or len(is_recurrent) < len(layers):
        keys.wrong("attention.recurrent_layers", f"a boolean for each of {len(layers)} layers")
        return layers
    delta_net: dict[str, Any] = {"mixer": "delta_net", "rope": -1}
    return tuple(
        replace(layer, **delta_net, **fields) if recurrent else replace(layer, output_gate="element")
        for layer, recurrent in zip(layers, is_recurrent, strict=False)
    )


def _with_short_convs(
    keys: Keys, layers: tuple[LayerConfig, ...], has_attention: list[bool], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[LayerConfig, ...]:
    """The layers, with short convolutions where the file has them, and gates for the heads of the others."""
    conv: dict[str, Any] = {
        "mixer": "short_conv",
        "rope": -1,
        "window": 0,
        "conv_width": keys.size("shortconv.l_cache"),
    }
    if conv["conv_width"] < 2 and not all(has_attention):
        keys.wrong("shortconv.l_cache", "2 or more: a convolution of one position would keep no state")
    gated = [{"output_gate": "head"} if f"blk.{i}.attn_gate.weight" in shapes else {} for i in range(len(layers))]
    return tuple(
        replace(layer, **(gate if attends else conv))
        for layer, gate, attends in zip(layers, gated, has_attention, strict=False)
    )
