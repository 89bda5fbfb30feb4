"""Makes references.npz: what transformers computes in float32 for the cases of cases.py.

    cd tests; python -m golden.make        (with the extra `parity`: torch and transformers on the CPU)

Stored are, per case, the logits of a few positions, and in "about" the config and token ids that they belong to and the
versions that made them. Weights are not stored: tiny_checkpoints.py draws them anew.
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
    """What a stored reference depends on."""
    return {"config": case.config, "ids": case.ids, "rows": case.stored_rows}


def transformers_logits(folder: Path, ids: list[int], double: bool = False) -> NDArray[np.floating[Any]]:
    """Logits of all positions by transformers on the CPU, (n, vocab_size): float32, or all in float64."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.no_grad(), all_in_double(model) if double else contextlib.nullcontext():
        logits: NDArray[np.floating[Any]] = model(torch.tensor([ids])).logits[0].numpy()
    return logits


@contextlib.contextmanager
def all_in_double(model: Any) -> Iterator[None]:
    """Turns a model to float64, and the two places of LLaMA that compute in float32 whatever the model's dtype is:
    RMSNorm, and cosines and sines (the angles stay float32 products, which is how checkpoints are trained)."""
    import torch
    from transformers.models.llama import modeling_llama

    def norm(self: Any, x: Any) -> Any:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    plain_rotary = modeling_llama.LlamaRotaryEmbedding.forward

    def rotary(self: Any, x: Any, position_ids: Any) -> Any:
        plain_rotary(self, x, position_ids)  # chooses inv_freq
        angles = (position_ids[..., None].float() * self.inv_freq.float()).double()
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling

    plain_norm = modeling_llama.LlamaRMSNorm.forward
    modeling_llama.LlamaRMSNorm.forward, modeling_llama.LlamaRotaryEmbedding.forward = norm, rotary
    try:
        model.double()
        yield
    finally:
        modeling_llama.LlamaRMSNorm.forward, modeling_llama.LlamaRotaryEmbedding.forward = plain_norm, plain_rotary


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
