"""`llamac batch`: answers a file of requests in OpenAI's batch format, many at once, and continues after a kill."""

from __future__ import annotations

import argparse
import os
import sys
from collections import deque

from llamac import models
from llamac.arguments import DEFAULT_SEQUENCES
from llamac.cli.loading import load_model, shown_progress
from llamac.cli.options import (
    ANY_MODEL,
    add_conversion,
    add_device,
    add_kernels,
    add_lora,
    add_max_memory,
    add_overflow,
    add_speculation,
    add_threads,
    session_settings,
)
from llamac.cli.parser import Parser
from llamac.cli.text import safe_error
from llamac.engine.batching.engine import Engine
from llamac.engine.sampling.params import SamplingParams
from llamac.errors import ArgumentError
from llamac.exit_codes import ERROR, OK
from llamac.openai.batch_files import STANDARD, Input, Line, Output
from llamac.openai.batch_lines import Answer, Answering
from llamac.openai.responses import fingerprint

PHASE = "answering"
QUEUED = 4  # requests in the engine, as a multiple of those that it computes at a time
POLL_INTERVAL = 0.02  # seconds

DESCRIPTION = (
    "Answer a file of requests, many at once. Each line of IN is a request in OpenAI's batch format; its result "
    "becomes a line of OUT. To continue an interrupted batch, run the same command again: no line is lost or "
    "repeated. A line that cannot be answered gets an error as its result, and the exit code is then 1. docs/batch.md "
    "describes both formats."
)
EXAMPLES = """\
  llamac batch in.jsonl out.jsonl
  llamac batch in.jsonl out.jsonl --model chat.gguf --max-sequences 32
  grep '"lang": "en"' in.jsonl | llamac batch - out.jsonl
  llamac batch in.jsonl - | jq -r .response.body.choices[0].text
"""


def add_arguments(parser: Parser) -> None:
    """Add the command's options."""
    parser.operand_hint = "; a model follows --model"
    parser.add_argument("input", metavar="IN", help="the requests, one JSON object per line; - for standard input")
    parser.add_argument("output", metavar="OUT", help="the file to append results to; - for standard output")
    parser.add_argument("-q", "--quiet", action="store_true", help="print no summary; show progress only on a terminal")
    model = parser.add_argument_group("model")
    model.add_argument("-m", "--model", metavar="MODEL", help=f"{ANY_MODEL} (default: {models.CHAT})")
    model.set_defaults(default_model=models.CHAT)
    model.add_argument(
        "-z", "--tokenizer", metavar="FILE", help="use this tokenizer file or directory, not the model's tokenizer"
    )
    add_lora(model, "apply a LoRA adapter while the model runs")
    parser.add_argument("--receipts", action="store_true", help="add a receipt to each result, for `llamac replay`")
    model.add_argument("--context", type=int, metavar="N", help="positions per request (default: the model's)")
    add_overflow(parser.add_argument_group("defaults of requests"))
    add_conversion(parser.add_argument_group("conversion"))
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--max-sequences", type=int, default=DEFAULT_SEQUENCES, metavar="N", help="requests to compute at the same time"
    )
    machine.add_argument(
        "--kv-tokens",
        type=int,
        metavar="N",
        help="capacity of the KV cache in positions, for all requests together (default: as many as they need)",
    )
    machine.add_argument(
        "--prefix-dir",
        metavar="DIR",
        help="store computed prefixes of prompts in this folder, and reuse those of earlier runs",
    )
    add_speculation(machine)
    add_threads(machine)
    add_kernels(machine)
    add_device(machine)
    add_max_memory(machine)


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    if STANDARD not in (options.input, options.output) and _is_same_file(options.input, options.output):
        raise ArgumentError(f"{options.output} is both IN and OUT: choose another OUT")
    settings = session_settings(options)
    with (
        Input(options.input) as source,
        load_model(options, tokenizer=options.tokenizer, **settings) as model,
        Engine(
            model,
            max_sequences=options.max_sequences,
            kv_tokens=options.kv_tokens,
            prefix_dir=options.prefix_dir,
        ) as engine,
        Output(options.output, source, fingerprint(engine)) as output,
    ):
        batch = _Batch(source, output, Answering(engine, _defaults(options), with_receipts=options.receipts))
        try:
            batch.run(options)
        except BrokenPipeError:  # the reader has seen enough
            raise
        except BaseException:
            output.sync()
            _say(options, f"stopped after {batch.describe()}{_advice(options)}")
            raise
        output.sync()
        _say(options, batch.describe())
        return ERROR if batch.errors else OK


def _is_same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _advice(options: argparse.Namespace) -> str:
    if options.output == STANDARD or not os.path.isfile(options.output):
        return ""
    same = "with the same input" if options.input == STANDARD else "again"
    return f"; run the command {same} to continue"


def _say(options: argparse.Namespace, text: str) -> None:
    if not options.quiet:
        print(f"llamac: {safe_error(text)}", file=sys.stderr, flush=True)


class _Batch:
    """A run over the lines that have no result yet.

    Attributes:
        errors: Results that are errors, those of earlier runs included.
    """

    def __init__(self, source: Input, output: Output, answering: Answering) -> None:
        self._source = source
        self._output = output
        self._answering = answering
        self._pending: deque[Answer] = deque()
        self._done = len(output.done)
        self.errors = output.errors

    def describe(self) -> str:
        """How many lines are done, and how many of them are errors."""
        lines = len(self._source.lines)
        errors = f", {self.errors} with errors" if self.errors else ""
        return f"{self._done} of {lines} {'line' if lines == 1 else 'lines'}{errors}"

    def run(self, options: argparse.Namespace) -> None:
        """Answer all lines that have no result."""
        left = [line for line in self._source.lines if line.id not in self._output.done]
        before, limit = self._done, QUEUED * options.max_sequences
        with shown_progress(options) as report:
            report(PHASE, 0, len(left))
            for line in left:
                while len(self._pending) >= limit:
                    self._collect()
                self._submit(line)
                report(PHASE, self._done - before, len(left))
            while self._pending:
                self._collect()
                report(PHASE, self._done - before, len(left))

    def _submit(self, line: Line) -> None:
        """Queue a line's request, or record what is wrong with it."""
        answer = self._answering.submit(line.id, line.custom_id, lambda: self._source.read(line))
        if answer.done:
            self._record(answer)
        else:
            self._pending.append(answer)

    def _collect(self) -> None:
        """Record the results of requests that have ended. Waits for one for a short time."""
        self._pending[0].wait(POLL_INTERVAL)
        for answer in [answer for answer in self._pending if answer.done]:
            self._record(answer)
            self._pending.remove(answer)

    def _record(self, answer: Answer) -> None:
        result, is_error = answer.result()
        self._output.append(result)
        self.errors += is_error
        self._done += 1


def _defaults(options: argparse.Namespace) -> SamplingParams:
    """Parameters of requests that do not set them."""
    return SamplingParams(
        context_overflow=options.context_overflow,
        context_keep=options.context_keep,
        speculation=False if options.no_speculation else None,
    )
