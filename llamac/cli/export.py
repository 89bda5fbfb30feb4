"""`llamac export`: converts a checkpoint to a model file, or back."""

from __future__ import annotations

import argparse
import sys

from llamac.cli.progress import progress_bar
from llamac.export.convert import export as convert


def export(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    with progress_bar("exporting", 1) as advance:
        shown = [0, 1]  # bytes done so far, and in all: known when the work has begun

        def progress(done: int, total: int) -> None:
            advance_by = done / total - shown[0] / shown[1]
            shown[:] = done, total
            advance(advance_by)  # type: ignore[arg-type]  # a bar of length 1 advances by fractions

        report = convert(
            options.source,
            options.out,
            dtype=options.dtype,
            tokenizer=options.tokenizer,
            name=options.name,
            to=options.to,
            probe_source=options.probe_source,
            overwrite=options.force,
            progress=progress,
        )
    for warning in report.warnings:
        print(f"llamac: warning: {warning}", file=sys.stderr)
    bits = f", {report.bits_per_weight:.2f} bits per weight" if report.bits_per_weight else ""
    print(f"{report.path}: {report.bytes / 1e6:.1f} MB, {report.dtype}{bits}, tokenizer {report.tokenizer}")
    return 0
