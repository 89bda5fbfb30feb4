"""Make references.npz: transformers' float32 logits of the cases in cases.py.

    cd tests; python -m golden.make        (with the extra `parity`: torch and transformers on the CPU)

For each case the file has the logits of a few positions. The entry "about" has the configs and token ids, and the
versions of the libraries. Weights are not stored: tiny_checkpoints.py makes them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from golden.cases import CASES, Case
from golden.tiny_checkpoints import write_checkpoint
from llamac.export.parity.transformers_run import of_texts

REFERENCES = Path(__file__).parent / "references.npz"


@functools.cache
def stored_references() -> dict[str, NDArray[np.float32]]:
    """Logits of each case's stored rows, (n, vocab_size). Raises ValueError if the cases have changed since."""
    with np.load(REFERENCES) as file:
        notes = json.loads(str(file["about"]))
        stale = [case.name for case in CASES.values() if notes["cases"].get(case.name) != about(case)]
        if stale or len(notes["cases"]) != len(CASES):
            raise ValueError(f"references.npz is stale: run golden.make (cases that changed: {stale})")
        return {name: file[name] for name in CASES}


def relative_errors(logits: NDArray[Any], reference: NDArray[Any]) -> NDArray[np.float64]:
    """max|difference| / max|reference| of each row."""
    difference = np.abs(logits.astype(np.float64) - reference)
    errors: NDArray[np.float64] = difference.max(axis=1) / np.abs(reference).max(axis=1)
    return errors


def about(case: Case) -> dict[str, Any]:
    """Everything on which a stored reference depends."""
    return {"config": case.config, "ids": case.ids, "rows": case.stored_rows}


def auto_class(folder: Path) -> Any:
    """transformers' class that reads a directory: a model with images has another one."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    values = json.loads((folder / "config.json").read_text())
    is_plain = "vision_config" not in values and values["model_type"] != "mistral4"  # which has only the other class
    return AutoModelForCausalLM if is_plain else AutoModelForImageTextToText


def transformers_logits(folder: Path, ids: list[int], double: bool = False) -> NDArray[np.floating[Any]]:
    """transformers' logits of all positions on the CPU, (n, vocab_size), computed in float32 or in float64."""
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # sdpa ignores soft caps, and grouped products of experts do not support float64
    options: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = of_texts(auto_class(folder).from_pretrained(folder, dtype=torch.float32, **options)).eval()
    with torch.no_grad(), all_in_double(model) if double else contextlib.nullcontext():
        logits: NDArray[np.floating[Any]] = model(torch.tensor([ids])).logits[0].numpy()
    return logits


@contextlib.contextmanager
def all_in_double(model: Any) -> Iterator[None]:
    """Compute in float64 during the block.

    Converts the model's weights and the factors of its embeddings, and patches what transformers computes in float32
    for models of any dtype: norms, softmax, cosines and sines. Angles remain float32 products, as in training.
    """
    import torch

    tensor: Any = torch.Tensor
    plain = {name: getattr(tensor, name) for name in ("to", "type", "float", "softmax", "cos", "sin")}

    def is_downcast(x: Any, dtype: Any) -> bool:
        return dtype is torch.float32 and x.dtype is torch.float64

    def to(x: Any, *args: Any, **options: Any) -> Any:
        given = (*args, *options.values())
        return x if any(is_downcast(x, value) for value in given) else plain["to"](x, *args, **options)

    def of_type(x: Any, *args: Any) -> Any:
        return x if any(is_downcast(x, value) for value in args) else plain["type"](x, *args)

    def softmax(x: Any, dim: int, dtype: Any = None) -> Any:
        return plain["softmax"](x, dim, dtype=None if is_downcast(x, dtype) else dtype)

    tensor.to, tensor.type, tensor.softmax = to, of_type, softmax
    tensor.float = lambda x: x if is_downcast(x, torch.float32) else plain["float"](x)
    tensor.cos, tensor.sin = (lambda x: plain["cos"](x.double())), (lambda x: plain["sin"](x.double()))
    try:
        for weights in model.parameters():
            weights.data = weights.data.double()
        for module in model.modules():
            if hasattr(module, "scalar_embed_scale"):
                module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64)
        yield
    finally:
        for name, function in plain.items():
            setattr(tensor, name, function)


def main() -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    arrays: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for case in CASES.values():
            folder = write_checkpoint(Path(temporary) / case.name, case.config)
            arrays[case.name] = transformers_logits(folder, case.ids)[case.stored_rows]
    notes = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "cases": {case.name: about(case) for case in CASES.values()},
    }
    np.savez_compressed(REFERENCES, about=np.array(json.dumps(notes, sort_keys=True)), **arrays)
    print(f"{REFERENCES}: {len(arrays)} cases, {REFERENCES.stat().st_size} bytes")


if __name__ == "__main__":
    main()
