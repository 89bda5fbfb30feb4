"""`llamac run`: stream the continuation of a prompt to stdout, then one line of figures to stderr."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamac.cli.chat_screen import Screen, add_reasoning, shows_reasoning
from llamac.cli.guide import add_guide, chosen_guide
from llamac.cli.loading import load_model, shown_progress
from llamac.cli.options import Group, add_model, add_model_settings, check_distinct, session_settings
from llamac.cli.parser import Parser
from llamac.cli.prefill import BAR_DELAY, prefill_progress
from llamac.cli.prompt import read_prompt
from llamac.cli.prompt_cache import add_prompt_cache, check_prompt_cache, load_prompt_cache, save_prompt_cache
from llamac.cli.sampling_options import add_sampling, sampling_params
from llamac.cli.text import safe_line, safe_text
from llamac.cli.tools import add_tools, chosen_tools, message_text, remarks
from llamac.engine.generation.candidates import asks_for_several
from llamac.engine.generation.logprobs import TokenLogprobs
from llamac.engine.generation.output import Completion
from llamac.engine.generation.stream import resolved_params
from llamac.engine.model import Model
from llamac.engine.receipts.receipt import check_target
from llamac.engine.sampling.params import SamplingParams
from llamac.engine.session import Session
from llamac.errors import ArgumentError
from llamac.exit_codes import OK
from llamac.sizes import counted

if TYPE_CHECKING:
    from llamac.engine.hardware.counters import Counters

MAX_TOKENS = 256

DESCRIPTION = (
    "Continue a prompt, or with --chat answer a message, and print the text as it is generated. The prompt comes from "
    "-i, from -f, or from a pipe. With -i, the text from a pipe follows the prompt after a blank line. Short options "
    "have the same letters as llama2.c's, but -n counts only new tokens."
)
EXAMPLES = """\
  llamac run -i "Once upon a time"
  llamac run model.bin -i "Once" --temperature 0.8 --top-p 0.95 --seed 42 --max-tokens 100
  llamac run ./TinyLlama-1.1B --dtype q4 -i "Once"
  llamac run hf:HuggingFaceTB/SmolLM2-135M-Instruct --chat -i "What is a whale?"
  llamac run chat.bin --chat -i "Is a whale a fish?" --choice yes --choice no
  cat report.txt | llamac run chat.bin --chat --system "Be brief." -i "Summarise:"
  llamac run -i "Once upon a time" --receipt receipt.json
  echo "The quick brown" | llamac run model.bin --no-echo
"""


def add_arguments(parser: Parser) -> None:
    """Add the command's options."""
    parser.operand_hint = "; a prompt follows -i"
    add_model(parser)
    _add_prompt(parser.add_argument_group("prompt"))
    generation = add_sampling(parser, MAX_TOKENS)
    generation.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="print to stderr the log probability of each new token and the N most probable tokens at its position",
    )
    generation.add_argument(
        "--receipt", metavar="FILE", help="write the result's receipt; `llamac replay` reproduces the result from it"
    )
    _add_candidates(generation)
    add_guide(generation)
    add_model_settings(
        parser,
        "positions for prompt and new tokens (default: as many as they need, at most the model's); selects the "
        "RoPE table of models with a short and a long one",
    )


def _add_candidates(group: Group) -> None:
    group.add_argument("--candidates", dest="n", type=int, metavar="N", help="print N different continuations")
    group.add_argument(
        "--best-of", type=int, metavar="N", help="generate N continuations, and print the most probable of them"
    )
    group.add_argument(
        "--beams",
        dest="beam_width",
        type=int,
        metavar="N",
        help="search for the most probable continuation with N beams",
    )
    group.add_argument("--length-penalty", type=float, metavar="X", help="with --beams: divide sums by length^X")


