"""The conversations of `helper`: the same everywhere, held-out words kept apart, answers found in the prompt."""

from __future__ import annotations

import hashlib
import json
import re
from itertools import pairwise
from typing import Any

import pytest

from llamac.models.training.helper import dice as dice_module
from llamac.models.training.helper import facts, functions, generator, passages, records, talk, thinking, tools, words
from llamac.models.training.helper.conversation import Conversation
from llamac.models.training.helper.dice import Dice, Pool, is_held_out
from llamac.models.training.helper.grading import fault
from llamac.models.training.helper.rendering import render

MODULES = (facts, functions, passages, records, talk, thinking, tools, words)
COUNT = 150  # conversations of each series that a test reads


@pytest.fixture(scope="module", params=[False, True], ids=["trained", "held_out"])
def series(request: pytest.FixtureRequest) -> list[Conversation]:
    return [generator.conversation(21, index, held_out=request.param, level=index % 3) for index in range(COUNT)]


def last_turn(conversation: Conversation) -> str:
    """What the model would have to write, without the end of the turn."""
    text = render(conversation).removeprefix(render(conversation, prompt_only=True))
    return text.removesuffix("<|im_end|>\n")


def test_a_conversation_depends_only_on_its_arguments() -> None:
    def texts(**options: Any) -> list[str]:
        return [render(generator.conversation(5, index, **options)) for index in range(40)]

    assert texts() == texts()
    assert len(set(texts(held_out=False)) & set(texts(held_out=True))) < 4
    assert texts(level=0) != texts(level=2)


def test_the_training_text_does_not_change() -> None:
    """A change of the generator makes another model: raise the digest with it and train again."""
    text = "\n".join(render(generator.conversation(1, index, level=index % 3)) for index in range(300))
    assert hashlib.sha256(text.encode()).hexdigest() == DIGEST


DIGEST = "25568d1f0c2e74091c95e1e65da38aefb30bd6278cf2ea468ff7ed8590f3e6aa"


def test_every_kind_and_skill_occurs() -> None:
    made = [generator.conversation(6, index, level=0) for index in range(600)]
    assert {each.skill for each in made} == set(generator.SKILLS)
    assert sum(weight for weight, _ in generator.MIX) == len(generator._CHOICES)


@pytest.mark.parametrize("kind", generator.KINDS, ids=lambda kind: kind.__name__)
def test_each_kind_obeys_itself(kind: Any) -> None:
    """The generated answer passes the check that judges a model's answer, and ends the conversation."""
    for index in range(30):
        made = generator.of_kind(kind, 7, index, held_out=index % 2 == 1, level=index % 3)
        assert made.skill in generator.SKILLS
        assert made.messages[-1]["role"] == "assistant"
        assert [each["role"] for each in made.messages].count("system") <= 1
        assert fault(last_turn(made), made.check) is None


def pools() -> list[Pool[Any]]:
    found: list[Pool[Any]] = []
    for module in MODULES:
        found += [each for each in vars(module).values() if isinstance(each, Pool)]
    for _, attributes in facts.KINDS:
        found += [pool for each in attributes for pool in (each.says, each.asks)]
    return found + [each.asks for each in functions.USUAL] + [each[3] for each in thinking.COMPARISONS]


def test_the_parts_of_each_pool_are_disjoint() -> None:
    every = pools()
    assert len(every) > 100
    for pool in every:
        assert pool.train
        assert pool.held_out
        assert set(pool.train).isdisjoint(pool.held_out)
    with pytest.raises(ValueError, match="at least 5 different"):
        Pool("a", "b", "a", "c", "d")


def test_invented_words_are_disjoint() -> None:
    words_of = {held_out: {Dice(8, index, held_out).coin() for index in range(400)} for held_out in (False, True)}
    assert words_of[False].isdisjoint(words_of[True])
    assert all(is_held_out(word) for word in words_of[True])
    assert not any(is_held_out(word) for word in words_of[False])


def test_held_out_conversations_use_held_out_names_and_phrases() -> None:
    names = set(words.FIRST_NAMES.train) - {"May"}
    phrases = {template.format(text="", question="").strip() for template in passages.AROUND.train}
    for index in range(COUNT):
        made = generator.of_kind(passages.answers, 22, index, held_out=True, level=0)
        text = render(made)
        assert names.isdisjoint(re.findall(r"\w+", text))
        asked = next(each["content"] for each in made.messages if each["role"] == "user")
        assert not any(len(phrase) > 10 and asked.startswith(phrase) for phrase in phrases)


