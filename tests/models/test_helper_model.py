"""The built-in model `helper`: it obeys as often as its card says, and the commands use it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import llamac
from commands import Command
from llamac import models
from llamac.models.training.helper import evaluate, generator, grading

CARD = Path(__file__).parents[2] / "models" / "helper.md"
COUNT = 10  # prompts of each skill; the card's figures are for more


@pytest.fixture(scope="module")
def helper() -> Iterator[llamac.Model]:
    with llamac.load("helper") as model:
        yield model


def obeyed(model: llamac.Model, skill: str) -> int:
    """How many of the first held-out prompts of a skill the model obeys."""
    prompts = evaluate.prompts(skill, COUNT)
    return sum(
        grading.fault(text, prompt.check, ended=ended) is None
        for prompt in prompts
        for text, ended in (evaluate.answer(model, prompt),)
    )


def test_the_file_is_small() -> None:
    assert models.path("helper").stat().st_size <= 12_000_000


def test_its_card_describes_it(helper: llamac.Model) -> None:
    facts = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", CARD.read_text("utf-8"), re.MULTILINE))
    config = helper.config
    tables = config["head_dim"] // 2  # the frequencies of rotary positions, which are not trained
    assert facts["parameters"] == f"{helper.n_parameters - tables:,}"
    assert facts["width, layers, heads"].startswith("{dim}, {n_layers}, {n_heads} heads of {head_dim}".format(**config))
    assert facts["context"] == f"{config['context']:,}"
    assert facts["vocabulary"].startswith(f"{config['vocab_size']:,} entries")


@pytest.mark.parametrize("skill", generator.SKILLS)
def test_it_obeys_as_often_as_its_card_says(helper: llamac.Model, skill: str) -> None:
    """Ten prompts vary around the mean of a hundred by at most three times their deviation."""
    found = re.search(rf"^\| `{skill}` \| (\d+) of (\d+) \|$", CARD.read_text("utf-8"), re.MULTILINE)
    assert found is not None
    share = int(found[1]) / int(found[2])
    spread = 3 * (COUNT * share * (1 - share)) ** 0.5 + 1
    assert abs(obeyed(helper, skill) - COUNT * share) <= spread


def test_it_answers_in_python(helper: llamac.Model) -> None:
    said = [{"role": "user", "content": "My name is Ann."}]
    said.append({"role": "assistant", "content": helper.chat(said).text})
    said.append({"role": "user", "content": "What is my name?"})
    assert helper.chat(said).text == "Your name is Ann."


def test_it_calls_a_tool(helper: llamac.Model) -> None:
    def get_weather(city: str) -> str:
        """Get the weather in a city."""
        return f"It is sunny in {city}."

    asked = [{"role": "user", "content": "What is the weather in Oslo?"}]
    found = helper.chat(asked, tools=[get_weather])
    assert found.message is not None
    [call] = found.message.tool_calls
    assert (call.name, call.parsed) == ("get_weather", {"city": "Oslo"})


def test_a_chat_without_a_model_is_with_it(llamac_command: Command) -> None:
    done = llamac_command("chat", stdin=b"Hello!\nWho are you?\n")
    assert done.code == 0
    assert done.out.splitlines() == ["Hello! How can I help you?", "I am helper, a small language model."]


def test_a_batch_without_a_model_is_answered_by_it(llamac_command: Command, tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "Hello!"}]}
    line = {"custom_id": "a", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    assert llamac_command("batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl").code == 0
    found = json.loads((tmp_path / "out.jsonl").read_text())["response"]["body"]
    assert found["model"] == "helper"
    assert found["choices"][0]["message"]["content"] == "Hello! How can I help you?"