def _add_prompt(group: Group) -> None:
    group.add_argument("-i", "--prompt", action="once", metavar="TEXT", help="the prompt")
    group.add_argument(
        "-f", "--file", action="once", metavar="FILE", help="read the prompt from a file; - for standard input"
    )
    group.add_argument(
        "--chat",
        action="store_true",
        help="put the prompt into the model's chat template as the user's message, and print only the answer",
    )
    group.add_argument(
        "--system", action="once", metavar="TEXT", help="with --chat: a system message before the user's"
    )
    add_reasoning(group, "with --chat: ")
    add_tools(group, "with --chat: ")
    add_prompt_cache(group)
    group.add_argument(
        "--trace",
        metavar="FILE",
        help="compute prompt and answer once more and write a page about each of their tokens, as `llamac trace` does",
    )
    group.add_argument(
        "--profile",
        action="store_true",
        help="print to stderr the time of each step of the computation, the bytes that it reads and their share of the "
        "machine's limit, and hardware counters (docs/trace.md); the text stays the same",
    )
    group.add_argument("--no-echo", action="store_true", help="do not print the prompt before its continuation")
    group.add_argument(
        "-q",
        "--quiet",
        action="store_true",
        help="print no figures or hints on stderr; show progress only on a terminal",
    )


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    started = time.perf_counter()
    _check_options(options)
    tools = chosen_tools(options)
    request = _request(options)
    settings = session_settings(options)
    with contextlib.ExitStack() as stack:
        counters = None
        if options.profile:
            from llamac.engine.hardware.counters import Counters

            # before there are threads: they inherit the counters
            counters = stack.enter_context(contextlib.closing(Counters()))
        model = stack.enter_context(load_model(options, tokenizer=options.tokenizer, **settings))
        waited = time.perf_counter()
        prompt = read_prompt(options, model, _context(options, model))
        started += time.perf_counter() - waited  # a pipe can be idle
        if not options.chat and not options.quiet:
            _hint_at_chat(model)
        if options.chat and model.chat_template is None:
            raise ArgumentError("the model has no chat template: run it without --chat")
        if asks_for_several(resolved_params(model, request)):
            _run_several(options, model, prompt, request, tools)
        else:
            _run_one(options, model, prompt, request, tools, counters, started)
    return OK


def _check_options(options: argparse.Namespace) -> None:
    """Refuse options that contradict each other, before a model is converted."""
    if options.system is not None and not options.chat:
        raise ArgumentError("--system needs --chat")
    if options.prompt is not None and options.file not in (None, "-"):
        raise ArgumentError("argument -f/--file: not allowed with argument -i/--prompt, except `-f -`")
    if options.tools is not None and not options.chat:
        raise ArgumentError("--tools needs --chat")
    if options.reasoning is not None and not options.chat:
        raise ArgumentError("--reasoning needs --chat")
    if options.length_penalty is not None and options.beam_width in (None, 1):
        raise ArgumentError("--length-penalty needs --beams with 2 or more")
    outputs = {"--trace": options.trace, "--receipt": options.receipt, "--prompt-cache": options.prompt_cache}
    check_distinct(*outputs.items())
    check_prompt_cache(options.prompt_cache)
    if options.receipt is not None:
        check_target(options.receipt)
    if options.trace is not None:
        from llamac.export.targets import check_new

        check_new(Path(options.trace))  # before there is a text


def _context(options: argparse.Namespace, model: Model) -> int:
    context: int = model.config["context"] if options.context is None else options.context
    return context


