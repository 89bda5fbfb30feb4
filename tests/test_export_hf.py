"""Hugging Face directories: weights in all containers, config.json old and new, and everything that is refused."""

from __future__ import annotations

import io
import json
import math
import pickle
import struct
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

import llamac
from golden.cases import GPT2, LLAMA, LLAMA3, LONGROPE, YARN
from golden.tiny_checkpoints import Config, Tensors, tensors, write_checkpoint, write_safetensors
from llamac.errors import ExportError, UnsupportedError
from llamac.export import hf, hf_config, reference, rope, torch_pickle
from llamac.export.checkpoint import Checkpoint
from llamac.export.convert import export
from llamac.export.safetensors_file import MAX_HEADER_BYTES, read_safetensors
from llamac.export.torch_file import read_torch
from llamac.flatfile import FlatFile

IDS = [5, 0, 300, 17, 17, 42, 8]


def read(folder: Path) -> Checkpoint:
    """The checkpoint of a directory that gives no reason for a warning."""
    warnings: list[str] = []
    checkpoint = hf.read(folder, warnings)
    assert warnings == []
    return checkpoint


def assert_same(one: Checkpoint, other: Checkpoint) -> None:
    assert one.config == other.config
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype
        np.testing.assert_array_equal(tensor.array(), other.tensors[name].array(), err_msg=name)


def changed(config: Config, **changes: object) -> Config:
    """The config with other values; None removes a key."""
    return {key: value for key, value in {**config, **changes}.items() if value is not None}


def write_config(folder: Path, config: Config) -> None:
    (folder / "config.json").write_text(json.dumps(config))


# ---- weights: containers


