"""Encoders against transformers, on tiny checkpoints with each family's real keys.

The references are stored in golden/encoder_references.npz, so these tests run without torch. Where torch and
transformers are installed, they are computed again for texts of more rows than one chunk of the core has.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import llamac
from golden.cases import MIN_EFFECT, TOLERANCE, Case
from golden.encoder_cases import ENCODER_CASES
from golden.make import relative_errors
from golden.make_encoders import (
    encoder_checkpoint,
    encoder_references,
    is_scorer,
    transformers_results,
    types_of,
)
from golden.tiny_checkpoints import changed, random_tensor, write_config, write_safetensors
from llamac.engine.rows import appended_rows
from llamac.engine.scoring.cancellation import Cancellation
from llamac.engine.scoring.pooled import NO_LOGITS, OUTPUT_NORM, Tokens, pooled_outputs, pooling_of
from llamac.export import reference
from llamac.export.hf import model as hf
from llamac.export.hf.families import ENCODERS, RERANKERS
from llamac.export.hf.safetensors_file import read_safetensors
from llamac.progress import silent

EMBEDDERS = [name for name, case in ENCODER_CASES.items() if not is_scorer(case)]
SCORERS = [name for name, case in ENCODER_CASES.items() if is_scorer(case)]
BASES = [name for name, case in ENCODER_CASES.items() if case.base is None]
STAGES = [name for name in llamac.STAGES if name != "logits"]
LONG = 600  # tokens: more than two chunks

Floats = NDArray[np.float32]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The Hugging Face directory of a case."""
    root = tmp_path_factory.mktemp("encoders")
    return functools.cache(lambda name: encoder_checkpoint(root / name, ENCODER_CASES[name]))


@pytest.fixture(scope="module")
def model_file(folder: Callable[[str], Path]) -> Callable[[str], Path]:
    """The exported file of a case."""

    @functools.cache
    def path(name: str) -> Path:
        target = folder(name).with_suffix(".bin")
        llamac.export.export(folder(name), target)
        return target

    return path


def outputs(path: Path, ids: list[int]) -> Floats:
    """The output norms of all positions, (n, dim)."""
    with llamac.load(path) as model, model.session(context=len(ids)) as session:
        found = np.empty((len(ids), model.config["dim"]), np.float32)
        rows = appended_rows(array("i", ids), 0, 0, "all")
        session._run(rows, NO_LOGITS, [(OUTPUT_NORM, 0, found.reshape(-1))])
    return found


def score(path: Path, case: Case) -> float:
    """A cross-encoder's score of its case's tokens."""
    with llamac.load(path) as model:
        tokens = Tokens(array("i", case.ids), array("i", types_of(case)))
        pooling = pooling_of(model, None)
        return float(pooled_outputs(model, [tokens], pooling, "scoring", silent, Cancellation())[0, 0])


# transformers does not have these; test_encoder_folders.py compares them with "gte" and "llama".
OTHER_NAMES = {"new", "llama_bidirec"}


def test_every_encoder_has_a_case_and_a_case_with_scores() -> None:
    assert {ENCODER_CASES[name].config["model_type"] for name in EMBEDDERS} == set(ENCODERS) - OTHER_NAMES
    with_scores = {name for name, family in ENCODERS.items() if family.scorer is not None} - OTHER_NAMES
    assert {ENCODER_CASES[name].config["model_type"] for name in SCORERS} == with_scores | RERANKERS.keys()


@pytest.mark.parametrize("name", EMBEDDERS)
def test_the_engine_matches_transformers(model_file: Callable[[str], Path], name: str) -> None:
    found = outputs(model_file(name), ENCODER_CASES[name].ids)[ENCODER_CASES[name].stored_rows]
    assert relative_errors(found, encoder_references()[name]).max() <= TOLERANCE


@pytest.mark.parametrize("name", SCORERS)
def test_scores_match_transformers(model_file: Callable[[str], Path], name: str) -> None:
    logit = float(encoder_references()[name][0, 0])
    assert score(model_file(name), ENCODER_CASES[name]) == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-5)


@pytest.mark.parametrize("name", [name for name in EMBEDDERS if ENCODER_CASES[name].base])
def test_every_config_key_changes_the_outputs(name: str) -> None:
    rows, base = encoder_references(), ENCODER_CASES[name].base
    assert base is not None
    assert relative_errors(rows[name], rows[base]).max() >= MIN_EFFECT


@pytest.mark.parametrize("name", BASES)
def test_every_stage_matches_the_float64_forward_pass(
    folder: Callable[[str], Path], model_file: Callable[[str], Path], name: str
) -> None:
    ids = ENCODER_CASES[name].ids
    expected: dict[tuple[str, int], reference.Array] = {}
    reference.forward(
        hf.read(folder(name), []),
        [ids],
        context=len(ids),
        observe=lambda stage, layer, values: expected.update({(stage, layer): values}),
    )
    with llamac.load(model_file(name)) as model, model.session(context=len(ids)) as session:
        keys = [key for key in expected if key[0] != "logits"]
        buffers = {
            key: np.empty((len(ids), session._core.stage_width(llamac.STAGES.index(key[0]))[0]), np.float32)
            for key in keys
        }
        observations = [(llamac.STAGES.index(stage), layer, buffers[stage, layer].reshape(-1)) for stage, layer in keys]
        session._run(appended_rows(array("i", ids), 0, 0, "all"), NO_LOGITS, observations)
    for key in keys:
        values = expected[key].reshape(len(ids), -1)
        unseen = np.isneginf(values)
        found = buffers[key][:, : values.shape[1]]
        np.testing.assert_array_equal(np.isneginf(found), unseen)
        rows, exact = (np.where(unseen, 0, x) for x in (found, values))
        assert relative_errors(rows, exact).max() <= TOLERANCE, key


@pytest.mark.parametrize("name", BASES)
def test_long_texts_match_transformers(folder: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    case = ENCODER_CASES[name]
    long = tmp_path / "long"
    stored = read_safetensors(folder(name) / "model.safetensors")
    shapes = {key: tensor.shape for key, tensor in stored.items()}
    for key in shapes:
        if key.endswith("position_embeddings.weight"):
            shapes[key] = (LONG + 8, shapes[key][1])
    long.mkdir()
    write_config(long, changed(case.config, max_position_embeddings=LONG + 8))
    write_safetensors(long / "model.safetensors", {key: random_tensor(key, shape) for key, shape in shapes.items()})
    ids = [4 + token % 50 for token in replace(case, n_tokens=LONG).ids]
    llamac.export.export(long, tmp_path / "long.bin")
    found = outputs(tmp_path / "long.bin", ids)
    assert relative_errors(found, transformers_results(long, case, ids)).max() <= TOLERANCE
