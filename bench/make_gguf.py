"""Write a GGUF file with random weights that llama.cpp loads: valid structure, random quants, realistic scales.

Tensors have the types that llama.cpp's quantizer chooses for the file type. With `pure`, all matrices have one type.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from bench.family_shapes import FAMILY_SHAPES
from bench.shapes import SHAPES, Shape, tensors, vector
from llamac.export.gguf.families import ARCHITECTURES, fused_name, gguf_name
from llamac.export.gguf.write_keys import add_keys

POOL_ROWS = 256  # random rows per (type, width) that matrices are assembled from
Type = gguf.GGMLQuantizationType
# the type of most matrices by the name of a file type
BASE = {
    **{name: Type[name] for name in ("F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")},
    **{name: Type[name] for name in ("IQ4_NL", "IQ4_XS", "MXFP4")},
    "Q4_K_S": Type.Q4_K,
}
FILE_TYPES = {
    **{name: found for name in BASE if (found := gguf.LlamaFileType.__members__.get("MOSTLY_" + name))},
    "Q4_K": gguf.LlamaFileType.MOSTLY_Q4_K_S,
    "Q5_K": gguf.LlamaFileType.MOSTLY_Q5_K_S,
    "MXFP4": gguf.LlamaFileType.MOSTLY_MXFP4_MOE,
}
# llama.cpp's replacements where the row length is not a multiple of 256.
NARROW = {Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0}
# (byte offsets of the f16 scales in a block, divisor for weights with a standard deviation of about 1 / sqrt(columns))
SCALES = {
    Type.Q8_0: ((0,), 73.0),
    Type.Q4_0: ((0,), 4.6),
    Type.Q4_1: ((0, 2), 9.0),
    Type.Q5_0: ((0,), 9.2),
    Type.Q5_1: ((0, 2), 18.0),
    Type.Q4_K: ((0, 2), 330.0),
    Type.Q5_K: ((0, 2), 660.0),
    Type.Q6_K: ((208,), 1400.0),
    Type.IQ4_NL: ((0,), 70.0),
    Type.IQ4_XS: ((0,), 1300.0),
}
MXFP4_DIVISOR = 5.3  # likewise; its scales are powers of two


def tensor_type(name: str, kind: str, columns: int, shape: Shape, pure: bool) -> Any:
    """The type that llama.cpp (as of 2026) gives a matrix in a file of type `kind`."""
    if name.startswith("position_embd"):
        return Type.F32
    found = BASE[kind]
    head = "token_embd.weight" if shape.tied else "output.weight"
    if not pure and kind in ("Q4_0", "Q4_K_S"):
        layer = int(name.split(".")[1]) if name.startswith("blk.") else -1
        if name == head:
            found = Type.Q6_K
        early = ("attn_v" in name and layer < 4) or ("ffn_down" in name and layer < shape.layers // 8)
        if kind == "Q4_K_S" and layer >= 0 and early:
            found = Type.Q5_K
    return NARROW.get(found, found) if columns % 256 else found


def make_gguf(name: str, kind: str, out: Path, *, pure: bool = False, shape: Shape | None = None) -> None:
    """Write the file. `shape` overrides the dimensions that `name` stands for."""
    shape = shape or SHAPES[name]
    planned = (
        (tensor, dims if is_matrix else dims[1:], _type(tensor, is_matrix, kind, dims[-1], shape, pure))
        for tensor, is_matrix, *dims in _tensors(shape)
    )
    _write(out, shape.family, lambda writer: _describe(writer, name, kind, shape), planned)


def make_family_gguf(name: str, kind: str, out: Path, n_layers: int | None = None) -> None:
    """Write the file of a family's published model, whose matrices have the type `kind` unless the family's differ."""
    shape = FAMILY_SHAPES[name]
    n_layers = n_layers or shape.layers

    def describe(writer: Any) -> None:
        keys = {"context_length": 8192, "block_count": n_layers, "vocab_size": shape.vocabulary, **shape.keys(n_layers)}
        writer.add_name(f"random {name}")
        writer.add_file_type(FILE_TYPES[kind])
        add_keys(writer, {f"{shape.family}.{key}": value for key, value in keys.items()})
        writer.add_tokenizer_model("no_vocab")

    planned = ((tensor, dims, Type[own] if own else BASE[kind]) for tensor, dims, own in shape.tensors(n_layers))
    _write(out, shape.family, describe, planned)


def _write(
    out: Path, family: str, describe: Callable[[Any], None], planned: Iterable[tuple[str, Sequence[int], Any]]
) -> None:
    """Write a file of tensors: (name, dimensions, type)."""
    writer = gguf.GGUFWriter(str(out), family)
    describe(writer)
    planned = list(planned)
    for tensor, dims, chosen in planned:
        width = row_bytes(chosen, dims[-1])
        raw = np.dtype(np.float32 if chosen == Type.F32 else np.float16 if chosen == Type.F16 else np.uint8)
        stored = (*dims[:-1], width) if raw == np.uint8 else dims
        writer.add_tensor_info(tensor, stored, raw, math.prod(dims[:-1]) * width, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    _write_data(writer, planned)
    writer.close()


def _write_data(writer: Any, planned: Iterable[tuple[str, Sequence[int], Any]]) -> None:
    pools: dict[tuple[Any, int], NDArray[np.uint8]] = {}
    for tensor, dims, chosen in planned:
        writer.write_tensor_data(_data(tensor, chosen, dims, pools))


def _type(name: str, is_matrix: bool, kind: str, columns: int, shape: Shape, pure: bool) -> Any:
    return tensor_type(name, kind, columns, shape, pure) if is_matrix else Type.F32


def _tensors(shape: Shape) -> Iterator[tuple[str, bool, int, int]]:
    """The shape's tensors under llama.cpp's names. GPT-2's q, k and v are one fused tensor."""
    for name, is_matrix, rows, columns in tensors(shape):
        if name.startswith("rope."):
            continue
        fused = fused_name(name, ARCHITECTURES[shape.family].fused)
        if fused is None:
            yield gguf_name(name), is_matrix, rows, columns
        elif fused[1] == 0:
            yield fused[0], is_matrix, 3 * rows if is_matrix else 1, columns * (1 if is_matrix else 3)


