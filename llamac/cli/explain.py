"""`llamac explain`: shows the rendered prompt, its tokens and their bytes, what is cached or cut, and what ended it."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from llamac.cli.loading import load_model
from llamac.cli.options import add_model, add_model_settings, session_settings
from llamac.cli.parser import Parser
from llamac.cli.prompt import read_prompt
from llamac.cli.sampling_options import add_sampling, sampling_params
from llamac.cli.text import json_text, safe_line
from llamac.engine.inspection.explain import ExplainedToken, Explanation
from llamac.engine.model import Model
from llamac.errors import ArgumentError
from llamac.exit_codes import ERROR, OK

MAX_TOKENS = 64
MIN_WIDTH = 30
COLORS = {"cut": "31", "cached": "32", "special": "36"}

DESCRIPTION = (
    "Show how a prompt is processed: the text that the chat template renders, each token and its bytes, why BOS was "
    "or was not added, which tokens are cached or cut, and why the generated text ended. The exit code is 1 if the "
    "prompt does not fit and is refused."
)
EXAMPLES = """\
  llamac explain -i "Once upon a time"
  llamac explain model.gguf --chat -i "What is a whale?" --stop "."
  llamac explain model.gguf --messages conversation.json --no-generate --json
  llamac explain -i "Once upon a time there was" --after "Once upon a time"
"""

Prompt = str | list[dict[str, Any]]


def add_arguments(parser: Parser) -> None:
    """Add the command's options."""
    parser.operand_hint = "; a prompt follows -i"
    add_model(parser)
    prompt = parser.add_argument_group("prompt")
    prompt.add_argument("-i", "--prompt", action="once", metavar="TEXT", help="the prompt")
    prompt.add_argument(
        "-f", "--file", action="once", metavar="FILE", help="read the prompt from a file; - for standard input"
    )
    prompt.add_argument("--chat", action="store_true", help="treat the prompt as the user's message to a chat model")
    prompt.add_argument(
        "--system", action="once", metavar="TEXT", help="with --chat: a system message before the user's"
    )
    prompt.add_argument("--messages", metavar="FILE", help="a JSON list of messages, or an object with `messages`")
    prompt.add_argument("--after", metavar="TEXT", help="compute this prompt first, and show which tokens are reused")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print everything as one JSON object")
    output.add_argument("--no-generate", action="store_true", help="explain the prompt only")
    add_sampling(parser, MAX_TOKENS)
    add_model_settings(
        parser,
        "positions (default: the model's)",
    )


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    if options.messages is not None and (options.prompt is not None or options.file is not None or options.chat):
        raise ArgumentError("--messages is a whole conversation: leave out -i, -f and --chat")
    if options.system is not None and not options.chat:
        raise ArgumentError("--system needs --chat")
    if options.prompt is not None and options.file not in (None, "-"):
        raise ArgumentError("argument -f/--file: not allowed with argument -i/--prompt, except `-f -`")
    params = sampling_params(options)
    settings = session_settings(options)
    with load_model(options, tokenizer=options.tokenizer, **settings) as model, model.session() as session:
        prompt = _prompt(options, model, session.context)
        if options.after is not None:
            before = _conversation(options, options.after) if options.chat else options.after
            model.explain(before, max_tokens=1, session=session)
        found = model.explain(prompt, params, session=session, generate=not options.no_generate)
        sys.stdout.write(json_text(_facts(found, model)) if options.json else _text(found, options.after is not None))
    return OK if found.error is None else ERROR


def _prompt(options: argparse.Namespace, model: Model, context: int) -> Prompt:
    if options.messages is not None:
        return _read_messages(options.messages)
    text = read_prompt(options, model, context)
    return _conversation(options, text) if options.chat else text


def _conversation(options: argparse.Namespace, text: str) -> list[dict[str, Any]]:
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return [*system, {"role": "user", "content": text}]


def _read_messages(path: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} is not JSON: {error}") from None
    messages = found.get("messages") if isinstance(found, dict) else found
    if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
        raise ArgumentError(f"{path} holds no messages: expected a list of objects, or an object that has `messages`")
    return messages


# ---- JSON


