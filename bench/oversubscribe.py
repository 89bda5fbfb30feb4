"""Speed with fewer and with more threads than CPUs, on idle CPUs and next to busy processes.

    python -m bench.oversubscribe [MODEL] [--cpus 2] [--threads 1,2,4,8] [--neighbors 0,1,2] [--rounds 5] [--json FILE]

Everything runs on the first CPUs that this process may use. A neighbor is a process in a busy loop. Runs with
different thread counts alternate, so that drift in the machine's speed affects all of them alike.
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

WARMUP_S = 0.3  # seconds for the neighbors to start, and for the thread team to notice them


@contextmanager
def neighbors(count: int) -> Iterator[None]:
    """Run `count` processes in a busy loop."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(WARMUP_S)
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def decode(session: llamac.Session, seconds: float) -> float:
    """Decode for `seconds`; return steps per second."""
    session.truncate(1)
    started, steps = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        if session.length() == session.context:
            session.truncate(1)
        session.step(steps % 97)
        steps += 1
    return steps / (time.perf_counter() - started)


def prefill(session: llamac.Session, rows: int) -> float:
    """Process one prompt of `rows` tokens; return tokens per second."""
    session.truncate(0)
    started = time.perf_counter()
    session.prefill(array("i", [i % 97 for i in range(rows)]))
    return rows / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", type=Path, nargs="?", metavar="MODEL", help="default: the built-in model")
    parser.add_argument("--cpus", type=int, default=2, help="CPUs to run on (default: %(default)s)")
    parser.add_argument("--threads", default="1,2,4,8", help="thread counts (default: %(default)s)")
    parser.add_argument("--neighbors", default="0,1,2", help="numbers of busy processes (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="runs per measurement (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a decode run (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=128, help="prompt length in tokens (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    options = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))[: options.cpus]
    os.sched_setaffinity(0, cpus)
    counts = [int(n) for n in options.threads.split(",")]
    results = []
    with llamac.load(options.model) as model:
        context = min(model.config["context"], options.prompt + 64)
        sessions = {n: model.session(threads=n, context=context) for n in counts}
        for busy in [int(n) for n in options.neighbors.split(",")]:
            speeds: dict[int, list[tuple[float, float]]] = {n: [] for n in counts}
            with neighbors(busy):
                for _ in range(options.rounds):
                    for n, session in sessions.items():
                        speeds[n].append((prefill(session, options.prompt), decode(session, options.seconds)))
            for n, values in speeds.items():
                prompts, steps = [p for p, _ in values], [d for _, d in values]
                row = {"threads": n, "cpus": len(cpus), "neighbors": busy, "prompt": options.prompt}
                row |= {"prefill_tok_s": statistics.median(prompts), "prefill_spread": [min(prompts), max(prompts)]}
                row |= {"decode_tok_s": statistics.median(steps), "decode_spread": [min(steps), max(steps)]}
                results.append(row)
                print(
                    f"{busy} neighbors, {n} threads on {len(cpus)} CPUs: "
                    f"prefill {statistics.median(prompts):8.1f} ({min(prompts):.1f} to {max(prompts):.1f}), "
                    f"decode {statistics.median(steps):8.1f} tok/s ({min(steps):.1f} to {max(steps):.1f})",
                    flush=True,
                )
    if options.json:
        options.json.write_text(json.dumps({"model": model.name, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
