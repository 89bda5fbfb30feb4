"""Mamba 2 layers of a GGUF file: their keys and tensors, and the parts of a model that files cannot hold.

llama.cpp's converter keeps the first product in one tensor, gives the decays and skips a second dimension, and the
norm's weight one for its groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from llamac.export.checkpoint import STATE_MULTIPLE, Checkpoint, LayerConfig, LazyTensor
from llamac.export.gguf.delta_net import Found
from llamac.export.gguf.families import STATE_FIELDS, Architecture, gguf_name
from llamac.format.strips import FLOATS

if TYPE_CHECKING:
    from llamac.export.gguf.config import GGUFConfig
    from llamac.export.gguf.file import Tensor
    from llamac.export.gguf.keys import Keys

    Shape = tuple[int, ...]

EMBEDDING, HEAD = "token_embedding.weight", "output.weight"
TOGETHER = ("mamba_z", "mamba_xbc", "mamba_dt")  # the rows of llama.cpp's ssm_in


@dataclass(frozen=True)
class Flat(Found):
    """A matrix of the file whose rows, one after the other, are our vector."""

    def lazy(self) -> LazyTensor:
        found = self.tensor.matrix()
        n = self.whole[0] * self.whole[1]
        return LazyTensor((n,), found.dtype, lambda first, last: found.array().reshape(-1)[first:last])


def mamba2_fields(keys: Keys) -> dict[str, Any]:
    """The fields of a layer with Mamba 2."""
    return {"mixer": "mamba2", "rope": -1, **state_fields(keys)}


def state_fields(keys: Keys) -> dict[str, Any]:
    """The heads of a recurrent layer with Mamba 2 or a gated delta net, and their widths."""
    fields: dict[str, Any] = {field: keys.size(key) for key, field in STATE_FIELDS.items()}
    inner, heads, groups = keys.size("ssm.inner_size"), fields["state_heads"], fields["state_key_heads"]
    fields["state_value_dim"] = max(1, inner // heads)
    if keys.problems:  # a wrong value counts as 1, about which the checks would say something else
        return fields
    if inner % heads:
        keys.wrong("ssm.inner_size", f"a multiple of ssm.time_step_rank ({heads})")
    elif fields["state_value_dim"] % STATE_MULTIPLE:
        keys.wrong("ssm.inner_size", f"a multiple of {STATE_MULTIPLE} for each of {heads} heads")
    if heads % groups:
        keys.wrong("ssm.time_step_rank", f"a multiple of ssm.group_count ({groups})")
    if fields["state_key_dim"] % STATE_MULTIPLE:
        keys.wrong("ssm.state_size", f"a multiple of {STATE_MULTIPLE}")
    return fields


def single_parts(keys: Keys, layers: tuple[LayerConfig, ...], has_attention: list[bool]) -> tuple[LayerConfig, ...]:
    """The layers of Nemotron-H, which have a mixer or a network. has_attention: of each layer of the file."""
    widths = keys.value("feed_forward_length")
    has_network = [width != 0 for width in (widths if isinstance(widths, list) else [widths] * len(has_attention))]
    if len(has_network) != len(has_attention):
        keys.wrong("feed_forward_length", f"a width, or 0, for each of {len(has_attention)} layers")
        return layers
    mamba2 = mamba2_fields(keys)
    mixers = [{} if attends else mamba2 for attends in has_attention]
    return tuple(
        replace(layer, mixer="none", plain_experts=int(layer.ffn == "experts"))
        if is_network
        else replace(LayerConfig("none", 0), **mixer)
        for layer, is_network, mixer in zip(layers, has_network, mixers, strict=False)
    )


def folded(checkpoint: Checkpoint, row: Architecture, warnings: list[str]) -> Checkpoint:
    """The model that a file can hold in place of one with Mamba 2.

    The scales of Falcon-H1's embedding and logits become factors of the matrices, as in llama.cpp's converter. Files of
    Nemotron-H cannot hold the least step; a warning reports it.
    """
    config, tensors = checkpoint.config, dict(checkpoint.tensors)
    if row.beside and (config.embedding_scale != 1 or config.logit_scale != 1):
        head = tensors.get(HEAD, tensors[EMBEDDING])
        tensors[EMBEDDING] = _scaled(tensors[EMBEDDING], config.embedding_scale)
        tensors[HEAD] = _scaled(head, config.logit_scale)
        config = replace(config, embedding_scale=1.0, logit_scale=1.0, tied_output=False)
    if row.single_part and config.state_step_min:
        warnings.append(
            f"llama.cpp has no least step of Mamba 2 layers (time_step_min, {config.state_step_min:g}): logits can"
            " differ"
        )
        config = replace(config, state_step_min=0.0)
    return replace(checkpoint, config=config, tensors=tensors)


def _scaled(tensor: LazyTensor, number: float) -> LazyTensor:
    """The tensor times a number, in its own type if that is a float's."""
    return replace(tensor.times(number), dtype=tensor.dtype if tensor.dtype in FLOATS else "f32")


def find(name: str, shapes: Mapping[str, Shape], tensors: Mapping[str, Tensor], config: GGUFConfig) -> Found | None:
    """Find one of our tensors of a Mamba 2 layer. None: it is missing, or stored as in other families."""
    *prefix, module, kind = name.split(".")
    if not (config.row.mamba2 or config.row.beside) or not module.startswith("mamba_"):
        return None
    tensor = tensors.get(gguf_name(name, config.row))
    if tensor is None:
        return None
    layer, n = config.model.layers[int(prefix[1])], shapes[name][0]
    if module in TOGETHER:
        sizes = [shapes[".".join([*prefix, part, kind])][0] for part in TOGETHER]
        first = sum(sizes[: TOGETHER.index(module)])
        return Found(tensor, (sum(sizes), *shapes[name][1:]), np.arange(first, first + n))
    if module == "mamba_conv" and kind == "weight":
        return Found(tensor, (n // layer.conv_width, layer.conv_width), is_convolution=True)
    if module in ("mamba_decay", "mamba_skip"):
        return Flat(tensor, (n, 1))
    if module == "mamba_norm":
        return Flat(tensor, (layer.state_key_heads, n // layer.state_key_heads))
    return None
