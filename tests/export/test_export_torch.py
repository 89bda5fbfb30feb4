"""PyTorch files: tensors are read from pickles without running them; anything else is refused."""

from __future__ import annotations

import pickle
import random
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamac.errors import ExportError, UnsupportedError
from llamac.export.hf import torch_pickle
from llamac.export.hf.torch_file import read_torch
from llamac.export.stored import WEIGHT_DTYPES
from torch_samples import (
    Call,
    Global,
    TorchPickler,
    old_storage,
    storage,
    torch_tensor,
    write_archive,
    write_old,
    write_torch,
)

# ---- reading


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_named_parameters_of_torch_are_read(tmp_path: Path, protocol: int) -> None:
    """torch.save(dict(model.named_parameters())), with attributes on a parameter and other objects."""
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(3, 4)
    layer.weight.is_mine = True
    more = {
        "epoch": 3,
        "best": 0.5,
        "log": [1, None, "x", 2**70],
        "optimizer": torch.optim.Adam([layer.weight]).state_dict(),
    }
    document = {"state_dict": dict(layer.named_parameters()), **more}
    torch.save(document, tmp_path / "x.bin", pickle_protocol=protocol)
    found = read_torch(tmp_path / "x.bin")
    assert set(found) == {"weight", "bias"}
    np.testing.assert_array_equal(found["weight"].read(0, 4), layer.weight.detach().numpy())


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_format_before_torch_1_6_is_read(tmp_path: Path, protocol: int) -> None:
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(3, 4)
    shared = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    document = {
        **dict(layer.named_parameters()),
        "half": torch.randn(5, 3).half(),
        "bf16": torch.randn(5, 3).bfloat16(),
        "double": torch.randn(2, 2, dtype=torch.float64),
        "transposed": shared.T,
        "part": shared[1:3],
    }
    path = tmp_path / "pytorch_model.bin"
    torch.save(document, path, _use_new_zipfile_serialization=False, pickle_protocol=protocol)
    found = read_torch(path)
    assert list(found) == list(document)
    for name, tensor in document.items():
        np.testing.assert_array_equal(found[name].read(0, tensor.shape[0]), tensor.detach().float().numpy())


def test_views_of_a_storage_in_the_old_format_are_read(tmp_path: Path) -> None:
    numbers = np.arange(12, dtype="<f4")
    document = {
        "whole": torch_tensor(old_storage("7", 12), (12,), (1,)),
        "part": Call("torch._utils._rebuild_tensor", old_storage("7", 12, ("8", 4, 6)), 1, (2, 2), (2, 1)),
    }
    found = read_torch(write_old(tmp_path / "x.bin", document, {"7": (12, numbers.tobytes())}))
    np.testing.assert_array_equal(found["whole"].read(0, 12), numbers)
    np.testing.assert_array_equal(found["part"].read(0, 2), [[5, 6], [7, 8]])


@pytest.mark.parametrize("strides", [(0, 1), (1, 1), (1, 3)])
def test_matrices_without_columns_are_read(tmp_path: Path, strides: tuple[int, int]) -> None:
    document = {"none": torch_tensor(old_storage("7", 12), (3, 0), strides)}
    found = read_torch(write_old(tmp_path / "x.bin", document, {"7": (12, bytes(48))}))
    assert found["none"].read(0, 3).shape == (3, 0)


# ---- pickles that do more than hold tensors


