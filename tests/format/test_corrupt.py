"""Damaged flat files: every truncation and flipped bit is detected and located, and no file crashes the process or
raises anything but this library's errors.

Each bit is flipped twice: once raw, which a hash must reveal, and once with all hashes recomputed, which the check of
the field must reveal.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from layer_fields import COMPUTED, CONTRADICTIONS
from vocab_samples import gguf_file, llama2c_file

import llamac
from builders import checkpoint, gpt2_config, llama_config, write_model
from flat_hashes import HEAD_BYTES, put, rehashed, rehashed_header
from llamac import _core
from llamac.engine.inspection.probe_replay import replay_probes
from llamac.errors import ArgumentError, LlamacError, ModelError, UnsupportedError
from llamac.export import probes as making
from llamac.export.checkpoint import LayerConfig
from llamac.export.flat.plan import make_plan
from llamac.export.flat.stream import write_file
from llamac.export.targets import atomic_file
from llamac.format.flatfile import FIELDS, RECORD_BYTES, Field, FlatFile, unpack_record
from llamac.format.probes import encode

TABLES = ("config", "layers", "tensors")
RECORDS = {"config": "config", "layers": "layer", "tensors": "tensor"}
TEXTS = ("metadata", "tokenizer", "spm", "template", "probes")


class Sample:
    """A file to damage, its original bytes, sections and tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.original = path.read_bytes()
        with open_file(path) as file:
            self.sections = dict(file.sections)
            self.tensors = file.tensors

    @contextlib.contextmanager
    def replaced(self, data: bytes) -> Iterator[Path]:
        """The file with these bytes. They overwrite the old ones because truncating first is slow on some systems."""
        with open(self.path, "r+b") as file:
            try:
                os.pwrite(file.fileno(), data, 0)
                file.truncate(len(data))
                yield self.path
            finally:
                os.pwrite(file.fileno(), self.original, 0)
                file.truncate(len(self.original))

    @contextlib.contextmanager
    def patched(self, offset: int, patch: bytes) -> Iterator[Path]:
        """The file with a few bytes changed in place, which is fast."""
        with open(self.path, "r+b") as file:
            try:
                os.pwrite(file.fileno(), patch, offset)
                yield self.path
            finally:
                os.pwrite(file.fileno(), self.original[offset : offset + len(patch)], offset)

    def flipped(self, offset: int, bit: int) -> bytes:
        """The byte at an offset with one bit flipped."""
        return bytes([self.original[offset] ^ 1 << bit])


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[FlatFile]:
    file = FlatFile(path)
    try:
        yield file
    finally:
        file.close()


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """A LLaMA of two layers, one of them with experts and all kinds of norms, with every section filled."""
    config = replace(llama_config(dim=16, n_heads=2, n_kv_heads=1, ffn=20, context=64), tied_output=True)
    experts = LayerConfig("experts", 20, rope=0, window=9, placement="sandwich", n_experts=3, n_experts_used=2)
    config = replace(config, qk_norm="whole", layers=(config.layers[0], experts), attention_soft_cap=30.0)
    made = checkpoint(config)
    assert made.tokenizer is not None
    texts = {
        "metadata": b'{"name":"sample"}',
        "tokenizer": made.tokenizer[0],
        "spm": llama2c_file(["he"]),
        "template": "{{ messages }} Zoë".encode(),
        "probes": encode(making.make(made, 1, prompts=["The hello"])),
    }
    path = tmp_path_factory.mktemp("corrupt") / "sample.bin"
    with atomic_file(path) as file:
        write_file(file, make_plan(made, "f16", texts))
    return Sample(path)


def use(path: Path) -> None:
    """Do everything that a user does with a file: load, read its texts, compute, verify."""
    with llamac.load(path, threads=1) as model:
        file = model.file
        assert isinstance(model.metadata, dict)
        assert isinstance(model.name, str)
        for name in TEXTS:
            file.section(name)
        file.text("template")
        model.logits([0, model.config["vocab_size"] - 1])
        if file.sections["tokenizer"].bytes:
            model.detokenize(model.tokenize("The hello"))
        if file.sections["probes"].bytes:
            replay_probes(model)
        problems = [f"tensor {record.name}: {problem}" for record, problem in file.verify_data() if problem]
        if problems:
            raise ModelError(problems[0])


def outcome(path: Path) -> str:
    """The message of the error that using the file raises, or "" if there is none. Other exceptions propagate."""
    try:
        use(path)
    except LlamacError as error:
        return str(error)
    return ""


# ---- truncation


