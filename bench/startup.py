"""Breakdown of the time from process start to the first token of the built-in model.

    python -m bench.startup [--rounds 15]

Whole processes are timed. Each does one step more than the previous one, so the differences are the steps' times.
Bytecode must be cached: pip compiles it at installation; for an editable install, unset PYTHONDONTWRITEBYTECODE.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

OPEN = "import llamac.cli; llamac.cli.make_parser(['run']); m = llamac.load('stories')"
STEPS = {
    "bare Python": "pass",
    "import llamac": "import llamac",
    "its command line": "import llamac.cli; llamac.cli.make_parser(['run'])",
    "open the model": OPEN,
    "import tokenizers": f"{OPEN}; import tokenizers",
    "tokenize": f"{OPEN}; m.tokenize('Once upon a time')",
    "first token": f"{OPEN}; next(m.stream('Once upon a time'))",
}


def seconds(code: str) -> float:
    """Wall time of one process. os._exit leaves out most of the interpreter's shutdown."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code + "; import os; os._exit(0)"], check=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rounds", type=int, default=15, help="runs per step (default: %(default)s)")
    options = parser.parse_args()
    samples: dict[str, list[float]] = {name: [] for name in STEPS}
    for _ in range(options.rounds):
        for name, code in STEPS.items():
            samples[name].append(seconds(code))
    before = 0.0
    for name, values in samples.items():
        median = statistics.median(values)
        print(f"{name:<18} {median * 1e3:6.1f} ms   (+{(median - before) * 1e3:.1f})   best {min(values) * 1e3:.1f}")
        before = median


if __name__ == "__main__":
    main()
