"""GGUF metadata of a model's graph, and the reasons why llama.cpp cannot load it or computes it differently."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from llamac.errors import UnsupportedError
from llamac.export.checkpoint import Checkpoint, ModelConfig
from llamac.export.delta_net import UNIT_EPS
from llamac.export.distances import BIASES, largest_bias
from llamac.export.gguf import gemma4, latent
from llamac.export.gguf.architecture import MAX_ALIBI_BIAS
from llamac.export.gguf.config import XIELU_NUMBERS
from llamac.export.gguf.families import FUSED, IS_ROTATED, QUERY_BETA, QUERY_CONTEXT, STATE_FIELDS, Architecture
from llamac.export.latent import NORM_EPS

Value = int | float | str | bool | list[int] | list[bool] | list[float]
ORIGINAL = "rope.scaling.original_context_length"
RECURRENT = "attention.recurrent_layers"
DENSE_BLOCKS = "leading_dense_block_count"
STEP = "interleave_moe_layer_step"
GATING = {"softmax": 1, "sigmoid": 2}  # llama.cpp's numbers for how a router's logits become scores
OF_HEADS = ("attention.head_count_kv", "attention.key_length", "attention.value_length")
QKV = ("attn_q", "attn_k", "attn_v")


def add_keys(writer: Any, keys: Mapping[str, Any]) -> None:
    """Add metadata to a `gguf.GGUFWriter` with the types that llama.cpp's converter uses."""
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in keys.items():
        adders.get(type(value), writer.add_array)(key, value)


def describe(checkpoint: Checkpoint, row: Architecture) -> dict[str, Value]:
    """The architecture's keys, except RoPE's."""
    config = checkpoint.config
    layers = config.all_layers
    keys: dict[str, Value] = {
        "context_length": config.context,
        "embedding_length": config.dim,
        "block_count": len(layers),
        "feed_forward_length": _widths(config, row),
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        f"attention.layer_norm_{'rms_' if config.norm == 'rms' else ''}epsilon": config.norm_eps,
        "vocab_size": config.vocab_size,
    }
    if config.layers[0].query_beta:
        key = QUERY_CONTEXT if QUERY_CONTEXT in row.keys else ORIGINAL
        keys |= {QUERY_BETA: config.layers[0].query_beta, key: config.layers[0].query_context}
    if config.mtp is not None:
        keys["nextn_predict_layers"] = 1
    keys |= _state_keys(config, row)
    if row.only_mamba2:
        return {key: value for key, value in keys.items() if key not in OF_HEADS} | {"attention.head_count": 0}
    if row.single_part:
        keys |= {"attention.layer_norm_epsilon": config.norm_eps, IS_ROTATED: False}
    if row.latent:
        keys |= latent.latent_keys(config, row)
    if row.activation == "xielu":
        keys |= _xielu(checkpoint)
    if MAX_ALIBI_BIAS in row.keys and BIASES in checkpoint.tensors:
        keys[MAX_ALIBI_BIAS] = largest_bias(checkpoint.tensors[BIASES], config.n_heads)
    optional = _optional_keys(config, row) | _expert_keys(config, row)
    keys |= {key: value for key, value in optional.items() if key in row.keys}
    return keys | (gemma4.varied_keys(config) if row.varied else _windows(config, row))


def _widths(config: ModelConfig, row: Architecture) -> int | list[int]:
    """The width of the layers' networks: one number, or one for each layer."""
    widths = [layer.ffn_dim for layer in config.all_layers]
    if DENSE_BLOCKS in row.keys or STEP in row.keys:  # another key has the width of layers with experts
        widths = [layer.ffn_dim for layer in config.all_layers if layer.ffn != "experts"] or widths
    if row.single_part:
        widths = [layer.ffn_dim if layer.mixer == "none" else 0 for layer in config.all_layers]
    return widths[0] if len(set(widths)) == 1 else widths


