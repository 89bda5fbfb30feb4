"""llamac and other engines on the same shapes, in turn, as ratios.

    python -m bench.peers --shape tinyllama-1.1b --folder /tmp/models [--groups q4,q8,half] [--threads 1,2]
                          [--prompt 128,512] [--decode 32] [--rounds 7] [--mixed] [--result NAME]

Model files with random weights are made in the folder (or a temporary one) and kept there. All engines of a group are
loaded side by side, each in a process of its own, and take turns A B C A B C; a ratio is the median of the rounds'
ratios, llamac's first entry divided by the other. Peers that are not installed are told and left out (bench/README.md
says how to install them). `--result NAME` writes bench/results/DATE-NAME.json.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bench.engines import missing
from bench.make_model import make
from bench.shapes import SHAPES
from bench.stamp import save

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Entry:
    """An engine with a file of a kind. kind: a dtype of ours, a type of GGUF, or the engine's number format."""

    engine: str
    kind: str

    @property
    def name(self) -> str:
        return f"{self.engine} {self.kind}"


GROUPS = {
    "q4": (Entry("llamac", "q4"), Entry("llamac", "q4s"), Entry("llama.cpp", "Q4_0"), Entry("llama.cpp", "Q4_K_S")),
    "q8": (Entry("llamac", "q8"), Entry("llama.cpp", "Q8_0"), Entry("ctranslate2", "int8")),
    "half": (
        *(Entry("llamac", "f16"), Entry("llamac", "bf16"), Entry("llama.cpp", "F16")),
        Entry("transformers", "bfloat16"),
    ),
    "f32": (Entry("llamac", "f32"), Entry("ctranslate2", "float32"), Entry("transformers", "float32")),
}


# ---- files


def model_path(entry: Entry, shape: str, folder: Path, pure: bool) -> Path:
    """The entry's model in the folder; made if it is not there."""
    kind = "" if pure or entry.kind not in ("q4", "q4s", "Q4_0", "Q4_K_S") else "-mixed"
    if entry.engine == "llamac":
        return once(folder / f"{shape}-{entry.kind}{kind}.bin", lambda out: make(shape, entry.kind, out, pure=pure))
    if entry.engine == "llama.cpp":
        from bench.make_gguf import make_gguf

        return once(
            folder / f"{shape}-{entry.kind}{kind}.gguf", lambda out: make_gguf(shape, entry.kind, out, pure=pure)
        )
    from bench.make_hf import make_hf

    hf = once(folder / f"{shape}-hf", lambda out: make_hf(shape, "bf16", out))
    if entry.engine == "transformers":
        return hf
    # in a process of its own: it leaves PyTorch's threads and much memory behind
    code = "import sys; from ctranslate2.converters import TransformersConverter as C; " + (
        "C(sys.argv[1]).convert(sys.argv[2], quantization=sys.argv[3])"
    )

    def convert(out: Path) -> None:
        subprocess.run([sys.executable, "-c", code, hf, out, entry.kind], check=True, stdout=subprocess.DEVNULL)

    return once(folder / f"{shape}-ct2-{entry.kind}", convert)


def once(path: Path, write: Callable[[Path], object]) -> Path:
    """The path of a file or folder. If there is none, `write` makes it elsewhere first: what is there is whole."""
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".making-") as folder:
            write(Path(folder, path.name))
            os.replace(Path(folder, path.name), path)
    return path


# ---- turns


