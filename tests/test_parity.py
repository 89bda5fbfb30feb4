"""The engine against transformers: exported tiny checkpoints, float32, KV cache in float32.

References are stored (golden/references.npz), so that this runs without torch; where torch and transformers are
installed they are computed anew, for all positions. The float64 forward is the second witness, stage by stage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from golden.cases import CASES, CLOSE_PAIRS, TEETH, TOLERANCE, Case
from golden.make import relative_errors, stored_references, transformers_logits
from golden.tiny_checkpoints import write_checkpoint
from numpy.typing import NDArray

import llamac
from llamac.export import hf, llama2c, reference
from llamac.export.convert import export

Logits = NDArray[np.float32]
Engine = Callable[[Case], Logits]
Folders = Callable[[Case], Path]

# A case for each pair of configs that differ in one key, and one for every case.
ALL = pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
VARIANTS = pytest.mark.parametrize("case", [case for case in CASES.values() if case.base], ids=lambda case: case.name)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The Hugging Face directory of a case."""
    root = tmp_path_factory.mktemp("checkpoints")
    return functools.cache(lambda case_name: write_checkpoint(root / case_name, CASES[case_name].config))


@pytest.fixture(scope="module")
def engine(folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Logits]:
    """The engine's logits of all positions of a case, by way of an exported file."""
    root = tmp_path_factory.mktemp("files")

    @functools.cache
    def logits(case_name: str) -> Logits:
        case, path = CASES[case_name], root / f"{case_name}.bin"
        export(folders(case_name), path, probe_source=None)
        with llamac.load(path, kv="f32", context=case.context) as model:
            return model.logits(case.ids)

    return logits
