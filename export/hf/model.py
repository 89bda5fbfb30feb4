"""Reads a Hugging Face directory: config.json, weights (safetensors or PyTorch, whole or sharded), chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamac import _core
from llamac.errors import ExportError, UnsupportedError
from llamac.export import distances, generation_config
from llamac.export.checkpoint import Checkpoint, LazyTensor, ModelConfig
from llamac.export.drafters import ASSISTANT
from llamac.export.flat.plan import config_records
from llamac.export.hf import assistant, mxfp4, quantized, ternary
from llamac.export.hf.collected import Collected, Place, collect
from llamac.export.hf.config import parse_config
from llamac.export.hf.families import HEAD
from llamac.export.hf.family import Family
from llamac.export.hf.mamba_config import Factor
from llamac.export.hf.mtp import LEFT_OUT, dequantized, with_mtp
from llamac.export.hf.pairs import pair_metadata
from llamac.export.hf.parsed_config import HfConfig
from llamac.export.hf.safetensors_file import read_safetensors
from llamac.export.hf.sentence_modules import read_modules
from llamac.export.hf.torch_file import read_torch
from llamac.export.llama2c.model import permuted
from llamac.export.stored import WEIGHT_DTYPES, StoredTensor, are_equal
from llamac.format.model_folders import check_links
from llamac.format.strict_json import MAX_INDEX_BYTES, read_object
from llamac.text import template_files as chat_templates

Stored = dict[str, StoredTensor]
Floats = NDArray[np.float32]

EMBEDDING, OUTPUT = "token_embedding.weight", "output.weight"
MAX_NAME_BYTES = 255  # of a file, on every system

# Files with weights. The first that exists is read, as in transformers.
SOURCES: tuple[tuple[str, Callable[[Path], Stored]], ...] = (
    ("model.safetensors", read_safetensors),
    ("pytorch_model.bin", read_torch),
)


def read(folder: Path, warnings: list[str]) -> Checkpoint:
    """Read the checkpoint of a directory, without its tokenizer.

    Args:
        folder: The directory.
        warnings: Receives warnings for the user.

    Raises:
        UnsupportedError: If the engine cannot compute the model.
        ExportError: If the directory is damaged. The message lists all wrong keys, or all tensors that are missing,
            unknown, misshaped or of an unknown dtype.
    """
    check_links(folder)
    if not (folder / "config.json").is_file():
        raise ExportError(f"{folder} is not a Hugging Face directory: it has no config.json{_model_files(folder)}")
    values = quantized.with_config(folder, read_object(folder / "config.json", infinity=True))
    from llamac.export.hf import eagle3

    if eagle3.is_head(values):
        return eagle3.read(folder, values, warnings)
    config = parse_config(values, warnings)
    family, modules = config.family, read_modules(folder, config.model, config.pooling, warnings)
    config = replace(config, model=modules.model)
    files, config, stored, given = _stored(folder, values, config, warnings)
    names = _names(family, stored)  # of what is stored after renaming
    stored = _used_rows(config, stored, names)
    # what the tensors say of the model, before they are collected by it
    model = _with_layer_numbers(family, config.model, stored, names)
    model = replace(model, tied_output=_is_tied(family, config, stored, names, warnings))
    config = replace(config, model=model)
    config, tensors = _canonical_or_without_mtp(config, stored, names, warnings)
    model = config.model  # perhaps without its MTP layer
    if model.mtp is not None:
        tensors.setdefault("mtp.output_norm.weight", tensors["output_norm.weight"])
    tensors = assistant.in_clusters(model, tensors, given)
    if family.normed_embedding:
        tensors.setdefault(OUTPUT, tensors[EMBEDDING])
        tensors[EMBEDDING] = _normed(tensors[EMBEDDING], model.norm_eps)
        model = replace(model, tied_output=False)
    tensors |= modules.tensors
    if config.slopes:
        tensors[distances.BIASES] = distances.by_slopes(config.slopes, model.bias_distance)
    for i, table in enumerate(config.ropes):
        tensors[f"rope.{i}.inv_freq"] = LazyTensor.of(table.inv_freq)
        if table.inv_freq_long is not None:
            tensors[f"rope.{i}.inv_freq_long"] = LazyTensor.of(table.inv_freq_long)
    templates = chat_templates.from_folder(folder, warnings)
    metadata = {
        "name": folder.resolve().name,
        "architecture": family.model_type,
        "source": {"format": "huggingface", "files": ["config.json", *files]},
        "config": values,
        **templates.metadata(),
        **generation_config.to_metadata(generation_config.from_hf(folder, warnings)),
        **modules.metadata,
        **(pair_metadata(folder, values, family.pair_separators, model) if model.scores_pairs else {}),
    }
    template = templates.default()
    return Checkpoint(model, tensors, chat_template=template, metadata=metadata)


def _stored(
    folder: Path, values: dict[str, Any], config: HfConfig, warnings: list[str]
) -> tuple[list[str], HfConfig, Stored, Stored]:
    """(names of the files, the config with the stored MTP layer, the tensors renamed, the tensors as given)."""
    files, stored = _read_weights(folder, config, warnings)
    stored = dict(ternary.unpacked(config.ternary, stored)) if config.ternary else stored
    stored = dequantized(config, values, stored, warnings)
    config, given = with_mtp(config, stored, warnings)
    stored = assistant.prepared(given) if config.model.drafter == ASSISTANT else given
    return files, config, _renamed(config.family, stored, config.model), given


# ---- files


def _read_weights(folder: Path, config: HfConfig, warnings: list[str]) -> tuple[list[str], Stored]:
    """(names of the files, all tensors in them)."""
    for name, reader in SOURCES:
        index = f"{name}.index.json"
        if (folder / name).is_file():
            if (folder / index).is_file():
                warnings.append(f"both {name} and {index} exist: {index} is ignored")
            return [name], reader(folder / name)
        if (folder / index).is_file():
            files, stored = _read_shards(folder, index, config, reader)
            return [index, *files], stored
    names = " nor ".join(name for name, _ in SOURCES)
    raise ExportError(f"{folder} has no weights: neither {names}, nor their shards with an index{_model_files(folder)}")


def _model_files(folder: Path) -> str:
    """The files of a folder that could belong to a model, as the end of a message."""
    endings = (".safetensors", ".bin", ".pth", ".pt", ".gguf")
    found = sorted(path.name for path in folder.iterdir() if path.name.endswith(endings))
    return f"; it has {', '.join(found[:8])}" if found else ""


def _read_shards(
    folder: Path, index: str, config: HfConfig, reader: Callable[[Path], Stored]
) -> tuple[list[str], Stored]:
    """(names of the shards, tensors). The index names the shard of each tensor.

    Tensors that are not weights can be missing in the index or in the shard. The output matrix of a tied model can be
    missing in the index.
    """
    shard_of = _weight_map(folder, index)
    files = sorted(set(shard_of.values()))
    shards = {file: dict(reader(folder / file)) for file in files}
    family, n_layers = config.family, len(config.model.layers)

    def is_left_out(name: str, file: str) -> bool:
        """Whether the tensor is not a weight, or is of an MTP layer that index and file do not both have."""
        is_complete = name in shards[file] and shard_of.get(name) == file
        return family.is_ignored(name) or (family.is_mtp(name, n_layers) and not is_complete)

    listed = {name: file for name, file in shard_of.items() if not is_left_out(name, file)}
    stored = {
        file: {name: tensor for name, tensor in tensors.items() if not is_left_out(name, file)}
        for file, tensors in shards.items()
    }
    if config.tied:
        head = HEAD.full_name("weight")
        extra = {name: file for file in files for name in stored[file] if name not in listed}
        listed |= {name: file for name, file in extra.items() if _new_name(family, name) == head}
    problems = [f"missing: {name} is not in {file}" for name, file in listed.items() if name not in stored[file]]
    for file, tensors in stored.items():
        for name in tensors:
            if name not in listed:
                problems.append(f"extra: {name} in {file} is not in the index")
            elif listed[name] != file:
                problems.append(f"duplicate: {name} is in {file}, but the index says {listed[name]}")
    if problems:
        raise ExportError(f"{folder / index} does not match its files:\n  " + "\n  ".join(sorted(problems)))
    return files, {name: stored[file][name] for name, file in listed.items()}


def _weight_map(folder: Path, index: str) -> dict[str, str]:
    """The shard of each tensor according to an index. Its shards are files of the folder."""
    shard_of = read_object(folder / index, max_bytes=MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(shard_of, dict) or not all(isinstance(file, str) for file in shard_of.values()):
        raise ExportError(f"{folder / index}: weight_map must be an object of file names")
    problems = []
    for file in sorted(set(shard_of.values())):
        is_long = len(file.encode("utf-8", "replace")) > MAX_NAME_BYTES
        if Path(file).name != file or file in ("", ".", "..") or "\0" in file or is_long:
            problems.append(f"{file!r:.80} is not the name of a file in this directory")
        elif not (folder / file).is_file():
            problems.append(f"the file {file} is missing")
    if problems:
        raise ExportError(f"{folder / index} does not match the directory:\n  " + "\n  ".join(problems))
    return shard_of


# ---- tensors


def _renamed(family: Family, stored: Stored, model: ModelConfig) -> Stored:
    """The tensors under the names of the family's row: replaces old names and splits fused experts."""
    found: Stored = {}
    for old_name, tensor in _unpacked(family, stored):
        name = _new_name(family, old_name)
        rows = _split_rows(family, name, tensor, model)
        for new_name, part in rows or _split_experts(family, name, tensor, model.dim):
            if new_name in found:
                raise ExportError(f"the tensor {new_name} appears twice: separately, and as a part of {old_name}")
            found[new_name] = part
    return found