def test_the_undamaged_file_is_valid(sample: Sample) -> None:
    assert outcome(sample.path) == ""
    with sample.replaced(rehashed(sample.original)):
        assert sample.path.read_bytes() == sample.original


def test_every_truncation_is_detected(sample: Sample) -> None:
    starts = [section.offset for section in sample.sections.values()]
    ends = [section.offset + section.bytes for section in sample.sections.values()]
    tensors = [offset for record in sample.tensors for offset in (record.offset, record.offset + record.bytes)]
    near = {offset + step for offset in (0, 8, 128, HEAD_BYTES, *starts, *ends, *tensors) for step in (-1, 0, 1)}
    sizes = sorted(size for size in near if 0 < size < len(sample.original))
    assert len(sizes) > 60
    for size in sizes:
        with sample.replaced(sample.original[:size]):
            message = outcome(sample.path)
        assert "truncated" in message, (size, message)
    with sample.replaced(sample.original + b"\0"):
        assert "too long" in outcome(sample.path)


# ---- flipped bits: the hash of the section does not match


def test_every_flip_in_header_and_section_table_is_detected(sample: Sample) -> None:
    for offset in range(HEAD_BYTES):
        for bit in range(8) if offset < RECORD_BYTES["header"] else (offset % 8,):
            with sample.patched(offset, sample.flipped(offset, bit)), pytest.raises(LlamacError) as caught:
                FlatFile(sample.path)
            if offset < 8:
                assert "not a llamac file" in str(caught.value)
            elif offset < 12:
                assert "header: version is" in str(caught.value)
            else:
                assert "header: its SHA-256 does not match" in str(caught.value)


@pytest.mark.parametrize("name", TABLES)
def test_every_flip_in_a_table_names_its_section(name: str, sample: Sample) -> None:
    section = sample.sections[name]
    for offset in range(section.offset, section.offset + section.bytes):
        with sample.patched(offset, sample.flipped(offset, offset % 8)), pytest.raises(ModelError) as caught:
            llamac.load(sample.path)
        assert f"section {name}: its SHA-256 does not match" in str(caught.value)


