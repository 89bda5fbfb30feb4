"""The tools in bench/: random model files, ratios and rates, saved results."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llamac
from bench_modules import bench


def shape(family: str = "llama", *, tied: bool = False) -> Any:
    """Two small layers. No width is a multiple of 128; the vocabulary is not a multiple of 16."""
    kv_heads = 2 if family == "llama" else 4
    return bench("shapes").Shape(family, 96, 2, 4, kv_heads, 24, 160, 301, 64, tied)


# ---- flat files


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8", "q6", "q4", "q4s", "q3", "q2", "t2"])
def test_random_model_computes_finite_logits(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "model.bin"
    bench("make_model").make("tiny", dtype, path, pure=True, shape=shape())
    with llamac.load(path) as model, model.session() as session:
        assert {t.dtype for t in model.file.tensors if len(t.shape) == 2} == {dtype}
        assert all(problem is None for _, problem in model.file.verify_data())
        embedding = session.observe(range(60), ["embedding"])["embedding", 0]
        assert float(embedding.std()) == pytest.approx(96**-0.5, rel=0.1)
        session.truncate(0)
        logits = session.eval(range(20))
        assert logits is not None
        assert np.isfinite(logits).all()


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("gpt2", True)])
def test_mixed_files_use_q8_and_q6_where_the_exporter_does(tmp_path: Path, family: str, tied: bool) -> None:
    path = tmp_path / "model.bin"
    bench("make_model").make("tiny", "q4", path, shape=shape(family, tied=tied))
    with llamac.load(path) as model:
        others = {t.name: t.dtype for t in model.file.tensors if len(t.shape) == 2 and t.dtype != "q4"}
        head = "token_embedding.weight" if tied else "output.weight"
        assert others == {head: "q6", "layers.0.attn_v.weight": "q8", "layers.1.attn_v.weight": "q8"}


def test_same_shape_gives_the_same_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        bench("make_model").make("tiny", "q4s", tmp_path / name, shape=shape())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


# ---- GGUF and Hugging Face files


@pytest.mark.parametrize("kind", sorted(bench("make_model").GGUF_TYPES))
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gguf_files_have_valid_structure_and_weight_magnitudes(tmp_path: Path, family: str, kind: str) -> None:
    import gguf

    path = tmp_path / "model.gguf"
    wide = bench("shapes").Shape(family, 256, 2, 4, 4 if family == "gpt2" else 2, 64, 512, 301, 64, family == "gpt2")
    bench("make_gguf").make_gguf("tiny", kind, path, shape=wide)
    reader = gguf.GGUFReader(path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert reader.get_field("general.architecture").contents() == family
    assert tuple(found["token_embd.weight"].shape) == (256, 301)
    assert ("output.weight" in found) == (family == "llama")
    assert ("blk.1.attn_qkv.weight" in found) == (family == "gpt2")
    head = found["token_embd.weight" if family == "gpt2" else "output.weight"]
    assert head.tensor_type.name == {"Q4_0": "Q6_K", "Q4_K_S": "Q6_K"}.get(kind, kind)
    for tensor in found.values():
        if tensor.name.endswith("norm.weight") or tensor.name.endswith("bias") or tensor.tensor_type.name == "F32":
            continue
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert 0.3 < float(numbers.std()) * numbers.shape[-1] ** 0.5 < 3, tensor.name


def test_a_type_is_measured_and_its_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speed = bench("gguf_speed")
    wide = bench("shapes").Shape("llama", 256, 2, 4, 2, 64, 512, 301, 64, False)
    monkeypatch.setitem(bench("shapes").SHAPES, "tiny", wide)
    monkeypatch.setenv("LLAMAC_CACHE", "unchanged")
    options = speed.parse(["--shape", "tiny", "--layers", "1", "--threads", "1", "--prompt", "8", "--decode", "2"])
    results = speed.measure("MXFP4", {}, options, tmp_path)
    assert [(r["type"], r["engine"], r["phase"], r["ratio"]) for r in results] == [
        ("MXFP4", "llamac", "decode", 1.0),
        ("MXFP4", "llamac", "prefill", 1.0),
    ]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", bench("family_shapes").FAMILY_SHAPES)
def test_the_files_of_families_have_the_tensors_that_their_graphs_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from llamac.export.gguf import model

    def write_vectors(writer: Any, tensors: list[tuple[str, tuple[int, ...], Any]]) -> None:
        """Leave holes in the file instead of matrices."""
        file = writer.fout[0]
        for _, dims, kind in tensors:
            file.seek(-file.tell() % 32, os.SEEK_CUR)
            if len(dims) == 1:
                file.write(np.ones(dims, np.float32).tobytes())
            else:
                file.seek(math.prod(dims[:-1]) * bench("make_gguf").row_bytes(kind, dims[-1]), os.SEEK_CUR)
        file.truncate()

    monkeypatch.setattr(bench("make_gguf"), "_write_data", write_vectors)
    path, shape = tmp_path / "model.gguf", bench("family_shapes").FAMILY_SHAPES[name]
    bench("make_gguf").make_family_gguf(name, "Q4_0", path)
    config = model.read(path, []).config
    assert (len(config.layers), config.vocab_size) == (shape.layers, shape.vocabulary)


def test_narrow_rows_get_the_replacement_types_of_llama_cpp() -> None:
    gguf = bench("make_gguf")
    narrow = bench("shapes").SHAPES["stories15m"]
    found = {
        name: gguf.tensor_type(name, "Q4_K_S", columns, narrow, False).name
        for name, columns in (("blk.0.attn_q.weight", 288), ("token_embd.weight", 288), ("blk.0.ffn_down.weight", 768))
    }
    assert found == {"blk.0.attn_q.weight": "Q5_0", "token_embd.weight": "Q8_0", "blk.0.ffn_down.weight": "Q4_K"}


def test_hugging_face_folder_has_one_word_per_id(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    out = tmp_path / "hf"
    bench("make_hf").make_hf("tiny", "bf16", out, shape=shape())
    assert Tokenizer.from_file(str(out / "tokenizer.json")).encode("t0 t300 t7").ids == [0, 300, 7]
    assert json.loads((out / "config.json").read_text())["hidden_size"] == 96
    assert (out / "model.safetensors").stat().st_size > 2 * 301 * 96


# ---- results


def test_ratios_are_medians_over_rounds() -> None:
    peers = bench("peers")
    ours, theirs = bench("peer_models").Entry("llamac", "q4"), peers.Entry("llama.cpp", "Q4_0")
    series = peers.Series(2, "prefill", 128, {ours: [1.0, 2.0, 4.0], theirs: [2.0, 6.0, 4.0]})
    first, second = series.results()
    assert (first["tok_s"], first["ratio"]) == (64.0, 1.0)
    assert (second["tok_s"], second["ratio"], second["ratio_spread"]) == (32.0, 2.0, [1.0, 3.0])


def test_engines_run_in_separate_processes(tmp_path: Path) -> None:
    peers = bench("peers")
    entry = bench("peer_models").Entry("llamac", "q8")
    path = tmp_path / "model.bin"
    bench("make_model").make("tiny", "q8", path, shape=replace(shape(), context=1100))
    for series in peers.compare({entry: path}, 1, [("decode", 4), ("prefill", 1100)], 2):  # needs a context of 1100
        assert len(series.seconds[entry]) == 2
        assert min(series.seconds[entry]) > 0


def test_a_peer_that_dies_is_reported_and_skipped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    peers = bench("peers")
    worker = peers.Worker(bench("peer_models").Entry("llamac", "q8"), tmp_path / "missing.bin", 1, 4)
    series = [peers.Series(1, "decode", 4, {"peer": [1.0]})]
    other = bench("peer_models").Entry("other", "x")
    series[0].seconds[other] = [1.0]
    workers = {other: worker}
    assert peers._ask_all(workers, "", series) == {}
    assert workers == {}
    assert other not in series[0].seconds
    assert "skipping other x: exit status 1" in capfd.readouterr().err


TALKATIVE = """#!/bin/sh
head -c 1000000 /dev/zero | tr '\\0' 'x' >&2
echo ready
read question
echo "the last word" >&2
exit 3
"""


def test_a_peer_with_long_error_output_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = bench("peers")
    program = tmp_path / "talkative"
    program.write_text(TALKATIVE)
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    worker = peers.Worker(bench("peer_models").Entry("any", "x"), tmp_path, 1, 4)
    assert worker.ask() == "ready"
    with pytest.raises(RuntimeError, match=r"exit status 3: .*the last word"):
        worker.ask("decode 4")
    worker.end()


def test_an_interrupted_file_is_written_again(tmp_path: Path) -> None:
    once = bench("peer_models").once

    def broken(path: Path) -> None:
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        once(tmp_path / "model", broken)
    assert list(tmp_path.iterdir()) == []
    for text in ("whole", "not written again"):
        assert once(tmp_path / "model", lambda path, text=text: path.write_text(text)).read_text() == "whole"


def test_a_peer_that_cannot_convert_a_model_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peers, peer_models = bench("peers"), bench("peer_models")
    (tmp_path / "stories15m-hf").mkdir()
    codes = {
        "openvino": "raise ValueError('288 is not a multiple of 128')",
        "onnxruntime": "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])",
    }
    for engine, code in codes.items():
        monkeypatch.setitem(
            peer_models.CONVERSIONS, engine, lambda hf, out, kind, code=code: [sys.executable, "-c", code, out, kind]
        )
    entries = [bench("peer_models").Entry("openvino", "int4-128"), peers.Entry("onnxruntime", "int4")]
    found = peers.models(entries, "stories15m", tmp_path, True)
    assert found == {entries[1]: tmp_path / "stories15m-onnxruntime-int4"}
    assert peers.size(found[entries[1]]) == len("int4")
    expected = (
        "skipping openvino int4-128: its conversion exits with status 1: ValueError: 288 is not a multiple of 128"
    )
    assert capsys.readouterr().err.strip() == expected


def test_missing_modules_of_peers_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = bench("engines")
    monkeypatch.setattr(engines, "find_spec", lambda name: None if name == "torch" else object())
    assert engines.missing("transformers") == ["torch"]
    assert engines.missing("llama.cpp") == []


def test_kernel_rates_are_computed_from_a_line() -> None:
    kernels = bench("kernels")
    found = kernels.parse("gemm\tavx2\tq4 16 x 32, 1 row\t1.0e-03\t2.0e-06\t1.0e-06\t4000\t8000\t4.0e+09\n")
    assert (found["gb_s"], found["mac_per_cycle"], found["clock_ghz"]) == (pytest.approx(2.0), pytest.approx(1.0), 4.0)
    assert " ".join(kernels.row(found).split()) == "gemm avx2 q4 16 x 32, 1 row 1.0e-03 2.00 2.0 1.0"


def test_results_are_saved_with_their_stamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stamp = bench("stamp")
    monkeypatch.setattr(stamp, "RESULTS", tmp_path / "results")
    path = stamp.save("some-name", {"results": [1, 2]})
    saved = json.loads(path.read_text())
    assert path.name == f"{saved['stamp']['date']}-some-name.json"
    assert saved["results"] == [1, 2]
    assert saved["stamp"]["versions"]["llamac"] == llamac.__version__
    assert {"commit", "processor", "isa", "kernel", "load_average"} <= set(saved["stamp"])


def test_texts_for_speculation_repeat_spans() -> None:
    found = bench("speculation").texts()
    assert set(found) >= {"code", "document", "quotes", "free"}
    for before, after in found.values():
        assert before
        assert after not in before
    code, edited = found["code"]
    shared = set(code.splitlines()) & set(edited.splitlines())
    assert "group_by_context" in edited
    assert len(shared) > 20


# ---- a real GGUF model


def test_distances_of_logits_are_relative_to_their_spread() -> None:
    """The rows of the reference have standard deviations of 1 and 10; one logit of each row is off by 0.5."""
    reference = np.array([[-1, 1, -1, 1], [10, -10, 10, -10]], np.float32)
    candidate = reference + np.array([[0, 0, 0.5, 0], [0, 0.5, 0, 0]], np.float32)
    row = bench("gguf_model").Row("file", 8.0)
    row.add([1, 2], reference, candidate)
    row.add([1, 2], reference, reference)
    found = row.result()
    assert found["largest difference"] == pytest.approx(0.5)
    assert found["rms difference"] == pytest.approx(((0.5**2 + 0.05**2) / 4 / 4) ** 0.5)
    assert found["same best token"] == 1
    assert found["nats"] > 0