def raw_safetensors(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A safetensors file of any content. header: JSON, or its text."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def write_shards(folder: Path, weights: Tensors, count: int, write: Callable[[Path, Tensors], None], name: str) -> None:
    """Weights spread over files, and the index of them. name: of the whole file."""
    stem, _, ending = name.rpartition(".")
    files = [f"{stem}-{i + 1:05}-of-{count:05}.{ending}" for i in range(count)]
    places = {tensor: files[i % count] for i, tensor in enumerate(weights)}
    for file in files:
        write(folder / file, {tensor: weights[tensor] for tensor in weights if places[tensor] == file})
    (folder / f"{name}.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))


class Global:
    """Pickles as a name that the reader looks up, whether it exists here or not."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self) -> None:
        """Only what is callable can be pickled as a function."""


class TorchPickler(pickle._Pickler):  # the C one cannot be told to write names of modules that are not there
    """Writes what torch.save writes, without torch."""

    dispatch: ClassVar[dict[Any, Any]] = dict(pickle._Pickler.dispatch)

    def save_named(self, value: Global) -> None:
        module, _, name = value.name.rpartition(".")
        self.write(pickle.GLOBAL + f"{module}\n{name}\n".encode())  # type: ignore[attr-defined]

    dispatch[Global] = save_named

    def persistent_id(self, value: Any) -> Any:
        return value[1] if isinstance(value, tuple) and value[:1] == ("persistent",) else None


class Call:
    """Pickles as a call of a name."""

    def __init__(self, name: str, *arguments: Any) -> None:
        self.name, self.arguments = name, arguments

    def __reduce__(self) -> Any:
        return Global(self.name), self.arguments


def storage(key: str, numbers: int, kind: str = "FloatStorage") -> Any:
    return ("persistent", ("storage", Global(f"torch.{kind}"), key, "cpu", numbers))


def torch_tensor(store: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> Call:
    hooks = Call("collections.OrderedDict")
    return Call("torch._utils._rebuild_tensor_v2", store, offset, shape, strides, False, hooks)


def write_archive(path: Path, document: Any, storages: dict[str, bytes], **members: bytes) -> Path:
    """A file as torch.save writes it."""
    stream = io.BytesIO()
    TorchPickler(stream, 2).dump(document)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", stream.getvalue())
        for name, data in ({"byteorder": b"little"} | members).items():
            archive.writestr(f"archive/{name}", data)
        for key, data in storages.items():
            archive.writestr(f"archive/data/{key}", data)
    return path


def write_torch(path: Path, weights: Tensors) -> None:
    """Weights as a pytorch_model.bin; every matrix with strides of its transpose, as training leaves some of them."""
    document: dict[str, Any] = {}
    storages = {}
    for index, (name, values) in enumerate(weights.items()):
        # in one storage behind seven other numbers, so that the offset counts
        storages[str(index)] = np.zeros(7, "<f4").tobytes() + values.T.astype("<f4").tobytes()
        strides = (1,) if values.ndim == 1 else (1, values.shape[0])
        document[name] = torch_tensor(storage(str(index), values.size + 7), values.shape, strides, 7)
    write_archive(path, document, storages)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("form", ["safetensors-shards", "torch", "torch-shards", "bare-names"])
def test_every_container_holds_the_same_model(tmp_path: Path, config: Config, form: str) -> None:
    expected = read(write_checkpoint(tmp_path / "whole", config))
    folder, weights = tmp_path / form, tensors(config)
    folder.mkdir()
    write_config(folder, config)
    if form == "safetensors-shards":
        write_shards(folder, weights, 3, write_safetensors, "model.safetensors")
    elif form == "torch":
        write_torch(folder / "pytorch_model.bin", weights)
    elif form == "torch-shards":
        write_shards(folder, weights, 2, write_torch, "pytorch_model.bin")
    else:
        prefix = {"llama": "model.", "gpt2": "transformer."}[config["model_type"]]
        bare = {name.removeprefix(prefix): values for name, values in weights.items()}
        write_safetensors(folder / "model.safetensors", bare)
    found = read(folder)
    assert_same(found, expected)
    files = found.metadata["source"]["files"]
    assert files[0] == "config.json"
    assert sorted(files) == sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_files_of_torch_itself_are_read(tmp_path: Path, config: Config) -> None:
    torch = pytest.importorskip("torch")
    expected = read(write_checkpoint(tmp_path / "whole", config))
    write_config(tmp_path, config)
    weights = {name: torch.from_numpy(values.copy()) for name, values in tensors(config).items()}
    state = OrderedDict((name, torch.nn.Parameter(values)) for name, values in weights.items())
    state._metadata = OrderedDict(version=1)  # type: ignore[attr-defined]
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert_same(read(tmp_path), expected)
    torch.save({name: values.bfloat16() for name, values in weights.items()}, tmp_path / "pytorch_model.bin")
    for name, tensor in read(tmp_path).tensors.items():
        if not name.startswith("rope"):
            assert tensor.dtype == "bf16"
            rounded = torch.from_numpy(expected.tensors[name].array()).bfloat16().float().numpy()
            np.testing.assert_array_equal(tensor.array(), rounded)


def as_stored(values: NDArray[np.float32], dtype: str) -> bytes:
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    return values.astype({"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype]).tobytes()


@pytest.mark.parametrize(("dtype", "kept"), [("F64", "f32"), ("F32", "f32"), ("F16", "f16"), ("BF16", "bf16")])
def test_numbers_of_every_dtype_are_exact(tmp_path: Path, dtype: str, kept: str) -> None:
    values = (np.random.RandomState(0).randint(-128, 128, (5, 7)) / 64).astype(np.float32)
    data = as_stored(values, dtype)
    header = {"x": {"dtype": dtype, "shape": [5, 7], "data_offsets": [0, len(data)]}}
    stored = read_safetensors(raw_safetensors(tmp_path / "x.safetensors", header, data))["x"]
    assert stored.lazy().dtype == kept
    np.testing.assert_array_equal(stored.read(0, 5), values)
    np.testing.assert_array_equal(stored.read(2, 3), values[2:3])
    np.testing.assert_array_equal(stored.transposed.read(3, 6), values.T[3:6])
    np.testing.assert_array_equal(stored.transposed.rows(2, 6).read(1, 3), values.T[3:5])


def test_wide_transposed_matrices_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(60, dtype=np.float32).reshape(6, 10)
    write_safetensors(tmp_path / "x.safetensors", {"x": values})
    stored = read_safetensors(tmp_path / "x.safetensors")["x"].transposed
    monkeypatch.setattr("llamac.export.stored.BLOCK_NUMBERS", 20)
    np.testing.assert_array_equal(stored.read(0, 10), values.T)
    np.testing.assert_array_equal(stored.read(4, 7), values.T[4:7])


@pytest.mark.parametrize("form", ["rows", "columns"])
def test_a_tensor_is_never_whole_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    data = bytes(2 * 2048 * 2048)
    header = {"x": {"dtype": "BF16", "shape": [2048, 2048], "data_offsets": [0, len(data)]}}
    stored = read_safetensors(raw_safetensors(tmp_path / "x.safetensors", header, data))["x"]
    monkeypatch.setattr("llamac.export.checkpoint.CHUNK_BYTES", 1 << 19)
    monkeypatch.setattr("llamac.export.stored.BLOCK_NUMBERS", 1 << 16)
    tensor = (stored if form == "rows" else stored.transposed).lazy()
    tracemalloc.start()
    rows = sum(len(chunk) for _, chunk in tensor.chunks())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows == 2048
    assert peak < len(data) / 4


def test_a_file_that_shrinks_is_noticed(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x.safetensors", {"x": np.ones((4, 4), np.float32)})
    stored = read_safetensors(tmp_path / "x.safetensors")["x"]
    (tmp_path / "x.safetensors").write_bytes(b"")
    with pytest.raises(ExportError, match="shorter"):
        stored.read(0, 4)


# ---- weights: what is refused


def entry(begin: int, end: int, dtype: Any = "F32", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


MALFORMED: dict[str, tuple[Any, int, str]] = {
    # header, bytes of data, what the error says
    "no JSON": (b"{nonsense", 0, "no valid JSON"),
    "no UTF-8": (b'{"\xff": 1}', 0, "no valid JSON"),
    "no object": (b"[]", 0, "does not begin with"),
    "space in front": (b" {}", 0, "does not begin with"),
    "too deep": (b'{"a":' + b"[" * 100_000, 0, "no valid JSON"),
    "the same key twice": (b'{"a": 1, "a": 2}', 0, "'a' is there more than once"),
    "a number that is none": (b'{"a": NaN}', 0, "NaN is no JSON number"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, 0, "__metadata__"),
    "an entry that is no object": ({"a": [1]}, 0, "'a': its entry"),
    "a key missing": ({"a": {"dtype": "F32", "shape": [1]}}, 4, "'a': its entry"),
    "a key too many": ({"a": {**entry(0, 4), "b": 1}}, 4, "'a': its entry"),
    "unknown dtype": ({"a": entry(0, 4, "F33")}, 4, "dtype 'F33'"),
    "dtype no text": ({"a": entry(0, 4, ["F32"])}, 4, "dtype"),
    "shape no list": ({"a": entry(0, 4, shape=1)}, 4, "shape is 1"),
    "negative size": ({"a": entry(0, 4, shape=[-1])}, 4, "shape is"),
    "boolean size": ({"a": entry(0, 4, shape=[True])}, 4, "shape is"),
    "fractional size": ({"a": entry(0, 4, shape=[1.0])}, 4, "shape is"),
    "too many dimensions": ({"a": entry(0, 4, shape=[1] * 17)}, 4, "shape is"),
    "three offsets": ({"a": {**entry(0, 4), "data_offsets": [0, 4, 8]}}, 4, "data_offsets is"),
    "offsets in the wrong order": ({"a": {**entry(0, 4), "data_offsets": [4, 0]}}, 4, "data_offsets is"),
    "negative offset": ({"a": {**entry(0, 4), "data_offsets": [-4, 0]}}, 4, "data_offsets is"),
    "wrong number of bytes": ({"a": entry(0, 4, shape=[2])}, 4, "has 8 bytes, but data_offsets give 4"),
    "sizes that overflow": ({"a": entry(0, 0, shape=[1 << 62, 1 << 62])}, 0, "has .* bytes"),
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "'b' overlaps"),
    "gap": ({"a": entry(0, 4), "b": entry(8, 12)}, 12, "'b' leaves a gap"),
    "gap in front": ({"a": entry(4, 8)}, 8, "'a' leaves a gap"),
    "bytes missing": ({"a": entry(0, 8)}, 4, "incomplete"),
    "bytes left": ({"a": entry(0, 4)}, 8, "incomplete"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_safetensors_file_is_refused(tmp_path: Path, name: str) -> None:
    header, count, message = MALFORMED[name]
    with pytest.raises(ExportError, match=message):
        read_safetensors(raw_safetensors(tmp_path / "x.safetensors", header, bytes(count)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "too few"),
        (b"1234567", "too few"),
        (struct.pack("<Q", 3) + b"{}", "ends at byte 11"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "at most"),
        (struct.pack("<Q", (1 << 64) - 1) + b"{}", "at most"),
        (b"<!DOCTYPE html>\n<html>404</html>", "no safetensors file"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(ExportError, match=message):
        read_safetensors(tmp_path / "x.safetensors")


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    for write, reader in ((write_safetensors, read_safetensors), (write_torch, read_torch)):
        write(whole, {"a": np.ones((3, 2), np.float32), "b": np.ones(5, np.float32)})
        data = whole.read_bytes()
        assert set(reader(whole)) == {"a", "b"}
        for length in range(len(data)):
            part.write_bytes(data[:length])
            with pytest.raises(ExportError):
                reader(part)


def flips(data: bytes) -> Iterator[bytes]:
    for index in range(len(data)):
        yield data[:index] + bytes([data[index] ^ 0x15]) + data[index + 1 :]


def test_damage_never_leads_to_another_error(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for write, reader in ((write_safetensors, read_safetensors), (write_torch, read_torch)):
        write(path, {"a": np.ones((3, 2), np.float32)})
        for damaged in flips(path.read_bytes()):
            path.write_bytes(damaged)
            try:
                for stored in reader(path).values():
                    if stored.dtype == "f32" and len(stored.shape) in (1, 2):
                        stored.read(0, stored.shape[0])
            except (ExportError, UnsupportedError):
                pass


class Harmful:
    """Creates a file when it is unpickled by something that obeys."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "builtins.getattr", "torch.load", "numpy.core.x.y"])
def test_a_pickle_that_calls_something_else_is_refused(tmp_path: Path, name: str) -> None:
    path = write_archive(tmp_path / "pytorch_model.bin", {"a": Call(name, "true")}, {})
    with pytest.raises(UnsupportedError, match=name.replace(".", r"\.")):
        read_torch(path)


def test_nothing_of_a_harmful_pickle_is_run(tmp_path: Path) -> None:
    path, trace = tmp_path / "pytorch_model.bin", tmp_path / "trace"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"a": Harmful(trace)}, 2))
    with pytest.raises(UnsupportedError, match="nothing of it was run"):
        read_torch(path)
    assert not trace.exists()
    pickle.loads(pickle.dumps(Harmful(trace)))
    assert trace.exists(), "the trap itself does not work"