def _optional_keys(config: ModelConfig, row: Architecture) -> dict[str, Value]:
    """Keys that only some architectures have."""
    keys: dict[str, Value] = {
        "attention.scale": config.attention_scale,
        "embedding_scale": config.embedding_scale,
        "residual_scale": config.residual_scale,
        "logit_scale": config.logit_scale if row.multiplies_logits else 1 / config.logit_scale,
        "attn_logit_softcapping": config.attention_soft_cap,
        "use_parallel_residual": config.layers[0].placement == "parallel",
        IS_ROTATED: any(layer.rope >= 0 for layer in config.layers),
    }
    if config.logit_soft_cap or "attn_logit_softcapping" in row.keys:
        keys["final_logit_softcapping"] = config.logit_soft_cap
    if row.short_conv:
        keys["shortconv.l_cache"] = max(layer.conv_width for layer in config.layers)
    return keys


def _expert_keys(config: ModelConfig, row: Architecture) -> dict[str, Value]:
    """The keys of models with experts. Each architecture has only some of them."""
    expert = next((layer for layer in config.layers if layer.ffn == "experts"), None)
    if expert is None:
        return {}
    keys: dict[str, Value] = {
        "expert_count": expert.n_experts,
        "expert_used_count": expert.n_experts_used,
        "expert_feed_forward_length": expert.ffn_dim,
        "expert_shared_feed_forward_length": expert.shared_ffn_dim,
        "expert_gating_func": GATING[expert.router],
        DENSE_BLOCKS: 0 if row.single_part else _dense_blocks(config),
        STEP: _step(config, row),
        "expert_weights_scale": expert.expert_scale,
        "expert_shared_count": 1 if row.single_part else expert.shared_ffn_dim // expert.ffn_dim,
        "expert_group_count": expert.n_expert_groups or 1,
        "expert_group_used_count": expert.n_expert_groups_used or 1,
    }
    if "expert_weights_scale" in row.keys:  # other architectures have one rule for all models
        keys["expert_weights_norm"] = bool(expert.expert_weights)
    return keys


def _state_keys(config: ModelConfig, row: Architecture) -> dict[str, Value]:
    """The keys of recurrent layers: the sizes of their states, and which layers they are."""
    keys: dict[str, Value] = {}
    recurrent = next((layer for layer in config.all_layers if layer.state_heads), None)
    if recurrent is not None:
        keys |= {key: getattr(recurrent, field) for key, field in STATE_FIELDS.items()}
        keys["ssm.inner_size"] = recurrent.state_heads * recurrent.state_value_dim
    if row.delta_net:
        keys |= _recurrent_layers(config)
    elif row.is_recurrent and not row.beside:
        attends = [layer.mixer == "attention" for layer in config.all_layers]
        keys["attention.head_count_kv"] = [config.n_kv_heads * one for one in attends]
    return keys


def is_xielu(name: str) -> bool:
    """Whether a tensor is a number of a layer's activation, which is metadata in GGUF."""
    return name.endswith((".ffn_alpha_p.weight", ".ffn_alpha_n.weight"))


def _xielu(checkpoint: Checkpoint) -> dict[str, Value]:
    """The numbers of each layer's activation."""
    n_layers = len(checkpoint.config.layers)
    found: dict[str, Value] = {f"xielu.{name}": [number] * n_layers for name, number in XIELU_NUMBERS.items()}
    for name in ("alpha_p", "alpha_n"):
        tensors = [checkpoint.tensors.get(f"layers.{layer}.ffn_{name}.weight") for layer in range(n_layers)]
        found[f"xielu.{name}"] = [float(tensor.array()[0]) for tensor in tensors if tensor is not None]
    return found


def _recurrent_layers(config: ModelConfig) -> dict[str, Value]:
    """Which layers have a delta net: a list, and, for older versions of llama.cpp, an interval if they have one."""
    keys: dict[str, Value] = {RECURRENT: [layer.mixer == "delta_net" for layer in config.all_layers]}
    listed = [layer.mixer == "delta_net" for layer in config.layers]
    for every in range(1, len(listed) + 2):
        if listed == [(layer + 1) % every != 0 for layer in range(len(listed))]:
            return {**keys, "full_attention_interval": every}
    return keys


