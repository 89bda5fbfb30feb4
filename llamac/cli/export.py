"""`llamac export`: convert a checkpoint to a model file, or back."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Literal

from llamac.arguments import AUTO, DTYPES, parse_adapters
from llamac.cli.options import BUILT_IN, Group, add_lora, add_threads
from llamac.cli.text import safe_error, safe_line
from llamac.progress import bars
from llamac.sizes import size_text

DESCRIPTION = "Convert any checkpoint to a model file, or with --to a model file to another format."
EXAMPLES = """\
  llamac export ./TinyLlama-1.1B tiny.bin --dtype bf16
  llamac export stories15M.bin stories15M.llamac.bin --tokenizer tokenizer.bin
  llamac export tinyllama-1.1b-chat.Q8_0.gguf tiny.bin
  llamac export ./TinyLlama-1.1B tiny.bin --dtype-map auto --bits 4.5
  llamac export model.bin ./checkpoint --to hf
  llamac export model.bin model.gguf --to gguf --dtype q8_0
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "source",
        metavar="SRC",
        help="a Hugging Face directory, a GGUF file, a llama2.c file, a model file, hf:ORG/NAME[@REVISION] on the "
        f"Hugging Face Hub, or {BUILT_IN}",
    )
    parser.add_argument("out", metavar="OUT", help="the file or directory to write")
    parser.add_argument(
        "--to",
        choices=("llamac", "hf", "llama2c", "gguf"),
        default="llamac",
        help="output format: a model file, a Hugging Face directory, llama2.c's files, or a GGUF file for llama.cpp",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace OUT if it is a file, or the target if it is a symbolic link; with --to llama2c also replace a "
        "different tokenizer.bin next to it",
    )
    parser.add_argument("--name", help="the model's name (default: the source's)")
    _add_weights(parser.add_argument_group("weights"))
    _add_tokenizer(parser.add_argument_group("tokenizer"))
    parser.add_argument(
        "--probe-source",
        choices=("llamac", "transformers"),
        help="the program that computes the file's reference logits (default: llamac)",
    )


def _add_weights(group: Group) -> None:
    group.add_argument(
        "--dtype",
        choices=(*DTYPES, "auto", "q8_0", "q4_0"),
        metavar="DTYPE",
        help="number format of the matrices: f32, f16, bf16, q8, q6, q4, q4s, q3, q2, t2, or auto, which keeps floats "
        "and GGUF's usual types and stores others as q8, or as t2 if they are ternary (default: the source's; auto for "
        "GGUF files); q8, q6, q4, q4s, q3 and q2 have about 8.25, 6.25, 4.5, 4.25, 3.5 and 2.5 bits per weight, and "
        "with q4 and fewer bits the output matrix is q6 and attn_v is q8; t2, of 2 bits, is for models with ternary "
        "weights; --to gguf also has q8_0 and q4_0",
    )
    group.add_argument("--pure", action="store_true", help="with q4 and fewer bits: store no matrix in a wider format")
    group.add_argument(
        "--dtype-map",
        metavar="PATTERN=DTYPE,...",
        help="number format of the matrices whose names match a pattern, such as "
        "'*.attn_v.*=q8,*=q4'; * matches any characters, and the first match wins; auto measures what each matrix "
        "costs and spends --bits where it costs most",
    )
    group.add_argument(
        "--bits", type=float, metavar="B", help="with --dtype-map auto: at most this many bits per weight, such as 4.5"
    )
    group.add_argument(
        "--bits-text",
        metavar="FILE",
        help="with --dtype-map auto: measure costs on this text (default: English prose)",
    )
    group.add_argument(
        "--calibrate",
        metavar="FILE",
        help="with q4, q4s, q3 and q2: run the model on this text, or with `self` on text that it generates, and "
        "quantize for the measured inputs; more accurate but slower",
    )
    add_lora(group, "merge a LoRA adapter into the weights")
    add_threads(group)


def _add_tokenizer(group: Group) -> None:
    one = group.add_mutually_exclusive_group()
    one.add_argument(
        "--tokenizer", metavar="FILE", help="tokenizer file or directory (default: the one in or next to SRC)"
    )
    one.add_argument("--no-tokenizer", action="store_true", help="store no tokenizer: the model accepts only token ids")


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    from llamac.export.convert import export
    from llamac.sources.names import resolve

    with bars() as progress:
        report = export(
            resolve(options.source, progress),
            options.out,
            dtype=options.dtype,
            pure=options.pure,
            dtype_map=_dtype_map(options.dtype_map),
            bits=options.bits,
            bits_text=options.bits_text,
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
    place = ", as tokenizer.bin next to it" if options.to == "llama2c" and report.tokenizer != "none" else ""
    size = f"{size_text(report.bytes)}, {report.dtype}{bits}"
    print(safe_line(f"{report.path}: {size}, tokenizer {report.tokenizer}{place}"))
    if options.bits is not None:
        pairs = ",".join(f"{pattern}={dtype}" for pattern, dtype in report.dtype_map)
        print(safe_line(f"the same choice: --dtype {report.dtype} --dtype-map '{pairs}'"))
    return 0


def _dtype_map(text: str | None) -> Iterable[tuple[str, str]] | Literal["auto"]:
    from llamac.export.dtypes import parse_dtype_map

    if text == AUTO:
        return "auto"
    return () if text is None else parse_dtype_map(text)