def write_pickle(path: Path, data: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
    return path


class Harmful:
    """Creates a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "builtins.getattr", "torch.load", "numpy.core.x.y"])
def test_a_pickle_that_calls_other_functions_is_refused(tmp_path: Path, name: str) -> None:
    path = write_archive(tmp_path / "pytorch_model.bin", {"a": Call(name, "true")}, {})
    with pytest.raises(UnsupportedError, match=name.replace(".", r"\.")):
        read_torch(path)


def test_a_harmful_pickle_is_not_run(tmp_path: Path) -> None:
    path, trace = tmp_path / "pytorch_model.bin", tmp_path / "trace"
    write_pickle(path, pickle.dumps({"a": Harmful(trace)}, 2))
    with pytest.raises(UnsupportedError, match="nothing was run"):
        read_torch(path)
    assert not trace.exists()
    pickle.loads(pickle.dumps(Harmful(trace)))
    assert trace.exists(), "the trap itself does not work"


@pytest.mark.parametrize("state", [{"dtype": "f64"}, (None, {"dtype": "f64"}), (None, {"__class__": 1})])
@pytest.mark.parametrize("target", ["torch.FloatStorage", "torch._utils._rebuild_tensor_v2"])
def test_a_pickle_cannot_modify_our_objects(tmp_path: Path, target: str, state: Any) -> None:
    class Built(Global):
        pass

    def save_built(pickler: Any, value: Built) -> None:
        TorchPickler.save_named(pickler, value)
        pickler.save(state)
        pickler.write(pickle.BUILD)

    TorchPickler.dispatch[Built] = save_built
    path = write_archive(tmp_path / "pytorch_model.bin", {"a": Built(target)}, {})
    with pytest.raises(ExportError, match="damaged"):
        read_torch(path)


# ---- malformed files

BAD_ARCHIVES: dict[str, tuple[Any, dict[str, bytes], str]] = {
    "a number": ({"a": 1}, {}, "more than tensors: 'a'"),
    "a list": ([1], {}, "contains a list"),
    "a name that is none": ({1: torch_tensor(storage("0", 1), (1,), (1,))}, {"0": bytes(4)}, "more than tensors: 1"),
    "not a storage": ({"a": torch_tensor(storage("0", 1), (1,), (1,))}, {}, "data/0 is missing"),
    "a short storage": ({"a": torch_tensor(storage("0", 4), (4,), (1,))}, {"0": bytes(15)}, "16 needed"),
    "too large": ({"a": torch_tensor(storage("0", 4), (5,), (1,))}, {"0": bytes(16)}, "needs 5 numbers"),
    "beyond by offset": ({"a": torch_tensor(storage("0", 4), (4,), (1,), 1)}, {"0": bytes(16)}, "needs 5 numbers"),
    "beyond by stride": ({"a": torch_tensor(storage("0", 8), (2, 4), (5, 1))}, {"0": bytes(32)}, "needs 9 numbers"),
    "negative offset": ({"a": torch_tensor(storage("0", 4), (4,), (1,), -1)}, {"0": bytes(16)}, "does not write"),
    "negative stride": ({"a": torch_tensor(storage("0", 4), (4,), (-1,))}, {"0": bytes(16)}, "does not write"),
    "strides missing": ({"a": torch_tensor(storage("0", 4), (2, 2), (1,))}, {"0": bytes(16)}, "strides"),
    "no storage but a text": ({"a": torch_tensor("x", (4,), (1,))}, {}, "does not write"),
    "another reference": ({"a": ("persistent", ("file", "x"))}, {}, "not a storage"),
    "a negative storage": ({"a": torch_tensor(storage("0", -1), (4,), (1,))}, {"0": bytes(64)}, "not a storage"),
}


@pytest.mark.parametrize("name", BAD_ARCHIVES)
def test_a_malformed_torch_file_is_refused(tmp_path: Path, name: str) -> None:
    document, storages, message = BAD_ARCHIVES[name]
    with pytest.raises(ExportError, match=message):
        read_torch(write_archive(tmp_path / "pytorch_model.bin", document, storages))


def old_tensor(shape: tuple[int, ...] = (4,), strides: tuple[int, ...] = (1,), offset: int = 0, **more: Any) -> Any:
    return torch_tensor(old_storage("0", 4, **more), shape, strides, offset)


FOUR = {"0": (4, bytes(16))}
BAD_OLD: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "another version": ({}, {}, {"version": 1000}, "does not start like"),
    "no machine": ({}, {}, {"machine": 5}, "does not start like"),
    "big endian": ({}, {}, {"machine": {"little_endian": False}}, "big-endian"),
    "no list of storages": ({"a": old_tensor()}, FOUR, {"keys": 5}, "list of storages"),
    "a storage that is not listed": ({"a": old_tensor()}, FOUR, {"keys": []}, "does not match its tensors"),
    "a storage too much": ({}, FOUR, {}, "does not match its tensors"),
    "a storage twice": ({"a": old_tensor()}, FOUR, {"keys": ["0", "0"]}, "does not match its tensors"),
    "another count": ({"a": old_tensor()}, {"0": (5, bytes(20))}, {}, "does not have the expected 4 numbers"),
    "truncated": ({"a": old_tensor()}, {"0": (4, bytes(15))}, {}, "is truncated: the storage 0 ends at"),
    "too large": ({"a": old_tensor((5,))}, FOUR, {}, "needs 5 numbers"),
    "beyond by offset": ({"a": old_tensor(offset=1)}, FOUR, {}, "needs 5 numbers"),
    "beyond its part": ({"a": old_tensor(part=("1", 1, 3))}, FOUR, {}, "needs 4 numbers, its storage has 3"),
    "a part outside": ({"a": old_tensor(part=("1", 1, 4))}, FOUR, {}, "is not inside it"),
    "a part before": ({"a": old_tensor(part=("1", -1, 4))}, FOUR, {}, "is not inside it"),
    "no part": ({"a": old_tensor(part=3)}, FOUR, {}, "is not inside it"),
    "two kinds": ({"a": old_tensor(), "b": old_tensor(kind="HalfStorage")}, FOUR, {}, "two different descriptions"),
    "a reference in the wrong place": ({}, {}, {"version": old_storage("0", 4)}, "refers to storages"),
    "another name": ({"a": Call("os.system", "true")}, {}, {}, r"os\.system"),
}


@pytest.mark.parametrize("name", BAD_OLD)
def test_a_malformed_file_in_the_old_format_is_refused(tmp_path: Path, name: str) -> None:
    document, storages, changes, message = BAD_OLD[name]
    with pytest.raises((ExportError, UnsupportedError), match=message):
        read_torch(write_old(tmp_path / "pytorch_model.bin", document, storages, **changes))


def test_a_damaged_file_in_the_old_format_is_refused_or_read_within_bounds(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    document = {"a": torch_tensor(old_storage("0", 4), (2, 2), (2, 1)), "b": old_tensor(part=("1", 1, 2), shape=(2,))}
    good = write_old(path, document, FOUR).read_bytes()
    rng = random.Random(16)
    for size in range(len(good)):
        path.write_bytes(good[:size])
        with pytest.raises((ExportError, UnsupportedError)):
            read_torch(path)
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(16, len(data))] = rng.randrange(256)
        path.write_bytes(data)
        try:
            found = read_torch(path)
        except (ExportError, UnsupportedError):
            continue
        for tensor in found.values():
            assert tensor.offset + 4 * 4 <= len(data) or tensor.shape != (2, 2)
            if tensor.dtype in WEIGHT_DTYPES and 1 <= len(tensor.shape) <= 2:
                tensor.read(0, tensor.shape[0])


def test_files_that_are_not_archives_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"<html>404</html>")
    with pytest.raises(ExportError, match="neither a ZIP archive"):
        read_torch(path)
    write_archive(path, {}, {}, byteorder=b"big")
    with pytest.raises(UnsupportedError, match="big-endian"):
        read_torch(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/b", b"")
    with pytest.raises(ExportError, match=r"members data\.pkl"):
        read_torch(path)


def test_compressed_storages_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    write_torch(path, {"a": np.ones(1000, np.float32)})
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(UnsupportedError, match="compressed"):
        read_torch(path)


# ---- malformed pickles


def nested(levels: int) -> bytes:
    """Instructions that build a tuple of 2^levels shared elements."""
    return b")" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(levels))


BOMBS = {
    "memo": (b"\x80\x02}r" + struct.pack("<I", (1 << 32) - 1) + b".", None),
    "bytes": (b"\x80\x05\x8e" + struct.pack("<Q", 1 << 40) + b".", "damaged"),
    "bytearray": (b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".", "damaged"),
    "nested reference": (b"\x80\x02" + nested(100) + b"Q.", "not a storage"),
    "nested key": (b"\x80\x02}" + nested(100) + b"Ns.", "strings and numbers as keys"),
    "nested value": (b"\x80\x02}X\x01\x00\x00\x00a" + nested(100) + b"s.", "more than tensors: 'a'"),
    "nested name": (b"\x80\x02" + nested(100) + b"h\x00\x93.", "not a string"),
    "nested argument": (b"\x80\x02ccollections\nOrderedDict\n" + nested(100) + b"R.", "damaged"),
    "deep": (b"\x80\x02" + b")" + b"\x85" * 200_000 + b".", "contains a tuple"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_small_pickles_cannot_use_much_time_or_memory(tmp_path: Path, name: str) -> None:
    data, message = BOMBS[name]
    path = write_pickle(tmp_path / "pytorch_model.bin", data)
    tracemalloc.start()
    try:
        if message is None:
            assert read_torch(path) == {}
        else:
            with pytest.raises((ExportError, UnsupportedError), match=message):
                read_torch(path)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_the_number_of_instructions_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_pickle(tmp_path / "pytorch_model.bin", pickle.dumps({"a": [1] * 1000}, 2))
    monkeypatch.setattr(torch_pickle, "MAX_INSTRUCTIONS", 1000)
    with pytest.raises(ExportError, match="more than 1000 instructions"):
        read_torch(path)


def test_unneeded_instructions_are_refused(tmp_path: Path) -> None:
    for data in (pickle.dumps({"a": {1, 2}}, 4), pickle.dumps({"a": 1}, 0), pickle.dumps({"a": bytearray(9)}, 5)):
        with pytest.raises(UnsupportedError, match="has the instruction"):
            read_torch(write_pickle(tmp_path / "pytorch_model.bin", data))


@pytest.mark.parametrize("data", [b"", b".", b"\x80\x02}", b"\x80\x02t.", b"\x80\x02\x86.", b"\x80\x02)NR."])
def test_a_pickle_that_reads_missing_objects_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ExportError, match="damaged"):
        read_torch(write_pickle(tmp_path / "pytorch_model.bin", data))
