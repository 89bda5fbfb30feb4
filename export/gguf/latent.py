"""Reads latent attention from a GGUF file: its widths from the metadata, and its tensors.

llama.cpp's converter writes the two halves of kv_b as attn_k_b, transposed head by head, and attn_v_b, and describes
one KV head with the latent and the rotated part as its key. Files of DeepSeek from before, and all of MiniCPM3, have
attn_kv_b whole, and the widths of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamac.errors import UnsupportedError
from llamac.export.gguf.families import LOG_MULTIPLIER, Architecture
from llamac.export.latent import NORM_EPS, rotated_first, rotated_width, split

if TYPE_CHECKING:
    from llamac.export.checkpoint import LazyTensor
    from llamac.export.gguf.config import GGUFConfig
    from llamac.export.gguf.file import Tensor

    Shape = tuple[int, ...]

MULTIPLE = 16  # see docs/format.md
# Our names and llama.cpp's.
NAMES = {
    "attn_q_a": "attn_q_a",
    "attn_q_a_norm": "attn_q_a_norm",
    "attn_kv_a": "attn_kv_a_mqa",
    "attn_kv_a_norm": "attn_kv_a_norm",
    "attn_k_b": "attn_k_b",
    "attn_v_b": "attn_v_b",
}


def latent_fields(keys: Any, dim: int, n_heads: int) -> tuple[int, dict[str, Any]]:
    """The width of the rotated part, and the fields of the layer records. keys: see `gguf.config`."""
    rank, rotated = keys.size("attention.kv_lora_rank"), keys.size("rope.dimension_count")
    width = max(1, dim // n_heads)
    query = keys.size("attention.key_length_mla", 0, 0) or keys.size("attention.key_length", width)
    value = keys.size("attention.value_length_mla", 0, 0) or keys.size("attention.value_length", width)
    if query <= rotated:
        keys.wrong("rope.dimension_count", f"less than the {query} dimensions of a head")
    for key, number in (("attention.kv_lora_rank", rank), ("attention.value_length", value)):
        if number % MULTIPLE:
            keys.wrong(key, f"a multiple of {MULTIPLE}")
    return rotated, {
        "q_lora_rank": keys.size("attention.q_lora_rank", 0, 0),
        "kv_lora_rank": rank,
        "qk_nope_head_dim": max(1, query - rotated),
        "v_head_dim": value,
        "latent_norm_eps": NORM_EPS,
    }


def attention_factor(keys: Any, row: Architecture) -> float:
    """What YaRN multiplies the attention scale by: the square of its factor of all dimensions.

    Unlike in other architectures, the key is a tenth of that factor's weight, and cosines and sines are not scaled.
    """
    factor: float = keys.number("rope.scaling.factor") or 1.0
    if keys.text("rope.scaling.type") != "yarn" or factor <= 1:
        return 1.0
    weight: float | None = keys.number(LOG_MULTIPLIER) if LOG_MULTIPLIER in row.keys else None
    if not weight:
        raise UnsupportedError(f"YaRN without {LOG_MULTIPLIER}: llama.cpp and transformers differ in its meaning")
    return (1.0 + weight * math.log(factor)) ** 2


@dataclass(frozen=True)
class Found:
    """One of our tensors, read from `tensor` of the file, which must have the shape `whole`."""

    tensor: Tensor
    whole: Shape
    read: LazyTensor | None

    def lazy(self) -> LazyTensor:
        """Our tensor."""
        found = self.tensor.vector() if len(self.whole) == 1 else self.tensor.matrix()
        return found if self.read is None else self.read


def find(name: str, shapes: Mapping[str, Shape], tensors: Mapping[str, Tensor], config: GGUFConfig) -> Found | None:
    """Find a tensor of latent attention. None: it is missing, or stored as in other families."""
    *prefix, module, kind = name.split(".")
    if not config.row.latent or len(prefix) != 2:
        return None
    layer = config.model.all_layers[int(prefix[1])]
    block, shape, heads = f"blk.{prefix[1]}.", shapes[name], config.model.n_heads
    names = {**NAMES, "attn_q": "attn_q_b" if layer.q_lora_rank else "attn_q"}
    if module not in names:
        return None
    tensor = tensors.get(f"{block}{names[module]}.{kind}")
    whole = tensors.get(f"{block}attn_kv_b.weight")
    nope, rank = layer.qk_nope_head_dim, layer.kv_lora_rank
    if module in ("attn_k_b", "attn_v_b") and whole is not None:
        both = (heads * (nope + layer.v_head_dim), rank)
        if whole.shape != both:
            return Found(whole, both, None)
        return Found(whole, both, split(whole.matrix(), heads, nope)[module == "attn_v_b"])
    if tensor is None:
        return None
    if module in ("attn_k_b", "attn_v_b"):
        return Found(tensor, (heads, shape[0] // heads, shape[1]), None)
    if module not in ("attn_q", "attn_kv_a") or tensor.shape != shape:
        return Found(tensor, shape, None)
    rotated = rotated_width(config.model, layer)
    width = rotated + (nope if module == "attn_q" else rank)
    order = rotated_first(width, rotated, shape[0], neighbours=config.row.latent == "neighbours")
    stored = tensor.vector() if kind == "bias" else tensor.matrix()
    return Found(tensor, shape, stored.in_order(order))
