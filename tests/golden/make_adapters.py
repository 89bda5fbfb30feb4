"""Make adapter_references.npz: PEFT's float32 logits of the adapters in adapter_cases.py.

    cd tests; python -m golden.make_adapters        (with the extra `parity`: torch, transformers and peft on the CPU)

For each case the file has adapter_config.json, the names and shapes of the tensors that PEFT saves, and the logits of
a few positions. The values of the tensors are not stored: their names determine them.
"""

from __future__ import annotations

import functools
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from golden.adapter_cases import ADAPTER_CASES, ALL_CASES, TIED, AdapterCase
from golden.cases import CASES
from golden.make import about
from golden.make_families import Shapes, family_checkpoint
from golden.tiny_checkpoints import Config, random_tensor, write_checkpoint, write_safetensors

REFERENCES = Path(__file__).parent / "adapter_references.npz"
PREFIX = "base_model.model."
Logits = NDArray[np.float32]


@functools.cache
def _stored() -> tuple[dict[str, Any], dict[str, Logits]]:
    with np.load(REFERENCES) as file:
        notes = json.loads(str(file["about"]))
        stale = [name for name, case in ADAPTER_CASES.items() if notes["cases"].get(name) != _about(case)]
        if stale or len(notes["cases"]) != len(ADAPTER_CASES):
            raise ValueError(f"{REFERENCES.name} is stale: run golden.make_adapters (cases that changed: {stale})")
        return notes, {name: file[name] for name in ADAPTER_CASES}


def _about(case: AdapterCase) -> dict[str, Any]:
    """Everything on which a stored reference depends."""
    return {"base": about(ALL_CASES[case.base]), "options": case.config, "save": case.save_embeddings}


def adapter_logits(name: str) -> Logits:
    """The logits of a case's stored rows, (n, vocab_size). Raises ValueError if the cases have changed since."""
    return _stored()[1][name]


def adapter_files(name: str) -> tuple[Config, Shapes]:
    """The config of a case's adapter, and the names and shapes of its tensors."""
    config, shapes = _stored()[0]["files"][name]
    return config, {tensor: tuple(shape) for tensor, shape in shapes.items()}


def write_base(folder: Path, name: str) -> Path:
    """Write the Hugging Face directory of a case of cases.py or family_cases.py."""
    case = ALL_CASES[name]
    return write_checkpoint(folder, case.config) if name in CASES else family_checkpoint(folder, case)


def write_adapter(folder: Path, name: str) -> Path:
    """Write the PEFT directory of a case."""
    return _write(folder, *adapter_files(name), tied=ADAPTER_CASES[name].base == TIED)


def _write(folder: Path, config: Config, shapes: Shapes, tied: bool) -> Path:
    """Write a PEFT directory with random tensors, determined by their names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {name: random_tensor(name, shape) for name, shape in shapes.items()}
    for name in tensors:
        if "lora_magnitude" in name:  # lengths of rows: positive
            tensors[name] = np.abs(tensors[name]) + np.float32(1)
        elif "lora_" in name:
            tensors[name] *= np.float32(0.6)
    embedding, head = f"{PREFIX}model.embed_tokens", f"{PREFIX}lm_head"
    if tied and f"{head}.base_layer.weight" in tensors and f"{embedding}.base_layer.weight" in tensors:
        tensors[f"{head}.base_layer.weight"] = tensors[f"{embedding}.base_layer.weight"]
    if tied and config["ensure_weight_tying"]:  # PEFT stores a copy for each module
        if f"{head}.weight" in tensors:
            tensors[f"{head}.weight"] = tensors[f"{embedding}.weight"]
        for one, other in (("lora_A", "lora_embedding_B"), ("lora_B", "lora_embedding_A")):
            if f"{head}.{one}.weight" in tensors:
                tensors[f"{head}.{one}.weight"] = np.ascontiguousarray(tensors[f"{embedding}.{other}"].T)
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    return folder


# ---- with PEFT


def peft_files(folder: Path, base: Path, case: AdapterCase) -> tuple[Config, Shapes]:
    """Save a case with PEFT; return its config, and the names and shapes of its tensors."""
    import peft
    from safetensors import safe_open

    model = peft.get_peft_model(_base(base), peft.LoraConfig(**case.config))
    model.save_pretrained(folder, save_embedding_layers=case.save_embeddings)
    config = json.loads((folder / "adapter_config.json").read_text())
    for key in ("base_model_name_or_path", "auto_mapping", "peft_version"):
        config.pop(key)
    for value in config.values():
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            value.sort()  # PEFT saves sets
    with safe_open(folder / "adapter_model.safetensors", "np") as file:
        return config, {name: tuple(file.get_slice(name).get_shape()) for name in sorted(file.keys())}


def peft_logits(folder: Path, base: Path, ids: list[int]) -> Logits:
    """PEFT's logits with an adapter, (n, vocab_size)."""
    import peft
    import torch

    model = peft.PeftModel.from_pretrained(_base(base), folder).eval()
    with torch.no_grad():
        logits: Logits = model(torch.tensor([ids])).logits[0].numpy()
    return logits


def _base(folder: Path) -> Any:
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def main() -> None:
    import peft
    import torch
    import transformers

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    arrays: dict[str, Any] = {}
    files: dict[str, tuple[Config, Shapes]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for name, case in ADAPTER_CASES.items():
            base = root / "base" / case.base
            if not base.exists():
                base.parent.mkdir(exist_ok=True)
                write_base(base, case.base)
            files[name] = peft_files(root / "saved" / name, base, case)
            _write(root / "drawn" / name, *files[name], tied=case.base == TIED)
            arrays[name] = peft_logits(root / "drawn" / name, base, case.ids)[case.rows]
    notes = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__},
        "cases": {name: _about(case) for name, case in ADAPTER_CASES.items()},
        "files": files,
    }
    np.savez_compressed(REFERENCES, about=np.array(json.dumps(notes, sort_keys=True)), **arrays)
    print(f"{REFERENCES}: {len(arrays)} cases, {REFERENCES.stat().st_size} bytes")


if __name__ == "__main__":
    main()
