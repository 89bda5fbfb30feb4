"""What a conversation says is in its prompt, whatever its template does: constructs of published templates."""

# ruff: noqa: RUF001  # the names of DeepSeek's tokens

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from chat_samples import TEMPLATES

from llamac.engine.generation.reading import format_of
from llamac.text import chat_process
from llamac.text.chat import ChatTemplate
from llamac.tools.conversation import prepared
from llamac.tools.formats import format_named
from llamac.tools.message import Message, ToolCall

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Looks", "parameters": PARAMETERS}}]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
SYSTEM, USER, AGAIN = (
    {"role": role, "content": text} for role, text in (("system", "S"), ("user", "U"), ("user", "V"))
)
ANSWER = {"role": "assistant", "content": "A"}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": "rain"}
TEXTS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def called(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": [CALL]}


def prompt(template: str, messages: list[Any], tools: Any = None) -> str:
    ready: Any = prepared(messages, template, tools)
    return ChatTemplate(template, TOKENS).render(ready, tools=tools)


# ---- calls without a text, and beside one

ARGUMENTS = "{{ call.function.arguments | tojson }}"
CALLS = "{% for call in m.tool_calls %}<{{ call.function.name }}>" + ARGUMENTS + "{% endfor %}"
JOINED = "{% for call in m.tool_calls %}{{ '<' + call.function.name + '>' + call.function.arguments }}{% endfor %}"
BESIDE = {
    "splits the content": "{{ m.content.split('</think>')[-1] }}" + CALLS,
    "splits it, and asks whether it is none": (
        "{% set c = m.content %}{% if m.role == 'assistant' and '</think>' in c %}{% endif %}"
        "{% if c is none %}{% else %}{{ c }}{% endif %}" + JOINED
    ),
    "needs none": "{% if m.content is none %}" + JOINED + "{% else %}{{ m.content }}{% endif %}",
    "needs a first part": (
        "{% if m.tool_calls and not m.content[0].text %}" + CALLS + "{% else %}{{ m.content[0:] }}{% endif %}"
    ),
    "writes one of the two": "{% if m.tool_calls %}" + CALLS + "{% else %}{{ m.content }}{% endif %}",
    "writes None": "{{ m.content }}" + CALLS,
}


def beside(name: str) -> str:
    return "{% for m in messages %}[{{ m.role }}]" + BESIDE[name] + "{% if m.role == 'tool' %}!{% endif %}{% endfor %}"


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("content", [None, ""])
def test_calls_without_a_text_are_written(name: str, content: str | None) -> None:
    """Message.content is None beside calls, and servers send an empty text."""
    expected = '[user]U[assistant]<weather>{"city": "Oslo"}[tool]rain!'
    assert prompt(beside(name), [USER, called(content), RESULT]) == expected
    message = Message(None, tool_calls=[ToolCall("abcdefghi", "weather", '{"city": "Oslo"}')])
    assert prompt(beside(name), [USER, message, RESULT]) == expected


@pytest.mark.parametrize("name", BESIDE)
def test_calls_beside_a_text_are_written(name: str) -> None:
    written = prompt(beside(name), [USER, called("T"), RESULT, ANSWER, AGAIN])
    expected = '[user]U[assistant]T<weather>{"city": "Oslo"}[tool]rain![assistant]A[user]V'
    assert written.replace("T[assistant]<", "T<") == expected


def test_a_continued_message_with_calls_changes_no_other_conversation() -> None:
    template = beside("needs a first part")
    chat: list[Any] = [USER, called("")]
    written = ChatTemplate(template).render(chat)
    ChatTemplate(template).render(chat, continue_final_message=True)
    assert ChatTemplate(template).render(chat) == written
    assert ChatTemplate(template + "{# probed later #}").render(chat) == written


def test_calls_are_text_where_a_template_refuses_a_second_message_for_them() -> None:
    template = (
        "{% for m in messages %}{% if not loop.first and m.role == messages[loop.index0 - 1].role %}"
        "{{ raise_exception('no two messages of a role') }}{% endif %}[{{ m.role }}]"
        "{% if m.tool_calls %}" + CALLS + "{% else %}{{ m.content }}{% endif %}{% endfor %}{# tool #}"
    )
    written = prompt(template, [USER, called("T"), RESULT, ANSWER, AGAIN])
    assert '[assistant]T\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in written
    assert prompt(template, [USER, called("")]) == '[user]U[assistant]<weather>{"city": "Oslo"}'


def in_harmony(channel: str, text: str) -> str:
    """A message of gpt-oss, or its call of a function and the result."""
    if channel == "call":
        return f"{in_harmony(f'commentary to=functions.{text} <|constrain|>json', '{}')[:-7]}<|call|>"
    if channel == "result":
        name, result = text.split("=")
        return f'<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"{result}"<|end|>'
    return f"<|start|>assistant<|channel|>{channel}<|message|>{text}<|end|>"


def harmony_step(name: str, said: dict[str, Any]) -> list[dict[str, Any]]:
    call = {"id": f"call{name}", "type": "function", "function": {"name": name, "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": f"call{name}", "content": f"result of {name}"}
    return [{"role": "assistant", "content": None, **said, "tool_calls": [call]}, result]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_the_thoughts_of_a_turn_stay_beside_its_calls_until_its_answer(key: str) -> None:
    """gpt-oss's template drops what it reads beside calls once an answer follows, and takes a text for an answer."""
    template = TEMPLATES["harmony"]
    turn = [
        USER,
        *harmony_step("f", {key: "T1"}),
        *harmony_step("g", {key: "T2", "content": "C2"}),
        *harmony_step("h", {"content": "C3"}),
    ]
    calls = [in_harmony("call", name) + in_harmony("result", f"{name}=result of {name}") for name in "fgh"]
    thoughts = [in_harmony("analysis", text) for text in ("T1", "T2\nC2", "C3")]
    user, begin = "<|start|>user<|message|>{}<|end|>", "<|start|>assistant"
    steps = "".join(thought + call for thought, call in zip(thoughts, calls, strict=True))
    assert prompt(template, turn).partition("<|end|>")[2] == user.format("U") + steps + begin
    later = [*turn, ANSWER, AGAIN]
    answered = user.format("U") + "".join(calls) + in_harmony("final", "A") + user.format("V")
    assert prompt(template, later).partition("<|end|>")[2] == answered + begin
    (called, first), (other, second) = harmony_step("f", {key: "T4", "content": "C4"}), harmony_step("g", {})
    again = [*later, {**called, "tool_calls": called["tool_calls"] + other["tool_calls"]}, second, first]
    assert prompt(template, again).partition("<|end|>")[2] == (
        answered + in_harmony("analysis", "T4\nC4") + calls[0] + calls[1] + begin
    )


def test_several_calls_are_several_messages_where_a_template_accepts_only_one() -> None:
    """Llama 3's templates do, but a model can write more."""
    single = "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    template = beside("writes one of the two").replace("{% if m.tool_calls %}", "{% if m.tool_calls %}" + single)
    other = {**CALL, "id": "bcdefghij", "function": {"name": "time", "arguments": "{}"}}
    both, noon = (
        {**called("T"), "tool_calls": [CALL, other]},
        {**RESULT, "tool_call_id": "bcdefghij", "content": "noon"},
    )
    first, second = '[assistant]<weather>{"city": "Oslo"}', "[assistant]<time>{}"
    assert prompt(template, [USER, both]) == f"[user]U[assistant]T{first}{second}"
    written = prompt(beside("writes one of the two"), [USER, {**both, "content": ""}, RESULT, noon])
    assert written == f"[user]U{first}{second.removeprefix('[assistant]')}[tool]rain![tool]noon!"
    expected = f"[user]U[assistant]T{first}[tool]rain!{second}[tool]noon!"
    assert prompt(template, [USER, both, RESULT, noon]) == expected
    assert prompt(template, [USER, both, noon, RESULT, AGAIN]) == f"{expected}[user]V"
    assert prompt(template, [USER, both, RESULT, noon, RESULT]) == expected.replace("rain!", "rain![tool]rain!")
    assert prompt(template, [USER, both, noon]) == f"[user]U[assistant]T{first}{second}[tool]noon!"


@pytest.mark.parametrize("name", [None, "", "call"])
def test_results_whose_ids_name_no_call_follow_the_calls_in_order(name: str | None) -> None:
    calls = [{"id": name, "type": "function", "function": {"name": each, "arguments": "{}"}} for each in "fg"]
    results = [{"role": "tool", "tool_call_id": name, "content": each} for each in ("1", "2", "3")]
    written = prompt(TEMPLATES["harmony"], [USER, {**called(None), "tool_calls": calls}, *results])
    f, g, more = (in_harmony("result", each) for each in ("f=1", "g=2", "g=3"))
    assert written.partition("U<|end|>")[2] == (
        in_harmony("call", "f") + f + in_harmony("call", "g") + g + more + "<|start|>assistant"
    )


# ---- tools

DEEPSEEK = (
    "{{ bos_token }}{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}"
    "{% elif m.tool_calls %}{% for call in m.tool_calls %}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
    "{{ call['function']['name'] + '<｜tool▁sep｜>' + call['function']['arguments'] }}<｜tool▁call▁end｜>{% endfor %}"
    "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content }}{% endif %}{% endfor %}"
)
PHI4 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% if m.role == 'system' and 'tools' in m %}"
    "{{ '<|tool|>' + m['tools'] + '<|/tool|>' }}{% endif %}{% endfor %}"
)
GLM4 = (
    "{% for m in messages %}{% if m['tools'] is defined %}{% set tools = m['tools'] %}<|system|>"
    "{% for tool in tools %}{{ tool['function'] | tojson }}{% endfor %}{% endif %}"
    "{% if m['content'] %}<|{{ m['role'] }}|>{{ m['content'] }}{% endif %}{% endfor %}"
)
FUNCTION = json.dumps(TOOLS[0]["function"])


