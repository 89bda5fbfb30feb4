"""Writes a GGUF file for llama.cpp, with tokenizer and chat template.

Matrices become F32, F16, BF16, Q8_0 or Q4_0. Those that the source has in GGUF's blocks can keep them, bit for bit.

Before it writes the weights, it reads the head back with the importer and compares it with the checkpoint. Any
difference is an error that names the value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np

from llamac.errors import ExportError, UnsupportedError
from llamac.export import generation_config, pooling
from llamac.export.checkpoint import CHUNK_BYTES, Checkpoint, LazyTensor, ModelConfig
from llamac.export.distances import BIASES
from llamac.export.dtypes import nearest_dtypes
from llamac.export.flat.packing import checked_chunks, regroup
from llamac.export.flat.plan import matching_tensors
from llamac.export.gguf import gemma4, latent, llama4, mamba2
from llamac.export.gguf import write_places as places
from llamac.export.gguf.families import (
    GATE_UP_EXPERTS,
    WRITTEN,
    Architecture,
    fused_expert_name,
    fused_name,
    key_name,
)
from llamac.export.gguf.model import HEAD, order_of_pairs, read
from llamac.export.gguf.write_keys import add_keys, check_family, describe, is_xielu, obstacles, warnings_of
from llamac.export.gguf.write_rope import CLOSE, express_rope
from llamac.export.gguf.write_vocabulary import add_tokenizer
from llamac.export.llama2c.model import permuted
from llamac.export.lost import lost_parts
from llamac.export.targets import atomic_file, check_space
from llamac.format.strips import FLOATS, STRIP_ROWS, to_dtype
from llamac.progress import Progress, silent
from llamac.text import template_files as chat_templates

Type = gguf.GGMLQuantizationType
# dtype: (type of matrices, type of the output matrix, llama.cpp's file type). Errors in the logits do not average out,
# so the output matrix has more bits, as with q4.
DTYPES = {
    "f32": (Type.F32, Type.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (Type.F16, Type.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (Type.BF16, Type.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (Type.Q8_0, Type.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (Type.Q4_0, Type.Q8_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}
# "auto" keeps the type of a matrix: the file type of the type that most numbers have.
KEPT = "auto"
FILE_TYPES = {
    **{dtype: kind for dtype, (_, _, kind) in DTYPES.items()},
    "q4_1": gguf.LlamaFileType.MOSTLY_Q4_1,
    "q5_0": gguf.LlamaFileType.MOSTLY_Q5_0,
    "q5_1": gguf.LlamaFileType.MOSTLY_Q5_1,
    "q4_k": gguf.LlamaFileType.MOSTLY_Q4_K_M,
    "q5_k": gguf.LlamaFileType.MOSTLY_Q5_K_M,
    "q6_k": gguf.LlamaFileType.MOSTLY_Q6_K,
    "iq4_nl": gguf.LlamaFileType.MOSTLY_IQ4_NL,
    "iq4_xs": gguf.LlamaFileType.MOSTLY_IQ4_XS,
    "mxfp4": gguf.LlamaFileType.MOSTLY_MXFP4_MOE,
}
# The largest number of a block with a finite float16 scale.
LARGEST = {Type.Q8_0: 65504.0 * 127, Type.Q4_0: 65504.0 * 8}
ALIGNMENT = 32
# llama.cpp does not quantize these.
POSITIONS = "position_embedding.weight"
ROUTER_NORM = ".ffn_router_norm.weight"
ROUTER = ".ffn_router.weight"
_OF_STATES = ("conv_taps", "delta_conv", *(f"mamba_{part}" for part in ("conv", "decay", "skip", "norm")))
NOT_QUANTIZED = (ROUTER, *(f".{module}.weight" for module in _OF_STATES))
SHARED_GATE = ".shared_gate.weight"  # one row, which llama.cpp has as a vector
EMBEDDING = "token_embedding.weight"
CANNOT_HOLD = "a GGUF file cannot hold this model"


@dataclass(frozen=True)
class Stored:
    """A tensor of the file.

    Attributes:
        parts: The canonical tensors that it concatenates.
        is_kept: Whether their blocks are written unchanged.
    """

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    type: Any
    is_kept: bool

    @property
    def bytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.type]
        return int(np.prod(self.shape)) // int(block) * int(size)


def write_gguf(checkpoint: Checkpoint, out: Path, dtype: str, warnings: list[str], progress: Progress = silent) -> int:
    """Write a GGUF file.

    Args:
        checkpoint: The model.
        out: The file.
        dtype: The number format of the matrices, one of `DTYPES`, or "auto": GGUF's blocks and floats are kept, and
            other quantized matrices become Q8_0.
        warnings: Gets messages about differences in llama.cpp, and about what the file does not hold.
        progress: Called with the phase "writing" and byte counts.

    Returns:
        The size of the file.

    Raises:
        UnsupportedError: If GGUF cannot express the model. The message lists all reasons.
    """
    if dtype not in (KEPT, *DTYPES):
        raise UnsupportedError(f"dtype is {dtype!r}, expected {', '.join((KEPT, *DTYPES))} for a GGUF file")
    architecture = _architecture(checkpoint)
    row = WRITTEN[architecture]
    check_family(checkpoint, row)
    checkpoint = mamba2.folded(checkpoint, row, warnings)
    if checkpoint.config.mtp is not None and not (row.mtp and row.writes_mtp):
        warnings.append(f"the MTP layer is left out: llama.cpp does not compute it for the architecture {architecture}")
        checkpoint = checkpoint.without_mtp()
    tensors = _as_llama_cpp_has_them(checkpoint, row)
    rope = express_rope(checkpoint, row)
    tensors |= {name: LazyTensor.of(factors) for name, factors in rope.tensors.items()}
    warnings += warnings_of(checkpoint, row)
    stored = sorted(_stored_tensors(checkpoint.config, row, tensors, dtype), key=lambda tensor: len(tensor.shape))
    check_space(out, sum(tensor.bytes for tensor in stored))
    with atomic_file(out) as file:
        writer = gguf.GGUFWriter(file.name, architecture)
        _describe(
            writer, checkpoint, architecture, {**describe(checkpoint, row), **rope.keys}, _file_type(tensors, dtype)
        )
        add_tokenizer(writer, checkpoint, warnings)
        _write_head(writer, file, stored)
        done, total = 0, sum(tensor.bytes for tensor in stored)
        progress("writing", done, total)
        is_checked = False
        for tensor in stored:
            if len(tensor.shape) > 1 and not is_checked:  # all vectors, which can affect the config, are written
                file.flush()
                lost = _check_read_back(checkpoint, Path(file.name))
                warnings += [f"a GGUF file has no place for {part}" for part in lost]
                is_checked = True
            file.seek(-file.tell() % ALIGNMENT, os.SEEK_CUR)
            for data in _data(tensor, tensors):
                file.write(data)
                done += len(data)
                progress("writing", done, total)
        return file.tell()


def _architecture(checkpoint: Checkpoint) -> str:
    """The architecture of the file. UnsupportedError if llama.cpp has none for the model."""
    name, layers = checkpoint.metadata.get("architecture", ""), checkpoint.config.layers
    of_family = [key for key, row in WRITTEN.items() if name in (row.family, *row.others)]
    if not of_family:
        families = [family for row in WRITTEN.values() for family in (row.family, *row.others)]
        known = ", ".join(dict.fromkeys(families))
        raise UnsupportedError(f"architecture {name!r} cannot be written as GGUF, only {known}")
    has_mamba = any(layer.mixer == "mamba2" for layer in layers)
    candidates = [key for key in of_family if WRITTEN[key].mamba2 == has_mamba]
    if not candidates:
        needed = "no Mamba 2 layers, but the model has" if has_mamba else "a Mamba 2 layer, but the model has none"
        raise UnsupportedError(f"{CANNOT_HOLD}: files of the architecture {of_family[0]} have {needed}")
    # of the architectures of a family, the one without experts comes first
    with_experts = [key for key in candidates if "expert_count" in WRITTEN[key].keys]
    return (with_experts if any(layer.n_experts for layer in layers) and with_experts else candidates)[0]


def _as_llama_cpp_has_them(checkpoint: Checkpoint, row: Architecture) -> dict[str, LazyTensor]:
    """The tensors that do not become metadata, by our names. UnsupportedError if llama.cpp could not load them."""
    tensors = dict(matching_tensors(checkpoint))
    problems = list(obstacles(checkpoint, row))
    for name in list(tensors):
        if name.startswith("rope.") or (row.has_alibi and name == BIASES):
            del tensors[name]  # which metadata express
        elif (order := order_of_pairs(name, row, checkpoint.config)) is not None:
            tensors[name] = permuted(tensors[name], np.argsort(order))
    tensors = places.rearranged(tensors, checkpoint.config, row)
    for name in [name for name in tensors if is_xielu(name)]:
        del tensors[name]  # numbers of the metadata
    if row.chunked:
        for name in [name for name in tensors if llama4.is_plain_norm(name)]:
            if (tensors.pop(name).array() != 1).any():
                problems.append(f"{name} must be ones: the architecture has no such weights")
    if row.varied:
        tensors |= gemma4.scale_tensors(checkpoint.config)
    for name in [name for name in tensors if name.endswith(ROUTER_NORM)]:
        tensors[name] = gemma4.unscaled(tensors[name], checkpoint.config.dim**-0.5)
    if row.output == "must" and checkpoint.config.tied_output:
        tensors[HEAD] = tensors[EMBEDDING]
    if row.zero_norm_biases:
        for name in [name for name in tensors if name.endswith("_norm.bias")]:
            if tensors.pop(name).array().any():
                problems.append(f"{name} must be zeros: the architecture has no such biases")
    if row.shares_norm(checkpoint.config.layers[0].placement):
        # both branches share one norm
        for layer in range(len(checkpoint.config.layers)):
            for kind in ("weight",) if row.zero_norm_biases else ("weight", "bias"):
                one, other = (tensors[f"layers.{layer}.{part}_norm.{kind}"] for part in ("attn", "ffn"))
                if not np.array_equal(one.array(), other.array()):
                    problems.append(f"layers.{layer}: the norms of attention and network must be the same")
                del tensors[f"layers.{layer}.ffn_norm.{kind}"]
    if problems:
        raise UnsupportedError(f"{CANNOT_HOLD}:\n  " + "\n  ".join(problems[:20]))
    return tensors


def _file_type(tensors: Mapping[str, LazyTensor], dtype: str) -> Any:
    """llama.cpp's number of the type of most matrices."""
    most = nearest_dtypes(tensors)[0] if dtype == KEPT else dtype
    return FILE_TYPES.get(most, gguf.LlamaFileType.MOSTLY_Q8_0)


