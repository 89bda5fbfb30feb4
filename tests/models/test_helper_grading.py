"""The judge of `helper`'s answers, on answers written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from llamac.models.training.helper.conversation import Check
from llamac.models.training.helper.grading import contains, fault, parsed

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD: dict[str, Any] = {"name": "add", "arguments": {"a": 1}}


@pytest.mark.parametrize(
    ("text", "check"),
    [
        ("Ann lives in Rome.", Check(has=("rome",), lacks=("Paris",))),
        ("Yes.", Check(text="Yes.")),
        ('{"a": 1, "b": null}', Check(json={"a": 1, "b": None})),
        (CALL, Check(calls=(ADD,))),
        (f"{CALL}\n{CALL}", Check(calls=(ADD, ADD))),
        ("<think>\n1 + 1 = 2.\n</think>\n\n2.", Check(has=("2",), thinks=True)),
    ],
)
def test_obeys(text: str, check: Check) -> None:
    assert fault(text, check) is None


@pytest.mark.parametrize(
    ("text", "check", "message"),
    [
        ("Ann lives in Romeo.", Check(has=("Rome",)), "'Rome' is not in"),
        ("It costs 120.", Check(has=("12",)), "'12' is not in"),
        ("Rome or Paris.", Check(has=("Rome",), lacks=("paris",)), "'paris' is in"),
        ("No.", Check(text="Yes."), "expected 'Yes.'"),
        ('{"a": 1', Check(json={"a": 1}), "not JSON"),
        ('{"a": true}', Check(json={"a": 1}), "expected"),
        ('{"b": 2, "a": 1}', Check(json={"a": 1, "b": 2}), "expected"),
        ("Hello!", Check(calls=(ADD,)), r"calls are \[\]"),
        (CALL, Check(has=("hello",)), "calls are"),
        (CALL.replace("1", "2"), Check(calls=(ADD,)), "calls are"),
        (CALL.replace("}}", "}"), Check(calls=(ADD,)), "calls are"),
        ("Sure. " + CALL, Check(calls=(ADD,)), "text beside the calls"),
        ("2.", Check(has=("2",), thinks=True), "no reasoning"),
        ("<think>x</think>2.", Check(has=("2",)), "nobody asked for"),
    ],
)
def test_does_not_obey(text: str, check: Check, message: str) -> None:
    problem = fault(text, check)
    assert problem is not None
    import re

    assert re.search(message, problem)


def test_a_turn_without_an_end_does_not_obey() -> None:
    assert fault("Yes.", Check(text="Yes."), ended=False) == "the turn has no end"


def test_a_turn_is_taken_apart() -> None:
    turn = parsed(f"<think>\nadd\n</think>\n\nI add. {CALL}\n<tool_call>\nadd\n</tool_call>")
    assert (turn.thought, turn.answer, turn.calls) == ("add", "I add.", [ADD, None])


def test_words_are_found_as_wholes() -> None:
    assert contains("the id is kr-40.", "KR-40")
    assert contains("that did not work: no answer.", "no answer")
    assert not contains("the id is kr-401.", "KR-40")
