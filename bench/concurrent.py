"""Time of decode steps during another session's prefill.

    python -m bench.concurrent MODEL [--threads 2] [--prompt 1024] [--steps 40] [--result NAME]

One session computes a long prompt while another decodes. Prints the times of the steps (median, 90th percentile and
maximum) and the speed of the prefill, each alone and during the other, and the number of steps during the prefill.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable

import llamac
from bench.stamp import save


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Return the median, the 90th percentile and the maximum in milliseconds."""
    ordered = sorted(seconds)
    points = {"median": statistics.median(ordered), "p90": ordered[int(len(ordered) * 0.9)], "max": ordered[-1]}
    return {name: round(1e3 * value, 2) for name, value in points.items()}


def step_times(session: llamac.Session, steps: int, wanted: Callable[[], bool]) -> list[float]:
    """Return the times of up to `steps` steps; end earlier if `wanted` says so."""
    session.truncate(0)
    times: list[float] = []
    while wanted() and len(times) < steps:
        started = time.perf_counter()
        session.eval([len(times)])
        times.append(time.perf_counter() - started)
    return times


def main() -> None:
    """Print the figures, and save them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=40, help="number of steps measured alone")
    parser.add_argument("--result")
    options = parser.parse_args()
    prompt = [i * 7919 % 1000 for i in range(options.prompt)]
    with (
        llamac.load(options.model, threads=options.threads) as model,
        model.session() as long,
        model.session() as short,
    ):
        prefills: list[float] = []

        def prefill() -> None:
            long.truncate(0)
            started = time.perf_counter()
            long.eval(prompt, logits=None)
            prefills.append(time.perf_counter() - started)

        prefill()
        alone = step_times(short, options.steps, lambda: True)
        thread = threading.Thread(target=prefill)
        thread.start()
        time.sleep(0.02)
        beside = step_times(short, short.context, thread.is_alive)
        thread.join()
    result = {
        "step_alone_ms": quantiles(alone),
        "step_beside_prefill_ms": quantiles(beside),
        "steps_beside_prefill": len(beside),
        "prefill_tokens_per_s": [round(options.prompt / seconds, 1) for seconds in prefills],
    }
    for name, value in result.items():
        print(f"{name:24} {value}")
    if options.result:
        save(options.result, {"model": options.model, "threads": options.threads, "concurrent": result})


if __name__ == "__main__":
    main()
