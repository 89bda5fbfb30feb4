"""llama2.c files in both directions: stories260K as versions 0, 1 and 2, and models that the format cannot hold."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from vocab_samples import write_json

import llamac
from builders import checkpoint, llama_config
from llamac.errors import ArgumentError, ExportError, UnsupportedError
from llamac.export.checkpoint import Checkpoint, LazyTensor, ModelConfig
from llamac.export.convert import export
from llamac.export.llama2c import model as llama2c
from llamac.export.llama2c.write import write_llama2c
from llamac.export.reference import forward
from llamac.text.vocabulary.load import load_vocabulary

Floats = NDArray[np.float32]
HEAD_BYTES = 256  # of versions 1 and 2


class Stories:
    """The header and tensors of stories260K, read by hand: llama2.c's names in the order of version 0."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "stories260K.bin"
        self.tokenizer = folder / "tok512.bin"
        data = self.path.read_bytes()
        self.header = struct.unpack_from("<7i", data)
        dim, hidden, layers, heads, kv_heads, vocab, context = self.header
        half, kv_dim = dim // heads // 2, dim // heads * kv_heads
        self.shapes = {
            "tok": (vocab, dim),
            "att_norm": (layers, dim),
            "wq": (layers, dim, dim),
            "wk": (layers, kv_dim, dim),
            "wv": (layers, kv_dim, dim),
            "wo": (layers, dim, dim),
            "ffn_norm": (layers, dim),
            "w1": (layers, hidden, dim),
            "w2": (layers, dim, hidden),
            "w3": (layers, hidden, dim),
            "norm": (dim,),
            "cos": (context, half),
            "sin": (context, half),
        }
        self.tensors: dict[str, Floats] = {}
        at = 28
        for name, shape in self.shapes.items():
            count = int(np.prod(shape))
            self.tensors[name] = np.frombuffer(data, "<f4", count, at).reshape(shape)
            at += 4 * count
        assert at == len(data)

    def as_version_1(self, shared: bool = True) -> bytes:
        """The file that llama2.c's version1_export writes."""
        head = struct.pack("<Ii7iB", 0x616B3432, 1, *self.header, shared).ljust(HEAD_BYTES, b"\0")
        names = ["att_norm", "ffn_norm", "norm", "tok", "wq", "wk", "wv", "wo", "w1", "w2", "w3"]
        return head + b"".join(self.tensors[name].tobytes() for name in names + ["tok"] * (not shared))


@pytest.fixture(scope="session")
def stories(data_dir: Path) -> Stories:
    return Stories(data_dir / "stories260K")


@pytest.fixture(scope="session")
def golden(data_dir: Path) -> str:
    """The output of llama2.c's run for 256 steps at temperature 0, without its final line feed."""
    text = (data_dir / "stories260K" / "greedy-256.txt").read_text(encoding="utf-8")
    assert text.endswith("\n")
    return text[:-1]


