"""Few bits per weight: llamac's q3 and q2 against llama.cpp's IQ3_S and IQ2_M, on the matrices that those can store.

    python -m bench.few_bits MODEL.gguf [--tokens 1024] [--ggml LIBRARY] [--result NAME]

IQ3_S and IQ2_M need rows of a multiple of 256 columns. In a model of another width, llama.cpp stores most matrices in
wider types, so whole files would not compare the types. Here only the layers' matrices of such widths are quantized;
all others keep their numbers. IQ2_M is a mixture: IQ2_S, but IQ3_S in attn_v, in attn_out, and in ffn_down in the first
eighth of the layers.

The divergence is measured on the first tokens of export/classics.txt, and both sides are calibrated on the rest of it.
For the built-in model `stories`, the two texts are stories of two series of the generator that training did not use.
ggml's quantizer gets the mean squares of each matrix's inputs, which is what importance matrices contain, and llamac's
gets their second moments. The packages llama-cpp-python and libggml-python contain ggml's library; the package gguf
reads what that library writes.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import llamac
from bench.quality import CALIBRATION, HELD_OUT
from bench.stamp import save
from llamac.engine.model import Model
from llamac.export.calibrate import SEQUENCE, TOKENS, Calibration, calibrate
from llamac.export.checkpoint import Checkpoint
from llamac.export.quality.measures import Reference
from llamac.export.quality.tensors import Stored, cost, layer_of
from llamac.export.quantize import Quantizer
from llamac.export.read import read_checkpoint
from llamac.export.texts import built_in_text, windows
from llamac.format.strips import pack_strips
from llamac.models.training.generator import story

Floats = NDArray[np.float32]
SUPER_BLOCK = 256  # columns that share an f16 scale in llama.cpp's types
IQ_TYPES = ("iq3_s", "iq2_s")
LIBRARIES = {"llama_cpp": "lib/libggml-base.so*", "libggml": "lib*/libggml-base.so*"}


class Ggml:
    """ggml's quantizer.

    Args:
        path: The library libggml-base; None to look for it in the installed packages.
    """

    def __init__(self, path: Path | None) -> None:
        self._library = ctypes.CDLL(str(path or self._find()))
        self._library.ggml_quantize_chunk.restype = ctypes.c_size_t

    @staticmethod
    def _find() -> Path:
        for package, pattern in LIBRARIES.items():
            spec = importlib.util.find_spec(package)
            for folder in (spec.submodule_search_locations or []) if spec else []:
                for path in sorted(Path(folder).glob(pattern)):
                    return path
        raise SystemExit("no libggml-base found: install libggml-python or llama-cpp-python, or name it with --ggml")

    def quantized(self, rows: Floats, kind: str, importance: Floats | None) -> tuple[Floats, int]:
        """Quantize a matrix; return what gguf reads from the result, and the result's bytes."""
        import gguf

        number = gguf.GGMLQuantizationType[kind.upper()]
        block, block_bytes = gguf.GGML_QUANT_SIZES[number]
        n, columns = rows.shape
        out = np.empty((n, columns // block * block_bytes), np.uint8)
        written = self._library.ggml_quantize_chunk(
            ctypes.c_int(number),
            ctypes.c_void_p(rows.ctypes.data),
            ctypes.c_void_p(out.ctypes.data),
            ctypes.c_int64(0),
            ctypes.c_int64(n),
            ctypes.c_int64(columns),
            ctypes.c_void_p(importance.ctypes.data if importance is not None else None),
        )
        if written != out.nbytes:
            raise SystemExit(f"ggml wrote {written} bytes of {kind}, expected {out.nbytes}")
        return np.ascontiguousarray(gguf.quants.dequantize(out, number), np.float32), out.nbytes


class Matrices:
    """The matrices that are compared, in every form.

    Args:
        checkpoint: The model.
        calibration: Their inputs.
        ggml: llama.cpp's quantizer.
    """

    def __init__(self, checkpoint: Checkpoint, calibration: Calibration, ggml: Ggml) -> None:
        self._checkpoint = checkpoint
        self._calibration = calibration
        self._ggml = ggml
        self.names = [
            name
            for name, tensor in checkpoint.tensors.items()
            if layer_of(name) is not None and len(tensor.shape) == 2 and tensor.shape[1] % SUPER_BLOCK == 0
        ]
        self.weights = sum(int(np.prod(checkpoint.tensors[name].shape)) for name in self.names)
        self._made: dict[tuple[str, str, bool], tuple[Stored, int]] = {}

    def made(self, name: str, kind: str, calibrated: bool = True) -> tuple[Stored, int]:
        """A quantized matrix: what the engine computes with, and its size in a file in bytes."""
        key = name, kind, calibrated
        if key not in self._made:
            rows = np.ascontiguousarray(self._checkpoint.tensors[name].array())
            if kind in IQ_TYPES:
                numbers, size = self._ggml.quantized(rows, kind, self._mean_squares(name) if calibrated else None)
                self._made[key] = ("f32", pack_strips(numbers, "f32")), size
            else:
                with Quantizer(1) as quantizer:
                    data = quantizer.pack(rows, kind, self._calibration.stats(name) if calibrated else None)
                self._made[key] = (kind, data), len(data)
        return self._made[key]

    def _mean_squares(self, name: str) -> Floats:
        inputs = self._calibration.inputs(name)
        assert inputs is not None
        return np.ascontiguousarray(np.square(inputs, dtype=np.float64).mean(axis=0), np.float32)


def like_iq2_m(names: list[str], narrow: str, wide: str) -> dict[str, str]:
    """IQ2_M's choice in a model with fewer than 4 query heads per key head. (With more, attn_v is Q4_K.)"""
    layers = 1 + max(layer_of(name) or 0 for name in names)

    def is_wide(name: str) -> bool:
        return name.split(".")[2] in ("attn_v", "attn_out") or (
            "ffn_down" in name and (layer_of(name) or 0) < layers // 8
        )

    return {name: wide if is_wide(name) else narrow for name in names}


def narrowed(matrices: Matrices, wide: str, narrow: str, budget: int) -> dict[str, str]:
    """One type, except that the middle matrices get a narrower one: as few as the budget of bytes demands."""
    names = matrices.names
    kinds = dict.fromkeys(names, wide)
    middle = (len(names) - 1) / 2
    for name in sorted(names, key=lambda name: abs(names.index(name) - middle)):
        if sum(matrices.made(*pair)[1] for pair in kinds.items()) <= budget:
            break
        kinds[name] = narrow
    return kinds


def measure(source: Path, tokens: int, ggml: Ggml, folder: Path) -> dict[str, Any]:
    """All rows of one model."""
    checkpoint = read_checkpoint(source, [])
    rows: list[dict[str, Any]] = []
    with llamac.load(source, kv_dtype="f32", threads=1) as base:
        measured, sequences = texts(base, tokens)
        with calibrate(checkpoint, base, sequences, folder) as calibration, Reference(base, measured) as reference:
            matrices = Matrices(checkpoint, calibration, ggml)

            def add(label: str, kinds: dict[str, str], calibrated: bool = True) -> int:
                parts = {name: matrices.made(name, kind, calibrated) for name, kind in kinds.items()}
                size = sum(size for _, size in parts.values())
                found = {
                    "types": label,
                    "calibrated": calibrated,
                    "bits_per_weight": round(8 * size / matrices.weights, 4),
                    "kl_mean": cost(base, {name: stored for name, (stored, _) in parts.items()}, reference),
                    "matrices": dict(Counter(kinds.values())),
                }
                rows.append(found)
                print(f"{label:36} {found['bits_per_weight']:.3f} bits  {found['kl_mean']:.4f} nats", flush=True)
                return size

            names = matrices.names
            if not names:
                raise SystemExit(f"{source}: no matrix of a layer has a multiple of {SUPER_BLOCK} columns")
            budget = add("iq3_s", dict.fromkeys(names, "iq3_s"))
            add("q3", dict.fromkeys(names, "q3"))
            add("iq2_m", like_iq2_m(names, "iq2_s", "iq3_s"))
            add("q2, and q3 where iq2_m has iq3_s", like_iq2_m(names, "q2", "q3"))
            add("iq2_s", dict.fromkeys(names, "iq2_s"))
            add("q2", dict.fromkeys(names, "q2"))
            add("q3 and q2, at most as iq3_s", narrowed(matrices, "q3", "q2", budget))
            for kind in ("iq3_s", "q3", "iq2_s", "q2"):
                add(f"{kind}, not calibrated", dict.fromkeys(names, kind), False)
    return {
        "model": source.name,
        "measured_tokens": sum(map(len, measured)),
        "calibration_tokens": sum(map(len, sequences)),
        "matrices": names,
        "rows": rows,
    }


def texts(base: Model, tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """Windows of the first `tokens` tokens of a text, and whole windows of another text or of the rest."""

    def cut(text: str, most: int) -> list[list[int]]:
        encode = partial(base.tokenize, add_special=False, parse_special=False)
        return windows(encode, base.tokenize(""), text, most, SEQUENCE)

    if base.name == "stories":
        held_out, other = ("\n\n".join(story(series, i).text for i in range(100)) for series in (HELD_OUT, CALIBRATION))
        return cut(held_out, tokens), cut(other, TOKENS)
    found, n = cut(built_in_text(), TOKENS), tokens // SEQUENCE
    return found[:n], [ids for ids in found[n:] if len(ids) == SEQUENCE]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of the measured text (default: %(default)s)")
    parser.add_argument("--ggml", type=Path, metavar="LIBRARY", help="libggml-base.so")
    parser.add_argument("--result", metavar="NAME")
    options = parser.parse_args()
    if options.tokens < SEQUENCE:
        parser.error(f"--tokens is {options.tokens}, expected at least {SEQUENCE}, the length of a window")
    ggml = Ggml(options.ggml)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.model, options.tokens, ggml, Path(folder))
    if options.result:
        save(options.result, found)


if __name__ == "__main__":
    main()
