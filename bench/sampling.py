"""Time of drawing one token from logits, on one thread, for vocabularies, distributions and settings.

    python -m bench.sampling [--entries 128256,262144] [--rounds 25] [--result NAME]

Compiles sampling_speed.c with the core's flags. A line has the vocabulary size, the distribution, the settings, and the
best and the median time in milliseconds. Distributions: `text`, like that of a language model (one logit far above a
few hundred others); `wide`, normal with a standard deviation of 1.5; `flat`, normal with 0.05; `equal`, all logits 0.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.stamp import save

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Print a table, and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", default="128256,262144")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--isa", default="", help="kernel set (default: the best)")
    parser.add_argument("--cc", default="cc")
    parser.add_argument("--result")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "sampling_speed"
        build: list[str | Path] = [sys.executable, ROOT / "tests" / "c" / "build.py", "--cc", options.cc]
        subprocess.run([*build, "--program", ROOT / "bench" / "sampling_speed.c", "--out", program], check=True)
        for entries in options.entries.split(","):
            command = [program, entries, str(options.rounds), options.isa]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            for line in output.splitlines():
                isa, distribution, settings, best, median = line.split("\t")
                rows.append({"entries": int(entries), "isa": isa, "logits": distribution, "settings": settings})
                rows[-1] |= {"best_ms": round(float(best), 3), "median_ms": round(float(median), 3)}
                print(f"{entries:>7} {isa} {distribution:6} {settings:32} {float(best):8.3f} {float(median):8.3f}")
    if options.result:
        save(options.result, {"sampling": rows})


if __name__ == "__main__":
    main()
