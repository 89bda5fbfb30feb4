"""The engine against transformers: exported tiny checkpoints in float32 with a float32 KV cache.

The references are stored in golden/references.npz, so these tests run without torch. Where torch and transformers
are installed, they are computed again for all positions. The float64 forward pass is a second reference for each stage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import llamac
from golden.cases import CASES, CLOSE_PAIRS, MIN_EFFECT, TOLERANCE
from golden.make import relative_errors, stored_references, transformers_logits
from golden.tiny_checkpoints import write_checkpoint
from llamac.export import reference
from llamac.export.convert import export
from llamac.export.hf import model as hf
from llamac.export.llama2c import model as llama2c

Logits = NDArray[np.float32]
Engine = Callable[[str], Logits]

GREEDY = llamac.SamplingParams(temperature=0)
VARIANTS = [case.name for case in CASES.values() if case.base]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The Hugging Face directory of a case."""
    root = tmp_path_factory.mktemp("checkpoints")
    return functools.cache(lambda name: write_checkpoint(root / name, CASES[name].config))


@pytest.fixture(scope="module")
def engine(model_file: Callable[[str], Path]) -> Engine:
    """The engine's logits of all positions of a case, (n, vocab_size)."""

    @functools.cache
    def logits(name: str) -> Logits:
        with llamac.load(model_file(name), kv_dtype="f32") as model:
            return model.logits(CASES[name].ids)

    return logits


def assert_parity(logits: Logits, expected: Logits) -> None:
    """Assert that rows are within the tolerance and have the same best token, unless the two best are close."""
    assert relative_errors(logits, expected).max() <= TOLERANCE
    second, best = np.sort(expected, axis=1)[:, -2:].T
    clear = best - second > 10 * TOLERANCE * np.abs(expected).max(axis=1)
    assert clear.sum() >= 0.8 * len(clear)
    np.testing.assert_array_equal(logits.argmax(axis=1)[clear], expected.argmax(axis=1)[clear])


@pytest.mark.parametrize("name", CASES)
def test_the_engine_matches_recorded_transformers(engine: Engine, name: str) -> None:
    assert_parity(engine(name)[CASES[name].stored_rows], stored_references()[name])


@pytest.mark.parametrize("name", CASES)
def test_the_engine_matches_installed_transformers(engine: Engine, folder: Callable[[str], Path], name: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    live = transformers_logits(folder(name), CASES[name].ids)
    assert_parity(engine(name), live)
    stored = stored_references()[name]
    assert relative_errors(live[CASES[name].stored_rows], stored).max() <= TOLERANCE / 2, "references.npz is stale"


@pytest.mark.parametrize("name", VARIANTS)
def test_every_config_key_changes_the_logits(engine: Engine, name: str) -> None:
    base = CASES[name].base
    assert base is not None
    n = min(CASES[name].n_tokens, CASES[base].n_tokens)
    assert relative_errors(engine(name)[:n], engine(base)[:n]).max() >= MIN_EFFECT
    rows = stored_references()
    assert relative_errors(rows[name], rows[base]).max() >= MIN_EFFECT


@pytest.mark.parametrize(("one", "other"), CLOSE_PAIRS)
def test_similar_activations_are_distinguished(engine: Engine, one: str, other: str) -> None:
    rows, stored = CASES[one].stored_rows, stored_references()
    apart = relative_errors(stored[one], stored[other]).max()
    for name in (one, other):
        assert relative_errors(engine(name)[rows], stored[name]).max() <= apart / 10


# ---- short and long RoPE tables


def exact_logits(folder: Path, ids: list[int], context: int) -> NDArray[np.float64]:
    """Logits of all positions of a session of `context` positions, by the float64 forward pass."""
    return reference.forward(hf.read(folder, []), [ids], context=context)[0]


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 40])
def test_the_number_of_ids_selects_the_rope_table(
    folder: Callable[[str], Path], model_file: Callable[[str], Path], n: int
) -> None:
    """As in transformers, a text longer than the original context, 16 here, uses the long table throughout."""
    name = "llama-longrope"
    ids = CASES[name].ids[:n]
    own, long = (exact_logits(folder(name), ids, context) for context in (max(16, n), 64))
    assert (relative_errors(own, long).max() >= MIN_EFFECT) == (1 < n <= 16)  # position 0 is not rotated
    with llamac.load(model_file(name), kv_dtype="f32") as model:
        assert relative_errors(model.logits(ids), own).max() <= TOLERANCE
    with llamac.load(model_file(name), kv_dtype="f32", context=64) as model:  # an explicit context decides
        assert relative_errors(model.logits(ids), long).max() <= TOLERANCE


