"""A reasoning budget: the closing tag comes when the tokens between the tags are used up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import llamac
from builders import byte_ids
from llamac.errors import ArgumentError


@pytest.mark.parametrize(
    ("script", "budget", "expected"),
    [
        ("<think>abcdefgh</think>xyz", 3, "<think>abc</think>"),
        ("<think>abcdefgh</think>xyz", 0, "<think></think>"),
        ("<think>ab</think>xyz", 30, "<think>ab</think>xyz"),
        ("  <think>abcdefgh</think>", 2, "  <think>ab</think>"),
        ("<think>ab</think>xyz", 4, "<think>ab</think>xyz"),  # used up within the closing tag
        ("[THINK]abcdefgh[/THINK]xyz", 3, "[THINK]abc[/THINK]"),
        ("<|channel|>analysis<|message|>abcdefgh<|end|>", 3, "<|channel|>analysis<|message|>abc<|end|>"),
        ("<|channel|>final<|message|>abcdefgh<|end|>", 3, "<|channel|>final<|message|>abcdefgh<|end|>"),
        ("<|channel>thought\nabcdefgh<channel|>xyz", 3, "<|channel>thought\nabc<channel|>"),
        ("no tags here <think>abcdef", 2, "no tags here <think>abcdef"),
    ],
)
def test_the_closing_tag_is_forced(scripted: Any, script: str, budget: int, expected: str) -> None:
    model = scripted(script + " " * 9)
    prompt = byte_ids("_")
    found = model.generate(prompt, max_tokens=len(script), reasoning_budget=budget, logprobs=0)
    assert found.text[: len(expected)] == expected
    with llamac.Engine(model) as engine:
        again = engine.generate([prompt], max_tokens=len(script), reasoning_budget=budget, logprobs=0)[0]
        assert (again.tokens, again.logprobs) == (found.tokens, found.logprobs)
    with model.session() as session:
        session.prefill(prompt)
        tokens = []
        for _ in found.tokens:
            tokens.append(session.sample(reasoning_budget=budget))
            session.step(tokens[-1])
        assert tokens == found.tokens


@pytest.mark.parametrize("budget", [0, 2])
def test_reasoning_that_the_prompt_opens_counts(scripted: Any, budget: int) -> None:
    prompt = "<think>\n"
    model = scripted(prompt[1:] + "abcdefgh" + "." * 20)
    found = model.generate(byte_ids(prompt), max_tokens=12, reasoning_budget=budget)
    assert found.text.startswith("abcdefgh"[:budget] + "</think>")


def test_a_model_without_a_tokenizer_has_no_tags(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with llamac.load(tiny_llama) as model:
        monkeypatch.setattr(type(model), "has_tokenizer", property(lambda self: False))
        with pytest.raises(ArgumentError, match="reasoning_budget needs a tokenizer"):
            model.generate([1], reasoning_budget=3)


@pytest.mark.parametrize("logprobs", [None, 0])
def test_a_guide_begins_after_the_forced_tag(scripted: Any, logprobs: int | None) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra: guided)")
    prompt = "<think>"
    model = scripted(prompt[1:] + "abcdefghijklmnop" + " " * 30)
    found = model.generate(
        byte_ids(prompt),
        max_tokens=40,
        reasoning_budget=3,
        guide=llamac.Choice(["yes", "yesterday"]),
        logprobs=logprobs,
    )
    assert found.text in ("abc</think>yes", "abc</think>yesterday")
    if found.logprobs is not None:
        assert [entry.token for entry in found.logprobs] == found.tokens
