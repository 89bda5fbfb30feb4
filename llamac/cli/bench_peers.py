"""Other programs that `llamac bench --peers` measures on the same GGUF file, in turn with llamac.

A peer is a process per round: it loads the file and prints its speeds. Loading is not measured.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from llamac.engine.inspection.benchmark import BenchmarkPlan, cases, open_session
from llamac.engine.inspection.comparison import compare
from llamac.engine.model import Model
from llamac.errors import ArgumentError, LlamacError
from llamac.progress import Progress, silent

Task = tuple[str, int]  # "prefill" or "decode", and its number of tokens

# What the process of the package llama_cpp runs; its arguments are the file, the threads, and the tasks as JSON.
_PACKAGE = """
import json, sys, time
import llama_cpp
path, threads, tasks = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
most = max(count for _, count in tasks)
model = llama_cpp.Llama(path, n_ctx=most + 8, n_batch=max(512, most), n_ubatch=512, n_threads=threads,
                        n_threads_batch=threads, verbose=False)
seconds = []
for turn in range(2):  # the first one warms up
    seconds = []
    for phase, count in tasks:
        tokens = [i % 97 for i in range(count)]
        model.reset()
        started = time.perf_counter()
        for chunk in [tokens] if phase == "prefill" else [[token] for token in tokens]:
            model.eval(chunk)
        seconds.append(time.perf_counter() - started)
print(json.dumps(seconds))
"""


@dataclass(frozen=True)
class Peer:
    """Another program.

    Attributes:
        name: What the table calls it.
        command: The command for a number of threads and tasks.
        read: The seconds of each task, from what the command has printed.
    """

    name: str
    command: Callable[[int, Sequence[Task]], list[str]]
    read: Callable[[str, Sequence[Task]], list[float]]

    def seconds(self, threads: int, tasks: Sequence[Task]) -> list[float]:
        """Run the program once; return the seconds of each task.

        Raises:
            LlamacError: If the program fails or prints something else.
        """
        done = subprocess.run(self.command(threads, tasks), capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise LlamacError(f"{self.name} failed with exit status {done.returncode}: {last[0]}")
        try:
            return self.read(done.stdout, tasks)
        except (ValueError, KeyError, TypeError, StopIteration) as error:
            raise LlamacError(f"{self.name} printed something unexpected: {error!r}") from None


def find(path: Path) -> list[Peer]:
    """The peers on this machine, for a GGUF file.

    Raises:
        ArgumentError: If there are none.
    """
    found = []
    program = shutil.which("llama-bench")
    if program is not None:
        found.append(Peer("llama-bench", lambda threads, tasks: _bench_command(program, path, threads, tasks), _bench))
    if find_spec("llama_cpp") is not None:
        found.append(
            Peer(
                "llama-cpp-python",
                lambda threads, tasks: [sys.executable, "-c", _PACKAGE, str(path), str(threads), json.dumps(tasks)],
                lambda printed, tasks: [float(s) for s in json.loads(printed.strip().splitlines()[-1])],
            )
        )
    if not found:
        raise ArgumentError(
            "--peers found no peer: put llama.cpp's `llama-bench` on the PATH, or install the package llama-cpp-python"
        )
    return found


def _bench_command(program: str, path: Path, threads: int, tasks: Sequence[Task]) -> list[str]:
    """llama-bench's command: it takes lists of prompts and of numbers of steps, and runs each alone."""
    prompts = [str(count) for phase, count in tasks if phase == "prefill"] or ["0"]
    steps = [str(count) for phase, count in tasks if phase == "decode"] or ["0"]
    options = ["-m", str(path), "-t", str(threads), "-r", "1", "-o", "json", "-ngl", "0"]
    return [program, *options, "-p", ",".join(prompts), "-n", ",".join(steps)]


def _bench(printed: str, tasks: Sequence[Task]) -> list[float]:
    """The seconds of each task, from llama-bench's JSON."""
    entries = json.loads(printed)

    def seconds(phase: str, count: int) -> float:
        prompt, steps = (count, 0) if phase == "prefill" else (0, count)
        entry = next(e for e in entries if (e["n_prompt"], e["n_gen"]) == (prompt, steps))
        return count / float(entry["avg_ts"])

    return [seconds(*task) for task in tasks]


def measure(
    model: Model, plan: BenchmarkPlan, peers: Sequence[Peer], progress: Progress = silent
) -> list[dict[str, Any]]:
    """Measure llamac and its peers in turn: prompts, and decode steps of one sequence from the beginning.

    Args:
        model: The model, as llamac has it.
        plan: Threads, prompts, steps and rounds.
        peers: The others, for the same file.
        progress: Called with the number of finished runs.

    Returns:
        JSON values, one entry for each number of threads, task and peer: speeds in tokens per second (llamac's, the
        peer's; medians), and llamac's speed as a multiple of the peer's, with its confidence interval.

    Raises:
        LlamacError: If a peer fails.
    """
    tasks: list[Task] = [("prefill", prompt) for prompt in plan.prompts]
    tasks += [("decode", plan.steps)] if plan.steps else []
    own = BenchmarkPlan(
        threads=plan.threads,
        prompts=plan.prompts,
        steps=plan.steps,
        isa=plan.isa,
        kv_dtype=plan.kv_dtype,
        numerics=plan.numerics,
    )
    found = []
    for threads in plan.threads:
        with open_session(model, own, threads) as session:
            measuring = list(cases(model, session, own))
            for case in measuring:
                case.run()  # warms up
            times: dict[str, list[list[float]]] = {name: [] for name in ("", *(peer.name for peer in peers))}
            for done in range(plan.rounds):
                progress(f"in turn with peers, {threads} threads", done, plan.rounds)
                # a case of decoding returns the seconds of a step
                ours = [case.run() * (plan.steps if case.phase == "decode" else 1) for case in measuring]
                times[""].append(ours)
                for peer in peers:
                    times[peer.name].append(peer.seconds(threads, tasks))
        for peer in peers:
            for index, (phase, count) in enumerate(tasks):
                ours, theirs = ([run[index] for run in times[name]] for name in ("", peer.name))
                found.append(
                    {
                        "threads": threads,
                        "phase": phase,
                        "tokens": count,
                        "peer": peer.name,
                        "tok_s": [count / median(ours), count / median(theirs)],
                        "seconds": [ours, theirs],
                        **compare(theirs, ours).as_dict(),
                    }
                )
    return found
