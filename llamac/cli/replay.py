"""`llamac replay`: repeats a result from its receipt, and says what has changed."""

from __future__ import annotations

import argparse
import sys

from llamac.cli.loading import load_model
from llamac.cli.options import ANY_MODEL, add_conversion, add_lora, add_threads
from llamac.cli.parser import Parser
from llamac.cli.text import json_text, safe_line
from llamac.engine.receipts.receipt import MAX_BYTES, Receipt, parse_text, read_receipt
from llamac.engine.receipts.replay import Replay, replay_on
from llamac.exit_codes import ERROR, OK
from llamac.sources.replaying import source_of

STANDARD = "-"

DESCRIPTION = (
    "Reproduce a result from its receipt, token for token, on this machine. The exit code is 0 if the tokens, the "
    "text, the finish reason and the stop string are the same. It is 1 if they differ; then each line names a "
    "difference. docs/receipts.md describes receipts."
)
EXAMPLES = """\
  llamac run -i "Once upon a time" --receipt receipt.json
  llamac replay receipt.json
  llamac replay receipt.json path/to/model.bin --json
"""


def add_arguments(parser: Parser) -> None:
    """Add the command's options."""
    parser.add_argument("receipt", metavar="RECEIPT", help="a receipt; - for standard input")
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help=f"{ANY_MODEL} (default: the source of the receipt's model)"
    )
    parser.add_argument("--json", action="store_true", help="print the comparison as one JSON object")
    model = parser.add_argument_group("model")
    model.add_argument(
        "-z", "--tokenizer", metavar="FILE", help="use this tokenizer file or directory, not the model's tokenizer"
    )
    add_lora(model, "apply a LoRA adapter while the model runs")
    add_conversion(parser.add_argument_group("conversion"))
    machine = parser.add_argument_group("machine")
    add_threads(machine)
    machine.add_argument("--isa", metavar="NAME", help="kernel set, such as avx2 or scalar; the result is the same")


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    receipt = _read(options.receipt)
    if options.model is None:
        options.model = source_of(receipt)
    with load_model(options, tokenizer=options.tokenizer, threads=options.threads, isa=options.isa) as model:
        replay = replay_on(model, receipt)
    sys.stdout.write(json_text(_facts(replay)) if options.json else _text(replay, receipt))
    return OK if replay.identical else ERROR


def _read(path: str) -> Receipt:
    if path != STANDARD:
        return read_receipt(path)
    data = b"" if sys.stdin is None else sys.stdin.buffer.read(MAX_BYTES + 1)
    return parse_text(data, "standard input")


def _facts(replay: Replay) -> dict[str, object]:
    completion = replay.completion
    return {
        "identical": replay.identical,
        "changes": list(replay.changes),
        "position": replay.position,
        "tokens": None if completion is None else completion.tokens,
        "text": None if completion is None else completion.text,
    }


def _text(replay: Replay, receipt: Receipt) -> str:
    n = len(receipt.tokens)
    tokens = f"{n} token{'' if n == 1 else 's'}"
    lines = [f"changed    {change}" for change in replay.changes]
    if replay.identical:
        lines.append(f"identical  {tokens}, the text and the reason for the end ({receipt.finish_reason})")
    else:
        same = n if replay.position is None and replay.completion is not None else replay.position or 0
        lines.append(f"DIFFERENT  {same} of {tokens} were repeated")
    return "".join(f"{safe_line(line)}\n" for line in lines)
