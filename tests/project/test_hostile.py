"""Small files that would use much time or memory, or raise the wrong error: each is refused at once.

The tests measure memory. They do not measure time, because the attacks on time would take years.
"""

from __future__ import annotations

import json
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vocab_samples import SPM_PIECES, field, sentencepiece_file, tokenizer_json

from golden.tiny_checkpoints import Config, write_safetensors
from llamac.errors import ExportError, HubError, LlamacError, TokenizerError, UnsupportedError
from llamac.export.hf import model as hf
from llamac.export.hf.config import parse_config
from llamac.export.hf.torch_file import read_torch
from llamac.export.lora import read_adapter
from llamac.format.strict_json import parse_object
from llamac.sources import hub
from llamac.text.chat import ChatTemplate
from llamac.text.tokenizer import Tokenizer
from llamac.text.tokenizer_json import check_structure
from llamac.text.vocabulary.spm import ranked_merges
from torch_samples import Call, storage, torch_tensor, write_archive

MIXTRAL: Config = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 9,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "max_position_embeddings": 8,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": True,
}


@contextmanager
def little_memory(limit: int = 32 << 20) -> Iterator[None]:
    """Fail if Python objects occupy more than `limit` bytes at any time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def test_duplicate_json_keys_are_found_in_linear_time() -> None:
    names = [f'"{number}":0' for number in range(200_000)]  # comparing all pairs would take hours
    text = ",".join([*names, '"199999":1'])
    with pytest.raises(ExportError, match="duplicate key '199999'"):
        parse_object(f"{{{text}}}".encode(), "it")


def rewritten(path: Path, compressed: str, **others: bytes) -> Path:
    """Rewrite an archive with one member compressed. others: contents of further members by name."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members |= {f"archive/{name}": data for name, data in others.items()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            kind = zipfile.ZIP_DEFLATED if name == compressed else zipfile.ZIP_STORED
            archive.writestr(name, data, kind)
    return path


ONE = {"a": torch_tensor(storage("0", 2), (2,), (1,))}


@pytest.mark.parametrize("name", ["byteorder", "data.pkl"])
def test_cve_2019_9674_compressed_members_of_a_torch_file_are_refused(name: str, tmp_path: Path) -> None:
    """A compressed member can expand a thousandfold. torch.save compresses no member, so llamac reads none."""
    path = write_archive(tmp_path / "x.bin", ONE, {"0": bytes(8)})
    rewritten(path, f"archive/{name}", **{name: bytes(40 << 20)})
    with little_memory(), pytest.raises(UnsupportedError, match=f"{name} is compressed"):
        read_torch(path)


def test_an_overlong_byte_order_is_refused(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "x.bin", ONE, {"0": bytes(8)}, byteorder=b"little" * 1000)
    with pytest.raises(UnsupportedError, match="big-endian"):
        read_torch(path)


@pytest.mark.parametrize(
    ("shape", "strides"), [((1 << 40,), (0,)), ((1 << 20, 1 << 20), (0, 0)), ((2, 2), (0, 1)), ((3, 3), (0, 1))]
)
def test_a_tensor_with_more_numbers_than_its_storage_is_refused(
    shape: tuple[int, ...], strides: tuple[int, ...], tmp_path: Path
) -> None:
    """Strides of 0 expand one number to a matrix of any size; no file of weights uses them."""
    document = {"a": torch_tensor(storage("0", 3), shape, strides)}
    with pytest.raises(ExportError, match="more numbers than"):
        read_torch(write_archive(tmp_path / "x.bin", document, {"0": bytes(12)}))


def test_cve_2024_0450_overlapping_storages_are_refused(tmp_path: Path) -> None:
    """With overlapping directory entries, a megabyte of zeros could serve as a thousand storages."""
    document = {name: torch_tensor(storage(name, 4), (4,), (1,)) for name in "ab"}
    path = write_archive(tmp_path / "x.bin", document, {"a": bytes(16), "b": bytes(16)})
    with zipfile.ZipFile(path) as archive:
        offsets = {name: archive.getinfo(f"archive/data/{name}").header_offset for name in "ab"}
    data = path.read_bytes()
    assert data.count(struct.pack("<I", offsets["b"]) + b"archive/data/b") == 1
    name = b"archive/data/b"
    path.write_bytes(data.replace(struct.pack("<I", offsets["b"]) + name, struct.pack("<I", offsets["a"]) + name))
    with pytest.raises(ExportError, match="overlap"):
        read_torch(path)