def _dense_blocks(config: ModelConfig) -> int:
    """The number of layers before the first with experts."""
    return next((i for i, layer in enumerate(config.layers) if layer.ffn == "experts"), len(config.layers))


def _step(config: ModelConfig, row: Architecture) -> int:
    """The n for which every n-th layer after the leading dense ones has experts; 0: there is none."""
    has_experts = [layer.ffn == "experts" for layer in config.layers]
    first = _dense_blocks(config) if DENSE_BLOCKS in row.keys else 0
    steps = range(1, len(has_experts) + 1)
    expected = {step: [i >= first and (i + 1) % step == 0 for i in range(len(has_experts))] for step in steps}
    return next((step for step in steps if expected[step] == has_experts), 0)


def _windows(config: ModelConfig, row: Architecture) -> dict[str, Value]:
    """The sliding window and the layers that have it, in the reader's form; empty without a window."""
    windows = [layer.window for layer in config.layers]
    if not any(windows) or "attention.sliding_window" not in row.keys:
        return {}
    keys: dict[str, Value] = {"attention.sliding_window": max(windows)}
    has_window = [window > 0 for window in windows]
    for every in (row.window_every, *range(len(windows) + 1)):
        if has_window == [not every or (layer + 1) % every != 0 for layer in range(len(windows))]:
            return keys if every == row.window_every else {**keys, "attention.sliding_window_pattern": every}
    return {**keys, "attention.sliding_window_pattern": has_window}


def check_family(checkpoint: Checkpoint, row: Architecture) -> None:
    """Check that the config fits the architecture that the metadata names.

    Raises:
        UnsupportedError: If it does not.
    """
    name = checkpoint.metadata["architecture"]
    for field in ("norm", "position"):
        ours, expected = getattr(checkpoint.config, field), getattr(row, field)
        if ours != expected:
            raise UnsupportedError(
                f"the model's metadata say that its architecture is {name!r}, but its config has {field} {ours!r},"
                f" expected {expected!r}"
            )


def obstacles(checkpoint: Checkpoint, row: Architecture) -> Iterator[str]:
    """Yield the reasons why llama.cpp cannot load or compute the model, although llamac's importer can."""
    config = checkpoint.config
    width = config.n_heads * config.head_dim
    if row.square and width != config.dim:
        yield f"all heads together must be as wide as the model ({config.dim}), but are {width}"
    if row.all_heads and config.n_kv_heads != config.n_heads:
        yield f"n_kv_heads must equal n_heads ({config.n_heads}), but is {config.n_kv_heads}"
    if row.output == "never" and not config.tied_output:
        yield "the output matrix must be the token embedding, but differs from it"
    has_experts = [layer.ffn == "experts" for layer in config.layers if layer.ffn != "none"]
    n_dense = _dense_blocks(config) if DENSE_BLOCKS in row.keys and not row.single_part else 0
    is_regular = STEP in row.keys and DENSE_BLOCKS not in row.keys and _step(config, row) > 0
    if any(has_experts) and not all(has_experts[n_dense:]) and not is_regular:
        where = f" after the first {n_dense}" if n_dense else ""
        yield f"either all layers{where} or none must have experts"
    if "attn_logit_softcapping" in row.keys and not (config.attention_soft_cap and config.logit_soft_cap):
        yield "attention scores and logits must both have a soft cap"
    if row.keys.get("attention.sliding_window") and not any(layer.window for layer in config.layers):
        yield "some layers must have a sliding window"
    if row.needs_shared and not all(layer.shared_ffn_dim for layer in config.all_layers if layer.n_experts):
        yield "layers with experts must have a shared one"
    if config.expert_dim:
        yield f"experts that read a latent (expert_dim {config.expert_dim}) are not written"
    if row.latent:
        yield from latent.obstacles(config, row)
    yield from _state_obstacles(config, row)
    if row.varied:
        yield from gemma4.obstacles(config)
    has_window = any(layer.window for layer in config.layers)
    if row.window_depth and has_window and len(config.layers) != row.window_depth:
        yield f"llama.cpp has sliding windows only in models of {row.window_depth} layers"
    yield from _biases(checkpoint, row)


