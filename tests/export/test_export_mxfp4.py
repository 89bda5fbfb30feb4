"""Experts in MXFP4: every weight of blocks and scales is read exactly, as transformers unpacks them."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

import llamac
from golden.family_cases import FAMILY_CASES
from golden.make import relative_errors
from golden.make_families import family_checkpoint
from golden.tiny_checkpoints import changed, random_tensor, write_config, write_safetensors
from llamac.errors import ExportError
from llamac.export.convert import export
from llamac.export.dtypes import nearest_dtypes
from llamac.export.gguf import model as gguf_model
from llamac.export.hf import model as hf
from llamac.export.hf.safetensors_file import read_safetensors

SIZES = {40: 64, 52: 32, 104: 64}  # of the family's case: hidden size, width of an expert, and twice it
VALUES = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)  # OCP Microscaling Formats 1.0, table 5
Arrays = dict[str, NDArray[Any]]


def decoded(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(experts, inputs, outputs) of blocks (experts, outputs, n, 16) and scales (experts, outputs, n), one by one."""
    found = np.zeros((*blocks.shape[:3], 32), np.float32)
    for at in np.ndindex(blocks.shape):
        for half, code in enumerate((blocks[at] % 16, blocks[at] // 16)):
            column = (*at[:3], 2 * at[3] + half)
            found[column] = VALUES[code] * 2.0 ** (int(scales[at[:3]]) - 127)
    unpacked: NDArray[np.float32] = found.reshape(*blocks.shape[:2], -1).swapaxes(1, 2)
    return unpacked


def write(path: Path, tensors: Arrays) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, values in tensors.items():
        kind = "U8" if values.dtype == np.uint8 else "F32"
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [end, end + values.nbytes]}
        end += values.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(values.tobytes() for values in tensors.values()))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same gpt-oss with experts in float32 and in MXFP4."""
    root = tmp_path_factory.mktemp("mxfp4")
    case = FAMILY_CASES["gpt_oss"]
    stored = read_safetensors(family_checkpoint(root / "case", case) / "model.safetensors")
    floats: Arrays = {}
    packed: Arrays = {}
    random = np.random.RandomState(5)
    for name, tensor in stored.items():
        shape = tuple(SIZES.get(n, n) for n in tensor.shape)
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = shape
            blocks = random.randint(0, 256, (experts, outputs, inputs // 32, 16)).astype(np.uint8)
            scales = random.randint(120, 128, (experts, outputs, inputs // 32)).astype(np.uint8)
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            floats[name] = decoded(blocks, scales)
        else:
            floats[name] = packed[name] = random_tensor(name, shape)
    config = changed(case.config, hidden_size=64, intermediate_size=32)
    for kind in ("floats", "packed"):
        (root / kind).mkdir()
    write_config(root / "floats", config)
    write_safetensors(
        root / "floats" / "model.safetensors", {name: np.ascontiguousarray(x) for name, x in floats.items()}
    )
    write_config(root / "packed", {**config, "quantization_config": {"quant_method": "mxfp4"}})
    write(root / "packed" / "model.safetensors", packed)
    return root / "floats", root / "packed"


def test_weights_in_mxfp4_are_read_exactly(folders: tuple[Path, Path]) -> None:
    one, other = (hf.read(folder, []) for folder in folders)
    assert one.config == other.config
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        np.testing.assert_array_equal(tensor.array(), other.tensors[name].array(), err_msg=name)
    gate = other.tensors["layers.1.experts.3.ffn_gate.weight"]
    np.testing.assert_array_equal(gate.read(5, 9), gate.array()[5:9])


def test_blocks_in_mxfp4_are_gguf_s(folders: tuple[Path, Path]) -> None:
    tensors = hf.read(folders[1], []).tensors
    matrices = [tensor for name, tensor in tensors.items() if ".experts." in name and len(tensor.shape) == 2]
    assert len(matrices) == 2 * 5 * 3
    for tensor in matrices:
        assert tensor.dtype == "mxfp4"
        assert tensor.blocks is not None
        blocks = tensor.blocks(3, 7)
        unpacked = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4)
        np.testing.assert_array_equal(unpacked, tensor.array()[3:7])


def test_auto_keeps_experts_in_mxfp4(folders: tuple[Path, Path]) -> None:
    most, others = nearest_dtypes(hf.read(folders[1], []).tensors)
    assert (most, {dtype for _, dtype in others}) == ("mxfp4", {"f32"})


def test_a_scale_that_is_no_number_is_an_error(folders: tuple[Path, Path], tmp_path: Path) -> None:
    data = bytearray((folders[1] / "model.safetensors").read_bytes())
    at = data.index(b"experts.down_proj_scales")
    start = json.loads(data[8 : 8 + struct.unpack_from("<Q", data)[0]])
    name = next(name for name in start if name.endswith("down_proj_scales"))
    assert at
    data[8 + struct.unpack_from("<Q", data)[0] + start[name]["data_offsets"][0]] = 255
    (tmp_path / "model.safetensors").write_bytes(data)
    (tmp_path / "config.json").write_bytes((folders[1] / "config.json").read_bytes())
    made = hf.read(tmp_path, [])
    layer = name.split(".")[2]
    with pytest.raises(ExportError, match="MXFP4 scales that are not numbers"):
        made.tensors[f"layers.{layer}.experts.0.ffn_down.weight"].array()


def test_the_engine_computes_with_experts_in_mxfp4(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Products with MXFP4 round their inputs to 15 bits, which these random layers amplify."""
    export(folders[0], tmp_path / "floats.bin", dtype="f32", probe_source=None)
    export(folders[1], tmp_path / "packed.bin", probe_source=None)
    assert (tmp_path / "packed.bin").stat().st_size < 0.6 * (tmp_path / "floats.bin").stat().st_size
    logits = []
    for name in ("floats.bin", "packed.bin"):
        with llamac.load(tmp_path / name, kv_dtype="f32") as model:
            logits.append(model.logits(FAMILY_CASES["gpt_oss"].ids))
    assert relative_errors(logits[1], logits[0]).max() < 0.01