@pytest.mark.parametrize("size", [8, 16, 11, 13])
def test_a_storage_must_have_its_declared_size(size: int, tmp_path: Path) -> None:
    """As in torch, a storage has neither missing bytes nor hidden extra ones."""
    document = {"a": torch_tensor(storage("0", 3), (3,), (1,))}
    with pytest.raises(ExportError, match=f"has {size} bytes, 12 needed"):
        read_torch(write_archive(tmp_path / "x.bin", document, {"0": bytes(size)}))


def test_a_tensor_with_a_wrong_number_of_arguments_is_refused(tmp_path: Path) -> None:
    sound = torch_tensor(storage("0", 2), (2,), (1,))
    for arguments in (sound.arguments[:5], (*sound.arguments, None, None), sound.arguments[:3]):
        call = Call("torch._utils._rebuild_tensor_v2", *arguments)
        with pytest.raises(ExportError, match="damaged"):
            read_torch(write_archive(tmp_path / "x.bin", {"a": call}, {"0": bytes(8)}))


def test_excessive_merges_are_refused() -> None:
    """Pieces that contain one another have as many merges as characters, each as long as the piece."""
    scores = {"a" * count + "b": -float(count) for count in range(1, 700)}
    pieces = {piece: number for number, piece in enumerate(["b", *("a" * count for count in range(1, 700)), *scores])}
    scores |= {"a" * count: -1000.0 - count for count in range(2, 700)}
    with little_memory(200 << 20), pytest.raises(TokenizerError, match="merges"):
        ranked_merges(scores, pieces)


# Regular expressions that can match in exponentially many ways. Python's own engine has no limit of steps.
SLOW_EXPRESSIONS = ["(?:.?){100}Z", "(a|a|aa)*" * 20 + "Z", "(?:(?:)|(?:)){60}Z", "(.*)*" * 12 + "Z"]


@pytest.mark.parametrize("regex", SLOW_EXPRESSIONS)
def test_cve_2025_1194_and_2025_6638_checking_a_regular_expression_does_not_run_it(regex: str) -> None:
    step = {"type": "Replace", "pattern": {"Regex": regex}, "content": ""}
    check_structure(tokenizer_json(normalizer=step))


@pytest.mark.parametrize("regex", ["a*", "", "(?=x)", "(a|)", r"\b", "^", "(?:a?){9}", "x*(?=y)"])
def test_regular_expressions_that_match_the_empty_string_are_refused(regex: str) -> None:
    step = {"type": "Replace", "pattern": {"Regex": regex}, "content": ""}
    with pytest.raises(TokenizerError, match="replaces empty strings"):
        check_structure(tokenizer_json(normalizer=step))