def _run_one(
    options: argparse.Namespace,
    model: Model,
    prompt: str,
    request: SamplingParams,
    tools: Mapping[str, Any],
    counters: Counters | None,
    started: float,
) -> None:
    """Print one text as it is generated, then what the options ask for about it.

    counters: Those of --profile. started: When the command began, in seconds of time.perf_counter.
    """
    with contextlib.ExitStack() as resources:
        # A stream closes a session of its own with its last piece; a prompt cache is written after the first one,
        # and can hold more than the request needs.
        source: Model | Session = model
        if options.prompt_cache is not None:
            source = resources.enter_context(model.session(context=_context(options, model)))
        if options.chat:
            opened = source.chat_stream(_messages(options, prompt), request, **tools)
        else:
            opened = source.stream(prompt, request)
        stream = resources.enter_context(opened)
        load_prompt_cache(stream._session, options.prompt_cache)
        profile = None
        if counters is not None:
            from llamac.cli.profile import RunProfile

            profile = RunProfile(stream, counters)
        count = stream.prompt_tokens
        with shown_progress(options, BAR_DELAY) as report, prefill_progress(stream._session, count, report):
            pieces: Iterator[Any] = stream.deltas() if options.chat else stream
            begun = list(itertools.islice(pieces, 1))
        first = time.perf_counter()
        if stream._output.cached < count - 1:
            save_prompt_cache(stream._session, options.prompt_cache)
        if options.chat:
            Screen(reasoning=shows_reasoning(options)).show(itertools.chain(begun, pieces))
        else:
            _print_text("" if options.no_echo else prompt, itertools.chain(begun, pieces))
    _print_remarks(options, stream.completion)
    if options.receipt is not None:
        stream.receipt().save(options.receipt)
    if stream.completion.logprobs is not None:
        _print_logprobs(model, stream.completion.logprobs)
    if not options.quiet:
        print(figures(model, stream.completion, first - started), file=sys.stderr)
        if options.prompt_cache is not None:
            cached = stream.completion.usage.cached_tokens
            print(f"prompt cache: {cached} of {count} tokens were reused", file=sys.stderr)
    if profile is not None:  # before the trace, which the counters would count
        print(profile.table(stream.completion), end="", file=sys.stderr)
    if options.trace is not None:
        _write_trace(options, model, [*stream._output.prompt, *stream.completion.tokens])


def _write_trace(options: argparse.Namespace, model: Model, ids: list[int]) -> None:
    """Write the page about a text. The last token that is drawn, or those after a shift, may not fit the context."""
    from llamac.trace.page import write_page
    from llamac.trace.record import most_held, most_tokens, trace

    most = most_tokens(model, options.context)
    if len(ids) > most:
        what = "a trace of this model" if most == most_held(model) else "the context"
        note = f"{options.trace} shows the first {most} of {len(ids)} tokens: {what} holds no more"
        print(f"llamac: note: {safe_line(note)}", file=sys.stderr)
    with shown_progress(options, BAR_DELAY) as report:
        record = trace(model, ids[:most], context=options.context, progress=report)
    write_page(Path(options.trace), model, record)


def _request(options: argparse.Namespace) -> SamplingParams:
    """The sampling parameters. Reports wrong values before a model is converted."""
    names = ("logprobs", "n", "best_of", "beam_width", "length_penalty")
    given = {name: getattr(options, name) for name in names}
    return sampling_params(options).updated({"guide": chosen_guide(options), **given})


def _run_several(
    options: argparse.Namespace, model: Model, prompt: str, request: SamplingParams, tools: Mapping[str, Any]
) -> None:
    """Generate the candidates, then print them, with a line before each if there are more than one."""
    if options.prompt_cache is not None:
        raise ArgumentError("--prompt-cache keeps one text: it does not work with several candidates or beams")
    for name in ("profile", "trace"):
        if getattr(options, name):
            raise ArgumentError(f"--{name} is about one text: it does not work with several candidates or beams")
    started = time.perf_counter()
    request = request.updated({"receipt": options.receipt is not None})
    if options.chat:
        result = model.chat(_messages(options, prompt), request, **tools)
    else:
        result = model.generate(prompt, request)
    elapsed = time.perf_counter() - started
    n = len(result.choices)
    for i, choice in enumerate(result.choices, start=1):
        heading = f"--- {i} of {n}\n" if n > 1 else ""
        if choice.message is not None:
            _print_text(heading, [message_text(choice.message, reasoning=shows_reasoning(options))])
        else:
            _print_text(heading + ("" if options.no_echo else prompt), [choice.text])
        _print_remarks(options, choice)
        if choice.logprobs is not None:
            sys.stdout.flush()
            _print_logprobs(model, choice.logprobs)
    if result.receipt is not None:
        result.receipt.save(options.receipt)
    if not options.quiet:
        tokens = sum(choice.usage.completion_tokens for choice in result.choices)
        prompt_tokens, found = counted(result.usage.prompt_tokens, "token"), counted(tokens, "token")
        candidates = f"{n} candidates, {found}" if n > 1 else found
        print(f"prompt {prompt_tokens} | {candidates} in {elapsed:.2f} s | seed {result.seed}", file=sys.stderr)


