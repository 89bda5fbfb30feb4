"""GGUF files on disk: the tensor table, split files, damaged and hostile files."""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_samples import Type, spm_keys, write_gguf, write_tensors
from vocab_samples import gguf_file

from golden.cases import CASES
from golden.tiny_checkpoints import changed, tensors
from llamac.errors import ExportError, LlamacError, ModelError
from llamac.export.convert import export
from llamac.export.gguf import model as gguf_model
from llamac.export.gguf.file import open_gguf
from llamac.format.gguf_metadata import MAX_HEAD_BYTES, parse_head, read_head

LLAMA = changed(CASES["llama"].config, attention_bias=None, mlp_bias=None)
F32, F16, Q8_0 = 0, 1, 8


def entry(name: str, dims: Sequence[int], kind: int = F32, offset: int = 0) -> bytes:
    """Encode a row of the tensor table."""
    text = name.encode()
    head = struct.pack("<Q", len(text)) + text + struct.pack("<I", len(dims))
    return head + b"".join(struct.pack("<Q", dim) for dim in dims) + struct.pack("<IQ", kind, offset)


def made(
    path: Path, entries: Sequence[bytes], data: int = 1024, keys: Sequence[tuple[str, Any]] = (), alignment: int = 32
) -> Path:
    """Write a GGUF file with these rows, followed by `data` bytes."""
    head = gguf_file([("general.architecture", "llama"), *keys], tensors=len(entries)) + b"".join(entries)
    path.write_bytes(head + bytes(-len(head) % alignment) + bytes(data))
    return path


def test_tensors_have_their_types_and_shapes(tmp_path: Path) -> None:
    rows = [entry("a", [4, 3]), entry("b", [32, 2, 2], Q8_0, 64), entry("c", [7], F16, 224)]
    file = open_gguf(made(tmp_path / "m.gguf", rows, 238))
    assert {name: (t.type.name, t.shape) for name, t in file.tensors.items()} == {
        "a": ("F32", (3, 4)),
        "b": ("Q8_0", (2, 2, 32)),
        "c": ("F16", (7,)),
    }
    assert file.tensors["b"].matrix().shape == (4, 32)
    assert file.tensors["a"].vector().shape == (12,)


@pytest.mark.parametrize("alignment", [1, 8, 32, 64, 4096])
def test_the_files_alignment_is_used(tmp_path: Path, alignment: int) -> None:
    path = made(tmp_path / "m.gguf", [entry("a", [4])], 0, [("general.alignment", alignment)], alignment)
    path.write_bytes(path.read_bytes() + struct.pack("<4f", 1, 2, 3, 4))
    assert open_gguf(path).tensors["a"].vector().array().tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([entry("a", [])], "0 dimensions"),
        ([entry("a", [1] * 5)], "5 dimensions"),
        ([entry("", [1])], "its name is empty"),
        ([entry("a", [1]), entry("a", [1], offset=32)], "'a' appears twice"),
    ],
)
def test_a_damaged_tensor_table_is_refused(rows: Sequence[bytes], problem: str) -> None:
    data = gguf_file([], tensors=len(rows)) + b"".join(rows) + bytes(64)
    with pytest.raises(ModelError, match=problem):
        parse_head(data)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([entry("a", [0])], "'a': its dimensions are 0"),
        ([entry("a", [2**63, 2])], "its dimensions are"),
        ([entry("a", [2**32, 2**32, 2**32, 2**32])], "its dimensions are"),  # the product is 0 in 64 bits
        ([entry("a", [2**62])], "its dimensions are"),
        ([entry("a", [2**40])], "'a': it would end at byte 4398046511104 of the data, but the file has 1024"),
        ([entry("a", [257])], "would end at byte 1028"),
        ([entry("a", [4], offset=2**63)], "would end"),
        ([entry("a", [4], offset=2**64 - 32)], "would end"),
        ([entry("a", [4], offset=8)], "its offset is 8, not a multiple of the alignment 32"),
        ([entry("a", [33], Q8_0)], "its rows have 33 numbers, expected whole Q8_0 blocks of 32"),
        ([entry("a", [16, 2], Q8_0)], "its rows have 16 numbers"),
        ([entry("a", [32]), entry("b", [4], offset=96)], "'b': it overlaps 'a'"),
        ([entry("a", [4]), entry("b", [4])], "'b': it overlaps 'a'"),
        ([entry("a", [4], 4)], "its type is Q4_2, which GGUF has removed"),
        ([entry("a", [4], 31)], "its type is Q4_0_4_4, which GGUF has removed"),
        ([entry("a", [4], 9999)], "its type is 9999, which is unknown"),
        ([entry("a", [4], 2**32 - 1)], "its type is 4294967295"),
        ([entry("a", [4], 26)], "its type is I32, which cannot be dequantized"),
    ],
)
def test_impossible_tensors_are_refused(tmp_path: Path, rows: Sequence[bytes], problem: str) -> None:
    with pytest.raises(ExportError, match=problem):
        open_gguf(made(tmp_path / "m.gguf", rows))


