"""`llamac bench`: measure a model's speed on this machine, as a table, JSON and a picture; compare two results."""

from __future__ import annotations

import argparse
import math
import os
import platform
import shutil
import sys
import time
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any

from llamac import __version__
from llamac.cli import bench_peers, bench_roofline, bench_tables
from llamac.cli.inspect import describe_processor
from llamac.cli.loading import load_model
from llamac.cli.options import (
    Group,
    add_conversion,
    add_kernels,
    add_model,
    check_distinct,
    check_writable,
    write_result,
)
from llamac.cli.text import json_text, safe_line
from llamac.engine.hardware import machine
from llamac.engine.inspection import benchmark, comparison
from llamac.engine.model import Model
from llamac.errors import ArgumentError
from llamac.format.detect import files_of
from llamac.format.strict_json import read_object
from llamac.progress import bars
from llamac.sources.loading import open_model
from llamac.sources.names import resolve

# The standard rows.
PROMPT = 128
STEPS = 32
BATCH = 8  # sequences that decode together
LONG = 4096  # position of the row with a long context

DESCRIPTION = (
    "Measure prefill and decode, and report each speed as a share of the machine's limit. A step must read all "
    "weights and cache positions and do all multiply-adds; the slower of the two sets the limit. The limit for "
    "reading is the speed of plain memory reads (the best of 1, 2 and 4 streams, without software prefetch). The "
    "limit for multiply-adds is the speed of the kernels' own instructions with operands in the L1 cache. "
    "Measurements of speeds and limits alternate. A LIST is comma-separated. Tokens per second count all "
    "sequences of a batch. Without --context, --batch and --sampling, measure the standard rows: one sequence and "
    f"{BATCH} at the beginning, one at position {LONG} or the end of the model's context, one whose tokens are drawn, "
    "and for a GGUF file the time to import it. Run nothing else on the machine."
)
EXAMPLES = """\
  llamac bench model.bin
  llamac bench model.bin --threads 1,2 --prompt 128,512 --json speed.json --roofline speed.svg
  llamac bench model.bin --prompt '' --context 0,2048 --batch 1,4,8
  llamac bench model.bin --rounds 1 --json new.json --append
  llamac bench --compare old.json new.json
  llamac bench model.gguf --peers
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_model(parser)
    _add_measurements(parser.add_argument_group("measurements"))
    results = parser.add_argument_group("results")
    results.add_argument("--json", metavar="FILE", help="also write all figures as JSON; - writes only JSON, to stdout")
    results.add_argument(
        "--append",
        action="store_true",
        help="add the runs to those in the file of --json, to measure two builds or files in alternation",
    )
    results.add_argument("--roofline", metavar="FILE", help="draw the speeds and the machine's limits as SVG")
    results.add_argument(
        "--compare",
        nargs=2,
        metavar=("FIRST", "SECOND"),
        help="measure nothing; compare two files of --json, run by run, with 95%% confidence",
    )
    add_conversion(parser.add_argument_group("conversion"))
    add_kernels(parser.add_argument_group("machine"))


def _add_measurements(group: Group) -> None:
    group.add_argument(
        "--threads", type=_numbers, metavar="LIST", help="numbers of threads (default: see `llamac inspect`)"
    )
    group.add_argument(
        "--prompt",
        type=_numbers,
        metavar="LIST",
        help=f"lengths of prompts to prefill; '' for none (default: {PROMPT}, or the model's context if that is less)",
    )
    group.add_argument(
        "--decode",
        type=int,
        metavar="N",
        help=f"decode steps per run; 0 for none (default: {STEPS}, or the model's context if that is less)",
    )
    group.add_argument(
        "--context",
        type=_numbers,
        metavar="LIST",
        help="positions in each sequence before decoding; fewer if the steps would not fit the model's context "
        "(default: see above, else 0)",
    )
    group.add_argument(
        "--batch",
        type=_numbers,
        metavar="LIST",
        help="numbers of sequences that decode together (default: see above, else 1)",
    )
    group.add_argument(
        "--sampling",
        type=lambda text: text.split(",") if text else [],
        metavar="LIST",
        help="how to draw a token after each step of a sequence: greedy, or top-p (temperature 1, top-p 0.9); '' for "
        "no such row (default: see above, else none)",
    )
    group.add_argument("--rounds", type=int, default=5, metavar="N", help="runs of each measurement")
    group.add_argument(
        "--peers",
        action="store_true",
        help="measure llama.cpp on the same GGUF file as well, in turn: `llama-bench`, if it is on the PATH, and the "
        "Python package llama_cpp, if it is installed",
    )


def _numbers(text: str) -> list[int]:
    """Integers separated by commas. An empty string is an empty list."""
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers such as 1,2,4") from None


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    if options.compare:
        return _compare(options)
    for option in ("json", "roofline"):
        check_writable(f"--{option}", getattr(options, option))
    check_distinct(("--json", options.json), ("--roofline", options.roofline))
    earlier = _earlier(options)
    peers = _peers(options) if options.peers else []
    with load_model(options, threads=1, isa=options.isa, kv_dtype=options.kv_dtype) as model:
        plan = _plan(options, model)
        report = _describe(model, plan)  # can fail, so it comes before the measurements
        if earlier is not None:
            _check_append(earlier, report | benchmark.announce(model, plan), options.json)
        load_before = _load()
        with bars() as progress:
            report |= benchmark.measure(model, plan, progress)
            if peers:
                report["peers"] = bench_peers.measure(model, plan, peers, progress)
    if _is_standard(options):
        report |= _import(options)
    report["machine"]["load_average"] = [load_before, _load()]
    if earlier is not None:
        report = comparison.merged(earlier, report)
    _print_and_write(options, report, bench_tables.report_lines(report, shutil.get_terminal_size().columns))
    if options.roofline:  # at the end: no figures are lost if the picture cannot be written
        write_result(options.roofline, bench_roofline.picture(report).encode())
    return 0


def _plan(options: argparse.Namespace, model: Model) -> benchmark.BenchmarkPlan:
    standard, context = _is_standard(options), model.config["context"]
    return benchmark.BenchmarkPlan(
        threads=options.threads or [machine.DefaultThreads(model.weight_bytes).now()],
        prompts=[min(PROMPT, context)] if options.prompt is None else options.prompt,
        steps=min(STEPS, context) if options.decode is None else options.decode,
        contexts=[0] if options.context is None else options.context,
        batches=[1, BATCH] if standard else [1] if options.batch is None else options.batch,
        also=[(min(LONG, context), 1)] if standard else (),
        samplings=list(benchmark.SAMPLINGS) if standard else options.sampling or (),
        rounds=options.rounds,
        isa=options.isa,
        kv_dtype=options.kv_dtype,
        numerics=options.numerics,
    )


def _is_standard(options: argparse.Namespace) -> bool:
    """Whether the standard rows are measured: nothing says which ones are."""
    return options.context is None and options.batch is None and options.sampling is None


def _import(options: argparse.Namespace) -> dict[str, Any]:
    """The time to import a GGUF file, from its bytes in the system's cache to a model in memory. Nothing is kept."""
    files = _gguf(options)
    if not files:
        return {}
    seconds = []
    for _ in range(options.rounds):
        started = time.perf_counter()
        # what the user should know has been said when the model was loaded for the other rows
        open_model(options.model, dtype=options.dtype, cache_dir=False, on_warning=lambda text: None).close()
        seconds.append(time.perf_counter() - started)
    return {"import": {"seconds": seconds, "bytes": sum(path.stat().st_size for path in files)}}


