"""Forced calls in every format: random texts of the grammar are parsed back to calls that match the schemas."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest
from answer_tokens import EOS, MARKS, vocabulary

from llamac.errors import ArgumentError, UnsupportedError
from llamac.guided.constraint import Constraint
from llamac.text.tokenizer import Tokenizer
from llamac.tools.formats import FORMATS, PLAIN, Format
from llamac.tools.functions import parameters_of
from llamac.tools.grammar import ToolCalls, calls_guide
from llamac.tools.message import Message
from llamac.tools.parser import MessageParser

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

ENDINGS = (b'"', b"}", b"]", b",")
LENGTH = 3000  # tokens of the longest random text
FORCED = [name for name, form in FORMATS.items() if form.writing.call]
PLACE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "zip": {"type": ["integer", "null"]}},
    "required": ["name"],
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {
        "properties": {
            "city": {"type": "string"},
            "from": {"type": "integer", "minimum": 3, "maximum": 20},
            "exact": {"type": "boolean"},
            "unit": {"enum": ["C", "F", 'a"b']},
            "nothing": {"type": "null"},
            "note": {"type": ["string", "null"]},
        },
        "required": ["city", "exact", "unit"],
    },
    "optional": {"properties": {key: {"type": "boolean"} for key in "abc"}},
    "nested": {
        "properties": {
            "where": {"$ref": "#/$defs/Place"},
            "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
            "grid": {"type": "array", "items": {"type": "array", "items": {"type": "number"}, "maxItems": 2}},
            "level": {"$ref": "#/$defs/Level"},
        },
        "required": ["where", "tags", "level"],
        "$defs": {"Place": PLACE, "Level": {"enum": [1, 2, True, None, "x"]}},
    },
    "limits": {
        "properties": {
            "code": {"type": "string", "pattern": "^[a-c]{2,4}$"},
            "short": {"type": "string", "minLength": 2, "maxLength": 3},
            "either": {"anyOf": [{"type": "integer"}, {"type": "boolean"}]},
            "fixed": {"const": "x"},
        },
        "required": ["code", "short", "either", "fixed"],
    },
    "unions": {
        "properties": {
            "unit": {"anyOf": [{"enum": ["C", "F"]}, {"type": "null"}], "default": None},
            "count": {"oneOf": [{"const": "all"}, {"type": "integer"}]},
            "list": {"anyOf": [{"$ref": "#/$defs/Order"}, {"type": "array", "items": {"type": "boolean"}}]},
            "anything": True,
            "nothing": False,
        },
        "required": ["unit", "count", "list"],
        "$defs": {"Order": {"anyOf": [{"enum": ["up", 1]}, {"const": None}]}},
    },
    "empty": {"properties": {}},
    "open": {"properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": True},
}


def tools_of(schema: dict[str, Any], name: str = "do_it", **options: Any) -> list[dict[str, Any]]:
    parameters = {"type": "object", **schema}
    return [{"type": "function", "function": {"name": name, "parameters": parameters, **options}}]


def allowed_by(mask: bytearray, tokenizer: Tokenizer) -> list[int]:
    """The tokens whose bits are set, in ascending order."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=tokenizer.n_ids, bitorder="little")
    allowed: list[int] = np.flatnonzero(bits).tolist()
    return allowed


