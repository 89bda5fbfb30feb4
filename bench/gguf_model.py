"""What importing costs a real GGUF model: KL divergence and perplexity on public-domain prose.

python -m bench.gguf_model MODEL.gguf OUT.json [--plot docs/quantization.png]

The reference is the float model that the GGUF file describes: its blocks, dequantized and stored as f32. Every file is
an import of the same GGUF file in another dtype. The text is bench/texts/classics.txt in windows of 512 tokens, and the
KV cache is f32. With llama-cpp-python installed, llama.cpp reads the GGUF file itself, also with an f32 KV cache.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import llamac

Doubles = NDArray[np.float64]
Logits = Callable[[list[int]], NDArray[Any]]

TEXT = Path(__file__).with_name("texts") / "classics.txt"
WINDOW = 512
# Each file's label and its export options.
FILES: dict[str, dict[str, Any]] = {
    "q8 (auto)": {"dtype": "auto"},
    "q4": {"dtype": "q4"},
    "q4, calibrated": {"dtype": "q4", "calibrate": "self"},
    "q4s": {"dtype": "q4s"},
}


def windows(model: llamac.Model) -> list[list[int]]:
    """The text's token ids, WINDOW at a time. Line breaks inside a paragraph become spaces."""
    text = "\n\n".join(paragraph.replace("\n", " ") for paragraph in TEXT.read_text().strip().split("\n\n"))
    ids = [int(token) for token in model.tokenize(text)]
    return [part for first in range(0, len(ids), WINDOW) if len(part := ids[first : first + WINDOW]) > 1]


def log_probabilities(logits: NDArray[Any]) -> Doubles:
    """The log-softmax over the last axis, in float64."""
    shifted: Doubles = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    normalized: Doubles = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normalized


def compare(reference: list[NDArray[Any]], candidate: Logits, texts: list[list[int]]) -> dict[str, float]:
    """KL divergence from the reference's logits in nats per token, and the candidate's perplexity."""
    divergence = surprise = 0.0
    for ids, logits in zip(texts, reference, strict=True):
        expected, found = log_probabilities(logits), log_probabilities(candidate(ids))
        divergence += float((np.exp(expected) * (expected - found)).sum())
        surprise -= float(found[np.arange(len(ids) - 1), ids[1:]].sum())
    n_tokens = sum(map(len, texts))
    return {"nats": divergence / n_tokens, "perplexity": float(np.exp(surprise / (n_tokens - len(texts))))}


def measure(source: Path, folder: Path) -> dict[str, Any]:
    """All rows of one model."""
    path = folder / "file.bin"
    llamac.export.export(source, path, dtype="f32", probe_source=None)
    with llamac.load(path, kv_dtype="f32") as model:
        texts = windows(model)
        reference = [model.logits(ids) for ids in texts]
    stored = iter(reference)
    rows: list[dict[str, Any]] = [{"file": "f32", "bits": 32.0, **compare(reference, lambda ids: next(stored), texts)}]
    for label, options in FILES.items():
        report = llamac.export.export(source, path, probe_source=None, overwrite=True, **options)
        with llamac.load(path, kv_dtype="f32") as model:
            found = compare(reference, model.logits, texts)
        rows.append({"file": label, "bits": round(report.bits_per_weight, 3), **found})
        print(json.dumps(rows[-1]), flush=True)
    if importlib.util.find_spec("llama_cpp"):
        rows.append({"file": "llama.cpp", "bits": None, **compare(reference, llama_cpp(source), texts)})
        print(json.dumps(rows[-1]), flush=True)
    return {"model": source.name, "tokens": sum(map(len, texts)), "rows": rows}


def llama_cpp(source: Path) -> Logits:
    """llama.cpp's logits of every position of a window."""
    import llama_cpp as library

    model = library.Llama(str(source), n_ctx=WINDOW, logits_all=True, verbose=False, type_k=0, type_v=0)

    def logits(ids: list[int]) -> NDArray[Any]:
        model.reset()
        model.eval(ids)
        return np.array(model.scores[: len(ids)])

    return logits


def plot(found: dict[str, Any], path: Path) -> None:
    """Draw each file's divergence, labelled with its perplexity."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in found["rows"] if row["nats"] > 0][::-1]
    labels = [row["file"] + (f"\n{row['bits']:.2f} bits" if row["bits"] else "") for row in rows]
    figure, axis = plt.subplots(figsize=(9, 3.6), layout="constrained")
    bars = axis.barh(labels, [row["nats"] for row in rows], color="tab:blue")
    axis.bar_label(bars, [f"{row['nats']:.4f}, perplexity {row['perplexity']:.1f}" for row in rows], padding=4)
    float_perplexity = found["rows"][0]["perplexity"]
    title = f"Imports of {found['model']} (float model: perplexity {float_perplexity:.1f})"
    axis.set(title=title, xlabel="KL divergence from the float model, nats per token")
    axis.set_xlim(right=1.35 * max(row["nats"] for row in rows))
    axis.grid(alpha=0.3, axis="x")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("out", type=Path, help="JSON with the figures")
    parser.add_argument("--plot", type=Path, help="PNG")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.model, Path(folder))
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
