"""MTP layers of checkpoints compute what the published code does: the equations in float64, by the published names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf_mtp_samples import write_with_mtp
from gguf_samples import checkpoint_tensors
from mtp_models import hidden_of, mtp_logits
from test_mtp_layers import with_mtp_layer

import llamac
from golden.tiny_checkpoints import Config
from llamac.export.convert import export
from llamac.export.rounding import Array

Weights = dict[str, Array]


def norm(x: Array, weight: Array, eps: float) -> Array:
    scale: Array = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    return x * scale * weight


def linear(x: Array, weights: Weights, name: str) -> Array:
    found: Array = x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", np.zeros(1))
    return found


def softmax(x: Array) -> Array:
    powers: Array = np.exp(x - x.max(axis=-1, keepdims=True))
    found: Array = powers / powers.sum(axis=-1, keepdims=True)
    return found


def gated(x: Array, weights: Weights, prefix: str) -> Array:
    on = linear(x, weights, f"{prefix}gate_proj")
    return linear(on / (1 + np.exp(-on)) * linear(x, weights, f"{prefix}up_proj"), weights, f"{prefix}down_proj")


def rotated(x: Array, base: float, *, neighbors: bool) -> Array:
    """RoPE of (positions, heads, width), of pairs of neighbors or of halves."""
    n, _, width = x.shape
    angles = np.arange(n)[:, None] * base ** (-np.arange(0, width, 2) / width)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    one, other = (x[..., ::2], x[..., 1::2]) if neighbors else np.split(x, 2, axis=-1)
    parts = one * cos - other * sin, other * cos + one * sin
    return np.stack(parts, axis=-1).reshape(x.shape) if neighbors else np.concatenate(parts, axis=-1)


def attention(x: Array, weights: Weights, prefix: str, config: Config, *, window: int, neighbors: bool) -> Array:
    """Attention with RoPE, and with norms of heads if there are tensors of them."""
    heads, kv_heads, n = config["num_attention_heads"], config["num_key_value_heads"], len(x)

    def of_heads(name: str, count: int) -> Array:
        found = linear(x, weights, f"{prefix}{name}_proj").reshape(n, count, -1)
        weight = weights.get(f"{prefix}{name}_norm.weight")
        return found if weight is None else norm(found, weight, config["rms_norm_eps"])

    q, k = (
        rotated(of_heads(name, count), config["rope_theta"], neighbors=neighbors)
        for name, count in (("q", heads), ("k", kv_heads))
    )
    k, v = (np.repeat(part, heads // kv_heads, axis=1) for part in (k, of_heads("v", kv_heads)))
    distance = np.arange(n)[:, None] - np.arange(n)
    seen = (distance >= 0) & (distance < (window or n))
    scores = np.where(seen, np.einsum("ihd,jhd->hij", q, k) / np.sqrt(q.shape[-1]), -np.inf)
    mixed = np.einsum("hij,jhd->ihd", softmax(scores), v).reshape(n, -1)
    return linear(mixed, weights, f"{prefix}o_proj")


def exaone4_5(config: Config, weights: Weights, tokens: list[int], hidden: Array) -> tuple[Array, Array]:
    """(hidden states, logits) of EXAONE 4.5's layer: norms after attention and after the network, a window, RoPE."""
    eps, own = config["rms_norm_eps"], "mtp.layers.0."
    embedding = weights["model.embed_tokens.weight"][tokens]
    pair = norm(embedding, weights["mtp.pre_fc_norm_embedding.weight"], eps)
    pair = np.hstack([pair, norm(hidden, weights["mtp.pre_fc_norm_hidden.weight"], eps)])
    x = pair @ weights["mtp.fc.weight"].T
    mixed = attention(x, weights, f"{own}self_attn.", config, window=config["sliding_window"], neighbors=False)
    x = x + norm(mixed, weights[f"{own}post_attention_layernorm.weight"], eps)
    x = x + norm(gated(x, weights, f"{own}mlp."), weights[f"{own}post_feedforward_layernorm.weight"], eps)
    x = norm(x, weights["mtp.norm.weight"], eps)
    return x, linear(x, weights, "lm_head")


def ernie(config: Config, weights: Weights, tokens: list[int], hidden: Array) -> tuple[Array, Array]:
    """(hidden states, logits) of ERNIE 4.5's layer: RoPE of neighbors, a dense network, the model's norm at the end."""
    eps, own = config["rms_norm_eps"], "model.mtp_block.0."
    embedding = weights["model.embed_tokens.weight"][tokens]
    pair = norm(embedding, weights["model.mtp_emb_norm.0.weight"], eps)
    pair = np.hstack([pair, norm(hidden, weights["model.mtp_hidden_norm.0.weight"], eps)])
    x = linear(pair, weights, "model.mtp_linear_proj.0")
    normed = norm(x, weights[f"{own}input_layernorm.weight"], eps)
    x = x + attention(normed, weights, f"{own}self_attn.", config, window=0, neighbors=True)
    x = x + gated(norm(x, weights[f"{own}post_attention_layernorm.weight"], eps), weights, f"{own}mlp.")
    x = norm(x, weights["model.norm.weight"], eps)
    return x, linear(x, weights, "lm_head")


Forward = Callable[[Config, Weights, list[int], Array], tuple[Array, Array]]


@pytest.mark.parametrize(
    ("family", "forward", "source"),
    [("exaone4", exaone4_5, "directory"), ("exaone4", exaone4_5, "gguf"), ("ernie4_5_moe", ernie, "directory")],
)
def test_the_layer_computes_what_the_published_code_does(
    family: str, forward: Forward, source: str, tmp_path: Path
) -> None:
    folder, _, _ = with_mtp_layer(tmp_path, family)
    config, weights = json.loads((folder / "config.json").read_text()), checkpoint_tensors(folder)
    path = folder if source == "directory" else write_with_mtp(tmp_path / "model.gguf", config, weights)
    export(path, tmp_path / "model.bin", probe_source=None)
    ids = [int(token) for token in np.random.default_rng(5).integers(3, config["vocab_size"], 25)]
    with llamac.load(tmp_path / "model.bin", kv_dtype="f32") as model:
        hidden = hidden_of(model, ids[:-1])
        found = mtp_logits(model, ids[1:], hidden, [24])
    exact = {name: values.astype(np.float64) for name, values in weights.items()}
    expected = forward(config, exact, ids[1:], hidden.astype(np.float64))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours[:, : theirs.shape[1]], theirs, rtol=2e-4, atol=2e-5 * np.abs(theirs).max())
