"""Measures a model's speed and the machine's limits on it.

The limits are the memory bandwidth and the kernels' multiply-add rate (`_core.measure_read`, `_core.measure_multiply`).
An eval takes at least the time to read its bytes, and at least the time to compute its multiply-adds. Measurements of
speeds and limits alternate, so that other programs on the machine slow down both alike.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from llamac import _core
from llamac.arguments import NUMERICS, KVDtype, Numerics
from llamac.engine.model import Model
from llamac.engine.rows import as_id
from llamac.engine.sampling.params import SamplingParams
from llamac.engine.session import Session
from llamac.errors import ArgumentError
from llamac.format.strips import STRIP_ROWS
from llamac.progress import Progress, silent

BLOCK_BYTES = 512 << 20  # the largest block to read; models whose step reads less get a smaller one
PASS_BYTES = 128 << 20  # minimum number of bytes to read in one timing
PASS_SECONDS = 0.005  # minimum time to multiply in one timing
STREAMS = (1, 2, 4)  # numbers of parallel streams per thread to try when reading; the fastest counts
TRIES = 3  # timings of multiply-adds per round; the fastest counts
# From these matrices, an eval reads only the rows of its tokens.
EMBEDDINGS = ("token_embedding.weight", "position_embedding.weight", "layer_embedding.weight")
KV_BYTES = {"f32": 4, "f16": 2, "q8": 1}  # of a number in the KV cache
# What identifies a row of a report; the other values are its measurements.
KEY = ("threads", "phase", "prompt", "context", "batch", "sampling")
# How a token is drawn after each decode step, by name. Nothing that a model recommends is added.
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0, repetition_penalty=1),
    "top-p": SamplingParams(temperature=1, top_p=0.9, top_k=0, min_p=0, repetition_penalty=1, seed=1),
}


@dataclass(frozen=True)
class BenchmarkPlan:
    """What to measure, for each number of threads.

    Attributes:
        threads: Numbers of threads.
        prompts: Prompt lengths to prefill, in tokens. Empty: skip prefill.
        steps: Decode steps for each context and batch. 0: skip decoding.
        contexts: Positions before the first decode step.
        batches: Numbers of sequences to decode together, at each context.
        also: More pairs of a context and a number of sequences.
        samplings: Names of SAMPLINGS: one sequence decodes at the first context, with a draw after each step.
        rounds: Measurements of each case.
        isa: Kernel set; None for the default.
        kv_dtype: Number format of the KV cache; None for the default.
        numerics: How products round their inputs.
    """

    threads: Sequence[int]
    prompts: Sequence[int] = (128,)
    steps: int = 32
    contexts: Sequence[int] = (0,)
    batches: Sequence[int] = (1,)
    also: Sequence[tuple[int, int]] = ()
    samplings: Sequence[str] = ()
    rounds: int = 5
    isa: str | None = None
    kv_dtype: KVDtype | None = None
    numerics: Numerics = "exact"

    def groups(self) -> list[tuple[int, list[int]]]:
        """The contexts of decode steps, each with the numbers of sequences that decode there, in ascending order.

        Each entry has sequences of its own.
        """
        product = [(context, sorted(self.batches)) for context in self.contexts] if self.batches else []
        return [*product, *((context, [batch]) for context, batch in self.also)] if self.steps else []

    def check(self, model: Model) -> None:
        """Check the plan against a model.

        Raises:
            ArgumentError: If the model cannot be measured like this.
        """
        context = model.config["context"]
        for name, values, least in (
            ("threads", self.threads, 1),
            ("prompt", self.prompts, 1),
            ("context", [*self.contexts, *(context for context, _ in self.also)], 0),
            ("batch", [*self.batches, *(batch for _, batch in self.also)], 1),
            ("decode", (self.steps,), 0),
            ("rounds", (self.rounds,), 1),
        ):
            most = context if name in ("prompt", "context", "decode") else None
            for value in values:
                if value < least or (most is not None and value > most):
                    limit = f"{least} to {most}, the model's context" if most is not None else f"at least {least}"
                    raise ArgumentError(f"{name} is {value}, expected {limit}")
        for name in self.samplings:
            if name not in SAMPLINGS:
                raise ArgumentError(f"sampling is {name!r}, expected {' or '.join(SAMPLINGS)}")
        if not self.threads or not (self.prompts or self.groups()):
            raise ArgumentError("there is nothing to measure: give threads, and prompts or decode steps")

    def start(self, context: int, model: Model) -> int:
        """The position of the first decode step: `context`, or less if the steps would not fit the model's context."""
        last: int = model.config["context"] - self.steps
        return min(context, last)


