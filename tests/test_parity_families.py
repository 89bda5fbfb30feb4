"""Every family against transformers, by the float64 forward and by the engine: tiny checkpoints with real config keys.

References are stored (golden/family_references.npz), so that this runs without torch; where torch and transformers are
installed they are computed anew, for all positions. The texts go beyond sliding windows and original contexts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import llamac
from golden.cases import TEETH, TOLERANCE
from golden.family_cases import FAMILY_CASES
from golden.make import relative_errors, transformers_logits
from golden.make_families import family_checkpoint, family_references
from llamac.export import hf, reference
from llamac.export.convert import export
from llamac.export.families import FAMILIES

Logits = NDArray[np.floating]
VARIANTS = [case.name for case in FAMILY_CASES.values() if case.base]
BASES = [case.name for case in FAMILY_CASES.values() if not case.base]
# float32 transformers against float64.
FLOAT32_NOISE = TOLERANCE / 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The Hugging Face directory of a case."""
    root = tmp_path_factory.mktemp("checkpoints")
    return functools.cache(lambda name: family_checkpoint(root / name, FAMILY_CASES[name]))


@pytest.fixture(scope="module")
def exact(folder: Callable[[str], Path]) -> Callable[[str], Logits]:
    """The logits of all positions of a case by the float64 forward, for a session that just holds them."""

    @functools.cache
    def logits(name: str) -> Logits:
        ids = FAMILY_CASES[name].ids
        checkpoint = hf.read(folder(name), [])
        return reference.forward(checkpoint, [ids], context=len(ids))[0]

    return logits


@pytest.mark.parametrize("name", FAMILY_CASES)
def test_the_float64_forward_gives_the_stored_logits_of_transformers(exact: Callable[[str], Logits], name: str) -> None:
    errors = relative_errors(exact(name)[FAMILY_CASES[name].stored_rows], family_references()[name])
    assert errors.max() <= FLOAT32_NOISE


@pytest.mark.parametrize("name", BASES)
def test_the_float64_forward_gives_the_logits_of_transformers_in_float64(
    exact: Callable[[str], Logits], folder: Callable[[str], Path], name: str
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    live = transformers_logits(folder(name), FAMILY_CASES[name].ids, double=True)
    is_folded = any(module.plus_one for module in FAMILIES[name].modules)  # in float32
    assert relative_errors(exact(name), live).max() <= (2e-6 if is_folded else 1e-9)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_key_of_the_config_moves_the_logits(name: str) -> None:
    rows, base = family_references(), FAMILY_CASES[name].base
    assert base is not None
    assert relative_errors(rows[name], rows[base]).max() >= TEETH
