"""Writes a GGUF file that llama.cpp loads: F32, F16, BF16, Q8_0 or Q4_0, with tokenizer and chat template.

Whether the file says all that the checkpoint says is not argued but tried out: its head is read back by the importer
before the weights are written, and whatever would come back otherwise is refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
from numpy.typing import NDArray

from llamac.errors import ExportError, UnsupportedError
from llamac.export.checkpoint import Checkpoint, LazyTensor, ModelConfig
from llamac.export.gguf_config import ROPE_FACTORS
from llamac.export.gguf_families import ARCHITECTURES, FUSED, Architecture, fused_name, gguf_name
from llamac.export.gguf_model import order_of_pairs, read
from llamac.export.llama2c import reordered
from llamac.export.rope import make_rope
from llamac.export.to_gguf_vocab import add_tokenizer
from llamac.export.writer import check_space, checked_chunks, matching_tensors, temporary_beside, to_dtype
from llamac.progress import Progress, silent

Floats = NDArray[np.float32]
Type = gguf.GGMLQuantizationType
# dtype: (type of matrices, that of the output matrix, llama.cpp's name of such a file). An error in the logits is not
# averaged over anything: as with q4, the output matrix is wider.
DTYPES = {
    "f32": (Type.F32, Type.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (Type.F16, Type.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (Type.BF16, Type.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (Type.Q8_0, Type.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (Type.Q4_0, Type.Q8_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}
# The largest number of a block whose float16 scale is finite.
LARGEST = {Type.Q8_0: 65504.0 * 127, Type.Q4_0: 65504.0 * 8}
ALIGNMENT = 32
POSITIONS = "position_embedding.weight"  # llama.cpp's quantizer leaves it alone


@dataclass(frozen=True)
class Stored:
    """A tensor of the file. parts: the canonical tensors that lie in it one after another."""

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    type: Any

    @property
    def bytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.type]
        return int(np.prod(self.shape)) // int(block) * int(size)


def write_gguf(checkpoint: Checkpoint, out: Path, dtype: str, warnings: list[str], progress: Progress = silent) -> int:
    """Writes `out` and returns its bytes. Raises UnsupportedError with everything that GGUF cannot say."""
    if dtype not in DTYPES:
        raise UnsupportedError(f"dtype is {dtype!r}, a GGUF file takes {', '.join(DTYPES)}")
    name = checkpoint.metadata.get("architecture", "")
    architecture = next((key for key, row in ARCHITECTURES.items() if row.family == name), None)
    if architecture is None:
        known = ", ".join(row.family for row in ARCHITECTURES.values())
        raise UnsupportedError(f"models of the families {known} can be written as GGUF only")
    tensors = dict(matching_tensors(checkpoint))
    row = ARCHITECTURES[architecture]
    for part in list(tensors):
        if part.startswith("rope."):
            del tensors[part]
        elif (order := order_of_pairs(part, row, checkpoint.config)) is not None:
            tensors[part] = _reordered(tensors[part], np.argsort(order))
    theta, factors = _frequencies(checkpoint) if row.position == "rope" else (0.0, None)
    if factors is not None:
        tensors[ROPE_FACTORS["freqs"]] = LazyTensor.of(factors)
    stored = sorted(_stored_tensors(checkpoint, tensors, dtype), key=lambda tensor: len(tensor.shape))
    check_space(out, sum(tensor.bytes for tensor in stored))
    with temporary_beside(out) as file:
        writer = gguf.GGUFWriter(file.name, architecture)
        _describe(writer, checkpoint, architecture, row, theta, dtype)
        add_tokenizer(writer, checkpoint, warnings)
        _write_head(writer, file, stored)
        done, total = 0, sum(tensor.bytes for tensor in stored)
        progress("writing", done, total)
        is_checked = False
        for tensor in stored:
            if len(tensor.shape) > 1 and not is_checked:  # all vectors are written: they may say something of the model
                file.flush()
                _check_read_back(checkpoint, Path(file.name))
                is_checked = True
            file.seek(-file.tell() % ALIGNMENT, os.SEEK_CUR)
            for data in _data(tensor, tensors):
                file.write(data)
                done += len(data)
                progress("writing", done, total)
        return file.tell()


def _reordered(tensor: LazyTensor, order: NDArray[np.intp]) -> LazyTensor:
    return LazyTensor(tensor.shape, tensor.dtype, reordered(tensor.read, order))


# ---- what the file says of the model


def _describe(
    writer: Any, checkpoint: Checkpoint, architecture: str, row: Architecture, theta: float, dtype: str
) -> None:
    config = checkpoint.config
    widths = [layer.ffn_dim for layer in config.layers]
    eps_key = "layer_norm_rms_epsilon" if config.norm == "rms" else "layer_norm_epsilon"
    writer.add_name(str(checkpoint.metadata.get("name", "")) or "model")
    writer.add_file_type(DTYPES[dtype][2])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    numbers: dict[str, int | float] = {
        "context_length": config.context,
        "embedding_length": config.dim,
        "block_count": len(config.layers),
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        f"attention.{eps_key}": config.norm_eps,
        "vocab_size": config.vocab_size,
    }
    if row.position == "rope":
        numbers |= {"rope.dimension_count": config.rope_dim[0], "rope.freq_base": theta}
        if config.rope_attention_factor[0] != 1.0:
            numbers["rope.scaling.attn_factor"] = config.rope_attention_factor[0]
    if "attention.scale" in row.keys and config.attention_scale != config.head_dim**-0.5:
        numbers["attention.scale"] = config.attention_scale
    for key, value in numbers.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"{architecture}.{key}", value)
    if len(set(widths)) == 1:
        writer.add_uint32(f"{architecture}.feed_forward_length", widths[0])
    else:
        writer.add_array(f"{architecture}.feed_forward_length", widths)
    if checkpoint.chat_template:
        writer.add_chat_template(checkpoint.chat_template)


def _frequencies(checkpoint: Checkpoint) -> tuple[float, Floats | None]:
    """(theta, what its frequencies are divided by, if they are)."""
    found = checkpoint.tensors["rope.0.inv_freq"].array()
    dim = 2 * len(found)
    guess = float(found[1]) ** (-dim / 2) if dim > 2 else 10000.0
    for digits in (3, 4, 5, 6, 9):
        theta = float(np.float32(f"{guess:.{digits - 1}e}"))
        if np.allclose(make_rope("default", {"rope_theta": theta}, dim, 1).inv_freq, found, rtol=2e-6, atol=0):
            return theta, None
    theta = 10000.0
    return theta, make_rope("default", {"rope_theta": theta}, dim, 1).inv_freq / found


# ---- weights


def _stored_tensors(checkpoint: Checkpoint, tensors: dict[str, LazyTensor], dtype: str) -> Iterator[Stored]:
    usual, head, _ = DTYPES[dtype]
    head_name = "token_embedding.weight" if checkpoint.config.tied_output else "output.weight"
    is_fused = checkpoint.metadata.get("architecture") in ("gpt2", "gpt_neox")
    for name, tensor in tensors.items():
        full, parts = gguf_name(name), [name]
        fused = fused_name(name) if is_fused else None
        if fused is not None:
            if fused[1]:
                continue  # it is in the first one's
            *layer, _, kind = name.split(".")
            names = [".".join([*layer, part, kind]) for part in FUSED["attn_qkv"]]
            if missing := [part for part in names if part not in tensors]:
                raise UnsupportedError(f"{fused[0]} holds {', '.join(names)}, but the model has no {missing[0]}")
            full, parts = fused[0], names
        shape = (sum(tensors[part].shape[0] for part in parts), *tensor.shape[1:])
        chosen = head if name == head_name else usual
        if len(shape) == 1 or name == POSITIONS:
            chosen = Type.F32
        elif shape[1] % gguf.GGML_QUANT_SIZES[chosen][0]:
            chosen = Type.F16  # rows that are no whole blocks, as in llama.cpp
        yield Stored(full, tuple(parts), shape, chosen)


def _write_head(writer: Any, file: BinaryIO, stored: list[Stored]) -> None:
    """Everything in front of the data; the file is as long as it will be, so that it can be read back."""
    for tensor in stored:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.bytes, raw_dtype=tensor.type)
    writer.write_header_to_file(Path(file.name))
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    file.seek(0, os.SEEK_END)
    start = end = file.tell()
    for tensor in stored:
        end += -end % ALIGNMENT + tensor.bytes
    file.truncate(end)
    file.seek(start)


def _data(stored: Stored, tensors: dict[str, LazyTensor]) -> Iterator[bytes]:
    floats = {Type.F32: "f32", Type.F16: "f16", Type.BF16: "bf16"}
    for part in stored.parts:
        for rows in checked_chunks(part, tensors[part], floats.get(stored.type, "f32")):
            if stored.type in floats:
                yield np.ascontiguousarray(to_dtype(rows, floats[stored.type])).tobytes()
                continue
            peak = float(np.abs(rows).max())
            if peak > LARGEST[stored.type]:
                raise ExportError(f"tensor {part} holds {peak:g}, which does not fit {stored.type.name}")
            yield gguf.quants.quantize(rows, stored.type).tobytes()


# ---- the check


def _check_read_back(checkpoint: Checkpoint, path: Path) -> None:
    """UnsupportedError with everything that the importer would read otherwise than it is."""
    try:
        again = read(path, [], complete=False)
    except (ExportError, UnsupportedError) as error:
        raise UnsupportedError(f"a GGUF file cannot hold this model: {error}") from None
    problems = []
    for field in fields(ModelConfig):
        ours, theirs = getattr(checkpoint.config, field.name), getattr(again.config, field.name)
        if field.name == "n_token_ids":  # the importer does not look at the tokenizer
            continue
        is_float = isinstance(ours, float) or field.name == "rope_attention_factor"
        if not (np.array_equal(np.float32(ours), np.float32(theirs)) if is_float else ours == theirs):
            problems.append(f"{field.name} is {ours}, GGUF can only say {theirs}")
    for name in sorted(set(checkpoint.tensors) ^ set(again.tensors)):
        problems.append(f"tensor {name} has no place" if name in checkpoint.tensors else f"tensor {name} is not there")
    for name, tensor in checkpoint.tensors.items():
        if name.startswith("rope.") and name in again.tensors:
            ours, theirs = tensor.array(), again.tensors[name].array()
            if ours.shape != theirs.shape or not np.allclose(ours, theirs, rtol=2e-6, atol=0):
                problems.append(f"{name}: the file would say other frequencies")
    if problems:
        raise UnsupportedError("a GGUF file cannot hold this model:\n  " + "\n  ".join(problems))
