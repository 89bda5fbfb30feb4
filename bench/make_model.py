"""Makes a model file with random weights in the shape of a real model, for benchmarks.

python -m bench.make_model --shape tinyllama-1.1b --dtype bf16 /tmp/tinyllama.bin
"""

from __future__ import annotations

import argparse
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llamac import _core
from llamac.export.checkpoint import Checkpoint, LayerConfig, LazyTensor, ModelConfig
from llamac.export.writer import config_records, make_plan, temporary_beside, write

# (dim, layers, heads, KV heads, head_dim, FFN, vocabulary, context, tied)
LLAMA_SHAPES = {
    "tinyllama-1.1b": (2048, 22, 32, 4, 64, 5632, 32000, 2048, False),
    "llama-3.2-1b": (2048, 16, 32, 8, 64, 8192, 128256, 8192, True),
    "stories15m": (288, 6, 6, 6, 48, 768, 32000, 256, True),
}
GPT2_SHAPES = {"gpt2": (768, 12, 12, 12, 64, 3072, 50257, 1024, True)}
SHAPES = (*LLAMA_SHAPES, *GPT2_SHAPES)
POOL = 1 << 22  # random numbers that all tensors are cut from: making 10^9 of them would take longer than writing them


def model_config(shape: str) -> ModelConfig:
    """The config of a named shape."""
    gpt2 = shape in GPT2_SHAPES
    dim, layers, heads, kv_heads, head_dim, ffn, vocab, context, tied = (GPT2_SHAPES if gpt2 else LLAMA_SHAPES)[shape]
    return ModelConfig(
        dim=dim,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        n_token_ids=vocab,
        context=context,
        norm="layer" if gpt2 else "rms",
        position="learned" if gpt2 else "rope",
        activation="gelu_tanh" if gpt2 else "silu",
        tied_output=tied,
        norm_eps=1e-5,
        attention_scale=head_dim**-0.5,
        layers=(LayerConfig("plain" if gpt2 else "gated", ffn, rope=-1 if gpt2 else 0),) * layers,
        rope_dim=() if gpt2 else (head_dim,),
        rope_original_context=() if gpt2 else (0,),
        rope_attention_factor=() if gpt2 else (1.0,),
    )


def random_checkpoint(shape: str) -> Checkpoint:
    """A checkpoint of that shape whose numbers depend on nothing but the shape. Matrices have std 1 / sqrt(columns)."""
    checkpoint = Checkpoint(model_config(shape), {}, metadata={"name": f"random {shape}", "architecture": shape})
    pool = np.random.default_rng(0).standard_normal(POOL, np.float32)
    for name, required, is_matrix, rows, columns in _core.slots(*config_records(checkpoint)):
        if required or (checkpoint.config.norm == "layer" and name.startswith("layers.")):
            checkpoint.tensors[name] = _matrix(pool, name, rows, columns) if is_matrix else _vector(name, columns)
    return checkpoint


def _matrix(pool: NDArray[np.float32], name: str, rows: int, columns: int) -> LazyTensor:
    start = zlib.crc32(name.encode())

    def read(first: int, last: int) -> NDArray[np.float32]:
        places = (start + np.arange(first, last)[:, None] * 40503 + np.arange(columns)) % POOL
        return pool[places] * np.float32(columns**-0.5)

    return LazyTensor((rows, columns), "f32", read)


def _vector(name: str, n: int) -> LazyTensor:
    numbers = np.zeros(n, np.float32) if name.endswith(".bias") else np.ones(n, np.float32)
    if name.endswith("inv_freq"):
        numbers = (10000.0 ** -(np.arange(n) / n)).astype(np.float32)
    return LazyTensor((n,), "f32", lambda first, last: numbers[first:last])


def make(shape: str, dtype: str, out: Path) -> None:
    """Writes the file."""
    texts = dict.fromkeys(("tokenizer", "spm", "template", "probes"), b"") | {"metadata": b"{}"}
    with temporary_beside(out) as file:
        write(file, make_plan(random_checkpoint(shape), dtype, texts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--dtype", choices=("f32", "f16", "bf16"), required=True)
    options = parser.parse_args()
    make(options.shape, options.dtype, options.out)


if __name__ == "__main__":
    main()