@pytest.mark.parametrize("state", [{"dtype": "f64"}, (None, {"dtype": "f64"}), (None, {"__class__": 1})])
@pytest.mark.parametrize("target", ["torch.FloatStorage", "torch._utils._rebuild_tensor_v2"])
def test_a_pickle_cannot_change_what_it_is_given(tmp_path: Path, target: str, state: Any) -> None:
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


BAD_ARCHIVES: dict[str, tuple[Any, dict[str, bytes], str]] = {
    "a number": ({"a": 1}, {}, "more than tensors: 'a'"),
    "a list": ([1], {}, "holds a list"),
    "a name that is none": ({1: torch_tensor(storage("0", 1), (1,), (1,))}, {"0": bytes(4)}, "more than tensors: 1"),
    "no storage": ({"a": torch_tensor(storage("0", 1), (1,), (1,))}, {}, "data/0 is missing"),
    "a short storage": ({"a": torch_tensor(storage("0", 4), (4,), (1,))}, {"0": bytes(15)}, "16 are needed"),
    "too large": ({"a": torch_tensor(storage("0", 4), (5,), (1,))}, {"0": bytes(64)}, "needs 5 numbers"),
    "beyond by offset": ({"a": torch_tensor(storage("0", 4), (4,), (1,), 1)}, {"0": bytes(64)}, "needs 5 numbers"),
    "beyond by stride": ({"a": torch_tensor(storage("0", 8), (2, 4), (5, 1))}, {"0": bytes(64)}, "needs 9 numbers"),
    "negative offset": ({"a": torch_tensor(storage("0", 4), (4,), (1,), -1)}, {"0": bytes(64)}, "in a way"),
    "negative stride": ({"a": torch_tensor(storage("0", 4), (4,), (-1,))}, {"0": bytes(64)}, "in a way"),
    "strides missing": ({"a": torch_tensor(storage("0", 4), (2, 2), (1,))}, {"0": bytes(64)}, "strides"),
    "no storage but a text": ({"a": torch_tensor("x", (4,), (1,))}, {}, "in a way"),
    "another reference": ({"a": ("persistent", ("file", "x"))}, {}, "no storage"),
    "a negative storage": ({"a": torch_tensor(storage("0", -1), (4,), (1,))}, {"0": bytes(64)}, "no storage"),
}