def test_tools_are_described_in_the_models_format_where_its_template_lists_none() -> None:
    expected = (
        "<s>S\n\nYou can call functions to answer the user. The functions are described between <tools> and </tools>:\n"
        f"<tools>\n{json.dumps(TOOLS[0])}\n</tools>\nTo call a function, write its name and arguments as in this call "
        "of a function NAME:\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>"
        '{"PARAMETER": "VALUE"}<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜User｜>U'
    )
    assert prompt(DEEPSEEK, [SYSTEM, USER], TOOLS) == expected
    assert prompt(DEEPSEEK, [USER], TOOLS) == expected.replace("S\n\n", "")


def test_tools_are_described_in_a_system_message_that_has_no_content() -> None:
    described = prompt(TEXTS, [USER], TOOLS)
    assert described.startswith("[system]You can call functions")
    assert prompt(TEXTS, [{"role": "system", "tools": "[]"}, USER], TOOLS) == described


def test_the_tokens_of_the_described_format_are_special_and_their_names_in_tools_are_not() -> None:
    name = "<｜tool▁sep｜>"
    ready: Any = prepared([USER], DEEPSEEK, [{"type": "function", "function": {"name": name}}])
    runs = ChatTemplate(DEEPSEEK, TOKENS).render_runs(ready, [name])
    assert [run.text.count(name) for run in runs if run.parse_special and name in run.text] == [1]
    assert sum(run.text.count(name) for run in runs) == 2


