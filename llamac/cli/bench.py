"""`llamac bench`: how fast a model runs here, as a table and as JSON."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from llamac import __version__, benchmark, machine
from llamac.cli.inspect import describe_processor
from llamac.cli.loading import load_model
from llamac.cli.progress import progress_bars
from llamac.cli.text import json_text, safe_line
from llamac.errors import ArgumentError
from llamac.model import Model

WIDE = 76  # columns that the whole table needs


def bench(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    _check_target(options.json)
    with load_model(options, threads=1, isa=options.isa, kv=options.kv) as model:
        wishes = benchmark.Wishes(
            threads=options.threads or [machine.DefaultThreads(model.weight_bytes).now()],
            prompts=options.prompt,
            steps=options.decode,
            contexts=options.context,
            batches=options.batch,
            rounds=options.rounds,
            isa=options.isa,
            kv=options.kv,
        )
        report = _describe(model)  # what can fail comes before what takes minutes
        load_before = _load()
        with progress_bars() as progress:
            report |= benchmark.measure(model, wishes, progress)
    report["machine"]["load_average"] = [load_before, _load()]
    if options.json == "-":
        sys.stdout.write(json_text(report, sys.stdout.encoding))
        return 0
    if options.json:
        Path(options.json).write_bytes(json_text(report).encode())
    print("\n".join(map(safe_line, _table(report, shutil.get_terminal_size().columns))))
    return 0


def _check_target(path: str | None) -> None:
    """Before minutes of measuring: can the result be written?"""
    if path is None or path == "-":
        return
    target = Path(path)
    if target.is_dir():
        raise ArgumentError(f"--json {path}: is a directory, expected a file's name")
    if not os.access(target if target.exists() else target.absolute().parent, os.W_OK):
        raise ArgumentError(f"--json {path}: cannot be written: there is no such folder, or no permission")


def _load() -> float | None:
    """How many programs want to run; others than ours make figures worthless."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def _describe(model: Model) -> dict[str, Any]:
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
    }


# ---- the table


def _table(report: dict[str, Any], width: int) -> list[str]:
    """Lines for a person; columns that a narrow terminal has no room for are left out."""
    wide = width >= WIDE
    model = report["model"]
    lines = [f"{model['name']}: {'/'.join(model['dtypes'])}, {model['file_bytes'] / 1e6:.1f} MB"]
    lines.append(f"{report['isa']}, KV {report['kv']}; medians of {report['rounds']} rounds")
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
    """Three digits or more."""
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"