def test_the_tensors_missing_from_a_truncated_file_are_summarized(tmp_path: Path) -> None:
    rows = [entry(name, [4], offset=32 * number) for number, name in enumerate("abcdefgh")]
    with pytest.raises(ExportError) as caught:
        open_gguf(made(tmp_path / "m.gguf", rows, data=100))
    assert str(caught.value).splitlines()[1:] == [
        "  'd': it would end at byte 112 of the data, but the file has 100: it is truncated",
        "  4 more are beyond the end of the file: download it again",
    ]


@pytest.mark.parametrize("alignment", [0, 3, 48, True, "32", ("f", 32.0), ("i", -32)])
def test_invalid_alignments_are_refused(tmp_path: Path, alignment: Any) -> None:
    with pytest.raises(ExportError, match=r"general\.alignment is .*, expected a power of two"):
        open_gguf(made(tmp_path / "m.gguf", [entry("a", [4])], keys=[("general.alignment", alignment)]))


def test_an_alignment_beyond_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="but the file has 0: it is truncated"):
        open_gguf(made(tmp_path / "m.gguf", [entry("a", [4])], keys=[("general.alignment", 2**31)]))


@pytest.mark.parametrize("count", [2**20, 2**32, 2**61, 2**63, 2**64 - 1])
def test_the_number_of_tensors_is_bounded(count: int) -> None:
    with pytest.raises(ModelError, match="tensors do not fit in the file, which is damaged or incomplete"):
        parse_head(gguf_file([], tensors=count) + bytes(4096))


def test_implausible_counts_are_refused() -> None:
    row = entry("a", [4])
    with pytest.raises(ModelError, match="140000 tensors, expected at most 131072"):
        parse_head(gguf_file([], tensors=140_000) + row * 140_000)
    with pytest.raises(ModelError, match="70000 metadata entries, expected at most 65536"):
        parse_head(b"GGUF" + struct.pack("<IQQ", 3, 0, 70_000) + bytes(70_000 * 14))


def test_the_number_of_experts_is_bounded(tmp_path: Path) -> None:
    """4096 layers with 4096 experts each have 50 million tensors."""
    layers = 64
    sizes = {"context_length": 8, "embedding_length": 8, "block_count": layers, "attention.head_count": 1}
    sizes |= {"expert_count": 4096, "expert_used_count": 1, "feed_forward_length": 8}
    keys: dict[str, Any] = {f"llama.{key}": value for key, value in sizes.items()}
    routers = {f"blk.{layer}.ffn_gate_inp.weight": np.zeros((1, 8), np.float32) for layer in range(layers)}
    weights = {"token_embd.weight": np.zeros((4, 8), np.float32), **routers}
    path = write_tensors(tmp_path / "m.gguf", weights, keys=keys | {"llama.attention.layer_norm_rms_epsilon": 1e-5})
    with pytest.raises(ExportError, match="262144 experts in all layers, expected at most 131072"):
        gguf_model.read(path, [])


