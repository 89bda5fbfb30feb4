"""Answers in every format are split into the same message, however their text is cut."""

# ruff: noqa: E501, RUF001  # long texts; the names of DeepSeek's tokens

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from llamac.errors import ArgumentError
from llamac.tools.formats import FORMATS, PLAIN, format_named
from llamac.tools.message import Delta, Message
from llamac.tools.parser import MessageParser

SCHEMAS: dict[str, dict[str, Any]] = {
    "get-time.v2": {"properties": {"city": {"type": "string"}}},
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
    },
    "stop": {"type": "object", "properties": {}},
}


class Golden(NamedTuple):
    """A text, and the parts of its message. Calls are names and arguments as text."""

    form: str
    text: str
    content: str | None = None
    reasoning: str | None = None
    calls: tuple[tuple[str, str], ...] = ()
    notes: int = 0
    errors: int = 0


OSLO = ("weather", '{"city": "Oslo"}')
RIGA = ("weather", '{"city": "Riga", "days": 2}')
QUOTED = ("weather", r'{"city": "a \"b\" }]</tool_call> \\"}')
GOLDEN = {
    # text and reasoning
    "plain": Golden("none", " Hi <b> there.\n", " Hi <b> there.\n"),
    "empty": Golden("hermes", "", ""),
    "reasoning": Golden("hermes", "<think>\nhm, 2 < 3\n</think>\n\nyes <b>\n", "yes <b>\n", "hm, 2 < 3"),
    "reasoning alone": Golden("none", "\n<think>hm</think>\n", "", "hm"),
    "reasoning that is cut": Golden("none", "<think>hm </thi", "", "hm </thi"),
    "no reasoning": Golden("none", "<think></think>yes", "yes", ""),
    "a second tag": Golden("none", "<think>a</think>b <think>c</think>", "b <think>c</think>", "a"),
    "a late tag": Golden("none", "plain <think>not reasoning</think>", "plain <think>not reasoning</think>"),
    "calls are not read": Golden(
        "none", '<tool_call>{"name": "a"}</tool_call>', '<tool_call>{"name": "a"}</tool_call>'
    ),
    # Hermes, Qwen
    "hermes": Golden(
        "hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>', calls=(OSLO,)
    ),
    "hermes, two": Golden(
        "hermes",
        'Let me see.\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"city": "Riga", "days": 2}, "name": "weather"}\n</tool_call>\n',
        "Let me see.",
        calls=(OSLO, RIGA),
    ),
    "hermes, reasoning": Golden(
        "hermes",
        '<think>\nI call <tool_call>.\n</think>\n\n<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
        reasoning="I call <tool_call>.",
        calls=(("stop", "{}"),),
    ),
    "hermes, tags in a string": Golden(
        "hermes", '<tool_call>{"name": "weather", "arguments": ' + QUOTED[1] + "}</tool_call>", calls=(QUOTED,)
    ),
    "hermes, text between and after": Golden(
        "hermes",
        'A <tool_call>{"name": "stop"}</tool_call> B <tool_call>{"name": "stop", "arguments": null}</tool_call>C',
        "A\nB\nC",
        calls=(("stop", "{}"), ("stop", "{}")),
    ),
    "hermes, arguments in a string": Golden(
        "hermes", r'<tool_call>{"name": "weather", "arguments": "{\"city\": \"Oslo\"}"}</tool_call>', calls=(OSLO,)
    ),
    "hermes, as in OpenAI's API": Golden(
        "hermes",
        '<tool_call>{"type": "function", "function": {"name": "weather", "parameters": {"city": "Oslo"}}}</tool_call>',
        calls=(OSLO,),
    ),
    "hermes, a list": Golden(
        "hermes",
        '<tool_call>[{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "stop", "arguments": {}}]</tool_call>',
        calls=(OSLO, ("stop", "{}")),
    ),
    "hermes, no JSON": Golden(
        "hermes", "Yes <tool_call>weather Oslo</tool_call> no", "Yes <tool_call>weather Oslo</tool_call> no", notes=1
    ),
    "hermes, no name": Golden(
        "hermes", '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', notes=1
    ),
    "hermes, an empty name": Golden(
        "hermes", '<tool_call>{"name": ""}</tool_call>.', '<tool_call>{"name": ""}</tool_call>.', notes=1
    ),
    "hermes, a brace too many": Golden(
        "hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}}</tool_call>', calls=(OSLO,), notes=1
    ),
    "hermes, a brace too few": Golden(
        "hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}</tool_call>', calls=(OSLO,), errors=1
    ),
    "hermes, no number of JSON": Golden(
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"days": NaN}}</tool_call>',
        calls=(("weather", '{"days": NaN}'),),
        errors=1,
    ),
    "hermes, escapes in keys and names": Golden(
        "hermes",
        r'<tool_call>{"n\u0061me": "w\u0065ather", "arguments": {"city": "Oslo"}}</tool_call>',
        calls=(OSLO,),
    ),
    "hermes, a call in open reasoning": Golden(
        "hermes", '<think>a <tool_call>{"name": "stop"}</tool_call>', "", 'a <tool_call>{"name": "stop"}</tool_call>'
    ),
    "hermes, marks of other formats": Golden(
        "hermes",
        '[TOOL_CALLS]x <|python_tag|><tool_call>{"name": "stop"}</tool_call>',
        "[TOOL_CALLS]x <|python_tag|>",
        calls=(("stop", "{}"),),
    ),
    "hermes, cut": Golden(
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "Os',
        calls=(("weather", '{"city": "Os'),),
        errors=1,
    ),
    "hermes, a key twice": Golden(
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "at": {"x": 1, "x": 2}}}</tool_call>',
        calls=(("weather", '{"city": "Oslo", "at": {"x": 1, "x": 2}}'),),
        notes=1,
    ),
    "hermes, cut before the name": Golden("hermes", 'Hm <tool_call>{"na', 'Hm <tool_call>{"na', notes=1),
    "hermes, cut in the tag": Golden("hermes", "Hm <tool_ca", "Hm <tool_ca"),
    "hermes, no closing tag": Golden(
        "hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}', calls=(OSLO,)
    ),
    "hermes, arguments in Python": Golden(
        "hermes",
        '<tool_call>{"name": "stop", "arguments": {\'a\': 1}}</tool_call>',
        calls=(("stop", "{'a': 1}"),),
        errors=1,
    ),
    # Qwen3-Coder, GLM
    "qwen3-coder": Golden(
        "qwen3-coder",
        "I see.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo <b>\n2\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=tags>\n['a', \"b\"]\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=stop>\n</function>\n</tool_call>",
        "I see.",
        calls=(
            ("weather", '{"city": "Oslo <b>\\n2", "days": 3, "exact": true, "tags": ["a", "b"]}'),
            ("stop", "{}"),
        ),
    ),
    "qwen3-coder, no tool_call": Golden(
        "qwen3-coder", "<function=other>\n<parameter=n>\n1\n</parameter>\n</function>", calls=(("other", '{"n": "1"}'),)
    ),
    "qwen3-coder, cut in a text": Golden(
        "qwen3-coder",
        "<tool_call>\n<function=weather>\n<parameter=days>\n1\n</parameter>\n<parameter=city>\nOs",
        calls=(("weather", '{"days": 1, "city": "Os'),),
        errors=1,
    ),
    "qwen3-coder, cut in a number": Golden(
        "qwen3-coder",
        "<tool_call>\n<function=weather>\n<parameter=days>\n1",
        calls=(("weather", '{"days": 1'),),
        errors=1,
    ),
    "qwen3-coder, cut between parameters": Golden(
        "qwen3-coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<param",
        calls=(("weather", '{"city": "Oslo"'),),
        errors=1,
    ),
    "qwen3-coder, cut before the first": Golden(
        "qwen3-coder", "<tool_call>\n<function=stop>\n", calls=(("stop", "{"),), errors=1
    ),
    "glm, cut": Golden(
        "glm",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Os",
        calls=(("weather", '{"city": "Os'),),
        errors=1,
    ),
    "qwen3-coder, not a number": Golden(
        "qwen3-coder",
        "<tool_call><function=weather><parameter=days>many</parameter></function></tool_call>",
        calls=(("weather", '{"days": "many"}'),),
    ),
    "glm": Golden(
        "glm",
        "<think>hm</think><tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>",
        reasoning="hm",
        calls=(("weather", '{"city": "Oslo", "days": 2}'),),
    ),
    # Llama 3
    "llama3": Golden("llama3", '{"name": "weather", "parameters": {"city": "Oslo"}}', calls=(OSLO,)),
    "llama3, two": Golden(
        "llama3",
        '{"name": "weather", "parameters": {"city": "Oslo"}}; {"name": "stop", "parameters": {}}',
        calls=(OSLO, ("stop", "{}")),
    ),
    "llama3, python_tag": Golden(
        "llama3", '<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}', calls=(OSLO,)
    ),
    "llama3, an unknown tool": Golden(
        "llama3", '{"name": "Ann", "parameters": {}}', '{"name": "Ann", "parameters": {}}'
    ),
    "llama3, JSON": Golden("llama3", ' {"city": "Oslo", "n": [1]}\n', ' {"city": "Oslo", "n": [1]}\n'),
    "llama3, a set": Golden("llama3", "{1, 2} is a set", "{1, 2} is a set"),
    "llama3, later": Golden("llama3", 'A call: {"name": "weather"}', 'A call: {"name": "weather"}'),
    # Mistral
    "mistral, old": Golden(
        "mistral",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "weather", "arguments": {"city": "Riga", "days": 2}}]',
        calls=(OSLO, RIGA),
    ),
    "mistral, new": Golden(
        "mistral",
        'Sure.[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]stop[ARGS]{}',
        "Sure.",
        calls=(OSLO, ("stop", "{}")),
    ),
    "mistral, id": Golden("mistral", '[TOOL_CALLS]weather[CALL_ID]abc123XYZ[ARGS]{"city": "Oslo"}', calls=(OSLO,)),
    "mistral, reasoning": Golden(
        "mistral", '[THINK]hm[/THINK][TOOL_CALLS]weather[ARGS]{"city": "Oslo"}', reasoning="hm", calls=(OSLO,)
    ),
    "mistral, no arguments": Golden("mistral", "[TOOL_CALLS]stop[ARGS]", calls=(("stop", "{}"),)),
    # Gemma
    "gemma4": Golden(
        "gemma4",
        '<|channel>thought\nhm\n<channel|><|tool_call>call:weather{city:<|"|>Os}lo<|"|>,days:3,exact:true,'
        'tags:[<|"|>a<|"|>,<|"|>b<|"|>]}<tool_call|><|tool_call>call:stop{}<tool_call|>',
        reasoning="hm",
        calls=(("weather", '{"city": "Os}lo", "days": 3, "exact": true, "tags": ["a", "b"]}'), ("stop", "{}")),
    ),
    "gemma4, a tag in a string": Golden(
        "gemma4",
        '<|tool_call>call:weather{city:<|"|>a <tool_call|> }b<|"|>}<tool_call|>',
        calls=(("weather", '{"city": "a <tool_call|> }b"}'),),
    ),
    "functiongemma": Golden(
        "functiongemma",
        "<start_function_call>call:weather{city:<escape>New York<escape>,where:{lat:1.5,note:north}}<end_function_call>",
        calls=(("weather", '{"city": "New York", "where": {"lat": 1.5, "note": "north"}}'),),
    ),
    "functiongemma, cut": Golden(
        "functiongemma",
        "<start_function_call>call:weather{city:<escape>New",
        calls=(("weather", "{city:<escape>New"),),
        errors=1,
    ),
    "gemma, tool_code": Golden(
        "gemma",
        "Let me see.\n```tool_code\nprint(weather('Oslo', days=2))\n```",
        "Let me see.",
        calls=(("weather", '{"city": "Oslo", "days": 2}'),),
    ),
    "gemma, a list": Golden(
        "gemma",
        "[weather(city='Oslo, \"N\\')'), stop()]",
        calls=(("weather", '{"city": "Oslo, \\"N\')"}'), ("stop", "{}")),
    ),
    "gemma, JSON": Golden("gemma", '{"name": "weather", "parameters": {"city": "Oslo"}}', calls=(OSLO,)),
    "gemma, no call": Golden("gemma", "[see (1)] is a list", "[see (1)] is a list"),
    "gemma, unknown code": Golden("gemma", "```tool_code\nx + 1\n```", "```tool_code\nx + 1\n```", notes=1),
    # others
    "llama4": Golden("llama4", "[weather(city='Oslo')]", calls=(OSLO,)),
    "lfm2": Golden("lfm2", "<|tool_call_start|>[weather(city='Oslo')]<|tool_call_end|>Wait.", "Wait.", calls=(OSLO,)),
    "lfm2, names that Python does not have": Golden(
        "lfm2",
        "<|tool_call_start|>[get-time.v2(city='is-it(1)'), class(a=1), a:b()]<|tool_call_end|>",
        calls=(("get-time.v2", '{"city": "is-it(1)"}'), ("class", '{"a": 1}'), ("a:b", "{}")),
    ),
    "llama4, a hyphen": Golden("llama4", "[get-time.v2(city='x')]", calls=(("get-time.v2", '{"city": "x"}'),)),
    "llama4, a difference": Golden("llama4", "[see-it (1-2)] is a list", "[see-it (1-2)] is a list"),
    "lfm2, reserved names": Golden(
        "lfm2",
        "<|tool_call_start|>[weather(city='from=1', from='a', class=None)]<|tool_call_end|>",
        calls=(("weather", '{"city": "from=1", "from": "a", "class": null}'),),
    ),
    "lfm2, a tag in a string": Golden(
        "lfm2",
        "<|tool_call_start|>[weather(city='<|tool_call_end|>')]<|tool_call_end|>",
        calls=(("weather", '{"city": "<|tool_call_end|>"}'),),
    ),
    "phi4-mini": Golden(
        "phi4-mini", '<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}]<|/tool_call|>', calls=(OSLO,)
    ),
    "phi4-mini, functools": Golden(
        "phi4-mini", 'functools[{"name": "weather", "arguments": {"city": "Oslo"}}]', calls=(OSLO,)
    ),
    "nemotron": Golden(
        "nemotron", 'Hm.<TOOLCALL>[{"name": "weather", "arguments": {"city": "Oslo"}}]</TOOLCALL>', "Hm.", calls=(OSLO,)
    ),
    "granite": Golden("granite", '<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}]', calls=(OSLO,)),
    "command-r": Golden(
        "command-r",
        '<|START_THINKING|>hm<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", '
        '"parameters": {"city": "Oslo"}}\n]<|END_ACTION|>',
        reasoning="hm",
        calls=(OSLO,),
    ),
    "command-r, text": Golden("command-r", "<|START_RESPONSE|>Hi.<|END_RESPONSE|>", "Hi."),
    "deepseek": Golden(
        "deepseek",
        "<think>\nhm\n</think>\n\nSure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Oslo"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>stop\n```json\n{}\n'
        "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Sure.",
        "hm",
        (OSLO, ("stop", "{}")),
    ),
    "deepseek, 3.1": Golden(
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        calls=(OSLO,),
    ),
    "kimi": Golden(
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>',
        calls=(OSLO,),
    ),
    "harmony": Golden(
        "harmony",
        "<|channel|>analysis<|message|>The user asks.<|end|><|start|>assistant<|channel|>final<|message|>Hi.",
        "Hi.",
        "The user asks.",
    ),
    "harmony, a call": Golden(
        "harmony",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Oslo"}',
        "I look.",
        "hm",
        (OSLO,),
    ),
    "harmony, the recipient first": Golden(
        "harmony",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
        '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>',
        None,
        "a\nb",
        (OSLO,),
    ),
}


class Joined(NamedTuple):
    """What pieces add up to. Calls are ids, names and arguments."""

    content: str
    reasoning: str
    calls: list[tuple[str, ...]]


def joined(deltas: Sequence[Delta]) -> Joined:
    """The message that pieces add up to, with nothing but them."""
    content = "".join(delta.content or "" for delta in deltas)
    reasoning = "".join(delta.reasoning or "" for delta in deltas)
    calls: list[list[str]] = []
    for delta in deltas:
        assert (delta.content is not None) + (delta.reasoning is not None) + (delta.tool_call is not None) == 1
        assert delta.content != ""
        assert delta.reasoning != ""
        if (piece := delta.tool_call) is not None:
            assert (piece.name is None) == (piece.id is None) == (piece.index < len(calls))
            if piece.name is not None:
                calls.append([str(piece.id), piece.name, ""])
            assert piece.index == len(calls) - 1
            calls[-1][2] += piece.arguments
    return Joined(content, reasoning, [tuple(call) for call in calls])


def parse(form: str, pieces: Sequence[str], **options: Any) -> Message:
    """Parse a text in pieces. What has been reported is never taken back, and adds up to the message."""
    parser = MessageParser(format_named(form), schemas=SCHEMAS, **options)
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += parser.push(piece)
        known, so_far = joined(deltas), parser.message
        assert (so_far.content or "") == known.content
        assert (so_far.reasoning or "") == known.reasoning
    deltas += parser.finish()
    message, known = parser.message, joined(deltas)
    assert (message.content or "") == known.content
    assert (message.reasoning or "") == known.reasoning
    assert [(call.id, call.name, call.arguments) for call in message.tool_calls] == known.calls
    return message


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_texts(name: str) -> None:
    golden = GOLDEN[name]
    message = parse(golden.form, [golden.text])
    assert message.content == (golden.content if golden.content is not None or golden.calls else "")
    assert message.reasoning == golden.reasoning
    assert tuple((call.name, call.arguments) for call in message.tool_calls) == golden.calls
    assert len(message.notes) == golden.notes, message.notes
    assert sum(call.error is not None for call in message.tool_calls) == golden.errors
    for call in message.tool_calls:
        assert call.error is not None or call.parsed == json.loads(call.arguments)


@pytest.mark.parametrize("name", GOLDEN)
def test_every_way_to_cut_a_text_gives_the_same_message(name: str) -> None:
    golden = GOLDEN[name]
    whole = parse(golden.form, [golden.text])
    assert parse(golden.form, list(golden.text)) == whole
    for cut in range(len(golden.text) + 1):
        assert parse(golden.form, [golden.text[:cut], golden.text[cut:]]) == whole
    draw = random.Random(2)
    for _ in range(20):
        cuts = sorted(draw.choices(range(len(golden.text) + 1), k=4))
        pieces = [golden.text[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
        assert parse(golden.form, pieces) == whole


@pytest.mark.parametrize("form", [*FORMATS, "none"])
def test_any_text_is_split_without_an_error(form: str) -> None:
    """Texts made of the tags and values of all formats in any order, and golden texts that are damaged."""
    draw = random.Random(form)
    parts = [part for golden in GOLDEN.values() for part in golden.text.split("<") if golden.form == form] or ["x"]
    parts = [
        *parts,
        *(f"<{part}" for part in parts),
        "{",
        "}",
        '"',
        "</tool_call>",
        "\n",
        "\\",
        "[",
        "]",
        '"name": "weather"',
        ",",
    ]
    for _ in range(40):
        text = "".join(draw.choices(parts, k=draw.randrange(1, 9)))
        whole = parse(form, [text])
        assert parse(form, list(text)) == whole
        cut = draw.randrange(len(text) + 1)
        assert parse(form, [text[:cut], text[cut:]]) == whole


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_has_golden_texts(form: str) -> None:
    assert any(golden.form == form for golden in GOLDEN.values())


def test_ordinary_text_is_not_held_back() -> None:
    parser = MessageParser(FORMATS["hermes"])
    assert parser.push("Hi") == [Delta(content="Hi")]
    assert parser.push(" a < b") == [Delta(content=" a < b")]
    assert parser.push(" ") == []
    assert parser.push("<") == []
    assert parser.push("b>") == [Delta(content=" <b>")]


def test_arguments_are_streamed() -> None:
    parser = MessageParser(FORMATS["hermes"])
    assert parser.push('<tool_call>{"name": "weat') == []
    first = parser.push('her", ')[0].to_dict()
    assert first["tool_calls"][0]["function"] == {"name": "weather", "arguments": ""}
    assert first["tool_calls"][0]["id"] == "call_0"
    pieces = [parser.push(piece) for piece in ('"arguments": {"ci', 'ty": "Os', 'lo"}', "}</tool_call>")]
    texts = ["".join(d.to_dict()["tool_calls"][0]["function"]["arguments"] for d in piece) for piece in pieces]
    assert texts == ['{"ci', 'ty": "Os', 'lo"}', ""]


@pytest.mark.parametrize(
    ("form", "prompt"),
    [
        ("hermes", "<|im_start|>assistant\n<think>\n"),
        ("mistral", "[/INST][THINK]"),
        ("gemma4", "<|turn>model\n<|channel>thought\n"),
        ("harmony", "<|start|>assistant<|channel|>analysis<|message|>"),
    ],
)
def test_a_prompt_can_open_the_reasoning(form: str, prompt: str) -> None:
    closing = {"hermes": "</think>", "mistral": "[/THINK]", "gemma4": "<channel|>", "harmony": "<|end|>"}[form]
    for cut in range(6):
        text = f"\nhm\n{closing}\nyes"
        message = parse(form, [text[:cut], text[cut:]], prompt=prompt)
        assert (message.reasoning, message.content) == ("hm", "yes")
    assert parse(form, ["yes"], prompt=f"{prompt}hm{closing}").content == "yes"


def test_one_call_if_calls_must_not_be_parallel() -> None:
    text = GOLDEN["mistral, old"].text
    message = parse("mistral", [text], parallel=False)
    assert [call.name for call in message.tool_calls] == ["weather"]
    assert message.notes == ["a further call was dropped, since parallel_tool_calls is False: 'weather'"]


def test_ids_come_from_the_caller_or_the_model() -> None:
    assert parse("mistral", [GOLDEN["mistral, id"].text]).tool_calls[0].id == "abc123XYZ"
    again = '[TOOL_CALLS]weather[CALL_ID]abc123XYZ[ARGS]{"city": "Oslo"}'
    for written in (again * 2, again.replace("abc123XYZ", "call_1") * 2):
        ids = [call.id for call in parse("mistral", [written], new_id="number{:03}".format).tool_calls]
        assert len(set(ids)) == 2
        assert all(len(one) == 9 and one.isalnum() for one in ids)
    taken = parse("mistral", [again], new_id="number{:03}".format, taken=["abc123XYZ"])
    assert taken.tool_calls[0].id == "number000"
    found = parse("hermes", [GOLDEN["hermes, two"].text], new_id="number{}".format)
    assert [call.id for call in found.tool_calls] == ["number0", "number1"]


def test_the_time_is_linear() -> None:
    parser = MessageParser(FORMATS["qwen3-coder"])
    for _ in range(400):
        parser.push(" \n" * 50)
    assert len(parser._buffer) <= 600


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"tool_format is 'hermès', expected one of harmony, .*, none$"):
        format_named("hermès")
    assert format_named("none") is PLAIN
