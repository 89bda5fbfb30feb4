"""The texts of `llamac embed` and `llamac rerank`: operands, the lines of a file, or those of standard input."""

from __future__ import annotations

import argparse
import codecs
import json
import sys
from collections.abc import Mapping
from typing import Any

from llamac.cli.options import (
    ANY_MODEL,
    Group,
    add_conversion,
    add_device,
    add_kernels,
    add_lora,
    add_max_memory,
    add_threads,
)
from llamac.cli.parser import Parser
from llamac.cli.prompt import decoded
from llamac.errors import ArgumentError

STANDARD = "-"  # standard input or output in place of a file


def add_operand(parser: Parser) -> None:
    """Add the operand MODEL, which has no default."""
    parser.add_argument("model", metavar="MODEL", help=ANY_MODEL)


def add_file(group: Group, what: str) -> None:
    """Add -f. `what` are the texts."""
    group.add_argument(
        "-f",
        "--file",
        action="once",
        metavar="FILE",
        help=f"read the {what} from the lines of a file; {STANDARD} for standard input",
    )


def add_settings(parser: Parser) -> None:
    """Add the groups of options for the model, its conversion and the machine."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "-z", "--tokenizer", metavar="FILE", help="use this tokenizer file or directory, not the model's tokenizer"
    )
    add_lora(model, "apply a LoRA adapter while the model runs")
    model.add_argument("--context", type=int, metavar="N", help="positions for a text (default: the model's)")
    add_conversion(parser.add_argument_group("conversion"))
    machine = parser.add_argument_group("machine")
    add_threads(machine)
    add_kernels(machine)
    add_device(machine)
    add_max_memory(machine)


def read_texts(options: argparse.Namespace, given: list[str], what: str) -> list[str]:
    """The texts: `given`, or the lines of the file after -f or of standard input.

    Raises:
        ArgumentError: If there are none, a line is empty, or there are operands and a file.
        UnicodeError: If a text is not UTF-8.
    """
    if given and options.file is not None:
        raise ArgumentError(f"-f {options.file} has the {what}: leave out those on the command line")
    if given:
        return [
            decoded(text.encode("utf-8", "surrogateescape"), f"{what}[{index}]") for index, text in enumerate(given)
        ]
    name = "standard input" if options.file in (None, STANDARD) else str(options.file)
    if options.file not in (None, STANDARD):
        with open(options.file, "rb") as file:
            data = file.read()
    elif sys.stdin is None or (options.file is None and sys.stdin.isatty()):
        raise ArgumentError(f"there are no {what}: write them after the model, or read them with -f")
    else:
        data = sys.stdin.buffer.read()
    lines = decoded(data.removeprefix(codecs.BOM_UTF8), name).replace("\r\n", "\n").removesuffix("\n").split("\n")
    if lines == [""]:
        raise ArgumentError(f"{name} is empty, expected {what}, one in a line")
    empty = next((number for number, line in enumerate(lines, 1) if not line), None)
    if empty is not None:
        raise ArgumentError(f"{name}: line {empty} is empty, expected a text")
    return lines


def json_line(facts: Mapping[str, Any]) -> str:
    """Facts as one line of JSON, in ASCII."""
    return json.dumps(facts) + "\n"