class Worker:
    """A process with one engine and one loaded model."""

    def __init__(self, entry: Entry, path: Path, threads: int, context: int) -> None:
        command = [sys.executable, "-m", "bench.engines", entry.engine, path, threads, entry.kind, context]
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115  not a pipe, which nobody would empty meanwhile
        self._process = subprocess.Popen(
            [*map(str, command)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
        )

    def ask(self, question: str = "") -> str:
        """The answer to a line; without one, what it says when the model is loaded. RuntimeError if it has died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if question:
            self._process.stdin.write(question + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if not answer:
            code = self._process.wait()
            self._complaints.seek(0)
            last = self._complaints.read().strip().splitlines()[-1:] or ["without a word"]
            raise RuntimeError(f"it ended with {code}: {last[0]}")
        return answer

    def end(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()
        self._complaints.close()


@dataclass
class Series:
    """The seconds of one task by entry, round by round."""

    threads: int
    phase: str
    tokens: int
    seconds: dict[Entry, list[float]] = field(default_factory=dict)

    def results(self) -> Iterator[dict[str, Any]]:
        """Median speeds, and ratios to the first entry."""
        first = next(iter(self.seconds.values()))
        for entry, seconds in self.seconds.items():
            ratios = [other / own for own, other in zip(first, seconds, strict=True)]
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
            }


def compare(entries: dict[Entry, Path], threads: int, tasks: list[tuple[str, int]], rounds: int) -> list[Series]:
    """All tasks by all entries in turn, `rounds` times; the first time is not counted."""
    series = [Series(threads, *task) for task in tasks]
    workers: dict[Entry, Worker] = {}
    context = max(count for _, count in tasks)
    try:
        for entry, path in entries.items():
            workers[entry] = Worker(entry, path, threads, context)
        _ask_all(workers, "", series)
        for turn in range(rounds + 1):
            for one in series:
                answers = _ask_all(workers, f"{one.phase} {one.tokens}", series)
                for entry, answer in answers.items() if turn else ():
                    one.seconds.setdefault(entry, []).append(float(answer))
            print(f"{threads} threads: round {turn} of {rounds}", file=sys.stderr)
    finally:
        for worker in workers.values():
            worker.end()
    return series


def _ask_all(workers: dict[Entry, Worker], question: str, series: list[Series]) -> dict[Entry, str]:
    """Everyone's answer, one after the other. Who has died is told and left out, with what it had measured."""
    answers = {}
    for entry in list(workers):
        try:
            answers[entry] = workers[entry].ask(question)
        except (RuntimeError, BrokenPipeError) as error:
            if entry.engine == "llamac":
                raise
            print(f"{entry.name} is left out: {error}", file=sys.stderr)
            workers.pop(entry).end()
            for one in series:
                one.seconds.pop(entry, None)
    return answers


def show(results: list[dict[str, Any]]) -> None:
    """One line for each result."""
    print(f"{'threads':>7} {'task':<12} {'engine':<22} {'tok/s':>9} {'from':>8} {'to':>8}  llamac is x faster")
    for r in results:
        low, high = r["tok_s_spread"]
        ratio = f"{r['ratio']:.2f} ({r['ratio_spread'][0]:.2f} to {r['ratio_spread'][1]:.2f})"
        print(
            f"{r['threads']:>7} {r['phase'] + ' ' + str(r['tokens']):<12} {r['engine'] + ' ' + r['kind']:<22} "
            f"{r['tok_s']:>9.1f} {low:>8.1f} {high:>8.1f}  {ratio}"
        )


def installed(group: str, told: set[str]) -> list[Entry]:
    """The group's entries that can run; tells once of those that cannot."""
    found = []
    for entry in GROUPS[group]:
        lacking = missing(entry.engine)
        if not lacking:
            found.append(entry)
        elif entry.engine not in told:
            told.add(entry.engine)
            print(f"{entry.engine} is left out: {', '.join(lacking)} is not installed", file=sys.stderr)
    return found


def numbers(text: str) -> list[int]:
    """Numbers separated by commas."""
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tinyllama-1.1b")
    parser.add_argument("--groups", default="q4,q8,half", help=f"of {', '.join(GROUPS)} (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where model files are kept (default: a temporary folder)")
    parser.add_argument("--threads", type=numbers, default="1,2", help="default: %(default)s")
    parser.add_argument("--prompt", type=numbers, default="128,512", help="default: %(default)s")
    parser.add_argument("--decode", type=int, default=32, help="steps (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="turns that count (default: %(default)s)")
    parser.add_argument("--mixed", action="store_true", help="files as the exporters make them instead of pure ones")
    parser.add_argument("--result", metavar="NAME", help="write bench/results/DATE-NAME.json")
    options = parser.parse_args()
    groups = options.groups.split(",")
    unknown = set(groups) - set(GROUPS)
    if unknown:
        parser.error(f"there is no group {', '.join(sorted(unknown))}")
    context = SHAPES[options.shape].context
    if options.decode > context:
        parser.error(f"--decode is {options.decode}, but {options.shape} has {context} positions")
    tasks = [("prefill", n) for n in options.prompt if n <= context] + [("decode", options.decode)]
    told: set[str] = set()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for group in groups:
            entries = {
                entry: model_path(entry, options.shape, folder, not options.mixed) for entry in installed(group, told)
            }
            for threads in options.threads:
                for series in compare(entries, threads, tasks, options.rounds):
                    found = [{"group": group, **result} for result in series.results()]
                    results += found
    show(results)
    if options.result:
        settings = {name: str(value) for name, value in vars(options).items() if name not in ("folder", "result")}
        print(save(options.result, {"bench": "peers", "settings": settings, "results": results}))


if __name__ == "__main__":
    main()