def _new_name(family: Family, name: str) -> str:
    """The name of a tensor in the family's row."""
    for pattern, replacement in family.renamed:
        name = re.sub(pattern, replacement, name)
    return name


def _split_rows(family: Family, name: str, tensor: StoredTensor, model: ModelConfig) -> list[tuple[str, StoredTensor]]:
    """The parts of a tensor that the family's row cuts; none for other tensors."""
    n_experts = max((layer.n_experts for layer in model.layers), default=0)
    stacked = [(pattern, tuple(f"{e}.{part}" for e in range(n_experts))) for pattern, part in family.stacked]
    for pattern, parts in (*family.split, *(stacked if n_experts else ())):
        match = re.fullmatch(f"((?:{re.escape(family.prefix)})?{pattern})", name)
        shares = (model.n_heads, model.n_kv_heads, model.n_kv_heads) if family.split_by_heads else (1,) * len(parts)
        share = tensor.shape[0] // sum(shares) if tensor.shape else 0
        if match and share and tensor.shape[0] == share * sum(shares) and tensor.dtype in WEIGHT_DTYPES:
            base, ends = name[: match.end(2)], [share * sum(shares[:i]) for i in range(len(parts) + 1)]
            return [(f"{base}.{part}", tensor.rows(ends[i], ends[i + 1])) for i, part in enumerate(parts)]
    return []


