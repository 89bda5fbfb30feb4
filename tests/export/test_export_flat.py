"""Writing flat files: strip layout, rounding, refused input, tokenizers, metadata, determinism, and memory."""

from __future__ import annotations

import json
import math
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from vocab_samples import WORDS, llama2c_file

import llamac
import llamac.cli as main
from builders import checkpoint, llama_config, write_model
from llamac.engine.inspection.probe_replay import replay_probes
from llamac.errors import ArgumentError, ExportError, ModelError, UnsupportedError
from llamac.export.checkpoint import Checkpoint, LazyTensor
from llamac.export.convert import export
from llamac.export.flat.model import read as read_flat
from llamac.export.flat.plan import make_plan
from llamac.export.flat.stream import write_file
from llamac.export.targets import atomic_file
from llamac.format.flatfile import FlatFile
from llamac.format.probes import decode
from llamac.format.strips import pack_strips, to_dtype

Floats = NDArray[np.float32]


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama2.c checkpoint of version 1, with its tokenizer next to it."""
    folder = tmp_path_factory.mktemp("source")
    vocabulary = llama2c_file(WORDS)
    (folder / "tokenizer.bin").write_bytes(vocabulary)
    write_llama2c_v1(folder / "model.bin", dim=24, hidden=37, layers=2, heads=4, vocab=vocabulary_size(vocabulary))
    return folder / "model.bin"


def vocabulary_size(tokenizer: bytes) -> int:
    count, at = 0, 4
    while at < len(tokenizer):
        at += 8 + struct.unpack_from("<i", tokenizer, at + 4)[0]
        count += 1
    return count


def write_llama2c_v1(path: Path, *, dim: int, hidden: int, layers: int, heads: int, vocab: int) -> None:
    """Write a llama2.c checkpoint quickly: norm weights of 1, and matrices that repeat one block of random numbers."""
    block = np.random.RandomState(1).uniform(-0.1, 0.1, 1 << 18).astype("<f4").tobytes()
    ones = np.ones((2 * layers + 1) * dim, "<f4").tobytes()
    rest = 4 * (vocab * dim + layers * (4 * dim * dim + 3 * dim * hidden))
    with open(path, "wb") as file:
        file.write(
            struct.pack("<Ii7iB", 0x616B3432, 1, dim, hidden, layers, heads, heads, vocab, 64, 1).ljust(256, b"\0")
        )
        file.write(ones)
        while rest > 0:
            rest -= file.write(block[:rest])


# ---- strips


def bits_of(number: np.float32, dtype: str) -> bytes:
    """The stored bytes of a number. bf16 follows its definition: the nearest neighbor, ties to even."""
    if dtype != "bf16":
        return struct.pack("<f" if dtype == "f32" else "<e", number)
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    below, rest = bits >> 16, bits & 0xFFFF
    up = rest > 0x8000 or (rest == 0x8000 and below % 2 == 1)
    return struct.pack("<H", below + up)


def naive_strips(matrix: Floats, dtype: str) -> bytes:
    """Pack a matrix number by number as docs/format.md specifies: strips of 16 rows, lines of 64 bytes."""
    rows, columns = matrix.shape
    per_line = 64 // (16 * len(bits_of(np.float32(0), dtype)))  # columns in a line
    out = []
    for strip in range(math.ceil(rows / 16)):
        for line in range(math.ceil(columns / per_line)):
            for k in range(line * per_line, (line + 1) * per_line):
                for row in range(strip * 16, strip * 16 + 16):
                    inside = row < rows and k < columns
                    out.append(bits_of(matrix[row, k] if inside else np.float32(0), dtype))
    return b"".join(out)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("shape", [(1, 1), (16, 2), (15, 3), (17, 1), (33, 7), (48, 32), (5, 65)])
def test_strips_are_laid_out_as_specified(shape: tuple[int, int], dtype: str) -> None:
    matrix = np.random.RandomState(0).standard_normal(shape).astype(np.float32)
    assert pack_strips(matrix, dtype) == naive_strips(matrix, dtype)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_every_matrix_is_stored_in_strips(dtype: str, tmp_path: Path) -> None:
    made = checkpoint(llama_config(dim=24, n_heads=2, n_kv_heads=1, ffn=37, n_layers=1))
    path = write_model(tmp_path / "model.bin", made, dtype)
    data = path.read_bytes()
    file = FlatFile(path)
    for record in file.tensors:
        values = made.tensors[record.name].array()
        stored = data[record.offset : record.offset + record.bytes]
        assert stored == (naive_strips(values, dtype) if values.ndim == 2 else values.astype("<f4").tobytes()), (
            record.name
        )
        rounded = to_dtype(values, dtype) if values.ndim == 2 else values
        wide = (rounded.astype(np.uint32) << 16).view(np.float32) if rounded.dtype == np.uint16 else rounded
        np.testing.assert_array_equal(file.tensor(record.name), wide.astype(np.float32))
        assert record.offset % 64 == 0
    file.close()


def test_bf16_rounds_to_the_nearest_and_ties_to_even() -> None:
    patterns = [
        0x3F800000,
        0x3F807FFF,
        0x3F808000,
        0x3F808001,
        0x3F818000,
        0x3F817FFF,
        0x00000001,
        0x7F7F7FFF,
        0x80000000,
    ]
    numbers = np.array([*patterns, *(pattern | 0x80000000 for pattern in patterns)], np.uint32).view(np.float32)
    expected = [struct.unpack("<H", bits_of(number, "bf16"))[0] for number in numbers]
    assert expected[:5] == [0x3F80, 0x3F80, 0x3F80, 0x3F81, 0x3F82]
    assert to_dtype(numbers, "bf16").tolist() == expected


def test_any_rows_of_a_flat_file_can_be_read(tmp_path: Path) -> None:
    made = checkpoint(llama_config(n_layers=1))
    read = read_flat(write_model(tmp_path / "model.bin", made))
    for name, tensor in made.tensors.items():
        whole, rows = tensor.array(), tensor.shape[0]
        for first, last in ((0, rows), (1, 2), (rows // 2, rows), (rows - 1, rows), (min(15, rows - 1), min(17, rows))):
            np.testing.assert_array_equal(read.tensors[name].read(first, last), whole[first:last])
    assert read.config == made.config or read.config.norm_eps == np.float32(made.config.norm_eps)
    assert read.tokenizer == made.tokenizer


# ---- refused input


def with_number(made: Checkpoint, name: str, number: float) -> Checkpoint:
    values = made.tensors[name].array().copy()
    values.flat[-1] = number
    made.tensors[name] = LazyTensor.of(values)
    return made


@pytest.mark.parametrize(
    ("number", "dtype", "message"),
    [
        (65520.0, "f16", "holds 65520, which does not fit f16: use --dtype f32 or bf16$"),
        (-7e4, "f16", "holds 70000, which does not fit f16: use --dtype f32 or bf16$"),
        (3.4e38, "f16", "holds 3.4e\\+38, which does not fit f16: use --dtype f32$"),
        (3.4e38, "bf16", "holds 3.4e\\+38, which does not fit bf16: use --dtype f32$"),
        (math.nan, "f32", "not finite"),
        (math.inf, "bf16", "not finite"),
    ],
)
def test_numbers_out_of_range_are_refused_by_tensor_name(
    number: float, dtype: str, message: str, tmp_path: Path
) -> None:
    made = with_number(checkpoint(llama_config(n_layers=1)), "layers.0.ffn_up.weight", number)
    with pytest.raises(ExportError, match=rf"tensor layers\.0\.ffn_up\.weight .*{message}"):
        write_model(tmp_path / "model.bin", made, dtype)
    assert list(tmp_path.iterdir()) == []


def test_the_largest_representable_numbers_are_kept(tmp_path: Path) -> None:
    for number, dtype in ((65519.0, "f16"), (float.fromhex("0x1.fep127"), "bf16")):
        made = with_number(checkpoint(llama_config(n_layers=1)), "output.weight", number)
        file = FlatFile(write_model(tmp_path / "model.bin", made, dtype))
        assert np.isfinite(file.tensor("output.weight")).all()
        file.close()


def test_vectors_are_never_rounded(tmp_path: Path) -> None:
    made = with_number(checkpoint(llama_config(n_layers=1)), "output_norm.weight", 1e30)
    file = FlatFile(write_model(tmp_path / "model.bin", made, "f16"))
    np.testing.assert_array_equal(file.tensor("output_norm.weight"), made.tensors["output_norm.weight"].array())
    file.close()


def test_all_mismatched_tensors_are_reported() -> None:
    made = checkpoint(llama_config())
    del made.tensors["layers.0.attn_k.weight"], made.tensors["output_norm.weight"]
    made.tensors["layers.1.ffn_up.weight"] = LazyTensor.of(np.zeros((3, 5), np.float32))
    made.tensors["layers.7.ffn_up.weight"] = LazyTensor.of(np.zeros((3, 5), np.float32))
    with pytest.raises(ExportError) as caught:
        make_plan(made, "f32")
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    assert lines == [
        "missing: layers.0.attn_k.weight (16, 48)",
        "misshaped: layers.1.ffn_up.weight is (3, 5), the config needs (76, 48)",
        "missing: output_norm.weight (48,)",
        "surplus: layers.7.ffn_up.weight (3, 5)",
    ]


def test_unknown_dtypes_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="expected one of f32, f16, bf16, q8, q4, q4s, q6, q3, q2, t2"):
        export(source, tmp_path / "out.bin", dtype="int8")
    assert list(tmp_path.iterdir()) == []


def test_arguments_without_effect_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="expected one of llamac, hf, llama2c, gguf"):
        export(source, tmp_path / "out", to="onnx")
    with pytest.raises(ArgumentError, match="always f32"):
        export(source, tmp_path / "out", to="llama2c", dtype="bf16")
    with pytest.raises(ArgumentError, match="flat files and GGUF files only"):
        export(source, tmp_path / "out", to="hf", name="x")


def test_unknown_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"nothing: No such file or directory$"):
        export(tmp_path / "nothing", tmp_path / "out.bin")
    for content, message in (
        (b"text" * 99, "a Hugging Face directory"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 60816028\n", "run `git lfs pull`"),
    ):
        (tmp_path / "source").write_bytes(content)
        with pytest.raises((ExportError, ModelError), match=message):
            export(tmp_path / "source", tmp_path / "out.bin")


def test_a_damaged_flat_file_is_refused(source: Path, tmp_path: Path) -> None:
    export(source, tmp_path / "model.bin", probe_source=None)
    data = bytearray((tmp_path / "model.bin").read_bytes())
    data[-1] ^= 1
    (tmp_path / "model.bin").write_bytes(data)
    with pytest.raises(ModelError, match=r"tensor output_norm\.weight: its SHA-256"):
        export(tmp_path / "model.bin", tmp_path / "again.bin")


# ---- tokenizers


def test_a_missing_tokenizer_gives_a_warning_and_a_model_of_ids(source: Path, tmp_path: Path) -> None:
    shutil.copy(source, tmp_path / "model.bin")
    report = export(tmp_path / "model.bin", tmp_path / "out.bin")
    assert len(report.warnings) == 1
    assert "no tokenizer was found" in report.warnings[0]
    with llamac.load(tmp_path / "out.bin") as model:
        assert [result.status for result in replay_probes(model)] == ["identical"] * 3  # probes of random ids
        with pytest.raises(ArgumentError, match="no tokenizer"):
            model.generate("text")


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "large.bin").write_bytes(llama2c_file([*WORDS, "hello", "hellohello"]))
    with pytest.raises(ExportError, match="the tokenizer belongs to another model"):
        export(source, tmp_path / "out.bin", tokenizer=tmp_path / "large.bin")
    with pytest.raises(ExportError, match="does not exist"):
        export(source, tmp_path / "out.bin", tokenizer=tmp_path / "nothing.bin")


def test_a_smaller_tokenizer_limits_the_sampled_ids(source: Path, tmp_path: Path) -> None:
    (tmp_path / "small.bin").write_bytes(llama2c_file(WORDS[:2]))
    export(source, tmp_path / "out.bin", tokenizer=tmp_path / "small.bin", probe_source=None)
    with llamac.load(tmp_path / "out.bin") as model:
        small = vocabulary_size((tmp_path / "small.bin").read_bytes())
        assert model.config["n_token_ids"] == small < model.config["vocab_size"]


def test_a_tokenizer_can_be_left_out(source: Path, tmp_path: Path) -> None:
    report = export(source, tmp_path / "bare.bin", tokenizer=False)
    assert (report.tokenizer, report.warnings) == ("none", [])
    with llamac.load(tmp_path / "bare.bin") as model:
        assert not model.has_tokenizer
        assert {result.status for result in replay_probes(model)} == {"identical"}


@pytest.fixture
def folder_of_two(source: Path, tmp_path: Path) -> Path:
    """A folder with a model of 275 tokens and a tokenizer of 260 ids that does not fit it."""
    shutil.copy(source, tmp_path / "model.bin")
    (tmp_path / "tok260.bin").write_bytes(llama2c_file(WORDS[:1]))
    (tmp_path / "token-of-love.bin").write_bytes(b"no tokenizer")
    return tmp_path


def test_a_neighboring_tokenizer_of_another_model_is_ignored(folder_of_two: Path) -> None:
    report = export(folder_of_two / "model.bin", folder_of_two / "out.bin", probe_source=None)
    assert report.tokenizer == "none"
    size = vocabulary_size((folder_of_two / "tok260.bin").read_bytes())
    (warning,) = report.warnings
    assert f"tok260.bin has {size} ids" in warning
    assert "token-of-love.bin is not a tokenizer" in warning
    with llamac.load(folder_of_two / "out.bin") as model:
        assert f"has its {model.config['vocab_size']} ids" in warning


def test_the_neighboring_tokenizer_that_fits_is_used(folder_of_two: Path, source: Path) -> None:
    shutil.copy(source.with_name("tokenizer.bin"), folder_of_two / "tokenizer.bin")
    shutil.copy(source.with_name("tokenizer.bin"), folder_of_two / "tok-copy.bin")  # an identical copy is not ambiguous
    report = export(folder_of_two / "model.bin", folder_of_two / "out.bin", probe_source=None)
    assert (report.tokenizer, report.warnings) == ("tok-copy.bin", [])


def test_several_fitting_tokenizers_are_an_error(folder_of_two: Path) -> None:
    for name, words in (("tok-a.bin", WORDS), ("tok-b.bin", WORDS[::-1])):
        (folder_of_two / name).write_bytes(llama2c_file(words))
    with pytest.raises(ExportError, match=r"several tokenizers next to .* fit it: tok-a\.bin, tok-b\.bin; choose"):
        export(folder_of_two / "model.bin", folder_of_two / "out.bin")


def test_neighboring_tokenizers_of_a_flat_file_are_ignored(folder_of_two: Path, source: Path) -> None:
    export(folder_of_two / "model.bin", folder_of_two / "out.bin", probe_source=None)
    shutil.copy(source.with_name("tokenizer.bin"), folder_of_two / "tokenizer.bin")
    report = export(folder_of_two / "out.bin", folder_of_two / "again.bin", probe_source=None)
    assert report.tokenizer == "none"
    assert len(report.warnings) == 1


# ---- metadata, probes, determinism


def test_the_same_source_gives_the_same_bytes(source: Path, tmp_path: Path) -> None:
    paths = [tmp_path / "a.bin", tmp_path / "b.bin"]
    for path in paths:
        export(source, path, dtype="bf16", name="twin")
    assert paths[0].read_bytes() == paths[1].read_bytes()
    export(paths[0], tmp_path / "c.bin")  # exporting a flat file loses nothing
    a, c = FlatFile(paths[0]), FlatFile(tmp_path / "c.bin")
    assert a.sections["data"] == c.sections["data"] or a.sections["data"].sha256 == c.sections["data"].sha256
    assert a.metadata == c.metadata
    assert a.config == c.config
    for file in (a, c):
        file.close()


def test_metadata_record_the_source(source: Path, tmp_path: Path) -> None:
    report = export(source, tmp_path / "out.bin", name="Zoë", dtype="f16")
    file = FlatFile(tmp_path / "out.bin")
    raw = file.section("metadata")
    assert raw == json.dumps(json.loads(raw), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert file.metadata == {
        "architecture": "llama",
        "dtype": "f16",
        "exporter": f"llamac {llamac.__version__}",
        "name": "Zoë",
        "source": {"format": "llama2c", "version": 1, "files": ["model.bin"]},
        "tokenizer": {"source": "tokenizer.bin"},
    }
    assert (report.dtype, report.tokenizer, report.bytes) == (
        "f16",
        "tokenizer.bin",
        (tmp_path / "out.bin").stat().st_size,
    )
    assert 16 < report.bits_per_weight < 32
    assert (report.layers, report.dim) == (2, 24)
    assert report.parameters == sum(math.prod(tensor.shape) for tensor in file.tensors)
    file.close()


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"source": "x", "tokenizer": [1], "name": 3},
        {"source": {"format": ["llama2c"]}, "tokenizer": {"source": 5}},
        {"architecture": ["llama"], "source": None},
        {"architecture": "llama", "config": [1]},
        {"architecture": "llama", "name": "\ud800", "mystery": {"\udfff": 1}},
    ],
    ids=str,
)
def test_metadata_of_other_programs_are_tolerated(metadata: Any, tmp_path: Path) -> None:
    made = checkpoint(llama_config(n_layers=1))
    assert made.tokenizer is not None
    data, _, spm = made.tokenizer
    sections = {"metadata": json.dumps(metadata).encode(), "tokenizer": data, "spm": spm or b""}
    with atomic_file(tmp_path / "model.bin") as file:
        write_file(file, make_plan(made, "f32", sections))
    report = export(tmp_path / "model.bin", tmp_path / "again.bin")
    assert isinstance(report.source, dict)
    assert isinstance(report.tokenizer, str)
    assert main.run_command(["inspect", str(tmp_path / "model.bin")]) == 0
    assert main.run_command(["inspect", str(tmp_path / "again.bin"), "--json"]) == 0
    if metadata.get("architecture") == "llama":
        export(tmp_path / "model.bin", tmp_path / "hf", to="hf")
    else:
        with pytest.raises(UnsupportedError, match="families llama, "):
            export(tmp_path / "model.bin", tmp_path / "hf", to="hf")


def test_undecodable_names_are_stored_with_question_marks(source: Path, tmp_path: Path) -> None:
    """Arguments that are not UTF-8 arrive as lone surrogates."""
    export(source, tmp_path / "out.bin", name="a\udcffb", probe_source=None)
    file = FlatFile(tmp_path / "out.bin")
    assert file.metadata["name"] == "a?b"
    file.close()


def test_a_file_has_probes_that_replay_identically_unless_left_out(source: Path, tmp_path: Path) -> None:
    export(source, tmp_path / "with.bin")
    export(source, tmp_path / "without.bin", probe_source=None)
    with llamac.load(tmp_path / "with.bin") as model:
        assert decode(model.file.section("probes"), model.config["vocab_size"]).source == "llamac-numpy"
        assert {result.status for result in replay_probes(model)} == {"identical"}
    with llamac.load(tmp_path / "without.bin") as model:
        assert model.file.sections["probes"].bytes == 0


# ---- memory

PEAK = r"""
import re, sys
from llamac.export.convert import export
export(*sys.argv[1:3], to=sys.argv[3], dtype=sys.argv[4])
# not getrusage: its peak includes that of the parent process
print(1024 * int(re.search(r"VmHWM:\s*(\d+) kB", open("/proc/self/status").read())[1]))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A llama2.c checkpoint of 330 MB with a largest tensor of 17 MB; deleted after this file's tests."""
    folder = tmp_path_factory.mktemp("large")
    write_llama2c_v1(folder / "model.bin", dim=1024, hidden=4096, layers=5, heads=16, vocab=1000)
    yield folder / "model.bin"
    shutil.rmtree(folder)


def test_memory_stays_below_the_largest_tensor_plus_300_mb(large: Path) -> None:
    bound = 4 * 1024 * 4096 + 300e6
    assert large.stat().st_size > bound  # reading the whole file would exceed the bound

    def peak(source: Path, out: Path, to: str, dtype: str) -> int:
        command = [sys.executable, "-c", PEAK, str(source), str(out), to, dtype]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    flat_file = large.with_name("flat.bin")
    assert peak(large, flat_file, "llamac", "f32") < bound  # reads, writes, and the engine's probes on the result
    assert peak(flat_file, large.with_name("hf"), "hf", "bf16") < bound
    assert peak(flat_file, large.with_name("q4s.bin"), "llamac", "q4s") < bound
