"""What is fuzzed: for every reader the files it reads, sound samples of them, and all that a user does with them.

A target may raise LlamacError and what is derived from it, nothing else. Samples are made here, not stored; what was
found by fuzzing lies in corpus/.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_samples import write_gguf, write_tensors
from vocab_samples import (
    SPM_PIECES,
    byte_level_gguf,
    gguf_file,
    llama2c_file,
    sentencepiece_file,
    spm_gguf,
    tokenizer_json,
)

import llamac
from builders import checkpoint, llama_config, write_model
from flat_hashes import HEAD_BYTES, rehashed, rehashed_header
from fuzz.mutate import Parts
from golden.cases import CASES
from golden.family_cases import FAMILY_CASES
from golden.tiny_checkpoints import Config, random_tensor, tensors, write_safetensors
from llamac.export import gguf_model, hf, llama2c
from llamac.export.checkpoint import Checkpoint, LazyTensor
from llamac.export.gguf_file import open_gguf
from llamac.export.hf_config import parse_config
from llamac.export.lora import merge, read_adapter
from llamac.export.safetensors_file import read_safetensors
from llamac.export.stored import WEIGHT_DTYPES, StoredTensor
from llamac.export.strict_json import read_object
from llamac.export.torch_file import read_torch
from llamac.tokenizer import Tokenizer
from torch_samples import old_storage, storage, torch_tensor, write_archive, write_old, write_torch

MAX_NUMBERS = 1 << 20  # of a tensor, beyond which it is not read here: a sound file may be large
TEXT = " Hello,\n 12 \u00e9\U0001f600</s>"
CONFIG: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 11,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Target:
    """names: of the files that a reader gets, in one folder. samples: sound contents. use: reads the folder.

    finish: makes a mutated content pass the checks that would hide all others.
    """

    names: tuple[str, ...]
    samples: Callable[[Path], Iterable[Parts]]
    use: Callable[[Path], None]
    finish: Callable[[Parts], Parts] = lambda parts: parts

    def run(self, parts: Parts, folder: Path) -> None:
        """Lets the reader read these files, which are written into the folder."""
        for name, part in zip(self.names, parts, strict=True):
            (folder / name).write_bytes(part)
        self.use(folder)


# ---- what is done with what was read


def _read_stored(found: dict[str, StoredTensor]) -> None:
    for tensor in found.values():
        small = np.prod(tensor.shape, dtype=float) <= MAX_NUMBERS
        if small and tensor.dtype in WEIGHT_DTYPES and 1 <= len(tensor.shape) <= 2:
            tensor.read(0, tensor.shape[0])


def _read_lazy(found: Iterable[LazyTensor]) -> None:
    for tensor in found:
        if np.prod(tensor.shape, dtype=float) <= MAX_NUMBERS:
            tensor.array()


def _use_tokenizer(path: Path) -> None:
    tokenizer = Tokenizer.from_file(path)
    ids = tokenizer.encode(TEXT, add_special=True)
    tokenizer.decode(ids)
    for token in (0, tokenizer.n_ids - 1):
        tokenizer.token_bytes(token)


def _use_config(folder: Path) -> None:
    parse_config(read_object(folder / "config.json"), [])


def _use_shards(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    _read_lazy(hf.read(folder, []).tensors.values())


def _use_gguf(folder: Path) -> None:
    path = next(folder.glob("*.gguf"))
    try:
        made = gguf_model.read(path, [])
    finally:
        for tensor in open_gguf(path).tensors.values():
            if np.prod(tensor.shape, dtype=float) <= MAX_NUMBERS:
                tensor.vector().array()
    _read_lazy(made.tensors.values())


def _use_adapter(folder: Path) -> None:
    base = _base()
    with np.errstate(all="ignore"):  # numbers that overflow are told where the sum is written
        _read_lazy(merge(base, [(read_adapter(folder, "llama", base.config), 1.0)]).tensors.values())


@cache
def _base() -> Checkpoint:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        write_safetensors(folder / "model.safetensors", tensors(CONFIG))
        made = hf.read(folder, [])
        held = {key: LazyTensor.of(tensor.array()) for key, tensor in made.tensors.items()}
        return replace(made, tensors=held)


def _use_flat(folder: Path) -> None:
    with llamac.load(folder / "model.bin", threads=1) as model:
        for _ in model.file.verify_data():
            pass
        assert isinstance(model.metadata, dict)
        assert isinstance(model.name, str)
        if model.file.sections["tokenizer"].bytes:
            model.detokenize(model.tokenize(TEXT))
        model.logits([0, model.config["vocab_size"] - 1])


def _true_hashes(parts: Parts) -> Parts:
    """With all hashes computed anew, as far as the file's own tables say where things are."""
    data = parts[0]
    if len(data) < HEAD_BYTES:
        return parts
    try:
        return (rehashed(data),)
    except Exception:  # the tables lead nowhere: the reader is to say so
        return (rehashed_header(data),)


