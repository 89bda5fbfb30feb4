"""What quantizing costs the built-in models: how far their probabilities move, on stories that no training has seen.

python -m bench.quality OUT.json [--plot docs/quantization.png]

Every file is compared with the bf16 model itself: the mean Kullback-Leibler divergence per token, in nats, over stories
of a series of the generator that is neither the training's nor the calibration's. With llama-cpp-python and gguf
installed, llama.cpp's Q4_K joins in: the weights go through its quantizer, every matrix is checked to be Q4_K, and
`gguf` unpacks them into a float file for our engine. So Q4_K is spared the rounding of inputs that our q4 (like
llama.cpp itself) has.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import llamac
from llamac.export import flat
from llamac.export.calibrate import calibrate
from llamac.export.checkpoint import Checkpoint
from llamac.export.convert import export
from llamac.export.gguf.families import fused_name, gguf_name
from llamac.export.gguf.model import read as read_gguf
from llamac.export.gguf.write import write_gguf
from llamac.export.writer import make_plan, temporary_beside, write
from llamac.models.generator import story
from llamac.probes import divergence

Floats = NDArray[np.float32]
HELD_OUT, CALIBRATION = 777, 778  # series of the generator; training used others
STORIES = 64
LENGTH = 256
POSITIONS = "position_embedding.weight"  # llama.cpp does not quantize it, so nobody does here
# (label, dtype, pure, calibrated)
OURS = (
    ("q8", "q8", False, None),
    ("q4", "q4", False, None),
    ("q4 calibrated", "q4", False, "self"),
    ("q4 pure", "q4", True, None),
    ("q4 pure, calibrated", "q4", True, "self"),
    ("q4 pure, calibrated on a text", "q4", True, "text"),
    ("q4s", "q4s", False, None),
    ("q4s calibrated", "q4s", False, "self"),
    ("q4s pure", "q4s", True, None),
    ("q4s pure, calibrated", "q4s", True, "self"),
)


def sequences(model: llamac.Model) -> list[list[int]]:
    """The held-out stories' token ids."""
    return [list(model.tokenize(story(HELD_OUT, i).text))[:LENGTH] for i in range(STORIES)]


def all_logits(path: Path, texts: list[list[int]]) -> Iterator[Floats]:
    with llamac.load(path, kv="f32") as model, model.session(context=LENGTH) as session:
        for ids in texts:
            session.rewind(0)
            found = session.eval(ids, logits="all")
            assert found is not None
            yield found


def mean_divergence(reference: list[Floats], path: Path, texts: list[list[int]]) -> float:
    """Nats per token."""
    parts = [divergence(one, other) * len(one) for one, other in zip(reference, all_logits(path, texts), strict=True)]
    return sum(parts) / sum(len(one) for one in reference)


def matrix_bits(path: Path) -> float:
    """Bits per number of the matrices that are quantized at all."""
    with llamac.load(path) as model:
        found = [tensor for tensor in model.file.tensors if len(tensor.shape) == 2 and tensor.name != POSITIONS]
    return 8 * sum(tensor.bytes for tensor in found) / sum(int(np.prod(tensor.shape)) for tensor in found)


def measure(source: Path, folder: Path) -> list[dict[str, Any]]:
    """The rows of one model's table."""
    with llamac.load(source) as model:
        texts, name = sequences(model), model.name
    reference = list(all_logits(source, texts))
    text = folder / "calibration.txt"
    text.write_text("\n\n".join(story(CALIBRATION, i).text for i in range(300)))
    rows = []

    def add(label: str, bits: float, path: Path) -> None:
        rows.append(
            {"model": name, "file": label, "bits": round(bits, 3), "nats": mean_divergence(reference, path, texts)}
        )
        print(json.dumps(rows[-1]), flush=True)

    keep = [(POSITIONS, "bf16")] if POSITIONS in flat.read(source).tensors else []
    for label, dtype, pure, way in OURS:
        path = folder / "ours.bin"
        export(
            source,
            path,
            dtype=dtype,
            pure=pure,
            dtype_map=keep,
            calibrate=text if way == "text" else way,
            probe_source=None,
            overwrite=True,
        )
        add(label, matrix_bits(path), path)
    if importlib.util.find_spec("llama_cpp") and importlib.util.find_spec("gguf"):
        for label, weighted in (("Q4_K", False), ("Q4_K with importance", True)):
            add(label, 4.5, q4_k(source, folder / "theirs.bin", weighted, folder))
    return rows


# ---- llama.cpp's Q4_K