def test_hostile_counts_allocate_no_memory() -> None:
    """A claimed count is not allocated before that many bytes are known to exist."""
    key = struct.pack("<Q", 1) + b"a"
    hostile = [
        gguf_file([], tensors=2**63),
        gguf_file([], tensors=1) + struct.pack("<Q", 2**62),
        *(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<IIQ", 9, kind, 2**33) for kind in range(13)),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**40),
    ]
    tracemalloc.start()
    for data in hostile:
        with pytest.raises(ModelError):
            parse_head(data + bytes(64))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert MAX_HEAD_BYTES <= 1 << 28


def test_errors_about_long_names_are_short(tmp_path: Path) -> None:
    long = "x" * 100_000
    for action in (
        lambda: parse_head(gguf_file([(long, 1), (long, 1)])),
        lambda: open_gguf(made(tmp_path / "m.gguf", [entry(long, [4], 9999)])),
        lambda: open_gguf(made(tmp_path / "m.gguf", [entry(f"{n}{long}", [4], 9999) for n in range(30)])),
    ):
        with pytest.raises(LlamacError) as error:
            action()
        assert len(str(error.value)) < 5000


# ---- split files


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """The parts of a model, split as by llama.cpp's splitter and the `gguf` package."""
    write_gguf(tmp_path / "m.gguf", LLAMA, tensors(LLAMA), part_tensors=8, more=spm_keys())
    found = sorted(tmp_path.glob("m-*.gguf"))
    assert [path.name for path in found] == [f"m-{n:05}-of-00003.gguf" for n in (1, 2, 3)]
    return found


def test_any_part_opens_the_whole_model(parts: list[Path], tmp_path: Path) -> None:
    whole = gguf_model.read(write_gguf(tmp_path / "whole.gguf", LLAMA, tensors(LLAMA)), [])
    for part in parts:
        found = gguf_model.read(part, [])
        assert found.config == whole.config
        assert found.metadata["source"]["files"] == [path.name for path in parts]
        assert found.tensors.keys() == whole.tensors.keys()
        for name, tensor in whole.tensors.items():
            np.testing.assert_array_equal(found.tensors[name].array(), tensor.array(), name)


def test_the_tokenizer_comes_from_the_first_part(parts: list[Path], tmp_path: Path) -> None:
    report = export(parts[2], tmp_path / "m.bin", probe_source=None)
    assert report.tokenizer == parts[0].name
    assert report.warnings == []


def test_missing_parts_are_named(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(ExportError, match=r"missing in its folder: m-00002-of-00003\.gguf$"):
        open_gguf(parts[0])


def test_misnumbered_parts_are_refused(parts: list[Path], tmp_path: Path) -> None:
    renamed = parts[0].rename(tmp_path / "first.gguf")
    with pytest.raises(ExportError, match=r"name them NAME-00001-of-00003\.gguf"):
        open_gguf(renamed)
    parts[1].rename(parts[0])
    renamed.rename(parts[1])
    with pytest.raises(ExportError, match=r"should be part 0 of 3, counted from 0, but its keys say 1 of 3"):
        open_gguf(parts[2])


def test_a_part_of_another_model_is_refused(parts: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_tensors(other / "x.gguf", {"extra": np.ones(3, np.float32)}, keys={"split.no": 2, "split.count": 3})
    (other / "x.gguf").rename(parts[2])
    with pytest.raises(ExportError, match=r"split\.tensors\.count is \d+, but all parts together have \d+ tensors"):
        open_gguf(parts[0])
    keys = {"split.no": 2, "split.count": 3}
    write_tensors(other / "x.gguf", {"token_embd.weight": np.ones(3, np.float32)}, keys=keys).rename(parts[2])
    with pytest.raises(ExportError, match=r"tensor 'token_embd\.weight' is also in an earlier part"):
        open_gguf(parts[0])


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"split.count": 60000}, r"split\.count is 60000, expected at most 9999"),
        ({"split.count": "many"}, r"split\.count is 'many', expected an integer"),
        ({"split.count": 2, "split.no": 0}, "name them"),
    ],
)
def test_invalid_split_numbers_are_errors(tmp_path: Path, keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(ExportError, match=problem):
        open_gguf(write_tensors(tmp_path / "m.gguf", {"a": np.ones(3, np.float32)}, keys=keys))


def test_one_part_of_one_is_a_whole_file(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "m.gguf", {"a": np.ones(3, np.float32)}, keys={"split.count": 1, "split.no": 0})
    assert open_gguf(path).paths == (path,)


# ---- damage


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"GGUF" + struct.pack("<I", 1) + bytes(60), "GGUF version 1 is not supported, expected 2 or 3"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(60), "big-endian; convert it to little-endian first"),
        (b"GGUF" + bytes(60), "GGUF version 0"),
        (b"GGUF", "4 bytes are needed"),
    ],
)
def test_unsupported_gguf_files_are_refused(tmp_path: Path, data: bytes, problem: str) -> None:
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ModelError, match=problem):
        export(tmp_path / "m.gguf", tmp_path / "m.bin")