@pytest.mark.parametrize("name", BAD_ARCHIVES)
def test_a_malformed_torch_file_is_refused(tmp_path: Path, name: str) -> None:
    document, storages, message = BAD_ARCHIVES[name]
    with pytest.raises(ExportError, match=message):
        read_torch(write_archive(tmp_path / "pytorch_model.bin", document, storages))


def test_other_files_than_archives_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, 2))  # how the old format begins
    with pytest.raises(UnsupportedError, match=r"torch\.save\(torch\.load"):
        read_torch(path)
    path.write_bytes(b"<html>404</html>")
    with pytest.raises(ExportError, match="no ZIP archive"):
        read_torch(path)
    write_archive(path, {}, {}, byteorder=b"big")
    with pytest.raises(UnsupportedError, match="big-endian"):
        read_torch(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/b", b"")
    with pytest.raises(ExportError, match=r"members data\.pkl"):
        read_torch(path)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "tokenizer.json", "tokenizer.model"])
def test_git_lfs_pointers_are_told_as_such(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path / "tiny", GPT2)
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(POINTER)
    with pytest.raises(ExportError, match=f"{name} is a Git LFS pointer.*git lfs pull"):
        export(folder, tmp_path / "out.bin")


def write_pickle(path: Path, data: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
    return path


def nested(levels: int) -> bytes:
    """Instructions that make a tuple of 2^levels elements, all of them shared."""
    return b")" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(levels))


BOMBS = {
    "memo": (b"\x80\x02}r" + struct.pack("<I", (1 << 32) - 1) + b".", None),
    "bytes": (b"\x80\x05\x8e" + struct.pack("<Q", 1 << 40) + b".", "damaged"),
    "bytearray": (b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".", "damaged"),
    "nested reference": (b"\x80\x02" + nested(100) + b"Q.", "no storage"),
    "nested key": (b"\x80\x02}" + nested(100) + b"Ns.", "texts and numbers as keys"),
    "nested value": (b"\x80\x02}X\x01\x00\x00\x00a" + nested(100) + b"s.", "more than tensors: 'a'"),
    "nested name": (b"\x80\x02" + nested(100) + b"h\x00\x93.", "no text"),
    "nested argument": (b"\x80\x02ccollections\nOrderedDict\n" + nested(100) + b"R.", "damaged"),
    "deep": (b"\x80\x02" + b")" + b"\x85" * 200_000 + b".", "holds a tuple"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_small_pickles_cannot_take_much_time_or_memory(tmp_path: Path, name: str) -> None:
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


def test_instructions_that_plain_tensors_do_not_need_are_refused(tmp_path: Path) -> None:
    for data in (pickle.dumps({"a": {1, 2}}, 4), pickle.dumps({"a": 1}, 0), pickle.dumps({"a": bytearray(9)}, 5)):
        with pytest.raises(UnsupportedError, match="has the instruction"):
            read_torch(write_pickle(tmp_path / "pytorch_model.bin", data))


@pytest.mark.parametrize("data", [b"", b".", b"\x80\x02}", b"\x80\x02t.", b"\x80\x02\x86.", b"\x80\x02)NR."])
def test_a_pickle_that_takes_what_is_not_there_is_damaged(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ExportError, match="damaged"):
        read_torch(write_pickle(tmp_path / "pytorch_model.bin", data))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_named_parameters_of_torch_are_read(tmp_path: Path, protocol: int) -> None:
    """torch.save(dict(model.named_parameters())), where training has hung something on a parameter, and more beside."""
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


# ---- shards


def test_all_that_is_wrong_with_shards_is_told_at_once(tmp_path: Path) -> None:
    write_config(tmp_path, LLAMA)
    weights = tensors(LLAMA)
    write_shards(tmp_path, weights, 2, write_safetensors, "model.safetensors")
    one, two = (tmp_path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    in_two = [name for name, file in index["weight_map"].items() if file == two.name]
    moved = {name: weights[name] for name in in_two[1:]} | {"new": np.ones(1, np.float32)}
    write_safetensors(two, moved | {"model.embed_tokens.weight": weights["model.embed_tokens.weight"]})
    with pytest.raises(ExportError) as caught:
        read(tmp_path)
    for line in (
        f"missing: {in_two[0]} is not in {two.name}",
        f"extra: new in {two.name}",
        f"duplicate: model.embed_tokens.weight is in {two.name}, the index has it in {one.name}",
    ):
        assert line in str(caught.value)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "a/b", "", ".", ".."])
def test_shards_lie_in_the_directory(tmp_path: Path, file: str) -> None:
    write_config(tmp_path, LLAMA)
    places = {"weight_map": {"a": file, "b": "gone.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(places))
    with pytest.raises(ExportError, match=r"(?s)no name of a file.*gone\.safetensors is missing|is missing.*no name"):
        read(tmp_path)


def test_a_directory_without_weights_tells_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"no config\.json"):
        read(tmp_path)
    write_config(tmp_path, LLAMA)
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(ExportError, match=r"has no weights.*adapter_model\.safetensors"):
        read(tmp_path)


def test_the_whole_file_wins_over_shards(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "x", LLAMA)
    (folder / "model.safetensors.index.json").write_text("{}")
    warnings: list[str] = []
    hf.read(folder, warnings)
    assert warnings == ["model.safetensors and model.safetensors.index.json are both there: the latter is ignored"]


# ---- tensors


def test_all_wrong_tensors_are_told_at_once(tmp_path: Path) -> None:
    write_config(tmp_path, GPT2)
    weights = tensors(GPT2)
    del weights["transformer.h.1.ln_1.bias"], weights["transformer.h.0.attn.c_attn.weight"]
    weights["transformer.h.0.mlp.c_fc.weight"] = weights["transformer.h.0.mlp.c_fc.weight"].T
    weights["transformer.h.2.ln_1.weight"] = np.ones(40, np.float32)
    weights["score.weight"] = np.ones((2, 40), np.float32)
    write_safetensors(tmp_path / "model.safetensors", weights)
    with pytest.raises(ExportError) as caught:
        read(tmp_path)
    assert str(caught.value).splitlines()[1:] == [
        "  missing: transformer.h.1.ln_1.bias",
        "  missing: transformer.h.0.attn.c_attn.weight",
        "  misshaped: transformer.h.0.mlp.c_fc.weight is (171, 40), the config needs (40, 171)",
        "  surplus: score.weight (2, 40)",
        "  surplus: transformer.h.2.ln_1.weight (40,)",
    ]


def test_biases_that_the_config_denies_are_surplus(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "x", LLAMA)
    write_config(folder, changed(LLAMA, mlp_bias=False))
    with pytest.raises(ExportError, match=r"surplus: model\.layers\.0\.mlp\.down_proj\.bias"):
        read(folder)


def test_weights_are_no_integers(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "x", LLAMA)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content.replace(b'"F32"', b'"I32"', 1))
    with pytest.raises(ExportError, match=r"dtype: model\.embed_tokens\.weight is i32"):
        read(folder)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (LLAMA, ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"]),
        (GPT2, ["transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias"]),
    ],
)
def test_tables_of_old_versions_are_ignored(tmp_path: Path, config: Config, names: list[str]) -> None:
    expected = read(write_checkpoint(tmp_path / "without", config))
    folder = write_checkpoint(tmp_path / "with", config)
    tables = {name: np.ones((1, 3), np.float32) for name in names}
    write_safetensors(folder / "model.safetensors", tensors(config) | tables)
    assert_same(read(folder), expected)