def q4_k(source: Path, path: Path, weighted: bool, folder: Path) -> Path:
    """A float file with the weights as Q4_K stores them. weighted: with the second moments of the inputs that our
    calibration sees, llama.cpp's importance matrix. Ends the program if a matrix is not Q4_K."""
    checkpoint = flat.read(source)
    importance = second_moments(checkpoint, source, folder) if weighted else {}
    before, after = folder / "f32.gguf", folder / "q4_k.gguf"
    write_gguf(checkpoint, before, "f32", [])
    quantize_gguf(before, after, "Q4_K_S", importance)
    tensors = read_gguf(after, []).tensors
    for name, tensor in tensors.items():
        if len(tensor.shape) == 2 and tensor.dtype != "q4_k" and name != POSITIONS:
            raise SystemExit(f"{name} is {tensor.dtype}, not Q4_K")
    texts = dict.fromkeys(("tokenizer", "spm", "template", "probes"), b"") | {"metadata": b"{}"}
    with temporary_beside(path) as file:
        write(file, make_plan(replace(checkpoint, tensors=tensors), "f32", texts))
    return path


def quantize_gguf(before: Path, after: Path, kind: str, importance: Mapping[str, Floats] | None = None) -> None:
    """llama.cpp's quantizer, every matrix to one type. kind: llama.cpp's name of such a file. importance: of the input
    columns of our matrices, by our names."""
    import llama_cpp

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    settings.pure = True
    settings.nthread = 1
    if importance:
        entry_type = llama_cpp.llama_cpp.llama_model_imatrix_data
        # q, k and v see the same inputs, so that it does not matter whose name one tensor of the three gets
        columns = {(fused_name(name) or (gguf_name(name),))[0]: values for name, values in importance.items()}
        columns |= {gguf_name(name): values for name, values in importance.items()}
        entries = (entry_type * (len(columns) + 1))()  # the last one is empty: the end
        for entry, (name, values) in zip(entries, columns.items(), strict=False):
            entry.name = name.encode()
            entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            entry.size = len(values)
        settings.imatrix = ctypes.cast(entries, ctypes.POINTER(entry_type))
    if llama_cpp.llama_model_quantize(str(before).encode(), str(after).encode(), ctypes.byref(settings)):
        raise SystemExit(f"llama.cpp does not quantize {before} to {kind}")


def second_moments(checkpoint: Checkpoint, source: Path, folder: Path) -> dict[str, Floats]:
    """mean(x^2) of every matrix's input columns, over the text that the model writes."""
    found = {}
    with llamac.load(source, kv="f32") as model, calibrate(checkpoint, model, None, folder) as calibration:
        for name, tensor in checkpoint.tensors.items():
            if len(tensor.shape) == 2 and name != POSITIONS:
                inputs = calibration.inputs(name)
                if inputs is not None:
                    found[name] = np.ascontiguousarray((inputs.astype(np.float64) ** 2).mean(axis=0), np.float32)
    return found


# ---- the plot


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = plt.subplots(1, len(models), figsize=(12, 4.4), layout="constrained")
    for axis, model in zip(np.atleast_1d(axes), models, strict=True):
        found = [row for row in rows if row["model"] == model][::-1]
        colors = [
            "tab:orange"
            if row["file"].startswith("Q4_K")
            else "tab:blue"
            if "calibrated" in row["file"]
            else "tab:gray"
            for row in found
        ]
        labels = [f"{row['file']} ({row['bits']:.2f} bits)" for row in found]
        bars = axis.barh(labels, [row["nats"] for row in found], color=colors)
        axis.bar_label(bars, [f"{row['nats']:.1e}" for row in found], padding=3, fontsize=8)
        axis.set(title=model, xlabel="KL divergence, nats per token", xscale="log")
        axis.set_xlim(right=4 * max(row["nats"] for row in found))
        axis.grid(alpha=0.3, axis="x")
    figure.savefig(path, dpi=110)


def table(rows: list[dict[str, Any]]) -> str:
    """The table of docs/quantization.md."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    cells = {(row["model"], row["file"]): row for row in rows}
    lines = ["| file | " + " | ".join(f"{model}: bits | nats per token | of Q4_K" for model in models) + " |"]
    lines.append("|---|" + "---:|" * (3 * len(models)))
    for label in dict.fromkeys(row["file"] for row in rows):
        parts = []
        for model in models:
            row, other = cells[model, label], cells.get((model, "Q4_K"))
            share = f"{row['nats'] / other['nats']:.0%}" if other else ""
            parts.append(f"{row['bits']:.2f} | {row['nats']:.6f} | {share}")
        lines.append(f"| {label} | " + " | ".join(parts) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="JSON with the figures")
    parser.add_argument("--plot", type=Path, help="PNG")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in ("stories", "stories-gpt2"):
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(Path("models", f"{name}.bin"), Path(folder))
    options.out.write_text(json.dumps(rows, indent=1) + "\n")
    if options.plot:
        plot(rows, options.plot)
    print(table(rows))


if __name__ == "__main__":
    main()
