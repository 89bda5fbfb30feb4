"""The matrices of multi-head latent attention, as checkpoints store them and as the engine multiplies them.

A checkpoint has one matrix `kv_b` that expands the latent to the unrotated part of each head's key and to its value:
(heads * (nope + value), rank), head by head. The engine has two: attn_k_b (heads * rank, nope), each head's part of the
key transposed, which it multiplies with q, and attn_v_b (heads * value, rank).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llamac.export.checkpoint import LazyTensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llamac.export.checkpoint import LayerConfig, ModelConfig


# Of the norms of the latents, in all families and as a float32: transformers uses its default, not rms_norm_eps.
NORM_EPS = float(np.float32(1e-6))


def rotated_width(model: ModelConfig, layer: LayerConfig) -> int:
    """The number of rotated dimensions of a head of q, and of the key that all heads share."""
    return (layer.head_dim or model.head_dim) - layer.kv_lora_rank


def rotated_first(width: int, rotated: int, n_rows: int, *, neighbors: bool) -> NDArray[np.intp]:
    """The numbers of the stored rows in the engine's order.

    Args:
        width: The rows of a head.
        rotated: How many rows of a head, the last ones in the checkpoint and the first ones in the engine, are rotated.
        n_rows: The rows of all heads.
        neighbors: The checkpoint's pairs are (2j, 2j + 1), not (j, j + rotated / 2).
    """
    turned = np.arange(rotated)
    if neighbors:
        turned = turned.reshape(-1, 2).T.reshape(-1)
    head = np.concatenate([width - rotated + turned, np.arange(width - rotated)])
    order: NDArray[np.intp] = (np.arange(0, n_rows, width)[:, None] + head).reshape(-1)
    return order


def split(kv_b: LazyTensor, heads: int, nope: int) -> tuple[LazyTensor, LazyTensor]:
    """attn_k_b and attn_v_b of a `kv_b`."""
    (n_rows, rank), width = kv_b.shape, kv_b.shape[0] // heads
    rows = np.arange(n_rows).reshape(heads, width)

    def read(first: int, last: int) -> NDArray[np.float32]:
        parts = []
        for head in range(first // rank, -(-last // rank)):
            part = kv_b.read(head * width, head * width + nope).T
            parts.append(part[max(first - head * rank, 0) : last - head * rank])
        return np.concatenate(parts)

    return LazyTensor((heads * rank, nope), kv_b.dtype, read), kv_b.in_order(rows[:, nope:].reshape(-1))


def together(k_b: LazyTensor, v_b: LazyTensor, heads: int) -> LazyTensor:
    """The inverse of `split`."""
    nope, rank, value = k_b.shape[1], v_b.shape[1], v_b.shape[0] // heads
    width = nope + value

    def read(first: int, last: int) -> NDArray[np.float32]:
        parts = []
        for head in range(first // width, -(-last // width)):
            keys = k_b.read(head * rank, (head + 1) * rank).T
            whole = np.concatenate([keys, v_b.read(head * value, (head + 1) * value)])
            parts.append(whole[max(first - head * width, 0) : last - head * width])
        return np.ascontiguousarray(np.concatenate(parts))

    return LazyTensor((heads * width, rank), k_b.dtype, read)
