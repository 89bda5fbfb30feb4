"""Measures a model's speed, and the machine's limits that bound it.

The limits are the bare speed of reading memory and the rate of the kernels' own multiply-adds (`_core.measure_read`,
`_core.measure_multiply`). A step or a prompt takes at least the time to read its bytes, and at least the time for its
multiply-adds. Speeds and limits are measured alternately, so that a busy neighbour slows all of them alike.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from llamac import _core
from llamac.arguments import KVDtype
from llamac.engine.model import Model
from llamac.engine.session import Session
from llamac.errors import ArgumentError
from llamac.format.strips import STRIP_ROWS
from llamac.progress import Progress, silent

BLOCK_BYTES = 512 << 20  # largest block to read; smaller for a model whose step reads less
PASS_BYTES = 128 << 20  # least number of bytes to read in one timing
PASS_SECONDS = 0.005  # least time of multiply-adds in one timing
STREAMS = (1, 2, 4)
TRIES = 3  # timings of the multiply-adds in a round; the best counts, as among STREAMS
KV_BYTES = {"f32": 4, "f16": 2}


@dataclass(frozen=True)
class BenchmarkPlan:
    """What to measure for each number of threads: every prompt, and `steps` decode steps for every context and batch.

    Empty `prompts` skip prefill, and `steps` = 0 skips decoding.
    """

    threads: Sequence[int]
    prompts: Sequence[int] = (128,)
    steps: int = 32
    contexts: Sequence[int] = (0,)
    batches: Sequence[int] = (1,)
    rounds: int = 5
    isa: str | None = None
    kv_dtype: KVDtype | None = None

    def check(self, model: Model) -> None:
        """Raise ArgumentError if this model cannot be measured like this."""
        context = model.config["context"]
        for name, values, least in (
            ("threads", self.threads, 1),
            ("prompt", self.prompts, 1),
            ("context", self.contexts, 0),
            ("batch", self.batches, 1),
            ("decode", (self.steps,), 0),
            ("rounds", (self.rounds,), 1),
        ):
            most = context if name in ("prompt", "context", "decode") else None
            for value in values:
                if value < least or (most is not None and value > most):
                    limit = f"{least} to {most}, the model's context" if most is not None else f"at least {least}"
                    raise ArgumentError(f"{name} is {value}, expected {limit}")
        if not self.threads or not (self.prompts or (self.steps and self.contexts and self.batches)):
            raise ArgumentError("there is nothing to measure: give threads, and prompts or decode steps")

    def start(self, context: int, model: Model) -> int:
        """The position of the first decode step for a context; earlier if the steps would not fit the model's."""
        last: int = model.config["context"] - self.steps
        return min(context, last)


# ---- what a step must read and multiply


@dataclass
class Work:
    """The least work of an eval: bytes to read, and multiply-adds by the weights' dtype (attention counts as f32)."""

    bytes: float = 0
    multiply_adds: dict[str, float] = field(default_factory=dict)

    def multiply(self, dtype: str, count: float) -> None:
        """Add multiply-adds."""
        self.multiply_adds[dtype] = self.multiply_adds.get(dtype, 0) + count


