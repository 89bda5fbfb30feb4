"""Rearranges tensors as llama.cpp's converter does: the inverse of `delta_net`, `mamba2` and `latent`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from llamac.export import latent as attention
from llamac.export.checkpoint import LazyTensor, ModelConfig
from llamac.export.gguf import delta_net, latent, mamba2
from llamac.export.gguf.config import GGUFConfig
from llamac.export.gguf.families import Architecture
from llamac.export.gguf.model import stored_names

if TYPE_CHECKING:
    from llamac.export.gguf.delta_net import Found


class _Name(NamedTuple):
    """Stands for a tensor of the file that will be written."""

    name: str


def file_name(name: str, config: ModelConfig, row: Architecture) -> str:
    """llama.cpp's name of one of our tensors."""
    return stored_names(name, GGUFConfig(config, row, ()))[0]


def rearranged(tensors: Mapping[str, LazyTensor], config: ModelConfig, row: Architecture) -> dict[str, LazyTensor]:
    """The tensors of the file. Each has the name of the first of our tensors that `file_name` maps to it.

    The importer's functions tell where it would look for each of ours.
    """
    if not (row.is_recurrent or row.latent):
        return dict(tensors)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    places = {name: file_name(name, config, row) for name in tensors}
    names: Any = {full: _Name(full) for full in places.values()}
    place: Any = (shapes, names, GGUFConfig(config, row, ()))
    kept: dict[str, LazyTensor] = {}
    wholes: dict[str, list[tuple[str, Found | latent.Found]]] = {}
    for name, tensor in tensors.items():
        found = delta_net.find(name, *place) or mamba2.find(name, *place) or latent.find(name, *place)
        if found is None:
            kept[name] = tensor
        else:
            wholes.setdefault(found.tensor.name, []).append((name, found))
    for full, parts in wholes.items():
        first = next(name for name, _ in parts if places[name] == full)
        kept[first] = _whole(parts, tensors)
    return kept


def _whole(parts: list[tuple[str, Any]], tensors: Mapping[str, LazyTensor]) -> LazyTensor:
    """The file's tensor that holds these tensors of ours."""
    (name, found), *others = parts
    if isinstance(found, latent.Found):
        if found.half is None:
            return tensors[name] if found.order is None else tensors[name].in_order(np.argsort(found.order))
        halves = {part.half: tensors[one] for one, part in parts}
        return attention.together(halves[0], halves[1], found.heads[0])
    if not others:
        return _alone(tensors[name], found)
    rows = [np.arange(found.whole[0]) if part.rows is None else part.rows for _, part in parts]
    stacked = LazyTensor.stacked([tensors[one] for one, _ in parts])
    return stacked.in_order(np.argsort(np.concatenate(rows)))


def _alone(tensor: LazyTensor, found: Found) -> LazyTensor:
    if isinstance(found, mamba2.Flat):
        return LazyTensor.of(tensor.array().reshape(found.whole))
    if found.is_convolution:  # ours is a vector of its columns
        tensor = LazyTensor.of(np.ascontiguousarray(tensor.array().reshape(found.whole[::-1]).T))
    if found.columns is not None:
        tensor = tensor.with_columns(np.argsort(found.columns))
    return tensor if found.rows is None else tensor.in_order(np.argsort(found.rows))
