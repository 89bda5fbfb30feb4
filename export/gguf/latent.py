"""Reads and writes latent attention in a GGUF file: its widths in the metadata, and its tensors.

llama.cpp's converter writes the two halves of kv_b as attn_k_b, transposed head by head, and attn_v_b, and describes
one KV head with the latent and the rotated part as its key. Older files of DeepSeek, and all files of MiniCPM3, have
attn_kv_b whole, and the widths of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamac.errors import UnsupportedError
from llamac.export.gguf.families import LOG_MULTIPLIER, Architecture
from llamac.export.latent import NORM_EPS, rotated_first, rotated_width, split

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llamac.export.checkpoint import LayerConfig, LazyTensor, ModelConfig
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


def latent_keys(config: ModelConfig, row: Architecture) -> dict[str, Any]:
    """The keys that `latent_fields` and `attention_factor` read, except RoPE's."""
    layer = config.layers[0]
    width = layer.qk_nope_head_dim + rotated_width(config, layer)
    keys = {"attention.q_lora_rank": layer.q_lora_rank, "attention.kv_lora_rank": layer.kv_lora_rank}
    if is_whole(row):
        of_heads = {"attention.key_length": width, "attention.value_length": layer.v_head_dim}
        return {**keys, **of_heads, "attention.head_count_kv": config.n_heads}
    keys |= {"attention.value_length": layer.kv_lora_rank}
    return keys | {"attention.key_length_mla": width, "attention.value_length_mla": layer.v_head_dim}


def log_multiplier(config: ModelConfig, factor: float) -> float:
    """The weight of YaRN's factor for which `attention_factor` gives the attention scale of the model."""
    layer = config.layers[0]
    width = layer.qk_nope_head_dim + rotated_width(config, layer)
    return (math.sqrt(config.attention_scale * math.sqrt(width)) - 1) / math.log(factor)


def obstacles(config: ModelConfig, row: Architecture) -> Iterator[str]:
    """The reason why llama.cpp cannot load the attention."""
    if is_whole(row) and not config.layers[0].q_lora_rank:
        yield "q must have a latent (q_lora_rank)"


def is_whole(row: Architecture) -> bool:
    """Whether llama.cpp's converter stores kv_b as one tensor."""
    return row.latent == "halves"


@dataclass(frozen=True)
class Found:
    """One of our tensors in `tensor` of the file, which must have the shape `whole`.

    Attributes:
        order: The numbers of its rows in our order; None: as they are.
        half: The half of kv_b that it is; None: it is all of the file's tensor.
        heads: The number of heads of kv_b, and the rows of each that are keys.
    """

    tensor: Tensor
    whole: Shape
    order: NDArray[np.intp] | None = None
    half: int | None = None
    heads: tuple[int, int] = (0, 0)

    def lazy(self) -> LazyTensor:
        """Our tensor."""
        found = self.tensor.vector() if len(self.whole) == 1 else self.tensor.matrix()
        if self.half is not None:
            return split(found, *self.heads)[self.half]
        return found if self.order is None else found.in_order(self.order)


def stored_name(name: str, config: GGUFConfig) -> str:
    """llama.cpp's name of one of our tensors, as its converter writes it; "" if it is not part of latent attention."""
    *prefix, module, kind = name.split(".")
    if not config.row.latent or len(prefix) != 2 or module not in (*NAMES, "attn_q"):
        return ""
    if is_whole(config.row) and module in ("attn_k_b", "attn_v_b"):
        module = "attn_kv_b"
    return f"blk.{prefix[1]}.{_name(module, config.model.all_layers[int(prefix[1])])}.{kind}"


def _name(module: str, layer: LayerConfig) -> str:
    """llama.cpp's name of a module."""
    return {**NAMES, "attn_q": "attn_q_b" if layer.q_lora_rank else "attn_q"}.get(module, module)


def find(name: str, shapes: Mapping[str, Shape], tensors: Mapping[str, Tensor], config: GGUFConfig) -> Found | None:
    """Find a tensor of latent attention. None: it is missing, or stored as in other families."""
    *prefix, module, kind = name.split(".")
    if not config.row.latent or len(prefix) != 2:
        return None
    layer = config.model.all_layers[int(prefix[1])]
    block, shape, heads = f"blk.{prefix[1]}.", shapes[name], config.model.n_heads
    if module not in (*NAMES, "attn_q"):
        return None
    tensor = tensors.get(f"{block}{_name(module, layer)}.{kind}")
    whole = tensors.get(f"{block}attn_kv_b.weight")
    nope, rank = layer.qk_nope_head_dim, layer.kv_lora_rank
    if module in ("attn_k_b", "attn_v_b") and whole is not None:
        both = (heads * (nope + layer.v_head_dim), rank)
        return Found(whole, both, half=int(module == "attn_v_b"), heads=(heads, nope))
    if tensor is None:
        return None
    if module in ("attn_k_b", "attn_v_b"):
        return Found(tensor, (heads, shape[0] // heads, shape[1]))
    if module not in ("attn_q", "attn_kv_a"):
        return Found(tensor, shape)
    rotated = rotated_width(config.model, layer)
    width = rotated + (nope if module == "attn_q" else rank)
    return Found(tensor, shape, rotated_first(width, rotated, shape[0], neighbors=config.row.latent == "neighbors"))
