"""The command line's parser. It imports only the module of the command that is called.

A command is a module `llamac.cli.NAME` with

    DESCRIPTION                 a sentence or a paragraph for its help
    EXAMPLES                    lines for its help, or ""
    add_arguments(parser)       its options; the `dest` of each is the library's name of the parameter, for errors
    run(options) -> int         its work; returns the exit code
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from llamac import __version__
from llamac.arguments import FOREIGN
from llamac.exit_codes import USAGE

# The name of each command and its line in `llamac --help`.
COMMANDS = {
    "run": "continue a prompt, or answer a message",
    "chat": "chat with a model",
    "serve": "answer requests over HTTP",
    "batch": "answer a file of requests",
    "embed": "turn texts into vectors, or compare them",
    "rerank": "order documents by their relevance to a query",
    "inspect": "describe a model, or this machine",
    "check": "verify a model file on this machine",
    "quality": "measure what quantization costs",
    "selftest": "check that this build computes the right bits on this machine",
    "explain": "show how a prompt is processed, and why the text ended",
    "trace": "show what the model computes for each token of a text",
    "replay": "reproduce a result from its receipt",
    "bench": "measure the speed of a model on this machine",
    "export": "convert a checkpoint to a model file, or back",
    "cache": "list or delete cached conversions",
}

EXAMPLES = """\
  llamac run -i "Once upon a time"              the built-in model tells a story
  llamac run path/to/checkpoint -i "Hello"      any model; the first run converts it
  llamac run model.gguf --chat -i "Hello"       the answer of a chat model
  llamac chat model.gguf                        a conversation
  llamac serve model.gguf                       an HTTP server for clients of OpenAI's API
  llamac batch in.jsonl out.jsonl               requests in OpenAI's batch format
  llamac embed model.gguf "a dog" "a cat"       how similar texts are
  llamac export path/to/checkpoint model.bin    convert to a model file
  llamac inspect model.bin                      what a model file contains
  llamac check model.bin --data                 verify integrity and reference outputs
  llamac quality q4.bin --against model.bin     what quantization costs
  llamac selftest                               does this machine compute the right bits?
  llamac explain model.gguf --chat -i "Hello"   the tokens of a prompt
  llamac trace -i "Hello" -o trace.html         what the model computes for each token
  llamac replay receipt.json                    reproduce a result token for token
  llamac bench model.bin                        tokens per second, and the machine's limits
  llamac cache list                             cached conversions and their sizes
