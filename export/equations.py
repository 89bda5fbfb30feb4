"""The equations of the forward pass in NumPy and float64, one short function each, as the papers write them.

They do not use the C core, and every one is exact to about 1e-15. `reference` computes a model with them.

Shapes: the n rows are tokens; d is head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from llamac.arguments import KVDtype
from llamac.export.rounding import Array, round_numerators


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis. x (n, dim), weight (dim).

    Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467), equation 4; eps as in LLaMA.
    """
    root: Array = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return x / root * weight


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis. x (n, dim), weight and bias (dim).

    Ba, Kiros and Hinton, "Layer Normalization" (arXiv:1607.06450), equation 4; the variance is the biased one.
    """
    centered: Array = x - np.mean(x, axis=-1, keepdims=True)
    deviation: Array = np.sqrt(np.mean(centered * centered, axis=-1, keepdims=True) + eps)
    return centered / deviation * weight + bias


def rope_angles(positions: NDArray[np.int64], inv_freq: Array) -> Array:
    """Angles m * theta_j, (n, rope_dim / 2). positions (n), inv_freq (rope_dim / 2).

    Su et al., "RoFormer" (arXiv:2104.09864), equation 15. The product is rounded to float32: models are trained and run
    with rounded angles, which at large positions differ noticeably from the exact ones.
    """
    product = positions.astype(np.float32)[:, None] * inv_freq.astype(np.float32)
    return product.astype(np.float64)


def rotate(x: Array, angles: Array, factor: float) -> Array:
    """Rotate the pairs (j, j + r/2) of the first r dimensions of every head. x (n, heads, d), angles (n, r/2).

    RoFormer, equation 34, with pairs in halves. `factor` multiplies cosines and sines (YaRN, arXiv:2309.00071, section
    3.4: the square root of the attention temperature). Dimensions from r on are unchanged.
    """
    half = angles.shape[1]
    cos, sin = factor * np.cos(angles)[:, None, :], factor * np.sin(angles)[:, None, :]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin, rest), axis=-1)


def softmax(scores: Array) -> Array:
    """exp(s) / sum(exp(s)) over the last axis, shifted by the maximum to avoid overflow."""
    powers: Array = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
    total: Array = np.sum(powers, axis=-1, keepdims=True)
    return powers / total


def soft_cap(x: Array, cap: float) -> Array:
    """cap tanh(x / cap), between -cap and cap; x itself for cap 0.

    Gemma Team, "Gemma 2" (arXiv:2408.00118), section 2.
    """
    return cap * np.tanh(x / cap) if cap > 0 else x


def attention_scores(
    q: Array,
    k: Array,
    scale: float,
    window: int,
    cap: float = 0.0,
    two_sided: bool = False,
    biases: Array | None = None,
    chunks: bool = False,
) -> Array:
    """scale q k, capped, and -inf at masked positions: (n, heads, n). q (n, heads, d), k (n, kv_heads, d).

    Vaswani et al., "Attention Is All You Need" (arXiv:1706.03762), equation 1, with the causal mask. Groups of query
    heads share a key head: Ainslie et al., "GQA" (arXiv:2305.13245), section 2.2. A row sees the last `window`
    positions including itself (Beltagy et al., "Longformer", arXiv:2004.05150), or all earlier ones for window 0.
    two_sided: as many later positions, or all (Devlin et al., "BERT", arXiv:1810.04805). biases (heads * (2 f + 1)) are
    added before the cap, for distances -f to f; larger ones have the bias of the largest (Raffel et al., "T5",
    arXiv:1910.10683, section 2.1). chunks: the window begins at a multiple of its width (Meta, "Llama 4").
    """
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    i, j = np.arange(len(q))[:, None], np.arange(len(k))[None, :]
    scores = scale * np.einsum("ihd,jhd->ihj", q, k, optimize=True)
    if biases is not None:
        biases = biases.reshape(q.shape[1], -1)
        farthest = biases.shape[1] // 2
        scores = scores + biases[:, np.clip(j - i, -farthest, farthest) + farthest].transpose(1, 0, 2)
    scores = soft_cap(scores, cap)
    near = i // window == j // window if chunks else (window == 0) | (abs(i - j) < window)
    visible = (two_sided | (j <= i)) & near
    return np.where(visible[:, None, :], scores, -np.inf)


def attention_weights(scores: Array, sinks: Array | None = None) -> Array:
    """softmax(scores): (n, heads, n). scores (n, heads, n), sinks (heads).

    A sink is one more logit of its head, without a value: OpenAI, "gpt-oss model card" (arXiv:2508.10925), section 2.2.
    """
    if sinks is None:
        return softmax(scores)
    sink = np.tile(sinks[None, :, None], (len(scores), 1, 1))
    return softmax(np.concatenate((scores, sink), axis=2))[..., : scores.shape[2]]


def attention_mix(
    scores: Array,
    v: Array,
    sinks: Array | None = None,
    kv_dtype: KVDtype | None = None,
    positions: NDArray[np.int64] | None = None,
) -> Array:
    """softmax(scores) v: (n, heads, d). scores (n, heads, n), v (n, kv_heads, d), sinks (heads).

    "Attention Is All You Need", equation 1. With kv_dtype "q8" the softmax is rounded; see `round_numerators`.
    """
    weights = attention_weights(scores, sinks)
    if kv_dtype == "q8":
        weights = round_numerators(weights, v, positions)
    mix: Array = np.einsum("ihj,jhd->ihd", weights, np.repeat(v, scores.shape[1] // v.shape[1], axis=1), optimize=True)
    return mix


def query_scale(positions: NDArray[np.int64], beta: float, context: int, offset: int = 0) -> Array:
    """1 + beta log(1 + floor((position + offset) / context)), (n); ones for beta 0.

    Meta, "Llama 4": the temperature of attention at large positions, which Ministral 3 has too.
    """
    return 1 + beta * np.log1p((positions + offset) // context) if beta else np.ones(len(positions))


def expert_weights(
    logits: Array,
    n_used: int,
    normalized: bool,
    *,
    router: str = "softmax",
    choice_bias: Array | None = None,
    groups: tuple[int, int] = (0, 0),
    eps: float = 0.0,
    scale: float = 1.0,
) -> Array:
    """The weight of each expert, 0 for unused ones: (n, experts).

    Shazeer et al., "Outrageously Large Neural Networks" (arXiv:1701.06538), section 2.1: the n_used largest
    probabilities, the lower index among equals; normalized: divided by their sum (Jiang et al., "Mixtral of Experts",
    arXiv:2401.04088, section 2.1). Sigmoids, the bias for the choice, groups and the scale: DeepSeek-AI, "DeepSeek-V3"
    (arXiv:2412.19437), section 2.1.2.

    Args:
        logits: The router's output, (n, experts).
        n_used: The number of experts of a row.
        normalized: Whether the weights are divided by their sum, to which `eps` is added.
        router: "softmax" or "sigmoid", which turns logits into scores.
        choice_bias: Is added to the scores for the choice only: (experts).
        groups: The number of groups, and how many of them experts are chosen from; (0, 0): there are no groups.
        eps: See `normalized`.
        scale: Multiplies the weights.
    """
    weights = sigmoid(logits) if router == "sigmoid" else softmax(logits)
    used = chosen_experts(logits, n_used, router=router, choice_bias=choice_bias, groups=groups)
    weights = np.where(used, weights, 0.0)
    total: Array = weights.sum(axis=1, keepdims=True) + eps
    return scale * (weights / total if normalized else weights)


def chosen_experts(
    logits: Array | NDArray[np.float32],
    n_used: int,
    *,
    router: str = "softmax",
    choice_bias: Array | NDArray[np.float32] | None = None,
    groups: tuple[int, int] = (0, 0),
) -> NDArray[np.bool_]:
    """Which experts each row uses: (n, experts). Arguments as for `expert_weights`."""
    exact = logits.astype(np.float64)
    ranks = (sigmoid(exact) if router == "sigmoid" else softmax(exact)) + (0.0 if choice_bias is None else choice_bias)
    if router == "sigmoid" and choice_bias is None and not groups[0]:
        ranks = exact  # the same order; sigmoids of large logits are rounded to 1
    if groups[0]:
        best = np.sort(ranks.reshape(len(ranks), groups[0], -1), axis=2)[..., ::-1]
        of_groups = best[..., :2].sum(axis=2) if router == "sigmoid" else best[..., 0]
        excluded = ~np.repeat(largest(of_groups, groups[1]), ranks.shape[1] // groups[0], axis=1)
        ranks = np.where(excluded, -np.inf, ranks)
    return largest(ranks, n_used)


def largest(ranks: Array, count: int) -> NDArray[np.bool_]:
    """Which `count` numbers of each row are the largest, the lower index among equals. ranks (n, columns)."""
    chosen = np.zeros(ranks.shape, bool)
    np.put_along_axis(chosen, np.argsort(-ranks, axis=1, kind="stable")[:, :count], values=True, axis=1)
    return chosen


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x))."""
    with np.errstate(over="ignore"):  # exp(-x) = inf gives the right limit, 0
        return 1.0 / (1.0 + np.exp(-x))


