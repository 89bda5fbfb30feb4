"""Imports a GGUF file: maps tensors to canonical names and reverts the rearrangements of llama.cpp's converter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamac import _core
from llamac.errors import ExportError
from llamac.export import generation_config, pooling
from llamac.export.checkpoint import CHUNK_BYTES, Checkpoint, LazyTensor, ModelConfig
from llamac.export.distances import BIASES, by_slopes
from llamac.export.drafters import EAGLE3
from llamac.export.flat.plan import config_records
from llamac.export.gguf import delta_net, drafters, gemma4, latent, llama4, mamba2, mtp
from llamac.export.gguf.config import EMBEDDING, GGUFConfig, architecture, parse_config
from llamac.export.gguf.encoders import score_metadata, stored_name
from llamac.export.gguf.families import (
    FUSED,
    ROPE_FACTORS,
    Architecture,
    expert_name,
    fused_expert_name,
    fused_name,
    gguf_name,
)
from llamac.export.gguf.file import GGUFFile, Tensor, open_gguf
from llamac.export.gguf.ternary import TERNARY
from llamac.export.llama2c.model import halves, permuted
from llamac.format.gguf_metadata import GGUFHead
from llamac.text import template_files as chat_templates

HEAD = "output.weight"


def read(path: Path, warnings: list[str], *, complete: bool = True, head: GGUFHead | None = None) -> Checkpoint:
    """Read the checkpoint of a GGUF file, or of the split file that `path` is a part of, without its tokenizer.

    Args:
        path: The file.
        warnings: Receives warnings.
        complete: False if the file's matrices have not been written yet.
        head: The head of the file, if it has been read.

    Raises:
        UnsupportedError: If the engine cannot compute the model.
        ExportError: If keys or tensors do not fit; the message lists all of them.
        ModelError: If the file is damaged.
    """
    file = open_gguf(path, head)
    name, row = architecture(file.values)
    _check_whole(path, file, row)
    factors = {kind: file.tensors[full].vector().array() for kind, full in ROPE_FACTORS.items() if full in file.tensors}
    tied = not row.drafter and (HEAD not in file.tensors or (complete and _is_repeated(file)))
    shapes = {full: tensor.shape for full, tensor in file.tensors.items()}
    config = parse_config(file.values, shapes, tied, factors, warnings)
    if row.ternary and any(tensor.type.name in TERNARY for tensor in file.tensors.values()):
        config = replace(config, model=replace(config.model, rounds_inputs=1))
    unused = {*ROPE_FACTORS.values(), *row.ignored, *((HEAD,) if tied else ())}
    if config.row.varied:
        config = replace(config, model=gemma4.with_layer_scales(config.model, file.tensors))
        unused |= {*gemma4.other_tensors(config.model)}
    used = {full: tensor for full, tensor in file.tensors.items() if full not in unused}
    config, tensors = _canonical_or_without_mtp(config, used, warnings)
    for number, rope in enumerate(config.ropes):
        tensors[f"rope.{number}.inv_freq"] = LazyTensor.of(rope.inv_freq)
        if rope.inv_freq_long is not None:
            tensors[f"rope.{number}.inv_freq_long"] = LazyTensor.of(rope.inv_freq_long)
    if config.slopes:
        tensors[BIASES] = by_slopes(config.slopes, config.model.bias_distance)
    of_texts = {} if row.drafter else file.values  # a drafter uses the tokenizer of the model that it drafts for
    templates = chat_templates.from_gguf(of_texts)
    metadata = {
        "name": _title(file.values, path),
        "architecture": _family(config),
        "source": {"format": "gguf", "architecture": name, "files": [part.name for part in file.paths]},
        **templates.metadata(),
        **generation_config.to_metadata(generation_config.from_gguf(of_texts, warnings)),
        **({pooling.METADATA_KEY: "mean"} if row.two_sided else {}),
        **pooling.from_gguf(str(name), file.values),
        **(score_metadata() if config.model.scores_pairs else {}),
    }
    return Checkpoint(
        config.model, tensors, chat_template=templates.default(), metadata=metadata, gguf_values=file.values
    )


def _check_whole(path: Path, file: GGUFFile, row: Architecture) -> None:
    """Check that a file has a whole model: some have a vocabulary alone, or only the blocks that draft."""
    if EMBEDDING not in file.tensors and not (row.drafter == EAGLE3 and file.tensors):
        if not file.tensors:
            raise ExportError(f"{path} has no tensors: it is a vocabulary, for `run -z` and Tokenizer.from_file")
        raise ExportError(f"{path} has no tensor {EMBEDDING}")
    if row.has_predicting_blocks and mtp.are_alone(file.tensors):
        raise ExportError(
            f"{path} has only the blocks that predict further tokens: use the file of the whole model, which can have "
            "these blocks, too"
        )


def _title(values: Mapping[str, object], path: Path) -> str:
    """The model's name in the metadata, or else that of the file."""
    title = values.get("general.name")
    return title if isinstance(title, str) and 0 < len(title) <= 200 else path.stem


