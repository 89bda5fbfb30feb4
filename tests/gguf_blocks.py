"""Random blocks of the GGUF types that flat files also have, and GGUF files made of them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_samples import Type, converted, metadata, write_tensors
from numpy.typing import NDArray

from golden.tiny_checkpoints import Config, Tensors, random_tensor, tensors

Blocks = NDArray[np.uint8]

# Offsets of the floats that scale a block, in bytes: f16, and in mxfp4 an exponent. (0,) if it is not listed.
SCALES = {"q4_1": (0, 2), "q5_1": (0, 2), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}
EXTREMES = np.array([0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x3C00], np.uint16)  # zero to 65504
EXPONENTS = np.array([0, 1, 2, 127, 200, 252], np.uint8)


def kind_of(dtype: str) -> Any:
    """The gguf package's type."""
    return Type[dtype.upper()]


def block_of(dtype: str) -> tuple[int, int]:
    """(columns, bytes) of a block."""
    columns, size = gguf.GGML_QUANT_SIZES[kind_of(dtype)]
    return int(columns), int(size)


def dequantized(blocks: Blocks, dtype: str) -> NDArray[np.float32]:
    """Rows of blocks as numbers."""
    found: NDArray[np.float32] = gguf.quants.dequantize(blocks, kind_of(dtype))
    return found


def with_scale(blocks: Blocks, dtype: str, scale: float) -> Blocks:
    """Blocks whose floats are all `scale`; in mxfp4 the nearest power of two."""
    _, size = block_of(dtype)
    found = blocks.reshape(len(blocks), -1, size).copy()
    if dtype == "mxfp4":
        found[..., 0] = 128 + round(np.log2(scale))
    else:
        for offset in SCALES.get(dtype, (0,)):
            found[..., offset : offset + 2] = np.array([scale], "<f2").view(np.uint8)
    rows: Blocks = found.reshape(len(blocks), -1)
    return rows


def random_blocks(dtype: str, rows: int, columns: int, seed: int = 0) -> Blocks:
    """Random bits with finite scales, some of them extreme."""
    random = np.random.default_rng(seed)
    width, size = block_of(dtype)
    blocks = random.integers(0, 256, (rows, columns // width, size), np.uint8)
    chosen = random.integers(0, len(EXTREMES), blocks.shape[:2])
    if dtype == "mxfp4":
        blocks[..., 0] = EXPONENTS[chosen % len(EXPONENTS)]
        return blocks.reshape(rows, -1)
    for offset in SCALES.get(dtype, (0,)):
        scale = np.where(chosen % 2, EXTREMES[chosen], random.integers(0x2000, 0x4000, chosen.shape, np.uint16))
        blocks[..., offset : offset + 2] = scale.astype("<u2")[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def weights(dtype: str, rows: int, columns: int, seed: int = 0) -> Blocks:
    """Random codes whose numbers have a root mean square of about 1 / sqrt(columns), as weights do."""
    blocks = with_scale(random_blocks(dtype, rows, columns, seed), dtype, 1.0)
    size = float(np.sqrt(np.square(dequantized(blocks, dtype).astype(np.float64)).mean()))
    return with_scale(blocks, dtype, columns**-0.5 / size)


def family_tensors(config: Config) -> Tensors:
    """The weights of llama, mixtral or phi3 by Hugging Face's names."""
    found = tensors({**config, "model_type": "llama"})
    kind, experts = config["model_type"], range(config.get("num_local_experts", 0))
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        q, k, v, gate, up, down = (
            f"{name}.{part}_proj.weight"
            for part in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up", "mlp.down")
        )
        if kind == "phi3":
            found[f"{name}.self_attn.qkv_proj.weight"] = np.concatenate([found.pop(part) for part in (q, k, v)])
            found[f"{name}.mlp.gate_up_proj.weight"] = np.concatenate([found.pop(part) for part in (gate, up)])
        if kind == "mixtral":
            moe = f"{name}.block_sparse_moe"
            found[f"{moe}.gate.weight"] = random_tensor(moe, (len(experts), config["hidden_size"]))
            for part, full in (("w1", gate), ("w2", down), ("w3", up)):
                values = found.pop(full)
                found |= {f"{moe}.experts.{number}.{part}.weight": values for number in experts}
    return found


def write_blocks(
    path: Path, config: Config, dtypes: Mapping[str, str], keys: Mapping[str, Any] | None = None
) -> tuple[Path, dict[str, Blocks]]:
    """Write a GGUF file with random weights.

    Args:
        path: The file.
        config: The model's config.
        dtypes: The dtype of every matrix: by its name in GGUF, or "" for all others.
        keys: Further metadata.

    Returns:
        The file, and the blocks of every matrix by its name in GGUF: (rows, bytes), or (experts, rows, bytes).
    """
    arch, own = metadata(config)
    found: dict[str, Blocks] = {}
    rest: dict[str, NDArray[Any]] = {}
    for name, values in converted(config, family_tensors(config)).items():
        if values.ndim == 1 or name.endswith("ffn_gate_inp.weight"):  # routers are floats
            rest[name] = values
            continue
        dtype = dtypes.get(name, dtypes[""])
        rows = int(np.prod(values.shape[:-1]))
        blocks = weights(dtype, rows, values.shape[-1], zlib.crc32(name.encode()))
        found[name] = blocks.reshape(*values.shape[:-1], -1)
    kinds = {name: kind_of(dtypes.get(name, dtypes[""])) for name in found}
    prefixed = {f"{arch}.{key}": value for key, value in own.items()}
    return write_tensors(path, {**rest, **found}, kinds, {**prefixed, **(keys or {})}, arch), found