def test_one_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LLAMA)
    write_safetensors(tmp_path / "model.safetensors", tensors(LLAMA) | {"norm.weight": np.ones(40, np.float32)})
    with pytest.raises(ExportError, match=r"model\.norm\.weight and norm\.weight"):
        read(tmp_path)


TIED = changed(LLAMA, tie_word_embeddings=True)


def with_output(folder: Path, config: Config, output: NDArray[np.float32] | None, embedding: bool = True) -> list[str]:
    """Writes a checkpoint with this output matrix, or none; returns what reading it warns of."""
    weights = {name: values for name, values in tensors(TIED).items() if embedding or "embed_tokens" not in name}
    folder.mkdir(exist_ok=True)
    write_config(folder, config)
    write_safetensors(
        folder / "model.safetensors", weights if output is None else {**weights, "lm_head.weight": output}
    )
    warnings: list[str] = []
    hf.read(folder, warnings)
    return warnings


def test_the_tensors_decide_whether_the_output_is_tied(tmp_path: Path) -> None:
    embedding = tensors(TIED)["model.embed_tokens.weight"]
    other = tensors(LLAMA)["lm_head.weight"]
    tied = read(write_checkpoint(tmp_path / "tied", TIED))
    assert tied.config.tied_output
    assert "output.weight" not in tied.tensors
    untied = read(write_checkpoint(tmp_path / "untied", LLAMA))
    assert not untied.config.tied_output
    for name, output, with_embedding in (("both", embedding, True), ("output", embedding, False)):
        assert with_output(tmp_path / name, TIED, output, with_embedding) == []
        assert_same(read(tmp_path / name), tied)
    (warning,) = with_output(tmp_path / "no output", LLAMA, None)
    assert "not tied, but there is none" in warning
    assert_same(hf.read(tmp_path / "no output", []), tied)
    (warning,) = with_output(tmp_path / "another output", TIED, other)
    assert "they differ: it is not tied" in warning
    assert_same(hf.read(tmp_path / "another output", []), untied)


def test_a_bare_model_is_a_language_model_if_its_output_is_the_embedding(tmp_path: Path) -> None:
    bare = {**TIED, "architectures": ["LlamaModel"]}
    assert with_output(tmp_path / "tied", bare, None) == []
    with pytest.raises(UnsupportedError, match=r"LlamaModel is a language model only .*tie_word_embeddings"):
        with_output(tmp_path / "untied", {**bare, "tie_word_embeddings": False}, None)
    assert with_output(tmp_path / "own", {**bare, "tie_word_embeddings": False}, tensors(LLAMA)["lm_head.weight"]) == []
    for name in ("LlamaForCausalLM", "LLaMAForCausalLM"):
        assert parse({**LLAMA, "architectures": [name]}).model == parse(LLAMA).model