def _gguf(options: argparse.Namespace) -> list[Path]:
    """The files of the model that the command names, if it is a GGUF model; otherwise none."""
    name = options.default_model if options.model is None else options.model
    path = resolve(name, cache_dir=False if options.no_cache else options.cache_dir or None).path
    if not path.is_file():
        return []
    with open(path, "rb") as file:
        return list(files_of(path).values()) if file.read(4) == b"GGUF" else []


def _peers(options: argparse.Namespace) -> list[bench_peers.Peer]:
    """The peers on this machine.

    Raises:
        ArgumentError: If there are none, or the model is not one that they can run.
    """
    files = _gguf(options)
    if not files:
        raise ArgumentError("--peers runs others on the same file, so MODEL must be a GGUF file")
    return bench_peers.find(files[0])


# ---- files


def _earlier(options: argparse.Namespace) -> dict[str, Any] | None:
    """The report that --append adds runs to; None if there is none yet."""
    if not options.append:
        return None
    if options.json in (None, "-"):
        raise ArgumentError("--append needs --json FILE, the file to which it adds runs")
    if options.peers:
        raise ArgumentError("--append adds no runs of peers: measure --peers without it")
    return _read_report(options.json) if Path(options.json).exists() else None


def _check_append(earlier: dict[str, Any], report: dict[str, Any], path: str) -> None:
    try:
        comparison.check_same(earlier, report)
    except ArgumentError as error:
        raise ArgumentError(f"--append to {path}: {error}") from None


