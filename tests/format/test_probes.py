"""Probes: encoding and strict parsing of the section, the probes that the exporter stores, the replay on the engine."""

from __future__ import annotations

import contextlib
import functools
import json
import struct
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest

import llamac
from golden.cases import CASES
from golden.tiny_checkpoints import random_tensor, write_checkpoint
from llamac.engine.inspection.probe_replay import replay_probes
from llamac.errors import ArgumentError, ExportError, ModelError, UnsupportedError
from llamac.export import probes as making
from llamac.export.checkpoint import Checkpoint, LayerConfig, LazyTensor, ModelConfig
from llamac.export.convert import export
from llamac.export.hf import model as hf
from llamac.export.reference import forward
from llamac.format.probes import EngineRecord, Probe, ProbeSet, decode, encode, relative_error
from llamac.text.decoding import byte_alphabet
from llamac.text.special_tokens import SpecialTokens
from openmp import up_to

VOCAB = 5
SAMPLE = ProbeSet(
    "llamac-numpy",
    1,
    (
        Probe((1, 4), np.array([0.5, -1.0, 2.0, 0.0, 3.5], np.float32), "Zoë 🙂"),
        Probe((0,), np.array([1.0, 2.0, 3.0, 4.0, 5.0], np.float32), None),
    ),
    {"f16": EngineRecord("ab" * 32, 1.5e-3), "f32": EngineRecord("cd" * 32, 1e-4)},
)


# ---- encoding


def test_decode_reverses_encode() -> None:
    found = decode(encode(SAMPLE), VOCAB)
    assert (found.source, found.numerics, found.engine) == (SAMPLE.source, SAMPLE.numerics, SAMPLE.engine)
    for probe, expected in zip(found.probes, SAMPLE.probes, strict=True):
        assert (probe.ids, probe.prompt) == (expected.ids, expected.prompt)
        np.testing.assert_array_equal(probe.logits, expected.logits)


def test_engine_records_do_not_change_the_size() -> None:
    empty = SAMPLE.with_engine({"f16": EngineRecord(), "f32": EngineRecord()})
    other = SAMPLE.with_engine({"f16": EngineRecord("0f" * 32, 9.9996e-5), "f32": EngineRecord("f0" * 32, 123.0)})
    assert len(encode(empty)) == len(encode(SAMPLE)) == len(encode(other))
    assert decode(encode(empty), VOCAB) is not None


def test_the_section_is_a_safetensors_file() -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    tensors = safetensors.load(encode(SAMPLE))
    assert sorted(tensors) == ["0.ids", "0.logits", "1.ids", "1.logits"]
    assert tensors["0.ids"].tolist() == [1, 4]
    assert tensors["0.ids"].dtype == np.int32
    np.testing.assert_array_equal(tensors["1.logits"], SAMPLE.probes[1].logits)


# ---- the parser


def test_damage_raises_only_model_error() -> None:
    blob = encode(SAMPLE)
    refused = 0
    for position in range(len(blob)):
        for damaged in (
            blob[:position],
            blob[:position] + bytes([blob[position] ^ 1]) + blob[position + 1 :],
            blob[:position] + bytes([blob[position] ^ 0x80]) + blob[position + 1 :],
        ):
            with contextlib.suppress(ModelError):
                decode(damaged, VOCAB)
                continue
            refused += 1
    assert refused > 2 * len(blob)  # a flip within a text, hash or logit can leave a valid section


def header_of(blob: bytes) -> tuple[dict[str, Any], bytes]:
    (size,) = struct.unpack_from("<Q", blob)
    return json.loads(blob[8 : 8 + size]), blob[8 + size :]