def test_text_is_plain_english(series: list[Conversation]) -> None:
    """No gaps of templates, no double spaces, a or an by the next letter, sentences with a capital letter."""
    for made in series:
        for message in made.messages:
            text = message["content"]
            if message["role"] == "tool" or made.skill in ("json", "schema"):
                continue
            assert text.isascii()
            assert not re.search(r"  |\{|\}| \n| \.|\.\.", text), text
            for article, word in pairwise(re.findall(r"\w+", text)):
                if article == "an":
                    assert word[0] in "aeiou", text
                if article == "a" and word.islower():
                    assert word[0] not in "aeio" or made.skill == "follows", text
            if message["role"] == "assistant" and made.skill in ("answers", "reports", "no_call", "greets"):
                assert text == "" or text[0].isupper()


def test_answers_are_found_in_the_prompt(series: list[Conversation]) -> None:
    for made in series:
        prompt = render(made, prompt_only=True)
        if made.skill in ("answers", "remembers", "reports"):
            assert all(part in prompt or part == "welcome" for part in made.check.has)
        for call in made.check.calls:
            names = [tool["function"]["name"] for tool in made.tools]
            assert call["name"] in names
            assert len(set(names)) == len(names)
            schema = next(tool for tool in made.tools if tool["function"]["name"] == call["name"])["function"]
            check_arguments(call["arguments"], schema["parameters"])
            asked = made.prompt[-1]["content"]
            for value in call["arguments"].values():
                assert functions.shown(value) in asked


TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "boolean": bool,
    "array": list,
    "number": (int, float),
    "null": type(None),
}


def check_arguments(values: dict[str, Any], schema: dict[str, Any]) -> None:
    assert set(schema["required"]) <= set(values) <= set(schema["properties"])
    for name, value in values.items():
        each = schema["properties"][name]
        assert isinstance(value, TYPES[each["type"]])
        assert value in each.get("enum", [value])


def test_json_follows_its_schema() -> None:
    for index in range(100):
        made = generator.of_kind(records.with_schema, 9, index)
        text = next(each["content"] for each in made.messages if "properties" in each["content"])
        schema = json.JSONDecoder().raw_decode(text, text.index('{"type": "object"'))[0]
        assert list(made.check.json) == list(schema["properties"])
        check_arguments(made.check.json, {"required": [], **schema})


def test_questions_that_are_not_answered_have_no_answer() -> None:
    for index in range(100):
        made = facts.world(Dice(10, index))
        said = {(fact.subject, fact.attribute.key) for fact in made.facts}
        assert said.isdisjoint((subject, attribute.key) for subject, attribute in made.unsaid)
        assert len(said) == len(made.facts)


def test_tools_without_a_call_have_another_verb() -> None:
    for index in range(100):
        made = generator.of_kind(tools.no_call, 11, index)
        if made.messages[-1]["content"] == tools.NO_TOOL:
            asked = made.messages[-2]["content"].lower().split()[0]
            assert asked not in {tool["function"]["name"].split("_")[0] for tool in made.tools}


def test_dice_choose_from_their_part() -> None:
    pool = words.COLORS
    for held_out, part in ((False, pool.train), (True, pool.held_out)):
        dice = Dice(12, 0, held_out)
        found = {dice.pick(pool) for _ in range(300)}
        assert found >= set(part)
        assert bool(found - set(part)) != held_out  # in training, invented words stand for some
        assert not any(is_held_out(word) for word in found - set(part))
        several = dice.several(pool, 99)
        assert len(set(several)) == len(part)
        assert (set(several) <= set(part)) == held_out
        assert sorted(dice.shuffled(part)) == sorted(part)
    assert {Dice(13, index).number(3, 5) for index in range(50)} == {3, 4, 5}
    assert dice_module.SHARE == 5


def test_the_command_line_prints_conversations(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["generator", "--seed", "3", "--start", "4", "--count", "2", "--held-out"])
    generator.main()
    printed = capsys.readouterr().out
    for index in (4, 5):
        assert render(generator.conversation(3, index, held_out=True)) in printed
