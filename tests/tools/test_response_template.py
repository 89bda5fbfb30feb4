"""Response templates give the messages that transformers gives, however the text is cut."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from llamac.errors import UnsupportedError
from llamac.tools.message import Message
from llamac.tools.parser import MessageParser
from llamac.tools.response_template import read_response_template

HERMES: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)", "content": "text"},
    },
}
CODER = copy.deepcopy(HERMES)
CODER["fields"]["tool_calls"] = {
    "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    "close_pattern": r"</function>\s*</tool_call>",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}
GEMMA: dict[str, Any] = {
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": ["<turn|>", "<eos>"]},
    },
}
LIST: dict[str, Any] = {
    "start_anchor": "<A>",
    "fields": {
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{tool}", "arguments": "{args}"}},
            "transform_each": True,
        },
        "content": {},
    },
}
LINES: dict[str, Any] = {
    "start_anchor": "<A>",
    "fields": {
        "tool_calls": {
            "open_pattern": "<call (?P<name>[a-z]+)>",
            "close": "</call>",
            "repeats": True,
            "content": "kv-lines",
            "content_args": {"kv_sep": "=", "value_parser": {"name": "json", "args": {"allow_non_json": True}}},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}


def calls_of(parser: str, text: str, *, name: str = "set", **options: Any) -> tuple[dict[str, Any], str, str]:
    """A case with a call whose arguments a parser reads from the text."""
    spec = copy.deepcopy(LINES)
    spec["fields"]["tool_calls"] |= {"content": parser, "content_args": options}
    return spec, "<A>", f"<call {name}>{text}</call>"


TAGS: dict[str, Any] = {"tag_pattern": r"\[(?P<key>\w+):(?P<value>[^\]]*)\]"}
LISTS: dict[str, Any] = {"tag_pattern": r"<(?P<key>\w+)>(?P<value>[^<]*)</>", "value_parser": {"name": "json"}}
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "plain": (HERMES, "<|im_start|>assistant\n", "Hi <b>.<|im_end|>"),
    "reasoning": (HERMES, "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n", "<think>\nhm\n</think>\n\nyes"),
    "opened by the prompt": (HERMES, "<|im_start|>assistant\n<think>\n", "hm\n</think>\n\nyes<|im_end|>"),
    "calls": (
        HERMES,
        "<|im_start|>assistant\n",
        'I see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call><|im_end|>',
    ),
    "coder": (
        CODER,
        "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>",
    ),
    "gemma": (
        GEMMA,
        "<|turn>user\nx<turn|>\n<|turn>model\n",
        '<|channel>thought\nhm<channel|>Yes.<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|>',
    ),
    "a list": (LIST, "<A>", '<call>[{"tool": "a", "args": {"x": 1}}, {"tool": "b", "args": {}}]</call>'),
    "lines": (LINES, "<A>", "Now <call weather>\ncity = Oslo\ndays = 2\n</call>"),
    "integers": calls_of("kv-lines", "a: 1\nb: -2", value_parser={"name": "int"}),
    "numbers": calls_of("kv-lines", "a: 1.5\nb: 2", value_parser={"name": "float"}),
    "booleans": calls_of("kv-lines", "a: True\nb: no\nc: 1", value_parser={"name": "bool"}),
    "separators": calls_of("kv-lines", "a=1;b;c = x=y;", kv_sep="=", line_sep=";"),
    "tags in lines": calls_of("kv-lines", "a: [x:1] [y:2]\nb: [z:]", value_parser={"name": "xml-inline", "args": TAGS}),
    "repeated tags": calls_of("xml-inline", "[a:1][b:2][a:3] [a:4]", merge_duplicates=True, **TAGS),
    "repeated lists": calls_of("xml-inline", "<a>[1]</><a>2</><a>[3]</>", merge_duplicates=True, **LISTS),
    "the last tag counts": calls_of("xml-inline", "[a:1][b:2][a:3]", **TAGS),
    "relaxed JSON": calls_of("json", "{a: 1, b: [true, null]}", unquoted_keys=True),
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
SCHEMAS = {"weather": TOOLS[0]["function"]["parameters"]}  # type: ignore[index]


def parse(spec: dict[str, Any], prefix: str, pieces: list[str]) -> Message:
    parser = MessageParser(read_response_template(spec), schemas=SCHEMAS, prompt=prefix)
    for piece in pieces:
        parser.push(piece)
    parser.finish()
    return parser.message


@pytest.mark.parametrize("name", CASES)
def test_messages_are_those_of_transformers(name: str) -> None:
    parsing = pytest.importorskip("transformers.utils.chat_parsing")
    spec, prefix, text = CASES[name]
    expected = parsing.parse_response(text, spec, prefix=prefix, tools=TOOLS)
    message = parse(spec, prefix, [text])
    assert (message.content or "").strip() == expected.get("content", "")
    assert message.reasoning == expected.get("reasoning_content", expected.get("thinking"))
    calls = [
        call for value in expected.get("tool_calls", []) for call in (value if isinstance(value, list) else [value])
    ]
    assert [(call.name, call.parsed) for call in message.tool_calls] == [
        (call["function"]["name"], call["function"]["arguments"]) for call in calls
    ]


@pytest.mark.parametrize("name", CASES)
def test_every_way_to_cut_a_text_gives_the_same_message(name: str) -> None:
    spec, prefix, text = CASES[name]
    whole = parse(spec, prefix, [text])
    assert whole.content or whole.tool_calls
    assert parse(spec, prefix, list(text)) == whole
    for cut in range(len(text)):
        assert parse(spec, prefix, [text[:cut], text[cut:]]) == whole


def test_plain_json_keeps_its_text() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city":"Oslo" }}</tool_call>'
    assert parse(HERMES, "<|im_start|>assistant\n", [text]).tool_calls[0].arguments == '{"city":"Oslo" }'


def values_of(parser: Any) -> dict[str, Any]:
    """A field with calls whose values have a parser."""
    return {"open": "x", "content": "kv-lines", "content_args": {"value_parser": parser}}


def deep_values(depth: int) -> dict[str, Any]:
    """Parsers in parsers."""
    parser: dict[str, Any] = {"name": "kv-lines"}
    for _ in range(depth):
        parser = {"name": "kv-lines", "args": {"value_parser": parser}}
    return values_of(parser)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fields": None}, "has no object 'fields'"),
        ({"version": 2}, "has the version 2"),
        ({"start_anchor": None}, "neither 'start_anchor' nor"),
        ({"fields": {"content": True}}, "content is True, expected an object"),
        ({"fields": {"content": {"openn": "x"}}}, "content has unknown parts: ..openn"),
        ({"fields": {"content": {"open": [""]}}}, "open is not a string or a list of strings"),
        ({"fields": {"content": {"open_pattern": "(?=x)"}}}, "the pattern"),
        ({"fields": {"tool_calls": {"open": "x", "content": "yaml"}}}, "content is 'yaml', expected one of"),
        ({"fields": {"tool_calls": {"open": "x", "content": "xml-inline"}}}, "no 'tag_pattern'"),
        ({"fields": {"tool_calls": {"open": "x", "content": ["json"]}}}, r"content is \['json'\], expected one of"),
        ({"fields": {"tool_calls": {"open": "x", "content_args": [1]}}}, "content_args is not an object"),
        ({"fields": {"tool_calls": {"open_pattern": 1}}}, "open_pattern is not a string"),
        ({"fields": {"tool_calls": values_of({"name": "yaml"})}}, "value_parser.name is 'yaml', expected one of"),
        ({"fields": {"tool_calls": values_of({"args": [1]})}}, "value_parser.args is not an object"),
        ({"fields": {"tool_calls": values_of("json")}}, "value_parser is 'json', expected an object"),
        ({"fields": {"tool_calls": values_of({"name": "xml-inline", "args": {}})}}, "value_parser.args has no 'tag_p"),
        ({"fields": {"tool_calls": deep_values(100)}}, "are nested too deeply"),
    ],
)
def test_what_is_not_known_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_response_template({**HERMES, **change})


def test_a_call_that_cannot_be_parsed_stays_in_the_content() -> None:
    message = parse(LIST, "<A>", ["<call>[1]</call>"])
    assert (message.content, message.tool_calls) == ("<call>[1]</call>", [])
    assert len(message.notes) == 1
    assert json.dumps(message.to_dict())


@pytest.mark.parametrize(
    ("transform", "text", "calls"),
    [
        (None, '[{"function": {"name": "set", "arguments": "{\\"a\\": 1}"}}, 5, {"function": 6}]', ['{"a": 1}']),
        (None, '{"function": {"name": "set", "arguments": [1]}}', ["[1]"]),
        ([{"function": {"name": "{name}", "arguments": "{content}"}}] * 2, '{"a": 1}', ['{"a": 1}', '{"a": 1}']),
        ([{"function": {"name": "{name}", "arguments": "{content}"}}], "a: 1", []),
        ({"function": {"name": "{name}", "arguments": "{content.b}"}}, '{"a": 1}', []),
    ],
)
def test_calls_come_from_the_transform(transform: Any, text: str, calls: list[str]) -> None:
    spec, prefix, whole = calls_of("json", text)
    spec["fields"]["tool_calls"]["transform"] = transform
    message = parse(spec, prefix, [whole])
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("set", written) for written in calls]
    assert message.content == (None if calls else whole)


def test_arguments_alone_keep_their_text() -> None:
    spec, prefix, whole = calls_of("json", '{"city":"Oslo" }', name="weather")
    assert [call.arguments for call in parse(spec, prefix, [whole]).tool_calls] == ['{"city":"Oslo" }']
