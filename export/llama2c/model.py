"""Reads llama2.c's checkpoints: version 0 (legacy, no magic), 1 (float32) and 2 (int8 in groups).

A header is followed by tensors in a fixed order; each tensor contains all layers of one kind. RoPE pairs are
interleaved, so the rows of wq and wk are permuted into halves. Version 2 quantizes groups of the flattened tensor, so a
group can span rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from llamac.errors import ExportError
from llamac.export.checkpoint import Checkpoint, LayerConfig, LazyTensor, ModelConfig
from llamac.export.rope import make_rope
from llamac.format.llama2c_header import HEADER_BYTES, Header, parse_header

Floats = NDArray[np.float32]
Rows = TypeVar("Rows", NDArray[np.float32], NDArray[np.uint8])
ROPE_THETA = 10000.0
NORM_EPS = 1e-5
BOS = 1


def read(path: Path) -> Checkpoint:
    """Read a llama2.c model file, without a tokenizer.

    Raises:
        ExportError: If the header is invalid, or the file's size does not match it.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        header = parse_header(file.read(HEADER_BYTES))
    tensors, end = _Places(path, header).all()
    if end != size:
        raise ExportError(
            f"{path}: the header requires {end} bytes, but the file has {size}: it is damaged or incomplete"
        )
    tensors["rope.0.inv_freq"] = LazyTensor.of(inverse_frequencies(header.head_dim))
    config = ModelConfig(
        dim=header.dim,
        n_heads=header.n_heads,
        n_kv_heads=header.n_kv_heads,
        head_dim=header.head_dim,
        vocab_size=header.vocab_size,
        n_token_ids=header.vocab_size,
        context=header.context,
        norm="rms",
        position="rope",
        activation="silu",
        tied_output=header.shared,
        norm_eps=NORM_EPS,
        attention_scale=header.head_dim**-0.5,
        layers=(LayerConfig("gated", header.hidden_dim, rope=0),) * header.n_layers,
        rope_dim=(header.head_dim,),
        rope_original_context=(0,),
        rope_attention_factor=(1.0,),
    )
    # the models were trained on concatenated documents: the BOS of the next one ends this one
    stop_ids = (BOS,) if header.vocab_size > BOS else ()
    source = {"format": "llama2c", "version": header.version, "files": [path.name]}
    metadata = {"name": path.stem, "architecture": "llama", "source": source}
    return Checkpoint(config, tensors, metadata=metadata, stop_ids=stop_ids)


def inverse_frequencies(head_dim: int) -> Floats:
    """RoPE frequencies of llama2.c's models, (head_dim / 2)."""
    return make_rope("default", {"rope_theta": ROPE_THETA}, head_dim, 1).inv_freq


def halves(head_dim: int) -> NDArray[np.intp]:
    """The permutation of a head's rows from RoPE pairs (2j, 2j + 1) to pairs (j, j + head_dim / 2)."""
    order: NDArray[np.intp] = np.arange(head_dim).reshape(-1, 2).T.reshape(-1)
    return order


def reordered(read: Callable[[int, int], Rows], order: NDArray[np.intp]) -> Callable[[int, int], Rows]:
    """Read a matrix or vector with its rows permuted within every head of len(order) rows."""
    head_dim = len(order)

    def read_heads(first: int, last: int) -> Rows:
        start, end = first // head_dim * head_dim, -(-last // head_dim) * head_dim
        rows = read(start, end)
        heads = rows.reshape(-1, head_dim, *rows.shape[1:])[:, order]
        return heads.reshape(rows.shape)[first - start : last - start]

    return read_heads


def permuted(tensor: LazyTensor, order: NDArray[np.intp]) -> LazyTensor:
    """A tensor with its rows, and blocks if it has them, permuted within every head of len(order) rows."""
    blocks = None if tensor.blocks is None else reordered(tensor.blocks, order)
    return LazyTensor(tensor.shape, tensor.dtype, reordered(tensor.read, order), blocks)


