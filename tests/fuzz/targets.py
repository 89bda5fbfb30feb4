"""The fuzzing targets: for each reader its files, valid samples of them, and a use of what was read.

A target may raise LlamacError and classes derived from it, nothing else. Samples are made here; corpus/ has inputs that
fuzzing has found.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from chat_samples import TEMPLATES
from gguf_samples import write_gguf, write_tensors
from vocab_samples import (
    NO_SPECIAL,
    SPM_PIECES,
    byte_level_gguf,
    field,
    gguf_file,
    llama2c_file,
    raw_bpe_gguf,
    sentencepiece_file,
    spm_gguf,
    tokenizer_json,
    word_piece_gguf,
)

import llamac
from builders import checkpoint, llama_config, write_model
from flat_hashes import HEAD_BYTES, rehashed, rehashed_header
from fuzz.documents import DOCUMENTS
from fuzz.families import directories, gguf_files
from fuzz.mutate import Parts
from fuzz.sessions import session_samples, use_session, with_valid_digests
from fuzz.target import Target
from golden.cases import CASES
from golden.family_cases import FAMILY_CASES
from golden.tiny_checkpoints import Config, random_tensor, tensors, write_safetensors
from llamac.cli.cache import _list
from llamac.cli.inspect import _file_lines, describe_file
from llamac.cli.text import json_text, safe_line
from llamac.engine.inspection.probe_replay import replay_probes
from llamac.errors import LlamacError, ModelError
from llamac.export.checkpoint import Checkpoint, LazyTensor
from llamac.export.flat.plan import make_plan
from llamac.export.flat.stream import write_file
from llamac.export.gguf import model as gguf_model
from llamac.export.gguf.file import open_gguf
from llamac.export.hf import model as hf
from llamac.export.hf.config import parse_config
from llamac.export.hf.safetensors_file import read_safetensors
from llamac.export.hf.torch_file import read_torch
from llamac.export.llama2c import model as llama2c
from llamac.export.lora import merge, read_adapter
from llamac.export.stored import WEIGHT_DTYPES, StoredTensor
from llamac.export.targets import atomic_file
from llamac.format.gguf_metadata import parse_metadata
from llamac.format.probes import EngineRecord, Probe, ProbeSet, encode
from llamac.format.strict_json import read_object
from llamac.sources import hub
from llamac.sources.cache import VERSIONS, Cache
from llamac.text import chat_process
from llamac.text.chat import ChatTemplate
from llamac.text.packed import pack
from llamac.text.template_files import read_templates
from llamac.text.tokenizer import Tokenizer
from llamac.text.vocabulary.gguf import from_metadata
from llamac.text.vocabulary.tokenizer_json import canonical_json
from torch_samples import old_storage, storage, torch_tensor, write_archive, write_old, write_torch

CORPUS = Path(__file__).parent / "corpus"
MAX_NUMBERS = 1 << 20  # of a tensor that is read: a valid file may declare a huge one
MAX_CHARACTERS = 1 << 14  # of a rendered template
SECRET = "no template may read this"
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "A"}]
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


# ---- uses


def _read_stored(tensors: dict[str, StoredTensor]) -> None:
    for tensor in tensors.values():
        small = np.prod(tensor.shape, dtype=float) <= MAX_NUMBERS
        if small and tensor.dtype in WEIGHT_DTYPES and 1 <= len(tensor.shape) <= 2:
            tensor.read(0, tensor.shape[0])


def _read_lazy(tensors: Iterable[LazyTensor]) -> None:
    for tensor in tensors:
        if np.prod(tensor.shape, dtype=float) <= MAX_NUMBERS:
            tensor.array()


def _use_tokenizer(path: Path) -> None:
    tokenizer = Tokenizer.from_file(path)
    ids = tokenizer.encode(TEXT, add_special=True)
    tokenizer.decode(ids)
    for token in (0, tokenizer.n_ids - 1):
        tokenizer.token_bytes(token)


def _use_config(folder: Path) -> None:
    hf.canonical_shapes(parse_config(read_object(folder / "config.json"), []).model)


def _use_shards(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    _read_lazy(hf.read(folder, []).tensors.values())


def _use_hf(folder: Path) -> None:
    _read_lazy(hf.read(folder, []).tensors.values())


def _use_gguf(folder: Path) -> None:
    path = next(folder.glob("*.gguf"))
    try:
        read = gguf_model.read(path, [])
    finally:
        for tensor in open_gguf(path).tensors.values():
            if np.prod(tensor.shape, dtype=float) <= MAX_NUMBERS:
                tensor.vector().array()
        read_templates(path)
    _read_lazy(read.tensors.values())


def _use_adapter(folder: Path) -> None:
    base = _base()
    weights = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.bin").unlink(missing_ok=True)
    if weights[:4] == b"PK\3\4":  # the weights of a PyTorch file
        (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with np.errstate(all="ignore"):  # overflow is an error later, when the tensor is written
        _read_lazy(merge(base, [(read_adapter(folder, "llama", base.config), 1.0)]).tensors.values())


@cache
def _base() -> Checkpoint:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        write_safetensors(folder / "model.safetensors", tensors(CONFIG))
        read = hf.read(folder, [])
        in_memory = {key: LazyTensor.of(tensor.array()) for key, tensor in read.tensors.items()}
        return replace(read, tensors=in_memory)


def _use_flat(folder: Path) -> None:
    with llamac.load(folder / "model.bin", threads=1) as model:
        for _ in model.file.verify_data():
            pass
        assert isinstance(model.metadata, dict)
        assert isinstance(model.name, str)
        if model.file.sections["tokenizer"].bytes:
            model.detokenize(model.tokenize(TEXT))
        model.logits([0, model.config["vocab_size"] - 1])


def _use_texts(folder: Path) -> None:
    """Write a flat file with these texts and use all of them."""
    texts = {name.partition(".")[0]: (folder / name).read_bytes() for name in FLAT_TEXTS}
    with atomic_file(folder / "model.bin") as file:
        write_file(file, make_plan(_base_flat(), "f16", texts))
    with llamac.load(folder / "model.bin", threads=1) as model:
        "\n".join(map(safe_line, _file_lines(describe_file(model.file), True))).encode()
        json_text(describe_file(model.file)).encode()
        with contextlib.suppress(LlamacError):
            model.detokenize(model.tokenize(TEXT))
            "".join(model.stream(TEXT, max_tokens=2)).encode()
        with contextlib.suppress(LlamacError):
            replay_probes(model)
        with contextlib.suppress(LlamacError):
            model.chat_prompt(CHAT[:1])


def _packed(_: Path) -> Iterable[Parts]:
    yield (pack(canonical_json(tokenizer_json())),)
    for entries in (byte_level_gguf(), spm_gguf(), raw_bpe_gguf()):
        yield (from_metadata(parse_metadata(gguf_file(entries)).values).data,)


def _use_packed(folder: Path) -> None:
    """Use a packed tokenizer, which is damaged or tells the core anything."""
    tokenizer = Tokenizer.from_json((folder / "tokenizer.packed").read_bytes(), NO_SPECIAL)
    for parse_special in (False, True):
        for text in (TEXT, 60 * TEXT, "a" * 90):
            tokenizer.decode(tokenizer.encode(text, parse_special=parse_special))
    tokenizer.special_spans(TEXT)
    Tokenizer.from_json(tokenizer.json, NO_SPECIAL).encode(TEXT)


@cache
def _base_flat() -> Checkpoint:
    return checkpoint(llama_config(dim=16, n_layers=1, n_heads=2, n_kv_heads=1, ffn=20, context=64))


def _use_chat_files(folder: Path) -> None:
    if not (folder / "chat_template.jinja").stat().st_size:
        (folder / "chat_template.jinja").unlink()  # so that those of tokenizer_config.json count
    ChatTemplate.from_file(folder)
    texts = read_templates(folder)
    json.dumps(texts.metadata(), ensure_ascii=False).encode(errors="replace")  # as the exporter writes them
    texts.default().encode()


def _use_template(folder: Path) -> None:
    """Render the template; check that it keeps to its limits and cannot read the environment."""
    os.environ["LLAMAC_FUZZ_SECRET"] = SECRET
    template = ChatTemplate.from_file(folder / "chat_template.jinja")
    variables = {
        "messages": CHAT,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "tools": None,
        "add_generation_prompt": True,
    }
    text = chat_process.render(template.choose(), variables, 1.0, MAX_CHARACTERS)
    assert len(text) <= MAX_CHARACTERS
    assert SECRET not in text


def _use_hub(folder: Path) -> None:
    """Choose the files to download: only files of the repository, and none outside of the target folder."""
    listing = read_object(folder / "listing.json")
    names = [str(name) for name in listing]
    for name in ("hf:o/n", "hf:o/n:Q4_K", "hf:o/n/a/b.gguf"):
        with contextlib.suppress(LlamacError):
            chosen = hub.choose(hub.parse(name), names, lambda _: (folder / "index.json").read_bytes())
            assert set(chosen) <= set(names)
            for path in chosen:
                assert (folder / path).resolve().is_relative_to(folder.resolve())
                assert not set(path) & set("\\\0")
    hub.parse(str(next(iter(listing.values()), "hf:o/n")))


def _use_cache(folder: Path) -> None:
    """Use a cache whose records or model are damaged."""
    root = folder / "cache"
    shutil.rmtree(root, ignore_errors=True)
    key = "0" * 64
    source = hashlib.sha256(os.path.realpath(folder / "note.json").encode()).hexdigest()
    for name, path in (("note.json", f"models/{key}.json"), ("model.bin", f"models/{key}.bin")):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, root / path)
    (root / "sources").mkdir()
    shutil.copyfile(folder / "source.json", root / "sources" / f"{source}.json")
    conversions = Cache(root)
    facts, lines = _list(conversions)
    "\n".join(map(safe_line, lines)).encode()
    json_text(facts).encode()
    model = conversions.find(key)
    if model is not None:
        model.close()
    conversions.digests(folder / "note.json", {"": folder / "note.json"})
    conversions.prune(dry_run=True)
    with conversions.converting(key):
        pass
    conversions.prune(everything=True)
    if model is None:
        raise ModelError("the cache rejects its model")


def _with_valid_hashes(parts: Parts) -> Parts:
    """The file with all hashes recomputed, or only the header's if the tables point outside of the file."""
    data = parts[0]
    if len(data) < HEAD_BYTES:
        return parts
    try:
        return (rehashed(data),)
    except Exception:  # the reader must reject these tables
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
    shards = []
    for part in (names[::2], names[1::2]):
        write_safetensors(folder / "part", {name: weights[name] for name in part})
        shards.append((folder / "part").read_bytes())
    weight_map = {name: SHARDS[1 + number % 2] for number, name in enumerate(names)}
    yield (_text({"metadata": {"total_size": 1}, "weight_map": weight_map}), *shards)


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
    magic = (0x616B3432).to_bytes(4, "little")
    first = magic + (1).to_bytes(4, "little") + header + b"\1"
    yield (first.ljust(256, b"\0") + numbers[: -16 * 4].tobytes(),)
    second = magic + (2).to_bytes(4, "little") + header + b"\0" + (4).to_bytes(4, "little")
    codes = [count + 4 * (count // 4) for count in (88, 64, 32, 32, 64, 96, 96, 96, 88)]
    yield (second.ljust(256, b"\0") + bytes(4 * 24 + sum(codes)),)


def _spm(_: Path) -> Iterable[Parts]:
    config = {"add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
    yield sentencepiece_file(SPM_PIECES), _text(config)
    trainer = field(3, 1) + field(41, 1) + field(42, 2)
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("\u2581a", -1.5, 1), ("\u2581", -2.5, 1)]
    yield sentencepiece_file(pieces, trainer, field(3, 1) + field(4, 1) + field(5, 1)), _text({"legacy": True})
    runs = [*SPM_PIECES[:3], *((char * count, -float(count), 1) for char in "ab" for count in range(1, 9))]
    yield sentencepiece_file([*runs, ("ab", -3.0, 1)], field(24, 0), field(3, 0)), _text({"add_prefix_space": False})


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
    undo = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    unigram = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["\u2581a", -1.0], ["b", -2.0]]}
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    others: dict[str, Any] = {"added_tokens": [], "post_processor": None}
    decoder: dict[str, Any] = {"type": "Sequence", "decoders": undo}
    yield _text(tokenizer_json(model=unigram, pre_tokenizer=metaspace, decoder=decoder, **others)), b"{}"
    words = {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 9,
    }
    words["vocab"] = {"[UNK]": 0, "a": 1, "##b": 2, "[SEP]": 3}
    around = {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[UNK]", 0]}
    split = {"type": "Split", "pattern": {"Regex": "\\d+"}, "behavior": "Isolated", "invert": False}
    cuts = {"type": "Sequence", "pretokenizers": [split, {"type": "BertPreTokenizer"}]}
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    others = {"added_tokens": [], "post_processor": around}
    yield (
        _text(tokenizer_json(model=words, pre_tokenizer=cuts, decoder=decoder, **others)),
        _text({"added_tokens_decoder": {"4": {"content": "<x>", "rstrip": True}}}),
    )


def _vocab_json(_: Path) -> Iterable[Parts]:
    vocab = tokenizer_json()["model"]["vocab"]
    yield _text(vocab), b"#version: 0.2\nh e\n", _text({"bos_token": "<s>", "eos_token": "</s>"})


def _gguf_vocab(_: Path) -> Iterable[Parts]:
    nested = ("nested", ("[", "[", [("[", "i", [1, 2]), ("[", "s", ["x"])]))
    yield (gguf_file([*byte_level_gguf(), nested]),)
    yield (gguf_file(spm_gguf(), version=2),)
    yield (gguf_file(raw_bpe_gguf()),)
    yield (gguf_file(word_piece_gguf()),)


def _gguf(folder: Path) -> Iterable[Parts]:
    yield (_written(folder, lambda path: write_gguf(path, CONFIG, tensors(CONFIG)), "a.gguf"),)
    kinds = {name: getattr(gguf.GGMLQuantizationType, name) for name in ("Q8_0", "Q4_0", "Q6_K", "IQ4_XS", "BF16")}
    packed = {name: np.full((1, gguf.GGML_QUANT_SIZES[kind][1]), 7, np.uint8) for name, kind in kinds.items()}
    yield (_written(folder, lambda path: write_tensors(path, packed, kinds), "b.gguf"),)


def _gguf_split(folder: Path) -> Iterable[Parts]:
    write_gguf(folder / "model.gguf", CONFIG, tensors(CONFIG), part_tensors=6)
    yield tuple((folder / name).read_bytes() for name in PARTS)


def _adapter(folder: Path) -> Iterable[Parts]:
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    name = f"{module}.lora_"
    weights = {f"{name}A.weight": random_tensor("A", (2, 8)), f"{name}B.weight": random_tensor("B", (8, 2))}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "alpha_pattern": {"q_proj": 3}, "use_rslora": False}
    yield _text(config), _written(folder, lambda path: write_safetensors(path, weights))
    yield _text(config), _written(folder, lambda path: write_torch(path, weights))
    dora = {**weights, f"{name}magnitude_vector": np.ones(8, np.float32)}
    yield _text({**config, "use_dora": True}), _written(folder, lambda path: write_safetensors(path, dora))
    embedding = "base_model.model.model.embed_tokens"
    others = {
        f"{embedding}.lora_embedding_A": random_tensor("A", (2, 11)),
        f"{embedding}.lora_embedding_B": random_tensor("B", (8, 2)),
        "base_model.model.lm_head.weight": random_tensor("C", (11, 8)),
    }
    yield _text({**config, "use_rslora": True}), _written(folder, lambda path: write_safetensors(path, others))