"""

_ASSIGNMENT = re.compile(r"--[a-z][a-z-]*=")
_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")


def load_command(name: str) -> Any:
    """Import the module of a command."""
    return importlib.import_module(f"llamac.cli.{name}")


def make_parser(arguments: Sequence[str] | None = None, program: str = "llamac") -> Parser:
    """Build the parser of the whole command line.

    Args:
        arguments: Only the command that they call gets its options. None gives every command its options.
        program: "llamac", or "llamac-export", which parses the command `export` alone.
    """
    parser = Parser(
        prog="llamac",
        usage="llamac COMMAND ...",
        description="Run language models on this computer's CPU.",
        epilog=f"examples:\n{EXAMPLES}",
    )
    parser.add_argument("--version", action="version", version=f"llamac {__version__}")
    called = next((word for word in arguments or () if not word.startswith("-")), None)
    if called is not None and called not in COMMANDS:
        parser.error(_unknown_command(called))
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, prog=program if program != "llamac" else f"llamac {name}", help=summary)
        if arguments is None or name == called:
            _fill(command, name)
    return parser


def name_options(message: str, options: Mapping[str, str]) -> str:
    """Name options instead of parameters in an error of the library.

    A parameter is the first word of the message, a word before "=", or a word with an underscore. A message that begins
    with a file and a colon is about the content of the file, and stays as it is.

    Args:
        message: The message.
        options: The option of each parameter, as in `Namespace.option_names`.
    """
    place, colon, _ = message.partition(": ")
    if colon and ("/" in place or (" " not in place and place not in options)):
        return message

    def option(found: re.Match[str]) -> str:
        is_parameter = "_" in found[0] or not found.start() or message[found.end() :].startswith("=")
        return options.get(found[0], found[0]) if is_parameter else found[0]

    return re.sub(r"(?<![\w./'-])[a-z]\w*(?![\w./'-]|=False)", option, message)


def _fill(parser: Parser, name: str) -> None:
    command = load_command(name)
    parser.description = command.DESCRIPTION
    parser.epilog = f"examples:\n{command.EXAMPLES}" if command.EXAMPLES else None
    if " " not in parser.prog:
        parser.add_argument("--version", action="version", version=f"{parser.prog} {__version__}")
    command.add_arguments(parser)
    names = {action.dest: action.option_strings[-1] for action in parser._actions if action.option_strings}
    parser.set_defaults(option_names=names)
    operands = [action for action in parser._actions if not action.option_strings]
    forms = {"?": "[{}]", "*": "[{} ...]"}
    shown = [forms.get(str(action.nargs), "{}").format(action.metavar) for action in operands]
    parser.usage = " ".join([parser.prog, "[OPTIONS]", *shown])


def _unknown_command(word: str) -> str:
    near = _nearest(word, COMMANDS)
    if near:
        return f"there is no command {word!r}; did you mean `llamac {near}`?"
    if os.path.exists(word) or word.startswith("hf:"):
        return f"{word!r} is not a command; did you mean `llamac run {word}`?"
    return f"there is no command {word!r}, expected one of {', '.join(COMMANDS)}"


class Parser(argparse.ArgumentParser):
    """argparse's parser, which also explains words that it does not know.

    Attributes:
        operand_hint: Added to the message about one operand too many.
        repeated: The list of operands that can also follow options; argparse ends a list at the first option.
            argparse takes an unknown option whose value has a space for an operand: here it is an error.
    """

    operand_hint = ""
    repeated = ""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=_HelpFormatter, allow_abbrev=False, **settings)
        self.register("type", int, _whole_number)
        self.register("type", float, _number)
        self.register("action", "once", _Once)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments. Unlike argparse's own method, exit if one is unknown."""
        if self.repeated:
            for word in itertools.takewhile(lambda word: word != "--", args or ()):
                if _ASSIGNMENT.match(word) and word.partition("=")[0] not in self._option_string_actions:
                    self.error(self._explain_unknown(word))
        options, unknown = super().parse_known_args(args, namespace)
        if self.repeated:
            ends = unknown.index("--") if "--" in unknown else len(unknown)
            more = [word for word in unknown[:ends] if _is_operand(word)]
            setattr(options, self.repeated, [*getattr(options, self.repeated), *more, *unknown[ends + 1 :]])
            unknown = [word for word in unknown[:ends] if not _is_operand(word)]
        if unknown:
            self.error(self._explain_unknown(unknown[0]))
        return options, []

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print the help or a message. Unlike argparse, report that standard output is full."""
        if file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message to stderr, and exit."""
        command = " ".join(self.prog.split()[:2])
        self.exit(USAGE, f"{self.format_usage()}{self.prog}: error: {message}\nTry `{command} --help`.\n")

    def _explain_unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected argument {word!r}{self.operand_hint}"
        option = word.partition("=")[0]
        known = self._option_string_actions
        is_long = option.startswith("--") and len(option) > 2
        longer = [name for name in known if name.startswith(option)] if is_long else []
        foreign = "--" + FOREIGN.get(option[2:].replace("-", "_"), "").replace("_", "-")
        near = longer[0] if longer else foreign if foreign in known else _nearest(option, known, cutoff=0.7)
        return f"unknown option {option}" + (f"; did you mean {near}?" if near else "")


class _Once(argparse.Action):
    """Stores a part of the input. A second one would replace it silently, so it is an error."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: object, option: object = None) -> None:
        if getattr(namespace, self.dest) is not None:
            raise argparse.ArgumentError(self, "given twice, expected once")
        setattr(namespace, self.dest, values)


def _is_operand(word: str) -> bool:
    """Whether a word is an operand for argparse, too, where no option looks like a number."""
    return word in ("", "-") or word[0] != "-" or " " in word or bool(_NEGATIVE.fullmatch(word))


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _nearest(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """The candidate most similar to a mistyped word; empty if none is similar."""
    import difflib  # only errors need it

    return next(iter(difflib.get_close_matches(word, candidates, 1, cutoff)), "")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps descriptions, keeps the lines of examples, and appends defaults to the help of options."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return super()._fill_text(text, width, indent)
        return "\n".join(indent + line for line in self._split_lines(text, width - len(indent)))

    def _split_lines(self, text: str, width: int) -> list[str]:
        import textwrap

        return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        # by identity: 0 == False, but a default of 0 is shown
        has_default = action.default != [] and not any(action.default is x for x in (None, False, argparse.SUPPRESS))
        if not has_default or not action.option_strings or "default" in text:
            return text
        return f"{text} (default: %(default)s)"
