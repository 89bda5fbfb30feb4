"""BitNet's ternary weights: read exactly, computed as transformers does, with the same bits on every path.

The references are transformers' logits, stored in golden/ternary_references.npz.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_samples import small_adapter
from numpy.typing import NDArray

import llamac
from golden.cases import MIN_EFFECT, TOLERANCE
from golden.make import relative_errors
from golden.ternary import (
    CASE,
    KINDS,
    codes_and_scale,
    ternary_checkpoint,
    ternary_references,
    transformers_logits,
    write,
)
from golden.tiny_checkpoints import random_tensor
from llamac import _core
from llamac.errors import ExportError, UnsupportedError
from llamac.export import reference
from llamac.export.convert import export
from llamac.export.hf import model as hf
from llamac.export.hf.safetensors_file import read_safetensors
from llamac.export.lora import merge, read_adapter

MATRIX = "model.layers.1.mlp.down_proj.weight"
SHAPE = (40, 52)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ternary")


@pytest.fixture(scope="module")
def folders(root: Path) -> dict[str, Path]:
    return {kind: ternary_checkpoint(root, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def files(root: Path, folders: dict[str, Path]) -> dict[str, Path]:
    """The exported file of each kind. The folders state no dtype."""
    for kind, folder in folders.items():
        report = export(folder, root / f"{kind}.bin", probe_source=None)
        assert report.dtype == "t2"
        assert not any("quantized" in warning for warning in report.warnings)
    return {kind: root / f"{kind}.bin" for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_checkpoint(files: dict[str, Path], kind: str) -> None:
    masters = random_tensor(MATRIX, SHAPE)
    codes, scale = codes_and_scale(MATRIX, masters)
    if kind == "masters":
        inverse = np.float32(1) / np.float32(np.abs(masters).mean(dtype=np.float64))
        codes = np.clip(np.rint(masters * inverse), -1, 1).astype(np.int8)
        scale = np.float32(1) / inverse
    with llamac.load(files[kind]) as model:
        tensors = {tensor.name: tensor.dtype for tensor in model.file.tensors}
        assert {dtype for name, dtype in tensors.items() if name.endswith("attn_q.weight")} == {"t2"}
        assert tensors["token_embedding.weight"] == tensors["output.weight"] == "f32"
        np.testing.assert_array_equal(model.file.tensor("layers.1.ffn_down.weight"), codes * scale)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_transformers(folders: dict[str, Path], files: dict[str, Path], kind: str) -> None:
    expected = ternary_references()[kind]
    checkpoint = hf.read(folders[kind], [])
    exact = reference.forward(checkpoint, [CASE.ids])[0][CASE.stored_rows]
    assert relative_errors(exact, expected).max() <= TOLERANCE / 2
    with llamac.load(files[kind], kv_dtype="f32") as model:
        assert relative_errors(model.logits(CASE.ids)[CASE.stored_rows], expected).max() <= TOLERANCE
    # a float file computes the same, because its inputs are also rounded
    export(folders[kind], files[kind].with_suffix(".f32"), dtype="f32", probe_source=None)
    with llamac.load(files[kind].with_suffix(".f32"), kv_dtype="f32") as model:
        assert relative_errors(model.logits(CASE.ids)[CASE.stored_rows], expected).max() <= TOLERANCE
    # without the rounding they would differ
    checkpoint.config = replace(checkpoint.config, rounds_inputs=0)
    plain = reference.forward(checkpoint, [CASE.ids])[0][CASE.stored_rows]
    assert relative_errors(plain, expected).max() >= MIN_EFFECT


@pytest.mark.parametrize("kind", KINDS)
def test_stored_logits_are_those_of_the_installed_transformers(folders: dict[str, Path], kind: str) -> None:
    for module in ("torch", "transformers", "accelerate"):
        pytest.importorskip(module)
    live = transformers_logits(folders[kind])[CASE.stored_rows]
    assert relative_errors(live, ternary_references()[kind]).max() <= TOLERANCE / 2


def test_bits_depend_on_no_path(files: dict[str, Path]) -> None:
    """Threads, kernels, chunks and other sequences in a pass."""
    logits: set[bytes] = set()
    with llamac.load(files["packed"], kv_dtype="f32") as model:
        for isa in [name for name, is_supported in _core.isas() if is_supported]:
            for threads in (1, 3):
                with model.session(context=64, threads=threads, isa=isa) as session:
                    logits.add(session.eval(CASE.ids, logits="all").tobytes())
        with model.session(context=64) as session:
            steps = [session.eval(part, logits="all") for part in (CASE.ids[:7], *([i] for i in CASE.ids[7:]))]
            logits.add(np.concatenate(steps).tobytes())
    assert len(logits) == 1


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"use_rms_norm": True}, "use_rms_norm is True, expected False"),
        ({"linear_class": "linear"}, "linear_class is 'linear', expected 'bitlinear' or 'autobitlinear'"),
        ({"modules_to_not_convert": ["q_proj"]}, r"modules_to_not_convert is \['q_proj'\]"),
        ({"bits": 2}, "bits is 2"),
    ],
)
def test_other_quantizations_are_refused(tmp_path: Path, quantization: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        hf.read(ternary_checkpoint(tmp_path, "packed", **quantization), [])


def _without_scale(tensors: dict[str, NDArray[Any]]) -> None:
    del tensors[f"{MATRIX}_scale"]


def _with_zero_scale(tensors: dict[str, NDArray[Any]]) -> None:
    tensors[f"{MATRIX}_scale"] = np.zeros(1, np.float32)


def _with_a_fourth_code(tensors: dict[str, NDArray[Any]]) -> None:
    tensors[MATRIX][3, 5] |= 3 << 4


def _with_floats(tensors: dict[str, NDArray[Any]]) -> None:
    tensors[MATRIX] = random_tensor(MATRIX, SHAPE)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_scale, f"scale: {MATRIX}_scale is not one positive number"),
        (_with_zero_scale, f"scale: {MATRIX}_scale is not one positive number"),
        (_with_a_fourth_code, "packed weights that are not ternary"),
        (_with_floats, f"dtype: {MATRIX} is f32, expected u8: 4 codes per byte"),
    ],
)
def test_damaged_tensors_are_errors(
    folders: dict[str, Path], tmp_path: Path, damage: Callable[[dict[str, NDArray[Any]]], None], message: str
) -> None:
    tensors: dict[str, NDArray[Any]] = {}
    for name, tensor in read_safetensors(folders["packed"] / "model.safetensors").items():
        is_bytes = tensor.dtype == "u8"
        count = int(np.prod(tensor.shape))
        kind = np.uint8 if is_bytes else np.float32
        tensors[name] = np.fromfile(tensor.path, kind, count, offset=tensor.offset).reshape(tensor.shape)
    damage(tensors)
    write(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text((folders["packed"] / "config.json").read_text())
    with pytest.raises(ExportError, match=message):
        hf.read(tmp_path, []).tensors["layers.1.ffn_down.weight"].array()


def test_a_merged_adapter_makes_a_ternary_matrix_f32(folders: dict[str, Path], tmp_path: Path) -> None:
    """Three values per matrix cannot hold the sums."""
    adapter = small_adapter(tmp_path / "adapter")
    base = hf.read(folders["packed"], [])
    name = "layers.0.attn_q.weight"
    expected = merge(base, [(read_adapter(adapter, "bitnet", base.config), 1.0)]).tensors[name].array()
    export(folders["packed"], tmp_path / "merged.bin", lora=adapter, probe_source=None)
    with llamac.load(tmp_path / "merged.bin") as model:
        dtypes = {tensor.name: tensor.dtype for tensor in model.file.tensors}
        assert (dtypes[name], dtypes["layers.0.attn_k.weight"]) == ("f32", "t2")
        np.testing.assert_array_equal(model.file.tensor(name), expected)


def test_llama_has_ternary_weights_too(folders: dict[str, Path], tmp_path: Path) -> None:
    """Without sub-norms, as in the family of LLaMA."""
    stored = read_safetensors(folders["masters"] / "model.safetensors")
    tensors = {name: x.read(0, x.shape[0]) for name, x in stored.items() if "sub_norm" not in name}
    write(tmp_path / "model.safetensors", {name: np.asarray(x) for name, x in tensors.items()})
    config = json.loads((folders["masters"] / "config.json").read_text())
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = hf.read(tmp_path, [])
    assert (checkpoint.config.rounds_inputs, checkpoint.config.layers[0].sub_norms) == (1, 0)
    export(tmp_path, tmp_path / "m.bin", probe_source=None)
    with llamac.load(tmp_path / "m.bin", kv_dtype="f32") as model:
        found = model.logits(CASE.ids)
        assert relative_errors(found, reference.forward(checkpoint, [CASE.ids])[0]).max() <= TOLERANCE
