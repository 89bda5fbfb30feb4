"""`llamac chat`: a conversation with a chat model, on a terminal or through a pipe."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Iterator

from llamac import models
from llamac.cli.chat_conversation import Conversation
from llamac.cli.chat_input import (
    EXTRA,
    ReadLine,
    has_editor,
    is_interactive,
    make_editor,
    piped_line,
    read_message,
    typed_line,
)
from llamac.cli.chat_screen import add_reasoning, make_screen
from llamac.cli.guide import add_guide, chosen_guide
from llamac.cli.loading import load_model
from llamac.cli.options import add_model, add_model_settings, session_settings
from llamac.cli.parser import Parser
from llamac.cli.prompt_cache import add_prompt_cache, check_prompt_cache, load_prompt_cache, save_prompt_cache
from llamac.cli.run import figures
from llamac.cli.sampling_options import add_sampling, sampling_params
from llamac.cli.text import error_text, output_width, safe_error, safe_line, wrapped
from llamac.cli.tools import add_tools, chosen_tools, remarks
from llamac.errors import ArgumentError, LlamacError
from llamac.exit_codes import OK
from llamac.sizes import counted
from llamac.tools.message import Delta

MAX_TOKENS = 2048
MODELS = (
    "name a chat model, as in `llamac chat hf:HuggingFaceTB/SmolLM2-135M-Instruct` or `llamac chat model.gguf`, or "
    f"none for the built-in {models.CHAT}"
)

DESCRIPTION = (
    "Chat with a model. Each message continues the conversation, and only new tokens are computed. /help lists the "
    "commands. Ctrl-C stops an answer, Ctrl-D quits. In a pipe, each line is a message, and answers are plain text."
)
EXAMPLES = """\
  llamac chat model.gguf
  llamac chat hf:HuggingFaceTB/SmolLM2-135M-Instruct --system "Be brief." -t 0
  printf 'My name is Ann.\\nWhat is my name?\\n' | llamac chat model.gguf
"""

# The commands of a conversation: their arguments and what they do.
COMMANDS = {
    "/system": ("[TEXT]", "show the system message, or replace it"),
    "/reset": ("", "forget the conversation, but not the system message"),
    "/regenerate": ("", "answer the last message again"),
    "/result": ("[TEXT]", "the result of the next call; without TEXT, the call is skipped"),
    "/set": ("[NAME VALUE]", "show the settings, or change one; VALUE default unsets it"),
    "/stats": ("", "speed and tokens of the last answer"),
    "/save": ("FILE", "write the conversation to a file"),
    "/load": ("FILE", "continue a saved conversation"),
    "/receipt": ("FILE", "write the receipt of the last answer to a file"),
    "/help": ("", "this list"),
    "/exit": ("", "leave, as Ctrl-D does"),
}
INPUT_HELP = (
    'A line that ends with a backslash continues on the next line. Lines between two lines of """ are one message. '
    "With the editor, Alt-Enter begins a new line. To begin a message with /, type //."
)


def add_arguments(parser: Parser) -> None:
    """Add the command's options."""
    parser.operand_hint = "; a system message follows --system"
    add_model(parser, models.CHAT)
    group = parser.add_argument_group("conversation")
    group.add_argument("--system", action="once", metavar="TEXT", help="begin with this system message")
    add_prompt_cache(group)
    group.add_argument("--load", metavar="FILE", help="continue a conversation that /save wrote")
    add_reasoning(group)
    group.add_argument("--plain", action="store_true", help="no Markdown and no line editor")
    add_tools(group)
    add_guide(add_sampling(parser, MAX_TOKENS))
    add_model_settings(
        parser,
        "positions for the conversation (default: the model's)",
    )


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    params = sampling_params(options).updated({"guide": chosen_guide(options)})
    tools = chosen_tools(options)
    settings = session_settings(options)
    check_prompt_cache(options.prompt_cache)
    with load_model(options, tokenizer=options.tokenizer, **settings) as model:
        if model.chat_template is None:
            raise ArgumentError(f"{options.model} has no chat template: {MODELS}")
        conversation = Conversation(model, params, options.system, **tools)
        if options.load is not None:
            conversation.load(options.load)
            if options.system is not None:
                conversation.system = options.system
            conversation.tools = tools.get("tools", conversation.tools)
        load_prompt_cache(conversation.session, options.prompt_cache)
        try:
            _Chat(conversation, options).run()
        finally:
            save_prompt_cache(conversation.session, options.prompt_cache)
    return OK


