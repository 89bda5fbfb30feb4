"""Writes docs/cli.md from the command line's parser: `python docs/make_cli.py`.

This module lays out the text itself, 100 columns wide: argparse's layout differs between Python versions.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator
from pathlib import Path

from llamac.cli import make_parser

DOCUMENT = Path(__file__).with_name("cli.md")
WIDTH = 100
INDENT = 2
HELP_COLUMN = 28

HEAD = """\
# The command line

This page lists the commands of `llamac` and their options. `llamac COMMAND --help` prints the same text:
`python docs/make_cli.py` generates this page from the parser.

* `llamac` and `python -m llamac` are the same program. `llamac-export` is `llamac export`.
* Results go to standard output. Figures, progress, hints, warnings and errors go to standard error.
* An error is one line, or one line and a list of problems. For an unknown option or command, llamac
  also prints the usage and suggests the most similar one.

## Exit codes

| | |
|---|---|
| 0 | success; also if the reader of a pipe stops reading, as `head` does |
| 1 | an error, a difference found by `check` or `selftest`, or a line of `batch` that could not be answered |
| 2 | wrong usage: an unknown option, a missing argument, an invalid value |
| 130 | interrupted by Ctrl-C |

Ctrl-C, SIGTERM and SIGHUP leave no half-written output.

## Models

MODEL, and SRC of `export`, can be the name of a built-in model, `stories`, `stories-gpt2` or `helper`. A file of that
name takes precedence. llamac converts a MODEL that is not a model file once and keeps the result: [cache.md](cache.md).

## Prompts and pipes

The prompt is the text after `-i`, the contents of the file after `-f`, or standard input if it is not a terminal. With
`-i`, standard input follows the prompt, and a blank line separates the two:

    cat report.txt | llamac run chat.bin --chat -i "Summarise:"

With `-i`, llamac reads standard input only if it is a pipe, a socket or a file. If a pipe sends nothing for 10 seconds,
llamac warns and ignores it, because programs can inherit pipes without a writer. `</dev/null` skips standard input at
once; `-f -` waits for it without a limit.

## Sampling defaults

An option overrides the model's recommendation (its generation_config.json). Without either, temperature and top-p are
1.0. `--temperature 0` selects the most probable token at each step.

`-n` counts new tokens. llama2.c's `-n` counts steps, which include the prompt.

## Terminals and files

* Downloads, conversions and long prompts show a progress bar on a terminal. Elsewhere they print one line every 10
  seconds; `llamac run --quiet` turns this off.
* llamac always escapes control characters in names and other strings from files (`\\x1b`). It escapes those in
  generated text on a terminal only. JSON is always ASCII, with `\\u` escapes.

## Environment

* `LLAMAC_ISA`: the kernel set if `--isa` is not given.
* `LLAMAC_CACHE`: the folder of converted models if `--cache-dir` is not given.
* `LLAMAC_API_KEY`: a key that `llamac serve` accepts, in addition to those in `--api-key-file`.
"""


def cli_document() -> str:
    """Return the text of docs/cli.md."""
    parser = make_parser()
    commands = _commands(parser)
    sections = [_section(f"llamac {name}", command) for name, command in commands.choices.items()]
    return "\n".join([HEAD, _section("llamac", parser), *sections])


def _commands(parser: argparse.ArgumentParser) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    return next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))


def _section(name: str, parser: argparse.ArgumentParser) -> str:
    """One command: heading, description, usage and options as a block, examples."""
    lines = [f"usage: {parser.usage}", ""]
    operands, options, *titled = parser._action_groups
    for group in (operands, options, *titled):
        actions = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        if group in titled and actions:
            lines += ["", f"{group.title}:"]
        for action in actions:
            lines += _row(_invocation(action), _help(parser, action))
            if isinstance(action, argparse._SubParsersAction):
                for choice in action._choices_actions:
                    lines += _row(f"  {choice.dest}", choice.help or "")
    lines += [f"\n{', '.join(names[:-1])} and {names[-1]} are mutually exclusive." for names in _exclusive(parser)]
    if parser.epilog:
        lines += ["", parser.epilog.rstrip("\n")]
    description = textwrap.fill(parser.description or "", WIDTH, break_on_hyphens=False)
    return "\n".join([f"## {name}", "", description, "", "```text", *lines, "```", ""])


def _metavar(action: argparse.Action) -> str:
    if action.metavar:
        return " ".join(action.metavar) if isinstance(action.metavar, tuple) else action.metavar
    return "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()


def _invocation(action: argparse.Action) -> str:
    if not action.option_strings:
        return _metavar(action)
    value = "" if action.nargs == 0 else f" {_metavar(action)}"
    return ", ".join(action.option_strings) + value


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return parser._get_formatter()._expand_help(action) if action.help else ""


def _row(left: str, right: str) -> Iterator[str]:
    """An option and its help in two columns; a long option has a line of its own."""
    head = " " * INDENT + left
    wrapped = textwrap.wrap(right, WIDTH - HELP_COLUMN, break_on_hyphens=False)
    if len(head) > HELP_COLUMN - 2 and wrapped:
        yield head
        head = ""
    yield f"{head:<{HELP_COLUMN}}{wrapped[0] if wrapped else ''}".rstrip()
    for line in wrapped[1:]:
        yield " " * HELP_COLUMN + line


def _exclusive(parser: argparse.ArgumentParser) -> Iterator[list[str]]:
    for group in parser._mutually_exclusive_groups:
        yield [action.option_strings[0] for action in group._group_actions]


if __name__ == "__main__":
    DOCUMENT.write_text(cli_document(), "utf-8")