# ---- samples


def _written(folder: Path, write: Callable[[Path], Any], name: str = "sample") -> bytes:
    write(folder / name)
    return (folder / name).read_bytes()


def _text(document: Any) -> bytes:
    return json.dumps(document).encode()


def _some_tensors() -> dict[str, Any]:
    return {"a": random_tensor("a", (3, 4)), "b.weight": random_tensor("b", (5,))}


def _safetensors(folder: Path) -> Iterable[Parts]:
    yield (_written(folder, lambda path: write_safetensors(path, _some_tensors())),)
    entries = [("BF16", 2), ("F16", 2), ("F64", 8), ("I64", 8), ("F8_E4M3", 1), ("BOOL", 1)]
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for dtype, size in entries:
        header[dtype] = {"dtype": dtype, "shape": [2, 3], "data_offsets": [end, end + 6 * size]}  # type: ignore[dict-item]
        end += 6 * size
    text = _text(header)
    yield (len(text).to_bytes(8, "little") + text + bytes(range(end)),)


def _shards(folder: Path) -> Iterable[Parts]:
    weights = tensors(CONFIG)
    names = sorted(weights)
    files = []
    for part in (names[::2], names[1::2]):
        write_safetensors(folder / "part", {name: weights[name] for name in part})
        files.append((folder / "part").read_bytes())
    places = {name: SHARDS[1 + number % 2] for number, name in enumerate(names)}
    yield (_text({"metadata": {"total_size": 1}, "weight_map": places}), *files)


def _configs(_: Path) -> Iterable[Parts]:
    for case in {**CASES, **FAMILY_CASES}.values():
        if case.base is None or "rope" in case.name or "yarn" in case.name:
            yield (_text(case.config),)


def _torch(folder: Path) -> Iterable[Parts]:
    yield (_written(folder, lambda path: write_torch(path, _some_tensors())),)
    shared = {
        name: torch_tensor(storage("0", 6, "HalfStorage"), (2, 3), strides)
        for name, strides in (("a", (3, 1)), ("b", (1, 2)))
    }
    yield (_written(folder, lambda path: write_archive(path, {"state_dict": shared, "epoch": 3}, {"0": bytes(12)})),)


def _torch_old(folder: Path) -> Iterable[Parts]:
    document = {
        "a": torch_tensor(old_storage("0", 4), (2, 2), (2, 1)),
        "b": torch_tensor(old_storage("0", 4, ("1", 1, 2)), (2,), (1,)),
    }
    yield (_written(folder, lambda path: write_old(path, document, {"0": (4, bytes(16))})),)


def _llama2c(folder: Path) -> Iterable[Parts]:
    numbers = np.arange(11 * 8 + 2 * 8 + 2 * 64 + 2 * 32 + 3 * 96 + 8 + 16 * 4, dtype="<f4")
    header = np.array([8, 12, 1, 2, 1, 11, 16], "<i4").tobytes()
    yield (header + numbers.tobytes(),)
    first = (0x616B3432).to_bytes(4, "little") + (1).to_bytes(4, "little") + header + b"\1"
    yield (first.ljust(256, b"\0") + numbers[: -16 * 4].tobytes(),)


def _spm(_: Path) -> Iterable[Parts]:
    yield sentencepiece_file(SPM_PIECES), _text({"add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"})