def _read_report(path: str) -> dict[str, Any]:
    """Read a file of --json.

    Raises:
        ArgumentError: If it is not one, or not of this version's form.
    """
    report = read_object(Path(path), error=ArgumentError)
    rows, model = report.get("results"), report.get("model")
    whole = isinstance(model, dict) and model.keys() >= {"id", "name", "dtype"}
    whole = whole and report.keys() >= {"rounds", *comparison.SETTINGS}
    if not (whole and isinstance(rows, list) and all(map(_is_row, rows))):
        raise ArgumentError(f"{path} is not a report that this version of `llamac bench --json` has written")
    return report


def _is_row(row: Any) -> bool:
    """Whether a value is a row of a report: its measurements are positive numbers, the same number in each list."""
    single = ("tokens", "bytes", "multiply_adds", "tok_s")
    if not isinstance(row, dict) or not row.keys() >= {*benchmark.KEY, *comparison.RUNS, *single}:
        return False
    runs = [row[name] for name in comparison.RUNS]
    if not all(isinstance(times, list) and len(times) == len(runs[0]) for times in runs):
        return False
    numbers = [*chain(*runs), *(row[name] for name in single)]
    is_positive = all(isinstance(number, (int, float)) and 0 < number < math.inf for number in numbers)
    return is_positive and all(isinstance(row[name], (int, str)) for name in benchmark.KEY)


def _compare(options: argparse.Namespace) -> int:
    if options.model is not None:
        raise ArgumentError("--compare measures nothing, so it takes no MODEL")
    for option in ("append", "peers", "roofline"):
        if getattr(options, option):
            raise ArgumentError(f"--compare measures nothing, so it takes no --{option}")
    check_writable("--json", options.json)
    first, second = map(_read_report, options.compare)
    found = comparison.compare_reports(first, second)
    _print_and_write(options, found, bench_tables.comparison_lines(first, second, found))
    return 0


def _print_and_write(options: argparse.Namespace, facts: dict[str, Any], table: list[str]) -> None:
    """Print the table and write the JSON, or print the JSON instead. If one of them fails, the other is done."""
    if options.json == "-":
        sys.stdout.write(json_text(facts))
        return
    try:
        if options.json:
            write_result(options.json, json_text(facts).encode())
    finally:
        print("\n".join(map(safe_line, table)))


def _load() -> float | None:
    """The load average. If other programs run, the figures are worthless."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def _describe(model: Model, plan: benchmark.BenchmarkPlan) -> dict[str, Any]:
    sizes = [(prompt, 1) for prompt in plan.prompts]
    sizes += [(context + plan.steps, max(batches)) for context, batches in plan.groups()]
    positions, sequences = max(sizes, key=lambda size: size[0] * size[1], default=(1, 1))
    memory = model.plan_memory(context=max(1, min(positions, model.config["context"])), sequences=max(1, sequences))
    dtypes = sorted({tensor.dtype for tensor in model.file.tensors if len(tensor.shape) == 2})
    return {
        "llamac": __version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            **describe_processor(machine.plan_threads()),
            "kernel": platform.release(),
            "python": platform.python_version(),
        },
        "model": {
            "name": model.name or model.file.path.name,
            "id": model.file.id,
            "file_bytes": model.file.header["file_bytes"],
            "dtypes": dtypes,
            "dtype": benchmark.main_dtype(model),
            "context": model.config["context"],
        },
        "memory": {**memory.as_dict(), "text": memory.summary()},
    }