def silu(x: Array) -> Array:
    """x sigmoid(x). Hendrycks and Gimpel, "Gaussian Error Linear Units" (arXiv:1606.08415), section 2."""
    return x * sigmoid(x)


def quick_gelu(x: Array) -> Array:
    """x sigmoid(1.702 x), the sigmoid approximation of GELU (arXiv:1606.08415, section 2)."""
    return x * sigmoid(1.702 * x)


def gelu_tanh(x: Array) -> Array:
    """The tanh approximation of GELU (arXiv:1606.08415, section 2), as in GPT-2."""
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def gelu_erf(x: Array) -> Array:
    """x Phi(x) with the exact normal distribution function (arXiv:1606.08415, section 2)."""
    erf = np.array(np.frompyfunc(math.erf, 1, 1)(x / math.sqrt(2.0)), np.float64)
    return 0.5 * x * (1.0 + erf)


def relu(x: Array) -> Array:
    """max(x, 0)."""
    return np.maximum(x, 0.0)


def relu2(x: Array) -> Array:
    """max(0, x)^2. So et al., "Primer" (arXiv:2109.08668), section 2."""
    return np.maximum(x, 0.0) ** 2


XIELU = "xielu"  # the activation that is not a function of x alone


def xielu(x: Array, alpha_p: Array, alpha_n: Array) -> Array:
    """xIELU with two learned numbers, and beta 0.5. Huang and Schlag (arXiv:2411.13010), section 3.

    transformers adds a guard to the second case, which changes it by at most 1e-6 alpha_n.
    """
    p, n, below = np.logaddexp(alpha_p, 0), 0.5 + np.logaddexp(alpha_n, 0), np.minimum(x, 0)
    return 0.5 * x + np.where(x > 0, p * x * x, n * (np.expm1(below) - below))


ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": silu,
    "gelu_tanh": gelu_tanh,
    "gelu_erf": gelu_erf,
    "relu": relu,
    "relu2": relu2,
    "quick_gelu": quick_gelu,
}