def _unpacked(family: Family, stored: Stored) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors, and in place of blocks and scales in MXFP4 the matrices of the experts."""
    pairs = {
        name: name.removesuffix(mxfp4.BLOCKS)
        for name, tensor in stored.items()
        if family.fused_columns
        and name.endswith(mxfp4.BLOCKS)
        and mxfp4.are_pair(tensor, stored.get(name.removesuffix(mxfp4.BLOCKS) + mxfp4.SCALES))
    }
    for name, tensor in stored.items():
        if name in pairs:
            scales = stored[pairs[name] + mxfp4.SCALES]
            matches = [
                (re.fullmatch(f"({re.escape(family.prefix)})?{pattern}", pairs[name]), parts)
                for pattern, parts in family.fused
            ]
            for match, parts in matches:
                for expert in range(tensor.shape[0] if match and tensor.shape[1] % len(parts) == 0 else 0):
                    matrix = mxfp4.expert_matrix(tensor, scales, expert)
                    for i, part in enumerate(parts):
                        base = (match[1] or "") + match[2] if match else ""
                        yield f"{base}.{expert}.{part}.weight", matrix.every(len(parts), i)
        elif name.removesuffix(mxfp4.SCALES) not in pairs.values():
            yield name, tensor


def _split_columns(family: Family, name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """The matrices and biases of a fused experts tensor (experts, inputs, alternating outputs of the parts)."""
    for pattern, parts in family.fused:
        match = re.fullmatch(f"({re.escape(family.prefix)})?" + pattern + "(_bias)?", name)
        n_dims = 2 if match and match[3] else 3
        is_stack = len(tensor.shape) == n_dims and 0 not in tensor.shape and tensor.dtype in WEIGHT_DTYPES
        if match and is_stack and tensor.shape[-1] % len(parts) == 0:
            base, kind = (match[1] or "") + match[2], "bias" if match[3] else "weight"
            for expert in range(tensor.shape[0]):
                outputs = tensor.part(expert).transposed
                for i, part in enumerate(parts):
                    yield f"{base}.{expert}.{part}.{kind}", outputs.every(len(parts), i)
            return
    yield name, tensor


def _split_experts(family: Family, name: str, tensor: StoredTensor, dim: int) -> Iterator[tuple[str, StoredTensor]]:
    """The matrices of a fused experts tensor (experts, rows of all parts, columns); other tensors unchanged."""
    if family.fused_columns:
        yield from _split_columns(family, name, tensor)
        return
    for pattern, parts in family.fused:
        match = re.fullmatch(f"({re.escape(family.prefix)})?" + pattern, name)
        is_stack = len(tensor.shape) == 3 and 0 not in tensor.shape and tensor.dtype in WEIGHT_DTYPES
        is_turned = bool(match) and is_stack and _is_turned(family, tensor.shape, len(parts), dim)
        if match and is_stack and tensor.shape[2 if is_turned else 1] % len(parts) == 0:
            rows = tensor.shape[2 if is_turned else 1] // len(parts)
            base = (match[1] or "") + match[2]
            for expert in range(tensor.shape[0]):
                matrix = tensor.part(expert).transposed if is_turned else tensor.part(expert)
                for i, part in enumerate(parts):
                    yield f"{base}.{expert}.{part}.weight", matrix.rows(i * rows, (i + 1) * rows)
            return
    yield name, tensor


def _is_turned(family: Family, shape: tuple[int, ...], n_parts: int, dim: int) -> bool:
    """Whether a fused tensor is (experts, inputs, outputs). One whose shape allows both is not, as in transformers."""
    if family.fused_turned != "by_shape":
        return family.fused_turned == "always"
    width = 1 if n_parts == 1 else 2  # the axis that is as wide as the model, the outputs of the third matrix
    return shape[width] != dim and shape[3 - width] == dim


def _names(family: Family, stored: Stored) -> dict[str, str]:
    """The names of the tensors by their names without prefix; tensors that are not weights are left out."""
    names: dict[str, str] = {}
    for full_name in stored:
        name = full_name.removeprefix(family.prefix)
        if family.is_ignored(full_name):
            continue
        if name in names:
            raise ExportError(f"the tensors {names[name]} and {full_name} are the same one under two names")
        names[name] = full_name
    return names


def _with_layer_numbers(family: Family, model: ModelConfig, stored: Stored, names: dict[str, str]) -> ModelConfig:
    """The model with the fields of its layers that are tensors of one number. These are removed from `names`."""
    layers, problems = list(model.layers), _wrong_numbers(family, model, stored, names)
    for pattern, field_name in family.layer_numbers.items():
        for index in range(len(layers)):
            name = pattern.format(l=index)
            full_name = names.pop(name, None)
            tensor = None if full_name is None else stored[full_name]
            if tensor is None or tensor.shape != (1,) or tensor.dtype not in WEIGHT_DTYPES:
                found = "missing" if tensor is None else f"misshaped ({tensor.dtype} {tensor.shape})"
                problems.append(f"{found}: {family.prefix}{name}, expected one number")
            else:
                number: dict[str, Any] = {field_name: float(tensor.lazy().array()[0])}
                layers[index] = replace(layers[index], **number)
    if problems:
        raise ExportError("the tensors do not match config.json:\n  " + "\n  ".join(problems))
    return replace(model, layers=tuple(layers))


def _wrong_numbers(family: Family, model: ModelConfig, stored: Stored, names: dict[str, str]) -> list[str]:
    """What is wrong with the tensors of one number that must have a certain value. They are removed from `names`."""
    problems = []
    for pattern, expected in family.fixed_numbers.items():
        for index in range(len(model.layers)):
            full_name = names.pop(pattern.format(l=index), None)
            if full_name is None:
                continue
            tensor = stored[full_name]
            if tensor.shape not in ((), (1,)) or tensor.dtype not in WEIGHT_DTYPES:
                problems.append(f"misshaped ({tensor.dtype} {tensor.shape}): {full_name}, expected one number")
                continue
            found = float(replace(tensor, shape=(1,), strides=(1,)).lazy().array()[0])
            if not abs(found - expected) <= abs(expected) / 100:  # bfloat16 has 3 digits
                problems.append(f"unsupported: {full_name} is {found:g}, expected {expected:g}")
    return problems


def _is_tied(family: Family, config: HfConfig, stored: Stored, names: dict[str, str], warnings: list[str]) -> bool:
    """Whether the embedding is the output matrix. As in transformers, it is not if they differ, despite the config.

    If the shared matrix is stored under the output matrix's name, or under both names, `names` keeps the embedding's.
    """
    head, embedding = HEAD.full_name("weight"), family.modules[0].full_name("weight")
    if head not in names:
        if not config.tied and config.bare:
            raise UnsupportedError(
                f"the architecture {family.bare} has no output matrix, and config.json does not tie it to the "
                "embedding (tie_word_embeddings)"
            )
        return config.tied
    if not config.tied:
        return False
    if embedding not in names:
        names[embedding] = names.pop(head)
        return True
    if are_equal(stored[names[head]], stored[names[embedding]]):
        del names[head]
        return True
    warnings.append("config.json ties the output matrix to the embedding, but they differ: both are kept")
    return False


def _canonical_or_without_mtp(
    config: HfConfig, stored: Stored, names: dict[str, str], warnings: list[str]
) -> tuple[HfConfig, dict[str, LazyTensor]]:
    """The config and the tensors by canonical name, without an MTP layer that cannot be read: nothing depends on it."""
    try:
        return config, _canonical(config.family, config, stored, names)
    except ExportError as error:
        if config.model.mtp is None:
            raise
        own = (config.family.mtp_start, f"layers.{len(config.model.layers)}.")  # without prefix
        config = replace(config, model=replace(config.model, mtp=None))
        names = {name: full_name for name, full_name in names.items() if not name.startswith(own)}
        tensors = _canonical(config.family, config, stored, names)
        warnings.append(f"{LEFT_OUT}: {error}")
        return config, tensors


def _canonical(family: Family, config: HfConfig, stored: Stored, names: dict[str, str]) -> dict[str, LazyTensor]:
    """The tensors by canonical name. ExportError lists missing, misshaped, unknown and unreadable ones."""
    shapes = canonical_shapes(config.model)
    unused = dict(names)
    collected = Collected()
    head = replace(HEAD, bias=family.head_bias)
    modules = (*family.modules, *(family.mtp if config.model.mtp else ()))
    for module in (*modules, head):
        kinds = module.kinds(config.biases)
        if module is head and config.model.tied_output:  # files of bare models lack the bias, too
            kinds = tuple(kind for kind in kinds if kind == "bias" and head.full_name(kind) in names)
        for index in module.indices(config.model):
            for kind in kinds:
                name = module.full_name(kind, **index)
                full_name = unused.pop(name, None)
                if full_name is None:
                    why = " (without it, tie_word_embeddings must be true)" if module is head else ""
                    collected.problems.append(f"missing: {'' if module is head else family.prefix}{name}{why}")
                    continue
                parts = {part: shapes[part] for part in module.part_names(kind, **index)}
                place = Place(module, parts, config.model, index["l"], index["h"])
                collect(collected, place, full_name, stored[full_name])
        for kind in kinds:
            for name in module.unused_names(config.model, kind):
                unused.pop(name, None)
    # transformers stores the matrices of shared experts even if there are none
    unused = {name: full_name for name, full_name in unused.items() if 0 not in stored[full_name].shape}
    if config.quantization is not None:
        unused = {name: full_name for name, full_name in unused.items() if not _adds_nothing(name, stored[full_name])}
    collected.problems += [f"unknown: {full_name} {stored[full_name].shape}" for full_name in sorted(unused.values())]
    if collected.problems:
        raise ExportError("the tensors do not match config.json:\n  " + "\n  ".join(collected.problems))
    found = {name: in_order(family, name, tensor, config.model) for name, tensor in collected.all().items()}
    found = {
        name: multiplied(tensor, config.factors.get(".".join(name.split(".")[-2:]), 1.0))
        for name, tensor in found.items()
    }
    return found | plain_norms(family, shapes) | _zeros(family, shapes)


def _adds_nothing(name: str, tensor: StoredTensor) -> bool:
    """Whether a tensor is a bias of zeros, which AutoGPTQ gave to modules that have none."""
    is_bias = name.endswith(".bias") and len(tensor.shape) == 1 and tensor.dtype in WEIGHT_DTYPES
    return is_bias and not tensor.lazy().array().any()


def multiplied(tensor: LazyTensor, factor: Factor) -> LazyTensor:
    """A tensor multiplied by a number, or each of its rows by one."""
    if isinstance(factor, float):
        return tensor if factor == 1 else tensor.times(factor)
    return tensor.times_rows(factor)


def in_order(family: Family, name: str, tensor: LazyTensor, model: ModelConfig, *, inverse: bool = False) -> LazyTensor:
    """A tensor with its rows in the order of the canonical pairs of RoPE or, inversely, in the family's."""
    if family.pairs == "halves" or not model.rope_dim:
        return tensor
    order = family.order_of_pairs(name, model.rope_dim[0], model.head_dim)
    if order is None:
        return tensor
    return permuted(tensor, np.argsort(order) if inverse else order)


