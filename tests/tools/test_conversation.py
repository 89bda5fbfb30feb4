"""Messages as templates read them: roles that are known, and calls and tools as text where a template has none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_samples import TEMPLATES

from builders import checkpoint, llama_config, write_model
from llamac import ArgumentError, ArgumentTypeError, load
from llamac.errors import ChatTemplateError
from llamac.openai.errors import InvalidRequestError
from llamac.server.responses_request import translate as translate_response
from llamac.text.chat import ChatTemplate
from llamac.tools.conversation import ROLES, prepared
from llamac.tools.formats import FORMATS
from llamac.tools.parser import MessageParser
from llamac.tools.writing import written_calls

ANY_ROLE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
EXPECTED = (
    "messages[1].role is 'asistant', expected 'system', 'developer', 'user', 'assistant', 'tool' or 'function', or a "
    "role that the model's chat template names; did you mean 'assistant'?"
)


def ready(messages: object, template: str, tools: Any = None) -> Any:
    """The prepared messages of a conversation, with the type that they have."""
    return prepared(messages, template, tools)


def roles_of(template: str, *roles: Any) -> list[str]:
    found: Any = prepared([{"role": role, "content": "a"} for role in roles], template, None)
    return [message["role"] for message in found]


@pytest.mark.parametrize("template", [ANY_ROLE, *TEMPLATES.values()], ids=["any", *TEMPLATES])
def test_a_misspelt_role_is_refused(template: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        roles_of(template, "user", "asistant")
    assert str(caught.value) == EXPECTED


@pytest.mark.parametrize("role", ["User", "", "'", "narrator"])
def test_a_role_is_compared_exactly(role: str) -> None:
    with pytest.raises(ArgumentError, match=r"messages\[0\].role is "):
        roles_of(TEMPLATES["qwen"], role)


def test_a_message_has_a_role() -> None:
    for message in ({"content": "a"}, {"role": None, "content": "a"}):
        with pytest.raises(ArgumentError, match=r"messages\[0\] has no 'role': expected one of 'system', "):
            prepared([message], ANY_ROLE, None)
    with pytest.raises(ArgumentTypeError, match=r"messages\[0\].role must be a str, not int"):
        roles_of(ANY_ROLE, 5)


@pytest.mark.parametrize("template", [ANY_ROLE, TEMPLATES["qwen"]])
def test_a_message_has_content_or_something_else_to_say(template: str) -> None:
    user = {"role": "user", "content": ""}
    for message in ({"role": "user"}, {"role": "assistant", "content": None}, {"role": "tool", "tool_call_id": "1"}):
        with pytest.raises(ArgumentError, match=r"^messages\[1\] has no 'content': expected a str or a list of parts$"):
            prepared([user, message], template, None)
    assert prepared([user, {"role": "assistant", "reasoning_content": "So"}], template, None)


def test_a_template_that_reads_only_texts_gets_the_parts_as_one() -> None:
    def contents(template: str, *given: Any) -> list[Any]:
        found: Any = prepared([{"role": "user", "content": content} for content in given], template, None)
        return [message["content"] for message in found]

    parts = [{"type": "text", "text": "b"}, {"text": "c"}]
    assert contents(ANY_ROLE, "a", parts, ["d"]) == ["a", "b\nc", ["d"]]
    assert contents(ANY_ROLE + "{{ part['text'] }}", parts) == [parts]
    with pytest.raises(ArgumentTypeError, match=r"messages\[1\]\.content must be a str or a list of parts, not int"):
        contents(ANY_ROLE, "a", 5)
    with pytest.raises(ArgumentError, match=r"messages\[0\]\.content\[1\] is a part without a text, and the model's"):
        contents(ANY_ROLE, [{"text": "a"}, {"type": "image_url"}])


def test_a_template_can_have_roles_of_its_own() -> None:
    named = "{% if m.role in [\"critic\", 'developer', 'function'] %}{% endif %}{# tool_calls #}"
    assert roles_of(named, "critic", "developer", "function") == ["critic", "developer", "function"]
    assert roles_of(TEMPLATES["llama31"], "ipython", "tool") == ["ipython", "tool"]


def test_roles_that_a_template_does_not_know_get_the_names_that_it_knows() -> None:
    template = TEMPLATES["qwen"]  # it knows tools, but neither of the two
    assert roles_of(template, *ROLES) == ["system", "system", "user", "assistant", "tool", "tool"]


@pytest.mark.parametrize("method", ["chat", "chat_ids", "chat_prompt", "explain"])
def test_every_call_with_a_conversation_refuses_it(method: str, tmp_path: Any) -> None:
    made = checkpoint(llama_config())
    made.chat_template = ANY_ROLE
    with (
        load(write_model(tmp_path / "chat.bin", made)) as model,
        pytest.raises(ArgumentError, match=r"messages\[1\].role is 'asistant'"),
    ):
        getattr(model, method)([{"role": "user", "content": "a"}, {"role": "asistant", "content": "b"}])


def test_a_response_has_the_roles_of_its_api() -> None:
    items = [{"role": "user", "content": "a"}, {"role": "asistant", "content": "b"}]
    with pytest.raises(InvalidRequestError) as caught:
        translate_response({"input": items})
    assert (caught.value.param, caught.value.code) == ("input[1].role", "invalid_value")
    assert str(caught.value) == "input[1].role is 'asistant', expected user, assistant, system or developer"


CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo", "a": [true, {"b": null}]}'}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "Hm.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "sunny"},
]
WRITTEN = {
    "lfm2": '<|tool_call_start|>[{0}, {0}]<|tool_call_end|>'.format('weather(city="Oslo", a=[True, {"b": None}])'),
    "granite": '<|tool_call|>[{0}, {0}]'.format(
        '{"name": "weather", "arguments": {"city": "Oslo", "a": [true, {"b": null}]}}'
    ),
    "qwen3-coder": "{0}\n{0}".format(
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=a>\n"
        '[true, {"b": null}]\n</parameter>\n</function>\n</tool_call>'
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ tools }}<|tool_list_start|>", "lfm2"),
        ("{{ tools }}<|tool_call|>", "granite"),
        ("{{ tools }}<function=<parameter=", "qwen3-coder"),
    ],
)
def test_a_template_that_writes_no_calls_gets_them_as_text(template: str, form: str) -> None:
    found: Any = prepared(TALK, template, None)
    assert found == [TALK[0], {"role": "assistant", "content": f"Hm.\n{WRITTEN[form]}"}, TALK[2]]
    parser = MessageParser(FORMATS[form], schemas={"weather": {"properties": {"a": {"type": "array"}}}})
    parser.push(found[1]["content"])
    parser.finish()
    assert parser.message.content == "Hm."
    assert [call.parsed for call in parser.message.tool_calls] == 2 * [{"city": "Oslo", "a": [True, {"b": None}]}]


@pytest.mark.parametrize("form", [name for name, each in FORMATS.items() if each.writing.call])
def test_written_calls_are_parsed_back(form: str) -> None:
    calls = [{"function": {"name": f"f{i}", "arguments": {"x": 'a"b', "y": i, "z": None}}} for i in range(2)]
    calls = calls if FORMATS[form].writing.between is not None else calls[:1]
    schema = {"properties": {"x": {"type": "string"}, "y": {"type": "integer"}, "z": {"type": "null"}}}
    parser = MessageParser(FORMATS[form], schemas={"f0": schema, "f1": schema})
    parser.push(written_calls(FORMATS[form], calls))
    parser.finish()
    found = [{"function": {"name": each.name, "arguments": each.parsed}} for each in parser.message.tool_calls]
    assert found == calls
    assert parser.message.content is None


def test_the_tokens_around_written_calls_are_special_and_their_names_in_data_are_not() -> None:
    start, end = names = ["<|tool_call_start|>", "<|tool_call_end|>"]
    call = {"function": {"name": f"f{start}", "arguments": {"a": f"x{end}", "b": f"{start}[]{end}"}}}
    asked = {"role": "user", "content": f"{start}[f()]{end}"}
    answered = {"role": "assistant", "content": f"Hm{end}.", "tool_calls": [call, call]}
    template = ChatTemplate(ANY_ROLE + "{# tools <|tool_list_start|> #}")
    listed: Any = prepared([asked, answered], template.choose(), None)
    written = f'f{start}(a="x{end}", b="{start}[]{end}")'
    text = f"[user]{start}[f()]{end}[assistant]Hm{end}.\n{start}[{written}, {written}]{end}"
    for continues in (False, True):
        assert template.render(listed, continue_final_message=continues) == text
        runs = template.render_runs(listed, names, continue_final_message=continues)
        assert "".join(run.text for run in runs) == text
        special = "".join(run.text if run.parse_special else "-" * len(run.text) for run in runs)
        assert (special.count(start), special.index(start)) == (1, text.index(f"\n{start}[f") + 1)
        assert (special.count(end), special.index(end)) == (1, len(text) - len(end))
    # the same text from elsewhere is data
    assert not any(
        run.parse_special and name in run.text
        for run in template.render_runs([{**listed[1], "content": str(listed[1]["content"])}], names)
        for name in names
    )


WRITING = "{# tools <|tool_list_start|> #}"


@pytest.mark.parametrize(
    "changed", ["c[:-1]", "c[:6]", "c[-5:]", "c | list", "c | tojson(ensure_ascii=true)", "c | urlencode", "[c]"]
)
def test_a_template_that_changes_written_calls_is_an_error(changed: str) -> None:
    """Else the prompt would have parts of what stands for the calls while the template is rendered."""
    template = ChatTemplate("{% set c = messages[0].content %}{{ " + changed + " }}" + WRITING)
    listed: Any = prepared([{"role": "assistant", "content": "Hm", "tool_calls": [CALL]}], template.choose(), None)
    expected = "changes or cuts the tool calls of earlier messages.* write them into the content"
    with pytest.raises(ChatTemplateError, match=expected):
        template.render(listed)
    with pytest.raises(ChatTemplateError, match=expected):
        template.render_runs(listed, [])


def test_private_characters_of_the_caller_are_no_parts_of_written_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamac.text.marks.secrets.randbelow", lambda count: 1)
    template = ChatTemplate("{{ messages[0].content }}{{ note | tojson(ensure_ascii=true) }}{{ note }}" + WRITING)
    listed: Any = prepared([{"role": "assistant", "tool_calls": [CALL]}], template.choose(), None)
    icon = "\U000f0001"
    assert template.render(listed, note=icon) == f"{listed[0]['content']}{json.dumps(icon)}{icon}"


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_only_the_models_messages_have_calls(role: str) -> None:
    """The tokens around calls are special, and nobody else's message can have them."""
    message = {"role": role, "content": "Hi", "tool_calls": [CALL]}
    assert prepared([message], "{{ tools }}<|tool_call|>", None) == [message]


