"""Compare llamac with other engines on the same shapes, as ratios.

    python -m bench.peers --shape tinyllama-1.1b --folder /tmp/models [--groups q4,q8,half] [--threads 1,2]
                          [--prompt 128,512] [--decode 32] [--rounds 7] [--mixed] [--result NAME]

Model files with random weights are created in the folder and reused (without --folder, in a temporary one). All engines
of a group are loaded at once, each in a process of its own, and run alternately: A B C A B C. A ratio is the speed of
the group's first entry, which is llamac's, over that of the other, as the median over rounds. Peers that are not
installed are reported and skipped; bench/README.md shows how to install them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bench.engines import missing
from bench.peer_models import GROUPS, ConversionError, Entry, model_path
from bench.shapes import SHAPES
from bench.stamp import save

ROOT = Path(__file__).resolve().parent.parent


class Worker:
    """A process with one engine and one loaded model (bench.engines)."""

    def __init__(self, entry: Entry, path: Path, threads: int, context: int) -> None:
        command = [sys.executable, "-m", "bench.engines", entry.engine, path, threads, entry.kind, context]
        # a file, since nobody reads a pipe while the worker runs
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [*map(str, command)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )

    def ask(self, question: str = "") -> str:
        """Send a line and return the answer. Without a line, wait until the model is loaded.

        Raises:
            RuntimeError: The worker has died; with its exit status and the last line of its standard error.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if question:
            self._process.stdin.write(question + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if not answer:
            code = self._process.wait()
            self._stderr.seek(0)
            last = self._stderr.read().strip().splitlines()[-1:] or ["no message"]
            raise RuntimeError(f"exit status {code}: {last[0]}")
        return answer

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.communicate()
        self._stderr.close()


@dataclass
class Series:
    """The seconds that each entry took for one task, per round."""

    threads: int
    phase: str
    tokens: int
    seconds: dict[Entry, list[float]] = field(default_factory=dict)

    def results(self) -> Iterator[dict[str, Any]]:
        """One result per entry: median speed, and ratio of the first entry's speed to it."""
        first = next(iter(self.seconds.values()))
        for entry, seconds in self.seconds.items():
            ratios = [other / reference for reference, other in zip(first, seconds, strict=True)]
            speeds = [self.tokens / s for s in seconds]
            yield {
                "threads": self.threads,
                "phase": self.phase,
                "tokens": self.tokens,
                "engine": entry.engine,
                "kind": entry.kind,
                "tok_s": median(speeds),
                "tok_s_spread": [min(speeds), max(speeds)],
                "ratio": median(ratios),
                "ratio_spread": [min(ratios), max(ratios)],
                "ratio_of_best": min(seconds) / min(first),
            }


def compare(entries: dict[Entry, Path], threads: int, tasks: list[tuple[str, int]], rounds: int) -> list[Series]:
    """Run all tasks on all entries, alternating, for one warm-up round and `rounds` measured rounds."""
    series = [Series(threads, *task) for task in tasks]
    workers: dict[Entry, Worker] = {}
    context = max(count for _, count in tasks)
    try:
        for entry, path in entries.items():
            workers[entry] = Worker(entry, path, threads, context)
        _ask_all(workers, "", series)
        for number in range(rounds + 1):
            for task in series:
                answers = _ask_all(workers, f"{task.phase} {task.tokens}", series)
                for entry, answer in answers.items() if number else ():
                    task.seconds.setdefault(entry, []).append(float(answer))
            print(f"{threads} threads: round {number} of {rounds}", file=sys.stderr)
    finally:
        for worker in workers.values():
            worker.end()
    return series


def _ask_all(workers: dict[Entry, Worker], question: str, series: list[Series]) -> dict[Entry, str]:
    """Ask all workers, one after the other. A peer that has died is reported and removed, with its measurements."""
    answers = {}
    for entry in list(workers):
        try:
            answers[entry] = workers[entry].ask(question)
        except (RuntimeError, BrokenPipeError) as error:
            if entry.engine == "llamac":
                raise
            print(f"skipping {entry.name}: {error}", file=sys.stderr)
            workers.pop(entry).end()
            for task in series:
                task.seconds.pop(entry, None)
    return answers


def show(results: list[dict[str, Any]]) -> None:
    """Print one line per result."""
    print(
        f"{'threads':>7} {'task':<12} {'engine':<22} {'MB':>6} {'tok/s':>9} {'from':>8} {'to':>8}  llamac is x faster"
    )
    for r in results:
        low, high = r["tok_s_spread"]
        ratio = f"{r['ratio']:.2f} ({r['ratio_spread'][0]:.2f} to {r['ratio_spread'][1]:.2f})"
        print(
            f"{r['threads']:>7} {r['phase'] + ' ' + str(r['tokens']):<12} {r['engine'] + ' ' + r['kind']:<22} "
            f"{r['bytes'] / 1e6:>6.0f} {r['tok_s']:>9.1f} {low:>8.1f} {high:>8.1f}  {ratio}"
        )


def size(path: Path) -> int:
    """The bytes of a model, a file or a folder with its tokenizer."""
    return sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file())


