"""`llamac trace`: shows what a model computes for each token of a text."""

from __future__ import annotations

import argparse
import sys
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

from llamac.cli.loading import BAR_DELAY, load_model, shown_progress
from llamac.cli.options import (
    Group,
    add_conversion,
    add_device,
    add_kernels,
    add_lora,
    add_max_memory,
    add_model,
    add_threads,
    check_distinct,
    session_settings,
)
from llamac.cli.parser import Parser
from llamac.cli.prompt import read_prompt
from llamac.cli.text import safe_line
from llamac.engine.prompts.prompt_ids import render_runs, tokenize_runs
from llamac.engine.rows import STAGES, as_ids
from llamac.errors import ArgumentError
from llamac.exit_codes import OK

if TYPE_CHECKING:
    from llamac.engine.model import Model
    from llamac.trace.inputs import Inputs

DESCRIPTION = (
    "Compute a text and record what the model does with each token: its probability and rank, the alternatives, the "
    "logit lens of each layer, attention, the norms of the residual stream, the experts chosen. docs/trace.md "
    "describes the result."
)
EXAMPLES = """\
  llamac trace -i "Once upon a time" -o trace.html
  llamac trace model.gguf --chat -i "What is a whale?" -n 50 -o trace.html
  llamac trace model.gguf -f story.txt --dump trace.safetensors --stage block --stage logits
  llamac trace model.gguf --inputs ids.npy --dump trace.safetensors
"""


def add_arguments(parser: Parser) -> None:
    """Add the command's options."""
    parser.operand_hint = "; a prompt follows -i"
    add_model(parser)
    _add_text(parser.add_argument_group("text"))
    output = parser.add_argument_group("output")
    output.add_argument("-o", "--output", metavar="FILE", help="write a page (HTML) that shows the record")
    output.add_argument("--dump", metavar="FILE", help="write the output of every stage to a safetensors file")
    output.add_argument(
        "--stage",
        dest="stages",
        action="append",
        default=[],
        metavar="NAME",
        help=f"with --dump: only this stage of {', '.join(STAGES)}; repeatable",
    )
    output.add_argument(
        "--lens", type=int, metavar="N", help="apply the logit lens after N layers (default: all); 0: none"
    )
    output.add_argument("--force", action="store_true", help="replace files that exist")
    output.add_argument("-q", "--quiet", action="store_true", help="print nothing; show progress only on a terminal")
    model = parser.add_argument_group("model")
    model.add_argument(
        "-z", "--tokenizer", metavar="FILE", help="use this tokenizer file or directory, not the model's tokenizer"
    )
    add_lora(model, "apply a LoRA adapter while the model runs")
    model.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="positions (default: one for each token); selects the RoPE table of models with a short and a long one",
    )
    add_conversion(parser.add_argument_group("conversion"))
    machine = parser.add_argument_group("machine")
    add_threads(machine)
    add_kernels(machine)
    add_device(machine)
    add_max_memory(machine)
    parser.set_defaults(context_overflow=None)


def _add_text(group: Group) -> None:
    group.add_argument("-i", "--prompt", action="once", metavar="TEXT", help="the text")
    group.add_argument(
        "-f", "--file", action="once", metavar="FILE", help="read the text from a file; - for standard input"
    )
    group.add_argument("--chat", action="store_true", help="put the text into the chat template as the user's message")
    group.add_argument(
        "--system", action="once", metavar="TEXT", help="with --chat: a system message before the user's"
    )
    group.add_argument(
        "--inputs",
        metavar="FILE",
        help="read token ids or embeddings from a .npy or safetensors file, such as one that --dump wrote",
    )
    group.add_argument(
        "-n",
        "--max-tokens",
        type=int,
        default=0,
        metavar="N",
        help="continue the text with N tokens, always the most probable one, and trace them, too",
    )


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    _check(options)
    from llamac.export.targets import check_target

    page, dump = (None if name is None else Path(name) for name in (options.output, options.dump))
    for out in (page, dump):
        if out is not None:
            check_target(out, "llamac", options.force)
    with load_model(options, tokenizer=options.tokenizer, **session_settings(options)) as model:
        from llamac.trace.page import write_page
        from llamac.trace.record import trace

        ids, inputs = _inputs(options, model)
        if options.max_tokens and ids is not None:
            ids += _continuation(options, model, ids)
        with shown_progress(options, BAR_DELAY) as report:
            record = trace(
                model,
                ids,
                inputs=inputs,
                context=options.context,
                lens=options.lens,
                dump=dump,
                stages=options.stages or STAGES,
                progress=report,
            )
        if page is not None:
            write_page(page, model, record)
    for out, what in ((page, "a page about"), (dump, "the stages of")):
        if out is not None and not options.quiet:
            n = len(record.ids)
            print(safe_line(f"{out}: {what} {n} token{'' if n == 1 else 's'}"), file=sys.stderr)
    return OK


def _continuation(options: argparse.Namespace, model: Model, ids: array[int]) -> array[int]:
    """The most probable tokens that follow, as many as fit."""
    from llamac.trace.record import most_tokens

    count = min(options.max_tokens, most_tokens(model, options.context) - len(ids))
    if not ids or count <= 0:  # `trace` refuses such texts
        return array("i")
    # a penalty that the model recommends would prefer other tokens
    settings = {"temperature": 0, "repetition_penalty": 1, "max_tokens": count}
    return as_ids(model.generate(ids, context=options.context, **settings).tokens)


def _check(options: argparse.Namespace) -> None:
    """Report options that contradict each other before a model is converted."""
    if options.inputs is not None and (options.prompt is not None or options.file is not None or options.chat):
        raise ArgumentError("--inputs is the whole text: leave out -i, -f and --chat")
    if options.system is not None and not options.chat:
        raise ArgumentError("--system needs --chat")
    if options.prompt is not None and options.file not in (None, "-"):
        raise ArgumentError("argument -f/--file: not allowed with argument -i/--prompt, except `-f -`")
    if options.output is None and options.dump is None:
        raise ArgumentError("nothing to write: name a page with -o, or a file of tensors with --dump")
    check_distinct(("-o", options.output), ("--dump", options.dump))
    if options.stages and options.dump is None:
        raise ArgumentError("--stage needs --dump")
    if options.max_tokens < 0:
        raise ArgumentError(f"max_tokens is {options.max_tokens}, expected 0 or more")


def _inputs(options: argparse.Namespace, model: Model) -> Inputs:
    """The text, and what takes the place of its embeddings."""
    from llamac.trace.inputs import Inputs, read_inputs

    if options.inputs is None:
        return Inputs(_ids(options, model), None)
    found = read_inputs(Path(options.inputs))
    if options.max_tokens and found.embeddings is not None:
        raise ArgumentError("--max-tokens continues a text, not embeddings")
    return found


def _ids(options: argparse.Namespace, model: Model) -> array[int]:
    context = model.config["context"] if options.context is None else options.context
    text = read_prompt(options, model, context)
    if not text:
        raise ArgumentError("there is no text: give it with -i, with -f, through a pipe, or as --inputs")
    if not options.chat:
        return as_ids(model.tokenize(text))
    if model.chat_template is None:
        raise ArgumentError("the model has no chat template: trace it without --chat")
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return as_ids(tokenize_runs(model, render_runs(model, [*system, {"role": "user", "content": text}], {})))