def _tokenizer_json(_: Path) -> Iterable[Parts]:
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False},
        "added_tokens_decoder": {"256": {"content": "<s>", "special": True}},
        "additional_special_tokens": ["<s>"],
    }
    yield _text(tokenizer_json()), _text(config)
    steps = [
        {"type": "Prepend", "prepend": "_"},
        {"type": "Replace", "pattern": {"Regex": " +"}, "content": "_"},
        {"type": "NFC"},
    ]
    yield _text(tokenizer_json(normalizer={"type": "Sequence", "normalizers": steps})), b"{}"


def _vocab_json(_: Path) -> Iterable[Parts]:
    vocab = tokenizer_json()["model"]["vocab"]
    yield _text(vocab), b"#version: 0.2\nh e\n", _text({"bos_token": "<s>", "eos_token": "</s>"})


def _gguf_vocab(_: Path) -> Iterable[Parts]:
    nested = ("nested", ("[", "[", [("[", "i", [1, 2]), ("[", "s", ["x"])]))
    yield (gguf_file([*byte_level_gguf(), nested]),)
    yield (gguf_file(spm_gguf(), version=2),)


def _gguf(folder: Path) -> Iterable[Parts]:
    yield (_written(folder, lambda path: write_gguf(path, CONFIG, tensors(CONFIG)), "a.gguf"),)
    kinds = {name: getattr(gguf.GGMLQuantizationType, name) for name in ("Q8_0", "Q4_0", "Q6_K", "IQ4_XS", "BF16")}
    packed = {name: np.full((1, gguf.GGML_QUANT_SIZES[kind][1]), 7, np.uint8) for name, kind in kinds.items()}
    yield (_written(folder, lambda path: write_tensors(path, packed, kinds), "b.gguf"),)


def _gguf_split(folder: Path) -> Iterable[Parts]:
    write_gguf(folder / "model.gguf", CONFIG, tensors(CONFIG), part_tensors=6)
    yield tuple((folder / name).read_bytes() for name in PARTS)


def _adapter(folder: Path) -> Iterable[Parts]:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    weights = {f"{name}A.weight": random_tensor("A", (2, 8)), f"{name}B.weight": random_tensor("B", (8, 2))}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "alpha_pattern": {"q_proj": 3}, "use_rslora": False}
    yield _text(config), _written(folder, lambda path: write_safetensors(path, weights))


def _flat(folder: Path) -> Iterable[Parts]:
    config = llama_config(dim=16, n_layers=1, n_heads=2, n_kv_heads=1, ffn=20, context=64)
    yield (write_model(folder / "sample", checkpoint(config), "f16").read_bytes(),)


SHARDS = ("model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors")
PARTS = ("model-00001-of-00002.gguf", "model-00002-of-00002.gguf")
TARGETS: dict[str, Target] = {
    "safetensors": Target(
        ("x.safetensors",), _safetensors, lambda at: _read_stored(read_safetensors(at / "x.safetensors"))
    ),
    "shards": Target(SHARDS, _shards, _use_shards),
    "config": Target(("config.json",), _configs, _use_config),
    "torch": Target(("x.bin",), _torch, lambda at: _read_stored(read_torch(at / "x.bin"))),
    "torch-old": Target(("x.bin",), _torch_old, lambda at: _read_stored(read_torch(at / "x.bin"))),
    "llama2c": Target(("x.bin",), _llama2c, lambda at: _read_lazy(llama2c.read(at / "x.bin").tensors.values())),
    "sentencepiece": Target(("tokenizer.model", "tokenizer_config.json"), _spm, _use_tokenizer),
    "tokenizer-json": Target(("tokenizer.json", "tokenizer_config.json"), _tokenizer_json, _use_tokenizer),
    "vocab-json": Target(("vocab.json", "merges.txt", "tokenizer_config.json"), _vocab_json, _use_tokenizer),
    "tokenizer-bin": Target(("tokenizer.bin",), lambda _: [(llama2c_file(),)], _use_tokenizer),
    "gguf-vocabulary": Target(("x.gguf",), _gguf_vocab, _use_tokenizer),
    "gguf": Target(("x.gguf",), _gguf, _use_gguf),
    "gguf-split": Target(PARTS, _gguf_split, _use_gguf),
    "adapter": Target(("adapter_config.json", "adapter_model.safetensors"), _adapter, _use_adapter),
    "flat": Target(("model.bin",), _flat, _use_flat, _true_hashes),
}
