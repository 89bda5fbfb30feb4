"""Filling in the middle: the prompt has the model's tokens for that, in the right places, around plain texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vocab_samples import tokenizer_json

import llamac
from builders import byte_ids, checkpoint, llama_config, write_model
from llamac.engine.batching.engine import Engine
from llamac.openai.infill import TOKENS, infill_prompt
from llamac.text.special_tokens import SpecialTokens
from llamac.text.tokenizer import Tokenizer

PREFIX, SUFFIX = "a = <fim_suffix>", "\nb"
BYTE_LEVEL = tokenizer_json(post_processor=None)


def model_with(folder: Path, names: Sequence[str], vocabulary: dict[str, Any] | None = None) -> Path:
    """A random model with further special tokens; by default of a SentencePiece vocabulary with BOS."""
    made = checkpoint(llama_config())
    assert made.tokenizer is not None
    data, special, spm = made.tokenizer
    document = vocabulary or json.loads(data)
    if vocabulary is not None:
        special = SpecialTokens(bos_id=256, add_bos=False, add_eos=False, eos_id=257, stop_ids=())
    size = len(document["model"]["vocab"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": size + index, "content": name, **flags} for index, name in enumerate(names)]
    data = json.dumps({**document, "added_tokens": [*document["added_tokens"], *added]}).encode()
    made.tokenizer = (data, special, spm)
    made.config = replace(made.config, n_token_ids=Tokenizer.from_json(data, special).n_ids)
    return write_model(folder / "infill.bin", made)


@pytest.mark.parametrize("names", TOKENS)
def test_the_texts_stand_between_the_models_own_tokens(tmp_path: Path, names: tuple[str, str, str]) -> None:
    with llamac.load(model_with(tmp_path, names, BYTE_LEVEL)) as model:
        before, after, answer = (model.tokenizer.id_of(name) for name in names)
        plain = [model.tokenize(text, add_special=False, parse_special=False) for text in (PREFIX, SUFFIX)]
        assert infill_prompt(model, PREFIX, SUFFIX) == [before, *plain[0], after, *plain[1], answer]
        assert model.tokenizer.id_of("<fim_suffix>") not in plain[0], "a text cannot write special tokens"


def test_code_llamas_suffix_has_no_space_before_it(tmp_path: Path) -> None:
    """As in Meta's code: SentencePiece puts a space before the prefix only."""
    names = TOKENS[-1]
    with llamac.load(model_with(tmp_path, names)) as model:
        before, after, answer = (model.tokenizer.id_of(name) for name in names)
        found = infill_prompt(model, "a", "b")
        assert found == [1, before, *model.tokenize("a", add_special=False), after, *byte_ids("b"), answer]
        assert model.tokenize("b", add_special=False) != byte_ids("b")
        assert infill_prompt(model, "", "") == [1, before, after, answer]


def test_a_model_without_such_tokens_says_so(tmp_path: Path) -> None:
    with (
        llamac.load(model_with(tmp_path, TOKENS[0][:2])) as model,
        pytest.raises(llamac.UnsupportedError, match="leave the suffix out"),
    ):
        infill_prompt(model, "a", "b")


def test_a_completion_with_a_suffix_has_this_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvicorn")
    from http_server import running

    prompts: list[list[int]] = []
    submit = Engine.submit

    def watched(engine: Engine, prompt: list[int], *arguments: Any, **options: Any) -> Any:
        prompts.append(list(prompt))
        return submit(engine, prompt, *arguments, **options)

    monkeypatch.setattr(Engine, "submit", watched)
    path = model_with(tmp_path, TOKENS[1], BYTE_LEVEL)
    with running(path) as server:
        model = server.engine.model
        prompts.clear()  # of the warm-up
        expected = [infill_prompt(model, text, SUFFIX) for text in (PREFIX, "c")]
        body = {"prompt": [PREFIX, "c"], "suffix": SUFFIX, "max_tokens": 4, "temperature": 0}
        found = server.post("/v1/completions", body).json()
        assert prompts == expected
        assert found["usage"]["prompt_tokens"] == sum(map(len, expected))
        same = server.post("/v1/completions", {**body, "prompt": expected, "suffix": None}).json()
        assert [choice["text"] for choice in found["choices"]] == [choice["text"] for choice in same["choices"]]
        refused = server.post("/v1/completions", {**body, "echo": True}).json()
        assert refused["error"]["param"] == "suffix"
