"""The equations of Mamba 2 in NumPy and float64: a layer that mixes positions with a state of fixed size.

Dao and Gu, "Transformers are SSMs" (arXiv:2405.21060), section 7, as Granite 4, Nemotron-H and Falcon-H1 have it:

    z, xBC, dt = Win h;  x, B, C = silu(convolution(xBC) + bias);  step = softplus(dt + b), between the limits
    S = exp(decay step) S + B (step x)^T,  y = S^T C + skip x                    token by token
    out = Wout norm(y silu(z)), or Wout (norm(y) silu(z)), or without a norm

Shapes: the n rows are the tokens of one sequence, in order; the state S of a head is (state_dim, head_dim). The caller
applies the matrices, the convolution and the softplus (`delta_net`).
"""

from __future__ import annotations

import numpy as np

from llamac.export.equations import rms_norm, silu
from llamac.export.rounding import Array


def ssm_scan(x: Array, b: Array, c: Array, steps: Array, decay: Array, skip: Array) -> Array:
    """y of each token: (n, heads, head_dim).

    "Transformers are SSMs", equation 1, with a scalar decay per head. Groups of heads share B and C.

    Args:
        x: Shape (n, heads, head_dim).
        b: Shape (n, groups, state_dim), like c.
        c: See `b`.
        steps: Shape (n, heads).
        decay: The negative rates at which the states decay: (heads).
        skip: Shape (heads).
    """
    b, c = (np.repeat(part, x.shape[1] // part.shape[1], axis=1) for part in (b, c))
    state = np.zeros((*b.shape[1:], x.shape[-1]))
    y = np.empty_like(x)
    for row in range(len(x)):
        state *= np.exp(decay * steps[row])[:, None, None]
        state += np.einsum("hn,hp->hnp", b[row], steps[row, :, None] * x[row])
        y[row] = np.einsum("hnp,hn->hp", state, c[row]) + skip[:, None] * x[row]
    return y


def mamba2_norm(y: Array, z: Array, weight: Array | None, groups: int, eps: float, is_before: bool) -> Array:
    """The gated result, normed in groups: (n, width). y and z (n, width), weight (width) or None for no norm.

    is_before: The norm precedes the gate.
    """
    if weight is None:
        return y * silu(z)
    gated = y if is_before else y * silu(z)
    normed = rms_norm(gated.reshape(len(y), groups, -1), weight.reshape(groups, -1), eps).reshape(y.shape)
    return normed * silu(z) if is_before else normed