def random_text(guide: ToolCalls, tokenizer: Tokenizer, seed: int) -> str:
    """A random text of a guide's grammar. What ends a value is more probable than the rest."""
    draw = random.Random(seed)
    constraint = Constraint(guide, tokenizer, [EOS], [])
    texts = [tokenizer.token_bytes(token) for token in range(tokenizer.n_ids)]
    endings = {token for token, data in enumerate(texts) if data in ENDINGS or token > EOS + 1}
    letters = {token for token, data in enumerate(texts) if data.isascii() and data.isalnum()}
    tokens: list[int] = []
    pending: list[int] = []  # the rest of a mark that ends free text
    while not constraint.is_complete and len(tokens) < LENGTH:
        mask = constraint.mask()
        assert mask is not None
        allowed = allowed_by(mask, tokenizer)
        if EOS in allowed and draw.random() < 0.5:
            break
        if not pending and guide.closings and draw.random() < 0.1:
            pending = list(draw.choice(guide.closings))
        ending = [token for token in allowed if token in endings]
        words = [token for token in allowed if token in letters]
        token = draw.choice((ending if draw.random() < 0.3 else words) or [token for token in allowed if token != EOS])
        if pending and pending[0] in allowed:
            token = pending.pop(0)
        else:
            pending = []
        tokens.append(token)
        constraint.accept(token)
    assert constraint.is_accepting, tokenizer.decode(tokens, skip_special=False)
    return tokenizer.decode(tokens, skip_special=False)


def fits(constraint: Constraint, tokenizer: Tokenizer, text: str) -> bool:
    """Whether a constraint allows a text."""
    for token in tokenizer.encode(text, parse_special=True):
        mask = constraint.mask()
        if mask is not None and not mask[token // 8] >> token % 8 & 1:
            return False
        constraint.accept(token)
    return constraint.is_accepting


def parse(form: Format, tools: list[dict[str, Any]], text: str) -> Message:
    parser = MessageParser(form, schemas=parameters_of(tools))
    for char in text:
        parser.push(char)
    parser.finish()
    return parser.message


@pytest.mark.parametrize("special", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("name", FORCED)
def test_what_is_forced_is_parsed_back(name: str, schema: str, special: bool) -> None:
    form, tools = FORMATS[name], tools_of(SCHEMAS[schema])
    tokenizer = vocabulary(MARKS[name] if special else ())
    guide = calls_guide(form, tools, tokenizer, parallel=True)
    closed = {**tools[0]["function"]["parameters"]}
    closed.setdefault("additionalProperties", False)
    text = random_text(guide, tokenizer, seed=int(special))
    message = parse(form, tools, text)
    assert message.tool_calls, text
    # A grammar cannot exclude that an additional key comes twice. A note says so, and one of the values counts.
    keys = {key for call in message.tool_calls for key in call.parsed or ()} - {"a"}
    for note in message.notes:
        assert schema == "open", text
        assert "more than once" in note or note.startswith("text beside a tool call was ignored: "), text
        assert any(key in note for key in keys), text
    assert message.content is None, text
    for call in message.tool_calls:
        assert (call.name, call.error) == ("do_it", None), text
        assert call.parsed is not None
        jsonschema.validate(call.parsed, closed)


ANSWER = {"type": "object", "properties": {"b": {"enum": [1, "x"]}}, "required": ["b"], "additionalProperties": False}


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", FORCED)
def test_calls_or_an_answer_match_their_schemas(name: str, special: bool) -> None:
    form, tools = FORMATS[name], tools_of(SCHEMAS["optional"])
    tokenizer = vocabulary(MARKS[name] if special else ())
    guide = calls_guide(form, tools, tokenizer, parallel=True, answer=ANSWER)
    found = [parse(form, tools, random_text(guide, tokenizer, seed)) for seed in range(12)]
    for message in found:
        if message.tool_calls:
            assert all(call.error is None for call in message.tool_calls)
            assert message.content is None
        else:
            jsonschema.validate(json.loads(message.content or ""), ANSWER)
    assert len({bool(message.tool_calls) for message in found}) == 2


DSML_VALUES: list[tuple[Any, str, Any]] = [
    ({"type": ["string", "null"]}, 'string="false">null', None),
    ({"type": ["string", "null"]}, 'string="true">null', "null"),
    ({"type": ["string", "null"]}, 'string="false">1', ...),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, 'string="false">12', 12),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, 'string="true">12', "12"),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, 'string="false">"a"', ...),
    ({"anyOf": [{"$ref": "#/$defs/N"}, {"type": "string"}]}, 'string="false">null', None),
    ({"$ref": "#/$defs/N"}, 'string="false">null', None),
    ({}, 'string="false">[{"a": 1}]', [{"a": 1}]),
    ({}, 'string="true">[', "["),
    ({"type": "string"}, 'string="false">null', ...),
    ({"allOf": [{"type": "string"}]}, 'string="false">null', ...),
    ({"allOf": [{"type": "string"}]}, 'string="true">null', "null"),
    ({"enum": ["null", None, 1]}, 'string="false">null', None),
    ({"enum": ["null", None, 1]}, 'string="true">null', "null"),
    ({"enum": ["null", None, 1]}, 'string="true">1', ...),
]