@pytest.mark.parametrize("output", ["none", "equal", "other"])
def test_transformers_ties_likewise(tmp_path: Path, output: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from golden.make import relative_errors, transformers_logits

    matrices = {
        "none": None,
        "equal": tensors(TIED)["model.embed_tokens.weight"],
        "other": tensors(LLAMA)["lm_head.weight"],
    }
    with_output(tmp_path / "x", TIED, matrices[output])
    logits = reference.forward(hf.read(tmp_path / "x", []), [IDS])[0]
    assert relative_errors(transformers_logits(tmp_path / "x", IDS), logits).max() < 1e-4


# ---- config.json


def parse(config: Config) -> hf_config.HfConfig:
    """The parsed config, which gives no reason for a warning."""
    warnings: list[str] = []
    parsed = hf_config.parse_config(json.loads(json.dumps(config)), warnings)
    assert warnings == []
    return parsed


def test_unknown_keys_are_told_all_at_once() -> None:
    with pytest.raises(ExportError) as caught:
        parse({**LLAMA, "attn_logit_softcapping": 50.0, "residual_multiplier": 0.2, "sliding_window": None})
    assert "attn_logit_softcapping is 50.0" in str(caught.value)
    assert "residual_multiplier is 0.2" in str(caught.value)
    assert "sliding_window" not in str(caught.value)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_harmless_keys_are_harmless(config: Config) -> None:
    more = {
        "use_cache": True,
        "attention_dropout": 0.1,
        "pretraining_tp": 2,
        "id2label": {"0": "x"},
        "quantization_config": None,
    }
    assert parse(config | more).model == parse(config).model


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (LLAMA, {"model_type": "mamba"}, "'mamba' is not supported; this version imports llama, gpt2"),
        (LLAMA, {"model_type": None}, "no model_type"),
        (LLAMA, {"model_type": ["llama"]}, "not supported"),
        (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, r"quantization_config is .*gptq.*quantized weights"),
        (LLAMA, {"hidden_act": "xielu"}, "hidden_act 'xielu'"),
        (LLAMA, {"hidden_act": 3}, "hidden_act 3"),
        (LLAMA, {"rope_scaling": {"type": "su", "factor": 2.0}}, "type 'su'"),
        (LLAMA, {"rope_interleaved": True}, "interleaved"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "differ by layer"),
        (GPT2, {"add_cross_attention": True}, "cross-attention"),
        (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "'LlamaForSequenceClassification'.*no language"),
        (LLAMA, {"architectures": ["LlamaForCausalLM", "GPT2LMHeadModel"]}, "'GPT2LMHeadModel'"),
        (LLAMA, {"architectures": 7}, "architectures has 7"),
        (GPT2, {"architectures": ["GPT2DoubleHeadsModel"]}, "supported are GPT2LMHeadModel, GPT2Model"),
    ],
)
def test_what_the_engine_cannot_compute_is_refused(config: Config, change: Config, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        parse(changed(config, **change))


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_missing_keys_are_told_all_at_once(config: Config) -> None:
    needed = {
        "llama": ("hidden_size", "num_attention_heads", "vocab_size", "num_hidden_layers", "intermediate_size"),
        "gpt2": ("n_embd", "n_head", "n_layer", "vocab_size", "n_positions"),
    }[config["model_type"]]
    with pytest.raises(ExportError) as caught:
        parse(changed(config, **dict.fromkeys(needed)))
    for key in needed:
        assert f"{key} is missing" in str(caught.value)


WRONG_SIZES = [0, -1, 1.5, "8", True, [8], 1 << 40]


@pytest.mark.parametrize("value", WRONG_SIZES, ids=repr)
@pytest.mark.parametrize(
    ("config", "key"),
    [
        *((LLAMA, key) for key in ("hidden_size", "num_key_value_heads", "head_dim", "max_position_embeddings")),
        *((GPT2, key) for key in ("n_embd", "n_head", "n_inner", "n_ctx", "vocab_size")),
    ],
)
def test_a_wrong_size_is_told(config: Config, key: str, value: Any) -> None:
    with pytest.raises(ExportError, match=f"{key} is .*, expected an integer from 1 to"):
        parse({**config, key: value})


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads is 3, expected a divisor"),
        (LLAMA, {"hidden_size": 42, "head_dim": None}, "expected a divisor of hidden_size"),
        (LLAMA, {"head_dim": 9}, "even"),
        (LLAMA, {"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5', expected a number"),
        (LLAMA, {"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        (LLAMA, {"rms_norm_eps": 2}, "rms_norm_eps is 2"),
        (LLAMA, {"rope_theta": 0.0}, "out of range"),
        (LLAMA, {"rope_theta": True}, "rope_theta is True"),
        (LLAMA, {"rope_theta": 1e300}, "rope_theta is 1e"),
        (LLAMA, {"attention_bias": "no"}, "attention_bias is 'no', expected true or false"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (LLAMA, {"rope_scaling": [1]}, r"rope_scaling is \[1\], expected an object"),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor is missing"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": "2"}}, r"rope_scaling\.factor is '2'"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 0}}, "out of range"),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2}, "cannot be computed"),
        (LLAMA, {"rope_scaling": {"type": "yarn"}}, r"factor is missing"),
        (LLAMA, {"rope_scaling": {**YARN, "truncate": 1}}, r"truncate is 1, expected true or false"),
        (LLAMA, {"rope_scaling": {**YARN, "attention_factor": 0}}, "out of range"),
        (LLAMA, {"rope_scaling": {**YARN, "mystery": 1}}, r"rope_scaling\.mystery is 1, expected no such key"),
        (LLAMA, {"rope_scaling": {**LONGROPE, "long_factor": [1.0]}}, "long_factor has 1 numbers, expected 5"),
        (LLAMA, {"rope_scaling": {**LONGROPE, "long_factor": 1}}, "long_factor is 1, expected a list"),
        (LLAMA, {"rope_scaling": {**LONGROPE, "long_factor": [0] * 5}}, "out of range"),
        (LLAMA, {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 1}}, "cannot be computed"),
        (LLAMA, {"rope_scaling": YARN, "rope_parameters": LLAMA3}, "both there and differ"),
        (GPT2, {"n_head": 3}, "n_head is 3, expected a divisor of n_embd"),
        (GPT2, {"rope_theta": 1e4}, "rope_theta is 10000.0, expected no such key"),
    ],
)
def test_a_wrong_value_is_told(config: Config, change: Config, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        parse(changed(config, **change))


@pytest.mark.parametrize(
    ("config", "change", "key"),
    [
        (LLAMA, {"num_hidden_layers": 200_000}, "num_hidden_layers"),
        (LLAMA, {"rms_norm_eps": 5.0}, "rms_norm_eps"),
        (LLAMA, {"num_attention_heads": "4", "num_key_value_heads": None, "head_dim": None}, "num_attention_heads"),
        (LLAMA, {"rope_scaling": 3}, "rope_scaling"),
        (LLAMA, {"hidden_size": 1 << 20, "num_attention_heads": 1, "head_dim": None}, "head_dim"),
        (GPT2, {"n_layer": 1 << 30}, "n_layer"),
        (GPT2, {"n_embd": 1 << 19, "n_inner": None}, "n_inner"),
    ],
)
def test_one_wrong_value_is_one_problem(tmp_path: Path, config: Config, change: Config, key: str) -> None:
    folder = write_checkpoint(tmp_path / "tiny", config)
    write_config(folder, changed(config, **{"num_key_value_heads": None, **change}))
    with pytest.raises(ExportError) as caught:
        export(folder, tmp_path / "out.bin", probe_source=None)
    (problem,) = str(caught.value).splitlines()[1:]
    assert problem.strip().startswith(f"{key} is ")
    assert not (tmp_path / "out.bin").exists()


def test_a_damaged_tokenizer_is_told_and_left_out(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", GPT2)
    (folder / "tokenizer.json").write_text("{")
    (warning,) = export(folder, tmp_path / "out.bin", probe_source=None).warnings
    assert "tokenizer.json" in warning
    assert "token ids only" in warning


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1, "a": 2}', '{"rms_norm_eps": NaN}', "\xff"])
def test_a_config_that_is_no_json_object_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ExportError, match=r"config\.json"):
        read(tmp_path)