class _Chat:
    """The loop of messages, commands and answers."""

    def __init__(self, conversation: Conversation, options: argparse.Namespace) -> None:
        self._conversation = conversation
        self._is_interactive = is_interactive()
        shows = self._is_interactive if options.reasoning is None else options.reasoning == "show"
        self._results: list[str | None] = []  # of the calls in the last answer, as far as they are known
        self._screen = make_screen(markdown=not options.plain, reasoning=shows)
        self._actions: dict[str, Callable[[str], None]] = {
            "/system": self._system,
            "/reset": self._reset,
            "/regenerate": self._regenerate,
            "/result": self._result,
            "/set": self._set,
            "/stats": self._stats,
            "/save": self._save,
            "/load": self._load,
            "/receipt": self._receipt,
            "/help": self._help,
        }
        self._read_line: ReadLine = typed_line if self._is_interactive else piped_line
        if self._is_interactive and not options.plain:
            if has_editor():
                self._read_line = make_editor(tuple(COMMANDS))
            else:
                _note(EXTRA)
        if self._is_interactive:
            name = conversation.model.name or options.model
            _note(f"llamac: {safe_line(name)}; /help lists commands, Ctrl-D leaves")

    def run(self) -> None:
        """Read messages and commands until the end of the input."""
        while True:
            try:
                message = read_message(self._read_line)
            except EOFError:
                if self._is_interactive:
                    print()
                return
            except KeyboardInterrupt:
                if not self._is_interactive:
                    raise
                _note("\nllamac: Ctrl-D or /exit leaves")
                continue
            except UnicodeError as error:  # bytes that are not text were typed or pasted
                if not self._is_interactive:
                    raise
                _note(f"llamac: error: {safe_error(str(error))}")
                continue
            if message.strip() in ("/exit", "/quit"):
                return
            if not message.strip():
                continue
            try:
                self._handle(message)
            except (LlamacError, OSError, UnicodeError) as error:
                if not self._is_interactive:
                    raise
                _note(f"llamac: error: {safe_error(error_text(error))}")

    def _handle(self, message: str) -> None:
        if not message.startswith("/") or message.startswith("//"):
            self._answer(self._conversation.answer(message[message.startswith("//") :]))
            self._ask_for_results()
            return
        name, _, argument = message.partition(" ")
        if name.strip() not in COMMANDS:
            near = next(iter(difflib.get_close_matches(name.lower(), COMMANDS, 1)), "/help")
            raise ArgumentError(f"there is no command {name}; did you mean {near}? (// begins a message with /)")
        needs = COMMANDS[name.strip()][0]
        if argument.strip() and not needs:
            raise ArgumentError(f"{name} takes no argument")
        if needs == "FILE" and not argument.strip():
            raise ArgumentError(f"{name} needs the name of a file")
        self._actions[name.strip()](argument.strip())

    def _answer(self, deltas: Iterator[Delta]) -> None:
        """Show an answer. On a terminal, Ctrl-C stops it."""
        try:
            self._screen.show(deltas)
        except KeyboardInterrupt:
            if not self._is_interactive:
                raise
            _note("llamac: stopped")
        finally:
            deltas.close()  # type: ignore[attr-defined]  # a generator
            self._results = []
        last = self._conversation.last
        for note in () if last is None or last.message is None else remarks(last.message):
            _note(f"llamac: note: {safe_line(note)}")
        if last is not None and last.finish_reason in ("length", "context"):
            limit = "-n or /set max_tokens" if last.finish_reason == "length" else "the context is full: /reset"
            _note(f"llamac: the answer was cut at {counted(last.usage.completion_tokens, 'token')} ({limit})")

    def _ask_for_results(self) -> None:
        """On a terminal, ask for the result of each call, and answer from the results. Repeat while there are calls."""
        while self._is_interactive and (calls := self._conversation.calls):
            if not self._results:
                _note("llamac: type the result of each call; an empty line skips a call, Ctrl-C all of them")
            try:
                while len(self._results) < len(calls):
                    name = safe_line(calls[len(self._results)].name)
                    text = read_message(lambda prompt, name=name: self._read_line(name + prompt))  # type: ignore[misc]
                    self._results.append(text if text.strip() else None)
            except (KeyboardInterrupt, EOFError):
                self._results = [None] * len(calls)
                _note("")
            results, self._results = self._results, []
            if all(result is None for result in results):
                _note("llamac: no results: the conversation continues with your next message")
                return
            self._answer(self._conversation.answer_results(results))

    # ---- commands

    def _result(self, argument: str) -> None:
        calls = self._conversation.calls
        if not calls:
            raise ArgumentError("the last answer has no calls")
        self._results.append(argument or None)
        if len(self._results) == len(calls):
            self._answer(self._conversation.answer_results(self._results))
            self._ask_for_results()
        else:
            _note(f"llamac: the next /result is that of call {len(self._results) + 1} of {len(calls)}")

    def _system(self, argument: str) -> None:
        if argument:
            self._conversation.system = argument
        else:
            _note(safe_line(self._conversation.system) or "llamac: there is no system message")

    def _reset(self, argument: str) -> None:
        self._conversation.reset()

    def _regenerate(self, argument: str) -> None:
        self._answer(self._conversation.regenerate())
        self._ask_for_results()

    def _set(self, argument: str) -> None:
        if not argument:
            for name, value in self._conversation.settings().items():
                _note(f"{name} {', '.join(map(repr, value)) if isinstance(value, tuple) else value}")
            return
        name, _, value = argument.partition(" ")
        if not value.strip():
            raise ArgumentError("/set needs a name and a value, such as /set temperature 0.5")
        try:
            self._conversation.set(name, value.strip())
        except ArgumentError as error:
            raise ArgumentError(f"/set {name}: {error}") from None

    def _stats(self, argument: str) -> None:
        conversation = self._conversation
        if conversation.last is None:
            raise ArgumentError("there is no answer yet")
        last, context = conversation.last, conversation.session.context
        _note(figures(conversation.model, last, last.timings.prefill))
        used = last.usage.prompt_tokens + last.usage.completion_tokens
        _note(f"{last.usage.cached_tokens} tokens were reused | {used} of {context} positions")

    def _save(self, argument: str) -> None:
        self._conversation.save(argument)

    def _load(self, argument: str) -> None:
        self._conversation.load(argument)

    def _receipt(self, argument: str) -> None:
        self._conversation.save_receipt(argument)

    def _help(self, argument: str) -> None:
        for name, (needs, text) in COMMANDS.items():
            _note(f"{name} {needs}".rstrip())
            _note("\n".join(wrapped(f"    {text}", output_width(), 4)))
        _note("\n".join(wrapped(INPUT_HELP, output_width(), 0)))


def _note(text: str) -> None:
    """Print a message that is not part of an answer."""
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
