"""The overhead of an engine's steps, beyond the model's passes.

    python -m bench.engine_steps MODEL [--threads 2] [--sequences 1,8,32] [--settings greedy,top-p] [--steps 60]
                                 [--result NAME]

All sequences generate at once. For each step, the benchmark measures the pass through the model, the draws, and the
remaining time: scheduling, which covers admission, rows, records and pieces of text. Draws and scheduling are measured
as CPU time of the engine's thread, which other programs do not affect; if several threads share the draws, this is the
share of one thread. Passes are measured as wall time. Prints medians over the steps in which every sequence generates,
shares relative to the pass, and the share of the draws in the whole step. Settings: greedy; temperature with top-k and
top-p, with top-p only, and without filters.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import llamac
from bench.stamp import save
from llamac.engine.batching import batch
from llamac.engine.sampling import sampler

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
    "temperature": {"temperature": 0.8},
}


class Clock:
    """Adds up the wall time and the thread's CPU time of calls."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its time is added."""

        def call(*arguments: Any, **named: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                self.wall += time.perf_counter() - wall
                self.cpu += time.thread_time() - cpu

        return call

    def take(self) -> tuple[float, float]:
        """Return the wall and CPU seconds since the last call of this method."""
        seconds, self.wall, self.cpu = (self.wall, self.cpu), 0.0, 0.0
        return seconds


def measure(model: llamac.Model, sequences: int, steps: int, settings: dict[str, Any]) -> dict[str, float]:
    """Generate with all sequences at once. Return medians in milliseconds."""
    passes, draws = Clock(), Clock()
    rows: list[tuple[float, float, float]] = []
    draw_rows = sampler.draw_rows
    with llamac.Engine(model, max_sequences=sequences) as engine:
        step, run = engine._batch.step, engine._session._compute
        engine._session._compute = passes.timed(run)  # type: ignore[method-assign]
        vars(batch)["draw_rows"] = draws.timed(draw_rows)

        def timed_step() -> None:
            started, generated = time.thread_time(), engine._batch.generated
            step()
            total = time.thread_time() - started
            (one_pass, pass_cpu), (_, draw) = passes.take(), draws.take()
            if engine._batch.generated - generated == sequences and one_pass:
                rows.append((one_pass, draw, total - pass_cpu - draw))

        engine._batch.step = timed_step  # type: ignore[method-assign]
        prompts = [[1 + (7919 * i + j) % 1000 for j in range(16)] for i in range(sequences)]
        try:
            engine.generate(prompts, max_tokens=steps + 1, ignore_eos=True, seed=1, **settings)
        finally:
            vars(batch)["draw_rows"] = draw_rows
    return figures(*(1e3 * statistics.median(column) for column in zip(*rows[2:], strict=True)))


def figures(pass_ms: float, draws_ms: float, rest_ms: float) -> dict[str, float]:
    """Return the parts of a step in milliseconds, and their shares."""
    return {
        "pass_ms": pass_ms,
        "draws_ms": draws_ms,
        "rest_ms": rest_ms,
        "draws": draws_ms / pass_ms,
        "rest": rest_ms / pass_ms,
        "draws_of_step": draws_ms / (pass_ms + draws_ms + rest_ms),
    }


def main() -> None:
    """Print the figures, and save them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sequences", default="1,8,32")
    parser.add_argument("--settings", default=",".join(SETTINGS), help=f"any of {', '.join(SETTINGS)} (default: all)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--result")
    options = parser.parse_args()
    chosen = options.settings.split(",")
    if unknown := [name for name in chosen if name not in SETTINGS]:
        parser.error(f"--settings has {unknown[0]!r}, expected some of {', '.join(SETTINGS)}")
    found: dict[str, dict[str, float]] = {}
    with llamac.load(options.model, threads=options.threads) as model:
        for sequences in map(int, options.sequences.split(",")):
            for name in chosen:
                key = f"{sequences} {name}"
                found[key] = measure(model, sequences, options.steps, SETTINGS[name])
                one = found[key]
                print(
                    f"{key:14} pass {one['pass_ms']:8.2f} ms  draws {one['draws_ms']:6.3f} ms {one['draws']:6.2%} "
                    f"({one['draws_of_step']:.2%} of the step)  "
                    f"scheduling {one['rest_ms']:6.3f} ms {one['rest']:6.2%}",
                    flush=True,
                )
    if options.result:
        save(options.result, {"model": options.model, "threads": options.threads, "engine_steps": found})


if __name__ == "__main__":
    main()