def _normed(tensor: LazyTensor, eps: float) -> LazyTensor:
    """The rows of a matrix after an RMS norm without weights."""

    def read(first: int, last: int) -> Floats:
        rows = tensor.read(first, last).astype(np.float64)
        scaled: Floats = (rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + eps)).astype(np.float32)
        return scaled

    return LazyTensor(tensor.shape, "f32", read)


def plain_norms(family: Family, shapes: dict[str, tuple[int, ...]]) -> dict[str, LazyTensor]:
    """The norms that a family stores no tensors for."""
    names = [name for name in shapes if family.is_plain_norm(name)]
    return {name: LazyTensor.of(np.full(shapes[name], name.endswith(".weight"), np.float32)) for name in names}


def _zeros(family: Family, shapes: dict[str, tuple[int, ...]]) -> dict[str, LazyTensor]:
    """The matrices of zeros that a family stores no tensors for."""
    names = {name for name in shapes if re.sub(r"^layers\.\d+\.", "layers.{l}.", name) in family.zeros}
    return {name: LazyTensor.of(np.zeros(shapes[name], np.float32)) for name in names}


def canonical_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that a model can have."""
    slots = _core.slots(*config_records(Checkpoint(model, {})))
    return {name: (rows, columns) if is_matrix else (columns,) for name, _, is_matrix, rows, columns in slots}


def _used_rows(config: HfConfig, stored: Stored, names: dict[str, str]) -> Stored:
    """The tensors, with those rows of the embeddings that the context or the vocabulary uses."""
    model, (n_positions, first) = config.model, config.positions
    layers_dim = sum(layer.layer_embedding_dim for layer in model.layers)
    used: dict[tuple[str, ...], tuple[tuple[int, int], int, int]] = {
        ("position_embedding",): ((n_positions, model.dim), first, model.context),
        ("layer_embedding",): ((config.layer_embedding_rows, layers_dim), 0, model.vocab_size),
    }
    for module in config.family.modules:
        name = names.get(module.full_name("weight"), "") if module.parts in used else ""
        if name in stored and stored[name].dtype in WEIGHT_DTYPES:
            shape, start, n_used = used[module.parts]
            if stored[name].shape == shape:
                stored = {**stored, name: stored[name].rows(start, start + n_used)}
    return stored