def _state_obstacles(config: ModelConfig, row: Architecture) -> Iterator[str]:
    """Yield the reasons why llama.cpp cannot compute gated delta nets."""
    if not row.delta_net:
        return
    if row.shared_expert and not any(layer.n_experts for layer in config.layers):
        yield "layers must have experts"
    for layer in config.layers:
        if layer.state_value_dim != layer.state_key_dim:
            ours, needed = layer.state_value_dim, layer.state_key_dim
            yield f"heads of v in a delta net must be as wide as those of k ({needed}), but have {ours} dimensions"
            return


def _biases(checkpoint: Checkpoint, row: Architecture) -> Iterator[str]:
    names = {name for name in checkpoint.tensors if name.endswith(".weight") and _takes_bias(name)}
    with_bias = {name for name in names if f"{name.removesuffix('weight')}bias" in checkpoint.tensors}
    if row.biases == "all" and (missing := sorted(names - with_bias)):
        yield f"all matrices of a layer must have a bias, but {missing[0]} has none"
    allowed: dict[str, tuple[str, ...]] = {"qkv": (*QKV, "mamba_conv"), "none": ()}
    if row.biases in allowed:
        surplus = sorted(name for name in with_bias if name.split(".")[-2] not in allowed[row.biases])
        if surplus:
            which = "only q, k and v" if row.biases == "qkv" else "no matrices"
            yield f"{which} can have a bias, but {surplus[0]} has one"
    for name in sorted(with_bias):  # modules of a fused tensor have biases together or not at all
        *layer, module, _ = name.split(".")
        for whole in row.fused:
            if module in FUSED.get(whole, ()):
                missing = [part for part in FUSED[whole] if ".".join([*layer, part, "weight"]) not in with_bias]
                if missing and ".".join([*layer, missing[0], "weight"]) in names:
                    yield f"{name} has a bias, so {missing[0]} of the same layer must also have one"


def _takes_bias(name: str) -> bool:
    """Whether it is a matrix of a layer, except experts and routers."""
    parts = name.split(".")
    return (
        len(parts) == 4
        and parts[0] == "layers"
        and "norm" not in parts[2]
        and parts[2] not in ("ffn_router", "attn_sinks", "shared_gate")
    )


def warnings_of(checkpoint: Checkpoint, row: Architecture) -> Iterator[str]:
    """Yield warnings about results that differ in llama.cpp."""
    windows: list[Any] = [layer.window for layer in checkpoint.config.layers if layer.window]
    if row.ignores_window and windows and max(windows) < checkpoint.config.context:
        yield (
            f"llama.cpp has no sliding window for models of this architecture: beyond {max(windows)} tokens it"
            " computes something else"
        )
    if row.delta_net and not math.isclose(checkpoint.config.norm_eps, UNIT_EPS, rel_tol=1e-3):
        yield (
            f"llama.cpp normalizes q and k of delta nets with the model's norm_eps ({checkpoint.config.norm_eps:g}), "
            f"not with {UNIT_EPS:g}: logits differ slightly"
        )
    if row.latent and not math.isclose(checkpoint.config.norm_eps, NORM_EPS, rel_tol=1e-3):
        yield (
            f"llama.cpp normalizes latents with the model's norm_eps ({checkpoint.config.norm_eps:g}), not with"
            f" {NORM_EPS:g}: logits differ slightly"
        )
    if row.activation == "gelu_erf":
        title = {"gpt_neox": "GPT-NeoX"}.get(row.family, row.family.upper())
        yield f"llama.cpp computes the GELU of {title} with its tanh form: logits differ slightly"