def work_of(model: Model, *, kv_dtype: str, rows: int, batch: int, start: int, steps: int = 1) -> Work:
    """The work of one eval: `rows` rows of each of `batch` sequences from position `start`, with the last row's logits.

    Weights are read once; of an embedding only the strips that hold the rows; of the cache every position that is
    attended to, once. Experts are assumed to be chosen evenly. With `steps` the result is the mean over that many
    evals, each starting `rows` positions after the one before.
    """
    config, layers, work = model.config, model.file.layers, Work()
    for tensor in model.file.tensors:
        matrix = len(tensor.shape) == 2
        embedding = tensor.name in ("token_embedding.weight", "position_embedding.weight")
        parts = tensor.name.split(".")
        layer = layers[int(parts[1])] if parts[0] == "layers" else {}
        used = layer["n_experts_used"] / layer["n_experts"] if "experts" in parts else 1.0
        output = tensor.name == ("token_embedding.weight" if config["tied_output"] else "output.weight")
        if embedding:
            strips = -(-tensor.shape[0] // STRIP_ROWS)
            work.bytes += min(rows * batch, strips) * (tensor.bytes / strips)
        if output or not embedding:
            work.bytes += tensor.bytes * (1 - (1 - used) ** (rows * batch))
            if matrix:
                work.multiply(tensor.dtype, tensor.shape[0] * tensor.shape[1] * batch * used * (1 if output else rows))
    head_dim = config["head_dim"]
    for window, n_layers in Counter(layer["window"] or config["context"] for layer in layers).items():
        firsts = [start + step * rows for step in range(steps)]
        seen = mean(min(first + rows, window + rows - 1) for first in firsts)  # positions, by any row
        looks = mean(sum(min(first + row + 1, window) for row in range(rows)) for first in firsts)
        work.bytes += batch * n_layers * 2 * config["n_kv_heads"] * head_dim * KV_BYTES[kv_dtype] * seen
        work.multiply("f32", batch * n_layers * 2 * config["n_heads"] * head_dim * looks)
    return work


# ---- the limits


@dataclass(frozen=True)
class Limits:
    """The machine's rates in one round: bytes per second, and multiply-adds per second by dtype."""

    read: float
    multiply: dict[str, float]

    def seconds(self, work: Work) -> tuple[float, float]:
        """The least (seconds to read, seconds to multiply) for the work."""
        return work.bytes / self.read, sum(count / self.multiply[d] for d, count in work.multiply_adds.items())


class LimitMeter:
    """Measures the limits with one number of threads."""

    def __init__(self, block: Any, dtypes: Sequence[str], threads: int, isa: str) -> None:
        self._block, self._threads, self._isa = block, threads, isa
        self._times = max(1, PASS_BYTES // (4 * len(block)))
        numbers = {_core.dtype_name(number): number for number in range(1, 16)}
        self._dtypes = {name: numbers[name] for name in dtypes}
        self._passes = {name: self._enough_passes(number) for name, number in self._dtypes.items()}

    def measure(self) -> Limits:
        """Measure once: reading with the best of 1, 2 and 4 streams, and the multiply-adds of each dtype."""
        read = max(self._speed_of_reading(streams) for streams in STREAMS)
        multiply = {
            name: max(self._speed_of_multiplying(number, self._passes[name], self._threads) for _ in range(TRIES))
            for name, number in self._dtypes.items()
        }
        return Limits(read, multiply)

    def _speed_of_reading(self, streams: int) -> float:
        started = time.perf_counter()
        count = _core.measure_read(self._block, self._times, threads=self._threads, streams=streams, isa=self._isa)
        return count / (time.perf_counter() - started)

    def _speed_of_multiplying(self, number: int, passes: int, threads: int) -> float:
        started = time.perf_counter()
        count = _core.measure_multiply(number, passes, threads=threads, isa=self._isa)
        return count / (time.perf_counter() - started)

    def _enough_passes(self, number: int) -> int:
        """The passes that take PASS_SECONDS. One thread is measured: the scheduler disturbs it least."""
        one = _core.measure_multiply(number, 1, threads=1, isa=self._isa)
        passes = 1
        while passes * one / max(self._speed_of_multiplying(number, passes, 1) for _ in range(TRIES)) < PASS_SECONDS:
            passes *= 2
        return passes


def read_block(step_bytes: float) -> Any:
    """The block to read: as large as what a step reads, so that a model in a CPU cache is compared with that cache."""
    import numpy as np

    return np.full(int(min(BLOCK_BYTES, max(step_bytes, 1 << 16))) // 4, 0.5, np.float32)


# ---- cases


@dataclass
class Case:
    """One setting and its measurements: for each round the seconds per eval, and the limits around it."""

    phase: str
    threads: int
    prompt: int
    context: int
    batch: int
    tokens: int  # of one eval
    work: Work
    run: Callable[[], float]
    seconds: list[float] = field(default_factory=list)
    limits: list[Limits] = field(default_factory=list)

    def result(self) -> dict[str, Any]:
        """Medians and spreads, as JSON values."""
        shares = [self._shares(*pair) for pair in zip(self.seconds, self.limits, strict=True)]
        of_read, of_peak = (median(share[i] for share in shares) for i in range(2))
        of_limit = [max(share) for share in shares]
        speeds = [self.tokens / seconds for seconds in self.seconds]
        middle = median(self.seconds)
        return {
            "phase": self.phase,
            "threads": self.threads,
            "prompt": self.prompt,
            "context": self.context,
            "batch": self.batch,
            "tok_s": median(speeds),
            "tok_s_spread": [min(speeds), max(speeds)],
            "share_of_limit": median(of_limit),
            "share_of_limit_spread": [min(of_limit), max(of_limit)],
            "limit": "read" if of_read >= of_peak else "multiply",
            "share_of_read": of_read,
            "share_of_peak": of_peak,
            "bytes": round(self.work.bytes),
            "gb_s": self.work.bytes / middle / 1e9,
            "mac_s": sum(self.work.multiply_adds.values()) / middle,
        }

    def _shares(self, seconds: float, limits: Limits) -> tuple[float, float]:
        read, multiply = limits.seconds(self.work)
        return read / seconds, multiply / seconds


def measure(model: Model, plan: BenchmarkPlan, progress: Progress = silent) -> dict[str, Any]:
    """Carry out a plan. The result has `read_gb_s`, `mac_per_s`, `limits` and `results` (bench/README.md)."""
    plan.check(model)
    for threads in plan.threads:  # a number of threads that cannot be used is found before anything is measured
        _session(model, plan, threads).close()
    block = read_block(work_of(model, kv_dtype="f16", rows=1, batch=1, start=0).bytes)
    facts: dict[str, Any] = {}
    limits: list[dict[str, Any]] = []
    results = []
    for threads in plan.threads:
        with _session(model, plan, threads) as session:
            facts = {"isa": session.isa, "kv": session.kv_dtype}
            cases = list(_cases(model, session, plan, progress))
            dtypes = sorted({name for case in cases for name in case.work.multiply_adds})
            turns = _measure_rounds(cases, LimitMeter(block, dtypes, threads, session.isa), plan.rounds, progress)
        results += [case.result() for case in cases]
        read = [turn.read / 1e9 for turn in turns]
        limits.append(
            {
                "threads": threads,
                "read_gb_s": median(read),
                "read_gb_s_spread": [min(read), max(read)],
                "mac_per_s": {name: median(turn.multiply[name] for turn in turns) for name in dtypes},
            }
        )
    most = max(limits, key=lambda entry: entry["threads"])
    return {
        **facts,
        "rounds": plan.rounds,
        "decode": plan.steps,
        "read_gb_s": most["read_gb_s"],
        "mac_per_s": most["mac_per_s"][main_dtype(model)],
        "limits": limits,
        "results": results,
    }


def main_dtype(model: Model) -> str:
    """The dtype of most weights."""
    sizes: dict[str, int] = {}
    for tensor in model.file.tensors:
        if len(tensor.shape) == 2 and not tensor.name.endswith("embedding.weight"):
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.shape[0] * tensor.shape[1]
    return max(sizes, key=lambda name: sizes[name])


def _session(model: Model, plan: BenchmarkPlan, threads: int) -> Session:
    """A session with sequences for every context and batch, and a last one for prompts."""
    ends = [plan.start(context, model) + plan.steps for context in plan.contexts]
    return model.session(
        context=max([*plan.prompts, *ends, 1]),
        sequences=len(plan.contexts) * max(plan.batches, default=0) + 1,
        threads=threads,
        isa=plan.isa,
        kv_dtype=plan.kv_dtype,
    )


def _measure_rounds(cases: list[Case], meter: LimitMeter, rounds: int, progress: Progress) -> list[Limits]:
    """Run every case once per round, and measure the limits before and after it. A first run of each is not counted."""
    for case in cases:
        case.run()
    turns = [meter.measure()]
    phase = f"measuring, {cases[0].threads} thread{'s' if cases[0].threads > 1 else ''}"
    for done in range(rounds * len(cases)):
        progress(phase, done, rounds * len(cases))
        case = cases[done % len(cases)]
        case.seconds.append(case.run())
        turns.append(meter.measure())
        before, after = turns[-2:]
        middle = {name: mean((speed, after.multiply[name])) for name, speed in before.multiply.items()}
        case.limits.append(Limits(mean((before.read, after.read)), middle))
    progress(phase, rounds * len(cases), rounds * len(cases))
    return turns


def _cases(model: Model, session: Session, plan: BenchmarkPlan, progress: Progress) -> Iterator[Case]:
    batches = sorted(plan.batches)
    prompts_sequence = len(plan.contexts) * max(batches, default=0)
    for prompt in plan.prompts:
        work = work_of(model, kv_dtype=session.kv_dtype, rows=prompt, batch=1, start=0)
        run = _prefill(model, session, prompts_sequence, prompt)
        yield Case("prefill", session.threads, prompt, 0, 1, prompt, work, run)
    if not plan.steps:
        return
    for index, context in enumerate(plan.contexts):
        start = plan.start(context, model)
        first = index * max(batches)
        for i in range(max(batches) if start else 0):
            progress(f"filling a context of {start}", i, max(batches))
            session.eval(_tokens(model, start), sequence=first + i, logits=None)
        for batch in batches:
            work = work_of(model, kv_dtype=session.kv_dtype, rows=1, batch=batch, start=start, steps=plan.steps)
            run = _decode(model, session, range(first, first + batch), start, plan.steps)
            yield Case("decode", session.threads, 0, context, batch, batch, work, run)


def _tokens(model: Model, n: int) -> list[int]:
    return [i % min(97, model.n_token_ids) for i in range(n)]


def _prefill(model: Model, session: Session, sequence: int, prompt: int) -> Callable[[], float]:
    """Times one prompt, including its last token's logits."""
    tokens = _tokens(model, prompt)

    def run() -> float:
        session.truncate(0, sequence=sequence)
        started = time.perf_counter()
        session.eval(tokens, sequence=sequence)
        return time.perf_counter() - started

    return run


def _decode(model: Model, session: Session, sequences: range, start: int, steps: int) -> Callable[[], float]:
    """Times one step of all sequences, including every row's logits: the mean over `steps` steps."""
    tokens = _tokens(model, steps)
    alone = sequences[0] if len(sequences) == 1 else None
    rows = [[(token, s, start + i, True) for s in sequences] for i, token in enumerate(tokens)]

    def run() -> float:
        for sequence in sequences:
            session.truncate(start, sequence=sequence)
        started = time.perf_counter()
        for token, row in zip(tokens, rows, strict=True):
            if alone is not None:
                session.step(token, sequence=alone)
            else:
                session.eval_rows(row)
        return (time.perf_counter() - started) / steps

    return run
