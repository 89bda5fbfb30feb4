"""Tiny BitNet checkpoints with ternary weights, and transformers' float32 logits of them.

    cd tests; python -m golden.ternary        (with the extra `parity`, and accelerate)

makes ternary_references.npz. The checkpoints are the family's case, in the three ways in which transformers reads such
weights.
"""

from __future__ import annotations

import json
import struct
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from golden.family_cases import FAMILY_CASES
from golden.make import auto_class
from golden.make_families import family_checkpoint
from golden.tiny_checkpoints import Config, write_config
from llamac.export.hf.safetensors_file import read_safetensors

REFERENCES = Path(__file__).parent / "ternary_references.npz"
CASE = FAMILY_CASES["bitnet"]
# The values of quantization_config.
KINDS: dict[str, Config] = {
    "packed": {"linear_class": "autobitlinear", "quantization_mode": "offline"},
    "divided": {},  # the default of transformers: scales divide
    "masters": {"linear_class": "autobitlinear", "quantization_mode": "online"},
}
Arrays = dict[str, NDArray[Any]]


def codes_and_scale(name: str, masters: NDArray[np.float32]) -> tuple[NDArray[np.int8], np.float32]:
    """Ternary codes of a matrix, a third of them 0, and a scale in bfloat16."""
    codes = np.where(np.abs(masters) < 0.3, 0, np.sign(masters)).astype(np.int8)
    return codes, np.float32(0.375 + len(name) % 7 / 16)


def packed(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    """(rows / 4, columns) of codes (rows, columns)."""
    quarters = (codes + 1).astype(np.uint8).reshape(4, -1, codes.shape[1])
    found: NDArray[np.uint8] = quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6
    return found


def write(path: Path, tensors: Arrays) -> None:
    """Write a safetensors file of float32 tensors and bytes."""
    header: dict[str, Any] = {}
    end = 0
    for name, values in tensors.items():
        kind = "U8" if values.dtype == np.uint8 else "F32"
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [end, end + values.nbytes]}
        end += values.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(values.tobytes() for values in tensors.values()))


def ternary_checkpoint(root: Path, kind: str, **quantization: object) -> Path:
    """Write a directory of one of KINDS; return it. quantization: other keys of quantization_config."""
    folder = root / kind
    stored = read_safetensors(family_checkpoint(root / f"{kind}-floats", CASE) / "model.safetensors")
    tensors: Arrays = {}
    for name, tensor in stored.items():
        numbers = tensor.read(0, tensor.shape[0])
        if ".layers." in name and len(tensor.shape) == 2 and kind != "masters":
            codes, scale = codes_and_scale(name, numbers)
            tensors[name] = packed(codes)
            tensors[f"{name}_scale"] = np.array([1 / scale if kind == "divided" else scale], np.float32)
        else:
            tensors[name] = numbers
    folder.mkdir()
    config = {"quant_method": "bitnet", **KINDS[kind], **quantization}
    write_config(folder, {**CASE.config, "quantization_config": config})
    write(folder / "model.safetensors", tensors)
    return folder


def transformers_logits(folder: Path) -> NDArray[np.float32]:
    """Logits of all positions, (n, vocab_size)."""
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of its compiler
        torch._dynamo.config.disable = True  # type: ignore[attr-defined]
        model = auto_class(folder).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits: NDArray[np.float32] = model(torch.tensor([CASE.ids])).logits[0].numpy()
    return logits


def ternary_references() -> dict[str, NDArray[np.float32]]:
    """The stored logits of each kind's stored rows, (n, vocab_size)."""
    with np.load(REFERENCES) as file:
        return {kind: file[kind] for kind in KINDS}


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        arrays = {
            kind: transformers_logits(ternary_checkpoint(Path(temporary), kind))[CASE.stored_rows] for kind in KINDS
        }
    np.savez_compressed(REFERENCES, **arrays)
    print(f"{REFERENCES}: {REFERENCES.stat().st_size} bytes")


if __name__ == "__main__":
    main()
