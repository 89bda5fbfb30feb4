"""Compare builds of llamac: alternating runs of `llamac bench`, as ratios to the first build.

    bench/build_lto.sh /tmp/lto;  bench/build_pgo.sh /tmp/pgo
    python -m bench.builds MODEL plain= lto=/tmp/lto pgo=/tmp/pgo [--threads 1,2] [--rounds 7] [--result NAME]

A build is NAME=FOLDER, where FOLDER is put on PYTHONPATH; an empty FOLDER means the installed llamac. Each round runs
every build's `llamac bench` once. The printed ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from bench.stamp import save


def run(folder: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run `llamac bench` of one build; return its results."""
    command = [sys.executable, "-m", "llamac", "bench", str(options.model.resolve()), "--rounds", "1", "--json", "-"]
    command += ["--threads", options.threads, "--prompt", options.prompt, "--decode", str(options.decode)]
    command += ["--context", "0", "--batch", "1"]
    environment = dict(os.environ)
    if folder:
        environment["PYTHONPATH"] = str(Path(folder).resolve())
    # not in the checkout, whose folder `llamac` would shadow the build
    with tempfile.TemporaryDirectory() as elsewhere:
        finished = subprocess.run(command, env=environment, cwd=elsewhere, stdout=subprocess.PIPE, check=True)
    results: list[dict[str, Any]] = json.loads(finished.stdout)["results"]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("builds", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--threads", default="1,2", help="thread counts (default: %(default)s)")
    parser.add_argument("--prompt", default="128", help="prompt lengths in tokens (default: %(default)s)")
    parser.add_argument("--decode", type=int, default=32, help="tokens to decode (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="runs per build (default: %(default)s)")
    parser.add_argument("--result", metavar="NAME", help="write bench/results/DATE-NAME.json")
    options = parser.parse_args()
    builds = dict(build.partition("=")[::2] for build in options.builds)
    rounds = [{name: run(folder, options) for name, folder in builds.items()} for _ in range(options.rounds)]
    first = next(iter(builds))
    gains = []
    print(f"{'build':<10} {'threads':>7} {'phase':<8} {'tok/s':>9}  of {first}")
    for case, result in enumerate(rounds[0][first]):
        for name in builds:
            ratios = [results[name][case]["tok_s"] / results[first][case]["tok_s"] for results in rounds]
            facts = {key: result[key] for key in ("phase", "threads", "prompt", "context", "batch")}
            speed = median(results[name][case]["tok_s"] for results in rounds)
            gains.append({"build": name, **facts, "tok_s": speed, "ratio": median(ratios), "spread": [*sorted(ratios)]})
            spread = f"({min(ratios):.3f} to {max(ratios):.3f})"
            print(f"{name:<10} {facts['threads']:>7} {facts['phase']:<8} {speed:>9.1f}  {median(ratios):.3f} {spread}")
    if options.result:
        print(save(options.result, {"bench": "builds", "model": options.model.name, "results": gains}))


if __name__ == "__main__":
    main()
