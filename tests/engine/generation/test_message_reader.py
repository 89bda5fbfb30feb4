"""Messages are read from tokens: the tags of a format can be special tokens, and other special tokens are no text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from answer_samples import GOLDEN, SCHEMAS
from answer_tokens import MARKS, vocabulary

from llamac.engine.generation.output import Output
from llamac.engine.generation.reading import Reading, message_of
from llamac.text.reasoning import TAGS
from llamac.tools.formats import FORMATS, Format, format_named
from llamac.tools.message import Message
from llamac.tools.parser import MessageParser
from llamac.tools.response_template import read_response_template

THINKING = tuple(tag for pair in TAGS.items() for tag in pair)
PAD = "<|pad|>"  # a special token that no format has


def read(form: str, text: str) -> Message:
    """Read the tokens of a text, in which the tags of its format and of reasoning are special."""
    return read_tokens(format_named(form), (*MARKS.get(form, ()), *THINKING, PAD), text)


def read_tokens(form: Format, special: tuple[str, ...], text: str, **params: Any) -> Message:
    """Read the tokens of a text, some of which are special."""
    tokenizer = vocabulary(special)
    ids = tokenizer.encode(text, parse_special=True)
    given = SimpleNamespace(**{"stop": (), "min_tokens": 0, "candidate": 0, "seed": 1, **params})
    output = SimpleNamespace(tokens=ids, starts_text=False, params=given, rank=0, prompt=[1])
    return message_of(cast(Output, output), Reading(form, SCHEMAS, calls=True), tokenizer, ids)


@pytest.mark.parametrize("name", GOLDEN)
def test_special_tokens_are_read_like_their_names(name: str) -> None:
    golden = GOLDEN[name]
    parser = MessageParser(format_named(golden.form), schemas=SCHEMAS)
    parser.push(golden.text)
    parser.finish()
    found, expected = read(golden.form, golden.text), parser.message
    assert (found.content, found.reasoning) == (expected.content, expected.reasoning)
    assert [(c.name, c.arguments, c.error) for c in found.tool_calls] == [
        (c.name, c.arguments, c.error) for c in expected.tool_calls
    ]


@pytest.mark.parametrize("delims", [{"string_delims": [['<|"|>', '<|"|>']]}, {}])
def test_marks_that_a_response_template_names_are_read(delims: dict[str, Any]) -> None:
    call = {
        "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
        "close": "<tool_call|>",
        "content": "json",
        "content_args": {"unquoted_keys": True, **delims},
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }
    form = read_response_template({"start_anchor": "<|turn>model\n", "fields": {"content": {}, "tool_calls": call}})
    text = '<|tool_call>call:weather{city:<|"|>Paris, France<|"|>}<tool_call|>'
    [found] = read_tokens(form, MARKS["gemma4"], text).tool_calls
    assert (found.arguments, found.error) == ('{"city": "Paris, France"}', None)


@pytest.mark.parametrize("form", FORMATS)
def test_special_tokens_that_a_format_does_not_have_are_left_out(form: str) -> None:
    assert read(form, f"Good{PAD} morning.{PAD}").content == "Good morning."


@pytest.mark.parametrize(
    ("stop", "content", "reasoning"),
    [
        ("xy", "ab", "hm"),
        ("bxy", "a", "hm"),  # its text goes on behind a tag
        ("</think>", "abxyz", "hm"),  # tags are no part of the text
        ("mab", "", "h"),
        ("z", "abxy", "hm"),
        ("later", "abxyz", "hm"),
    ],
)
@pytest.mark.parametrize("min_tokens", [0, 2])
def test_stop_strings_end_a_message_where_they_end_the_text(
    stop: str, content: str, reasoning: str, min_tokens: int
) -> None:
    """The text has no special tokens, so a stop string can go on behind one, and has none itself."""
    found = read_tokens(
        format_named("hermes"), (*THINKING, PAD), f"<think>hm</think>ab{PAD}xyz", stop=(stop,), min_tokens=min_tokens
    )
    assert (found.content, found.reasoning) == (content, reasoning)
