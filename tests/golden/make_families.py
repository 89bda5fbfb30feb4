"""Make family_references.npz: transformers' float32 logits of the cases in family_cases.py.

    cd tests; python -m golden.make_families        (with the extra `parity`: torch and transformers on the CPU)

Like references.npz of make.py, with the names and shapes of each case's tensors as transformers saves them, so that
tests can write the checkpoints without it. Cases that have not changed keep what is stored; remove the file to compute
all of them again.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from golden.cases import Case
from golden.family_cases import FAMILY_CASES
from golden.make import about, auto_class, transformers_logits
from golden.tiny_checkpoints import Config, random_tensor, write_config, write_safetensors

REFERENCES = Path(__file__).parent / "family_references.npz"
Shapes = dict[str, tuple[int, ...]]


@functools.cache
def _stored() -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
    with np.load(REFERENCES) as file:
        notes = json.loads(str(file["about"]))
        stale = [case.name for case in FAMILY_CASES.values() if notes["cases"].get(case.name) != about(case)]
        if stale or len(notes["cases"]) != len(FAMILY_CASES):
            raise ValueError(f"{REFERENCES.name} is stale: run golden.make_families (cases that changed: {stale})")
        return notes, {name: file[name] for name in FAMILY_CASES}


def family_references() -> dict[str, NDArray[np.float32]]:
    """Logits of each case's stored rows, (n, vocab_size). Raises ValueError if the cases have changed since."""
    return _stored()[1]


def family_checkpoint(folder: Path, case: Case, **changes: int | bool) -> Path:
    """Write the Hugging Face directory of a case; return it.

    Args:
        folder: The directory.
        case: The case.
        changes: Other values of its config. Of shapes, they may change `vocab_size` only.
    """
    shapes = {name: tuple(shape) for name, shape in _stored()[0]["shapes"][case.name].items()}
    config = {**case.config, **changes}  # null has a meaning of its own
    of_vocabulary = {
        name: (changes["vocab_size"], *shape[1:])
        for name, shape in shapes.items()
        if "vocab_size" in changes and _is_vocabulary(name)
    }
    return _write(folder, config, shapes | of_vocabulary)


def _is_vocabulary(name: str) -> bool:
    """Whether a tensor of a case that `changes` resize has a row for each token."""
    return name in ("model.embed_tokens.weight", "backbone.embeddings.weight", "lm_head.weight")


def _write(folder: Path, config: Config, shapes: Shapes) -> Path:
    folder.mkdir(parents=True)
    write_config(folder, config)
    write_safetensors(folder / "model.safetensors", {name: random_tensor(name, shapes[name]) for name in shapes})
    return folder


def transformers_shapes(folder: Path, config: Config) -> Shapes:
    """The names and shapes of the tensors that transformers saves for a config."""
    from safetensors import safe_open
    from transformers import AutoConfig

    folder.mkdir(parents=True)
    write_config(folder, config)
    model = auto_class(folder).from_config(AutoConfig.from_pretrained(folder))
    model.save_pretrained(folder / "saved")
    with safe_open(folder / "saved" / "model.safetensors", "np") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in sorted(file.keys())}


def _kept() -> tuple[dict[str, Any], dict[str, Shapes], dict[str, str]]:
    """(logits, shapes, versions that computed them) of the stored cases that have not changed."""
    if not REFERENCES.exists():
        return {}, {}, {}
    with np.load(REFERENCES) as file:
        notes = json.loads(str(file["about"]))
        kept = [case.name for case in FAMILY_CASES.values() if notes["cases"].get(case.name) == about(case)]
        shapes, versions = ({name: notes[kind][name] for name in kept} for kind in ("shapes", "versions"))
        return {name: file[name] for name in kept}, shapes, versions


def main() -> None:
    import torch
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    arrays, shapes, versions = _kept()
    with tempfile.TemporaryDirectory() as temporary:
        for case in (case for case in FAMILY_CASES.values() if case.name not in arrays):
            folder = Path(temporary) / case.name
            shapes[case.name] = transformers_shapes(folder / "shapes", case.config)
            _write(folder / "model", case.config, shapes[case.name])
            arrays[case.name] = transformers_logits(folder / "model", case.ids)[case.stored_rows]
            versions[case.name] = f"torch {torch.__version__}, transformers {transformers.__version__}"
            print(case.name)
    notes = {
        "versions": versions,
        "cases": {case.name: about(case) for case in FAMILY_CASES.values()},
        "shapes": shapes,
    }
    np.savez_compressed(REFERENCES, about=np.array(json.dumps(notes, sort_keys=True)), **arrays)
    print(f"{REFERENCES}: {len(arrays)} cases, {REFERENCES.stat().st_size} bytes")


if __name__ == "__main__":
    main()