def test_gguf_files_have_the_same_blocks(folders: tuple[Path, Path], tmp_path: Path) -> None:
    config = json.loads((folders[1] / "config.json").read_text())
    write_config(tmp_path, {**config, "swiglu_limit": 7.0, "rope_scaling": {"rope_type": "default"}})
    shutil.copy(folders[1] / "model.safetensors", tmp_path)
    export(tmp_path, tmp_path / "hf.bin", probe_source=None)
    export(tmp_path, tmp_path / "m.gguf", to="gguf", dtype="auto")
    stored = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert {kind for name, kind in stored.items() if name.endswith("_exps.weight")} == {"MXFP4"}
    ours, theirs = hf.read(tmp_path, []), gguf_model.read(tmp_path / "m.gguf", [])
    assert (theirs.config.layers, theirs.tensors.keys()) == (ours.config.layers, ours.tensors.keys())
    for name, tensor in ours.tensors.items():
        again = theirs.tensors[name]
        np.testing.assert_array_equal(again.array(), tensor.array(), name)
        if tensor.blocks and again.blocks:
            np.testing.assert_array_equal(again.blocks(0, 4), tensor.blocks(0, 4), name)
    export(tmp_path / "m.gguf", tmp_path / "gguf.bin", probe_source=None)
    ids = FAMILY_CASES["gpt_oss"].ids
    with llamac.load(tmp_path / "hf.bin") as one, llamac.load(tmp_path / "gguf.bin") as other:
        kinds = {tensor.dtype for tensor in other.file.tensors if ".experts." in tensor.name and len(tensor.shape) == 2}
        assert kinds == {"mxfp4"}
        assert one.logits(ids).tobytes() == other.logits(ids).tobytes()
