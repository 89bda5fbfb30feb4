"""The equations of the gated delta net in NumPy and float64: a layer that mixes positions with a state of fixed size.

Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (arXiv:2412.06464), in the form of Qwen3-Next and Qwen3.5:

    q, k, v = silu(convolution(Wqkv h)),  with q and k of length 1 in each head
    S = exp(decay softplus(Wa h + b)) S,  S = S + k (sigmoid(Wbeta h) (v - S^T k))^T,  o = S^T q    token by token
    out = Wout (norm(o) silu(Wz h))

Shapes: the n rows are the tokens of one sequence, in order; the state S of a head is (key_dim, value_dim). The caller
applies the matrices.
"""

from __future__ import annotations

import numpy as np

from llamac.export.equations import rms_norm, silu
from llamac.export.rounding import Array

UNIT_EPS = 1e-6  # is added to the sum of squares of a head of q or k


def convolution(x: Array, taps: Array) -> Array:
    """Each channel's weighted sum of its last `width` rows: (n, channels). x (n, channels), taps (channels, width).

    The last tap belongs to the row itself. Rows before the first are zeros.
    """
    width = taps.shape[1]
    padded = np.concatenate((np.zeros((width - 1, x.shape[1])), x))
    mixed: Array = np.sum([padded[tap : tap + len(x)] * taps[:, tap] for tap in range(width)], axis=0)
    return mixed


def unit(x: Array) -> Array:
    """x / |x| over the last axis."""
    length: Array = np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + UNIT_EPS)
    return x / length


def softplus(x: Array) -> Array:
    """log(1 + exp(x))."""
    logarithm: Array = np.logaddexp(0.0, x)
    return logarithm


def delta_rule(q: Array, k: Array, v: Array, beta: Array, decay: Array) -> Array:
    """What each token reads from the state: (n, heads, value_dim).

    "Gated Delta Networks", equation 10. Groups of heads of v share a head of q and k, as in grouped-query attention.

    Args:
        q: Shape (n, key_heads, key_dim), like k.
        k: Of length 1.
        v: Shape (n, heads, value_dim).
        beta: How much of the difference from v the state takes over: (n, heads).
        decay: The factor of the state: (n, heads).
    """
    q, k = (np.repeat(x, v.shape[1] // x.shape[1], axis=1) for x in (q * q.shape[-1] ** -0.5, k))
    state = np.zeros((*k.shape[1:], v.shape[-1]))
    read = np.empty_like(v)
    for row in range(len(v)):
        state *= decay[row, :, None, None]
        known = np.einsum("hkv,hk->hv", state, k[row])
        state += np.einsum("hk,hv->hkv", k[row], beta[row, :, None] * (v[row] - known))
        read[row] = np.einsum("hkv,hk->hv", state, q[row])
    return read


def gated_norm(x: Array, gate: Array, weight: Array, eps: float) -> Array:
    """norm(x) silu(gate) over the last axis. x and gate (n, heads, value_dim), weight (value_dim)."""
    return rms_norm(x, weight, eps) * silu(gate)
