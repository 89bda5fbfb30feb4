"""Opening a model with each memory mode: `load(memory="map" | "populate" | "huge")`.

    python -m bench.memory MODEL [--rounds 5] [--threads 2] [--json FILE]

Each measurement runs in a new process, once with the file in the page cache and once without (if the file system drops
it). It reports the time to open the file, the time from there to the first token, the speed of the next 16 steps, and
the peak memory. It also measures opening the file again in the same process; the limit is 10 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

LIMIT_S = 0.010
FIGURES = ("open_ms", "first_token_ms", "decode_tok_s", "peak_mb", "huge_mb")
PROGRAM = """
import json, os, sys, time
import llamac
path, memory, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
started = time.perf_counter()
model = llamac.load(path, memory=memory, threads=threads)
opened = time.perf_counter()
with model.session(context=32) as session:
    session.eval([1])
    first = time.perf_counter()
    for token in range(16):
        session.step(token)
    decoded = time.perf_counter()
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:"))
huge = sum(int(line.split()[1]) for line in open("/proc/self/smaps") if line.startswith("FilePmdMapped:"))
figures = [(opened - started) * 1e3, (first - opened) * 1e3, 16 / (decoded - first), peak / 1e3, huge / 1e3]
print(json.dumps(figures))
"""
REOPEN = """
import sys, time
import llamac
llamac.load(sys.argv[1]).close()
times = []
for _ in range(20):
    started = time.perf_counter()
    model = llamac.load(sys.argv[1])
    times.append(time.perf_counter() - started)
    model.close()
print(sorted(times)[10])
"""


def output_of(program: str, *arguments: object) -> Any:
    """Run a Python program; return the JSON that it prints."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def drop_from_cache(path: Path) -> None:
    """Ask the kernel to drop the file from the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(path: Path) -> None:
    """Read the file into the page cache."""
    with open(path, "rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=5, help="runs per measurement (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads to compute with (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    options = parser.parse_args()
    results = []
    for cached in (True, False):
        samples: dict[str, list[list[float]]] = {"map": [], "populate": [], "huge": []}
        for _ in range(options.rounds):
            for memory, values in samples.items():
                read(options.model) if cached else drop_from_cache(options.model)
                values.append(output_of(PROGRAM, options.model, memory, options.threads))
        for memory, values in samples.items():
            medians = [statistics.median(column) for column in zip(*values, strict=True)]
            results.append({"memory": memory, "cached": cached, **dict(zip(FIGURES, medians, strict=True))})
            print(f"{'cached' if cached else 'cold':<7} {memory:<9}", end="")
            print(*(f" {name} {value:8.1f}" for name, value in zip(FIGURES, medians, strict=True)))
    read(options.model)
    reopen = output_of(REOPEN, options.model)
    verdict = "within" if reopen <= LIMIT_S else "OVER"
    print(f"reopen {reopen * 1e3:.2f} ms: {verdict} the limit of {LIMIT_S * 1e3:.0f} ms")
    if options.json:
        found = {"model": options.model.name, "threads": options.threads, "open_s": reopen, "results": results}
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
