"""Make encoder_references.npz: transformers' float32 results of the cases in encoder_cases.py.

    cd tests; python -m golden.make_encoders        (with the extra `parity`: torch and transformers on the CPU)

Like family_references.npz, with the last hidden states of a few positions, or with the logit of a cross-encoder for
tokens of both types.
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
from golden.encoder_cases import ENCODER_CASES
from golden.make import about
from golden.tiny_checkpoints import random_tensor, write_config, write_safetensors

REFERENCES = Path(__file__).parent / "encoder_references.npz"
Shapes = dict[str, tuple[int, ...]]


def is_scorer(case: Case) -> bool:
    return str(case.config["architectures"][0]).endswith("ForSequenceClassification")


def types_of(case: Case) -> list[int]:
    """The type of each token of a cross-encoder's case."""
    n = case.n_tokens
    return [int(case.config.get("type_vocab_size", 1) > 1 and i >= n // 3) for i in range(n)]


@functools.cache
def _stored() -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
    with np.load(REFERENCES) as file:
        notes = json.loads(str(file["about"]))
        stale = [case.name for case in ENCODER_CASES.values() if notes["cases"].get(case.name) != about(case)]
        if stale or len(notes["cases"]) != len(ENCODER_CASES):
            raise ValueError(f"{REFERENCES.name} is stale: run golden.make_encoders (cases that changed: {stale})")
        return notes, {name: file[name] for name in ENCODER_CASES}


def encoder_references() -> dict[str, NDArray[np.float32]]:
    """Each case's stored rows, (n, dim), or a cross-encoder's logit, (1, 1)."""
    return _stored()[1]


def encoder_checkpoint(folder: Path, case: Case) -> Path:
    """Write the Hugging Face directory of a case; return it."""
    shapes = {name: tuple(shape) for name, shape in _stored()[0]["shapes"][case.name].items()}
    return _write(folder, case, shapes)


def _write(folder: Path, case: Case, shapes: Shapes) -> Path:
    folder.mkdir(parents=True)
    write_config(folder, case.config)
    write_safetensors(folder / "model.safetensors", {name: random_tensor(name, shapes[name]) for name in shapes})
    return folder


def transformers_results(folder: Path, case: Case, ids: list[int] | None = None) -> NDArray[np.float32]:
    """transformers' last hidden states, (n, dim), or a cross-encoder's logit, (1, 1), in float32."""
    import torch
    from transformers import AutoModel, AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokens = torch.tensor([case.ids if ids is None else ids])
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    with torch.no_grad():
        if is_scorer(case):
            model = AutoModelForSequenceClassification.from_pretrained(folder, **options).eval()
            types = {"token_type_ids": torch.tensor([types_of(case)])} if "type_vocab_size" in case.config else {}
            found = model(tokens, **types).logits
        else:
            found = AutoModel.from_pretrained(folder, **options).eval()(tokens).last_hidden_state[0]
    results: NDArray[np.float32] = found.numpy()
    return results


def _shapes(folder: Path, case: Case) -> Shapes:
    """The names and shapes of the tensors that transformers saves for a case."""
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    folder.mkdir(parents=True)
    write_config(folder, case.config)
    kind: Any = AutoModelForSequenceClassification if is_scorer(case) else AutoModel
    kind.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder / "saved")
    with safe_open(folder / "saved" / "model.safetensors", "np") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in sorted(file.keys())}


def main() -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    arrays: dict[str, Any] = {}
    shapes: dict[str, Shapes] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for case in ENCODER_CASES.values():
            folder = Path(temporary) / case.name
            shapes[case.name] = _shapes(folder / "shapes", case)
            _write(folder / "model", case, shapes[case.name])
            results = transformers_results(folder / "model", case)
            arrays[case.name] = results if is_scorer(case) else results[case.stored_rows]
    notes = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "cases": {case.name: about(case) for case in ENCODER_CASES.values()},
        "shapes": shapes,
    }
    np.savez_compressed(REFERENCES, about=np.array(json.dumps(notes, sort_keys=True)), **arrays)
    print(f"{REFERENCES}: {len(arrays)} cases, {REFERENCES.stat().st_size} bytes")


if __name__ == "__main__":
    main()