def _texts(folder: Path) -> Iterable[Parts]:
    made = _base_flat()
    path = write_model(folder / "sample", made, "f16")
    assert made.tokenizer is not None
    with llamac.load(path, threads=1) as model, model.session(context=3) as session:
        logits = session.eval([1, 2, 3], logits="last")
        assert logits is not None
        record = EngineRecord("0" * 64, 1e-3)
        probes = ProbeSet("test", 1, (Probe((1, 2, 3), logits.reshape(-1), "a"),), {"f16": record, "f32": record})
    metadata = {
        "architecture": "llama",
        "dtype": "f16",
        "name": "tiny",
        "source": {"format": "test"},
        "special_tokens": {"bos_token": "<s>"},
        "chat_templates": {"tool_use": "b"},
        "config": {"rope_scaling": {"rope_type": "linear"}},
    }
    yield made.tokenizer[0], b"{{ messages }}", _text(metadata), encode(probes)
    yield _text(tokenizer_json()), b"", _text(metadata), b""


def _chat_files(_: Path) -> Iterable[Parts]:
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    tokens = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    yield _text({"chat_template": "{{ 1 }}", **tokens}), _text(tokens), b"{{ messages }}"
    yield _text({"chat_template": named, **tokens}), _text({"pad_token": "<p>"}), b""


