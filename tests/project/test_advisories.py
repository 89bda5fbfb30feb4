"""Published advisories for software of this kind: llamac refuses the hostile input of each.

Other tests cover truncated and damaged flat files (test_corrupt.py), shards outside their folder (test_export_hf.py), a
token that must not reach another host (CVE-2025-51471, test_hub.py), names that move a terminal's cursor
(test_cli_text.py), templates, tokenizers, pickles and names (test_advisories_text.py) and bombs (test_hostile.py). Some
advisories need no test, because llamac has no such feature: a protocol that exposes memory (CVE-2024-42477 to 42479,
CVE-2026-34159), files of KV states (CVE-2026-43629), a server (CVE-2026-21869, CVE-2026-34756, CVE-2025-46570).
"""

from __future__ import annotations

import ast
import io
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_samples import write_tensors
from vocab_samples import gguf_file, gguf_value, llama2c_file, spm_gguf

import llamac
from golden.tiny_checkpoints import write_safetensors
from llamac.errors import ContextFullError, ExportError, LlamacError, ModelError, TokenizerError
from llamac.export.gguf import model as gguf_model
from llamac.export.gguf.file import open_gguf
from llamac.export.hf.config import parse_config
from llamac.export.hf.safetensors_file import read_safetensors
from llamac.export.hf.torch_file import read_torch
from llamac.export.llama2c import model as llama2c
from llamac.format.gguf_metadata import parse_metadata
from llamac.text.tokenizer import Tokenizer
from torch_samples import storage, torch_tensor, write_archive

