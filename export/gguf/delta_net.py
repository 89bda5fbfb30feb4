"""Finds the tensors of recurrent layers, and of attention with a gate, in a GGUF file.

llama.cpp's converter keeps q and its gate in one tensor, head by head; for Qwen3-Next, also beta and a. For Qwen3.5 it
orders the heads of v so that head i reads key head i % key_heads. In llamac, head i reads key head
i // (heads / key_heads).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llamac.export.checkpoint import LayerConfig, LazyTensor
from llamac.export.gguf.families import gguf_name
from llamac.export.interleaved import interleaved_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llamac.export.gguf.config import GGUFConfig
    from llamac.export.gguf.file import Tensor

    Shape = tuple[int, ...]

# llama.cpp's tensors that hold two of ours, with the kind of their order.
TOGETHER = {
    "attn_q": ("heads", ("attn_q", "attn_gate")),
    "ssm_ba": ("ba", ("delta_beta", "delta_a")),
    "ssm_in": ("qkvz", ("delta_qkv", "delta_z")),  # early files of Qwen3-Next
}


@dataclass(frozen=True)
class Found:
    """A tensor of the file that holds one of ours.

    Attributes:
        tensor: The file's tensor, which must have the shape `whole`.
        rows: The numbers of its rows that are ours; None: all, in order.
        columns: The order of its columns; None: as they are.
        is_convolution: Ours is a vector of its columns, one after the other.
    """

    tensor: Tensor
    whole: Shape
    rows: NDArray[np.intp] | None = None
    columns: NDArray[np.intp] | None = None
    is_convolution: bool = False

    def lazy(self) -> LazyTensor:
        """Our tensor."""
        found = self.tensor.matrix() if len(self.whole) == 2 else self.tensor.vector()
        if self.rows is not None:
            found = found.in_order(self.rows)
        if self.columns is not None:
            found = found.with_columns(self.columns)
        return found.by_columns() if self.is_convolution else found


def find(name: str, shapes: Mapping[str, Shape], tensors: Mapping[str, Tensor], config: GGUFConfig) -> Found | None:
    """Find one of our tensors in a layer of these families. None: it is missing, or stored as in other families."""
    *prefix, module, kind = name.split(".")
    if not config.row.is_recurrent or len(prefix) != 2:
        return None
    layer = config.model.all_layers[int(prefix[1])]
    if name.endswith("conv_taps.weight") and (taps := tensors.get(gguf_name(name))) is not None:
        return Found(taps, (shapes[name][0] // layer.conv_width, layer.conv_width), is_convolution=True)
    if not config.row.delta_net:
        return None
    for stored, (order, parts) in TOGETHER.items():
        tensor = tensors.get(f"blk.{prefix[1]}.{stored}.{kind}")
        if module in parts and tensor is not None:
            sizes = [shapes[".".join([*prefix, part, kind])][0] for part in parts]
            ours = interleaved_rows(order, len(parts), config.model, layer, sum(sizes))
            first = sum(sizes[: parts.index(module)])
            return Found(tensor, (sum(sizes), *shapes[name][1:]), ours[first : first + sizes[parts.index(module)]])
    tensor = tensors.get(gguf_name(name, config.row))
    if not module.startswith("delta_") or tensor is None:
        return None
    whole = shapes[name]
    if module == "delta_conv":
        whole = (whole[0] // layer.conv_width, layer.conv_width)
    if not config.row.tiled:
        return Found(tensor, whole, is_convolution=module == "delta_conv")
    columns = _grouped(layer, whole[1]) if module == "delta_out" else None
    rows = None if module in ("delta_out", "delta_norm") else _grouped(layer, whole[0])
    return Found(tensor, whole, rows, columns, module == "delta_conv")


def _grouped(layer: LayerConfig, n: int) -> NDArray[np.intp]:
    """The numbers of n rows or columns in our order of v's heads, to which the last ones belong."""
    values = layer.state_heads * layer.state_value_dim
    width = 1 if n == layer.state_heads else layer.state_value_dim
    first = n - width * layer.state_heads if n > values else 0
    heads = np.arange(first, n).reshape(-1, layer.state_key_heads, width)
    return np.concatenate([np.arange(first), heads.swapaxes(0, 1).reshape(-1)])