@pytest.mark.parametrize("name", TEXTS)
def test_a_flip_in_a_text_names_its_section(name: str, sample: Sample) -> None:
    section = sample.sections[name]
    for offset in range(section.offset, section.offset + section.bytes, max(1, section.bytes // 40)):
        with sample.patched(offset, sample.flipped(offset, offset % 8)):
            assert f"section {name}: its SHA-256 does not match" in outcome(sample.path)


def test_padding_must_be_zero(sample: Sample) -> None:
    end = HEAD_BYTES
    checked = 0
    for name, section in sample.sections.items():
        for offset in range(end, section.offset):
            with sample.patched(offset, b"\1"):
                assert f"section table, {name}: the padding before it is not zero" in outcome(sample.path)
            checked += 1
        end = section.offset + section.bytes
    assert checked > 50


def test_verify_data_detects_flips_in_weights_and_padding(sample: Sample) -> None:
    end = sample.sections["data"].offset
    for record in sample.tensors:
        for offset in (record.offset, record.offset + record.bytes // 2, record.offset + record.bytes - 1):
            with sample.patched(offset, sample.flipped(offset, offset % 8)), open_file(sample.path) as file:
                wrong = {tensor.name: problem for tensor, problem in file.verify_data() if problem}
            assert wrong == {record.name: "its SHA-256 does not match"}
        if record.offset > end:
            with sample.patched(end, b"\1"), open_file(sample.path) as file:
                wrong = {tensor.name: problem for tensor, problem in file.verify_data() if problem}
            assert wrong == {record.name: "the padding before it is not zero"}
        end = record.offset + record.bytes


# ---- the same under valid hashes: the field's own check


def numbers_out_of_range(record: str) -> Iterator[tuple[Field, int, float]]:
    """(field, element, number) for numbers below and above the range of every field of a record."""
    largest = {"I": 2**32 - 1, "i": 2**31 - 1, "f": 3e38, "Q": 2**64 - 1}
    for member in FIELDS[record]:
        code = member.layout.format[-1]
        if code not in largest:
            continue
        wrong: list[float] = []
        if member.high < largest[code]:
            wrong.append(member.high * 2 if code == "f" else int(member.high) + 1)
        if code in "if" or member.low > 0:
            wrong.append(member.low - 1 if code == "f" else int(member.low) - 1)
        if code == "f":
            wrong.append(math.nan)
        for element in {0, member.count - 1}:
            for value in wrong:
                yield member, element, value


@pytest.mark.parametrize("record", ["header", "section", "config", "layer", "tensor"])
def test_every_number_out_of_range_is_an_error_that_names_its_field(record: str, sample: Sample) -> None:
    starts = {"header": 0, "section": RECORD_BYTES["header"] + RECORD_BYTES["section"]}
    starts |= {RECORDS[name]: sample.sections[name].offset for name in TABLES}
    checked = 0
    for member, element, value in numbers_out_of_range(record):
        patch = struct.pack(f"<{member.layout.format[-1]}", value)
        data = bytearray(sample.original)
        start = starts[record] + member.offset + element * len(patch)
        data[start : start + len(patch)] = patch
        fixed = rehashed(data) if record != "section" else rehashed_header(data)
        with sample.replaced(fixed):
            message = outcome(sample.path)
        assert member.name in message, (element, value, message)
        checked += 1
    assert checked >= 3


def field_at(record: str, offset: int) -> str:
    """The name of the field at an offset in a table of records."""
    offset %= RECORD_BYTES[record]
    return next(member.name for member in reversed(FIELDS[record]) if member.offset <= offset)


@pytest.mark.parametrize("name", TABLES)
def test_flips_in_tables_under_valid_hashes_are_errors_or_valid_models(name: str, sample: Sample) -> None:
    section = sample.sections[name]
    refused = 0
    step = 1 if name != "tensors" else 5
    for offset in range(section.offset, section.offset + section.bytes, step):
        data = bytearray(sample.original)
        data[offset] ^= 1 << offset % 8
        with sample.replaced(rehashed(data)):
            message = outcome(sample.path)
        if message:
            refused += 1
            assert "SHA-256" not in message
            assert any(word in message for word in ("config", "layer", "tensor", "section", "rope", "graph")), message
            if name != "tensors":
                assert field_at(RECORDS[name], offset - section.offset) in message, (offset - section.offset, message)
    assert refused > section.bytes // step // 2


def test_flips_in_the_section_table_under_valid_hashes_are_errors(sample: Sample) -> None:
    for offset in range(RECORD_BYTES["header"], HEAD_BYTES):
        data = bytearray(sample.original)
        data[offset] ^= 1 << offset % 8
        with sample.replaced(rehashed_header(data)), pytest.raises(LlamacError) as caught:
            use(sample.path)
        assert any(word in str(caught.value) for word in ("section", "header: id")), caught.value


@pytest.mark.parametrize("name", TEXTS)
def test_damaged_texts_under_valid_hashes_raise_only_errors_of_this_library(name: str, sample: Sample) -> None:
    section = sample.sections[name]
    rng = random.Random(name)
    refused = 0
    for _ in range(150):
        data = bytearray(sample.original)
        for _ in range(rng.choice((1, 1, 4))):
            data[section.offset + rng.randrange(section.bytes)] = rng.randrange(256)
        with sample.replaced(rehashed(data)):
            refused += bool(outcome(sample.path))
    assert refused > 20 or name == "spm"  # nothing reads the original SentencePiece model


def changed(sample: Sample, record: str, start: int, **values: float) -> bytes:
    """The sample with other numbers in a record, and all hashes recomputed."""
    data = bytearray(sample.original)
    for name, value in values.items():
        code = next(member for member in FIELDS[record] if member.name == name).layout.format[-1]
        put(data, record, start, name, struct.pack(f"<{code}", value))
    return rehashed(data)


def test_an_incompatible_feature_bit_is_unsupported(sample: Sample) -> None:
    data = changed(sample, "header", 0, incompatible=4)
    with sample.replaced(data), pytest.raises(UnsupportedError, match="incompatible"):
        llamac.load(sample.path)
    with sample.replaced(changed(sample, "header", 0, compatible=4)):
        assert outcome(sample.path) == ""


def test_a_config_that_contradicts_the_tensors_is_an_error(sample: Sample) -> None:
    """Placement, norms of q and k, experts: a tensor is missing, or does not belong to the graph."""
    config, layers = sample.sections["config"].offset, sample.sections["layers"].offset
    second = layers + RECORD_BYTES["layer"]
    cases: list[tuple[str, int, dict[str, float], str]] = [
        ("layer", layers, {"placement": 2}, r"layers\.0\.attn_norm\.weight does not belong .* placement post"),
        ("layer", layers, {"placement": 3}, r"layers\.0\.attn_post_norm\.weight is missing, with placement sandwich"),
        ("layer", second, {"placement": 1}, r"layers\.1\.attn_post_norm\.weight does not belong .* placement pre"),
        ("config", config, {"qk_norm": 0}, r"layers\.0\.attn_q_norm\.weight does not belong .* qk_norm none"),
        ("config", config, {"qk_norm": 1}, r"layers\.0\.attn_q_norm\.weight: its shape .*: head_dim 8"),
        ("layer", second, {"n_experts": 2}, r"layers\.1\.ffn_router\.weight: its shape .*: n_experts 2 of layer 1"),
        ("layer", second, {"n_experts": 4096}, r"it has \d+ tensors, but n_experts is 4096 in all layers together"),
        ("layer", second, {"n_experts": 5000}, r"layer 1: n_experts is 5000, expected 0 to 4096"),
        ("layer", second, {"n_experts_used": 4}, r"layer 1: n_experts is 3 and n_experts_used is 4"),
        ("layer", second, {"n_experts_used": 0}, r"layer 1: n_experts is 3 and n_experts_used is 0"),
        ("layer", layers, {"n_experts": 1, "n_experts_used": 1}, "does not go with ffn gated"),
        ("layer", layers, {"expert_weights": 1}, "layer 0: expert_weights is 1, expected 0 with ffn gated"),
        ("layer", second, {"ffn": 2, "n_experts": 0, "n_experts_used": 0}, r"layers\.1\.ffn_gate\.weight is missing"),
    ]
    for record, start, values, message in cases:
        with sample.replaced(changed(sample, record, start, **values)):
            assert re.search(message, outcome(sample.path)), (values, outcome(sample.path))


@pytest.mark.parametrize(("layer", "values", "message"), CONTRADICTIONS)
def test_a_layer_that_contradicts_itself_is_an_error(
    sample: Sample, layer: int, values: dict[str, float], message: str
) -> None:
    start = sample.sections["layers"].offset + layer * RECORD_BYTES["layer"]
    with sample.replaced(changed(sample, "layer", start, **values)):
        assert re.search(message, outcome(sample.path)), outcome(sample.path)


def test_every_field_of_a_layer_is_computed() -> None:
    """A new field must appear in the list of those that the engine computes for all of their values."""
    fields = {name for record, name, *_ in _core.fields() if record == "layer"} - {"reserved"}
    assert fields == {*COMPUTED.split()}


def test_numbers_that_need_no_tensor_can_be_changed(sample: Sample) -> None:
    config, layers = sample.sections["config"].offset, sample.sections["layers"].offset
    for record, start, values in (
        ("config", config, {"embedding_scale": 2.0, "attention_soft_cap": 0.0, "logit_soft_cap": 5.0}),
        ("config", config, {"qk_norm": 3}),
        ("layer", layers, {"window": 5, "placement": 4}),
        ("layer", layers + RECORD_BYTES["layer"], {"n_experts_used": 3, "expert_weights": 1}),
    ):
        with sample.replaced(changed(sample, record, start, **values)):
            assert outcome(sample.path) == ""


def test_the_smallest_model_is_not_damaged(tmp_path: Path) -> None:
    layers = (LayerConfig("plain", 1),)
    config = replace(gpt2_config(context=1), dim=1, n_heads=1, n_kv_heads=1, head_dim=1, layers=layers)
    path = write_model(tmp_path / "model.bin", checkpoint(config))
    with llamac.load(path) as model:
        assert model.logits([5]).shape == (1, 301)


def test_the_error_for_a_wrong_size_names_the_field_and_its_value(sample: Sample) -> None:
    start = sample.sections["config"].offset
    config = unpack_record("config", sample.original[start : start + RECORD_BYTES["config"]])
    for name, value, message in (
        ("dim", config["dim"] + 32, rf"tensor token_embedding\.weight: its shape is .*: dim {config['dim'] + 32}$"),
        (
            "vocab_size",
            config["vocab_size"] + 1,
            rf"token_embedding\.weight: .* vocab_size {config['vocab_size'] + 1}$",
        ),
        ("n_heads", 2 * config["n_heads"], rf"attn_q\.weight: .*: n_heads {2 * config['n_heads']} times head_dim"),
        ("tied_output", 1 - config["tied_output"], rf"output\.weight .*, with tied_output {1 - config['tied_output']}"),
        ("norm", 3, r"norm is 3, expected 1 to 2 \(rms,layer\)$"),
        ("norm", {"rms": 2, "layer": 1}[config["norm"]], r"attn_norm\.bias .*, with norm (rms|layer)"),
    ):
        data = bytearray(sample.original)
        put(data, "config", start, name, struct.pack("<I", value))
        with sample.replaced(rehashed(data)):
            assert re.search(message, outcome(sample.path)), outcome(sample.path)


def test_slots_of_a_damaged_config_are_an_error(sample: Sample) -> None:
    sections = [sample.sections[name] for name in ("config", "layers")]
    config, layers = (bytearray(sample.original[s.offset : s.offset + s.bytes]) for s in sections)
    assert _core.slots(config, layers)
    put(config, "config", 0, "n_rope", struct.pack("<I", 1_000_000))
    with pytest.raises(ArgumentError, match="n_rope"):
        _core.slots(config, layers)


def test_a_file_of_another_version_is_an_error_that_says_so(sample: Sample) -> None:
    numerics = unpack_record("header", sample.original[: RECORD_BYTES["header"]])["numerics"]
    for name, value, message in (
        ("version", 2, "version is 2, this library reads version 1: the file needs a newer llamac"),
        ("numerics", numerics + 1, f"numerics is {numerics + 1}, this library computes by numerics .*: a newer llamac"),
        ("numerics", numerics - 1, "an older llamac wrote the file, .* export the model again"),
    ):
        data = bytearray(sample.original)
        put(data, "header", 0, name, struct.pack("<I", value))
        with sample.replaced(rehashed(data)):
            assert re.search(message, outcome(sample.path)), outcome(sample.path)


# ---- random damage


def test_random_mutations_never_crash(sample: Sample) -> None:
    rng = random.Random(20240607)
    data_start = sample.sections["data"].offset
    outcomes: dict[bool, int] = {True: 0, False: 0}
    for round_ in range(4000):
        data = bytearray(sample.original)
        for _ in range(rng.choice((1, 2, 8, 64))):
            start = rng.randrange(data_start if rng.random() < 0.8 else len(data))
            length = rng.choice((1, 1, 2, 4, 8, 32))
            kind = rng.randrange(4)
            if kind == 0:
                patch = rng.randbytes(length)
            elif kind == 1:
                patch = bytes([rng.choice((0, 0x7F, 0x80, 0xFF))]) * length
            elif kind == 2:
                source = rng.randrange(len(data))
                patch = bytes(data[source : source + length])
            else:
                patch = bytes([data[start] ^ 1 << rng.randrange(8)])
            data[start : start + len(patch)] = patch[: len(data) - start]
        if rng.random() < 0.1:
            del data[rng.randrange(len(data)) :]
        fixed = bytes(data)
        if round_ % 2 and len(data) == len(sample.original):
            fixed = rehashed(sample.original[:HEAD_BYTES] + data[HEAD_BYTES:])  # its tables must be valid
        with sample.replaced(fixed or b"\0"):
            outcomes[bool(outcome(sample.path))] += 1
    assert outcomes[True] > 1000  # most mutations are detected
    assert outcomes[False] > 10  # some only change a weight


def test_errors_leave_no_object_open(sample: Sample) -> None:
    before = _core.live_objects()
    for offset in range(0, len(sample.original), len(sample.original) // 50):
        with sample.patched(offset, sample.flipped(offset, 0)):
            outcome(sample.path)
    assert _core.live_objects() == before


# ---- other files


def test_errors_name_other_file_formats(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        archive.writestr("data.pkl", b"x" * 100)
    header = struct.pack("<7i", 64, 172, 5, 8, 4, 512, 512)
    cases = {
        "this is a GGUF file: run `llamac export` on it first": gguf_file([("general.architecture", "llama")]),
        "this is a ZIP archive (a PyTorch checkpoint?): run `llamac": (tmp_path / "model.zip").read_bytes(),
        "this is a safetensors file: run `llamac export`": struct.pack("<Q", 2) + b'{"a":{}}' + bytes(40),
        "this looks like a llama2.c checkpoint: run `llamac": header + bytes(1000),
        "this is a llama2.c checkpoint: run `llamac": struct.pack("<Ii", 0x616B3432, 1) + header + bytes(300),
        "this is a Python pickle": b"\x80\x02}q\x00." + bytes(50),
        "this is not a llamac file: it does not begin with the magic": b"Once upon a time, there was a text.\n",
        "the file is empty": b"",
    }
    for message, data in cases.items():
        path = tmp_path / "model.bin"
        path.write_bytes(data)
        with pytest.raises(ModelError) as caught:
            FlatFile(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert message in str(caught.value)
    with pytest.raises(ModelError, match="is a directory: run `llamac export` on it first"):
        FlatFile(tmp_path)
    with pytest.raises(FileNotFoundError):
        FlatFile(tmp_path / "nothing.bin")
