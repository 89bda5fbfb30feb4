"""Writes docs/cli.md from the command line's parser, so that the two cannot disagree.

    python docs/make_cli.py

The text is laid out here, 100 columns wide, from the parser's actions: argparse's own layout differs between versions
of Python.
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

Written by `python docs/make_cli.py` from the parser itself; `llamac COMMAND --help` shows the same.

* `llamac` and `python -m llamac` are the same program. `llamac-export` is `llamac export`.
* Results go to standard output; figures, warnings and errors to standard error. Errors come without a traceback.
* Exit codes: 0 done; 1 an error, or a check that found a difference; 2 wrong usage; 130 interrupted (Ctrl-C).
  Neither that nor SIGTERM or SIGHUP leaves half-written files.
* What terminals take for commands is escaped (`\\x1b`): in names and other texts from files always, in generated
  text on a terminal only. JSON is UTF-8 always.
* MODEL (SRC of `export`, too) may be the name of a built-in model, `stories` or `stories-gpt2`; a file of that
  name comes first. Any other source than a model file is converted once and kept: [cache.md](cache.md).
* Progress bars appear on a terminal only.
* The environment variable `LLAMAC_ISA` forces a kernel set where `--isa` is not given; `LLAMAC_CACHE` is the folder of
  what was converted where `--cache-dir` is not given.
"""


def cli_document() -> str:
    """The whole text of docs/cli.md."""
    parser = make_parser()
    commands = _commands(parser)
    sections = [_section(f"llamac {name}", command) for name, command in commands.choices.items()]
    return "\n".join([HEAD, _section("llamac", parser), *sections])


def _commands(parser: argparse.ArgumentParser) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    return next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))


def _section(name: str, parser: argparse.ArgumentParser) -> str:
    """One command: heading, description, usage and options as a block, examples."""
    actions = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    options = [action for action in actions if action.option_strings]
    operands = [action for action in actions if not action.option_strings]
    lines = [f"usage: {' '.join([name, '[OPTIONS]', *map(_operand, operands)])}", ""]
    for action in [*operands, *options]:
        lines += _row(_invocation(action), _help(parser, action))
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                lines += _row(f"  {choice.dest}", choice.help or "")
    lines += [f"\n{' and '.join(names)} exclude each other." for names in _exclusive(parser)]
    if parser.epilog:
        lines += ["", parser.epilog.rstrip("\n")]
    description = textwrap.fill(parser.description or "", WIDTH)
    return "\n".join([f"## {name}", "", description, "", "```text", *lines, "```", ""])


def _operand(action: argparse.Action) -> str:
    name = _metavar(action) + (" ..." if isinstance(action, argparse._SubParsersAction) else "")
    return f"[{name}]" if action.nargs == "?" else name


def _metavar(action: argparse.Action) -> str:
    if action.metavar:
        return str(action.metavar)
    return "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()


def _invocation(action: argparse.Action) -> str:
    if not action.option_strings:
        return _metavar(action)
    value = "" if action.nargs == 0 else f" {_metavar(action)}"
    return ", ".join(action.option_strings) + value


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return parser._get_formatter()._expand_help(action) if action.help else ""


def _row(left: str, right: str) -> Iterator[str]:
    """An option and its help in two columns; a long option stands on a line of its own."""
    head = " " * INDENT + left
    wrapped = textwrap.wrap(right, WIDTH - HELP_COLUMN)
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
