"""Parses the tokens of a chat answer into a message, by the request's tools and the model's format."""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from llamac.errors import ArgumentError, ArgumentTypeError
from llamac.tools.conversation import describes_tools
from llamac.tools.formats import FORMATS, PLAIN, Format, detect, format_named, is_tag
from llamac.tools.functions import parameters_of, tool_list
from llamac.tools.message import Delta, Message
from llamac.tools.parser import PROMPT_TAIL, MessageParser
from llamac.tools.readers import Schemas

if TYPE_CHECKING:
    from llamac.engine.generation.output import Output
    from llamac.engine.model_file import ModelFile
    from llamac.engine.prompts.prompt_ids import ToolOptions
    from llamac.guided.guides import Guide
    from llamac.text.tokenizer import Tokenizer

MODES = ("auto", "none", "required")
LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
ID_LENGTH = 9  # letters and digits: Mistral's templates accept no other ids
UNKNOWN = (
    "the format of this model's tool calls is not known: the text was not searched for calls (tool_format names one)"
)


@dataclass(frozen=True)
class Reading:
    """How to read the answers to a conversation.

    Attributes:
        form: The model's format.
        schemas: The parameters of the tools, by name.
        calls: Whether to look for calls.
        parallel: Whether the answer can have several calls.
        named: Whether the request named the tool to call.
        notes: Notes on the request for the message.
        prompt: The end of the prompt.
        chat: The messages, tools and template options behind the prompt, for receipts.
    """

    form: Format
    schemas: Schemas = field(default_factory=dict)
    calls: bool = False
    parallel: bool = True
    named: bool = False
    notes: tuple[str, ...] = ()
    prompt: str = ""
    chat: Mapping[str, Any] | None = None

    def parser(self, seed: int, ids: Sequence[int], candidate: int = 0) -> MessageParser:
        """Return a parser for an answer to a prompt, or for one of several candidates."""
        return MessageParser(
            self.form,
            schemas=self.schemas,
            calls=self.calls,
            parallel=self.parallel,
            prompt=self.prompt,
            new_id=_ids(seed, candidate, ids),
            taken=ids_of_calls(self.chat),
        )


def ids_of_calls(chat: Mapping[str, Any] | None) -> list[str]:
    """Return the ids of the calls in a conversation."""
    messages = (chat or {}).get("messages")
    found = []
    for message in messages if isinstance(messages, list) else ():
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        for call in calls if isinstance(calls, list | tuple) else ():
            if isinstance(call, Mapping) and isinstance(call.get("id"), str):
                found.append(call["id"])
    return found


