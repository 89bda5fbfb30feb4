"""Answers in every format are split into the same message, however their text is cut."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from answer_samples import GOLDEN, SCHEMAS

from llamac.errors import ArgumentError
from llamac.tools.formats import FORMATS, PLAIN, format_named
from llamac.tools.message import Delta, Message
from llamac.tools.parser import MessageParser


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


def test_ids_of_kimi_have_the_name_and_count_the_calls_of_the_conversation() -> None:
    """Its template writes them in place of names."""
    text = GOLDEN["kimi"].text
    first = parse("kimi", [text])
    assert [call.id for call in first.tool_calls] == [f"functions.{c.name}:{n}" for n, c in enumerate(first.tool_calls)]
    taken = [call.id for call in first.tool_calls]
    later = parse("kimi", [text], taken=taken).tool_calls
    assert [call.id for call in later] == [f"functions.{c.name}:{n}" for n, c in enumerate(later, len(taken))]
    assert parse("kimi", [text], taken=["x", "functions.weather:2"]).tool_calls[0].id != "functions.weather:2"


def test_a_long_text_behind_a_closing_tag_belongs_to_the_value() -> None:
    parser = MessageParser(FORMATS["qwen3-coder"])
    parser.push("<function=f>\n<parameter=a>\nx")
    for piece in ("</function>", *["." * 10] * 100):
        parser.push(piece)
    assert parser.message.tool_calls[0].arguments == ""
    parser.push("\n</parameter>\n</function>")
    parser.finish()
    [call] = parser.message.tool_calls
    assert (call.arguments, call.error) == ('{"a": "x</function>' + "." * 1000 + '"}', None)


def test_the_time_is_linear() -> None:
    parser = MessageParser(FORMATS["qwen3-coder"])
    for _ in range(400):
        parser.push(" \n" * 50)
    assert len(parser._buffer) <= 600


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"tool_format is 'hermès', expected one of harmony, .*, none$"):
        format_named("hermès")
    assert format_named("none") is PLAIN
