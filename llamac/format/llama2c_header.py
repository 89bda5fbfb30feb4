"""Recognizes and parses the header of llama2.c's checkpoints, without importing NumPy.

Version 0 has no magic number: seven plausible int32 identify it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from llamac.errors import ExportError

MAGIC = 0x616B3432  # "ak42"
HEADER_BYTES = 256  # of versions 1 and 2


@dataclass(frozen=True)
class Header:
    """The header of a checkpoint.

    Attributes:
        version: 0, 1 or 2.
        dim: Width of the residual stream.
        hidden_dim: Width of the feed-forward networks.
        n_layers: Number of layers.
        n_heads: Number of query heads.
        n_kv_heads: Number of key and value heads.
        vocab_size: Number of tokens.
        context: Number of positions.
        shared: Whether the output matrix is the embedding.
        group: Numbers per scale in version 2, else 0.
        bytes: Size of the header.
    """

    version: int
    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    context: int
    shared: bool
    group: int
    bytes: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


def looks_like_llama2c(path: Path) -> bool:
    """Whether a file starts like a llama2.c checkpoint of any version."""
    try:
        with open(path, "rb") as file:
            parse_header(file.read(HEADER_BYTES))
    except (ExportError, OSError):
        return False
    return True


def parse_header(data: bytes) -> Header:
    """Parse a header.

    Args:
        data: The first bytes of the file.

    Raises:
        ExportError: If the header is invalid.
    """
    if len(data) < 28:
        raise ExportError("the file is too short for a llama2.c checkpoint")
    shared, group = True, 0
    if struct.unpack_from("<I", data)[0] == MAGIC:
        version = struct.unpack_from("<i", data, 4)[0]
        if version not in (1, 2):
            raise ExportError(f"unknown llama2.c checkpoint version {version}, expected 0, 1 or 2")
        if len(data) < HEADER_BYTES:
            raise ExportError("the llama2.c checkpoint ends within its header")
        numbers = struct.unpack_from("<7i", data, 8)
        if data[36] > 1:
            raise ExportError(f"llama2.c header: shared classifier is {data[36]}, expected 0 or 1")
        shared = bool(data[36])
        group = struct.unpack_from("<i", data, 37)[0] if version == 2 else 0
        start = HEADER_BYTES
    else:
        version, start = 0, 28
        numbers = struct.unpack_from("<7i", data)
        shared = numbers[5] > 0  # a negative vocabulary size means that the classifier has separate weights
    dim, hidden, layers, heads, kv_heads, vocab, context = (*numbers[:5], abs(numbers[5]), numbers[6])
    limits = (
        ("dim", dim, 1 << 20),
        ("hidden_dim", hidden, 1 << 20),
        ("n_layers", layers, 4096),
        ("n_heads", heads, 4096),
        ("n_kv_heads", kv_heads, heads),
        ("vocab_size", vocab, 1 << 24),
        ("max_seq_len", context, 1 << 24),
    )
    foreign = "not a llama2.c checkpoint"
    for name, value, most in limits:
        if not 1 <= value <= most:
            raise ExportError(f"{foreign}: {name} is {value}, expected 1 to {most}")
    if dim % heads or heads % kv_heads or dim // heads % 2:
        raise ExportError(f"{foreign}: dim {dim}, n_heads {heads}, n_kv_heads {kv_heads} are inconsistent")
    if version == 2 and not 1 <= group <= dim * hidden:
        raise ExportError(f"llama2.c header: group size is {group}, expected a positive number")
    return Header(version, dim, hidden, layers, heads, kv_heads, vocab, context, shared, group, start)
