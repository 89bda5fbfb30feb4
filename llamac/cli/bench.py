"""`llamac bench`: measure a model's speed on this machine, as a table and as JSON."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import textwrap
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from llamac import __version__
from llamac.cli.inspect import describe_processor
from llamac.cli.loading import load_model
from llamac.cli.options import Group, add_conversion, add_kernels, add_model
from llamac.cli.text import json_text, safe_line
from llamac.engine.hardware import machine
from llamac.engine.inspection import benchmark
from llamac.engine.model import Model
from llamac.errors import ArgumentError
from llamac.progress import bars
from llamac.sizes import size_text

WIDE = 76  # columns that the whole table needs

DESCRIPTION = (
    "Measure prefill and decode, and report each speed as a share of the machine's limit. A step must read all "
    "weights and cache positions and do all multiply-adds; the slower of the two sets the limit. The limit for "
    "reading is the speed of plain memory reads (the best of 1, 2 and 4 streams, without software prefetch). The "
    "limit for multiply-adds is the speed of the kernels' own instructions with operands in the L1 cache. "
    "Measurements of speeds and limits alternate. A LIST is numbers separated by commas. Tokens per second count all "
    "sequences of a batch. Run nothing else on the machine."
)
EXAMPLES = """\
  llamac bench model.bin
  llamac bench model.bin --threads 1,2 --prompt 128,512 --json speed.json
  llamac bench model.bin --prompt '' --context 0,2048 --batch 1,4,8
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_model(parser)
    _add_measurements(parser.add_argument_group("measurements"))
    parser.add_argument("--json", metavar="FILE", help="also write all figures as JSON; - writes only JSON, to stdout")
    add_conversion(parser.add_argument_group("conversion"))
    add_kernels(parser.add_argument_group("machine"))


def _add_measurements(group: Group) -> None:
    group.add_argument(
        "--threads", type=_numbers, metavar="LIST", help="numbers of threads (default: see `llamac inspect`)"
    )
    group.add_argument(
        "--prompt", type=_numbers, default="128", metavar="LIST", help="lengths of prompts to prefill; '' for none"
    )
    group.add_argument("--decode", type=int, default=32, metavar="N", help="decode steps per run; 0 for none")
    group.add_argument(
        "--context",
        type=_numbers,
        default="0",
        metavar="LIST",
        help="positions in each sequence before decoding; fewer if the steps would not fit the model's context",
    )
    group.add_argument(
        "--batch", type=_numbers, default="1", metavar="LIST", help="numbers of sequences that decode together"
    )
    group.add_argument("--rounds", type=int, default=5, metavar="N", help="runs of each measurement")


def _numbers(text: str) -> list[int]:
    """Whole numbers separated by commas. An empty string is an empty list."""
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 1,2,4") from None


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    _check_target(options.json)
    with load_model(options, threads=1, isa=options.isa, kv_dtype=options.kv_dtype) as model:
        plan = benchmark.BenchmarkPlan(
            threads=options.threads or [machine.DefaultThreads(model.weight_bytes).now()],
            prompts=options.prompt,
            steps=options.decode,
            contexts=options.context,
            batches=options.batch,
            rounds=options.rounds,
            isa=options.isa,
            kv_dtype=options.kv_dtype,
            numerics=options.numerics,
        )
        report = _describe(model, plan)  # can fail, so it comes before the measurements
        load_before = _load()
        with bars() as progress:
            report |= benchmark.measure(model, plan, progress)
    report["machine"]["load_average"] = [load_before, _load()]
    if options.json == "-":
        sys.stdout.write(json_text(report))
        return 0
    if options.json:
        Path(options.json).write_bytes(json_text(report).encode())
    print("\n".join(map(safe_line, _table(report, shutil.get_terminal_size().columns))))
    return 0


def _check_target(path: str | None) -> None:
    """Check that the result can be written, before minutes of measurements."""
    if path is None or path == "-":
        return
    target = Path(path)
    if target.is_dir():
        raise ArgumentError(f"--json {path}: is a directory, expected a file")
    if not os.access(target if target.exists() else target.absolute().parent, os.W_OK):
        raise ArgumentError(f"--json {path}: cannot be written: the folder does not exist or is not writable")


def _load() -> float | None:
    """The load average. If other programs run, the figures are worthless."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def _describe(model: Model, plan: benchmark.BenchmarkPlan) -> dict[str, Any]:
    positions = [*plan.prompts, *(context + plan.steps for context in plan.contexts)]
    memory = model.plan_memory(
        context=max(1, min(max(positions, default=1), model.config["context"])), sequences=max(1, *plan.batches, 1)
    )
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


# ---- the table


def _table(report: dict[str, Any], width: int) -> list[str]:
    """Format the result. A narrow terminal gets fewer columns."""
    wide = width >= WIDE
    model = report["model"]
    lines = [f"{model['name']}: {'/'.join(model['dtypes'])}, {size_text(model['file_bytes'])}"]
    rounds = f"medians of {report['rounds']} rounds" if report["rounds"] > 1 else "1 round"
    numerics = ", fast" if report["numerics"] == "fast" else ""
    lines.append(f"{report['isa']}{numerics}, KV {report['kv']}; {rounds}")
    lines += textwrap.wrap(f"memory: {report['memory']['text']}", width, subsequent_indent="  ")
    for entry in report["limits"]:
        threads = f"{entry['threads']} thread{'s' if entry['threads'] > 1 else ''}"
        peaks = ", ".join(f"{name} {_digits(speed / 1e9)}" for name, speed in entry["mac_per_s"].items())
        lines += [f"{threads}: reads {_digits(entry['read_gb_s'])} GB/s;", f"  multiplies (G/s) {peaks}"]
        if wide:
            lines[-2:] = [f"{lines[-2]}{lines[-1][1:]}"]
    lines.append("")
    lines.append(
        f"{'threads':>7}  {'':<13} {'batch':>5} {'tok/s':>9}  {'from':>9} {'to':>9}  {'share of limit':>14}"
        if wide
        else f"{'thr':>3} {'':<10} {'bat':>3} {'tok/s':>9} {'share':>6}"
    )
    return lines + [_row(result, wide) for result in report["results"]]


def _row(result: dict[str, Any], wide: bool) -> str:
    prefill = result["phase"] == "prefill"
    where = result["prompt"] if prefill else result["context"]
    speed, share = _digits(result["tok_s"]), f"{result['share_of_limit']:.0%}"
    if not wide:
        what = f"{'prompt' if prefill else 'at'} {where}"
        return f"{result['threads']:>3} {what:<10.10} {result['batch']:>3} {speed:>9} {share:>6}"
    what = f"{'prefill' if prefill else 'decode at'} {where}"
    low, high = (_digits(speed) for speed in result["tok_s_spread"])
    limit = {"read": "reading", "multiply": "multiply"}[result["limit"]]
    return (
        f"{result['threads']:>7}  {what:<13} {result['batch']:>5} {speed:>9}  {low:>9} {high:>9}  {share:>5} {limit:>8}"
    )


def _digits(number: float) -> str:
    """Format a number with at least three digits."""
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"
