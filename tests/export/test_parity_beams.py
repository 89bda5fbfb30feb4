"""Beam search against transformers on a tiny checkpoint: the same sequences with the same scores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import llamac
from golden.parity_table import make_folder
from llamac.engine.generation.output import Completion

pytest.importorskip("torch")
pytest.importorskip("transformers")


class Pair(NamedTuple):
    """The same checkpoint, opened by transformers and by llamac, and a prompt."""

    theirs: Any
    model: llamac.Model
    ids: list[int]


@pytest.fixture(scope="module", params=["mistral", "gemma3_text"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    import torch
    from transformers import AutoModelForCausalLM

    folder: Path = make_folder(tmp_path_factory.mktemp("beams"), request.param)
    path = folder.with_suffix(".bin")
    llamac.export.export(folder, path, dtype="f32")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with llamac.load(path, kv_dtype="f32") as model:
        yield Pair(theirs, model, [5, 9, 2, 30, 17, 44, 3, 21])


def theirs(pair: Pair, stops: list[int], **options: Any) -> tuple[list[list[int]], list[float]]:
    """The new tokens of transformers' sequences, without the stop token, and their scores."""
    import torch

    with torch.no_grad():
        found = pair.theirs.generate(
            torch.tensor([pair.ids]),
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
            eos_token_id=stops or None,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    sequences = []
    for sequence in found.sequences.tolist():
        new = sequence[len(pair.ids) :]
        ends = [i for i, token in enumerate(new) if token in stops]
        sequences.append(new[: min(ends, default=len(new))])
    return sequences, found.sequences_scores.tolist()


def ours(pair: Pair, stops: list[int], **options: Any) -> list[Completion]:
    return pair.model.generate(pair.ids, stop_token_ids=stops, ignore_eos=True, **options).choices


def common_stops(pair: Pair, n: int) -> list[int]:
    """The tokens that beams generate most often: as stop tokens they end sequences everywhere."""
    found = ours(pair, [], beam_width=8, n=8, max_tokens=10)
    tokens = [token for choice in found for token in choice.tokens]
    return sorted(set(tokens), key=tokens.count, reverse=True)[:n]


def assert_same(pair: Pair, stops: list[int], width: int, tokens: int, **options: Any) -> list[Completion]:
    names = {"min_tokens": "min_new_tokens", "banned_tokens": "bad_words_ids"}
    translated = {names.get(name, name): value for name, value in options.items()}
    if "bad_words_ids" in translated:
        translated["bad_words_ids"] = [[token] for token in options["banned_tokens"]]
    expected, scores = theirs(
        pair, stops, num_beams=width, num_return_sequences=width, max_new_tokens=tokens, **translated
    )
    found = ours(pair, stops, beam_width=width, n=width, max_tokens=tokens, **options)
    assert [choice.tokens for choice in found] == expected
    assert [choice.score for choice in found] == pytest.approx(scores, rel=1e-5, abs=1e-4)
    return found


@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("tokens", [1, 9])
def test_beams_without_stops(pair: Pair, width: int, tokens: int) -> None:
    found = assert_same(pair, [], width, tokens)
    assert {choice.finish_reason for choice in found} == {"length"}


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.5, 0.0, 1.0, 2.5])
@pytest.mark.parametrize("n_stops", [1, 4])
def test_beams_with_stops(pair: Pair, n_stops: int, length_penalty: float, early_stopping: Any) -> None:
    options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    found = assert_same(pair, common_stops(pair, n_stops), 4, 12, **options)
    if n_stops == 4:
        assert "stop" in {choice.finish_reason for choice in found}


@pytest.mark.parametrize("options", [{"min_tokens": 5}, {"repetition_penalty": 1.7}, {"banned_tokens": [3, 9, 44]}])
def test_beams_whose_probabilities_are_adjusted(pair: Pair, options: dict[str, Any]) -> None:
    assert_same(pair, common_stops(pair, 2), 4, 12, **options)
