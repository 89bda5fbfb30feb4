"""Embeddings, perplexity and scores against transformers on tiny checkpoints; runs where torch is installed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import llamac
from golden.family_cases import FAMILY_CASES
from golden.make import transformers_logits
from golden.parity_table import make_folder

pytest.importorskip("torch")
pytest.importorskip("transformers")

NAMES = ("qwen3", "mistral", "gemma3_text")


class Pair(NamedTuple):
    """A checkpoint's directory, opened, and ids to compute."""

    folder: Path
    model: llamac.Model
    ids: list[int]


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = make_folder(tmp_path_factory.mktemp("scores"), request.param)
    path = folder.with_suffix(".bin")
    llamac.export.export(folder, path, dtype="f32")
    with llamac.load(path) as model:
        yield Pair(folder, model, FAMILY_CASES[request.param].ids)


def logprobs(folder: Path, ids: list[int], start: int) -> Any:
    """log softmax of transformers' logits at ids[start:]."""
    logits = transformers_logits(folder, ids)[:-1].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logits[range(start - 1, len(ids) - 1), ids[start:]]


def test_scores_match_transformers(pair: Pair) -> None:
    prompt, rest = pair.ids[:20], pair.ids[20:30]
    [score] = pair.model.score(prompt, [rest])
    np.testing.assert_allclose(score.token_logprobs, logprobs(pair.folder, pair.ids[:30], 20), atol=1e-4)


@pytest.mark.parametrize(("size", "stride"), [(24, 8), (24, 24)])
def test_perplexity_matches_transformers(pair: Pair, size: int, stride: int) -> None:
    ids = pair.ids[:60]
    found: list[float] = []
    previous_end = 0
    for first in range(0, len(ids), stride):
        end = min(first + size, len(ids))
        scored = max(previous_end, first + 1)
        if scored < end:
            found += logprobs(pair.folder, ids[first:end], scored - first).tolist()
        previous_end = end
        if end == len(ids):
            break
    expected = math.exp(-float(np.mean(found)))
    assert pair.model.perplexity(ids, stride=stride, context=size) == pytest.approx(expected, rel=1e-4)


def test_embeddings_match_transformers(pair: Pair) -> None:
    import torch
    from transformers import AutoModel

    hidden = AutoModel.from_pretrained(pair.folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        states = hidden(torch.tensor([pair.ids[:40]])).last_hidden_state[0].numpy().astype(np.float64)
    last = pair.model.embed([pair.ids[:40]], pooling="last")[0]
    mean = pair.model.embed([pair.ids[:40]], pooling="mean")[0]
    np.testing.assert_allclose(last, states[-1] / np.linalg.norm(states[-1]), atol=1e-5)
    np.testing.assert_allclose(mean, states.mean(axis=0) / np.linalg.norm(states.mean(axis=0)), atol=1e-5)