def _templates(_: Path) -> Iterable[Parts]:
    for text in TEMPLATES.values():
        yield (text.encode(),)


def _hub_answers(_: Path) -> Iterable[Parts]:
    names = ("config.json", "tokenizer.json", "model.safetensors.index.json", "a-1.safetensors", "a-2.safetensors")
    index = {"weight_map": {"a": "a-1.safetensors", "b": "a-2.safetensors"}}
    yield _text(dict.fromkeys(names, "hf:o/n@main")), _text(index)
    others = (
        "x-Q4_K-00001-of-00002.gguf",
        "x-Q4_K-00002-of-00002.gguf",
        "a/b.gguf",
        "additional_chat_templates/x.jinja",
    )
    yield _text(dict.fromkeys(others, "hf:o/n:Q4_K@v1")), b"{}"


def _cached(folder: Path) -> Iterable[Parts]:
    model = write_model(folder / "sample", _base(), "f16")
    with llamac.load(model, threads=1) as opened:
        known = {"source": "a", "dtype": "f16", "id": opened.file.id, "stamp": [1, 2], **VERSIONS}
    note = _text(known)
    yield note, _text({"path": "a", "files": {"": [[1, 2, 3, 4, 5], "0" * 64]}}), model.read_bytes()
    yield _text({"source": "a", **VERSIONS}), _text({"path": "/", "files": {}}), b""