@pytest.mark.parametrize("n", [15, 16, 17])
def test_both_rope_tables_match_installed_transformers(
    folder: Callable[[str], Path], model_file: Callable[[str], Path], n: int
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    name = "llama-longrope"
    ids = CASES[name].ids[:n]
    with llamac.load(model_file(name), kv_dtype="f32") as model:
        assert_parity(model.logits(ids), transformers_logits(folder(name), ids))


def test_a_generation_uses_the_rope_table_for_its_maximum_length(model_file: Callable[[str], Path]) -> None:
    ids = CASES["llama-longrope"].ids[:10]
    with llamac.load(model_file("llama-longrope"), kv_dtype="f32") as model:
        short, long = (model.generate(ids, GREEDY, max_tokens=7, context=context).tokens for context in (16, 64))
        assert short != long
        assert model.generate(ids, GREEDY, max_tokens=7).tokens == short  # 16 positions: the last token needs none
        assert model.generate(ids, GREEDY, max_tokens=8).tokens[:7] == long
        assert model.generate(ids, GREEDY).tokens[:7] == long
        with model.stream(ids, GREEDY, max_tokens=7, context=17) as stream:
            assert list(stream) == []  # no tokenizer
        assert stream.completion.tokens == long
    with llamac.load(model_file("llama-longrope"), kv_dtype="f32", context=64) as model:
        assert model.generate(ids, GREEDY, max_tokens=7).tokens == long
    with llamac.load(model_file("llama-longrope"), kv_dtype="f32", context=16) as model:
        assert model.generate(ids, GREEDY).tokens == short


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_every_stage_matches_the_float64_forward_pass(
    folder: Callable[[str], Path], model_file: Callable[[str], Path], name: str
) -> None:
    expected: dict[tuple[str, int], reference.Array] = {}
    ids = CASES[name].ids
    reference.forward(
        hf.read(folder(name), []), [ids], observe=lambda stage, layer, values: expected.update({(stage, layer): values})
    )
    with llamac.load(model_file(name), kv_dtype="f32") as model, model.session(context=len(ids)) as session:
        found = {key: rows for key, rows in session.observe(ids, llamac.STAGES).items() if rows.shape[1]}
    assert set(found) == set(expected)
    for key, values in expected.items():
        unseen = np.isneginf(values)
        np.testing.assert_array_equal(np.isneginf(found[key]).reshape(unseen.shape), unseen)
        rows, exact = (np.where(np.isneginf(x), 0, x).reshape(len(ids), -1) for x in (found[key], values))
        assert relative_errors(rows, exact).max() <= TOLERANCE, key


def test_a_real_model_matches_the_float64_forward_pass(data_dir: Path, tmp_path: Path) -> None:
    source = data_dir / "stories260K" / "stories260K.bin"
    if not source.is_file():
        pytest.skip(f"no {source}")
    export(source, tmp_path / "m.bin", probe_source=None, tokenizer=source.parent / "tok512.bin")
    with llamac.load(tmp_path / "m.bin", kv_dtype="f32") as model:
        ids = model.tokenize("Once upon a time, Lily and 3 friends (Zoë too!) went to the park.")
        logits = model.logits(ids)
    exact = reference.forward(llama2c.read(source), [ids])[0]
    assert relative_errors(logits, exact).max() <= TOLERANCE