def installed(group: str, reported: set[str]) -> list[Entry]:
    """The group's entries that can run. Reports each engine that cannot, once."""
    found = []
    for entry in GROUPS[group]:
        lacking = missing(entry.engine)
        if not lacking:
            found.append(entry)
        elif entry.engine not in reported:
            reported.add(entry.engine)
            print(f"skipping {entry.engine}: not installed: {', '.join(lacking)}", file=sys.stderr)
    return found


def models(entries: list[Entry], shape: str, folder: Path, pure: bool) -> dict[Entry, Path]:
    """The entries with their models. Reports each that its engine cannot convert."""
    found = {}
    for entry in entries:
        try:
            found[entry] = model_path(entry, shape, folder, pure)
        except ConversionError as error:
            print(f"skipping {entry.name}: {error}", file=sys.stderr)
    return found


def numbers(text: str) -> list[int]:
    """Parse comma-separated integers."""
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--shape", choices=SHAPES, default="tinyllama-1.1b", help="default: %(default)s")
    parser.add_argument("--groups", default="q4,q8,half", help=f"any of {', '.join(GROUPS)} (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="keep model files here (default: a temporary folder)")
    parser.add_argument("--threads", type=numbers, default="1,2", help="thread counts (default: %(default)s)")
    parser.add_argument("--prompt", type=numbers, default="128,512", help="prompt lengths (default: %(default)s)")
    parser.add_argument("--decode", type=int, default=32, help="tokens to decode (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds (default: %(default)s)")
    parser.add_argument("--mixed", action="store_true", help="mix dtypes as the exporters do, instead of pure files")
    parser.add_argument("--result", metavar="NAME", help="write bench/results/DATE-NAME.json")
    options = parser.parse_args()
    groups = options.groups.split(",")
    unknown = set(groups) - set(GROUPS)
    if unknown:
        parser.error(f"unknown group {', '.join(sorted(unknown))}; expected {', '.join(GROUPS)}")
    context = SHAPES[options.shape].context
    if options.decode > context:
        parser.error(f"--decode is {options.decode}; {options.shape} has a context of {context} positions")
    tasks = [("prefill", n) for n in options.prompt if n <= context] + [("decode", options.decode)]
    reported: set[str] = set()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for group in groups:
            entries = models(installed(group, reported), options.shape, folder, not options.mixed)
            for threads in options.threads:
                for series in compare(entries, threads, tasks, options.rounds):
                    found = [
                        {"group": group, **result, "bytes": size(entries[entry])}
                        for entry, result in zip(series.seconds, series.results(), strict=True)
                    ]
                    results += found
    show(results)
    if options.result:
        settings = {name: str(value) for name, value in vars(options).items() if name not in ("folder", "result")}
        print(save(options.result, {"bench": "peers", "settings": settings, "results": results}))


if __name__ == "__main__":
    main()
