"""What the soaks share: their options, the resources of a process, their growth during a run, and the report."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.stamp import save

GROWTH = 0.05  # of the memory, that a run may show


def read_options(description: str | None, **flags: str) -> argparse.Namespace:
    """The options of a soak. `flags`: further options without a value, with their help."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--model", default="stories")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--result")
    for name, text in flags.items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=text)
    return parser.parse_args()


def held(process: int | str = "self") -> dict[str, int]:
    """What a process holds: its own, its resident and its peak memory in bytes; threads, files."""
    folder = Path(f"/proc/{process}")
    fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return {
        "memory": int(fields["RssAnon"].split()[0]) << 10,
        "resident": int(fields["VmRSS"].split()[0]) << 10,
        "peak": int(fields["VmHWM"].split()[0]) << 10,
        "threads": int(fields["Threads"]),
        "files": len(os.listdir(folder / "fd")),
    }


def quarters(numbers: Sequence[float], of: Callable[[Sequence[float]], float]) -> tuple[float, float]:
    """A number for the first quarter of a run and for its last."""
    n = max(1, len(numbers) // 4)
    return of(numbers[:n]), of(numbers[-n:])


def growth_of_memory(memory: Sequence[float], of: Callable[[Sequence[float]], float], slack: int) -> list[str]:
    """The failure that memory grew by more than its rounding, `slack` bytes; none if it did not."""
    first, last = quarters(memory, of)
    grew = last > first * (1 + GROWTH) + slack
    return [f"memory grew from {first / 1e6:.1f} to {last / 1e6:.1f} MB"] if grew else []


def report(
    options: argparse.Namespace, counts: Counter[str], memory: Sequence[float], failures: list[str], details: Any
) -> int:
    """Print what happened, save it if asked, and return the exit status. `details`: further parts of the result."""
    happened = dict(sorted(counts.items()))
    print(f"{options.minutes:g} minutes: {happened}")
    print("memory in MB:", *(f"{size / 1e6:.1f}" for size in memory))
    for failure in failures[:50]:
        print(f"soak: {failure}", file=sys.stderr)
    if options.result:
        save(options.result, {"minutes": options.minutes, "counts": happened, **details, "failures": failures})
    return 1 if failures else 0
