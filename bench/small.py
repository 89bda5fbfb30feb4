"""Decode speed of a small llama2.c model: `Model.generate` and llama2.c's own program, alternating.

    python -m bench.small stories260K.bin tok512.bin path/to/llama2.c/run

`run` is llama2.c's run.c, built by "make runfast" (-Ofast, one thread). Both decode 256 positions greedily. llama2.c
reports its own speed and excludes the first token; so does the figure for llamac.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import tempfile
from pathlib import Path

import llamac
from llamac.export.convert import export


def ours(model: llamac.Model, steps: int) -> float:
    """Tokens per second of one generation, excluding the first token."""
    result = model.generate("", max_tokens=steps, temperature=0)
    return (result.usage.completion_tokens - 1) / result.timings.decode


def theirs(program: Path, model: Path, tokenizer: Path, steps: int) -> float:
    """Tokens per second that llama2.c's program reports."""
    command: list[str | Path] = [program, model, "-z", tokenizer, "-t", "0", "-n", str(steps)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    match = re.search(r"achieved tok/s: ([0-9.]+)", output)
    if match is None:
        raise SystemExit(f"{program} printed no speed: {output!r}")
    return float(match[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", type=Path, help="llama2.c model file")
    parser.add_argument("tokenizer", type=Path, help="its tokenizer.bin")
    parser.add_argument("run", type=Path, help="llama2.c's program")
    parser.add_argument("--rounds", type=int, default=15, help="runs of each program (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=256, help="positions to decode (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flat = Path(folder, "model.bin")
        export(options.model, flat, tokenizer=options.tokenizer)
        with llamac.load(flat, threads=1) as model:
            ours(model, options.steps)
            rows = []
            for _ in range(options.rounds):
                a = ours(model, options.steps)
                rows.append((a, theirs(options.run, options.model, options.tokenizer, options.steps)))
    for name, values in (
        ("llamac", [a for a, _ in rows]),
        ("llama2.c", [b for _, b in rows]),
        ("ratio", [a / b for a, b in rows]),
    ):
        digits = 2 if name == "ratio" else 0
        middle, low, high = (f"{f(values):.{digits}f}" for f in (statistics.median, min, max))
        print(f"{name:<9} median {middle}, {low} to {high}")


if __name__ == "__main__":
    main()