@pytest.mark.parametrize("is_named", [True, False], ids=["property", "additional"])
@pytest.mark.parametrize(("part", "value", "expected"), DSML_VALUES)
def test_dsml_says_whether_a_value_is_a_string(part: Any, value: str, expected: Any, is_named: bool) -> None:
    """Null and "null" are two values of a string that can be null; `...` stands for a value that is not allowed."""
    own = {"properties": {"a": part}} if is_named else {"properties": {}, "additionalProperties": part}
    form, tools = FORMATS["deepseek-v4"], tools_of({**own, "$defs": {"N": {"type": ["string", "null"]}}})
    tokenizer = vocabulary(MARKS["deepseek-v4"])
    guide = calls_guide(form, tools, tokenizer, parallel=False)
    constraint = Constraint(guide, tokenizer, [EOS], [])
    (mark,) = MARKS["deepseek-v4"]
    opening = f'<{mark}tool_calls>\n<{mark}invoke name="do_it">\n<{mark}parameter name="a" '
    text = f"{opening}{value}</{mark}parameter>\n</{mark}invoke>\n</{mark}tool_calls>"
    if expected is ...:
        assert not fits(constraint, tokenizer, text)
        return
    assert fits(constraint, tokenizer, text)
    [call] = parse(form, tools, text).tool_calls
    assert call.parsed == {"a": expected}


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        (r"^https?:\/\/x$", "https://x", "xhttps://x"),
        ("^[^/]+/$", "a/", "a"),
        (r"\$", "1 $ or", "1"),
        (r"^a\\$", "a\\", "a\\$"),
        ("^a|b$", "ay", "y"),
        ("^a|b$", "xb", "bx"),
        ("^(?:a|b)$", "b", "ab"),
        ("^[|(]$", "|", "a"),
    ],
)
def test_texts_between_tags_match_their_pattern(pattern: str, matching: str, other: str) -> None:
    tools = tools_of({"properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]})
    guide = calls_guide(FORMATS["qwen3-coder"], tools, vocabulary(()), parallel=False)
    for text, is_allowed in ((matching, True), (other, False)):
        assert (re.search(pattern, text) is not None) is is_allowed
        call = f"<tool_call>\n<function=do_it>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
        assert fits(Constraint(guide, vocabulary(()), [EOS], []), vocabulary(()), call) is is_allowed, text


@pytest.mark.parametrize("name", [name for name in FORCED if FORMATS[name].writing.trigger])
def test_calls_of_strict_tools_stand_among_text(name: str) -> None:
    form, tools = FORMATS[name], tools_of(SCHEMAS["optional"], strict=True)
    for marks in (MARKS[name], ()):
        tokenizer = vocabulary(marks)
        strict = calls_guide(form, tools, tokenizer, parallel=True, among_text=True)
        forced = random_text(calls_guide(form, tools, tokenizer, parallel=True), tokenizer, 1)
        matcher = Constraint(strict, tokenizer, [EOS], [])
        for token in tokenizer.encode("Now: " + forced, parse_special=True):
            matcher.accept(token)
        assert matcher.is_accepting


@pytest.mark.parametrize("answer", [None, {"type": "object", "properties": {}}])
def test_forced_calls_of_gemma_begin_no_reasoning_that_the_model_would_not_begin(answer: Any) -> None:
    tokenizer = vocabulary(MARKS["gemma4"])
    guide = calls_guide(FORMATS["gemma4"], tools_of({}), tokenizer, parallel=False, answer=answer)
    opening = tokenizer.id_of("<|channel>")
    for may_reason in (True, False):
        constraint = Constraint(guide, tokenizer, [EOS], [], may_reason=may_reason)
        mask = constraint.mask()
        assert mask is not None
        assert opening not in allowed_by(mask, tokenizer)
        assert constraint.openings == ([opening] if may_reason else [])
    constraint = Constraint(guide, tokenizer, [EOS], [])
    for token in tokenizer.encode(
        "<|channel>thought\nSo<channel|><|tool_call>call:do_it{}<tool_call|>", parse_special=True
    ):
        constraint.accept(token)
    assert constraint.is_accepting


@pytest.mark.parametrize("name", FORCED)
def test_a_call_is_completed_before_the_limit(name: str) -> None:
    form, tools = FORMATS[name], tools_of({"properties": {"city": {"type": "string"}}, "required": ["city"]})
    for marks in (MARKS[name], ()):
        tokenizer = vocabulary(marks)
        constraint = Constraint(calls_guide(form, tools, tokenizer, parallel=False), tokenizer, [EOS], [])
        left, text = 250, b""
        while left and not constraint.is_accepting:
            mask = constraint.mask()
            assert mask is not None
            letter = tokenizer.encode("a")[0]
            allowed = allowed_by(mask, tokenizer)
            token = constraint.within(letter if letter in allowed else allowed[0], left)  # in a text, letters only
            constraint.accept(token)
            text += tokenizer.token_bytes(token)
            left -= 1
        assert constraint.is_accepting, text
        [call] = parse(form, tools, text.decode()).tool_calls
        assert (call.name, call.error) == ("do_it", None)


def test_strict_false_allows_any_arguments() -> None:
    for name in FORCED:
        tools = tools_of({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, strict=False)
        tokenizer = vocabulary(MARKS[name])
        guide = calls_guide(FORMATS[name], tools, tokenizer, parallel=False)
        found = [parse(FORMATS[name], tools, random_text(guide, tokenizer, seed)).tool_calls[0] for seed in range(8)]
        assert all(call.error is None for call in found)
        assert any(call.parsed != found[0].parsed for call in found)


WRONG: list[tuple[str, list[dict[str, Any]], str]] = [
    ("llama4", tools_of({}, "2do"), r"'2do' cannot be forced: .* does not begin with a letter"),
    ("olmo3", tools_of({}, "2do"), r"'2do' cannot be forced: .* does not begin with a letter"),
    ("lfm2", tools_of({"properties": {"a-b": {"type": "string"}}}), "the parameter 'a-b' is not a name of Python"),
    (
        "lfm2",
        tools_of({"properties": {"a": {"prefixItems": [{}]}}}),
        "prefixItems is not supported in the model",
    ),
    ("lfm2", tools_of({"properties": {"a": {}}, "required": ["b"]}), "required property 'b' is unsatisfiable"),
    ("lfm2", tools_of({"properties": {"a": {"$ref": "#/$defs/b"}}}), "Pointer '/.defs/b' does not exist"),
    (
        "gemma4",
        tools_of({"properties": {"a": {"uniqueItems": True}}}),
        "'uniqueItems' is not supported",
    ),
]


@pytest.mark.parametrize(("name", "tools", "message"), WRONG)
def test_tools_that_cannot_be_forced_are_refused(name: str, tools: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        calls_guide(FORMATS[name], tools, vocabulary(()), parallel=False)


def test_a_format_without_calls_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="cannot be forced in the format 'none', only in harmony, gemma4, "):
        calls_guide(PLAIN, tools_of({}), vocabulary(()), parallel=False)