def _ids(seed: int, candidate: int, ids: Sequence[int]) -> Callable[[int], str]:
    """Return a function that generates the ids of an answer's calls.

    Ids depend only on the prompt, the seed and the candidate, and are unique within a conversation.
    """

    def new_id(index: int) -> str:
        source = array("q", [index, len(ids), *ids]).tobytes() + f"{seed} {candidate}".encode()
        digest = hashlib.sha256(source).digest()
        number = int.from_bytes(digest[:16], "big")
        return "".join(LETTERS[number // 62**place % 62] for place in range(ID_LENGTH))

    return new_id


# ---- from a request


def chosen_tools(options: ToolOptions) -> tuple[list[dict[str, Any]] | None, str, str | None]:
    """Return the tools for the template, the kind of choice ("auto", "none", "required"), and the tool to call, if any.

    Raises:
        ArgumentError: If a tool is malformed, or the choice names an unknown tool.
    """
    tools = None if options.tools is None else tool_list(options.tools)
    choice = options.tool_choice
    if isinstance(choice, Mapping):  # as in OpenAI's API
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, Mapping) else None
        return tools, "required", _known(name, tools)
    if not isinstance(choice, str):
        raise ArgumentTypeError(
            f"tool_choice is {options.tool_choice!r}, expected 'auto', 'none', 'required' or the name of a tool"
        )
    if not isinstance(options.parallel_tool_calls, bool):
        raise ArgumentTypeError(f"parallel_tool_calls is {options.parallel_tool_calls!r}, expected a bool")
    if choice not in MODES:
        return tools, "required", _known(choice, tools)
    if choice == "required" and not tools:
        raise ArgumentError("tool_choice is 'required', but there are no tools")
    return (None if choice == "none" else tools or None), choice, None


def _known(name: object, tools: list[dict[str, Any]] | None) -> str:
    names = [tool["function"]["name"] for tool in tools or ()]
    if not isinstance(name, str) or name not in names:
        *others, last = map(repr, (*MODES, *names))
        raise ArgumentError(f"tool_choice is {name!r}, expected {', '.join(others)} or {last}")
    return name


def format_of(model: ModelFile, name: str | None, template: str, *, has_tools: bool) -> Format | None:
    """Return the requested format, or else the checkpoint's own, or else the one derived from its template.

    Raises:
        ArgumentError: If no format has this name.
    """
    if name is not None:
        return format_named(name)
    if model.response_format is not None:
        return model.response_format
    assert model.chat_template is not None
    found = detect(template)
    if found is None and has_tools and describes_tools(template, model.chat_template.special_tokens):
        return FORMATS["gemma" if "<start_of_turn>" in template else "hermes"]
    return found


def reading_of(
    model: ModelFile, template: str, options: ToolOptions, prompt: str, answer: Mapping[str, Any] | None = None
) -> tuple[Reading, Guide | None]:
    """Return how to read the answers to a conversation, and the guide that forces calls, if any.

    Args:
        model: The model.
        template: The code of the chat template.
        options: The tools and their options.
        prompt: The prompt.
        answer: The JSON schema that an answer without calls must match. The guide is then for calls or this answer.

    Raises:
        ArgumentError: If calls are forced in an unknown format, or a tool's schema cannot be used.
        UnsupportedError: If calls cannot be forced in the model's format.
    """
    tools, mode, name = chosen_tools(options)
    form = format_of(model, options.tool_format, template, has_tools=bool(tools))
    wants = tools is not None and mode != "none"
    if form is None and mode == "required":
        raise ArgumentError(f"tool_choice is {options.tool_choice!r}, but {UNKNOWN}")
    guide: Guide | None = None
    if wants and form is not None:
        guide = _guide_of(model, form, tools or [], mode, name, answer, parallel=options.parallel_tool_calls)
    reading = Reading(
        form or PLAIN,
        parameters_of(tools or ()),
        calls=wants,
        parallel=options.parallel_tool_calls,
        named=name is not None,
        notes=(UNKNOWN,) if wants and form is None else (),
        prompt=prompt[-PROMPT_TAIL:] if form is None or form.anchor is None else prompt,
    )
    return reading, guide


def _guide_of(
    model: ModelFile,
    form: Format,
    tools: list[dict[str, Any]],
    mode: str,
    name: str | None,
    answer: Mapping[str, Any] | None,
    *,
    parallel: bool,
) -> Guide | None:
    """The guide for calls or an answer, or for calls; None: nothing has to be forced.

    Args:
        model: The model.
        form: The model's format.
        tools: The tools.
        mode: The kind of choice (chosen_tools).
        name: The tool to call, if any.
        answer: As in `reading_of`.
        parallel: Whether an answer can have several calls.
    """
    is_required = mode == "required"
    strict = [tool for tool in tools if tool["function"].get("strict") is True]
    if answer is not None and not form.writing.call:
        return None
    if answer is None and not is_required and not (strict and form.has_calls and form.writing.trigger):
        return None
    from llamac.tools.grammar import calls_guide

    if answer is not None:
        relaxed = [tool if tool in strict else _with_any_arguments(tool) for tool in tools]
        return calls_guide(form, relaxed, model.tokenizer, parallel=parallel, answer=answer)
    allowed = [tool for tool in tools if name is None or tool["function"]["name"] == name]
    parallel = parallel and name is None
    return calls_guide(form, allowed, model.tokenizer, parallel=parallel, among_text=not is_required)


def _with_any_arguments(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool whose calls may have any arguments, as without a guide."""
    return {**tool, "function": {**tool["function"], "strict": False}}


# ---- from tokens to messages


class MessageReader:
    """Reads the tokens of an output as a message. Not thread-safe."""

    def __init__(self, output: Output, reading: Reading, tokenizer: Tokenizer) -> None:
        from llamac.engine.generation.output import StopStrings

        self._output = output
        self._reading = reading
        self._tokenizer = tokenizer
        # The tags of a format can be special tokens, which decoded text does not show.
        self._decoder = tokenizer.decoder(skip_special=False, start=output.starts_text)
        number = output.params.candidate + output.rank
        self._parser = reading.parser(output.params.seed, output.prompt, number)
        self._search = StopStrings(output.params.stop)
        self._waiting: deque[tuple[str, bool]] = deque()  # pieces, and whether they are special tokens
        self._free = 0  # characters of the text among them that are not held by the search
        self._read = 0

    def advance(self, tokens: Sequence[int] | None = None) -> list[Delta]:
        """Read the new tokens of `tokens`, by default of the output's."""
        text = ""
        for token in (self._output.tokens if tokens is None else tokens)[self._read :]:
            self._read += 1
            if self._search.found is not None:
                break
            is_special = self._tokenizer.is_special(token)
            if is_special and not is_tag(self._reading.form, self._name(token)):
                continue
            self._waiting.append((self._decoder.push(token), is_special))
            if not is_special:
                self._free += len(self._searched(self._waiting[-1][0]))
            text += self._released()
        return self._parser.push(text) if text else []

    def finish(self, tokens: Sequence[int] | None = None) -> list[Delta]:
        """Read the new tokens and finish the message."""
        found = self.advance(tokens)
        self._free += len(self._search.flush())
        return found + self._parser.push(self._released()) + self._parser.finish()

    def _searched(self, piece: str) -> str:
        """The text that no stop string can begin in, once a piece has been added. Tags are no part of the text."""
        is_searching = self._output.params.stop and self._read > self._output.params.min_tokens
        return self._search.push(piece) if is_searching else piece

    def _released(self) -> str:
        """The pieces in front that do not wait for the end of a stop string."""
        text = ""
        while self._waiting:
            piece, is_special = self._waiting.popleft()
            n = len(piece) if is_special else min(len(piece), self._free)
            self._free -= 0 if is_special else n
            text += piece[:n]
            if n < len(piece):
                self._waiting.appendleft((piece[n:], False))
                break
        return text

    @property
    def message(self) -> Message:
        """The message so far."""
        found = self._parser.message
        return replace(found, notes=[*self._reading.notes, *found.notes], named=self._reading.named)

    def _name(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")


def message_of(output: Output, reading: Reading, tokenizer: Tokenizer, tokens: Sequence[int]) -> Message:
    """Parse an output's tokens as a message."""
    reader = MessageReader(output, reading, tokenizer)
    reader.finish(tokens)
    return reader.message


def reader_of(output: Output) -> MessageReader:
    """Return a reader for the deltas of an output.

    Raises:
        ArgumentError: If the output does not answer a conversation.
    """
    if output.reading is None or output.tokenizer is None:
        raise ArgumentError("deltas are pieces of a message: only chats have them, not prompts")
    return MessageReader(output, output.reading, output.tokenizer)


class Deltas(Iterator[Delta]):
    """Iterates over the pieces of a message as it is generated; over an engine's request also with `async for`."""

    def __init__(self, source: Any, output: Output) -> None:
        self._source = source
        self._reader = reader_of(output)
        self._found: list[Delta] = []
        self._ended = False

    def __next__(self) -> Delta:
        while not self._found and not self._ended:
            self._take(next(self._source, None))
        return self._first()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        async for piece in self._source:
            self._take(piece)
            while self._found:
                yield self._found.pop(0)
        self._take(None)
        while self._found:
            yield self._found.pop(0)

    def _push_to(self, push: Callable[[Delta], bool]) -> None:
        """Like `Request._push_to`, which this calls, for the pieces of the message."""

        def push_all(piece: str) -> bool:
            self._take(piece)
            results = [push(delta) for delta in self._found]
            self._found.clear()
            return all(results)

        self._source._push_to(push_all)

    def _take(self, piece: str | None) -> None:
        if piece is None:
            self._ended = True
        self._found += self._reader.finish() if piece is None else self._reader.advance()

    def _first(self) -> Delta:
        if not self._found:
            raise StopIteration
        return self._found.pop(0)