# ---- the work of an eval


@dataclass
class Work:
    """The minimum work of an eval.

    Attributes:
        bytes: Bytes to read.
        multiply_adds: Multiply-adds by the weights' dtype. Attention counts as f32.
    """

    bytes: float = 0
    multiply_adds: dict[str, float] = field(default_factory=dict)

    def multiply(self, dtype: str, count: float) -> None:
        """Add `count` multiply-adds with weights of a dtype."""
        self.multiply_adds[dtype] = self.multiply_adds.get(dtype, 0) + count


def work_of(model: Model, *, kv_dtype: str, rows: int, batch: int, start: int, steps: int = 1) -> Work:
    """Compute the work of an eval that returns the logits of each sequence's last row.

    The eval reads weights once, only the needed strips of embeddings, and every visible position of the KV cache once.
    Experts are assumed to be chosen evenly.

    Args:
        model: The model.
        kv_dtype: Number format of the KV cache.
        rows: Rows per sequence.
        batch: Number of sequences.
        start: The position of the first row.
        steps: Average over this many evals, each of which starts where the previous one ended.
    """
    config, layers, work = model.config, model.file.layers, Work()
    for tensor in model.file.tensors:
        is_matrix = len(tensor.shape) == 2
        embedding = tensor.name in EMBEDDINGS
        parts = tensor.name.split(".")
        layer = layers[int(parts[1])] if parts[0] == "layers" else {}
        used = layer["n_experts_used"] / layer["n_experts"] if "experts" in parts else 1.0
        output = tensor.name == ("token_embedding.weight" if config["tied_output"] else "output.weight")
        if embedding:
            strips = -(-tensor.shape[0] // STRIP_ROWS)
            work.bytes += min(rows * batch, strips) * (tensor.bytes / strips)
        if output or not embedding:
            work.bytes += tensor.bytes * (1 - (1 - used) ** (rows * batch))
            if is_matrix:
                work.multiply(tensor.dtype, tensor.shape[0] * tensor.shape[1] * batch * used * (1 if output else rows))
    shapes = Counter(_attention_of(config, layer) for layer in layers if layer["mixer"].startswith("attention"))
    for (window, n_heads, n_kv_heads, head_dim, value_dim), n_layers in shapes.items():
        firsts = [start + step * rows for step in range(steps)]
        visible = mean(min(first + rows, window + rows - 1) for first in firsts)  # positions that any row sees
        pairs = mean(sum(min(first + row + 1, window) for row in range(rows)) for first in firsts)  # (row, position)
        scales = 2 * (-(-head_dim // 32) + 1) if kv_dtype == "q8" else 0  # of a key and a value
        width = head_dim + value_dim
        work.bytes += batch * n_layers * n_kv_heads * (width * KV_BYTES[kv_dtype] + scales) * visible
        work.multiply("f32", batch * n_layers * n_heads * width * pairs)
    return work


def _attention_of(config: Mapping[str, Any], layer: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
    """Return a layer's window (or the context, if it has none), n_heads, n_kv_heads, and the widths of k and v."""
    n_heads, n_kv_heads, head_dim = (layer[name] or config[name] for name in ("n_heads", "n_kv_heads", "head_dim"))
    return layer["window"] or config["context"], n_heads, n_kv_heads, head_dim, layer["kv_lora_rank"] or head_dim


# ---- the limits


@dataclass(frozen=True)
class Limits:
    """The machine's rates in one round.

    Attributes:
        read: Bytes per second.
        multiply: Multiply-adds per second, by dtype.
    """

    read: float
    multiply: dict[str, float]

    def seconds(self, work: Work) -> tuple[float, float]:
        """The minimum times for some work: seconds to read, seconds to multiply."""
        return work.bytes / self.read, sum(count / self.multiply[d] for d, count in work.multiply_adds.items())


class LimitMeter:
    """Measures the limits with one number of threads.

    Args:
        block: The block to read, from `read_block`.
        dtypes: The dtypes whose multiply-adds are measured.
        threads: The number of threads.
        isa: The kernel set.
        numerics: How products round their inputs.
    """

    def __init__(self, block: Any, dtypes: Sequence[str], threads: int, isa: str, numerics: Numerics = "exact") -> None:
        self._block, self._threads, self._isa = block, threads, isa
        self._numerics = NUMERICS.index(numerics)
        self._n_reads = max(1, PASS_BYTES // (4 * len(block)))
        numbers = dict(_core.dtypes())
        self._dtypes = {name: numbers[name] for name in dtypes}
        self._passes = {name: self._enough_passes(number) for name, number in self._dtypes.items()}

    def measure(self) -> Limits:
        """Measure the memory bandwidth, and the multiply-add rate of each dtype."""
        read = max(self._read_rate(streams) for streams in STREAMS)
        multiply = {
            name: max(self._multiply_rate(number, self._passes[name], self._threads) for _ in range(TRIES))
            for name, number in self._dtypes.items()
        }
        return Limits(read, multiply)

    def _read_rate(self, streams: int) -> float:
        started = time.perf_counter()
        count = _core.measure_read(self._block, self._n_reads, threads=self._threads, streams=streams, isa=self._isa)
        return count / (time.perf_counter() - started)

    def _multiply_rate(self, dtype: int, passes: int, threads: int) -> float:
        started = time.perf_counter()
        count = self._multiply(dtype, passes, threads)
        return count / (time.perf_counter() - started)

    def _enough_passes(self, dtype: int) -> int:
        """Return the number of passes that take PASS_SECONDS on one thread, where the scheduler interferes least."""
        per_pass = self._multiply(dtype, 1, 1)
        passes = 1
        while passes * per_pass / max(self._multiply_rate(dtype, passes, 1) for _ in range(TRIES)) < PASS_SECONDS:
            passes *= 2
        return passes

    def _multiply(self, dtype: int, passes: int, threads: int) -> int:
        return _core.measure_multiply(dtype, passes, numerics=self._numerics, threads=threads, isa=self._isa)


def read_block(step_bytes: float) -> Any:
    """Allocate the block to read, float32.

    Its size equals the bytes that a decode step reads, so a model that fits in a CPU cache is compared with that cache.

    Args:
        step_bytes: Bytes that a decode step reads.
    """
    import numpy as np

    return np.full(int(min(BLOCK_BYTES, max(step_bytes, 1 << 16))) // 4, 0.5, np.float32)


# ---- cases


@dataclass
class Case:
    """A setting and its measurements.

    Attributes:
        phase: "prefill" or "decode".
        threads: The number of threads.
        prompt: The prompt's length, or 0.
        context: Positions before the first decode step, or 0.
        batch: The number of sequences.
        tokens: Tokens per eval.
        work: The work of an eval.
        run: Measures the case once and returns the seconds per eval.
        seconds: The results of `run`, by round.
        limits: The mean of the limits before and after each run.
        sampling: How a token is drawn after each step, a name of SAMPLINGS; empty if none is.
    """

    phase: str
    threads: int
    prompt: int
    context: int
    batch: int
    tokens: int
    work: Work
    run: Callable[[], float]
    seconds: list[float] = field(default_factory=list)
    limits: list[Limits] = field(default_factory=list)
    sampling: str = ""

    def key(self) -> dict[str, Any]:
        """What identifies the case in a report."""
        return {name: getattr(self, name) for name in KEY}

    def result(self) -> dict[str, Any]:
        """The case and its measurements, with medians and ranges, in JSON values."""
        least = [limits.seconds(self.work) for limits in self.limits]
        return summary(
            {
                **self.key(),
                "tokens": self.tokens,
                "bytes": round(self.work.bytes),
                "multiply_adds": round(sum(self.work.multiply_adds.values())),
                "seconds": self.seconds,
                "read_seconds": [read for read, _ in least],
                "multiply_seconds": [multiply for _, multiply in least],
            }
        )


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """A result with the medians and ranges of its runs.

    Args:
        result: What was measured, with the lists `seconds`, `read_seconds` and `multiply_seconds`, one number per run.
    """
    seconds = result["seconds"]
    of_read, of_peak = (
        [least / s for least, s in zip(result[name], seconds, strict=True)]
        for name in ("read_seconds", "multiply_seconds")
    )
    of_limit = list(map(max, of_read, of_peak))
    speeds = [result["tokens"] / s for s in seconds]
    return {
        **result,
        "tok_s": median(speeds),
        "tok_s_spread": [min(speeds), max(speeds)],
        "share_of_limit": median(of_limit),
        "share_of_limit_spread": [min(of_limit), max(of_limit)],
        "limit": "read" if median(of_read) >= median(of_peak) else "multiply",
        "share_of_read": median(of_read),
        "share_of_peak": median(of_peak),
        "gb_s": result["bytes"] / median(seconds) / 1e9,
        "mac_s": result["multiply_adds"] / median(seconds),
    }


def announce(model: Model, plan: BenchmarkPlan) -> dict[str, Any]:
    """What the report of `measure` will say about its settings and its rows. Nothing is evaluated.

    Returns:
        JSON values: `isa`, `kv`, `numerics`, `rounds`, `decode` and `results`, whose rows have only `KEY`.

    Raises:
        ArgumentError: If the model cannot be measured like this.
    """
    plan.check(model)
    facts: dict[str, Any] = {}
    rows = []
    for threads in plan.threads:
        with open_session(model, plan, threads) as session:
            facts = {"isa": session.isa, "kv": session.kv_dtype, "numerics": session.numerics}
            rows += [case.key() for case in cases(model, session, plan)]
    return {**facts, "rounds": plan.rounds, "decode": plan.steps, "results": rows}


def measure(model: Model, plan: BenchmarkPlan, progress: Progress = silent) -> dict[str, Any]:
    """Measure a model.

    Args:
        model: The model.
        plan: What to measure.
        progress: Called with each phase and its number of finished measurements.

    Returns:
        JSON values: `read_gb_s`, `mac_per_s`, `limits`, `results` and others (bench/README.md).

    Raises:
        ArgumentError: If the model cannot be measured like this.
    """
    announced = announce(model, plan)
    block = read_block(work_of(model, kv_dtype="f16", rows=1, batch=1, start=0).bytes)
    limits: list[dict[str, Any]] = []
    results = []
    for threads in plan.threads:
        with open_session(model, plan, threads) as session:
            measuring = list(cases(model, session, plan))
            dtypes = sorted({name for case in measuring for name in case.work.multiply_adds})
            meter = LimitMeter(block, dtypes, threads, session.isa, plan.numerics)
            measured = _measure_rounds(measuring, meter, plan.rounds, progress)
        results += [case.result() for case in measuring]
        read = [entry.read / 1e9 for entry in measured]
        limits.append(
            {
                "threads": threads,
                "read_gb_s": median(read),
                "read_gb_s_spread": [min(read), max(read)],
                "mac_per_s": {name: median(entry.multiply[name] for entry in measured) for name in dtypes},
            }
        )
    most = max(limits, key=lambda entry: entry["threads"])
    return {
        **announced,
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


def open_session(model: Model, plan: BenchmarkPlan, threads: int) -> Session:
    """Open a session for `cases`, with sequences for every context and batch, and a last one for prompts."""
    ends = [plan.start(context, model) + plan.steps for context, _ in plan.groups()]
    return model.session(
        context=max([*plan.prompts, *ends, 1]),
        sequences=sum(max(batches) for _, batches in plan.groups()) + 1,
        threads=threads,
        isa=plan.isa,
        kv_dtype=plan.kv_dtype,
        numerics=plan.numerics,
    )


def _measure_rounds(cases: list[Case], meter: LimitMeter, rounds: int, progress: Progress) -> list[Limits]:
    """Run every case once per round, with measurements of the limits before and after it. Returns these measurements.

    An extra first run of each case is not counted.
    """
    for done, case in enumerate(cases):
        progress("filling contexts", done, len(cases))
        case.run()
    measured = [meter.measure()]
    phase = f"measuring, {cases[0].threads} thread{'s' if cases[0].threads > 1 else ''}"
    for done in range(rounds * len(cases)):
        progress(phase, done, rounds * len(cases))
        case = cases[done % len(cases)]
        case.seconds.append(case.run())
        measured.append(meter.measure())
        before, after = measured[-2:]
        multiply = {name: mean((rate, after.multiply[name])) for name, rate in before.multiply.items()}
        case.limits.append(Limits(mean((before.read, after.read)), multiply))
    progress(phase, rounds * len(cases), rounds * len(cases))
    return measured


def cases(model: Model, session: Session, plan: BenchmarkPlan) -> Iterator[Case]:
    """The plan's cases for a session of `open_session`. The first run of a decode case fills its context."""
    prompts_sequence = sum(max(batches) for _, batches in plan.groups())
    for prompt in plan.prompts:
        work = work_of(model, kv_dtype=session.kv_dtype, rows=prompt, batch=1, start=0)
        run = _prefill(model, session, prompts_sequence, prompt)
        yield Case("prefill", session.threads, prompt, 0, 1, prompt, work, run)
    first = 0
    for index, (context, batches) in enumerate(plan.groups()):
        start = plan.start(context, model)
        for batch in batches:
            work = work_of(model, kv_dtype=session.kv_dtype, rows=1, batch=batch, start=start, steps=plan.steps)
            run = _decode(model, session, range(first, first + batch), start, plan.steps)
            yield Case("decode", session.threads, 0, context, batch, batch, work, run)
        for name in plan.samplings if index == 0 else ():
            work = work_of(model, kv_dtype=session.kv_dtype, rows=1, batch=1, start=start, steps=plan.steps)
            run = _decode(model, session, range(1), start, plan.steps, SAMPLINGS[name])
            yield Case("decode", session.threads, 0, context, 1, 1, work, run, sampling=name)
        first += max(batches)


def _tokens(model: Model, n: int) -> list[int]:
    return [i % min(97, model.n_token_ids) for i in range(n)]


def _prefill(model: Model, session: Session, sequence: int, prompt: int) -> Callable[[], float]:
    """A function that measures the seconds of one prompt, including its last token's logits."""
    tokens = _tokens(model, prompt)

    def run() -> float:
        session.truncate(0, sequence=sequence)
        started = time.perf_counter()
        session.eval(tokens, sequence=sequence)
        return time.perf_counter() - started

    return run


def _decode(
    model: Model, session: Session, sequences: range, start: int, steps: int, sampling: SamplingParams | None = None
) -> Callable[[], float]:
    """A function that measures the mean seconds of a decode step of all sequences, including every row's logits.

    With `sampling`, it includes a draw from the logits; the next token is the same as without.
    """
    tokens = _tokens(model, steps)
    single = sequences[0] if len(sequences) == 1 else None
    rows = [[(token, s, start + i, True) for s in sequences] for i, token in enumerate(tokens)]

    def run() -> float:
        for sequence in sequences:
            # the first run, or the previous steps exceeded a window or changed a state
            if session.length(sequence) < start or start < session.shortest_length(sequence):
                session.truncate(0, sequence=sequence)
                if start:
                    session.eval(_tokens(model, start), sequence=sequence, logits=None)
            session.truncate(start, sequence=sequence)
        started = time.perf_counter()
        for token, row in zip(tokens, rows, strict=True):
            if single is not None:
                session._run(session._rows(as_id(token), single))
                if sampling is not None:
                    session.sample(sampling)
            else:
                session.eval_rows(row)
        return (time.perf_counter() - started) / steps

    return run
