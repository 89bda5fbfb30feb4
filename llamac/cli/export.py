"""`llamac export`: converts a checkpoint to a model file, or back."""

from __future__ import annotations

import argparse
import sys

from llamac.arguments import parse_adapters
from llamac.cli.progress import progress_bars
from llamac.cli.text import safe_error, safe_line
from llamac.export.convert import export as convert
from llamac.export.quantize import parse_dtype_map


def export(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    with progress_bars() as progress:
        report = convert(
            options.source,
            options.out,
            dtype=options.dtype,
            pure=options.pure,
            dtype_map=parse_dtype_map(options.dtype_map) if options.dtype_map is not None else (),
            calibrate=options.calibrate,
            lora=parse_adapters(options.lora),
            threads=options.threads,
            tokenizer=False if options.no_tokenizer else options.tokenizer,
            name=options.name,
            to=options.to,
            probe_source=options.probe_source or "auto",
            overwrite=options.force,
            progress=progress,
        )
    for warning in report.warnings:
        print(f"llamac: warning: {safe_error(warning)}", file=sys.stderr)
    bits = f", {report.bits_per_weight:.2f} bits per weight" if report.bits_per_weight else ""
    place = ", as tokenizer.bin beside it" if options.to == "llama2c" and report.tokenizer != "none" else ""
    size = f"{report.bytes / 1e6:.1f} MB, {report.dtype}{bits}"
    print(safe_line(f"{report.path}: {size}, tokenizer {report.tokenizer}{place}"))
    return 0
