"""What builds gain: `llamac bench` of several builds in turn, as ratios to the first.

    bench/build_lto.sh /tmp/lto;  bench/build_pgo.sh /tmp/pgo
    python -m bench.builds MODEL plain= lto=/tmp/lto pgo=/tmp/pgo [--threads 1,2] [--rounds 7] [--result NAME]

A build is NAME=FOLDER, a folder for PYTHONPATH; an empty one is the llamac that is installed. Each round starts every
build's `llamac bench` once; the ratio is the median of the rounds'.
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
    """The results of one build's `llamac bench`."""
    command = [sys.executable, "-m", "llamac", "bench", str(options.model.resolve()), "--rounds", "1", "--json", "-"]
    command += ["--threads", options.threads, "--prompt", options.prompt, "--decode", str(options.decode)]
    environment = dict(os.environ)
    if folder:
        environment["PYTHONPATH"] = str(Path(folder).resolve())
    with tempfile.TemporaryDirectory() as elsewhere:  # not here, where `llamac` is the checkout's folder
        done = subprocess.run(command, env=environment, cwd=elsewhere, stdout=subprocess.PIPE, check=True)
    results: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("builds", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--threads", default="1,2", help="default: %(default)s")
    parser.add_argument("--prompt", default="128", help="default: %(default)s")
    parser.add_argument("--decode", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--result", metavar="NAME", help="write bench/results/DATE-NAME.json")
    options = parser.parse_args()
    builds = dict(build.partition("=")[::2] for build in options.builds)
    rounds = [{name: run(folder, options) for name, folder in builds.items()} for _ in range(options.rounds)]
    first = next(iter(builds))
    gains = []
    print(f"{'build':<10} {'threads':>7} {'phase':<8} {'tok/s':>9}  of {first}")
    for case, result in enumerate(rounds[0][first]):
        for name in builds:
            ratios = [turn[name][case]["tok_s"] / turn[first][case]["tok_s"] for turn in rounds]
            facts = {key: result[key] for key in ("phase", "threads", "prompt", "context", "batch")}
            speed = median(turn[name][case]["tok_s"] for turn in rounds)
            gains.append({"build": name, **facts, "tok_s": speed, "ratio": median(ratios), "spread": [*sorted(ratios)]})
            spread = f"({min(ratios):.3f} to {max(ratios):.3f})"
            print(f"{name:<10} {facts['threads']:>7} {facts['phase']:<8} {speed:>9.1f}  {median(ratios):.3f} {spread}")
    if options.result:
        print(save(options.result, {"bench": "builds", "model": options.model.name, "results": gains}))


if __name__ == "__main__":
    main()