def _print_remarks(options: argparse.Namespace, completion: Completion) -> None:
    """Print what a reader of an answer must know."""
    message = completion.message
    for remark in () if message is None else remarks(message):
        print(f"llamac: note: {safe_line(remark)}", file=sys.stderr)
    if message is None or options.quiet or shows_reasoning(options):
        return
    if message.reasoning and not message.content and not message.tool_calls:
        print("llamac: note: the answer has only reasoning: --reasoning show prints it", file=sys.stderr)


def _print_logprobs(model: Model, entries: Iterable[TokenLogprobs]) -> None:
    """Print a line for each token: its log probability, its text, and those of the most probable tokens."""

    def text(token: int) -> str:
        data = model.tokenizer.token_bytes(token) if model.has_tokenizer else b"%d" % token
        return repr(data.decode("utf-8", "replace"))

    for entry in entries:
        top = "  ".join(f"{logprob:.3f} {text(token)}" for token, logprob in entry.top)
        line = f"{entry.logprob:8.3f} {text(entry.token)}" + (f"  | {top}" if top else "")
        print(safe_line(line), file=sys.stderr)


def _messages(options: argparse.Namespace, prompt: str) -> list[dict[str, str]]:
    if not prompt:
        raise ArgumentError("--chat needs a message: give it with -i, with -f or through a pipe")
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return [*system, {"role": "user", "content": prompt}]


def _hint_at_chat(model: Model) -> None:
    """Print a hint if a chat model gets a bare prompt. It often ends at once then, which looks like a bug."""
    if sys.stderr.isatty() and model.chat_template is not None:
        print("llamac: hint: this is a chat model; --chat puts the prompt into its chat template", file=sys.stderr)


def _print_text(echo: str, pieces: Iterable[str]) -> None:
    """Print the echo, then text as it is generated. Ends the line even if the generation fails."""
    write = _writer()
    try:
        write(echo)
        for piece in pieces:
            write(piece)
            sys.stdout.flush()
    finally:
        write("\n")
        sys.stdout.flush()


def _writer() -> Callable[[str], object]:
    """A function that writes to stdout. It escapes control characters on a terminal, but not in a file or pipe."""
    write = sys.stdout.write
    return (lambda text: write(safe_text(text))) if sys.stdout.isatty() else write


def figures(model: Model, result: Completion, to_first: float) -> str:
    """Format the line of figures: speeds, time to the first token, why the text ended, and the seed."""
    usage, timings = result.usage, result.timings
    prompt = usage.prompt_tokens / max(timings.prefill, 1e-9)
    later = usage.completion_tokens - 1
    decode = f"{later / max(timings.decode, 1e-9):.1f} tok/s" if later > 0 else "-"
    cut = f" ({usage.truncated_tokens} cut)" if usage.truncated_tokens else ""
    dropped = f" ({usage.shifted_tokens} dropped)" if usage.shifted_tokens else ""
    drafts = f"{usage.accepted_tokens} of {usage.drafted_tokens} drafts right | " if usage.drafted_tokens else ""
    return (
        f"prompt {counted(usage.prompt_tokens, 'token')}{cut}, {prompt:.1f} tok/s | "
        f"decode {counted(usage.completion_tokens, 'token')}{dropped}, {decode} | "
        f"{drafts}first token after {to_first * 1e3:.0f} ms | {_reason(model, result)} | seed {result.seed}"
    )


def _reason(model: Model, result: Completion) -> str:
    """Why the text ended: length, context, or what stopped it."""
    if isinstance(result.stopped_by, str):
        return f"stop string {result.stopped_by!r}"
    if result.stopped_by is None:
        return result.finish_reason
    name = model.tokenizer.token_bytes(result.stopped_by) if model.has_tokenizer else b"%d" % result.stopped_by
    return f"stop token {safe_line(name.decode('utf-8', 'replace'))}"