@pytest.mark.parametrize("config", [{"lora_alpha": 10**400}, {"alpha_pattern": {"q_proj": 10**400}}])
def test_adapter_numbers_too_large_for_floats_are_refused(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
    write_safetensors(tmp_path / "adapter_model.safetensors", {"a": np.zeros(2, np.float32)})
    with pytest.raises(ExportError, match=r"expected (a number|an object of numbers)"):
        read_adapter(tmp_path, "mixtral", parse_config(MIXTRAL, []).model)


def test_the_number_of_experts_is_limited(tmp_path: Path) -> None:
    """A config.json of 300 bytes must not make llamac list millions of matrices."""
    config = {**MIXTRAL, "num_hidden_layers": 4096, "num_local_experts": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_safetensors(tmp_path / "model.safetensors", {"a": np.zeros(2, np.float32)})
    with little_memory(), pytest.raises(ExportError, match="16777216 experts"):
        hf.read(tmp_path, [])


def add_empty(path: Path, **shapes: list[int]) -> None:
    """Add tensors without elements to a safetensors file."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    end = len(data) - 8 - length
    for name, shape in shapes.items():
        header[name.replace("__", ".")] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


@pytest.mark.parametrize(
    "shapes",
    [
        {"model__layers__0__block_sparse_moe__experts__gate_up_proj": [1 << 62, 2, 0]},
        {"lm_head__weight": [1 << 62, 0], "model__embed_tokens__weight": [1 << 62, 0]},
    ],
)
def test_huge_empty_tensors_are_refused_without_visiting_their_rows(
    shapes: dict[str, list[int]], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    write_safetensors(tmp_path / "model.safetensors", {"a": np.zeros(2, np.float32)})
    add_empty(tmp_path / "model.safetensors", **shapes)
    with little_memory(), pytest.raises(LlamacError, match="do not match"):
        hf.read(tmp_path, [])


WRONG_FIELDS: dict[str, Callable[[], bytes]] = {
    "charsmap is a number": lambda: sentencepiece_file(SPM_PIECES, normalizer=field(2, 7)),
    "BOS is a text": lambda: sentencepiece_file(SPM_PIECES, trainer=field(41, b"1")),
    "EOS is a text": lambda: sentencepiece_file(SPM_PIECES, trainer=field(42, b"2")),
    "the kind is a text": lambda: sentencepiece_file(SPM_PIECES, trainer=field(3, b"2")),
    "a type is a text": lambda: sentencepiece_file(SPM_PIECES) + field(1, field(1, b"q") + field(3, b"1")),
}


@pytest.mark.parametrize("name", WRONG_FIELDS)
def test_sentencepiece_fields_of_wrong_types_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(WRONG_FIELDS[name]())
    with pytest.raises(TokenizerError, match="damaged"):
        Tokenizer.from_file(tmp_path)


@pytest.mark.parametrize("wrong", [[], {}, "1", -1, 259, 1 << 40, 1.5, True])
def test_invalid_ids_in_the_post_processor_are_refused(wrong: Any, tmp_path: Path) -> None:
    document = tokenizer_json()
    document["post_processor"]["special_tokens"]["<s>"]["ids"] = [wrong]
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(TokenizerError, match="around the text"):
        Tokenizer.from_file(tmp_path)


@pytest.mark.parametrize("wrong", [5, None, ["a"], "a" * 5000, "\0"])
def test_malformed_shard_names_are_refused(wrong: Any) -> None:
    index = json.dumps({"weight_map": {"a": wrong}}).encode()
    with pytest.raises(HubError, match=r"not an index of weights|missing files"):
        hub.choose(hub.parse("hf:o/n"), ["config.json", "model.safetensors.index.json"], lambda _: index)


READ_WHOLE: dict[str, Callable[[Path], object]] = {
    "chat_template.jinja": ChatTemplate.from_file,
    "tokenizer_config.json": ChatTemplate.from_file,
    "tokenizer.model": Tokenizer.from_file,
    "config.json": lambda folder: hf.read(folder, []),
    "merges.txt": Tokenizer.from_file,
}


@pytest.mark.parametrize("name", READ_WHOLE)
def test_huge_text_files_are_refused(name: str, tmp_path: Path) -> None:
    """A sparse file of a terabyte occupies no disk space, but reading it would take all memory."""
    if name == "merges.txt":
        (tmp_path / "vocab.json").write_text('{"a": 0}')
    with open(tmp_path / name, "wb") as file:
        file.truncate(1 << 40)
    with little_memory(600 << 20), pytest.raises(LlamacError, match="bytes that a file of this kind can have"):
        READ_WHOLE[name](tmp_path)


def test_reading_small_files_uses_little_memory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.model").write_bytes(b"")
    (tmp_path / "x.bin").write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")
    reads: list[Callable[[], object]] = [
        lambda: hf.read(tmp_path, []),
        lambda: Tokenizer.from_file(tmp_path),
        lambda: read_torch(tmp_path / "x.bin"),
    ]
    with little_memory(4 << 20):
        for read in reads:
            with pytest.raises(LlamacError):
                read()