@pytest.fixture(scope="session")
def flat(stories: Stories, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("flat") / "stories.bin"
    export(stories.path, path, tokenizer=stories.tokenizer)
    return path


def greedy(path: Path) -> str:
    with llamac.load(path) as model:
        return model.generate("", max_tokens=256, temperature=0).text


# ---- golden text


def test_version_0_gives_the_golden_text(flat: Path, golden: str) -> None:
    assert greedy(flat) == golden


@pytest.mark.parametrize("shared", [True, False])
def test_version_1_gives_the_golden_text(stories: Stories, golden: str, tmp_path: Path, shared: bool) -> None:
    source = tmp_path / "stories-v1.bin"
    source.write_bytes(stories.as_version_1(shared))
    export(source, tmp_path / "flat.bin", tokenizer=stories.tokenizer)
    assert greedy(tmp_path / "flat.bin") == golden
    with llamac.load(tmp_path / "flat.bin") as model:
        assert model.config["tied_output"] == int(shared)


def test_a_round_trip_through_hugging_face_gives_the_golden_text(flat: Path, golden: str, tmp_path: Path) -> None:
    export(flat, tmp_path / "hf", to="hf")
    export(tmp_path / "hf", tmp_path / "again.bin")
    assert greedy(tmp_path / "again.bin") == golden


# ---- version 2


def dequantized(stories: Stories, path: Path) -> dict[str, Floats]:
    """The tensors of version 2 by llama2.c's names: int8 codes of a matrix, then a scale per group."""
    data = path.read_bytes()
    magic, version, *header, shared, group = struct.unpack_from("<Ii7iBi", data)
    assert (magic, version, tuple(header), shared) == (0x616B3432, 2, stories.header, 1)
    found: dict[str, Floats] = {}
    at = HEAD_BYTES
    for name in ("att_norm", "ffn_norm", "norm"):
        count = int(np.prod(stories.shapes[name]))
        found[name] = np.frombuffer(data, "<f4", count, at).reshape(stories.shapes[name])
        at += 4 * count
    for name in ("tok", "wq", "wk", "wv", "wo", "w1", "w2", "w3"):
        shape = stories.shapes[name] if name != "tok" else (1, *stories.shapes[name])
        layers = []
        for _ in range(shape[0]):
            numbers: list[float] = []
            count = shape[1] * shape[2]
            for scale in struct.unpack_from(f"<{count // group}f", data, at + count):
                numbers += [code * scale for code in struct.unpack_from(f"<{group}b", data, at)]
                at += group
            at += 4 * (count // group)
            layers.append(np.array(numbers, np.float32).reshape(shape[1:]))
        found[name] = np.stack(layers) if name != "tok" else layers[0]
    assert at == len(data)
    return found


def test_version_2_is_dequantized_as_in_llama2c(stories: Stories, data_dir: Path) -> None:
    path = data_dir / "stories260K" / "stories260K-q8.bin"
    expected = dequantized(stories, path)
    read = llama2c.read(path)
    names = {"wv": "attn_v", "wo": "attn_out", "w1": "ffn_gate", "w2": "ffn_down", "w3": "ffn_up"}
    names |= {"att_norm": "attn_norm", "ffn_norm": "ffn_norm"}
    np.testing.assert_array_equal(read.tensors["token_embedding.weight"].array(), expected["tok"])
    for layer in range(len(read.config.layers)):
        for theirs, ours in names.items():
            np.testing.assert_array_equal(
                read.tensors[f"layers.{layer}.{ours}.weight"].array(), expected[theirs][layer]
            )


def test_version_2_matches_the_float64_logits_of_its_dequantized_weights(
    stories: Stories, data_dir: Path, tmp_path: Path
) -> None:
    source = data_dir / "stories260K" / "stories260K-q8.bin"
    export(source, tmp_path / "q8.bin", tokenizer=stories.tokenizer)
    with llamac.load(tmp_path / "q8.bin", kv_dtype="f32") as model:
        ids = model.tokenize("Once upon a time, there was a little girl named Lily.")
        logits = model.logits(ids)
    (expected,) = forward(llama2c.read(source), [ids])
    error = np.abs(logits - expected).max(axis=1) / np.abs(expected).max(axis=1)
    assert error.max() < 1e-4
    (float_model,) = forward(llama2c.read(stories.path), [ids])
    assert (
        np.abs(expected - float_model).max(axis=1) / np.abs(expected).max(axis=1)
    ).max() > 1e-3  # quantization has an effect


# ---- back to version 0


def test_a_round_trip_gives_the_same_bytes(stories: Stories, flat: Path, tmp_path: Path) -> None:
    report = export(flat, tmp_path / "model.bin", to="llama2c")
    written, original = (tmp_path / "model.bin").read_bytes(), stories.path.read_bytes()
    assert (tmp_path / "tokenizer.bin").read_bytes() == stories.tokenizer.read_bytes()
    assert report.bytes == len(written) + stories.tokenizer.stat().st_size
    tables = stories.tensors["cos"].nbytes + stories.tensors["sin"].nbytes  # at the end: the output is tied
    assert len(written) == len(original)
    assert written[:-tables] == original[:-tables]
    cos_sin = np.frombuffer(written[-tables:], "<f4")
    np.testing.assert_allclose(cos_sin, np.frombuffer(original[-tables:], "<f4"), rtol=0, atol=1e-4)
    # the numbers that Python's own functions give, in float64
    frequencies = llama2c.inverse_frequencies(stories.header[0] // stories.header[3]).tolist()
    angles = [position * frequency for position in range(stories.header[6]) for frequency in frequencies]
    expected = [math.cos(angle) for angle in angles] + [math.sin(angle) for angle in angles]
    assert (cos_sin == np.array(expected, np.float32)).all()


def test_an_untied_output_matrix_is_kept(stories: Stories, tmp_path: Path) -> None:
    source = tmp_path / "v1.bin"
    source.write_bytes(stories.as_version_1(shared=False))
    export(source, tmp_path / "v0.bin", to="llama2c", tokenizer=stories.tokenizer)
    data = (tmp_path / "v0.bin").read_bytes()
    assert struct.unpack_from("<7i", data)[5] == -stories.header[5]
    assert data.endswith(stories.tensors["tok"].tobytes())
    read = llama2c.read(tmp_path / "v0.bin")
    assert not read.config.tied_output
    np.testing.assert_array_equal(read.tensors["output.weight"].array(), stories.tensors["tok"])


def test_grouped_queries_and_odd_widths_round_trip(tmp_path: Path) -> None:
    made = checkpoint(llama_config(dim=48, n_heads=6, n_kv_heads=2, ffn=77))
    made = replace_config(made, n_token_ids=made.config.vocab_size, tokenizer=None)
    write_llama2c(made, tmp_path / "model.bin", [])
    assert not (tmp_path / "tokenizer.bin").exists()
    read = llama2c.read(tmp_path / "model.bin")
    assert set(read.tensors) == set(made.tensors)
    for name, tensor in made.tensors.items():
        np.testing.assert_allclose(read.tensors[name].array(), tensor.array(), rtol=1e-6 * name.startswith("rope"))


# ---- refused models


def replace_config(made: Checkpoint, tokenizer: object = "kept", **changes: Any) -> Checkpoint:
    """A copy of the checkpoint with config members changed, optionally without a tokenizer."""
    config = replace(made.config, **changes)
    kept = made.tokenizer if tokenizer == "kept" else None
    return Checkpoint(config, made.tensors, kept, metadata=made.metadata)


def representable() -> Checkpoint:
    """A random LLaMA that llama2.c's format can hold."""
    made = checkpoint(llama_config())
    return replace_config(made, vocab_size=made.config.n_token_ids, tokenizer=None)


def with_layer(**changes: Any) -> Callable[[ModelConfig], dict[str, Any]]:
    def change(config: ModelConfig) -> dict[str, Any]:
        return {"layers": (*config.layers[:-1], replace(config.layers[-1], **changes))}

    return change


REFUSED: dict[str, tuple[dict[str, Any] | Callable[[ModelConfig], dict[str, Any]], str]] = {
    "norm": ({"norm": "layer"}, "norm layer"),
    "activation": ({"activation": "relu"}, "activation relu"),
    "position": ({"position": "learned"}, "position learned"),
    "eps": ({"norm_eps": 1e-6}, "norm_eps is 1e-06"),
    "head_dim": ({"head_dim": 16}, "n_heads \\* head_dim is 96"),
    "scale": ({"attention_scale": 1.0}, "attention_scale is 1,"),
    "embedding_scale": ({"embedding_scale": 2.0}, "embedding_scale is 2"),
    "residual_scale": ({"residual_scale": 0.5}, "residual_scale is 0.5"),
    "logit_scale": ({"logit_scale": 0.5}, "logit_scale is 0.5"),
    "attention_soft_cap": ({"attention_soft_cap": 30.0}, "attention_soft_cap is 30"),
    "logit_soft_cap": ({"logit_soft_cap": 30.0}, "logit_soft_cap is 30"),
    "n_token_ids": ({"n_token_ids": 7}, "the tokenizer has 7 ids"),
    "rope_dim": ({"rope_dim": (4,)}, "rope_dim is"),
    "factor": ({"rope_attention_factor": (1.5,)}, "attention factor"),
    "long": ({"rope_original_context": (8,)}, "second table"),
    "window": (with_layer(window=8), "layer 1 has window 8"),
    "ffn": (with_layer(ffn="plain"), "ffn plain"),
    "ffn_dim": (with_layer(ffn_dim=8), "layer 1 has ffn_dim 8"),
    "placement": (with_layer(placement="post"), "layer 1 has placement post"),
    "no_rope": (with_layer(rope=-1), "layer 1 has rope -1"),
}


def refusal(made: Checkpoint, tmp_path: Path) -> str:
    with pytest.raises(UnsupportedError) as caught:
        write_llama2c(made, tmp_path / "model.bin", [])
    assert list(tmp_path.iterdir()) == []
    return str(caught.value)


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_the_format_cannot_hold_are_refused_by_name(case: str, tmp_path: Path) -> None:
    made = representable()
    changes, message = REFUSED[case]
    changes = changes(made.config) if callable(changes) else changes
    assert re.search(message, refusal(replace_config(made, **changes), tmp_path))


def test_all_reasons_are_reported(tmp_path: Path) -> None:
    made = representable()
    made.tensors["layers.0.attn_q.bias"] = LazyTensor.of(np.zeros(made.config.dim, np.float32))
    changes = with_layer(window=8)(made.config)
    text = refusal(replace_config(made, norm_eps=1e-6, n_token_ids=7, **changes), tmp_path)
    for reason in ("norm_eps", "has 7 ids", "layer 1 has", "layers.0.attn_q.bias: llama2.c has"):
        assert reason in text


def test_other_frequencies_are_refused(tmp_path: Path) -> None:
    made = representable()
    made.tensors["rope.0.inv_freq"] = LazyTensor.of((500000.0 ** -np.arange(0, 1, 0.25)).astype(np.float32))
    assert "theta 10000" in refusal(made, tmp_path)


def test_tokenizers_that_llama2c_reads_differently_are_refused(
    data_dir: Path, stories: Stories, tmp_path: Path
) -> None:
    made = llama2c.read(stories.path)
    made.tokenizer = tuple(load_vocabulary(stories.tokenizer))  # type: ignore[assignment]
    assert made.tokenizer is not None
    data, special, spm = made.tokenizer
    made.tokenizer = (data, replace(special, add_bos=False), spm)
    assert "add_bos is off" in refusal(made, tmp_path)
    made.tokenizer = (data.replace(b'{"prepend":" ","type":"Prepend"}', b""), special, spm)
    assert made.tokenizer[0] != data
    assert "differently" in refusal(made, tmp_path)
    made.tokenizer = (data, replace(special, eos_id=5), None)
    assert "BOS and EOS" in refusal(made, tmp_path)


def test_another_tokenizer_is_not_overwritten_unless_allowed(stories: Stories, flat: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.bin").write_bytes(b"precious")
    with pytest.raises(ExportError, match=r"tokenizer\.bin is the tokenizer of another model"):
        export(flat, tmp_path / "model.bin", to="llama2c")
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.bin"]
    (warning,) = export(flat, tmp_path / "model.bin", to="llama2c", overwrite=True).warnings
    assert re.search(r"tokenizer\.bin was the tokenizer of another model and has been replaced", warning)
    assert (tmp_path / "tokenizer.bin").read_bytes() == stories.tokenizer.read_bytes()
    report = export(flat, tmp_path / "second.bin", to="llama2c")  # an identical tokenizer is no conflict
    assert report.warnings == []
    with pytest.raises(ArgumentError, match="another name"):
        export(flat, tmp_path / "tokenizer.bin", to="llama2c", overwrite=True)


def test_the_tokenizer_is_renamed_before_the_model(flat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the second rename fails, no model is left next to another model's tokenizer."""

    def broken(path: Path, target: Path) -> None:
        raise OSError(f"no name for {Path(target).name}")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match=r"tokenizer\.bin"):
        export(flat, tmp_path / "model.bin", to="llama2c")
    assert list(tmp_path.iterdir()) == []


# ---- damaged and malformed sources


def test_a_file_that_contradicts_its_header_is_refused(stories: Stories, tmp_path: Path) -> None:
    data = stories.path.read_bytes()
    for name, damaged in {"short": data[:-4], "long": data + b"\0" * 4}.items():
        path = tmp_path / f"{name}.bin"
        path.write_bytes(damaged)
        with pytest.raises(ExportError, match=f"requires {len(data)} bytes, but the file has {len(damaged)}"):
            export(path, tmp_path / "out.bin", tokenizer=stories.tokenizer)
    assert not (tmp_path / "out.bin").exists()


def test_a_small_file_with_many_wide_heads_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "wide.bin"
    path.write_bytes(struct.pack("<Ii7iB", 0x616B3432, 1, 1 << 16, 12, 256, 1, 1, 11, 16, 1).ljust(300, b"\0"))
    tracemalloc.start()
    try:
        with pytest.raises(ExportError, match=r"the header requires \d{14} bytes, but the file has 300"):
            export(path, tmp_path / "out.bin")
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_invalid_header_fields_are_named(stories: Stories, tmp_path: Path) -> None:
    def header(magic: int = 0x616B3432, version: int = 1, shared: int = 1, group: int = 0, **changes: int) -> bytes:
        names = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "max_seq_len")
        values = dict(zip(names, stories.header, strict=True)) | changes
        return struct.pack("<Ii7iBi", magic, version, *values.values(), shared, group).ljust(HEAD_BYTES, b"\0")

    cases = {
        "version 3": header(version=3),
        "shared classifier is 2": header(shared=2),
        "group size is 0": header(version=2),
        "dim is 0": header(dim=0),
        "n_layers is -1": header(n_layers=-1),
        "n_kv_heads is 9": header(n_kv_heads=9),
        "are inconsistent": header(n_kv_heads=3),
        "not a multiple of the group size": header(version=2, group=7),
        "ends within its header": header()[:100],
    }
    for message, data in cases.items():
        path = tmp_path / "bad.bin"
        path.write_bytes(data)
        with pytest.raises(ExportError, match=message):
            export(path, tmp_path / "out.bin")


def test_the_tokenizer_next_to_a_model_is_found(stories: Stories, tmp_path: Path) -> None:
    shutil.copy(stories.path, tmp_path / "stories.bin")
    shutil.copy(stories.tokenizer, tmp_path / "tokenizer.bin")
    report = export(tmp_path / "stories.bin", tmp_path / "out.bin")
    assert (report.tokenizer, report.warnings) == ("tokenizer.bin", [])


def test_a_model_without_a_tokenizer_also_stops_at_bos(stories: Stories, tmp_path: Path) -> None:
    bare = tmp_path / "bare.llama2c"
    bare.write_bytes(stories.path.read_bytes())
    export(bare, tmp_path / "bare.bin", probe_source=None)
    with llamac.load(tmp_path / "bare.bin") as model:
        assert model.special.stop_ids == (1,)
        assert model.generate([1], max_tokens=400, temperature=0).finish_reason == "stop"
    # a tokenizer without special tokens does not change the stop ids, whenever it is attached
    document = json.loads(load_vocabulary(stories.tokenizer).json)
    (tmp_path / "plain").mkdir()
    write_json(tmp_path / "plain", tokenizer=document)
    with llamac.load(tmp_path / "bare.bin", tokenizer=tmp_path / "plain") as model:
        assert model.special.stop_ids == (1,)
    for source in (bare, tmp_path / "bare.bin"):
        export(source, tmp_path / "plain.bin", tokenizer=tmp_path / "plain", probe_source=None, overwrite=True)
        with llamac.load(tmp_path / "plain.bin") as model:
            assert model.special.stop_ids == (1,)
            assert model.generate("Once upon a time", max_tokens=400, temperature=0).finish_reason == "stop"


def test_the_stop_ids_of_a_flat_file_without_a_tokenizer_are_kept(stories: Stories, tmp_path: Path) -> None:
    bare = tmp_path / "bare.llama2c"
    bare.write_bytes(stories.path.read_bytes())
    export(bare, tmp_path / "bare.bin", probe_source=None)
    export(tmp_path / "bare.bin", tmp_path / "again.bin", probe_source=None)
    with llamac.load(tmp_path / "again.bin") as model:
        assert model.special.stop_ids == (1,)
    export(bare, tmp_path / "hf", to="hf")
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": None, "eos_token_id": 1}
