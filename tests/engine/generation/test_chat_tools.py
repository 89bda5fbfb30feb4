"""Chats with tools: messages, deltas, forced calls and round trips, in every API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import llamac
from builders import byte_ids, checkpoint, llama_config, script_checkpoint, write_model
from llamac import ArgumentError, ArgumentTypeError, Delta, UnsupportedError
from llamac.openai.responses import completion_body
from processes import TIMEOUT

USER = [{"role": "user", "content": "x"}]
TEMPLATE = "{# <tool_call> #}{% if tools %}{% endif %}U"
ANSWER = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
EOS = 2
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "word": {"enum": ["one", "two"]}},
                "required": ["a", "word"],
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]


def f(a: int) -> int:
    """Double a number.

    Args:
        a: The number.
    """
    return 2 * a


@pytest.fixture
def answering(tmp_path: Path) -> Iterator[Callable[..., llamac.Model]]:
    """Make models that answer every conversation with a text."""
    opened: list[llamac.Model] = []

    def make(answer: str, template: str = TEMPLATE) -> llamac.Model:
        before = len(template) - template.rfind("U")  # tokens of the prompt: a space and the template's text, less one
        made = script_checkpoint([*[EOS] * before, *byte_ids(answer), EOS], stop_ids=[EOS])
        made.chat_template = template
        path = write_model(tmp_path / f"{len(opened)}.bin", made, generation={"temperature": 0})
        opened.append(llamac.load(path))
        return opened[-1]

    yield make
    for model in opened:
        model.close()


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[llamac.Model]:
    made = checkpoint(llama_config())
    made.chat_template = TEMPLATE
    with llamac.load(write_model(tmp_path_factory.mktemp("random") / "chat.bin", made)) as model:
        yield model


def arguments(deltas: Sequence[Delta]) -> str:
    return "".join(delta.tool_call.arguments for delta in deltas if delta.tool_call is not None)


def test_an_answer_has_calls(answering: Callable[..., llamac.Model]) -> None:
    model = answering(ANSWER)
    assert model.tool_format == "hermes"
    found = model.chat(USER, tools=[f])
    assert found.text == ANSWER
    assert found.message is not None
    [call] = found.message.tool_calls
    assert (call.name, call.arguments, call.parsed, call.error) == ("f", '{"a": 1}', {"a": 1}, None)
    assert found.message.content is None
    assert found.message.to_dict() == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call.id, "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    }
    assert len(call.id) == 9
    assert call.id.isalnum()
    again = model.chat(USER, tools=[f], seed=found.seed).message
    assert again == found.message
    other = model.chat(USER, tools=[f], seed=found.seed + 1).message
    assert other is not None
    assert other.tool_calls[0].id != call.id


def test_without_tools_the_text_is_not_searched_for_calls(answering: Callable[..., llamac.Model]) -> None:
    model = answering(ANSWER)
    assert model.chat(USER).message == llamac.Message(ANSWER)
    assert model.chat(USER, tools=[f], tool_choice="none").message == llamac.Message(ANSWER)
    assert model.generate("U").message is None


def test_reasoning_is_separate(answering: Callable[..., llamac.Model]) -> None:
    message = answering("<think>\nhm\n</think>\n\nyes").chat(USER).message
    assert message == llamac.Message("yes", "hm")
    opened = answering("hm</think>yes", "U<think>").chat(USER).message
    assert opened == llamac.Message("yes", "hm")


def test_streams_have_deltas(answering: Callable[..., llamac.Model]) -> None:
    model = answering(ANSWER)
    with model.chat_stream(USER, tools=[f]) as stream:
        deltas = list(stream.deltas())
    assert arguments(deltas) == '{"a": 1}'
    assert len(deltas) > 3  # the arguments come in pieces
    with model.session() as session, session.chat_stream(USER, tools=[f]) as stream:
        assert arguments(list(stream.deltas())) == '{"a": 1}'
    with model.stream("U") as stream, pytest.raises(ArgumentError, match="only chats have them"):
        stream.deltas()


def test_engines_give_the_same_messages(answering: Callable[..., llamac.Model]) -> None:
    model = answering(ANSWER)
    with llamac.Engine(model, context=64) as engine:
        request = engine.chat(USER, tools=[f], seed=1)
        deltas = list(request.deltas())
        assert arguments(deltas) == '{"a": 1}'
        message = request.result(TIMEOUT).message
    assert message == model.chat(USER, tools=[f], seed=1).message

    async def ask() -> tuple[str, Any]:
        async with llamac.AsyncEngine(model, context=64) as engine:
            request = engine.chat(USER, tools=[f], seed=1)
            found = [delta async for delta in request.deltas()]
            return arguments(found), (await request).message

    assert asyncio.run(ask()) == ('{"a": 1}', message)


def test_stop_strings_end_the_message_too(answering: Callable[..., llamac.Model]) -> None:
    model = answering("yes <b> no")
    with model.chat_stream(USER, stop=["<b>"]) as stream:
        assert "".join(delta.content or "" for delta in stream.deltas()) == "yes "
    assert stream.completion.message == llamac.Message("yes ")


def test_an_unknown_format_stays_text(answering: Callable[..., llamac.Model]) -> None:
    model = answering(ANSWER, "{% if tools %}{% endif %}U")
    assert model.tool_format is None
    message = model.chat(USER, tools=[f]).message
    assert message is not None
    assert message.content == ANSWER
    assert "is not known" in message.notes[0]
    chosen = model.chat(USER, tools=[f], tool_format="hermes").message
    assert chosen is not None
    assert chosen.tool_calls[0].name == "f"
    with pytest.raises(ArgumentError, match="is not known"):
        model.chat(USER, tools=[f], tool_choice="required")
    with pytest.raises(ArgumentError, match="tool_format is 'x', expected one of"):
        model.chat(USER, tools=[f], tool_format="x")


def test_a_template_without_tools_gets_them_in_the_system_message(random_model: llamac.Model, tmp_path: Path) -> None:
    made = checkpoint(llama_config())
    made.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    with llamac.load(write_model(tmp_path / "plain.bin", made)) as model:
        prompt = model.chat_prompt(USER, tools=[f])
        assert prompt.startswith("[system]")
        assert json.dumps(llamac.tool_schema(f)) in prompt
        call = llamac.ToolCall("id1234567", "f", '{"a": 1}')
        turns: list[Any] = [*USER, llamac.Message(None, tool_calls=[call]), {"role": "tool", "content": "2"}]
        expected = '[assistant]<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
        expected += "[user]<tool_response>\n2\n</tool_response>"
        assert model.chat_prompt(turns).endswith(expected)


@pytest.mark.parametrize("keeps", [True, False])
def test_arguments_are_rendered_once(tmp_path: Path, keeps: bool) -> None:
    """Templates expect dicts; those that look at the type get the model's own text."""
    made = checkpoint(llama_config())
    text = "{{ a if a is string else a | tojson }}" if keeps else "{{ a | tojson }}"
    text = text.replace("a is", "arguments is").replace("{{ a ", "{{ arguments ").replace("else a", "else arguments")
    loop = "{% for c in m.tool_calls or [] %}{% set arguments = c.function.arguments %}" + text + "{% endfor %}"
    made.chat_template = "{% for m in messages %}" + loop + "{% endfor %}"
    with llamac.load(write_model(tmp_path / "plain.bin", made)) as model:
        turns: list[Any] = [*USER, llamac.Message(None, tool_calls=[llamac.ToolCall("i", "f", '{"a":1}')])]
        assert model.chat_prompt(turns) == ('{"a":1}' if keeps else '{"a": 1}')
        broken: list[Any] = [*USER, llamac.Message(None, tool_calls=[llamac.ToolCall("i", "f", '{"a"')])]
        assert model.chat_prompt(broken) == ('{"a"' if keeps else '"{\\"a\\""')