def test_a_file_truncated_anywhere_is_refused(tmp_path: Path) -> None:
    data = write_gguf(tmp_path / "m.gguf", LLAMA, tensors(LLAMA), more=spm_keys()).read_bytes()
    path = tmp_path / "cut.gguf"
    _, entries = read_head(tmp_path / "m.gguf")
    end = max(row.offset for row in entries)
    for size in [*range(0, len(data) - end, 197), *range(len(data) - end, len(data), 9973), len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(LlamacError):
            gguf_model.read(path, [])


def test_random_damage_raises_only_llamac_errors(tmp_path: Path) -> None:
    """Most changes hit lengths, counts, types and offsets in the head; some hit its strings."""
    plain = write_gguf(tmp_path / "m.gguf", LLAMA, tensors(LLAMA), kind=Type.F16, more=spm_keys()).read_bytes()
    metadata, _ = parse_head(plain)
    numbers = [at for at in range(metadata.end - 8) if plain[at + 3 : at + 4] == b"\0" and plain[at]]
    rng = random.Random(5)
    edges = (0, 1, 2, 7, 31, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1)
    path = tmp_path / "damaged.gguf"
    read = 0
    for _ in range(300):
        damaged = bytearray(plain)
        for _ in range(rng.randint(1, 3)):
            kind = rng.random()
            if kind < 0.5:
                at = rng.choice(numbers)
                struct.pack_into("<Q" if rng.random() < 0.5 else "<I", damaged, at, rng.choice(edges) & 0xFFFFFFFF)
            elif kind < 0.7:
                struct.pack_into("<Q", damaged, rng.randrange(metadata.end - 8), rng.choice(edges))
            elif kind < 0.9:
                damaged[rng.randrange(metadata.end)] = rng.randrange(256)
            else:
                cut = rng.randrange(metadata.end)
                del damaged[cut : cut + rng.randint(1, 16)]
        path.write_bytes(damaged)
        with contextlib.suppress(LlamacError):  # no other exception is allowed
            found = gguf_model.read(path, [])
            for tensor in found.tensors.values():
                assert tensor.read(0, 1).dtype == np.float32
            read += 1
    assert read < 200  # most changes do real damage


def test_tensors_with_nan_are_named(tmp_path: Path) -> None:
    values = tensors(LLAMA)
    values["model.layers.1.mlp.up_proj.weight"][5, 5] = np.nan
    path = write_gguf(tmp_path / "m.gguf", LLAMA, values)
    with pytest.raises(ExportError, match=r"layers\.1\.ffn_up\.weight holds numbers that are not finite"):
        export(path, tmp_path / "m.bin", probe_source=None)


def test_a_file_truncated_after_opening_is_an_error(tmp_path: Path) -> None:
    wide = changed(LLAMA, hidden_size=64, intermediate_size=64, head_dim=16, num_key_value_heads=4)
    path = write_gguf(tmp_path / "m.gguf", wide, tensors(wide), kind=Type.Q8_0)
    made = gguf_model.read(path, [])
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ExportError, match="was truncated while it was read"):
        made.tensors["output.weight"].array()