# ---- metadata


def _describe(writer: Any, checkpoint: Checkpoint, architecture: str, keys: Mapping[str, Any], file_type: Any) -> None:
    writer.add_name(str(checkpoint.metadata.get("name", "")) or "model")
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_keys(writer, {key_name(architecture, key): value for key, value in keys.items()})
    if (pooling_type := pooling.gguf_type(checkpoint.metadata)) is not None:
        writer.add_pooling_type(gguf.PoolingType(pooling_type))
    for key, value in generation_config.to_gguf(generation_config.from_flat(checkpoint.metadata)).items():
        (writer.add_int32 if isinstance(value, int) else writer.add_float32)(key, value)
    add_keys(writer, _templates(checkpoint))


def _templates(checkpoint: Checkpoint) -> dict[str, Any]:
    """The chat templates. `GGUFWriter.add_chat_template` would list their names in another order in each process."""
    others = {
        re.sub(r"[^A-Za-z0-9]", "_", name): text
        for name, text in chat_templates.texts_of(checkpoint.metadata, chat_templates.OTHERS).items()
        if name and text
    }
    default = others.pop(chat_templates.DEFAULT, checkpoint.chat_template)
    values = {f"{chat_templates.GGUF_KEY}.{name}": text for name, text in others.items()}
    names = {gguf.Keys.Tokenizer.CHAT_TEMPLATES: sorted(others)} if others else {}
    return {**names, **values, **({chat_templates.GGUF_KEY: default} if default else {})}


