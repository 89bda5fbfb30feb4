"""Decode speed with as many threads as CPUs and more, on a quiet machine and beside programs that keep its CPUs busy.

    python -m bench.oversubscribe [MODEL] [--cpus 2] [--threads 1,2,4,8] [--neighbours 0,1,2] [--rounds 5] [--json FILE]

Everything runs on the first CPUs that this process may use. A neighbour is a process that takes all the CPU time it
gets. Thread counts take turns, so that drift of the machine meets all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import llamac

SETTLE_S = 0.3  # neighbours begin, and the team learns that they are there


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many processes that take all the CPU time they get."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(SETTLE_S)
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def decode(session: llamac.Session, seconds: float) -> float:
    """Steps per second."""
    session.rewind(1)
    started, steps = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        if session.length() == session.context:
            session.rewind(1)
        session.step(steps % 97)
        steps += 1
    return steps / (time.perf_counter() - started)


def prefill(session: llamac.Session, rows: int) -> float:
    """Tokens per second of one prompt."""
    session.rewind(0)
    started = time.perf_counter()
    session.prefill(array("i", [i % 97 for i in range(rows)]))
    return rows / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", metavar="MODEL", help="default: the built-in model")
    parser.add_argument("--cpus", type=int, default=2, help="CPUs to run on (default: %(default)s)")
    parser.add_argument("--threads", default="1,2,4,8", help="thread counts (default: %(default)s)")
    parser.add_argument("--neighbours", default="0,1,2", help="numbers of busy processes (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each measurement (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.5, help="of decoding in each turn (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))[: options.cpus]
    os.sched_setaffinity(0, cpus)
    counts = [int(n) for n in options.threads.split(",")]
    results = []
    with llamac.load(options.model) as model:
        context = min(model.config["context"], options.prompt + 64)
        sessions = {n: model.session(threads=n, context=context) for n in counts}
        for busy in [int(n) for n in options.neighbours.split(",")]:
            speeds: dict[int, list[tuple[float, float]]] = {n: [] for n in counts}
            with neighbours(busy):
                for _ in range(options.rounds):
                    for n, session in sessions.items():
                        speeds[n].append((prefill(session, options.prompt), decode(session, options.seconds)))
            for n, values in speeds.items():
                prompts, steps = [p for p, _ in values], [d for _, d in values]
                row = {"threads": n, "cpus": len(cpus), "neighbours": busy, "prompt": options.prompt}
                row |= {"prefill_tok_s": statistics.median(prompts), "prefill_spread": [min(prompts), max(prompts)]}
                row |= {"decode_tok_s": statistics.median(steps), "decode_spread": [min(steps), max(steps)]}
                results.append(row)
                print(
                    f"{busy} neighbours, {n} threads on {len(cpus)} CPUs: "
                    f"prefill {statistics.median(prompts):8.1f} ({min(prompts):.1f} to {max(prompts):.1f}), "
                    f"decode {statistics.median(steps):8.1f} tok/s ({min(steps):.1f} to {max(steps):.1f})",
                    flush=True,
                )
    if options.json:
        options.json.write_text(json.dumps({"model": model.name, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