def test_ambiguous_values_are_told() -> None:
    warnings: list[str] = []
    config = changed(LLAMA, rope_parameters={"rope_type": "default", "rope_theta": 7e3, "factor": 2.0})
    parsed = hf_config.parse_config(config, warnings)
    assert parsed.rope is not None
    assert any("two values of rope_theta" in warning for warning in warnings)
    assert any("factor has no meaning" in warning for warning in warnings)
    assert len(warnings) == 2
    clear = parse(changed(LLAMA, rope_theta=7e3)).rope
    assert clear is not None
    np.testing.assert_array_equal(parsed.rope.inv_freq, clear.inv_freq)
    warnings.clear()
    assert hf_config.parse_config({**GPT2, "n_ctx": 32}, warnings).model.context == 64
    assert len(warnings) == 1


def test_defaults_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    small = {key: LLAMA[key] for key in sizes}
    theirs, ours = transformers.LlamaConfig(**small), parse(small).model
    assert (ours.context, ours.norm_eps, ours.n_kv_heads, ours.head_dim) == (
        theirs.max_position_embeddings,
        theirs.rms_norm_eps,
        theirs.num_key_value_heads,
        theirs.head_dim,
    )
    assert theirs.hidden_act == ours.activation == "silu"
    small = {key: GPT2[key] for key in ("model_type", "vocab_size", "n_embd", "n_layer", "n_head", "n_positions")}
    theirs, ours = transformers.GPT2Config(**small), parse(small).model
    assert (ours.norm_eps, ours.layers[0].ffn_dim) == (theirs.layer_norm_epsilon, 4 * theirs.n_embd)
    assert (theirs.activation_function, ours.activation) == ("gelu_new", "gelu_tanh")


# ---- RoPE

ROPE_KINDS: dict[str, Config | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 2.7},
    "dynamic": {"rope_type": "dynamic", "factor": 1.1},
    "yarn": {"rope_type": "yarn", "factor": 4.3, "original_max_position_embeddings": 4096},
    "yarn-without-ramp": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 6},
    "yarn-all": {**YARN, "mscale": 1.3, "mscale_all_dim": 0.7},
    "llama3": {**LLAMA3, "low_freq_factor": 1.3, "original_max_position_embeddings": 2048},
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 4096,
        "short_factor": [1 + math.sin(i) ** 2 for i in range(64)],
        "long_factor": [2 + 3 * math.cos(i) ** 2 for i in range(64)],
    },
}


def big_llama(theta: float, scaling: Config | None) -> Config:
    config = changed(LLAMA, hidden_size=256, num_attention_heads=2, head_dim=128, max_position_embeddings=8192)
    return changed(config, rope_theta=theta, rope_scaling=scaling)


