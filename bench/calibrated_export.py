"""Wall and CPU time of each phase of an export to q4, from a random bf16 checkpoint of a shape.

    python -m bench.calibrated_export FOLDER [--shape tinyllama-1.1b] [--plain] [--threads 2] [--result NAME]

FOLDER gets the checkpoint (2.2 GB for 1.1B; a later run reuses it), the flat file, and the temporary files of
calibration. The text is 8,192 random tokens: the time does not depend on them. "reference logits" includes writing the
float model on which calibration runs.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.make_hf import make_hf
from bench.shapes import SHAPES
from bench.stamp import save
from llamac.export.convert import export

TEXT_TOKENS = 8192


def cpu_seconds() -> float:
    """The process's CPU time, over all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Phases:
    """A progress function that measures phases."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._name = ""
        self._wall = self._cpu = 0.0

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase == self._name:
            return
        wall, cpu = time.monotonic(), cpu_seconds()
        if self._name:
            self.rows.append({"phase": self._name, "wall_s": wall - self._wall, "cpu_s": cpu - self._cpu})
            print(f"{self._name:20} wall {wall - self._wall:7.1f} s, CPU {cpu - self._cpu:7.1f} s", flush=True)
        self._name, self._wall, self._cpu = phase, wall, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="tinyllama-1.1b", choices=SHAPES)
    parser.add_argument("--plain", action="store_true", help="skip calibration")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--result", metavar="NAME")
    options = parser.parse_args()
    source, text = options.folder / options.shape, options.folder / "text.txt"
    if not source.exists():
        source.parent.mkdir(parents=True, exist_ok=True)
        make_hf(options.shape, "bf16", source)
    ids = np.random.default_rng(0).integers(1, SHAPES[options.shape].vocabulary, TEXT_TOKENS)
    text.write_text(" ".join(f"t{token}" for token in ids))
    phases = Phases()
    wall, cpu = time.monotonic(), cpu_seconds()
    export(
        source,
        options.folder / "q4.bin",
        dtype="q4",
        calibrate=None if options.plain else text,
        threads=options.threads,
        overwrite=True,
        progress=phases,
    )
    phases("end", 0, 0)
    total = {"phase": "total", "wall_s": time.monotonic() - wall, "cpu_s": cpu_seconds() - cpu}
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{'total':20} wall {total['wall_s']:7.1f} s, CPU {total['cpu_s']:7.1f} s, peak {peak_mb:.0f} MB")
    if options.result:
        save(options.result, {"shape": options.shape, "rows": [*phases.rows, total], "peak_mb": peak_mb})


if __name__ == "__main__":
    main()
