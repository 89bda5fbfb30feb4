"""CPU time and peak memory of exports of a model of 1.1 billion weights, by source and target.

    python -m bench.export_time FOLDER [--shape tinyllama-1.1b] [--only "GGUF Q4_K_S"] [--result NAME]

FOLDER gets the sources (0.6 to 2.2 GB each; a later run reuses them), and one target at a time. Every export is a
process of its own, `llamac export`. So its CPU time includes starting Python, and computing the reference and engine
logits that the file carries. On a busy machine, CPU time is meaningful and wall time is not.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from bench.shapes import SHAPES
from bench.stamp import save

SAFETENSORS = "safetensors, bf16"
# Each source, and the options of bench.make_model that make it.
SOURCES = {
    "GGUF Q4_K_S": ("--gguf", "Q4_K_S"),
    "GGUF Q6_K": ("--gguf", "Q6_K"),
    SAFETENSORS: ("--hf", "--dtype", "bf16"),
}
# Each source and target, and the options of the command.
EXPORTS = (
    ("GGUF Q4_K_S", "its own types", ("--dtype", "auto")),
    ("GGUF Q4_K_S", "q4", ("--dtype", "q4")),
    ("GGUF Q4_K_S", "q8", ("--dtype", "q8")),
    ("GGUF Q4_K_S", "bf16", ("--dtype", "bf16")),
    ("GGUF Q6_K", "q8", ("--dtype", "q8")),
    ("GGUF Q6_K", "GGUF, q4_0", ("--to", "gguf", "--dtype", "q4_0")),
    (SAFETENSORS, "q4", ("--dtype", "q4")),
    (SAFETENSORS, "q8", ("--dtype", "q8")),
    (SAFETENSORS, "bf16", ("--dtype", "bf16")),
    (SAFETENSORS, "GGUF, q8_0", ("--to", "gguf", "--dtype", "q8_0", "--no-tokenizer")),
)


def run(command: list[str]) -> tuple[float, float]:
    """Run a command; return its CPU seconds and its peak memory in MB."""
    child = os.posix_spawn(command[0], command, os.environ)
    _, status, used = os.wait4(child, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed with status {os.waitstatus_to_exitcode(status)}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def prepare(source: str, shape: str, folder: Path) -> Path:
    """The source's path. Makes the source if it is missing."""
    path = folder / f"{shape}-{source.replace(', ', '-').replace(' ', '-')}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = path.with_name(path.name + ".part")
        # In another process, because the processes that this one starts would be charged with its memory.
        run([sys.executable, "-m", "bench.make_model", str(made), "--shape", shape, *SOURCES[source]])
        made.rename(path)
    return path


def measure(shape: str, folder: Path, only: list[str]) -> list[dict[str, Any]]:
    """Export each source to each of its targets. `only` selects sources; empty means all."""
    rows: list[dict[str, Any]] = []
    for source, target, options in EXPORTS:
        if only and source not in only:
            continue
        path, out = prepare(source, shape, folder), folder / "target"
        command = [sys.executable, "-m", "llamac", "export", str(path), str(out), "--force", *options]
        cpu, peak = run(command)
        out.unlink()
        rows.append({"source": source, "to": target, "cpu_s": round(cpu, 1), "peak_mb": round(peak)})
        print(f"{source:18} {target:14} CPU {cpu:6.1f} s, peak {peak:5.0f} MB", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="tinyllama-1.1b", choices=SHAPES)
    parser.add_argument(
        "--only", action="append", default=[], choices=SOURCES, metavar="SOURCE", help="only this source; repeatable"
    )
    parser.add_argument("--result", metavar="NAME")
    options = parser.parse_args()
    rows = measure(options.shape, options.folder, options.only)
    if options.result:
        save(options.result, {"shape": options.shape, "rows": rows})


if __name__ == "__main__":
    main()
