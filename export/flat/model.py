"""Reads a flat file as a checkpoint, to export it in another format or dtype."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamac import _core
from llamac.errors import ModelError
from llamac.export import generation_config
from llamac.export.checkpoint import Checkpoint, LayerConfig, LazyTensor, ModelConfig
from llamac.export.dtypes import BLOCK_DTYPES, DTYPES
from llamac.format.flatfile import FlatFile, TensorRecord
from llamac.format.strips import QUANTIZED, STRIP_ROWS, unpack_tensor
from llamac.progress import Progress, silent
from llamac.text.special_tokens import AFTER_BOS, SpecialTokens

# The metadata entries that the exporter uses, and their types.
METADATA_TYPES: dict[str, type] = {
    "name": str,
    "architecture": str,
    "source": dict,
    "tokenizer": dict,
    "config": dict,
    "chat_templates": dict,
    "special_tokens": dict,
    "adapters": list,
    "pooling": str,
}


def read(path: Path, progress: Progress = silent) -> Checkpoint:
    """Read a flat file after verifying all of it, weights included.

    Raises:
        ModelError: If anything in the file is damaged.
    """
    file = FlatFile(path)
    _verify_data(file, progress)
    special = SpecialTokens.from_file(file)
    tokenizer = file.section("tokenizer")
    return Checkpoint(
        model_config(file),
        lazy_tensors(file, functools.partial(_read_bytes, path)),
        tokenizer=(tokenizer, special, file.section("spm") or None) if tokenizer else None,
        chat_template=file.text("template"),
        metadata=_metadata(file),
        stop_ids=special.stop_ids,
    )


def lazy_tensors(file: FlatFile, read_bytes: Callable[[int, int], bytes]) -> dict[str, LazyTensor]:
    """All tensors by name. `read_bytes(offset, count)` reads from the file."""
    return {record.name: _lazy(read_bytes, record) for record in file.tensors}


def model_config(file: FlatFile) -> ModelConfig:
    """The config record and the layer records as one object."""
    values = file.config
    layers, mtp = (
        tuple(LayerConfig(**{name: record[name] for name in LayerConfig.__dataclass_fields__}) for record in records)
        for records in (file.layers, file.mtp_layers)
    )
    # arrays have as many elements as they have tables or layers
    arrays = {
        name: tuple(values[name][: values[count]])
        for start, count in (("rope_", "n_rope"), ("pooled_", "n_pooled"))
        for name in values
        if name.startswith(start)
    }
    names = [name for name in ModelConfig.__dataclass_fields__ if name in values and name not in arrays]
    kept: dict[str, Any] = {name: values[name] for name in names} | arrays
    kept["eagle_layers"] = tuple(values["eagle_layers"])
    kept |= {"tied_output": bool(values["tied_output"]), "layers": layers, "mtp": mtp[0] if mtp else None}
    return ModelConfig(**kept)


def _metadata(file: FlatFile) -> dict[str, Any]:
    """The file's metadata. Other programs write metadata too: an entry that writers could not use is dropped."""
    known = {
        name: value
        for name, value in file.metadata.items()
        if name != AFTER_BOS and isinstance(value, METADATA_TYPES.get(name, object)) and _is_text(name, value)
    }
    generation = generation_config.from_flat(known)
    known.pop(generation_config.METADATA_KEY, None)
    return {"source": {"format": "llamac"}, **known, **generation_config.to_metadata(generation)}


def _is_text(name: str, value: Any) -> bool:
    """Whether an entry can be written as UTF-8, so has no lone surrogates."""
    try:
        json.dumps([name, value], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _verify_data(file: FlatFile, progress: Progress) -> None:
    """Raise ModelError for damaged weights: an export would give them valid hashes."""
    for record, problem in file.verify_data(progress):
        if problem:
            raise ModelError(f"{file.path}: tensor {record.name}: {problem}")
        file.release_pages()  # otherwise the whole file counts as this process's memory


def _lazy(read_bytes: Callable[[int, int], bytes], record: TensorRecord) -> LazyTensor:
    def strips(first: int, last: int) -> bytes:
        strip_bytes = record.bytes // -(-record.shape[0] // STRIP_ROWS)
        start, end = first // STRIP_ROWS, -(-last // STRIP_ROWS)
        return read_bytes(record.offset + start * strip_bytes, (end - start) * strip_bytes)

    def read(first: int, last: int) -> NDArray[np.float32]:
        if len(record.shape) == 1:
            return unpack_tensor(read_bytes(record.offset + 4 * first, 4 * (last - first)), "f32", (last - first,))
        start, end = first // STRIP_ROWS, -(-last // STRIP_ROWS)
        numbers = unpack_tensor(strips(first, last), record.dtype, ((end - start) * STRIP_ROWS, record.shape[1]))
        return numbers[first - start * STRIP_ROWS : last - start * STRIP_ROWS]

    def blocks(first: int, last: int) -> NDArray[np.uint8]:
        number, columns = DTYPES[record.dtype], record.shape[1]
        start, end = first // STRIP_ROWS, -(-last // STRIP_ROWS)
        restored = np.empty(((end - start) * STRIP_ROWS, _core.gguf_row_bytes(number, columns)), np.uint8)
        _core.ungroup(number, strips(first, last), columns, restored.data)
        return restored[first - start * STRIP_ROWS : last - start * STRIP_ROWS]

    has_blocks = record.dtype in BLOCK_DTYPES and len(record.shape) == 2
    tensor = LazyTensor(record.shape, record.dtype, read, blocks if has_blocks else None)
    return replace(tensor, strips=strips) if record.dtype in QUANTIZED else tensor


def _read_bytes(path: Path, offset: int, count: int) -> bytes:
    """Read from the file, not from its mapping, whose pages would stay in this process's memory."""
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(count)