@pytest.mark.parametrize(
    ("template", "form"),
    [(DEEPSEEK, "deepseek"), (PHI4 + "{# <|tool_call|><|/tool_call|> #}", "phi4-mini"), (TEXTS, "hermes")],
)
def test_calls_are_read_in_the_format_that_the_description_has(template: str, form: str) -> None:
    model: Any = SimpleNamespace(response_format=None, chat_template=ChatTemplate(template, TOKENS))
    found = format_of(model, None, template, has_tools=True)
    assert found is not None
    assert found.name == form


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'),
        ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]'),
        ("gemma", None),
        ("none", None),
    ],
)
def test_tools_are_described_and_calls_written_in_the_format_that_the_request_names(
    name: str, written: str | None
) -> None:
    """Gemma's format has Hermes' calls, too, and `none` has no calls: the description is as without a name."""
    template = "{{ bos_token }}" + TEXTS + "{# <｜tool▁call▁begin｜> #}"
    chat = [USER, called(""), RESULT]
    plain: Any = prepared(chat, template, TOOLS)
    named: Any = prepared(chat, template, TOOLS, form=format_named(name))
    if written is None:
        assert named == plain
        return
    assert named[2]["content"] == written
    example = written.replace("weather", "NAME").replace('{"city": "Oslo"}', '{"PARAMETER": "VALUE"}')
    if name == "hermes":
        example = '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
    assert named[0]["content"].endswith(example)
    assert "tool▁call▁begin" not in named[0]["content"]


