"""What a real GGUF model loses in imports and in llama.cpp: KL divergence, perplexity and greedy tokens.

    python -m bench.gguf_model MODEL.gguf OUT.json [--llama-cpp LIBRARY] [--plot docs/quantization.png]

The reference is the float model that the GGUF file describes: its blocks, dequantized to f32 and computed by
transformers in float32. Every file is an import of the same GGUF file. The text is export/classics.txt in windows
of 512 tokens, and the KV caches are f32. LIBRARY exports llama.cpp's C functions (bench.llama_library); it reads the
GGUF file itself.

"largest difference" and "rms difference" compare logits with the reference's, in units of the standard deviation of
the reference's logits at the same position.

"greedy" continues ten prompts by 200 tokens with llamac's default import, then checks each token against the best one
of the reference after the same text. "close" is the largest difference between the reference's logits of its choice and
of llamac's, relative to the largest logit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import llamac
from bench.llama_library import LlamaLibrary
from bench.stamp import stamp
from llamac.export.texts import built_in_text

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Logits = Callable[[list[int]], Floats]

WINDOW = 512
ROWS = 32  # positions whose probabilities are compared at once
TOKENS = 200
# Each file's label and its export options.
FILES: dict[str, dict[str, Any]] = {
    "default": {},
    "q8": {"dtype": "q8"},
    "q6": {"dtype": "q6"},
    "q4": {"dtype": "q4"},
    "q4, calibrated": {"dtype": "q4", "calibrate": "self"},
    "q4s": {"dtype": "q4s"},
}
PROMPTS = (
    "Once upon a time, in a small village by the sea,",
    "The three primary colors are",
    "Water boils at",
    "In 1492, Christopher Columbus",
    "To make a good cup of tea, first",
    "The capital of France is",
    "def fibonacci(n):",
    "Dear Sir or Madam,",
    "The difference between a frog and a toad is",
    "It was a dark and stormy night;",
)


def windows(model: llamac.Model) -> list[list[int]]:
    """The text's token ids, WINDOW at a time. Line breaks inside a paragraph become spaces."""
    text = built_in_text()
    ids = [int(token) for token in model.tokenize(text)]
    return [part for first in range(0, len(ids), WINDOW) if len(part := ids[first : first + WINDOW]) > 1]


def log_probabilities(logits: Floats) -> Doubles:
    """The log-softmax over the last axis, in float64."""
    shifted: Doubles = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    normalized: Doubles = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normalized


def differences(reference: Floats, candidate: Floats) -> tuple[float, float]:
    """How far logits are from the reference's, relative to the spread of the reference's logits at each position.

    Args:
        reference: Logits, (positions, vocabulary).
        candidate: Other logits of the same positions.

    Returns:
        The largest difference, and the sum over the positions of the mean squared difference. Both are in units of the
        standard deviation of the reference's logits at the position.
    """
    expected = reference.astype(np.float64)
    relative = (candidate - expected) / expected.std(axis=1, keepdims=True)
    return float(np.abs(relative).max()), float((relative**2).mean(axis=1).sum())


class Row:
    """The sums over all tokens of one file."""

    def __init__(self, label: str, bits: float | None) -> None:
        self.label = label
        self.bits = bits
        self._divergence = self._surprise = self._largest = self._squares = 0.0
        self._tokens = self._predicted = self._same = 0

    def add(self, ids: list[int], reference: Floats, candidate: Floats) -> None:
        """Add the logits of a window."""
        for first in range(0, len(ids), ROWS):
            last = min(first + ROWS, len(ids))
            expected = log_probabilities(reference[first:last])
            found = expected if candidate is reference else log_probabilities(candidate[first:last])
            self._divergence += float((np.exp(expected) * (expected - found)).sum())
            self._same += int((expected.argmax(axis=1) == found.argmax(axis=1)).sum())
            largest, squares = differences(reference[first:last], candidate[first:last])
            self._largest = max(self._largest, largest)
            self._squares += squares
            following = ids[first + 1 : last + 1]
            self._surprise -= float(found[np.arange(len(following)), following].sum())
            self._predicted += len(following)
        self._tokens += len(ids)

    def result(self) -> dict[str, Any]:
        """KL divergence in nats per token, perplexity, the share of equal best tokens, and distances of logits."""
        return {
            "file": self.label,
            "bits": self.bits,
            "nats": self._divergence / self._tokens,
            "perplexity": float(np.exp(self._surprise / self._predicted)),
            "same best token": self._same / self._tokens,
            "largest difference": self._largest,
            "rms difference": (self._squares / self._tokens) ** 0.5,
        }


