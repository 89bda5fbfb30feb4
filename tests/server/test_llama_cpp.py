"""Behaviors that llama.cpp's server tests check, and no other test here does: docs/llama_cpp_server.md lists all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

from http_server import Running, running

ROOT = Path(__file__).resolve().parents[2]
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def stories() -> Iterator[Running]:
    with running("stories") as served:
        yield served


def text_of(served: Running, body: dict[str, Any]) -> str:
    response = served.post(COMPLETIONS, body)
    assert response.status_code == 200, response.text
    found: str = response.json()["choices"][0]["text"]
    return found


def test_seeds_decide(stories: Running) -> None:
    texts = [text_of(stories, {"prompt": "Once", "max_tokens": 20, "seed": seed}) for seed in (1, 2, 3, 1, 2, 3)]
    assert texts[:3] == texts[3:]
    assert len(set(texts)) == 3


def test_the_number_of_sequences_decides_nothing(stories: Running) -> None:
    body = {"prompt": "One day", "max_tokens": 20, "seed": 7}
    with running("stories", max_sequences=1, prefix_cache=False) as narrow:
        assert text_of(narrow, body) == text_of(stories, body)


def test_a_bias_makes_a_token_certain_or_impossible(stories: Running) -> None:
    [token] = stories.engine.model.tokenize("a", add_special=False)[-1:]
    piece = stories.engine.model.tokenizer.token_bytes(token).decode()
    body = {"prompt": "Once", "max_tokens": 5, "seed": 1}
    assert text_of(stories, {**body, "logit_bias": {str(token): 100}}).count(piece) == 5
    free = [text_of(stories, {**body, "seed": seed, "max_tokens": 40}) for seed in range(3)]
    assert any(piece in text for text in free)
    banned = stories.post(COMPLETIONS, {**body, "max_tokens": 40, "logit_bias": {str(token): -100}, "logprobs": 0})
    assert piece not in banned.json()["choices"][0]["logprobs"]["tokens"]


def test_a_repeated_prompt_is_not_computed_again() -> None:
    with running("stories") as served:
        body = {"prompt": "Once upon a time there was a girl who " * 8, "max_tokens": 2, "seed": 1}
        first, second = (served.post(COMPLETIONS, body).json() for _ in range(2))
        details = [found["usage"]["prompt_tokens_details"]["cached_tokens"] for found in (first, second)]
        assert details[0] == 0
        assert 0 < details[1] < first["usage"]["prompt_tokens"]
        assert second["choices"] == first["choices"]


def test_an_answer_beyond_the_context_moves_it_or_ends(stories: Running) -> None:
    body = {"prompt": "Once", "ignore_eos": True, "seed": 1, "max_tokens": stories.engine.context + 20}
    moved = stories.post(COMPLETIONS, {**body, "context_overflow": "shift"}).json()
    assert moved["usage"]["completion_tokens"] == stories.engine.context + 20
    ended = stories.post(COMPLETIONS, body).json()
    assert ended["choices"][0]["finish_reason"] == "length"
    assert ended["usage"]["total_tokens"] <= stories.engine.context + 1


def test_embeddings_are_the_same_alone_and_in_a_list(stories: Running) -> None:
    texts = ["Once upon a time", "a", "Once upon a time"]
    together = [entry["embedding"] for entry in stories.post("/v1/embeddings", {"input": texts}).json()["data"]]
    alone = stories.post("/v1/embeddings", {"input": texts[0]}).json()["data"][0]["embedding"]
    assert together[0] == together[2] == alone
    too_long = stories.post("/v1/embeddings", {"input": "a " * 5000})
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_the_page_names_tests_that_exist() -> None:
    page = ROOT / "docs" / "llama_cpp_server.md"
    if not page.is_file():
        pytest.skip("the documentation is not here: this is an installed copy")
    rows = [line.split("|") for line in page.read_text().splitlines() if line.startswith("|")][2:]
    named = {name for row in rows for name in re.findall(r"`(test_\w+)`", row[-2])}
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert {name for name in named if f"def {name}(" not in sources} == set()
    assert all(row[-2].strip() for row in rows)
    assert len(named) > 30
