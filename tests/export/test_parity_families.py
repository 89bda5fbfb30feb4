"""Every family against transformers: the float64 forward pass and the engine, on tiny checkpoints with real keys.

The references are stored in golden/family_references.npz, so these tests run without torch. Where torch and
transformers are installed, they are computed again for all positions. The texts are longer than sliding windows and
original contexts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import llamac
from golden.cases import MIN_EFFECT, TOLERANCE
from golden.family_cases import FAMILY_CASES
from golden.make import relative_errors, transformers_logits
from golden.make_families import family_references
from golden.parity_table import DOCUMENT, cases, document, engine_logits, make_folder
from llamac.export import reference
from llamac.export.hf import model as hf
from llamac.export.hf.families import FAMILIES
from llamac.export.hf.rope import QUERY_BETA

Logits = NDArray[np.floating[Any]]
VARIANTS = [case.name for case in FAMILY_CASES.values() if case.base]
BASES = [case.name for case in FAMILY_CASES.values() if not case.base]
# The error of transformers in float32 against float64.
FLOAT32_NOISE = TOLERANCE / 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The Hugging Face directory of a case."""
    root = tmp_path_factory.mktemp("checkpoints")
    return functools.cache(lambda name: make_folder(root, name))


@pytest.fixture(scope="module")
def exact(folder: Callable[[str], Path]) -> Callable[[str], Logits]:
    """The logits of all positions of a case by the float64 forward pass, in the smallest context."""

    @functools.cache
    def logits(name: str) -> Logits:
        ids = FAMILY_CASES[name].ids
        checkpoint = hf.read(folder(name), [])
        return reference.forward(checkpoint, [ids], context=len(ids))[0]

    return logits


@pytest.fixture(scope="module")
def engine(folder: Callable[[str], Path]) -> Callable[[str], Logits]:
    """The engine's logits of all positions of a case; leaves the exported file next to the directory."""
    return functools.cache(lambda name: engine_logits(folder(name), cases()[name]))


@pytest.fixture(scope="module")
def model_file(folder: Callable[[str], Path], engine: Callable[[str], Logits]) -> Callable[[str], Path]:
    """The exported file of a case."""

    def path(name: str) -> Path:
        engine(name)
        return folder(name).with_suffix(".bin")

    return path


# ---- the float64 forward pass


@pytest.mark.parametrize("name", FAMILY_CASES)
def test_the_float64_forward_pass_matches_recorded_transformers(exact: Callable[[str], Logits], name: str) -> None:
    errors = relative_errors(exact(name)[FAMILY_CASES[name].stored_rows], family_references()[name])
    assert errors.max() <= FLOAT32_NOISE


@pytest.mark.parametrize("name", BASES)
def test_the_float64_forward_pass_matches_transformers_in_float64(
    exact: Callable[[str], Logits], folder: Callable[[str], Path], name: str
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    live = transformers_logits(folder(name), FAMILY_CASES[name].ids, double=True)
    family = FAMILIES[name]
    # these compute with float32: a folded norm, the scale of queries, DeepSeek's routers, the states of Mamba 2, and
    # GPT-J's cosines
    is_folded = any(module.plus_one or module.log for module in family.modules) or family.normed_embedding
    is_folded = (
        is_folded
        or name in ("codegen", "gptj")
        or QUERY_BETA in family.rope_extras
        or "n_routed_experts" in family.keys
    )
    is_folded = is_folded or family.router == "sigmoid" or family.choice_bias
    assert relative_errors(exact(name), live).max() <= (2e-6 if is_folded else 1e-9)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_config_key_changes_the_logits(name: str) -> None:
    rows, base = family_references(), FAMILY_CASES[name].base
    assert base is not None
    assert relative_errors(rows[name], rows[base]).max() >= MIN_EFFECT


# ---- the engine


@pytest.mark.parametrize("name", FAMILY_CASES)
def test_the_engine_matches_transformers(
    engine: Callable[[str], Logits], exact: Callable[[str], Logits], name: str
) -> None:
    """Compares all positions with the float64 forward pass and the recorded positions with transformers."""
    case, logits = FAMILY_CASES[name], engine(name)
    assert relative_errors(logits, exact(name)).max() <= TOLERANCE
    stored = family_references()[name]
    assert relative_errors(logits[case.stored_rows], stored).max() <= TOLERANCE
    second, best = np.sort(stored, axis=1)[:, -2:].T
    clear = best - second > 10 * TOLERANCE * np.abs(stored).max(axis=1)
    assert clear.sum() >= 0.8 * len(clear)
    np.testing.assert_array_equal(logits[case.stored_rows].argmax(axis=1)[clear], stored.argmax(axis=1)[clear])


@pytest.mark.parametrize("name", FAMILY_CASES)
def test_decoding_token_by_token_gives_the_same_bits(
    model_file: Callable[[str], Path], engine: Callable[[str], Logits], name: str
) -> None:
    ids = FAMILY_CASES[name].ids
    with llamac.load(model_file(name), kv_dtype="f32") as model, model.session(context=len(ids)) as session:
        parts = [ids[:3], *([token] for token in ids[3:])]
        steps = np.concatenate([session.eval(part, logits="all") for part in parts])
    assert steps.tobytes() == engine(name).tobytes()


@pytest.mark.parametrize("name", BASES)
def test_every_stage_matches_the_float64_forward_pass(
    folder: Callable[[str], Path], model_file: Callable[[str], Path], name: str
) -> None:
    ids = FAMILY_CASES[name].ids
    expected: dict[tuple[str, int], reference.Array] = {}
    reference.forward(
        hf.read(folder(name), []),
        [ids],
        context=len(ids),
        observe=lambda stage, layer, values: expected.update({(stage, layer): values}),
    )
    with llamac.load(model_file(name), kv_dtype="f32") as model, model.session(context=len(ids)) as session:
        found = session.observe(ids, llamac.STAGES)
    assert expected.keys() <= found.keys()
    for key, values in expected.items():
        unseen = np.isneginf(values).reshape(len(ids), -1)
        stage = found[key].reshape(len(ids), -1)[:, : unseen.shape[1]]  # narrower layers are padded with zeros
        np.testing.assert_array_equal(np.isneginf(stage), unseen)
        rows, exact = (np.where(unseen, 0, x.reshape(len(ids), -1)) for x in (stage, values))
        assert relative_errors(rows, exact).max() <= TOLERANCE, key


@pytest.mark.parametrize("n", [15, 16, 17])
def test_phi3_uses_the_longrope_table_for_its_length(
    folder: Callable[[str], Path], model_file: Callable[[str], Path], n: int
) -> None:
    """A text up to the original context of 16 uses the short table."""
    ids = FAMILY_CASES["phi3"].ids[:n]
    checkpoint = hf.read(folder("phi3"), [])
    short, long = (reference.forward(checkpoint, [ids], context=context)[0] for context in (max(n, 16), 64))
    assert (relative_errors(short, long).max() >= MIN_EFFECT) == (n <= 16)
    with llamac.load(model_file("phi3"), kv_dtype="f32") as model:
        assert relative_errors(model.logits(ids), short).max() <= TOLERANCE
    with llamac.load(model_file("phi3"), kv_dtype="f32", context=64) as model:
        assert relative_errors(model.logits(ids), long).max() <= TOLERANCE


def test_the_documented_tables_are_current(engine: Callable[[str], Logits]) -> None:
    if not DOCUMENT.is_file():
        pytest.skip("the documents are not here: this is an installed copy")
    assert document(engine) == DOCUMENT.read_text("utf-8"), "run: cd tests; python -m golden.parity_table"