# ---- forced calls


@pytest.mark.parametrize("choice", ["required", "add", {"type": "function", "function": {"name": "add"}}])
def test_calls_can_be_forced(random_model: llamac.Model, choice: Any) -> None:
    tools = TOOLS if choice != "required" else TOOLS[:1]
    options: dict[str, Any] = {"tools": tools, "tool_choice": choice, "seed": 3, "context": 250}
    found = random_model.chat(USER, max_tokens=200, parallel_tool_calls=False, **options)
    assert found.finish_reason == "stop"
    assert found.message is not None
    [call] = found.message.tool_calls
    assert call.name == "add"
    assert call.parsed is not None
    assert set(call.parsed) == {"a", "word"}
    assert isinstance(call.parsed["a"], int)
    assert call.parsed["word"] in ("one", "two")
    assert found.message.notes == []


def test_strict_tools_are_checked_among_text(random_model: llamac.Model) -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    found = random_model.chat(USER, tools=strict, max_tokens=30, seed=1)
    assert found.message is not None
    assert found.finish_reason in ("stop", "length")


def test_what_cannot_be_forced_is_refused(random_model: llamac.Model) -> None:
    options: dict[str, Any] = {"tools": TOOLS, "max_tokens": 1}
    choices: list[Any] = ["other", {"function": {}}, {"function": {"name": "required"}}]
    for choice in choices:
        with pytest.raises(ArgumentError, match="expected 'auto', 'none', 'required'"):
            random_model.chat(USER, tool_choice=choice, **options)
    with pytest.raises(ArgumentTypeError, match="tool_choice is 5"):
        random_model.chat(USER, tool_choice=5, **options)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="parallel_tool_calls is 1"):
        random_model.chat(USER, parallel_tool_calls=1, **options)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="there are no tools"):
        random_model.chat(USER, tool_choice="required")
    with pytest.raises(ArgumentError, match=r"^guide cannot be combined with tool_choice 'stop', because both "):
        random_model.chat(USER, tool_choice="stop", guide=llamac.Choice(["a"]), **options)
    strict = [TOOLS[0], {"name": "s", "strict": True, "parameters": {"type": "object"}}]
    with pytest.raises(ArgumentError, match=r"^guide cannot be combined with the strict tools 's', .* \"strict\""):
        random_model.chat(USER, guide=llamac.Choice(["a"]), tools=strict)
    with pytest.raises(UnsupportedError, match="cannot be forced in the format 'none'"):
        random_model.chat(USER, tool_choice="stop", tool_format="none", **options)
    wrong = {"name": "g", "parameters": {"type": "object", "properties": {"x": {"uniqueItems": True}}}}
    with pytest.raises(ArgumentError, match=r"calls of the tool 'g' cannot be forced: .*'uniqueItems' is not"):
        random_model.chat(USER, tools=[wrong], tool_choice="g")
    with pytest.raises(ArgumentTypeError, match=r"\['properties'\] must be a dict, not int"):
        random_model.chat(USER, tools=[{"name": "g", "parameters": {"properties": 2}}])


