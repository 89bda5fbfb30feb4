"""Reads a Hugging Face directory: config.json, weights (safetensors or PyTorch, whole or sharded), chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from llamac import _core
from llamac.errors import ExportError, UnsupportedError
from llamac.export import chat_templates
from llamac.export.checkpoint import Checkpoint, LazyTensor, ModelConfig
from llamac.export.families import FAMILIES, HEAD, Family, Module
from llamac.export.hf_config import HfConfig, parse_config
from llamac.export.safetensors_file import read_safetensors
from llamac.export.stored import WEIGHT_DTYPES, StoredTensor
from llamac.export.strict_json import read_object
from llamac.export.torch_file import read_torch
from llamac.export.writer import config_records

Stored = dict[str, StoredTensor]

# What weights can be in, the first that is there is taken: as in transformers.
SOURCES: tuple[tuple[str, Callable[[Path], Stored]], ...] = (
    ("model.safetensors", read_safetensors),
    ("pytorch_model.bin", read_torch),
)


def read(folder: Path, warnings: list[str]) -> Checkpoint:
    """The checkpoint of a directory, without its tokenizer. What the user should know is appended to `warnings`.

    Raises UnsupportedError for models that the engine cannot compute, and ExportError for damage: all wrong keys of
    the config, or all tensors that are missing, surplus, misshaped or of an unknown dtype, at once.
    """
    if not (folder / "config.json").is_file():
        raise ExportError(f"{folder} is no Hugging Face directory: there is no config.json in it")
    values = read_object(folder / "config.json")
    config = parse_config(values, warnings)
    family = FAMILIES[values["model_type"]]
    files, stored = _read_weights(folder, warnings)
    names = _names(family, stored)
    model = replace(config.model, tied_output=_is_tied(family, config, stored, names, warnings))
    config = replace(config, model=model)
    tensors = {name: tensor.lazy() for name, tensor in _canonical(family, config, stored, names).items()}
    if config.rope is not None:
        tensors["rope.0.inv_freq"] = LazyTensor.of(config.rope.inv_freq)
        if config.rope.inv_freq_long is not None:
            tensors["rope.0.inv_freq_long"] = LazyTensor.of(config.rope.inv_freq_long)
    templates = chat_templates.from_folder(folder, warnings)
    metadata = {
        "name": folder.resolve().name,
        "architecture": family.model_type,
        "source": {"format": "huggingface", "files": ["config.json", *files]},
        "config": values,
        **chat_templates.to_metadata(templates),
    }
    template = chat_templates.default_text(templates)
    return Checkpoint(model, tensors, chat_template=template, metadata=metadata)


# ---- files


def _read_weights(folder: Path, warnings: list[str]) -> tuple[list[str], Stored]:
    """(names of the files, all tensors in them)."""
    for name, reader in SOURCES:
        index = f"{name}.index.json"
        if (folder / name).is_file():
            if (folder / index).is_file():
                warnings.append(f"{name} and {index} are both there: the latter is ignored")
            return [name], reader(folder / name)
        if (folder / index).is_file():
            files, stored = _read_shards(folder, index, reader)
            return [index, *files], stored
    names = " nor ".join(name for name, _ in SOURCES)
    endings = (".safetensors", ".bin", ".pth", ".pt", ".gguf")
    others = sorted(path.name for path in folder.iterdir() if path.name.endswith(endings))
    found = f"; what is there: {', '.join(others[:8])}" if others else ""
    raise ExportError(f"{folder} has no weights: neither {names}, whole or in shards with an index{found}")


def _read_shards(folder: Path, index: str, reader: Callable[[Path], Stored]) -> tuple[list[str], Stored]:
    """(names of the shards, tensors), where the index says in which shard each tensor lies."""
    places = read_object(folder / index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ExportError(f"{folder / index}: weight_map must be an object of file names")
    files = sorted(set(places.values()))
    problems = []
    for file in files:
        if Path(file).name != file or file in ("", ".", "..") or "\0" in file:
            problems.append(f"{file!r} is no name of a file in this directory")
        elif not (folder / file).is_file():
            problems.append(f"the file {file} is missing")
    if problems:
        raise ExportError(f"{folder / index} does not fit the directory:\n  " + "\n  ".join(problems))
    shards = {file: reader(folder / file) for file in files}
    for name, file in places.items():
        if name not in shards[file]:
            problems.append(f"missing: {name} is not in {file}")
    for file, tensors in shards.items():
        for name in tensors:
            if name not in places:
                problems.append(f"extra: {name} in {file} is not in the index")
            elif places[name] != file:
                problems.append(f"duplicate: {name} is in {file}, the index has it in {places[name]}")
    if problems:
        raise ExportError(f"{folder / index} does not fit its files:\n  " + "\n  ".join(sorted(problems)))
    return files, {name: shards[file][name] for name, file in places.items()}


# ---- tensors


def _names(family: Family, stored: Stored) -> dict[str, str]:
    """The names of the tensors by their names without prefix; what is no weight is left out."""
    names: dict[str, str] = {}
    for full_name in stored:
        name = full_name.removeprefix(family.prefix)
        if any(re.fullmatch(pattern, name) for pattern in family.ignored):
            continue
        if name in names:
            raise ExportError(f"the tensors {names[name]} and {full_name} are the same one under two names")
        names[name] = full_name
    return names


def _is_tied(family: Family, config: HfConfig, stored: Stored, names: dict[str, str], warnings: list[str]) -> bool:
    """Whether the embedding is the output matrix. As in transformers the tensors decide, not the config alone.

    A tied one that is stored under the output matrix's name, or under both, is under the embedding's in `names` then.
    """
    head, embedding = HEAD.full_name("weight"), family.modules[0].full_name("weight")
    if head not in names:
        if not config.tied and config.bare:
            raise UnsupportedError(
                f"the architecture {family.bare} is a language model only where the output matrix is the embedding, "
                "and config.json says that it is not (tie_word_embeddings)"
            )
        if not config.tied:
            warnings.append(
                "config.json says that the output matrix is not tied, but there is none: it is the embedding"
            )
        return True
    if not config.tied:
        return False
    if embedding not in names:
        names[embedding] = names.pop(head)
        return True
    if _are_equal(stored[names[head]], stored[names[embedding]]):
        del names[head]
        return True
    warnings.append("config.json says that the output matrix is the embedding, but they differ: it is not tied")
    return False


def _canonical(family: Family, config: HfConfig, stored: Stored, names: dict[str, str]) -> Stored:
    """The tensors by canonical name. Raises ExportError with all that is missing, misshaped, surplus or no weights."""
    shapes = _canonical_shapes(config.model)
    unused = dict(names)
    problems: list[str] = []
    found: Stored = {}
    for module, kind, layer in _expected(family, config):
        name = module.full_name(kind, layer)
        full_name = unused.pop(name, None)
        if full_name is None:
            problems.append(f"missing: {name if module is HEAD else family.prefix + name}")
            continue
        tensor = stored[full_name]
        is_transposed = module.transposed and kind == "weight"
        parts = {part: shapes[part] for part in module.part_names(kind, layer)}
        needed = _stacked(list(parts.values()))
        needed = needed[::-1] if is_transposed else needed
        if tensor.shape != needed:
            problems.append(f"misshaped: {full_name} is {tensor.shape}, the config needs {needed}")
        elif tensor.dtype not in WEIGHT_DTYPES:
            problems.append(f"dtype: {full_name} is {tensor.dtype}, expected one of {', '.join(WEIGHT_DTYPES)}")
        else:
            found.update(_split(tensor.transposed if is_transposed else tensor, parts))
    problems += [f"surplus: {full_name} {stored[full_name].shape}" for full_name in sorted(unused.values())]
    if problems:
        raise ExportError("the tensors do not fit config.json:\n  " + "\n  ".join(problems))
    return found


def _expected(family: Family, config: HfConfig) -> Iterator[tuple[Module, str, int]]:
    """(module, "weight" or "bias", layer) of every tensor that the config needs."""
    for module in family.modules if config.model.tied_output else (*family.modules, HEAD):
        for layer in range(len(config.model.layers) if module.per_layer else 1):
            yield module, "weight", layer
            if module.bias in config.biases:
                yield module, "bias", layer


def _canonical_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    slots = _core.slots(*config_records(Checkpoint(model, {})))
    return {name: (rows, columns) if is_matrix else (columns,) for name, _, is_matrix, rows, columns in slots}


def _stacked(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _split(tensor: StoredTensor, parts: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, StoredTensor]]:
    """The parts of a tensor that lie one after another along the output dimension."""
    first = 0
    for part, shape in parts.items():
        yield part, tensor.rows(first, first + shape[0])
        first += shape[0]


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors hold the same numbers; what cannot be compared is not equal."""
    if one == other:
        return True
    if one.shape != other.shape or len(one.shape) != 2 or {one.dtype, other.dtype} - set(WEIGHT_DTYPES):
        return False
    pairs = zip(one.lazy().chunks(), other.lazy().chunks(), strict=True)
    return all(np.array_equal(rows, others) for (_, rows), (_, others) in pairs)
