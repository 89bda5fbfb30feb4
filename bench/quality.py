"""Quantization loss of the built-in models on held-out stories.

python -m bench.quality OUT.json

The loss is the mean Kullback-Leibler divergence from the bf16 model, in nats per token. The stories come from a series
of the generator that neither training nor calibration uses. If llama-cpp-python and gguf are installed, the benchmark
also measures llama.cpp's Q4_K: llama.cpp's quantizer quantizes the weights, the benchmark checks that every matrix is
Q4_K, and `gguf` unpacks them into a float file for llamac. So Q4_K is spared the rounding of inputs, which llamac's q4
and llama.cpp itself apply.
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
from llamac.export.calibrate import calibrate
from llamac.export.checkpoint import Checkpoint
from llamac.export.convert import export
from llamac.export.flat.model import read as read_flat
from llamac.export.flat.plan import make_plan
from llamac.export.flat.stream import write_file
from llamac.export.gguf.families import fused_name, gguf_name
from llamac.export.gguf.model import read as read_gguf
from llamac.export.gguf.write import write_gguf
from llamac.export.targets import atomic_file
from llamac.format.probes import divergence
from llamac.models.training.generator import story

Floats = NDArray[np.float32]
HELD_OUT, CALIBRATION = 777, 778  # series of the story generator that training did not use
STORIES = 64
LENGTH = 256
POSITIONS = "position_embedding.weight"  # not quantized here, since llama.cpp does not
# (label, dtype, pure, calibrated)
OURS = (
    ("q8", "q8", False, None),
    ("q6", "q6", False, None),
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
    """Token ids of the held-out stories."""
    return [list(model.tokenize(story(HELD_OUT, i).text))[:LENGTH] for i in range(STORIES)]


def all_logits(path: Path, texts: list[list[int]]) -> Iterator[Floats]:
    with llamac.load(path, kv_dtype="f32") as model, model.session(context=LENGTH) as session:
        for ids in texts:
            session.truncate(0)
            found = session.eval(ids, logits="all")
            assert found is not None
            yield found


def mean_divergence(reference: list[Floats], path: Path, texts: list[list[int]]) -> float:
    """Mean KL divergence from the reference logits, in nats per token."""
    parts = [divergence(one, other) * len(one) for one, other in zip(reference, all_logits(path, texts), strict=True)]
    return sum(parts) / sum(len(one) for one in reference)


def matrix_bits(path: Path) -> float:
    """Bits per weight of the quantized matrices."""
    with llamac.load(path) as model:
        matrices = [tensor for tensor in model.file.tensors if len(tensor.shape) == 2 and tensor.name != POSITIONS]
    return 8 * sum(tensor.bytes for tensor in matrices) / sum(int(np.prod(tensor.shape)) for tensor in matrices)


def measure(source: Path, folder: Path) -> list[dict[str, Any]]:
    """Measure all files of one model; return the rows of its table."""
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

    keep = [(POSITIONS, "bf16")] if POSITIONS in read_flat(source).tensors else []
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
    """Write a float file with the weights rounded to Q4_K.

    Args:
        source: The original flat file.
        path: The file to write.
        weighted: Whether to use an importance matrix: the second moments of the inputs seen in calibration.
        folder: For temporary files.

    Raises:
        SystemExit: A matrix is not Q4_K.
    """
    checkpoint = read_flat(source)
    importance = second_moments(checkpoint, source, folder) if weighted else {}
    before, after = folder / "f32.gguf", folder / "q4_k.gguf"
    write_gguf(checkpoint, before, "f32", [])
    quantize_gguf(before, after, "Q4_K_S", importance)
    tensors = read_gguf(after, []).tensors
    for name, tensor in tensors.items():
        if len(tensor.shape) == 2 and tensor.dtype != "q4_k" and name != POSITIONS:
            raise SystemExit(f"{name} is {tensor.dtype}, not Q4_K")
    with atomic_file(path) as file:
        write_file(file, make_plan(replace(checkpoint, tensors=tensors), "f32"))
    return path


def quantize_gguf(before: Path, after: Path, kind: str, importance: Mapping[str, Floats] | None = None) -> None:
    """Quantize every matrix of a GGUF file to one type with llama.cpp.

    Args:
        before: The float file.
        after: The file to write.
        kind: llama.cpp's name of the file type.
        importance: Importance of the input columns (columns), by llamac's names of matrices.
    """
    import llama_cpp

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    settings.pure = True
    settings.nthread = 1
    if importance:
        entry_type = llama_cpp.llama_cpp.llama_model_imatrix_data
        # q, k and v see the same inputs, so a fused tensor can take the importance of any of them
        columns = {(fused_name(name) or (gguf_name(name),))[0]: values for name, values in importance.items()}
        columns |= {gguf_name(name): values for name, values in importance.items()}
        entries = (entry_type * (len(columns) + 1))()  # an empty entry ends the list
        for entry, (name, values) in zip(entries, columns.items(), strict=False):
            entry.name = name.encode()
            entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            entry.size = len(values)
        settings.imatrix = ctypes.cast(entries, ctypes.POINTER(entry_type))
    if llama_cpp.llama_model_quantize(str(before).encode(), str(after).encode(), ctypes.byref(settings)):
        raise SystemExit(f"llama.cpp cannot quantize {before} to {kind}")


def second_moments(checkpoint: Checkpoint, source: Path, folder: Path) -> dict[str, Floats]:
    """mean(x^2) of every matrix's input columns, over text that the model generates."""
    found = {}
    with llamac.load(source, kv_dtype="f32") as model, calibrate(checkpoint, model, None, folder) as calibration:
        for name, tensor in checkpoint.tensors.items():
            if len(tensor.shape) == 2 and name != POSITIONS:
                inputs = calibration.inputs(name)
                if inputs is not None:
                    found[name] = np.ascontiguousarray((inputs.astype(np.float64) ** 2).mean(axis=0), np.float32)
    return found


# ---- the table


def table(rows: list[dict[str, Any]]) -> str:
    """The Markdown table for docs/quantization.md."""
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in ("stories", "stories-gpt2"):
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(Path("models", f"{name}.bin"), Path(folder))
    options.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
