"""BitNet's ternary matrices in GGUF files: I2_S, TQ1_0 and TQ2_0 give the numbers of the packed checkpoint."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_samples import converted, finish, metadata
from numpy.typing import NDArray

import llamac
from golden.make_families import family_checkpoint
from golden.ternary import CASE, codes_and_scale, packed, write
from golden.tiny_checkpoints import changed, random_tensor, write_config
from llamac.errors import ExportError
from llamac.export.convert import export
from llamac.export.dtypes import nearest_dtypes
from llamac.export.gguf import model as gguf_model
from llamac.export.gguf.write_keys import add_keys
from llamac.export.hf import model as hf
from llamac.export.hf.safetensors_file import read_safetensors
from llamac.export.hf.write_config import config_differences

SIZES = {40: 256, 52: 384, 20: 128}  # of the family's case: whole blocks of I2_S
CONFIG = changed(CASE.config, hidden_size=256, intermediate_size=384, attention_bias=False)
WHOLE_BLOCKS = {40: 256, 52: 512, 20: 128}  # of the TQ types
Arrays = dict[str, NDArray[Any]]
I2_S = 36


def masters(tmp_path: Path, sizes: dict[int, int]) -> Arrays:
    """Random tensors of a model with these widths, by transformers' names."""
    stored = read_safetensors(family_checkpoint(tmp_path / "case", CASE) / "model.safetensors")
    shapes = {name: tuple(sizes.get(n, n) for n in tensor.shape) for name, tensor in stored.items()}
    return {name: random_tensor(name, shape) for name, shape in shapes.items() if not name.endswith("_proj.bias")}


def is_ternary(name: str, values: NDArray[Any]) -> bool:
    return values.ndim == 2 and ("layers." in name or name.startswith("blk."))


def in_i2_s(codes: NDArray[np.int8], scale: np.float32) -> bytes:
    """One byte after the other."""
    numbers = (codes.reshape(-1) + 1).astype(int)
    found = bytearray(len(numbers) // 4)
    for at, number in enumerate(numbers):
        block, place = divmod(at, 128)
        found[32 * block + place % 32] |= int(number) << (6 - 2 * (place // 32))
    return bytes(found) + struct.pack("<f28x", scale)


def write_gguf(
    path: Path, config: dict[str, Any], tensors: Arrays, kind: str, arch: str = "bitnet-b1.58", part_tensors: int = 0
) -> Path:
    """Write a file whose layers have matrices of this type, or parts with so many tensors; return the last one."""
    _, keys = metadata(config)
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=part_tensors)
    add_keys(writer, {f"{arch}.{key}": value for key, value in keys.items()})
    for name, values in tensors.items():
        if not is_ternary(name, values):
            writer.add_tensor(name, values)
        elif kind == "I2_S":
            scale = np.abs(values).max()
            raw = np.frombuffer(in_i2_s(np.sign(values).astype(np.int8), scale), np.int8)
            writer.add_tensor_info(name, values.shape, np.dtype(np.int8), raw.nbytes, raw_dtype=I2_S)
            writer.tensors[-1][name].tensor = raw
        else:
            chosen = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(values, chosen), raw_dtype=chosen)
    finish(writer)
    return max(path.parent.glob(f"{path.stem}*.gguf"))


def ternary(tensors: Arrays) -> Arrays:
    found = dict(tensors)
    for name, values in tensors.items():
        if is_ternary(name, values):
            codes, scale = codes_and_scale(name, values)
            found[name] = codes * scale
    return found


@pytest.mark.parametrize(("kind", "part_tensors"), [("I2_S", 0), ("I2_S", 9), ("TQ1_0", 0), ("TQ2_0", 0)])
def test_matrices_are_those_of_the_packed_checkpoint(tmp_path: Path, kind: str, part_tensors: int) -> None:
    sizes = SIZES if kind == "I2_S" else WHOLE_BLOCKS
    config = changed(CONFIG, intermediate_size=sizes[52])
    random = masters(tmp_path, sizes)
    folder = tmp_path / "hf"
    folder.mkdir()
    stored: Arrays = {}
    for name, values in random.items():
        stored[name] = values
        if is_ternary(name, values):
            codes, scale = codes_and_scale(name, values)
            stored[name], stored[f"{name}_scale"] = packed(codes), np.array([scale], np.float32)
    quantization = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
    write_config(folder, {**config, "quantization_config": quantization})
    write(folder / "model.safetensors", stored)
    path = write_gguf(tmp_path / "m.gguf", config, converted(config, ternary(random)), kind, part_tensors=part_tensors)
    ours, theirs = gguf_model.read(path, []), hf.read(folder, [])
    assert not config_differences(ours.config, theirs.config)
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in theirs.tensors.items():
        np.testing.assert_array_equal(ours.tensors[name].array(), tensor.array(), err_msg=name)
    assert nearest_dtypes(ours.tensors)[0] == "t2"
    matrix = ours.tensors["layers.1.ffn_up.weight"]
    np.testing.assert_array_equal(matrix.read(5, 21), matrix.array()[5:21])
    logits = []
    for source in (folder, path):
        export(source, tmp_path / "m.bin", probe_source=None, overwrite=True)
        with llamac.load(tmp_path / "m.bin", kv_dtype="f32") as model:
            logits.append(model.logits(CASE.ids))
    assert logits[0].tobytes() == logits[1].tobytes()


def test_blocks_with_other_scales_are_no_t2(tmp_path: Path) -> None:
    tensors = ternary(masters(tmp_path, WHOLE_BLOCKS))
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][3, 256:] *= 2
    config = changed(CONFIG, intermediate_size=512)
    made = gguf_model.read(write_gguf(tmp_path / "m.gguf", config, converted(config, tensors), "TQ2_0", "bitnet"), [])
    assert made.tensors["layers.0.ffn_down.weight"].dtype == "tq2_0"
    assert made.tensors["layers.0.ffn_up.weight"].dtype == "t2"
    assert (made.config.activation, made.config.rounds_inputs) == ("silu", 1)
    np.testing.assert_array_equal(made.tensors["layers.0.ffn_down.weight"].array(), tensors[name])


def test_damaged_i2_s_is_an_error(tmp_path: Path) -> None:
    tensors = converted(CONFIG, ternary(masters(tmp_path, SIZES)))
    path = write_gguf(tmp_path / "m.gguf", CONFIG, tensors, "I2_S")
    name = "blk.1.ffn_up.weight"
    data = bytearray(path.read_bytes())
    raw = in_i2_s(np.sign(tensors[name]).astype(np.int8), np.abs(tensors[name]).max())
    data[data.index(raw)] = 255
    path.write_bytes(data)
    with pytest.raises(ExportError, match="I2_S matrix that is not ternary: the file is damaged"):
        gguf_model.read(path, []).tensors["layers.1.ffn_up.weight"].array()
    path.write_bytes(data.replace(b"bitnet-b1.58", b"llama-b1.580"))
    with pytest.raises(ExportError, match="IQ4_NL_4_4, which GGUF has removed"):
        gguf_model.read(path, [])
