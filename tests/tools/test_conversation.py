"""The roles of messages: those of OpenAI's API, those that a chat template names, and no others."""

from __future__ import annotations

from typing import Any

import pytest
from chat_samples import TEMPLATES

from builders import checkpoint, llama_config, write_model
from llamac import ArgumentError, ArgumentTypeError, load
from llamac.openai.errors import InvalidRequestError
from llamac.server.responses_request import translate as translate_response
from llamac.tools.conversation import ROLES, prepared

ANY_ROLE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
EXPECTED = (
    "messages[1].role is 'asistant', expected 'system', 'developer', 'user', 'assistant', 'tool' or 'function', or a "
    "role that the model's chat template names; did you mean 'assistant'?"
)


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
    assert str(caught.value) == "input[1].role is 'asistant', expected user or assistant or system or developer"
