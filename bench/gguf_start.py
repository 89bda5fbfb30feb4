"""Time from process start to the first token of GGUF files, compared with copying the file.

    python -m bench.gguf_start MODEL.gguf... [--rounds 5] [--out OUT.json]

Each round times whole processes: a copy of the file, the first start (which converts the file into an empty cache), the
second start (which maps the conversion), and a start with --no-cache (which converts in memory). The source is in the
page cache, and nothing waits for the disk. The goal of the first start is twice the copy's time plus 0.5 s.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.stamp import stamp

PROMPT = "Once upon a time"
MARGIN_S = 0.5  # seconds that the first start may take beyond two copies


def seconds(step: Callable[[], object]) -> float:
    """Wall time of a step."""
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def run(model: Path, *options: str) -> None:
    """Generate one token in a new process."""
    command = [sys.executable, "-m", "llamac", "run", str(model), "-i", PROMPT, "-n", "1", "-t", "0", "-q", *options]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)


def measure(model: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """The times of every kind of start, in seconds."""
    samples: dict[str, list[float]] = {}

    def note(name: str, step: Callable[[], object]) -> None:
        samples.setdefault(name, []).append(seconds(step))

    cache = folder / "cache"
    cached = ("--cache-dir", str(cache))
    run(model, *cached)  # reads the source, compiles bytecode
    for _ in range(rounds):
        shutil.rmtree(cache)
        (folder / "copy").unlink(missing_ok=True)
        note("copy", lambda: subprocess.run(["cp", str(model), str(folder / "copy")], check=True))
        note("bare Python", lambda: subprocess.run([sys.executable, "-c", "pass"], check=True))
        note("first start", lambda: run(model, *cached))
        note("second start", lambda: run(model, *cached))
        note("--no-cache", lambda: run(model, "--no-cache"))
    found: dict[str, Any] = {"model": model.name, "bytes": model.stat().st_size}
    for name, values in samples.items():
        found[name] = {"best": round(min(values), 3), "median": round(statistics.median(values), 3)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("models", type=Path, nargs="+", help="GGUF files")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each kind (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    rows = []
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(model, Path(folder), options.rounds))
        row = rows[-1]
        print(f"{row['model']}, {row['bytes'] / 1e6:.0f} MB")
        for name in ("bare Python", "copy", "first start", "second start", "--no-cache"):
            print(f"  {name:<13} best {row[name]['best']:6.3f} s   median {row[name]['median']:6.3f} s")
        for which in ("best", "median"):
            goal = 2 * row["copy"][which] + MARGIN_S
            share = row["first start"][which] / goal
            print(f"  goal of the first start, {which}: {goal:.3f} s; it took {share:.2f} of it")
    if options.out:
        options.out.write_text(json.dumps({**stamp(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
