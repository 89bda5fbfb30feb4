"""Reads a flat file as a checkpoint, so that it can be written back in another form or dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamac.errors import ModelError
from llamac.export.checkpoint import Checkpoint, LayerConfig, LazyTensor, ModelConfig
from llamac.flatfile import FlatFile, TensorRecord
from llamac.progress import Progress, silent
from llamac.strips import STRIP_ROWS, unpack_tensor
from llamac.tokenizer import SpecialTokens

# What the exporter takes from a file's metadata.
METADATA_TYPES: dict[str, type] = {
    "name": str,
    "architecture": str,
    "source": dict,
    "tokenizer": dict,
    "config": dict,
    "chat_templates": dict,
    "special_tokens": dict,
}


def read(path: Path, progress: Progress = silent) -> Checkpoint:
    """The checkpoint of a flat file. Raises ModelError if anything in it is damaged, the weights included."""
    file = FlatFile(path)
    _check_data(file, progress)
    values, config = file.config, model_config(file)
    tensors = lazy_tensors(file, functools.partial(_bytes, path))
    checkpoint = Checkpoint(config, tensors, chat_template=file.text("template"), metadata=_metadata(file))
    special = SpecialTokens.from_config(values)
    checkpoint.stop_ids = special.stop_ids
    tokenizer = file.section("tokenizer")
    if tokenizer:
        checkpoint.tokenizer = (tokenizer, special, file.section("spm") or None)
    return checkpoint


def lazy_tensors(file: FlatFile, read_bytes: Callable[[int, int], bytes]) -> dict[str, LazyTensor]:
    """The tensors by name, to be read when they are needed: read_bytes(offset, count)."""
    return {record.name: _lazy(read_bytes, record) for record in file.tensors}


def model_config(file: FlatFile) -> ModelConfig:
    """The config record and the layers' as one object."""
    values = file.config
    layers = tuple(
        LayerConfig(**{name: record[name] for name in LayerConfig.__dataclass_fields__}) for record in file.layers
    )
    rope = {name: tuple(values[name][: values["n_rope"]]) for name in values if name.startswith("rope_")}
    names = [name for name in ModelConfig.__dataclass_fields__ if name in values and name not in rope]
    kept: dict[str, Any] = {name: values[name] for name in names} | rope
    return ModelConfig(**kept | {"tied_output": bool(values["tied_output"]), "layers": layers})


def _metadata(file: FlatFile) -> dict[str, Any]:
    """The file's metadata. Other programs write them, too: an entry of another type than here counts as absent."""
    known = {
        name: value for name, value in file.metadata.items() if isinstance(value, METADATA_TYPES.get(name, object))
    }
    return {"source": {"format": "llamac"}, **known}


def _check_data(file: FlatFile, progress: Progress) -> None:
    """What is damaged must not get fresh hashes."""
    for record, problem in file.verify_data(progress):
        if problem:
            raise ModelError(f"{file.path}: tensor {record.name}: {problem}")
        file.release_pages()  # or the whole file would count as this process's memory


def _lazy(read_bytes: Callable[[int, int], bytes], record: TensorRecord) -> LazyTensor:

    def read(first: int, last: int) -> NDArray[np.float32]:
        if len(record.shape) == 1:
            return unpack_tensor(read_bytes(record.offset + 4 * first, 4 * (last - first)), "f32", (last - first,))
        rows, columns = record.shape
        strip_bytes = record.bytes // -(-rows // STRIP_ROWS)
        start, end = first // STRIP_ROWS, -(-last // STRIP_ROWS)
        data = read_bytes(record.offset + start * strip_bytes, (end - start) * strip_bytes)
        numbers = unpack_tensor(data, record.dtype, ((end - start) * STRIP_ROWS, columns))
        return numbers[first - start * STRIP_ROWS : last - start * STRIP_ROWS]

    return LazyTensor(record.shape, record.dtype, read)


def _bytes(path: Path, offset: int, count: int) -> bytes:
    """From the file, not from its mapping, whose pages would stay in this process's memory."""
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(count)
