"""Bodies of responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import llamac
from llamac.openai.responses import completion_body


def test_log_probabilities_have_the_forms_of_the_api(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model:
        found = model.generate("he", max_tokens=3, logprobs=2, temperature=0)
        assert found.logprobs is not None
        chat: Any = completion_body("chat", found, "m", "s", model)["choices"][0]["logprobs"]
        assert len(chat["content"]) == 3
        first = chat["content"][0]
        assert first["token"].encode() == bytes(first["bytes"])
        assert first["top_logprobs"][0] == {name: first[name] for name in ("token", "logprob", "bytes")}
        assert first["logprob"] == pytest.approx(found.logprobs[0].logprob)
        plain: Any = completion_body("completions", found, "m", "s", model)["choices"][0]["logprobs"]
        assert plain["tokens"] == [entry["token"] for entry in chat["content"]]
        assert plain["token_logprobs"] == [entry["logprob"] for entry in chat["content"]]
        assert [len(top) for top in plain["top_logprobs"]] == [2, 2, 2]
        assert plain["text_offset"][:2] == [0, len(plain["tokens"][0])]
        without = model.generate("he", max_tokens=3)
        assert completion_body("chat", without, "m", "s", model)["choices"][0]["logprobs"] is None


def test_a_response_has_every_candidate_and_counts_the_tokens_of_all(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model:
        found = model.generate("he", n=3, max_tokens=4, seed=1, ignore_eos=True)
        body = completion_body("completions", found, "m", "s", model)
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (i, choice.text) for i, choice in enumerate(found.choices)
    ]
    assert (body["usage"]["completion_tokens"], body["usage"]["total_tokens"]) == (12, found.usage.prompt_tokens + 12)
