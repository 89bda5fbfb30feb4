"""Reads a flat file as a checkpoint, so that it can be written back in another form or dtype."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llamac.export.checkpoint import Checkpoint, LayerConfig, LazyTensor, ModelConfig
from llamac.flatfile import STRIP_ROWS, FlatFile, TensorRecord, unpack_tensor
from llamac.tokenizer import SpecialTokens


def read(path: Path) -> Checkpoint:
    """The checkpoint of a flat file; its tensors read from the mapping when they are asked for."""
    file = FlatFile(path)
    values = file.config
    layers = tuple(
        LayerConfig(**{name: record[name] for name in LayerConfig.__dataclass_fields__}) for record in file.layers
    )
    rope = {name: tuple(values[name][: values["n_rope"]]) for name in values if name.startswith("rope_")}
    names = [name for name in ModelConfig.__dataclass_fields__ if name in values and name not in rope]
    config = ModelConfig(
        **{name: values[name] for name in names if name != "tied_output"},
        **rope,
        tied_output=bool(values["tied_output"]),
        layers=layers,
    )
    tensors = {record.name: _lazy(file, record) for record in file.tensors}
    checkpoint = Checkpoint(config, tensors, chat_template=file.section("template").decode(), metadata=dict(file.metadata))
    tokenizer = file.section("tokenizer")
    if tokenizer:
        special = SpecialTokens(
            bos_id=values["bos_id"] if values["bos_id"] >= 0 else None,
            add_bos=bool(values["add_bos"]),
            add_eos=bool(values["add_eos"]),
            eos_id=values["eos_id"] if values["eos_id"] >= 0 else None,
            stop_ids=tuple(values["stop_ids"][: values["n_stop_ids"]]),
        )
        checkpoint.tokenizer = (tokenizer, special, file.section("spm") or None)
    return checkpoint


def _lazy(file: FlatFile, record: TensorRecord) -> LazyTensor:
    if len(record.shape) == 1:
        return LazyTensor(record.shape, record.dtype, lambda first, last: file.tensor(record.name)[first:last])
    rows, columns = record.shape
    strip_bytes = record.bytes // -(-rows // STRIP_ROWS)

    def read(first: int, last: int) -> NDArray[np.float32]:
        start, end = first // STRIP_ROWS, -(-last // STRIP_ROWS)
        data = file.buffer[record.offset + start * strip_bytes : record.offset + end * strip_bytes]
        numbers = unpack_tensor(data, record.dtype, ((end - start) * STRIP_ROWS, columns))
        return numbers[first - start * STRIP_ROWS : last - start * STRIP_ROWS]

    return LazyTensor(record.shape, record.dtype, read)