@pytest.mark.parametrize("theta", [500.0, 10000.0, 12345.6, 500000.0, 1e7])
@pytest.mark.parametrize("kind", ROPE_KINDS)
def test_rope_has_the_bits_of_transformers(monkeypatch: pytest.MonkeyPatch, kind: str, theta: float) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    def powers_of_torch(base: float, dim: int) -> NDArray[np.float32]:
        found: NDArray[np.float32] = (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)).numpy()
        return found

    base = theta
    exact = rope._powers(base, 128)
    distance = np.abs(exact.view(np.int32) - powers_of_torch(base, 128).view(np.int32))
    assert distance.max() <= 1  # torch's last bit depends on the machine's vector width

    monkeypatch.setattr(rope, "_powers", powers_of_torch)
    config = big_llama(theta, ROPE_KINDS[kind])
    ours = parse(config).rope
    theirs_config = transformers.LlamaConfig(**json.loads(json.dumps(config)))
    theirs = LlamaRotaryEmbedding(theirs_config)
    assert ours is not None
    assert ours.inv_freq.dtype == np.float32
    np.testing.assert_array_equal(ours.inv_freq, theirs.inv_freq.numpy())
    assert ours.attention_factor == theirs.attention_scaling
    if kind == "longrope":
        long, _ = ROPE_INIT_FUNCTIONS["longrope"](theirs_config, "cpu", seq_len=4097)
        np.testing.assert_array_equal(ours.inv_freq_long, long.numpy())
        assert ours.original_context == 4096
    else:
        assert ours.inv_freq_long is None


def test_powers_are_correctly_rounded() -> None:
    from decimal import Decimal, localcontext

    with localcontext() as context:
        context.prec = 50
        for theta in (500.0, 10000.0, 500000.0):
            for dim in (10, 64, 80, 128):
                exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
                exact = [Decimal(theta) ** Decimal(float(exponent)) for exponent in exponents]
                found = rope._powers(theta, dim)
                for value, power in zip(found, exact, strict=True):
                    half_ulp = Decimal(float(np.spacing(value))) / 2
                    assert abs(Decimal(float(value)) - power) <= half_ulp


def test_dynamic_is_the_default_up_to_the_context() -> None:
    dynamic, default = parse(big_llama(10000.0, ROPE_KINDS["dynamic"])), parse(big_llama(10000.0, None))
    assert dynamic.rope is not None
    assert default.rope is not None
    np.testing.assert_allclose(dynamic.rope.inv_freq, default.rope.inv_freq, rtol=1e-6)
    assert dynamic.model == default.model


NEW_NAMES = {"rope_type": "type", "dtype": "torch_dtype"}


@pytest.mark.parametrize("kind", [name for name in ROPE_KINDS if name != "longrope"])
def test_old_and_new_keys_give_the_same_file(tmp_path: Path, kind: str) -> None:
    scaling = ROPE_KINDS[kind] or {"rope_type": "default"}
    old_scaling = {NEW_NAMES.get(key, key): value for key, value in scaling.items()}
    old = changed(LLAMA, rope_theta=2e3, torch_dtype="float32", rope_scaling=old_scaling)
    new = changed(
        LLAMA, rope_theta=None, torch_dtype=None, dtype="float32", rope_parameters={**scaling, "rope_theta": 2e3}
    )
    files = []
    for name, config in (("old", old), ("new", new)):
        export(write_checkpoint(tmp_path / name, config), tmp_path / f"{name}.bin", probe_source=None)
        files.append(FlatFile(tmp_path / f"{name}.bin"))
    one, two = files
    assert (one.config, one.layers) == (two.config, two.layers)
    assert [(x.name, x.dtype, x.sha256) for x in one.tensors] == [(x.name, x.dtype, x.sha256) for x in two.tensors]


# ---- chat template


def test_the_chat_template_is_found(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "x", GPT2)
    place = folder / "tokenizer_config.json"
    assert read(folder).chat_template == ""
    place.write_text(json.dumps({"chat_template": "{{ a }}"}))
    assert read(folder).chat_template == "{{ a }}"
    several = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    place.write_text(json.dumps({"chat_template": several}))
    assert read(folder).chat_template == "d"
    place.write_text(json.dumps({"chat_template": several[:1]}))
    warnings: list[str] = []
    assert hf.read(folder, warnings).chat_template == ""
    assert "tools" in warnings[0]
    place.write_text(json.dumps({"chat_template": 1}))
    with pytest.raises(ExportError, match="chat_template"):
        read(folder)
    (folder / "chat_template.jinja").write_text("{{ ß }}", encoding="utf-8")
    assert read(folder).chat_template == "{{ ß }}"
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ExportError, match="UTF-8"):
        read(folder)


# ---- the whole way


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_an_exported_model_computes_what_the_checkpoint_says(tmp_path: Path, config: Config, dtype: str) -> None:
    folder = write_checkpoint(tmp_path / "x", config)
    if dtype == "bf16":
        write_safetensors(
            folder / "model.safetensors", {name: bf16(values) for name, values in tensors(config).items()}
        )
    report = export(folder, tmp_path / "x.bin", dtype=dtype)
    assert report.dtype == dtype
    assert report.source["format"] == "huggingface"
    expected = reference.forward(hf.read(folder, []), [IDS])[0]
    with llamac.load(tmp_path / "x.bin", kv="f32") as model:
        logits = model.logits(IDS)
    error = np.abs(logits - expected).max(axis=1) / np.abs(expected).max(axis=1)
    assert error.max() <= 1e-4


def bf16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Numbers that bf16 holds exactly, cut off."""
    cut: NDArray[np.float32] = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return cut


def test_metadata_says_where_a_model_comes_from(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", GPT2)
    assert read(folder).metadata == {
        "name": "tiny",
        "architecture": "gpt2",
        "source": {"format": "huggingface", "files": ["config.json", "model.safetensors"]},
        "config": GPT2,
    }