def _family(config: GGUFConfig) -> str:
    """Hugging Face's name of the family. Mistral's models are "llama" in GGUF."""
    if config.row.family == "deepseek_v2" and not any(layer.n_experts for layer in config.model.layers):
        return "youtu"
    if config.row.family == "deepseek_v2" and any(layer.query_beta for layer in config.model.layers):
        return "mistral4"
    if config.row.family == "deepseek_v2":
        return "deepseek_v3" if any(layer.router == "sigmoid" for layer in config.model.layers) else "deepseek_v2"
    if config.row.family == "olmo2":
        return "olmo3" if any(layer.window for layer in config.model.layers) else "olmo2"
    if config.row.family == "ministral3":
        return "ministral3" if any(layer.query_beta for layer in config.model.layers) else "llama"
    if "mistral" not in config.row.others:
        return config.row.family
    if any(layer.ffn == "experts" for layer in config.model.layers):
        return "mixtral"
    return "mistral" if any(layer.window for layer in config.model.layers) else "llama"


def has_tokenizer(values: Mapping[str, object]) -> bool:
    """Whether the metadata of a file contain a vocabulary."""
    return values.get("tokenizer.ggml.model") not in (None, "none", "no_vocab")


def _is_repeated(file: GGUFFile) -> bool:
    """Whether the output matrix repeats the embedding, as some converters write it."""
    one, other = file.tensors[EMBEDDING], file.tensors[HEAD]
    if one.type != other.type or one.shape != other.shape or len(one.shape) != 2:
        return False
    rows, others = one.matrix(), other.matrix()
    if rows.blocks and others.blocks:  # equal blocks are equal numbers, and need not be unpacked
        step = max(1, CHUNK_BYTES // (4 * rows.shape[1]))
        spans = ((first, min(first + step, rows.shape[0])) for first in range(0, rows.shape[0], step))
        return all(np.array_equal(rows.blocks(*span), others.blocks(*span)) for span in spans)
    pairs = zip(rows.chunks(), others.chunks(), strict=True)
    return all(np.array_equal(found, expected) for (_, found), (_, expected) in pairs)


# ---- tensors


Shape = tuple[int, ...]


class _Location(NamedTuple):
    """Where a canonical tensor is stored: rows from `first` on of `tensor`, which must have the shape `whole`."""

    tensor: Tensor
    first: int
    whole: Shape


def _canonical_or_without_mtp(
    config: GGUFConfig, tensors: Mapping[str, Tensor], warnings: list[str]
) -> tuple[GGUFConfig, dict[str, LazyTensor]]:
    """The config and the tensors by canonical name, without an MTP layer that cannot be read."""
    if not config.row.has_predicting_blocks:
        return config, _canonical(config, tensors)
    try:
        return config, _canonical(config, mtp.without_others(tensors, config.model))
    except ExportError as error:
        if config.model.mtp is None:
            raise
        config = replace(config, model=replace(config.model, mtp=None))
        found = _canonical(config, mtp.without_others(tensors, config.model))
        warnings.append(f"the MTP layer is left out, so llamac cannot draft with it: {error}")
        return config, found


def _canonical(config: GGUFConfig, tensors: Mapping[str, Tensor]) -> dict[str, LazyTensor]:
    """The tensors by canonical name. ExportError lists missing, misshaped and unknown ones."""
    problems: list[str] = []
    found: dict[str, LazyTensor] = {}
    taken: set[str] = set()
    required: dict[str, bool] = {}
    shapes: dict[str, Shape] = {}
    for name, needed, is_matrix, rows, columns in _core.slots(*config_records(Checkpoint(config.model, {}))):
        if not name.startswith("rope.") and not (name == BIASES and config.slopes):
            required[name], shapes[name] = needed, (rows, columns) if is_matrix else (columns,)
    for name, shape in shapes.items():
        if name in config.numbers:
            found[name] = LazyTensor.of(np.array([config.numbers[name]], np.float32))
        elif name == drafters.IDS and config.row.drafter == EAGLE3:
            found[name] = drafters.drafted_ids(tensors.get(drafters.STORED_IDS), config.model)
            taken.add(drafters.STORED_IDS)
        elif (place := _place(name, shapes, tensors, config)) is not None:
            tensor = place.tensor
            taken.add(tensor.name)
            if not _fits(place, name, shape):
                problems.append(f"misshaped: {tensor.name} is {tensor.shape}, the metadata require {place.whole}")
            elif isinstance(place, _Location):
                lazy = _lazy(tensor, place.first, shape, order_of_pairs(name, config.row, config.model))
                found[name] = _multiplied(name, lazy, config)
            else:
                found[name] = place.lazy()
        elif (value := _value_if_missing(name, config.row)) is not None:
            found[name] = LazyTensor.of(np.full(shape, value, np.float32))
        elif required[name]:
            problems.append(f"missing: {stored_names(name, config)[0]} {shape}")
    problems += [f"unknown: {name} {tensor.shape}" for name, tensor in sorted(tensors.items()) if name not in taken]
    if problems:
        more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        raise ExportError("the GGUF file's tensors do not fit its metadata:\n  " + "\n  ".join([*problems[:20], *more]))
    return found


def _place(
    name: str, shapes: Mapping[str, Shape], tensors: Mapping[str, Tensor], config: GGUFConfig
) -> _Location | delta_net.Found | latent.Found | None:
    """Where the file stores a canonical tensor; None if it does not."""
    place = name, shapes, tensors, config
    return delta_net.find(*place) or mamba2.find(*place) or latent.find(*place) or _locate(*place)


def _fits(place: _Location | delta_net.Found | latent.Found, name: str, shape: Shape) -> bool:
    """Whether a tensor of the file has the shape that the metadata require. Files may lack or add dimensions of one."""
    tensor, whole = place.tensor, place.whole
    if not isinstance(place, _Location):
        return tensor.shape == whole
    is_qk_norm = ".attn_q_norm." in name or ".attn_k_norm." in name
    is_stacked = is_qk_norm and shape == (math.prod(tensor.shape),)  # a row for each head
    is_only_row = whole == (1, *tensor.shape)
    return _without_ones(tensor.shape, len(whole)) == whole or is_stacked or is_only_row


def _value_if_missing(name: str, row: Architecture) -> float | None:
    """What all numbers of a norm are that files of this architecture lack; None for other tensors."""
    if name.endswith("_norm.bias") and (row.zero_norm_biases or row.plain_norms):
        return 0.0
    if (name.endswith("_norm.weight") and row.plain_norms) or (row.chunked and llama4.is_plain_norm(name)):
        return 1.0
    return None


def _multiplied(name: str, tensor: LazyTensor, config: GGUFConfig) -> LazyTensor:
    """The tensor, times what llama.cpp multiplies its results by."""
    if name.endswith(".ffn_router_norm.weight"):
        return tensor.times(config.model.dim**-0.5)
    if name.endswith(".shared_ffn_down.weight") and config.row.halves_shared:
        return replace(tensor.times(0.5), dtype=tensor.dtype)
    return tensor


def stored_names(name: str, config: GGUFConfig) -> tuple[str, ...]:
    """llama.cpp's names of one of our tensors. The first one in the file counts."""
    if name.startswith("mtp."):
        return mtp.nextn_names(name, config.model)
    of_drafter = drafters.NAMES.get(config.row.drafter, {}).get(name)
    if of_drafter:
        return (of_drafter,)
    found = latent.stored_name(name, config) or stored_name(name, config)
    *prefix, module, kind = name.split(".")
    other = config.row.or_names.get(module)
    return (found, f"blk.{prefix[1]}.{other}.{kind}") if other else (found,)


def _locate(
    name: str, shapes: Mapping[str, Shape], tensors: Mapping[str, Tensor], config: GGUFConfig
) -> _Location | None:
    """Find a canonical tensor, separate or in a fused tensor. Returns None if it is missing."""
    shape = shapes[name]
    *layer, module, kind = name.split(".")
    tensor = next((tensors[full] for full in stored_names(name, config) if full in tensors), None)
    gate = ".".join([*layer, "ffn_gate", "weight"])
    if module == "ffn_up" and gate in shapes and "experts" not in layer and gguf_name(gate) not in tensors:
        tensor = None  # the fused gate and up
    if tensor is not None and "experts" in layer:
        number = int(layer[3])
        return _Location(tensor, number * shape[0], (config.model.all_layers[int(layer[1])].n_experts, *shape))
    if tensor is not None:
        return _Location(tensor, 0, shape)
    both = fused_expert_name(name)
    if both is not None and both[0] in tensors:
        number, n_experts = int(layer[3]), config.model.all_layers[int(layer[1])].n_experts
        first = (2 * number + both[1]) * shape[0]
        return _Location(tensors[both[0]], first, (n_experts, 2 * shape[0], *shape[1:]))
    alone = expert_name(name)
    if alone in tensors:
        return _Location(tensors[alone], 0, shape)
    if module == "ffn_norm" and config.model.all_layers[int(layer[1])].placement == "parallel":
        shared = tensors.get(gguf_name(".".join([*layer, "attn_norm", kind])))
        return None if shared is None else _Location(shared, 0, shape)
    fused = fused_name(name)
    if fused is not None and fused[0] in tensors:
        whole, number = fused
        sizes = [shapes[".".join([*layer, part, kind])][0] for part in FUSED[whole.split(".")[-2]]]
        return _Location(tensors[whole], sum(sizes[:number]), (sum(sizes), *shape[1:]))
    return None


def _without_ones(shape: Shape, dims: int) -> Shape:
    """The shape without leading ones, down to `dims` dimensions."""
    while len(shape) > dims and shape[0] == 1:
        shape = shape[1:]
    return shape


def _lazy(tensor: Tensor, first: int, shape: Shape, order: NDArray[np.intp] | None) -> LazyTensor:
    """Rows (elements of a vector) from `first` on, permuted within each head if an order is given."""
    whole = tensor.matrix() if len(shape) == 2 else tensor.vector()
    part = replace(whole.rows(first, first + shape[0]), shape=shape)
    return part if order is None else permuted(part, order)


def order_of_pairs(name: str, row: Architecture, config: ModelConfig) -> NDArray[np.intp] | None:
    """The permutation of a head's rows from neighboring RoPE pairs to halves; None for tensors without one."""
    if not row.paired or name.split(".")[-2] not in ("attn_q", "attn_k"):
        return None
    turned = halves((*config.rope_dim, config.head_dim)[0])
    return np.concatenate([turned, np.arange(len(turned), config.head_dim)])
