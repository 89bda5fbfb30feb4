"""What bench.peers compares: groups of engines with their number formats, and the model file of each."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.make_model import make


@dataclass(frozen=True)
class Entry:
    """An engine and a number format: a GGUF type, the engine's own name for it, or a dtype of llamac.

    " fast" after a dtype means fast numerics.
    """

    engine: str
    kind: str

    @property
    def name(self) -> str:
        return f"{self.engine} {self.kind}"


# OpenVINO's int4 has one scale per 32 weights, as q4 and Q4_0 have; int4-128, OpenVINO's usual format, has one and a
# zero point per 128.
GROUPS = {
    "q4": (
        *(Entry("llamac", "q4"), Entry("llamac", "q4s"), Entry("llama.cpp", "Q4_0"), Entry("llama.cpp", "Q4_K_S")),
        *(Entry("openvino", "int4"), Entry("openvino", "int4-128"), Entry("onnxruntime", "int4")),
    ),
    "q8": (
        *(Entry("llamac", "q8"), Entry("llamac", "q8 fast"), Entry("llama.cpp", "Q8_0"), Entry("ctranslate2", "int8")),
        *(Entry("openvino", "int8"), Entry("onnxruntime", "int8")),
    ),
    "half": (
        *(Entry("llamac", "bf16"), Entry("llamac", "bf16 fast"), Entry("llamac", "f16"), Entry("llama.cpp", "F16")),
        *(Entry("openvino", "fp16"), Entry("transformers", "bfloat16")),
    ),
    "f32": (
        *(Entry("llamac", "f32"), Entry("ctranslate2", "float32"), Entry("onnxruntime", "fp32")),
        Entry("transformers", "float32"),
    ),
}


class ConversionError(Exception):
    """A peer's converter has failed."""


def model_path(entry: Entry, shape: str, folder: Path, pure: bool) -> Path:
    """The entry's model in the folder. Creates it if it is missing.

    Raises:
        ConversionError: If the peer's converter fails, such as for a width that its groups do not divide.
    """
    kind = "" if pure or entry.kind not in ("q4", "q4s", "Q4_0", "Q4_K_S") else "-mixed"
    if entry.engine == "llamac":
        dtype = entry.kind.removesuffix(" fast")
        return once(folder / f"{shape}-{dtype}{kind}.bin", lambda out: make(shape, dtype, out, pure=pure))
    if entry.engine == "llama.cpp":
        from bench.make_gguf import make_gguf

        return once(
            folder / f"{shape}-{entry.kind}{kind}.gguf", lambda out: make_gguf(shape, entry.kind, out, pure=pure)
        )
    from bench.make_hf import make_hf

    hf = once(folder / f"{shape}-hf", lambda out: make_hf(shape, "bf16", out))
    if entry.engine == "transformers":
        return hf
    # in a separate process: a conversion leaves PyTorch's threads and a lot of memory behind
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}

    def convert(out: Path) -> None:
        command = CONVERSIONS[entry.engine](hf, out, entry.kind)
        done = subprocess.run([*map(str, command)], env=offline, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            lines = done.stdout.decode(errors="replace").strip().splitlines()
            errors = [line for line in lines if "Error" in line] or lines or ["no message"]
            raise ConversionError(f"its conversion exits with status {done.returncode}: {errors[-1]}")

    return once(folder / f"{shape}-{entry.engine}-{entry.kind}", convert)


def once(path: Path, write: Callable[[Path], object]) -> Path:
    """Create a file or folder if it is missing. `write` creates it elsewhere, so that an existing one is complete."""
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".making-") as folder:
            write(Path(folder, path.name))
            os.replace(Path(folder, path.name), path)
    return path


def _ctranslate2(hf: Path, out: Path, kind: str) -> list[object]:
    code = "import sys; from ctranslate2.converters import TransformersConverter as C; " + (
        "C(sys.argv[1]).convert(sys.argv[2], quantization=sys.argv[3])"
    )
    return [sys.executable, "-c", code, hf, out, kind]


def _openvino(hf: Path, out: Path, kind: str) -> list[object]:
    code = "import sys; from optimum.commands.optimum_cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "export", "openvino", "-m", hf, "--task", "text-generation-with-past"]
    format_, _, group = kind.partition("-")
    options = ["--weight-format", format_]
    if format_ == "int4":  # all matrices, without int8 for some
        options += ["--ratio", "1.0", "--all-layers", "--group-size", group or "32", *([] if group else ["--sym"])]
    return [*command, *options, out]


def _onnxruntime(hf: Path, out: Path, kind: str) -> list[object]:
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-e", "cpu", "-i", hf, "-o", out, "-p", kind]
    # inputs in 8 bits (4), and logits of the last token only
    options = ["accuracy_level=4", "block_size=32"] if kind.startswith("int") else []
    return [*command, "-c", out.parent / "cache", "--extra_options", "prune_lm_head=true", *options]


# The command that converts a Hugging Face folder to an engine's model.
CONVERSIONS: dict[str, Callable[[Path, Path, str], list[object]]] = {
    "ctranslate2": _ctranslate2,
    "openvino": _openvino,
    "onnxruntime": _onnxruntime,
}