@pytest.mark.parametrize("calls", [[], (), None])
def test_a_message_without_calls_has_no_list_of_them(calls: Any) -> None:
    """Templates take any list for calls, and servers return empty ones."""
    message = {"role": "assistant", "content": "Hi"}
    for template in ("{{ tools }}<|tool_call|>", "{% if message.tool_calls is defined %}{% endif %}", ""):
        assert ready([{**message, "tool_calls": calls}], template, None) == [message]


EACH_CALL = "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls %}ARGUMENTS{% endfor %}{% endfor %}"
JOINING = EACH_CALL.replace("ARGUMENTS", "{{ '<sep>' + call['function']['arguments'] + '<end>' }}")
PIPED = EACH_CALL.replace("ARGUMENTS", "{{ '<sep>' + call['function']['arguments'] | tojson + '<end>' }}")
TESTING = EACH_CALL.replace("ARGUMENTS", "{% set a = call.function.arguments %}{{ a if a is string else a | tojson }}")


@pytest.mark.parametrize("missing", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": " \n"}])
@pytest.mark.parametrize("template", [JOINING, PIPED, TESTING])
def test_missing_arguments_are_empty(template: str, missing: dict[str, Any]) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", **missing}}
    for given in (call, call["function"]):
        [message] = ready([{"role": "assistant", "tool_calls": [given]}], template, None)
        [found] = message["tool_calls"]
        assert found.get("function", found)["arguments"] == ("{}" if template == JOINING else {})


@pytest.mark.parametrize(
    ("template", "of_text", "of_dict"),
    [(JOINING, '{"a": "é"}', '{"a": "é"}'), (PIPED, {"a": "é"}, {"a": "é"}), (TESTING, '{"a": "é"}', {"a": "é"})],
)
def test_arguments_are_text_where_a_template_joins_them_with_texts(template: str, of_text: Any, of_dict: Any) -> None:
    for arguments, expected in (('{"a": "é"}', of_text), ({"a": "é"}, of_dict)):
        call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
        [message] = ready([{"role": "assistant", "tool_calls": [call]}], template, None)
        assert message["tool_calls"][0]["function"]["arguments"] == expected


@pytest.mark.parametrize("content", [None, ""])
def test_calls_stand_where_a_template_asks_whether_there_is_content(content: str | None) -> None:
    """DeepSeek's templates write calls only beside a content that is none, which OpenAI's API has there."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    template = (
        "{% for message in messages %}{% if message['content'] is none %}"
        "{{ '<call>' + message['tool_calls'][0]['function']['arguments'] + '</call>' }}"
        "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    )
    talk: Any = [{"role": "user", "content": "?"}, {"role": "assistant", "content": content, "tool_calls": [call]}]
    assert ChatTemplate(template).render(ready(talk, template, None)) == "?<call>{}</call>"


def test_a_template_that_refuses_content_beside_reasoning_gets_both_as_reasoning() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    template = (
        "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}"
        '{{ raise_exception("Cannot pass both content and thinking in an assistant message with tool calls!") }}'
        "{% endif %}[{{ m.thinking }}|{{ m.content }}]{% for call in m.tool_calls %}{{ call.function.arguments }}"
        "{% endfor %}{% endfor %}"
    )
    said = {"role": "assistant", "content": "I look.", "reasoning_content": "hm"}
    both: Any = [{**said, "tool_calls": [call]}]
    assert ChatTemplate(template).render(ready(both, template, None)) == "[hm\nI look.|]{}"
    assert ChatTemplate(template).render(ready([said], template, None)) == "[hm|I look.]"


def test_what_a_user_adds_to_a_result_is_in_the_same_message_where_roles_must_alternate() -> None:
    talk = [*TALK, {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": "now?"}]}]
    refusing = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    found: Any = ready(talk, refusing, None)
    assert [message["role"] for message in found] == ["user", "assistant", "user"]
    assert found[-1]["content"] == "<tool_response>\nsunny\n</tool_response>\nAnd\nnow?"
    assert len(ready(talk, ANY_ROLE, None)) == 4


def test_parts_are_joined_with_what_is_added_to_them() -> None:
    parts = [{"type": "text", "text": "I"}, {"type": "text", "text": "look."}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    template = "{{ message.text }}"
    call: Any = ready([{"role": "assistant", "content": parts, "tool_calls": [CALL]}], template, None)
    assert str(call[0]["content"]).startswith("I\nlook.\n<tool_call>")
    result: Any = ready([{"role": "tool", "content": parts}], template, None)
    assert result[0]["content"] == "<tool_response>\nI\nlook.\n</tool_response>"
    system: Any = ready([{"role": "system", "content": parts}], template, tools)
    assert system[0]["content"].startswith("I\nlook.\n\n")
    assert len(system) == 1


def test_what_calls_lack_is_left_empty() -> None:
    calls: list[Any] = [5, {"function": None}, {"name": "f"}, {"name": "g", "arguments": "not JSON"}]
    assert written_calls(FORMATS["granite"], calls) == (
        '<|tool_call|>[{"name": "", "arguments": {}}, {"name": "", "arguments": {}}, {"name": "f", "arguments": {}}, '
        '{"name": "g", "arguments": not JSON}]'
    )


def test_results_in_a_row_are_one_message_and_tools_follow_the_system_message() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    results = [
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": {"a": 2}},
        {"role": "user", "content": "?"},
    ]
    found: Any = prepared([{"role": "system", "content": "Be kind."}, *results], "", tools)
    assert [message["role"] for message in found] == ["system", "user", "user"]
    assert found[0]["content"].startswith("Be kind.\n\n")
    assert '<tools>\n{"type": "function"' in found[0]["content"]
    assert found[1]["content"] == ('<tool_response>\n1\n</tool_response>\n<tool_response>\n{"a": 2}\n</tool_response>')


def test_tools_stand_in_the_first_message_where_a_template_refuses_system_messages() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    refusing = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    for template, roles in ((refusing, ["user", "assistant", "user"]), ("", ["system", "user", "assistant", "user"])):
        found: Any = prepared(TALK, template, tools)
        assert [message["role"] for message in found] == roles
        assert '<tools>\n{"type": "function"' in found[0]["content"]
        assert found[-1]["content"] == "<tool_response>\nsunny\n</tool_response>"
    assert prepared(TALK[:1], refusing, tools)[0]["content"].endswith("\n\nWeather?")  # type: ignore[index]
