"""Sequences whose positions shift, against a float64 reference; what a shift means for later calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from shifted_reference import Shift, shifted_logits

import llamac
from builders import Floats, checkpoint, llama_config, some_ids, write_model
from golden.make import relative_errors
from llamac import ArgumentError, UnsupportedError
from llamac.arguments import KVDtype
from llamac.export.checkpoint import Checkpoint, LayerConfig, ModelConfig

GATED = LayerConfig("gated", 76, rope=0)


def model_of(**changes: Any) -> Callable[[], Checkpoint]:
    """A checkpoint of a small LLaMA with changes."""

    def make() -> Checkpoint:
        config = replace(llama_config(), **changes)
        given: dict[str, Floats] = {}
        for table, dim in enumerate(config.rope_dim):
            if config.rope_original_context[table]:
                frequencies = 300.0 ** (-np.arange(dim // 2) / (dim // 2))
                given[f"rope.{table}.inv_freq"] = frequencies.astype(np.float32)
                given[f"rope.{table}.inv_freq_long"] = (frequencies / 3).astype(np.float32)
        if config.qk_norm_after_rope:
            for layer in range(len(config.layers)):
                given[f"layers.{layer}.attn_k_norm.weight"] = np.ones(config.head_dim, np.float32)
        return checkpoint(config, given)

    return make


TWO_TABLES: dict[str, Any] = {
    "rope_dim": (8, 4),
    "rope_original_context": (0, 0),
    "rope_attention_factor": (1.0, 1.3),
}
MODELS: dict[str, Callable[[], Checkpoint]] = {
    "llama": model_of(),
    "one KV head": model_of(n_kv_heads=1),
    "partial and scaled": model_of(rope_dim=(6,), rope_attention_factor=(1.25,)),
    "two tables": model_of(**TWO_TABLES, layers=(GATED, replace(GATED, rope=1), replace(GATED, rope=-1))),
    "long table": model_of(rope_original_context=(100,)),
    "windows": model_of(layers=(GATED, replace(GATED, window=40), replace(GATED, window=70))),
    "shared keys": model_of(layers=(GATED, replace(GATED, window=90), replace(GATED, kv_source=1, window=50))),
    "sinks and scaled queries": model_of(
        layers=(replace(GATED, sinks=1), replace(GATED, query_beta=0.4, query_context=50))
    ),
    "normed keys": model_of(qk_norm="head"),
    "chunks": model_of(
        layers=(replace(GATED, window=40, window_chunks=1), replace(GATED, rope=-1, query_beta=0.4, query_context=50)),
        qk_norm="rotated_head",
        qk_norm_after_rope=True,
    ),
    "keys normed after rope": model_of(qk_norm="head", qk_norm_after_rope=True),
}
SHIFTS = [Shift(200, 4, 102), Shift(230, 4, 60), Shift(330, 0, 33)]
# The median and the largest error of a row. A number that is rounded to another one than in the reference, because it
# lies halfway between them, changes the scores of these models with random weights a lot.
TOLERANCES: dict[KVDtype, tuple[float, float]] = {"f32": (1e-5, 2e-4), "f16": (1e-4, 1e-2), "q8": (5e-3, 0.15)}


def computed(session: llamac.Session, ids: list[int], shifts: list[Shift]) -> NDArray[np.float32]:
    """The logits of all tokens of a session that shifts."""
    rows, done = [], 0
    for shift in [*shifts, Shift(len(ids), 0, 0)]:
        rows.append(session.eval(ids[done : shift.count], logits="all"))
        session.shift(shift.begin, shift.end)
        done = shift.count
    return np.concatenate(rows)


@pytest.mark.parametrize("kv_dtype", TOLERANCES)
@pytest.mark.parametrize("name", MODELS)
def test_logits_after_shifts(tmp_path: Path, name: str, kv_dtype: KVDtype) -> None:
    made, ids = MODELS[name](), some_ids(350)
    with llamac.load(write_model(tmp_path / "m.bin", made)) as model, model.session(kv_dtype=kv_dtype) as session:
        found = computed(session, ids, SHIFTS)
    rounded = None if kv_dtype == "f32" else kv_dtype
    expected = shifted_logits(made, ids, SHIFTS, 600, rounded)
    errors = relative_errors(found, expected)
    median, largest = TOLERANCES[kv_dtype]
    assert np.median(errors) <= median
    assert errors.max() <= largest
    assert np.median(relative_errors(shifted_logits(made, ids, [], 600, rounded), expected)[200:]) > 0.1


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> llamac.Model:
    return llamac.load(tiny_llama)


def test_a_session_knows_what_it_holds(model: llamac.Model) -> None:
    ids = some_ids(100)
    with model.session(sequences=2) as session:
        session.eval(ids, logits=None)
        session.shift(10, 40)
        assert session.tokens() == ids[:10] + ids[40:]
        session.copy_sequence(0, 1)
        session.shift(0, 60, sequence=1)
        assert session.tokens(1) == ids[90:]
        assert session.length() == 70
        session.shift(70, 70)
        assert session.length() == 70


def test_moved_positions_are_not_reused_as_a_prefix(model: llamac.Model) -> None:
    ids = some_ids(100)
    kept = ids[:20] + ids[60:]
    expected = model.generate(kept, max_tokens=4, temperature=0)
    with model.session() as session:
        session.eval(ids, logits=None)
        session.shift(20, 60)
        with session.fork() as forked:
            for shifted in (forked, session):
                found = shifted.generate(kept, max_tokens=4, temperature=0)
                assert found.tokens == expected.tokens
                assert found.usage.cached_tokens == 20
        assert session.generate(kept, max_tokens=4, temperature=0).usage.cached_tokens == len(kept) - 1
        session.shift(0, 10)
        assert session.generate(session.tokens(), max_tokens=1).usage.cached_tokens == 0
        session.shift(15, 20)
        session.truncate(15)  # what remains was not moved
        assert session.generate(session.tokens(), max_tokens=1).usage.cached_tokens == 14


def test_the_rest_of_a_prompt_does_not_count_as_generated(model: llamac.Model) -> None:
    """The penalty favors the tokens that do."""
    ids = some_ids(20)
    with model.session() as session:
        session.prefill(ids)
        session.shift(5, 10)
        session.step(200)
        assert session.sample(presence_penalty=-100, temperature=0) == 200
        session.step(201)
        session.shift(14, 16)  # the last token of the prompt and the first one after it
        session.step(202)
        session.truncate(15)
        assert session.tokens() == [*ids[:5], *ids[10:19], 201]
        session.step(201)
        assert session.sample(presence_penalty=-100, temperature=0) == 201
        session.truncate(10)
        session.step(203)
        assert session.sample(presence_penalty=-100, temperature=0) == 203


def test_the_rest_of_a_prompt_after_a_generation_that_shifts(model: llamac.Model) -> None:
    with model.session(context=32) as session:
        found = session.generate(some_ids(20), max_tokens=14, temperature=0, ignore_eos=True, context_overflow="shift")
        assert found.usage.shifted_tokens == 14
        assert session.sample(presence_penalty=-100, logit_bias={250: 50}, temperature=0) in found.tokens


def test_what_cannot_be_shifted_is_refused(model: llamac.Model, tiny_gpt2: Path, tmp_path: Path) -> None:
    with model.session() as session:
        session.eval(some_ids(20), logits=None)
        for begin, end in ((-1, 3), (5, 4), (5, 21)):
            with pytest.raises(ArgumentError, match="within 0 to 20"):
                session.shift(begin, end)
        with pytest.raises(ArgumentError, match="sequence is 1"):
            session.shift(0, 1, sequence=1)
        assert session.length() == 20
    with llamac.load(tiny_gpt2) as gpt2, gpt2.session() as session, pytest.raises(UnsupportedError, match="learned"):
        session.shift(0, 0)
    config: ModelConfig = replace(llama_config(), qk_norm="head", qk_norm_after_rope=True)
    with llamac.load(write_model(tmp_path / "m.bin", checkpoint(config))) as normed, normed.session() as session:
        session.eval(some_ids(9), logits=None)
        with pytest.raises(UnsupportedError, match="layer 0 norms its keys after RoPE"):
            session.shift(1, 2)
        assert session.length() == 9
