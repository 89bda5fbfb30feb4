"""Reasoning between tags is separated from the answer, however the text is cut into pieces."""

from __future__ import annotations

from itertools import groupby

import pytest

from llamac.text.reasoning import TAGS, ReasoningSplitter

CASES = {
    "<think>\nhm, 2 < 3\n</think>\n\nyes <b>": ("hm, 2 < 3\n", "yes <b>"),
    "\n<think>hm</think>": ("hm", ""),
    "<think></think>yes": ("", "yes"),
    "<think>hm": ("hm", ""),
    "<thinking>a</think></thinking>b": ("a</think>", "b"),
    "plain <think>not reasoning</think>": ("", "plain <think>not reasoning</think>"),
    "  indented": ("", "  indented"),
    "<thin": ("", "<thin"),
    "": ("", ""),
}


def split(pieces: list[str], prompt: str = "") -> tuple[str, str]:
    """(reasoning, answer)."""
    splitter = ReasoningSplitter(prompt)
    parts = [part for piece in pieces for part in splitter.push(piece)] + splitter.flush()
    kinds = [kind for kind, _ in groupby(parts, lambda part: part.is_reasoning)]
    assert kinds in ([], [True], [False], [True, False])
    assert all(part.text for part in parts)
    reasoning = "".join(part.text for part in parts if part.is_reasoning)
    return reasoning, "".join(part.text for part in parts if not part.is_reasoning)


@pytest.mark.parametrize("text", CASES)
def test_every_way_to_cut_a_text_gives_the_same_parts(text: str) -> None:
    assert split(list(text)) == CASES[text]
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            assert split([text[:first], text[first:second], text[second:]]) == CASES[text]


@pytest.mark.parametrize("tag", TAGS)
def test_a_prompt_can_open_the_reasoning(tag: str) -> None:
    for cut in range(9):
        text = f"\nhm{TAGS[tag]}\nyes"
        assert split([text[:cut], text[cut:]], f"<|assistant|>{tag}\n") == ("hm", "yes")


def test_an_answer_is_not_held_back() -> None:
    splitter = ReasoningSplitter()
    assert [part.text for part in splitter.push("a")] == ["a"]
    assert [part.text for part in splitter.push("<")] == ["<"]