def test_candidates_have_ids_of_their_own(random_model: llamac.Model) -> None:
    options: dict[str, Any] = {"tools": TOOLS[1:], "tool_choice": "required", "seed": 5, "context": 160}
    ways: list[dict[str, Any]] = [{"n": 3}, {"n": 2, "best_of": 3}]
    for way in ways:
        found = random_model.chat(USER, max_tokens=120, parallel_tool_calls=False, **way, **options)
        ids = [call.id for choice in found.choices if choice.message for call in choice.message.tool_calls]
        assert len(set(ids)) == len(ids) == way["n"]
    third = random_model.chat(USER, max_tokens=120, parallel_tool_calls=False, candidate=2, **options).message
    several = random_model.chat(USER, max_tokens=120, parallel_tool_calls=False, n=3, **options)
    assert third == several.others[1].message  # and the same ids when a candidate is generated again


def test_sequences_of_a_beam_search_have_ids_of_their_own(answering: Callable[..., llamac.Model]) -> None:
    found = answering(ANSWER).chat(USER, tools=[f], n=2, beam_width=2, max_tokens=len(ANSWER))
    ids = [call.id for choice in found.choices if choice.message for call in choice.message.tool_calls]
    assert len(set(ids)) == len(ids) == 2


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("required", "tool_calls"),
        ("stop", "stop"),
        ({"type": "function", "function": {"name": "stop"}}, "stop"),
    ],
)
def test_a_call_that_was_named_ends_with_stop_as_in_openais_api(
    random_model: llamac.Model, choice: Any, reason: str
) -> None:
    options: dict[str, Any] = {"tools": TOOLS[1:], "parallel_tool_calls": False, "max_tokens": 120, "seed": 1}
    found = random_model.chat(USER, tool_choice=choice, **options)
    assert completion_body("chat", found, "m", "s", random_model)["choices"][0]["finish_reason"] == reason


def test_a_response_of_openais_api_has_the_calls(answering: Callable[..., llamac.Model]) -> None:
    model = answering(ANSWER)
    completion = model.chat(USER, tools=[f])
    [choice] = completion_body("chat", completion, "m", "s", model)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
