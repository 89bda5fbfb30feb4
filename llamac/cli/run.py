"""`llamac run`: streams the continuation of a prompt to stdout, then one line of figures to stderr."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import BinaryIO

from llamac.cli.loading import load_model
from llamac.errors import ArgumentError, ContextFullError
from llamac.generation import Completion
from llamac.model import Model

# Bytes of a prompt that are read before it is asked how many the context can hold at most.
PROMPT_BYTES = 1 << 20


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    started = time.perf_counter()
    if options.system is not None and not options.chat:
        raise ArgumentError("--system goes with --chat only")
    settings = {"context": options.context, "kv": options.kv, "threads": options.threads, "isa": options.isa}
    with load_model(options, tokenizer=options.tokenizer, **settings) as model:
        context = model.config["context"] if options.context is None else options.context
        prompt = read_prompt(options, model, context)
        ids = model.chat_ids(chat_messages(options, prompt)) if options.chat else model.tokenize(prompt)
        stream = model.stream(
            ids,
            max_tokens=new_tokens(len(ids), options.steps, context),
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            seed=options.seed,
            stop=options.stop,
        )
        first = None
        write, flush = _writer(), sys.stdout.flush
        try:
            with stream:
                if not options.no_echo and not options.chat:
                    write(prompt)
                    flush()
                for piece in stream:
                    first = first or time.perf_counter()
                    write(piece)
                    flush()
        finally:
            write("\n")
            flush()
        if not options.quiet:
            print(figures(stream.completion, (first or time.perf_counter()) - started), file=sys.stderr)
    return 0


def _writer() -> Callable[[str], object]:
    """Writes to stdout: as it is to a file or a pipe, without what would command a terminal to a terminal."""
    write = sys.stdout.write
    if not sys.stdout.isatty():
        return write
    from llamac.cli.text import safe_text

    return lambda text: write(safe_text(text))


def chat_messages(options: argparse.Namespace, prompt: str) -> list[dict[str, str]]:
    """The messages of `--chat`: the prompt as the user's, after `--system`'s."""
    if not prompt:
        raise ArgumentError("--chat needs a message: give it with -i, with -f or through a pipe")
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return [*system, {"role": "user", "content": prompt}]


def read_prompt(options: argparse.Namespace, model: Model, context: int) -> str:
    """The prompt from -i, -f or a pipe; empty if there is none. A line feed at a file's end is no part of it."""
    if options.prompt is not None:
        text: str = options.prompt
        return text
    if options.file not in (None, "-"):
        with open(options.file, "rb") as file:
            return _decode(_read(file, options.file, model, context), options.file)
    if sys.stdin is not None and (options.file == "-" or not sys.stdin.isatty()):
        return _decode(_read(sys.stdin.buffer, "standard input", model, context), "standard input")
    return ""


def _read(file: BinaryIO, name: str, model: Model, context: int) -> bytes:
    """A whole file, which may be without end: ContextFullError as soon as it is longer than any prompt can be."""
    data = file.read(PROMPT_BYTES + 1)
    if len(data) > PROMPT_BYTES:
        tokenizer = model.tokenizer
        longest = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.n_ids))
        limit = max(PROMPT_BYTES, context * longest)
        data += file.read(limit + 1 - len(data))
        if len(data) > limit:
            raise ContextFullError(
                f"{name} has more than {limit} bytes: no prompt so long fits the context of {context} positions"
            )
    return data


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{name} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}") from None


def new_tokens(prompt_tokens: int, steps: int, context: int) -> int:
    """Tokens to generate so that `steps` positions are computed, the prompt's included (0: the whole context)."""
    if steps < 0:
        raise ArgumentError(f"-n is {steps}, expected 0 (the whole context) or more")
    steps = min(steps or context, context)
    used = max(1, prompt_tokens)  # without a prompt the text begins at BOS
    if steps < used:
        raise ArgumentError(
            f"the prompt has {used} tokens, but -n allows {steps} positions (of a context of {context})"
        )
    return steps - used + 1


def figures(result: Completion, to_first: float) -> str:
    """The line of figures: tokens per second of prompt and decode, time to the first token, why it ended, the seed."""
    usage, timings = result.usage, result.timings
    prompt = usage.prompt_tokens / max(timings.prefill, 1e-9)
    later = usage.completion_tokens - 1
    decode = f"{later / max(timings.decode, 1e-9):.1f} tok/s" if later > 0 else "-"
    reason = result.finish_reason + (f" {result.stopped_by!r}" if result.stopped_by is not None else "")
    return (
        f"prompt {usage.prompt_tokens} tokens, {prompt:.1f} tok/s | "
        f"decode {usage.completion_tokens} tokens, {decode} | "
        f"first token after {to_first * 1e3:.0f} ms | {reason} | seed {result.seed}"
    )