def _describe(writer: Any, name: str, kind: str, shape: Shape) -> None:
    writer.add_name(f"random {name}")
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.dim)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_vocab_size(shape.vocabulary)
    if shape.family == "gpt2":
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_head_count_kv(shape.kv_heads)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_dimension_count(shape.head_dim)
        writer.add_rope_freq_base(10000.0)
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
    writer.add_tokenizer_model("no_vocab")


def row_bytes(chosen: Any, columns: int) -> int:
    """The bytes of a row of numbers of this type."""
    block, size = gguf.GGML_QUANT_SIZES[chosen]
    return int(columns // block * size)


def _data(name: str, chosen: Any, dims: Sequence[int], pools: dict[tuple[Any, int], NDArray[np.uint8]]) -> NDArray[Any]:
    if len(dims) == 1:
        return vector(name, dims[0]).array()
    key = chosen, dims[-1]
    if key not in pools:
        pools[key] = _row_pool(*key)
    order = np.random.default_rng(zlib.crc32(name.encode())).integers(0, POOL_ROWS, math.prod(dims[:-1]))
    return pools[key][order]


def _row_pool(chosen: Any, columns: int) -> NDArray[np.uint8]:
    """Random rows, (POOL_ROWS, bytes of a row), whose weights have a standard deviation of about 1 / sqrt(columns)."""
    rng = np.random.default_rng(columns)
    if chosen in (Type.F32, Type.F16):
        values = rng.standard_normal((POOL_ROWS, columns), np.float32) * np.float32(columns**-0.5)
        return np.ascontiguousarray(values.astype(np.float32 if chosen == Type.F32 else np.float16)).view(np.uint8)
    _, size = gguf.GGML_QUANT_SIZES[chosen]
    rows = rng.integers(0, 256, (POOL_ROWS, row_bytes(chosen, columns) // size, size), np.uint8)
    if chosen == Type.MXFP4:  # byte 0: e stands for 2^(e - 128)
        rows[:, :, 0] = 128 + round(np.log2(columns**-0.5 / MXFP4_DIVISOR))
        return rows.reshape(POOL_ROWS, -1)
    offsets, divisor = SCALES[chosen]
    scale = np.array([columns**-0.5 / divisor], np.float16).view(np.uint8)
    for offset in offsets:
        rows[:, :, offset : offset + 2] = scale
    return rows.reshape(POOL_ROWS, -1)