def joined(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def edited(change: Callable[[dict[str, Any]], object]) -> bytes:
    """The sample with a change in its header."""
    header, data = header_of(encode(SAMPLE))
    change(header)
    return joined(header, data)


def engine_edited(change: Callable[[dict[str, Any]], object]) -> bytes:
    def apply(header: dict[str, Any]) -> None:
        engine = json.loads(header["__metadata__"]["engine"])
        change(engine)
        header["__metadata__"]["engine"] = json.dumps(engine)

    return edited(apply)


def sample_with(logits: list[float] | None = None, ids: tuple[int, ...] = (1,)) -> bytes:
    values = np.array(logits or [1.0, 2.0, 3.0, 4.0, 5.0], np.float32)
    return encode(replace(SAMPLE, probes=(Probe(ids, values, "x"),)))


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (b"", "0 bytes are too short"),
        (struct.pack("<Q", 2**63) + b"{}", "header of 9223372036854775808 bytes does not fit"),
        (joined(b"{", b""), "the header is not valid JSON"),
        (joined(b"\xff\xfe", b""), "the header is not valid JSON"),
        (joined(b"[" * 100_000, b""), "the header is nested more than 100 deep"),
        (joined(b"9" * 5000, b""), "the header is not valid JSON"),
        (joined([], b""), "the header is not a JSON object"),
        (joined({}, b""), "__metadata__ is missing"),
        (edited(lambda h: h["__metadata__"].pop("source")), "source is missing"),
        (edited(lambda h: h["__metadata__"].update(source="\udc80")), "source is not valid Unicode"),
        (edited(lambda h: h["__metadata__"].update(prompts="[]")), "prompts is not a list of strings"),
        (edited(lambda h: h["__metadata__"].update(prompts="[1, 2]")), "prompts is not a list of strings"),
        (edited(lambda h: h["__metadata__"].update(prompts='["\\ud800", null]')), "prompts is not a list of strings"),
        (edited(lambda h: h["__metadata__"].update(prompts='["a"]')), "4 tensors, expected 2 for 1 prompts"),
        (edited(lambda h: h["__metadata__"].update(prompts="{}")), "prompts is not a JSON array"),
        (edited(lambda h: h["__metadata__"].update(engine="?")), "engine is not valid JSON"),
        (edited(lambda h: h.update({"2.ids": h.pop("1.ids")})), "1.ids is missing"),
        (edited(lambda h: h["0.ids"].update(dtype="I64")), "0.ids is not a one-dimensional I32 tensor"),
        (edited(lambda h: h["0.ids"].update(shape=[])), "0.ids is not a one-dimensional I32 tensor"),
        (edited(lambda h: h["0.ids"].update(shape=[True])), "0.ids is not a one-dimensional I32 tensor"),
        (edited(lambda h: h["0.ids"].update(shape=[0])), "0.ids is not a one-dimensional I32 tensor"),
        (edited(lambda h: h["0.ids"].update(shape=[10**4000])), "0.ids is not a one-dimensional I32 tensor"),
        (edited(lambda h: h["0.ids"].update(data_offsets=[0, 4])), r"0.ids is not at \[0, 8\]"),
        (edited(lambda h: h["1.logits"].update(shape=[4])), "1.logits has 4 elements, the model's vocabulary 5"),
        (encode(SAMPLE) + b"\0", "the data has 53 bytes, the tensors need 52"),
        (engine_edited(lambda e: e.pop("numerics")), "numerics is missing"),
        (engine_edited(lambda e: e.update(numerics=True)), "numerics is missing or not of the type int"),
        (engine_edited(lambda e: e["sha256"].pop("f16")), "f16 is missing"),
        (engine_edited(lambda e: e["sha256"].update(f32="CD" * 32)), "sha256 of f32"),
        (engine_edited(lambda e: e["tolerance"].update(f32="nan")), "tolerance of f32"),
        (engine_edited(lambda e: e["tolerance"].update(f32=0.1)), "f32 is missing or not of the type str"),
        (sample_with(ids=(5,)), "0.ids has an id outside 0 to 4"),
        (sample_with(ids=(-1,)), "0.ids has an id outside 0 to 4"),
        (sample_with(logits=[1, 2, 3, 4, np.inf]), "0.logits has a number that is not finite"),
        (sample_with(logits=[1, 2, 3, 4, np.nan]), "0.logits has a number that is not finite"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_error_describes_the_fault(blob: bytes, message: str) -> None:
    with pytest.raises(ModelError, match=f"section probes: .*{message}"):
        decode(blob, VOCAB)


def test_relative_error_is_relative_to_the_largest_logit() -> None:
    reference = np.array([1.0, -4.0], np.float32)
    assert relative_error(np.array([1.5, -4.0], np.float32), reference) == 0.125
    assert relative_error(np.array([np.nan, -4.0], np.float32), reference) == np.inf
    assert relative_error(np.array([np.inf, -4.0], np.float32), reference) == np.inf


# ---- the probes that the exporter stores


def tiny(vocab: int = 301, **changes: Any) -> Checkpoint:
    """A checkpoint like GPT-2 with one layer."""
    dim, ffn, context = 12, 20, 32
    config = ModelConfig(
        dim=dim,
        n_heads=2,
        n_kv_heads=2,
        head_dim=6,
        vocab_size=vocab,
        n_token_ids=vocab - 10,
        context=context,
        norm="layer",
        position="learned",
        activation="gelu_tanh",
        tied_output=True,
        norm_eps=1e-5,
        attention_scale=6**-0.5,
        layers=(LayerConfig("plain", ffn),),
    )
    shapes: dict[str, tuple[int, ...]] = {
        "token_embedding.weight": (vocab, dim),
        "position_embedding.weight": (context, dim),
        **{f"layers.0.attn_{matrix}.weight": (dim, dim) for matrix in ("q", "k", "v", "out")},
        "layers.0.ffn_up.weight": (ffn, dim),
        "layers.0.ffn_down.weight": (dim, ffn),
    }
    for norm in ("layers.0.attn_norm", "layers.0.ffn_norm", "output_norm"):
        shapes[f"{norm}.weight"] = shapes[f"{norm}.bias"] = (dim,)

    def lazy(name: str) -> LazyTensor:
        return LazyTensor(shapes[name], "f32", lambda first, last: random_tensor(name, shapes[name])[first:last])

    return Checkpoint(replace(config, **changes), {name: lazy(name) for name in shapes})


def byte_tokenizer(add_bos: bool) -> tuple[bytes, SpecialTokens, bytes | None]:
    """Byte-level BPE without merges: ids 0 to 255 are bytes, 256 is BOS and EOS."""
    vocab = byte_alphabet()
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    text = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    return json.dumps(text).encode(), SpecialTokens(256, add_bos, True, 256, (256,)), None


def test_reference_logits_are_those_of_the_last_position() -> None:
    checkpoint = tiny()
    found = making.make(checkpoint, 1)
    assert found.source == "llamac-numpy"
    assert found.numerics == 1
    for probe in found.probes:
        exact = forward(checkpoint, [probe.ids])[0][-1]
        largest = np.abs(exact).max()
        assert np.abs(probe.logits - exact).max() <= 2**-17 * largest
        assert np.count_nonzero(probe.logits) > 200
    assert len(encode(found)) == len(encode(found.with_engine(SAMPLE.engine)))


def test_prompts_are_encoded_with_the_tokenizer_and_its_bos_rule() -> None:
    texts = ["ab", "é", ""]
    found = {}
    for add_bos in (False, True):
        checkpoint = tiny()
        checkpoint.tokenizer = byte_tokenizer(add_bos)
        found[add_bos] = [(p.prompt, p.ids) for p in making.make(checkpoint, 1, prompts=texts).probes]
    assert found[False] == [("ab", (97, 98)), ("é", (0xC3, 0xA9))]  # no probe for a prompt without tokens
    assert found[True] == [("ab", (256, 97, 98)), ("é", (256, 0xC3, 0xA9)), ("", (256,))]


def test_the_default_prompts_cover_digits_punctuation_and_unicode() -> None:
    text = "".join(making.PROMPTS)
    assert any(char.isdigit() for char in text)
    assert "(" in text
    assert "\n" in text
    assert any(ord(char) > 0xFFFF for char in text)
    assert "東" in text


def test_without_a_tokenizer_ids_are_reproducible_and_valid() -> None:
    first, second = (making.make(tiny(), 1).probes for _ in range(2))
    assert [probe.ids for probe in first] == [probe.ids for probe in second]
    assert [len(probe.ids) for probe in first] == list(making.RANDOM_LENGTHS)
    assert all(0 <= token < 291 for probe in first for token in probe.ids)
    assert len(set(first[-1].ids)) > 20
    assert [probe.prompt for probe in first] == [None] * len(first)


def test_probes_fit_into_the_context() -> None:
    assert max(len(probe.ids) for probe in making.make(tiny(context=5), 1).probes) == 5
    checkpoint = tiny(context=5)
    checkpoint.tokenizer = byte_tokenizer(add_bos=True)
    assert {len(probe.ids) for probe in making.make(checkpoint, 1).probes} == {5}


def test_reference_logits_that_are_not_finite_are_an_error() -> None:
    checkpoint = tiny()
    checkpoint.tensors["output_norm.weight"] = LazyTensor((12,), "f32", lambda first, last: np.full(12, np.nan, "f4"))
    with pytest.raises(ExportError, match=r"reference logits of probe 0 .* not finite"):
        making.make(checkpoint, 1)


def test_an_unknown_source_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="'jax', expected one of llamac, transformers"):
        making.make(tiny(), 1, source="jax")
    with pytest.raises(ExportError, match="needs a Hugging Face directory"):
        making.make(tiny(), 1, source="transformers")


def test_transformers_gives_the_same_logits_without_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    folder = write_checkpoint(tmp_path / "llama", CASES["llama"].config)
    checkpoint = hf.read(folder, [])
    capfd.readouterr()
    ours, theirs = (making.make(checkpoint, 1, source=source, folder=folder) for source in making.SOURCES)
    assert capfd.readouterr() == ("", "")
    assert theirs.source.startswith("transformers 5.")
    assert [probe.ids for probe in ours.probes] == [probe.ids for probe in theirs.probes]
    for one, other in zip(ours.probes, theirs.probes, strict=True):
        assert relative_error(one.logits, other.logits) < 5e-5


# ---- the engine


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The exported file of a parity case in a dtype, with probes."""
    root = tmp_path_factory.mktemp("probes")

    @functools.cache
    def path(name: str, dtype: str) -> Path:
        folder = write_checkpoint(root / name, CASES[name].config)
        export(folder, root / f"{name}-{dtype}.bin", dtype=dtype)
        return root / f"{name}-{dtype}.bin"

    return path


Exported = Callable[[str, str], Path]


@pytest.mark.parametrize("kv", ["f16", "f32"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_an_exported_file_replays_with_identical_bits(
    exported: Exported, name: str, dtype: str, kv: Literal["f32", "f16"]
) -> None:
    for settings in ({"threads": 1}, {"threads": up_to(2), "isa": "scalar"}):
        with llamac.load(exported(name, dtype), kv_dtype=kv, **settings) as model:
            results = replay_probes(model)
        assert [result.status for result in results] == ["identical"] * len(making.RANDOM_LENGTHS)
        assert all(result.error <= result.tolerance for result in results)


def test_probes_have_no_reference_for_a_q8_cache(exported: Exported) -> None:
    message = "no reference for a KV cache in q8: load the model with kv_dtype f16 or f32"
    with llamac.load(exported("llama", "f32"), kv_dtype="q8") as model, pytest.raises(UnsupportedError, match=message):
        replay_probes(model)


def test_the_tolerance_grows_with_the_rounding_of_the_dtype(exported: Exported) -> None:
    found = {}
    for dtype in ("f32", "f16", "bf16"):
        with llamac.load(exported("llama", dtype)) as model:
            found[dtype] = decode(model.file.section("probes"), 301).engine
    assert found["f32"]["f32"].tolerance == making.MIN_TOLERANCE
    assert found["f32"]["f32"].tolerance < found["f16"]["f32"].tolerance < found["bf16"]["f32"].tolerance < 1
    assert len({record.sha256 for engine in found.values() for record in engine.values()}) == 6


def test_probes_of_a_model_with_two_rope_tables_use_the_short_one(exported: Exported) -> None:
    with llamac.load(exported("llama-longrope", "f32"), kv_dtype="f32") as model:
        probe_set = decode(model.file.section("probes"), 301)
        assert probe_set.context == 16
        assert {result.status for result in replay_probes(model)} == {"identical"}
        with model.session() as session:  # the whole context uses the long table
            logits = session.eval(probe_set.probes[-1].ids)
        assert logits is not None
        assert relative_error(logits, probe_set.probes[-1].logits) > 1e-2


def with_probes(model: llamac.Model, blob: bytes) -> llamac.Model:
    """A model whose file has another probes section."""
    stand_in = types.SimpleNamespace(
        file=types.SimpleNamespace(section=lambda name: {"probes": blob}[name]),
        config=model.config,
        session=model.session,
    )
    return cast("llamac.Model", stand_in)


def test_replay_distinguishes_rounding_from_wrong_logits(exported: Exported) -> None:
    with llamac.load(exported("llama", "f32"), kv_dtype="f32") as model:
        probe_set = decode(model.file.section("probes"), 301)
        engine = {kv: replace(record, sha256="0" * 64) for kv, record in probe_set.engine.items()}
        results = replay_probes(with_probes(model, encode(probe_set.with_engine(engine))))
        assert [result.status for result in results] == ["within tolerance"] * len(results)

        moved = probe_set.probes[1].logits.copy()
        moved[7] += 1e-2 * np.abs(moved).max()
        probes = (probe_set.probes[0], replace(probe_set.probes[1], logits=moved), *probe_set.probes[2:])
        results = replay_probes(with_probes(model, encode(replace(probe_set, probes=probes, engine=engine))))
        assert [result.status for result in results] == ["within tolerance", "different", "within tolerance"]
        assert results[1].error == pytest.approx(1e-2, rel=0.1)
        assert results[1].ids == probe_set.probes[1].ids


def test_replaying_a_file_without_probes_is_an_error(exported: Exported) -> None:
    with llamac.load(exported("llama", "f32")) as model, pytest.raises(ModelError, match="has no probes"):
        replay_probes(with_probes(model, b""))


def test_a_probe_longer_than_the_context_is_an_error(exported: Exported) -> None:
    with llamac.load(exported("llama", "f32")) as model:
        probe_set = decode(model.file.section("probes"), 301)
        longer = replace(probe_set, probes=(replace(probe_set.probes[0], ids=(1,) * 65),))
        with pytest.raises(ModelError, match="a probe has 65 tokens, but the model's context is 64"):
            replay_probes(with_probes(model, encode(longer)))


def test_measuring_an_exact_file_far_from_its_reference_is_an_error(exported: Exported) -> None:
    path = exported("llama", "f32")
    with llamac.load(path) as model:
        probe_set = decode(model.file.section("probes"), 301)
    wrong = replace(probe_set, probes=tuple(replace(probe, logits=probe.logits * 1.1) for probe in probe_set.probes))
    with pytest.raises(ExportError, match=r"differ from the reference \(llamac-numpy\) by 0\.09"):
        making.measure(path, wrong, fidelity="exact")
    rounded, quantized = (making.measure(path, wrong, fidelity=kind).engine["f32"] for kind in ("rounded", "quantized"))
    assert rounded.tolerance == pytest.approx(2 * 0.1 / 1.1, rel=0.01)
    assert quantized.tolerance == pytest.approx(1.1 * 0.1 / 1.1, rel=0.01)
