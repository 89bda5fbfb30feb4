"""Random requests to an engine for minutes: nothing may leak, and results must not change.

    python -m bench.soak [--minutes 3] [--model stories] [--seed 1] [--result NAME]

Requests arrive at random with random prompts, shared prefixes, parameters, priorities, deadlines, guides, several
candidates and beams; some are cancelled, some sessions fork. Some results are compared with those of a session. The run
fails if a page of the KV cache, a thread or a file is left at its end, or if memory grew from the first quarter of the
time to the last.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import random
import sys
import threading
import time
from collections import Counter, deque
from typing import Any

import llamac
from bench.soak_report import growth_of_memory, held, read_options, report
from llamac.engine.generation.output import Completion

IN_FLIGHT = 40
COMPARED = 0.05  # of the requests
SLACK = 4 << 20  # bytes
M_ARENA_MAX = -8  # of glibc's mallopt


def use_one_arena() -> None:
    """Make glibc's allocator use one arena for all threads.

    Each engine has its own thread. Memory that a thread leaves free in its arena looks like a leak.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def resident() -> int:
    """Bytes of this process's own memory, without what the allocator keeps for later."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return held()["memory"]


class Soak:
    """A run.

    Attributes:
        counts: What happened how often.
    """

    def __init__(self, model: llamac.Model, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._model = model
        self._random = random.Random(seed)
        self._n_ids = model.n_token_ids
        self._prefixes = [self._ids(self._random.randrange(20, 200)) for _ in range(8)]
        self._pending: deque[tuple[llamac.Request, list[int], dict[str, Any]]] = deque()
        self._interrupted: set[llamac.Request] = set()  # pending requests that may not end by themselves
        self._to_compare: list[tuple[Completion, list[int], dict[str, Any]]] = []
        self._has_guides = model.has_tokenizer and not _lacks_guides()

    def run(self, minutes: float) -> list[int]:
        """Send requests for some time; return the memory after each second or so."""
        memory = []
        limit = time.monotonic() + 60 * minutes
        while time.monotonic() < limit:  # engines also come and go
            settings: dict[str, Any] = {
                "max_sequences": self._random.choice((2, 8, 16)),
                "kv_tokens": self._random.choice((600, 4000)),
            }
            until = min(limit, time.monotonic() + 20)
            with llamac.Engine(self._model, context=512, **settings) as engine:
                while time.monotonic() < until:
                    self._send(engine)
                    while len(self._pending) >= IN_FLIGHT:
                        self._take()
                while len(self._pending) > IN_FLIGHT // 2:  # the others end with the engine
                    self._take()
                self._interrupted.update(request for request, _, _ in self._pending)
                self.counts["preemptions"] += engine.stats().preemptions
            while self._pending:
                self._take()
            self._compare()
            self._fork_sessions()
            gc.collect()
            memory.append(resident())
        return memory

    def _ids(self, n: int) -> list[int]:
        return [self._random.randrange(self._n_ids) for _ in range(n)]

    def _send(self, engine: llamac.Engine) -> None:
        rng = self._random
        prompt = self._ids(rng.randrange(1, 60))
        if rng.random() < 0.5:
            prefix = rng.choice(self._prefixes)
            prompt = prefix[: rng.randrange(1, len(prefix) + 1)] + prompt
        options: dict[str, Any] = {"max_tokens": rng.randrange(1, 60), "seed": rng.randrange(1000)}
        kind = rng.random()
        if kind < 0.1:
            options["n"] = rng.randrange(2, 5)
        elif kind < 0.15:
            options |= {"n": 1, "best_of": rng.randrange(2, 5)}
        elif kind < 0.2:
            options |= {"beam_width": 2, "n": rng.randrange(1, 3)}
        elif kind < 0.3 and self._has_guides:
            options["guide"] = rng.choice((llamac.Regex("[a-z]{1,20}"), llamac.Choice(["one", "two", "three"])))
        elif kind < 0.4:
            options |= {"logprobs": 2, "repetition_penalty": 1.2, "stop": ["the", "a b"]}
        elif kind < 0.5:
            options |= {"context_overflow": "shift", "max_tokens": rng.randrange(1, 300), "ignore_eos": True}
        given = dict(options)
        if rng.random() < 0.1:
            given["deadline"] = rng.uniform(0.001, 0.5)
        try:
            request = engine.submit(prompt, priority=rng.randrange(3), **given)
        except llamac.UnsupportedError:
            self.counts["unsupported"] += 1
            return
        self.counts["requests"] += 1
        self._pending.append((request, prompt, options))
        if "deadline" in given:
            self._interrupted.add(request)
        if rng.random() < 0.15:
            cancelled = rng.choice(self._pending)[0]
            self._interrupted.add(cancelled)
            cancelled.cancel()

    def _take(self) -> None:
        """Wait for the oldest request, and sometimes compare its result."""
        request, prompt, options = self._pending.popleft()
        was_interrupted = request in self._interrupted
        self._interrupted.discard(request)
        try:
            found = request.result(120)
        except llamac.OutOfMemoryError:
            self.counts["out of memory"] += 1
            return
        self.counts[found.finish_reason] += 1
        if was_interrupted or self._random.random() >= COMPARED:
            return
        self._to_compare.append((found, prompt, options))

    def _compare(self) -> None:
        """Compare results with those of a session. An engine's budget would also apply to the session."""
        for found, prompt, options in self._to_compare:
            with self._model.session(context=512) as session:
                self._check(found, session.generate(prompt, **options), f"{prompt} {options}")
        self._to_compare.clear()

    def _check(self, found: Completion, expected: Completion, what: str) -> None:
        if [choice.tokens for choice in found.choices] != [choice.tokens for choice in expected.choices]:
            raise SystemExit(f"a result differs from that of a session: {what}")
        self.counts["compared"] += 1

    def _fork_sessions(self) -> None:
        rng = self._random
        with self._model.session(context=512) as session:
            session.generate(self._ids(100), max_tokens=5)
            with contextlib.ExitStack() as forks:
                for _ in range(4):
                    fork = forks.enter_context(session.fork(length=rng.randrange(1, 100)))
                    fork.eval(self._ids(20))
                    self.counts["forks"] += 1


def _lacks_guides() -> bool:
    try:
        import llguidance  # noqa: F401
    except ImportError:
        return True
    return False


def count_threads() -> int:
    """The number of threads of the process, without the two or fewer that guides start on demand."""
    return sum(not thread.name.startswith("llamac-guide") for thread in threading.enumerate())


def main() -> int:
    """Run, and report what was left."""
    options = read_options(__doc__)
    with llamac.load(options.model, threads=2) as model:
        soak = Soak(model, options.seed)
        soak.run(0.02)  # what is made once: threads, caches, imports
        before = count_threads(), held()["files"]
        memory = soak.run(options.minutes)
        after = count_threads(), held()["files"]
        left = model.kv_bytes
    failures = growth_of_memory(memory, max, SLACK)
    if left:
        failures.append(f"{left} bytes of KV pages are left")
    if any(now > then for now, then in zip(after, before, strict=True)):
        failures.append(f"threads and files: {before} before, {after} after")
    return report(options, soak.counts, memory, failures, {"memory": memory})


if __name__ == "__main__":
    use_one_arena()
    sys.exit(main())
