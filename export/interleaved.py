"""The order of rows in a tensor that holds several matrices, head by head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llamac.export.checkpoint import LayerConfig, ModelConfig


def interleaved_rows(kind: str, n_parts: int, model: ModelConfig, layer: LayerConfig, n_rows: int) -> NDArray[np.intp]:
    """The numbers of the stored rows in the order of the matrices, one matrix after the other.

    Args:
        kind: What the rows of one head are: "heads": the rows of each matrix for a head of attention; "groups": those
            of all heads of q with one KV head, and of this; "qkvz" and "ba": those of q, k, v and z, or of beta and a,
            for a key head of a delta net; "four_blocks": of a fourth of each matrix.
        n_parts: The number of matrices of "heads" and "four_blocks".
        model: The model.
        layer: The layer.
        n_rows: The number of rows of the tensor.
    """
    ratio = layer.state_heads // (layer.state_key_heads or 1)
    values = ratio * layer.state_value_dim
    head = layer.head_dim or model.head_dim
    widths = {
        "heads": (head,) * n_parts,
        "groups": (model.n_heads // model.n_kv_heads * head, head, head),
        "qkvz": (layer.state_key_dim, layer.state_key_dim, values, values),
        "ba": (ratio, ratio),
        "four_blocks": (n_rows // (4 * n_parts),) * n_parts,
    }[kind]
    heads = np.arange(n_rows).reshape(-1, sum(widths))
    return np.concatenate([part.reshape(-1) for part in np.split(heads, np.cumsum(widths)[:-1], axis=1)])