def test_tools_are_in_the_system_message_where_the_template_reads_them_there() -> None:
    assert prompt(PHI4, [SYSTEM, USER], TOOLS) == f"<|system|>S<|tool|>[{FUNCTION}]<|/tool|><|user|>U"
    assert prompt(PHI4, [USER], TOOLS) == f"<|system|><|tool|>[{FUNCTION}]<|/tool|><|user|>U"
    assert prompt(GLM4, [SYSTEM, USER], TOOLS) == f"<|system|>{FUNCTION}<|system|>S<|user|>U"
    assert prompt(GLM4, [USER], TOOLS) == f"<|system|>{FUNCTION}<|user|>U"


# ---- system messages

ROLES = (
    "{% for m in messages %}{% if m.role == 'user' %}[U]{{ m.content }}"
    "{% elif m.role == 'assistant' %}[A]{{ m.content }}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('in turns') }}{% endif %}{% endfor %}"
)
DROPS = ROLES + "{% endif %}{% endfor %}"
REFUSES = ALTERNATING + ROLES + "{% endif %}{% endfor %}"
FIRST_ONLY = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}" + DROPS
LAST_USER = (
    "{% for m in messages %}{% if m.role == 'user' and loop.last and messages[0].role == 'system' %}"
    "{{ messages[0].content }}{% endif %}{% if m.role == 'tool' %}[R]{{ m.content }}"
    "{% elif m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [DROPS, REFUSES])
def test_a_system_text_is_the_beginning_of_what_the_user_says_where_it_would_be_dropped(template: str) -> None:
    assert prompt(template, [SYSTEM, USER, ANSWER, AGAIN]) == "[U]S\n\nU[A]A[U]V"
    assert prompt(template, [USER, ANSWER, SYSTEM, AGAIN]) == "[U]U[A]A[U]S\n\nV"
    assert prompt(template, [SYSTEM]) == "[U]S"
    assert prompt(template, [USER, SYSTEM, ANSWER, AGAIN]) == "[U]U\n\nS[A]A[U]V"
    parts = [{"type": "text", "text": "U"}, {"type": "image"}]
    reading = template.replace(
        "{{ m.content }}", "{{ m.content if m.content is string else m.content | map(attribute='text') | join('|') }}"
    )
    assert prompt(reading, [SYSTEM, {"role": "user", "content": parts}]) == "[U]S|U|"
    described = prompt(template, [SYSTEM, USER], TOOLS)
    assert described.startswith("[U]S\n\nYou can call functions")
    assert described.endswith("</tool_call>\n\nU")


def test_a_system_message_stays_where_it_is_read() -> None:
    assert prompt(FIRST_ONLY, [SYSTEM, USER, ANSWER, SYSTEM, AGAIN]) == "S[U]U[A]A[U]S\n\nV"
    assert prompt(FIRST_ONLY, [SYSTEM, SYSTEM, USER]) == "S[U]S\n\nU"
    assert prompt(TEXTS, [SYSTEM, USER, ANSWER, SYSTEM, AGAIN]) == "[system]S[user]U[assistant]A[system]S[user]V"
    assert prompt(LAST_USER, [SYSTEM, USER]) == "S[user]U"
    assert prompt(LAST_USER, [SYSTEM, USER, ANSWER, RESULT]) == "[user]S\n\nU[assistant]A[R]rain"


def test_a_template_can_read_a_system_text_only_as_a_part() -> None:
    """Gemma 3's as first published, which tests the type of every other content."""
    template = (
        "{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'][0]['text'] + '|' %}"
        "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}[{{ m.role }}]{{ first if loop.first }}{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for part in m.content %}{{ part['text'] }}{% endfor %}{% endif %}{% endfor %}"
    )
    assert prompt(template, [SYSTEM, USER]) == "[user]S|U"
    assert prompt(template, [USER], TOOLS).startswith("[user]You can call functions")


# ---- parts

PART_READERS = {
    "documents": TEXTS.replace("{{ m.content }}", "{{ '' + m.content }}")
    + "{% for d in documents or [] %}{{ d['text'] }}{% endfor %}",
    "JSON": TEXTS.replace("{{ m.content }}", "{{ m.content if m.content is string else m.content | tojson }}")
    + "{# .text #}",
}


@pytest.mark.parametrize("name", PART_READERS)
def test_parts_are_one_text_unless_the_template_reads_the_parts_of_contents(name: str) -> None:
    split = [
        {"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in (SYSTEM, USER, ANSWER, AGAIN)
    ]
    assert prompt(PART_READERS[name], split) == "[system]S[user]U[assistant]A[user]V"


def test_each_role_has_the_contents_that_it_is_read_with() -> None:
    parts = "{% for part in m.content %}{{ part.text }}{% endfor %}"
    template = (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'user' %}{% if m.content is string %}{{ m.content }}"
        "{% else %}"
        + parts
        + "{% endif %}{% elif m.role == 'assistant' %}"
        + parts
        + CALLS
        + "{% elif m.role == 'tool' %}"
        "{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}{% endfor %}"
    )
    text = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": role, "content": text} for role in ("system", "user", "assistant")]
    written = '[system]a\nb[user]ab[assistant]ab[assistant]<weather>{"city": "Oslo"}[tool]"a\\nb"'
    assert prompt(template, [*messages, called(""), {**RESULT, "content": text}]) == written
    assert prompt(template, [SYSTEM, USER, ANSWER]) == "[system]S[user]U[assistant]A"


# ---- results

GRANITE = (
    "{% if tools %}{{ tools }}{% endif %}"
    + ROLES
    + "{% elif m.role == 'NAME' %}[R]{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("role", ["tool_response", "observation", "tool"])
def test_results_have_the_role_with_which_a_template_reads_them(role: str) -> None:
    assert prompt(GRANITE.replace("NAME", role), [USER, ANSWER, RESULT]) == "[U]U[A]A[R]rain"


def test_results_are_said_by_the_user_where_a_template_reads_none() -> None:
    written = "[U]U[A]A[U]<tool_response>\nrain\n</tool_response>"
    assert prompt(GRANITE.replace("NAME", "x"), [USER, ANSWER, RESULT]) == written
    assert prompt(REFUSES, [USER, ANSWER, RESULT, AGAIN]) == f"{written}\nV"
    assert prompt(DROPS, [USER, ANSWER, RESULT, AGAIN]) == f"{written}[U]V"


def test_a_key_of_calls_is_not_the_role_function() -> None:
    function = {**RESULT, "role": "function"}
    assert prompt(DEEPSEEK, [USER, called(""), function]) == prompt(DEEPSEEK, [USER, called(""), RESULT])
    assert "rain" in prompt(DEEPSEEK, [USER, called(""), function])
    named = DEEPSEEK.replace(
        "{% elif m.tool_calls %}", "{% elif m.role == 'function' %}<F>{{ m.content }}{% elif m.tool_calls %}"
    )
    assert prompt(named, [USER, called(""), function]).endswith("<F>rain")
    assert prompt(LAST_USER + "{# 'function' #}", [USER, ANSWER, function]).endswith("[R]rain")


# ---- cost


def test_a_template_is_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    template = DEEPSEEK + "{# asked once #}"
    asked: list[str] = []
    render = chat_process.try_render

    def counted(template: str, variables: dict[str, Any]) -> str:
        asked.append(template)
        return render(template, variables)

    monkeypatch.setattr(chat_process, "try_render", counted)
    talk = [SYSTEM, USER, called("T"), RESULT, ANSWER, AGAIN]
    first = prompt(template, talk, TOOLS)
    count = len(asked)
    assert 0 < count < 40
    assert prompt(template, talk, TOOLS) == first
    assert len(asked) == count
    plain = TEXTS + "{# asked for nothing #}"
    prompt(plain, [USER, ANSWER])
    assert len(asked) == count
