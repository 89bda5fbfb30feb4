"""The model shapes that benchmarks use, and checkpoints of these shapes with random weights."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from llamac import _core
from llamac.export.checkpoint import Checkpoint, LayerConfig, LazyTensor, ModelConfig
from llamac.export.flat.plan import config_records

POOL = 1 << 22  # random numbers that all tensors are cut from: generating 10^9 would take longer than writing them


@dataclass(frozen=True)
class Shape:
    """A model's dimensions."""

    family: str
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    context: int
    tied: bool


SHAPES = {
    "tinyllama-1.1b": Shape("llama", 2048, 22, 32, 4, 64, 5632, 32000, 2048, False),
    "tinyllama-1.1b-128k": Shape("llama", 2048, 22, 32, 4, 64, 5632, 128256, 8192, True),  # the vocabulary of Llama 3
    "llama-3.2-1b": Shape("llama", 2048, 16, 32, 8, 64, 8192, 128256, 8192, True),
    # without the norms of q and k: a shape has no field for them
    "qwen3-4b": Shape("llama", 2560, 36, 32, 8, 128, 9728, 151936, 8192, True),
    "llama-3-8b": Shape("llama", 4096, 32, 32, 8, 128, 14336, 128256, 8192, False),
    "llama-3-70b": Shape("llama", 8192, 80, 64, 8, 128, 28672, 128256, 8192, False),
    # without its windows, norms and scales: a shape has no fields for them
    "gemma-3-1b": Shape("llama", 1152, 26, 4, 1, 256, 6912, 262144, 32768, True),
    "gpt2": Shape("gpt2", 768, 12, 12, 12, 64, 3072, 50257, 1024, True),
    "stories15m": Shape("llama", 288, 6, 6, 6, 48, 768, 32000, 256, True),
}


def model_config(shape: Shape) -> ModelConfig:
    """The config of a model of this shape."""
    gpt2 = shape.family == "gpt2"
    return ModelConfig(
        dim=shape.dim,
        n_heads=shape.heads,
        n_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        n_token_ids=shape.vocabulary,
        context=shape.context,
        norm="layer" if gpt2 else "rms",
        position="learned" if gpt2 else "rope",
        activation="gelu_tanh" if gpt2 else "silu",
        tied_output=shape.tied,
        norm_eps=1e-5,
        attention_scale=shape.head_dim**-0.5,
        layers=(LayerConfig("plain" if gpt2 else "gated", shape.ffn, rope=-1 if gpt2 else 0),) * shape.layers,
        rope_dim=() if gpt2 else (shape.head_dim,),
        rope_original_context=() if gpt2 else (0,),
        rope_attention_factor=() if gpt2 else (1.0,),
    )


def random_checkpoint(name: str, shape: Shape | None = None) -> Checkpoint:
    """A deterministic random checkpoint. The weights of matrices have a standard deviation of 1 / sqrt(columns)."""
    shape = shape or SHAPES[name]
    checkpoint = Checkpoint(model_config(shape), {}, metadata={"name": f"random {name}", "architecture": shape.family})
    pool = np.random.default_rng(0).standard_normal(POOL, np.float32)
    for tensor, is_matrix, rows, columns in tensors(shape):
        checkpoint.tensors[tensor] = _matrix(pool, tensor, rows, columns) if is_matrix else vector(tensor, columns)
    return checkpoint


def tensors(shape: Shape) -> Iterator[tuple[str, bool, int, int]]:
    """(name, is a matrix, rows, columns) of each tensor, in the order of the flat file."""
    for name, required, is_matrix, rows, columns in _core.slots(*config_records(Checkpoint(model_config(shape), {}))):
        if required or (shape.family == "gpt2" and name.startswith("layers.")):
            yield name, is_matrix, rows, columns


def _matrix(pool: NDArray[np.float32], name: str, rows: int, columns: int) -> LazyTensor:
    start, windows = zlib.crc32(name.encode()), sliding_window_view(pool, columns)

    def read(first: int, last: int) -> NDArray[np.float32]:
        rows: NDArray[np.float32] = windows[(start + np.arange(first, last) * 40503) % len(windows)]
        rows *= np.float32(columns**-0.5)
        return rows

    return LazyTensor((rows, columns), "f32", read)


def vector(name: str, n: int) -> LazyTensor:
    """A vector: ones for norm weights, zeros for biases, base 10000 for RoPE frequencies, -1 for decay rates."""
    numbers = np.zeros(n, np.float32) if name.endswith(".bias") else np.ones(n, np.float32)
    if name.endswith("ssm_a"):
        numbers = -numbers
    if name.endswith("inv_freq"):
        numbers = (10000.0 ** -(np.arange(n) / n)).astype(np.float32)
    return LazyTensor((n,), "f32", lambda first, last: numbers[first:last])