def _facts(found: Explanation, model: Model) -> dict[str, Any]:
    completion = found.completion
    result = None
    if completion is not None:
        generated = [
            {"id": token, "bytes": list(model.tokenizer.token_bytes(token)) if model.has_tokenizer else []}
            for token in completion.tokens
        ]
        result = {
            "text": completion.text,
            "tokens": generated,
            "finish_reason": completion.finish_reason,
            "stopped_by": completion.stopped_by,
            "ended_by": found.ended_by,
            "seed": completion.seed,
        }
    return {
        "prompt": found.prompt,
        "tokens": [
            {
                "id": token.id,
                "bytes": list(token.bytes),
                "special": token.is_special,
                "cached": token.is_cached,
                "cut": token.is_cut,
            }
            for token in found.tokens
        ],
        "bos": {"added": found.bos_added, "reason": found.bos_reason},
        "context": found.context,
        "max_tokens": found.max_tokens,
        "context_overflow": found.context_overflow,
        "cached": found.cached,
        "cut": found.cut,
        "kept": found.kept,
        "error": found.error,
        "result": result,
    }


# ---- text


def _text(found: Explanation, has_cache: bool) -> str:
    """The explanation for people, no wider than the terminal. Colors only repeat what words say."""
    width = max(MIN_WIDTH, shutil.get_terminal_size((80, 24)).columns)
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    lines = []
    if found.prompt is not None:
        lines += ["prompt", *_quoted(found.prompt, width)]
    lines += [
        "tokens",
        *(line for i, token in enumerate(found.tokens) for line in _token_lines(i, token, width, color)),
    ]
    n, cut = len(found.tokens), 0 if found.cut is None else found.cut[1] - found.cut[0]
    added = "added" if found.bos_added else "not added"
    facts = [("BOS", f"{added}: {found.bos_reason}")]
    wanted = "as many as fit" if found.max_tokens is None else str(found.max_tokens)
    facts.append(("context", f"{n - cut} of {found.context} positions for the prompt, new tokens: {wanted}"))
    if found.error is not None:
        facts.append(("refused", found.error))
    elif found.cut is not None:
        facts.append(
            ("cut", f"{cut} of {n} tokens, numbers {found.cut[0]} to {found.cut[1] - 1} ({found.context_overflow})")
        )
    else:
        facts.append(("cut", "nothing"))
    if found.kept:
        facts.append(("kept", f"the first {found.kept} tokens, when the full context is shifted"))
    nothing = "nothing: no prefix of the prompt is held" if has_cache else "nothing: the session is new"
    facts.append(("cached", f"{found.cached} of {n - cut} tokens" if found.cached else nothing))
    for name, text in facts:
        lines += _wrapped(name, text, width)
    if found.completion is not None and found.ended_by is not None:
        usage = found.completion.usage
        lines += ["text", *_quoted(found.completion.text, width)]
        lines += _wrapped("ended by", found.ended_by, width)
        new = usage.completion_tokens
        lines += _wrapped("new", f"{new} token{'' if new == 1 else 's'}, seed {found.completion.seed}", width)
    return "".join(f"{line}\n" for line in lines)


def _quoted(text: str, width: int) -> list[str]:
    """The lines of a text behind a bar, cut at the width."""
    room = width - 2
    shown = []
    for line in text.split("\n"):
        safe = safe_line(line)
        shown += [safe[at : at + room] for at in range(0, len(safe), room)] or [""]
    return [f"| {line}".rstrip() for line in shown]


def _token_lines(position: int, token: ExplainedToken, width: int, color: bool) -> list[str]:
    """A token: its number, id, text, marks and bytes, on as many lines as they need."""
    marks = [name for name in COLORS if getattr(token, f"is_{name}")]
    text = safe_line(repr(token.bytes.decode("utf-8", "replace")))
    head = f"{position:>5} {token.id:>7}  "
    room = width - len(head)
    words = [("  ", text[at : at + room]) for at in range(0, len(text), room)] + [("  ", mark) for mark in marks]
    words += [("  " if i == 0 else " ", f"{byte:02x}") for i, byte in enumerate(token.bytes)]
    lines = [head]
    for gap, word in words:
        if lines[-1].strip() and lines[-1] != head and len(lines[-1]) + len(gap) + len(word) > width:
            lines.append(" " * len(head))
        is_first = lines[-1] in (head, " " * len(head))
        lines[-1] += word if is_first else gap + word
    if color and marks:
        lines = [f"\x1b[{COLORS[marks[0]]}m{line}\x1b[0m" for line in lines]
    return lines


def _wrapped(name: str, text: str, width: int) -> list[str]:
    """A name and a sentence, with hanging indentation."""
    import textwrap

    return textwrap.wrap(safe_line(text), width, initial_indent=f"{name:<9} ", subsequent_indent=" " * 10)
