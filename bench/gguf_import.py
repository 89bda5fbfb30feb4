"""KL divergence on the built-in models: the loss from importing GGUF files, next to the loss from their own types.

python -m bench.gguf_import OUT.json

llama.cpp quantizes the model to each type (through llama-cpp-python). The file is imported as f32, which represents its
blocks exactly, and as q8 and q4. In the results, "type" is the divergence between the model and the f32 import in nats
per token; "q8" and "q4" are the divergences between the f32 import and those. The texts are the first ones of
bench.quality. Types of about 2 bits and MXFP4 are quantized with an importance matrix, which most of them require: the
mean squares of the inputs seen in calibration.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import llamac
from bench.quality import all_logits, mean_divergence, quantize_gguf, second_moments, sequences
from llamac.export.convert import export
from llamac.export.flat.model import read as read_flat
from llamac.export.gguf.model import read as read_gguf
from llamac.export.gguf.write import write_gguf

# llama.cpp's names of file types. Every matrix gets the type.
KINDS: tuple[str, ...] = ("F16", "BF16", "Q8_0", "Q6_K", "Q5_K_S", "Q5_1", "Q5_0", "Q4_K_S", "Q4_1", "Q4_0")
KINDS += ("IQ4_NL", "IQ4_XS", "Q3_K_S", "IQ3_S", "Q2_K")
# Quantized with an importance matrix. llama.cpp calls a file of IQ2_S "IQ2_M".
WEIGHTED = ("MXFP4_MOE", "IQ3_XXS", "IQ2_M", "IQ2_XS", "IQ2_XXS", "TQ2_0", "TQ1_0", "IQ1_M", "IQ1_S")
DTYPES = ("q8", "q4")
STORIES = 16


def measure(name: str, folder: Path) -> list[dict[str, Any]]:
    """Measure all types on one model; return one row per type."""
    source = llamac.models.path(name)
    with llamac.load(source) as model:
        texts = sequences(model)[:STORIES]
    original = list(all_logits(source, texts))
    before, after = folder / "f32.gguf", folder / "quantized.gguf"
    checkpoint = read_flat(source)
    write_gguf(checkpoint, before, "f32", [])
    shapes = {part: tensor.shape for part, tensor in checkpoint.tensors.items() if len(tensor.shape) == 2}
    importance = {part: np.ones(columns, np.float32) for part, (_, columns) in shapes.items()}
    importance |= second_moments(checkpoint, source, folder)
    rows = []
    for kind in (*KINDS, *WEIGHTED):
        quantize_gguf(before, after, kind, importance if kind in WEIGHTED else None)
        types = sorted({tensor.dtype for tensor in read_gguf(after, []).tensors.values() if len(tensor.shape) == 2})
        paths = {dtype: folder / f"{dtype}.bin" for dtype in ("f32", *DTYPES)}
        for dtype, path in paths.items():
            export(after, path, dtype=dtype, probe_source=None, overwrite=True)
        exact = list(all_logits(paths["f32"], texts))
        row = {"model": name, "file": kind, "types": types, "type": mean_divergence(original, paths["f32"], texts)}
        rows.append(row | {dtype: mean_divergence(exact, paths[dtype], texts) for dtype in DTYPES})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The Markdown table for docs/gguf.md."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    lines = ["| file | " + " | ".join(f"{model}: its type | import as q8 | as q4" for model in models) + " |"]
    lines.append("|---|" + "---:|" * (3 * len(models)))
    for kind in dict.fromkeys(row["file"] for row in rows):
        cells = [row for model in models for row in rows if (row["model"], row["file"]) == (model, kind)]
        numbers = [f"{row[key]:.6f}" for row in cells for key in ("type", *DTYPES)]
        lines.append(f"| {kind} | " + " | ".join(numbers) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in ("stories", "stories-gpt2"):
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(name, Path(folder))
    options.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