class _Places:
    """Walks over the tensors in file order and creates a lazy one for each."""

    def __init__(self, path: Path, header: Header) -> None:
        self._path = path
        self._header = header
        self._order = halves(header.head_dim)  # once for all matrices, because a head can be wide
        self._at = header.bytes
        self._found: dict[str, LazyTensor] = {}

    def all(self) -> tuple[dict[str, LazyTensor], int]:
        """(tensors by canonical name, required size of the file)."""
        h = self._header
        kv_dim = h.n_kv_heads * h.head_dim
        weights = {
            "attn_q.weight": (h.dim, h.dim),
            "attn_k.weight": (kv_dim, h.dim),
            "attn_v.weight": (kv_dim, h.dim),
            "attn_out.weight": (h.dim, h.dim),
        }
        ffn = {
            "ffn_gate.weight": (h.hidden_dim, h.dim),
            "ffn_down.weight": (h.dim, h.hidden_dim),
            "ffn_up.weight": (h.hidden_dim, h.dim),
        }
        if h.version == 0:
            self._matrix("token_embedding.weight", h.vocab_size, h.dim)
            self._norms("attn_norm.weight")
            self._matrices(weights)
            self._norms("ffn_norm.weight")
            self._matrices(ffn)
            self._vector("output_norm.weight")
            self._at += 4 * h.context * h.head_dim  # skips the tables of cosines and sines
        else:
            self._norms("attn_norm.weight")
            self._norms("ffn_norm.weight")
            self._vector("output_norm.weight")
            self._matrix("token_embedding.weight", h.vocab_size, h.dim)
            self._matrices(weights)
            self._matrices(ffn)
        if not h.shared:
            self._matrix("output.weight", h.vocab_size, h.dim)
        return self._found, self._at

    def _norms(self, name: str) -> None:
        for layer in range(self._header.n_layers):
            self._vector(f"layers.{layer}.{name}")

    def _matrices(self, kinds: dict[str, tuple[int, int]]) -> None:
        for name, (rows, columns) in kinds.items():
            for layer in range(self._header.n_layers):
                self._matrix(f"layers.{layer}.{name}", rows, columns)

    def _vector(self, name: str) -> None:
        at, dim = self._at, self._header.dim
        self._at += 4 * dim

        def read(first: int, last: int) -> Floats:
            return _floats(self._path, at + 4 * first, last - first)

        self._found[name] = LazyTensor((dim,), "f32", read)

    def _matrix(self, name: str, rows: int, columns: int) -> None:
        at, group = self._at, self._header.group
        if group:
            if rows * columns % group:
                raise ExportError(
                    f"llama2.c tensor {name}: {rows} x {columns} is not a multiple of the group size {group}"
                )
            self._at += rows * columns + 4 * (rows * columns // group)
        else:
            self._at += 4 * rows * columns

        def read(first: int, last: int) -> Floats:
            if group:
                flat = _dequantized(self._path, at, rows * columns, group, first * columns, last * columns)
            else:
                flat = _floats(self._path, at + 4 * first * columns, (last - first) * columns)
            return flat.reshape(last - first, columns)

        is_paired = name.endswith(("attn_q.weight", "attn_k.weight"))
        reader = reordered(read, self._order) if is_paired else read
        self._found[name] = LazyTensor((rows, columns), "f32", reader)


def _floats(path: Path, offset: int, count: int) -> Floats:
    return np.fromfile(path, np.dtype("<f4"), count, offset=offset)


def _dequantized(path: Path, at: int, total: int, group: int, first: int, last: int) -> Floats:
    """Numbers [first, last) of a quantized tensor: int8 codes of the whole tensor, then a float32 scale per group."""
    start, end = first // group, -(-last // group)
    codes = np.fromfile(path, np.int8, (end - start) * group, offset=at + start * group)
    scales = np.fromfile(path, np.dtype("<f4"), end - start, offset=at + total + 4 * start)
    numbers = codes.astype(np.float32).reshape(-1, group) * scales[:, None]
    return numbers.reshape(-1)[first - start * group : last - start * group]