ROOT = Path(__file__).parents[2]
COUNTS = (1 << 31, (1 << 32) - 1, (1 << 61) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


def head(version: int = 3, tensors: int = 0, keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def tensor_info(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return gguf_value(name)[1] + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def opened(folder: Path, data: bytes) -> None:
    (folder / "x.gguf").write_bytes(data)
    open_gguf(folder / "x.gguf")


@pytest.mark.parametrize("count", COUNTS)
def test_cve_2024_23605_a_huge_count_of_keys_is_refused(count: int, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="do not fit"):
        opened(tmp_path, head(keys=count) + bytes(64))


@pytest.mark.parametrize("count", COUNTS)
def test_cve_2024_21836_a_huge_count_of_tensors_is_refused(count: int, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="do not fit"):
        opened(tmp_path, head(tensors=count) + bytes(64))


@pytest.mark.parametrize("count", COUNTS)
def test_cve_2024_23496_a_huge_string_length_is_refused(count: int, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        opened(tmp_path, head(keys=1) + struct.pack("<Q", count) + bytes(64))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", [0, 4, 8, 9, 12])
def test_cve_2024_21825_and_2025_66960_and_2025_0315_a_huge_array_length_is_refused(
    count: int, kind: int, tmp_path: Path
) -> None:
    with pytest.raises(ModelError):
        opened(tmp_path, head(keys=1) + gguf_value("a")[1] + struct.pack("<IIQ", 9, kind, count) + bytes(64))


@pytest.mark.parametrize("dims", [[1] * 5, [1] * 1000, []])
def test_cve_2024_21802_a_wrong_number_of_dimensions_is_refused(dims: list[int], tmp_path: Path) -> None:
    with pytest.raises(LlamacError):
        opened(tmp_path, head(tensors=1) + tensor_info("a", dims) + bytes(8192))


@pytest.mark.parametrize("dims", [[1 << 32, 1 << 32], [(1 << 63) - 1, 3], [1 << 62], [1 << 31] * 4])
@pytest.mark.parametrize("kind", [0, 1, 8])
def test_cve_2025_53630_2026_27940_2026_33298_overflowing_sizes_are_refused(
    dims: list[int], kind: int, tmp_path: Path
) -> None:
    """Products of dimensions, and their sizes in bytes, that are small modulo 2^64."""
    with pytest.raises(LlamacError):
        opened(tmp_path, head(tensors=1) + tensor_info("a", dims, kind) + bytes(4096))


@pytest.mark.parametrize("dims", [[0], [0, 5], [5, 0], [1, 1, 0], [4, 1, 1, 0]])
def test_ghsa_3p75_pq92_q28f_zero_dimensions_are_refused(dims: list[int], tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="no weights have"):
        opened(tmp_path, head(tensors=1) + tensor_info("a", dims) + bytes(4096))


def test_lc_6774_and_cve_2024_32878_and_2024_39720_every_truncation_of_a_gguf_file_is_refused(tmp_path: Path) -> None:
    """From an empty file to one byte less than the last tensor needs."""
    write_tensors(tmp_path / "x.gguf", {"a": np.ones((4, 8), np.float32), "b": np.ones(3, np.float32)})
    data = (tmp_path / "x.gguf").read_bytes().rstrip(b"\0")
    opened(tmp_path, data)
    for end in range(len(data)):
        with pytest.raises(LlamacError):
            opened(tmp_path, data[:end])


@pytest.mark.parametrize(
    "value", [0, 3, 1 << 31, ("Q", 1 << 63), ("Q", (1 << 64) - 1), "32", ("[", "I", [32]), ("f", 32.0)]
)
def test_ghsa_96jg_mvhq_q7q7_and_cve_2025_0317_an_invalid_alignment_is_refused(value: Any, tmp_path: Path) -> None:
    """The alignment is not a power of two, has another type, or overflows when sizes are rounded up to it."""
    entries = [("general.alignment", value)]
    with pytest.raises(LlamacError):
        opened(tmp_path, gguf_file(entries, tensors=1) + tensor_info("a", [4]) + bytes(4096))


@pytest.mark.parametrize("kind", ["B", "b", "H", "f", "d", "?"])
def test_llama_cpp_26690_token_types_of_other_types_are_converted_or_refused(kind: str, tmp_path: Path) -> None:
    """Other integer types are converted to the expected int32; the rest is refused."""
    types = dict(spm_gguf())["tokenizer.ggml.token_type"][2]
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_file(spm_gguf()))
    expected = Tokenizer.from_file(path).encode("abc")
    path.write_bytes(gguf_file(spm_gguf(token_type=("[", kind, types))))
    if kind in "BbH":
        assert Tokenizer.from_file(path).encode("abc") == expected
        return
    with pytest.raises(LlamacError):
        Tokenizer.from_file(path)


@pytest.mark.parametrize("index", [10**6, (1 << 31) - 1, (1 << 32) - 2, ("i", -5), ("Q", 1 << 63), "1"])
@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id"])
def test_cve_2025_49847_ids_outside_the_vocabulary_are_refused(index: Any, key: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(gguf_file(spm_gguf(**{key: index})))
    with pytest.raises(LlamacError):
        Tokenizer.from_file(tmp_path / "x.gguf").encode("a", add_special=True)


@pytest.mark.parametrize("length", [-1, -(1 << 31), (1 << 31) - 1])
def test_cve_2025_49847_an_invalid_piece_length_is_refused(length: int, tmp_path: Path) -> None:
    """The length field is signed."""
    data = bytearray(llama2c_file())
    data[8:12] = struct.pack("<i", length)
    (tmp_path / "tokenizer.bin").write_bytes(data)
    with pytest.raises(TokenizerError):
        Tokenizer.from_file(tmp_path / "tokenizer.bin")


@pytest.mark.parametrize("name", ["<0x-1>", "<0x+1>", "<0x 1>", "<0x100>", "<0xG0>", "<0x>"])
def test_llama_cpp_25969_malformed_byte_pieces_are_refused(name: str, tmp_path: Path) -> None:
    """The number in such a name must not be parsed as a byte, for example as byte -1."""
    pieces = dict(spm_gguf())["tokenizer.ggml.tokens"][2]
    pieces = [name if piece == "<0x05>" else piece for piece in pieces]
    (tmp_path / "x.gguf").write_bytes(gguf_file(spm_gguf(tokens=("[", "s", pieces))))
    with pytest.raises(TokenizerError, match="byte pieces"):
        Tokenizer.from_file(tmp_path / "x.gguf").encode("\5")


def test_cve_2026_7482_tensors_beyond_the_end_of_the_file_are_refused(tmp_path: Path) -> None:
    """A converter must not copy bytes from beyond the end of its source, whatever its format."""
    write_tensors(tmp_path / "x.gguf", {"a": np.ones((4, 8), np.float32)})
    data = (tmp_path / "x.gguf").read_bytes()
    with pytest.raises(LlamacError, match="truncated"):
        opened(tmp_path, data.replace(struct.pack("<IQQ", 2, 8, 4), struct.pack("<IQQ", 2, 8, 4096)))
    write_safetensors(tmp_path / "x.safetensors", {"a": np.ones(4, np.float32)})
    data = (tmp_path / "x.safetensors").read_bytes()
    data = data.replace(b'"shape": [4], "data_offsets": [0, 16]', b'"shape": [9], "data_offsets": [0, 36]')
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(ExportError, match="incomplete"):
        read_safetensors(tmp_path / "x.safetensors")
    with pytest.raises(ExportError, match="needs 5 numbers"):
        read_torch(
            write_archive(tmp_path / "x.bin", {"a": torch_tensor(storage("0", 4), (5,), (1,))}, {"0": bytes(16)})
        )
    (tmp_path / "l.bin").write_bytes(np.array([8, 12, 1, 2, 1, 11, 16], "<i4").tobytes() + bytes(400))
    with pytest.raises(ExportError, match="damaged or incomplete"):
        llama2c.read(tmp_path / "l.bin")


KEYS = ("block_count", "attention.head_count", "attention.head_count_kv", "embedding_length", "context_length")


@pytest.mark.parametrize("value", [0, "1", ("i", -1), ("f", 1.0), ("[", "I", []), ("Q", 1 << 63)])
@pytest.mark.parametrize("key", KEYS)
def test_cve_2024_8063_zero_and_mistyped_sizes_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    values = dict.fromkeys(KEYS, 2) | {
        "embedding_length": 8,
        "feed_forward_length": 8,
        "attention.layer_norm_rms_epsilon": ("f", 1e-5),
    }
    entries = [
        ("general.architecture", "llama"),
        *((f"llama.{name}", entry) for name, entry in (values | {key: value}).items()),
    ]
    data = gguf_file(entries, tensors=1) + tensor_info("token_embd.weight", [8, 4])
    (tmp_path / "x.gguf").write_bytes(data + bytes(-len(data) % 32) + bytes(4 * 8 * 4))
    with pytest.raises(LlamacError, match=rf"llama\.{key}"):
        gguf_model.read(tmp_path / "x.gguf", [])


def test_cve_2025_52566_long_texts_overflow_nothing() -> None:
    """A long text is tokenized whole, and tokens that do not fit the context are refused."""
    with llamac.load("stories") as model:
        text = "a 1 " * 200_000
        ids = model.tokenize(text)
        assert len(ids) > 300_000
        assert model.detokenize(ids[-40:]) == text[-len(model.detokenize(ids[-40:])) :]
        with pytest.raises(ContextFullError):
            model.logits(ids)
        with model.session(context=4) as session, pytest.raises(ContextFullError):
            session.eval(ids[:5])


@pytest.mark.parametrize("layers", [0, 33, 10**6, 1 << 31, 1 << 63])
def test_acestep_98_impossible_layer_counts_are_refused(layers: int) -> None:
    """A layer count from a file must not become the size of an array unchecked."""
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 9,
        "n_embd": 8,
        "n_head": 2,
        "n_positions": 8,
    }
    if layers == 33:
        assert len(parse_config({**config, "n_layer": layers}, []).model.layers) == 33
        return
    with pytest.raises(LlamacError, match="n_layer"):
        parse_config({**config, "n_layer": layers}, [])


def test_gguf_py_f001_deeply_nested_arrays_are_refused() -> None:
    with pytest.raises(ModelError, match="nested"):
        parse_metadata(head(keys=1) + gguf_value("a")[1] + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000)


def test_cve_2024_3568_no_module_can_run_pickles() -> None:
    """Also CVE-2025-69872: no module of the package can run pickles, or text as code."""
    banned_modules = {"pickle", "_pickle", "marshal", "shelve", "dill", "joblib", "diskcache", "yaml"}
    own_pipe = {"worker.py", "worker_main.py"}  # marshal encodes requests to our workers, never their answers
    files = [path for folder in ("llamac", "export", "models") for path in (ROOT / folder).rglob("*.py")]
    if not files:
        pytest.skip("the sources are not here: this is an installed copy")
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").split(".")[0]]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "__import__"), f"{path}:{node.lineno}"
            allowed = {"marshal"} if path.name in own_pipe else set()
            assert not (banned_modules - allowed) & set(names), f"{path}: {names}"


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "a/../../x", "..\\x"])
def test_cve_2024_45436_names_of_archive_members_are_not_paths(name: str, tmp_path: Path) -> None:
    """Members of a ZIP are read in place; nothing is unpacked under their names."""
    (tmp_path / "in").mkdir()
    path = write_archive(tmp_path / "in" / "x.bin", {"a": torch_tensor(storage(name, 1), (1,), (1,))}, {})
    stream = io.BytesIO(path.read_bytes())
    with zipfile.ZipFile(stream, "a") as archive:
        archive.writestr(f"archive/data/{name}", bytes(4))
    path.write_bytes(stream.getvalue())
    tensor = read_torch(path)["a"]
    assert tensor.path == path
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "in", path]


def deep_json(depth: int) -> bytes:
    return b'{"model": ' + b"[" * depth + b"]" * depth + b"}"


READERS: dict[str, Callable[[Path], object]] = {
    "tokenizer.json": Tokenizer.from_file,
    "x.safetensors": read_safetensors,
}


@pytest.mark.parametrize("depth", [6000, 200_000])
@pytest.mark.parametrize("name", READERS)
def test_huntr_deeply_nested_json_is_refused(name: str, depth: int, tmp_path: Path) -> None:
    text = deep_json(depth)
    (tmp_path / name).write_bytes(text if name.endswith(".json") else struct.pack("<Q", len(text)) + text)
    with pytest.raises(LlamacError):
        READERS[name](tmp_path / name)


def test_lc_19367_invalid_sizes_in_json_are_refused() -> None:
    """Huge, negative, fractional and mistyped values where a size is expected."""
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 9,
        "n_embd": 8,
        "n_head": 2,
        "n_layer": 1,
    }
    for value in (0, -1, 1.5, 10**400, float("inf"), float("nan"), True, "8", None, [8], json.loads("1e999")):
        with pytest.raises(LlamacError, match="n_positions"):
            parse_config({**config, "n_positions": value}, [])
