"""Sessions and engines of a model like Gemma 4: shared keys, layer embeddings, experts beside a network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graph_cases import EXPERTS
from numpy.typing import NDArray

import llamac
from builders import checkpoint, llama_config, some_ids, write_model
from llamac.export.checkpoint import LayerConfig, ModelConfig

IDS = some_ids(300)


def config() -> ModelConfig:
    narrow = LayerConfig("gated", 50, rope=0, window=20, head_dim=8, v_norm="head", layer_embedding_dim=9)
    narrow = replace(narrow, placement="sandwich", layer_scale=0.8)
    wide = replace(narrow, window=0, head_dim=0, n_kv_heads=1, v_is_k=1, ffn="experts", shared_ffn_dim=30, **EXPERTS)
    wide = replace(wide, expert_norms=1, expert_factors=1, expert_weights=1)
    shared = [replace(layer, kv_source=i, v_is_k=0, v_norm="none") for i, layer in enumerate((narrow, wide))]
    base = replace(llama_config(dim=40, n_heads=4, n_kv_heads=2), head_dim=16, qk_norm="head", attention_scale=0.3)
    return replace(base, layers=(narrow, wide, *shared), embedding_scale=6.3, rope_dim=(8,))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[llamac.Model]:
    path = write_model(tmp_path_factory.mktemp("layers") / "model.bin", checkpoint(config()))
    with llamac.load(path) as model:
        yield model


@pytest.fixture(scope="module")
def logits(model: llamac.Model) -> NDArray[Any]:
    """The logits of IDS, computed at once."""
    with model.session() as session:
        return session.eval(IDS, logits="all")


def test_cuts_and_forks_continue_with_the_same_bits(model: llamac.Model, logits: NDArray[Any]) -> None:
    with model.session(sequences=2) as session:
        session.eval(IDS[:280], logits=None)
        for length in (279, 200, 64):
            with session.fork(length=length) as fork:
                np.testing.assert_array_equal(fork.eval(IDS[length : length + 3]), logits[length + 2])
            session.truncate(length)
            np.testing.assert_array_equal(session.eval(IDS[length : length + 2]), logits[length + 1])
        session.copy_sequence(0, 1)
        np.testing.assert_array_equal(session.eval(IDS[66:70], sequence=1), logits[69])


def test_drafts_have_the_embeddings_of_their_tokens(model: llamac.Model, logits: NDArray[Any]) -> None:
    with model.session() as session:
        session.eval(IDS[:40], logits=None)
        found = session.eval_drafts([IDS[40], IDS[41], IDS[42], IDS[50]], [-1, 0, 1, 1])
        np.testing.assert_array_equal(found[:3], logits[40:43])


def test_layers_hold_no_keys_that_they_share(model: llamac.Model, tmp_path: Path) -> None:
    whole = config()
    path = write_model(tmp_path / "own.bin", checkpoint(replace(whole, layers=whole.layers[:2])))
    held = []
    with llamac.load(path) as own:
        for which in (model, own):
            with which.session() as session:
                session.eval(IDS[:1], logits=None)
                held.append(session.memory()["kv"])
    assert held[0] == held[1] > 0


def test_an_engine_gives_each_request_its_own_tokens(model: llamac.Model) -> None:
    prompts = [IDS[:90], IDS[:60], [*IDS[:80], 9, 10], IDS[100:130]]
    options: dict[str, Any] = {"max_tokens": 8, "seed": 3, "ignore_eos": True}
    expected = [model.generate(prompt, **options).tokens for prompt in prompts]
    with llamac.Engine(model) as engine:
        for _ in range(2):
            requests = [engine.submit(prompt, **options) for prompt in prompts]
            assert [request.result().tokens for request in requests] == expected
        assert engine.submit(IDS[:90], **options).result().usage.cached_tokens >= 64