class Reference:
    """The dequantized model in transformers, in float32.

    Args:
        source: The GGUF file.
        folder: Where to write its weights as a Hugging Face directory.
        threads: Number of threads.
    """

    def __init__(self, source: Path, folder: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        llamac.export.export(source, folder, to="hf", dtype="f32", tokenizer=False)
        torch.set_num_threads(threads)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logits(self, ids: list[int]) -> Floats:
        """The logits of every position of a text."""
        with self._torch.no_grad():
            found: Floats = self._model(self._torch.tensor([ids])).logits[0].numpy()
        return found


def greedy(model: llamac.Model, reference: Logits) -> list[dict[str, Any]]:
    """Continue the prompts with the most probable tokens, and compare each with the reference's choice."""
    found = []
    for prompt in PROMPTS:
        ids = [int(token) for token in model.tokenize(prompt)]
        start = len(ids)
        with model.session(context=start + TOKENS, kv_dtype="f32") as session:
            logits = session.eval(ids)
            for _ in range(TOKENS):
                assert logits is not None
                ids.append(int(np.argmax(logits)))
                logits = session.eval(ids[-1:])
        expected = reference(ids[:-1])[start - 1 :]
        best = expected.argmax(axis=1)
        other = np.flatnonzero(best != ids[start:])
        rows = expected[other]
        gaps = (rows.max(axis=1) - rows[np.arange(len(other)), np.array(ids[start:])[other]]) / np.abs(rows).max(axis=1)
        found.append(
            {
                "prompt": prompt,
                "tokens": TOKENS,
                "equal from the start": int(other[0]) if len(other) else TOKENS,
                "different choices": len(other),
                "close": round(float(gaps.max(initial=0.0)), 6),
            }
        )
    return found


def measure(source: Path, folder: Path, labels: list[str], library: Path | None, threads: int) -> dict[str, Any]:
    """All rows of one model."""
    reference = Reference(source, folder / "hf", threads)
    rows: list[tuple[Row, Logits]] = [(Row("f32 (transformers)", 32.0), reference.logits)]
    with contextlib.ExitStack() as stack:
        for number, label in enumerate(labels):
            path = folder / f"{number}.bin"
            report = llamac.export.export(source, path, probe_source=None, **FILES[label])
            model = stack.enter_context(llamac.load(path, kv_dtype="f32", threads=threads))
            dtypes = "/".join(dict.fromkeys(tensor.dtype for tensor in model.file.tensors if len(tensor.shape) == 2))
            name = f"{label} ({dtypes})" if label == "default" else label
            rows.append((Row(name, round(report.bits_per_weight, 3)), model.logits))
            if not number:
                first = model
        if library is not None:
            theirs = stack.enter_context(contextlib.closing(LlamaLibrary(library, source, WINDOW, threads)))
            rows.append((Row("llama.cpp", None), theirs.logits))
        texts = windows(first)
        for ids in texts:
            expected = reference.logits(ids)
            for row, logits in rows:
                row.add(ids, expected, expected if logits == reference.logits else logits(ids))
        results = [row.result() for row, _ in rows]
        continued = greedy(first, reference.logits)
    return {"model": source.name, "tokens": sum(map(len, texts)), "rows": results, "greedy": continued}


def plot(found: dict[str, Any], path: Path) -> None:
    """Draw each file's divergence, labeled with its perplexity."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in found["rows"] if row["nats"] > 0][::-1]
    labels = [row["file"] + (f"\n{row['bits']:.2f} bits" if row["bits"] else "") for row in rows]
    figure, axis = plt.subplots(figsize=(9, 0.9 + 0.45 * len(rows)), layout="constrained")
    bars = axis.barh(labels, [row["nats"] for row in rows], color="tab:blue")
    axis.bar_label(bars, [f"{row['nats']:.2g}, perplexity {row['perplexity']:.1f}" for row in rows], padding=4)
    float_perplexity = found["rows"][0]["perplexity"]
    title = f"Imports of {found['model']} (float model: perplexity {float_perplexity:.1f})"
    axis.set(title=title, xlabel="KL divergence from the float model, nats per token")
    axis.set_xscale("log")  # exact imports differ from coarse ones by orders of magnitude
    axis.set_xlim(right=30 * max(row["nats"] for row in rows))  # room for the labels
    axis.grid(alpha=0.3, axis="x")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("out", type=Path, help="JSON file for the figures")
    parser.add_argument(
        "--files", default=";".join(FILES), help="which imports, separated by semicolons (default: all)"
    )
    parser.add_argument("--llama-cpp", type=Path, metavar="LIBRARY", help="a library that exports llama.h")
    parser.add_argument("--threads", type=int, default=2, help="number of threads (default: %(default)s)")
    parser.add_argument("--plot", type=Path, help="PNG file for the plot")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.model, Path(folder), options.files.split(";"), options.llama_cpp, options.threads)
    options.out.write_text(json.dumps({**stamp(), **found}, indent=1) + "\n")
    for row in found["rows"]:
        print(json.dumps(row))
    for row in found["greedy"]:
        print(json.dumps(row))
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