def _flat(folder: Path) -> Iterable[Parts]:
    config = llama_config(dim=16, n_layers=1, n_heads=2, n_kv_heads=1, ffn=20, context=64)
    yield (write_model(folder / "small", _base(), "f16").read_bytes(),)
    yield (write_model(folder / "sample", checkpoint(config), "f16").read_bytes(),)


SHARDS = ("model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors")
FLAT_TEXTS = ("tokenizer.json", "template.jinja", "metadata.json", "probes.safetensors")
PARTS = ("model-00001-of-00002.gguf", "model-00002-of-00002.gguf")
TARGETS: dict[str, Target] = {
    "safetensors": Target(
        ("x.safetensors",), _safetensors, lambda folder: _read_stored(read_safetensors(folder / "x.safetensors"))
    ),
    "shards": Target(SHARDS, _shards, _use_shards),
    "config": Target(("config.json",), _configs, _use_config),
    "torch": Target(("x.bin",), _torch, lambda folder: _read_stored(read_torch(folder / "x.bin"))),
    "torch-old": Target(("x.bin",), _torch_old, lambda folder: _read_stored(read_torch(folder / "x.bin"))),
    "llama2c": Target(("x.bin",), _llama2c, lambda folder: _read_lazy(llama2c.read(folder / "x.bin").tensors.values())),
    "sentencepiece": Target(("tokenizer.model", "tokenizer_config.json"), _spm, _use_tokenizer, stable=False),
    "tokenizer-json": Target(
        ("tokenizer.json", "tokenizer_config.json"), _tokenizer_json, _use_tokenizer, stable=False
    ),
    "vocab-json": Target(
        ("vocab.json", "merges.txt", "tokenizer_config.json"), _vocab_json, _use_tokenizer, stable=False
    ),
    "tokenizer-bin": Target(("tokenizer.bin",), lambda _: [(llama2c_file(),)], _use_tokenizer),
    "packed-tokenizer": Target(("tokenizer.packed",), _packed, _use_packed, stable=False),
    "gguf-vocabulary": Target(("x.gguf",), _gguf_vocab, _use_tokenizer, stable=False),
    "gguf": Target(("x.gguf",), _gguf, _use_gguf),
    "hf": Target(("config.json", "model.safetensors"), directories, _use_hf),
    "gguf-families": Target(("x.gguf",), gguf_files, _use_gguf),
    "gguf-split": Target(PARTS, _gguf_split, _use_gguf),
    "adapter": Target(("adapter_config.json", "adapter_model.safetensors"), _adapter, _use_adapter),
    "flat": Target(("model.bin",), _flat, _use_flat, _with_valid_hashes),
    "flat-texts": Target(FLAT_TEXTS, _texts, _use_texts, stable=False, mutations=40),
    "chat-files": Target(
        ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"), _chat_files, _use_chat_files
    ),
    "chat-template": Target(("chat_template.jinja",), _templates, _use_template, stable=False, mutations=25),
    "hub": Target(("listing.json", "index.json"), _hub_answers, _use_hub),
    "cache": Target(("note.json", "source.json", "model.bin"), _cached, _use_cache, mutations=40),
    **DOCUMENTS,
    "session": Target(("head.json", "data.bin"), session_samples, use_session, with_valid_digests),
}
