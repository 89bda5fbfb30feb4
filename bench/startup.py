"""What the time from the process's start to the first token of the built-in model is made of.

    python -m bench.startup [--rounds 15]

Whole processes are timed, each doing a little more than the one before; the differences are the parts. Bytecode must be
cached (it is where pip installed llamac; unset PYTHONDONTWRITEBYTECODE).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

OPEN = "import llamac.cli.run; llamac.cli.make_parser(); m = llamac.load()"
STEPS = {
    "bare Python": "pass",
    "import llamac": "import llamac",
    "its command line": "import llamac.cli, llamac.cli.run; llamac.cli.make_parser()",
    "open the model": OPEN,
    "import tokenizers": f"{OPEN}; import tokenizers",
    "tokenize": f"{OPEN}; m.tokenize('Once upon a time')",
    "first token": f"{OPEN}; next(m.stream('Once upon a time'))",
}


def seconds(code: str) -> float:
    """Seconds of one process, its end left out as far as possible."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code + "; import os; os._exit(0)"], check=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
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