# ---- weights


def _stored_tensors(
    config: ModelConfig, row: Architecture, tensors: dict[str, LazyTensor], dtype: str
) -> Iterator[Stored]:
    """The file's tensors: fused modules are concatenated, the experts of a layer stacked."""
    usual, head, _ = DTYPES["q8_0" if dtype == KEPT else dtype]
    head_name = EMBEDDING if config.tied_output else HEAD
    wholes: dict[str, list[str]] = {}
    for name in tensors:
        fused = fused_name(name, row.fused)
        if GATE_UP_EXPERTS in row.fused:
            fused = fused or fused_expert_name(name)
        wholes.setdefault(fused[0] if fused else places.file_name(name, config, row), []).append(name)
    for full, parts in wholes.items():
        if ".experts." in parts[0]:
            parts.sort(key=lambda part: (int(part.split(".")[3]), part))  # an expert's gate comes before its up
        name = parts[0]
        rows, *columns = tensors[name].shape
        shape: tuple[int, ...] = (sum(tensors[part].shape[0] for part in parts), *columns)
        if ".experts." in name:
            shape = (n_experts := 1 + int(parts[-1].split(".")[3]), rows * len(parts) // n_experts, *columns)
        elif row.latent and name.endswith((".attn_k_b.weight", ".attn_v_b.weight")) and not latent.is_whole(row):
            shape = (config.n_heads, rows // config.n_heads, *columns)
        elif config.qk_norm == "layer_head" and name.endswith(("attn_q_norm.weight", "attn_k_norm.weight")):
            shape = (rows // config.head_dim, config.head_dim)
        elif name.endswith(SHARED_GATE):
            yield Stored(full, tuple(parts), tuple(columns), Type.F32, False)
            continue
        kept = _kept_type([tensors[part] for part in parts]) if dtype == KEPT and columns else None
        if kept is not None:
            yield Stored(full, tuple(parts), shape, kept, tensors[name].blocks is not None)
            continue
        chosen = head if name in (head_name, HEAD) else usual
        if not columns or name == POSITIONS or name.endswith(NOT_QUANTIZED):
            chosen = Type.F32
        elif shape[-1] % gguf.GGML_QUANT_SIZES[chosen][0]:
            chosen = Type.F16  # rows that are not whole blocks, as in llama.cpp
        yield Stored(full, tuple(parts), shape, chosen, False)


def _kept_type(parts: list[LazyTensor]) -> Any:
    """The type that all parts have in the source; None if they differ, or if GGUF does not have it."""
    dtypes = {part.dtype if part.blocks or part.dtype in FLOATS else None for part in parts}
    found = dtypes.pop()
    return Type[found.upper()] if found and not dtypes else None


def _write_head(writer: Any, file: BinaryIO, stored: list[Stored]) -> None:
    """Write everything before the data and extend the file to its final size, so it can be read back."""
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
        if stored.is_kept:
            yield from _kept_blocks(part, tensors[part])
            continue
        for rows in checked_chunks(part, tensors[part], floats.get(stored.type, "f32")):
            if stored.type in floats:
                yield np.ascontiguousarray(to_dtype(rows, floats[stored.type])).tobytes()
                continue
            peak = float(np.abs(rows).max())
            if peak > LARGEST[stored.type]:
                raise ExportError(f"tensor {part} contains {peak:g}, which is out of range for {stored.type.name}")
            yield gguf.quants.quantize(rows, stored.type).tobytes()


def _kept_blocks(name: str, tensor: LazyTensor) -> Iterator[bytes]:
    """The blocks of a tensor, unchanged. ExportError if a scale is not finite."""
    assert tensor.blocks is not None
    step = max(STRIP_ROWS, CHUNK_BYTES // (4 * tensor.shape[1]))
    for first in range(0, tensor.shape[0], step):
        last = min(first + step, tensor.shape[0])
        regroup(name, tensor, first, last)  # checks the scales
        yield np.ascontiguousarray(tensor.blocks(first, last)).tobytes()


# ---- the check


def _check_read_back(checkpoint: Checkpoint, path: Path) -> list[str]:
    """Compare the written head with the checkpoint, and return which small parts it does not hold.

    UnsupportedError lists all other differences.
    """
    try:
        again = read(path, [], complete=False)
    except (ExportError, UnsupportedError) as error:
        raise UnsupportedError(f"{CANNOT_HOLD}: {error}") from None
    problems = []
    for field in fields(ModelConfig):
        ours, theirs = getattr(checkpoint.config, field.name), getattr(again.config, field.name)
        if field.name in ("n_token_ids", "tied_output"):  # not known before tokenizer and matrices are written
            continue
        is_float = isinstance(ours, float) or field.name == "rope_attention_factor"
        if not (_same_floats(ours, theirs) if is_float else ours == theirs):
            problems.append(_difference(field.name, ours, theirs))
    # the output matrix can be missing: it can repeat the embedding
    for name in sorted((set(checkpoint.tensors) ^ set(again.tensors)) - {HEAD}):
        problems.append(f"tensor {name} has no place" if name in checkpoint.tensors else f"tensor {name} is missing")
    for name, tensor in checkpoint.tensors.items():
        if (name.startswith("rope.") or name == BIASES) and name in again.tensors:
            ours, theirs = tensor.array(), again.tensors[name].array()
            if ours.shape != theirs.shape or not np.allclose(ours, theirs, rtol=CLOSE, atol=0):
                which = "biases" if name == BIASES else "frequencies"
                problems.append(f"{name}: GGUF cannot express these {which}")
    if problems:
        raise UnsupportedError(f"{CANNOT_HOLD}:\n  " + "\n  ".join(problems))
    return list(lost_parts(checkpoint, again))


def _same_floats(ours: Any, theirs: Any) -> bool:
    """Whether numbers are equal up to float32 rounding and one division."""
    one, other = np.atleast_1d(np.float64(ours)), np.atleast_1d(np.float64(theirs))
    return one.shape == other.shape and np.allclose(one, other, rtol=1e-6, atol=0)


def _difference(name: str, ours: Any, theirs: Any) -> str:
    if name == "layers" and len(ours) == len(theirs):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            for key, value in vars(one).items():
                if value != getattr(other, key):
                    return f"layers.{number}: {key} is {value}, GGUF can only express {getattr(other, key)}"
    return f"{name} is {ours}, GGUF can only express {theirs}"
