"""The MTP layer of a GGUF file: the first of the blocks that predict further tokens.

llama.cpp's converter puts these blocks behind the others. Besides the tensors of a layer, they have four around it, and
can repeat the embedding and the output matrix. The repetitions are left out, because the MTP layer shares the model's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from llamac.export.checkpoint import ModelConfig

T = TypeVar("T")

# Our modules and llama.cpp's names.
NAMES = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "in": "eh_proj", "output_norm": "shared_head_norm"}
REPEATED = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")


def block(full_name: str) -> int:
    """The number of a tensor's block; -1: it belongs to none."""
    found = re.match(r"blk\.([0-9]{1,9})\.", full_name)
    return int(found[1]) if found else -1


def are_alone(names: Iterable[str]) -> bool:
    """Whether a file has such a block, and not the model's first one."""
    listed = list(names)
    return any(".nextn." in name for name in listed) and 0 not in map(block, listed)


def with_mtp(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]], like: int) -> ModelConfig:
    """The config with an MTP layer, if the file has its first tensor. It is like this layer with attention."""
    layers = [layer for layer in model.layers if layer.mixer == "attention"]
    if not layers or f"blk.{len(model.layers)}.nextn.eh_proj.weight" not in shapes:
        return model
    return replace(model, mtp=layers[like])


def without_others(tensors: Mapping[str, T], model: ModelConfig) -> dict[str, T]:
    """The tensors of the layers, of the MTP layer if the model has one, and of no other block."""
    first, end = len(model.layers), len(model.all_layers)
    repeated = {f"blk.{first}.{name}" for name in REPEATED}
    return {name: tensor for name, tensor in tensors.items() if block(name) < end and name not in repeated}


def nextn_names(name: str, model: ModelConfig) -> tuple[str, ...]:
    """llama.cpp's names of one of our tensors around the MTP layer. The first one in the file counts.

    As in llama.cpp, the norm of the model's output is that of the MTP layer if it has none. That of Ling 2 has the name
    of a norm after a layer.
    """
    _, module, kind = name.split(".")
    block = f"blk.{len(model.layers)}."
    of_block = f"{block}nextn.{NAMES[module]}.{kind}"
    others = (f"{block}layer_output_norm.{kind}", f"{module}.{kind}") if module == "output_norm" else ()
    return (of_block, *others)
