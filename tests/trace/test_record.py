"""The record of a trace against the float64 forward pass, on tiny checkpoints of families that differ."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import llamac
from builders import bert_config, encoder, some_ids, write_model
from golden.parity_table import cases, make_folder
from llamac.errors import ArgumentError, ContextFullError, UnsupportedError
from llamac.export import equations, reference
from llamac.export.convert import export
from llamac.export.hf import model as hf
from llamac.export.hf.safetensors_file import read_safetensors
from llamac.trace import watching
from llamac.trace.attention import WHOLE
from llamac.trace.predictions import predictions
from llamac.trace.record import ALTERNATIVES, LENS_ALTERNATIVES, Trace, most_held, most_tokens, trace

# LayerNorm with biases and learned positions; soft caps, windows and norms after branches; experts; experts and sinks;
# a shared expert
FAMILIES = ("gpt2", "gemma2", "mixtral", "gpt_oss", "qwen2_moe")
Stages = dict[tuple[str, int], reference.Array]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The Hugging Face directory of a case."""
    root = tmp_path_factory.mktemp("checkpoints")
    return functools.cache(lambda name: make_folder(root, name))


@pytest.fixture(scope="module", params=FAMILIES)
def known(request: pytest.FixtureRequest, folder: Callable[[str], Path]) -> tuple[str, Stages, Trace]:
    """The name of a family, every stage in float64, and the engine's record of the same text."""
    name, stages = request.param, {}
    ids = cases()[name].ids
    checkpoint = hf.read(folder(name), [])
    reference.forward(
        checkpoint, [ids], context=len(ids), observe=lambda stage, layer, x: stages.update({(stage, layer): x})
    )
    for (stage, layer), scores in list(stages.items()):
        if stage == "scores":
            sinks = checkpoint.tensors.get(f"layers.{layer}.attn_sinks.weight")
            weights = equations.attention_weights(scores, None if sinks is None else sinks.array().astype(np.float64))
            stages["weights", layer] = weights
    target = folder(name).with_suffix(".bin")
    export(folder(name), target, probe_source=None)
    with pytest.MonkeyPatch.context() as patch, llamac.load(target, kv_dtype="f32", threads=1) as model:
        patch.setattr(watching, "PART_ROWS", 17)  # several parts, the last one shorter
        record = trace(model, ids)
    return name, stages, record


def near(found: object, expected: object, tolerance: float = 1e-3) -> None:
    """Assert equality up to the rounding of float32."""
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=tolerance, atol=tolerance)


def test_probabilities_ranks_and_entropy(known: tuple[str, Stages, Trace]) -> None:
    _, stages, record = known
    p = equations.softmax(stages["logits", 0])
    ids = np.array(record.ids)
    found = record.predictions
    n = np.arange(len(ids) - 1)
    near(found.logprob[:-1], np.log(p[n, ids[1:]]))
    assert np.isnan(found.logprob[-1])
    assert found.rank[-1] == 0
    near(found.entropy, -(p * np.log(p)).sum(axis=1))
    near(np.exp(found.top_logprobs), -np.sort(-p, axis=1)[:, :ALTERNATIVES])
    near(np.take_along_axis(p, found.top, axis=1), np.exp(found.top_logprobs))
    # the rank of a token is that of its probability, which may differ where two tokens are nearly as likely
    by_rank = -np.sort(-p[:-1], axis=1)
    near(by_rank[n, found.rank[:-1] - 1], p[n, ids[1:]])


def test_norms_of_the_stream_and_its_branches(known: tuple[str, Stages, Trace]) -> None:
    _, stages, record = known
    layers = range(len(record.stream) - 1)
    near(record.stream[0], np.linalg.norm(stages["embedding", 0], axis=1))
    for layer in layers:
        near(record.stream[layer + 1], np.linalg.norm(stages["block", layer], axis=1))
        near(record.branches[0, layer], np.linalg.norm(stages["attn_out", layer], axis=1))
        near(record.branches[1, layer], np.linalg.norm(stages["ffn", layer], axis=1))


def test_the_lens_reads_each_layer_like_the_last_one(
    known: tuple[str, Stages, Trace], folder: Callable[[str], Path]
) -> None:
    name, stages, record = known
    last = len(record.stream) - 2
    assert sorted(record.lens) == list(range(last + 1))
    assert record.lens[last] is record.predictions
    ids = np.array([*record.ids[1:], -1], np.int32)
    for layer in range(last):
        logits: Stages = {}

        def observe(stage: str, layer: int, x: reference.Array, logits: Stages = logits) -> None:
            logits[stage, layer] = x

        checkpoint = hf.read(folder(name), [])
        reference.forward_part(
            checkpoint, list(record.ids), last + 1, stages["block", layer], context=len(ids), observe=observe
        )
        expected = predictions(logits["logits", 0].astype(np.float32), ids, LENS_ALTERNATIVES)
        near(record.lens[layer].logprob[:-1], expected.logprob[:-1])
        near(record.lens[layer].top_logprobs, expected.top_logprobs)
        assert (record.lens[layer].rank == expected.rank).mean() > 0.9


def test_the_strongest_links_and_the_maps(known: tuple[str, Stages, Trace]) -> None:
    name, stages, record = known
    attention, at, n = record.attention, 0, len(record.ids)
    maps = attention.maps()
    assert attention.block == 1
    for layer, heads in enumerate(attention.heads):
        weights = stages["weights", layer]
        assert (weights.sum(axis=2).min() < 0.99) == (name == "gpt_oss")  # its sinks take a part of the weight
        for head in range(heads):
            links, found = attention.targets[at + head], attention.weights[at + head] / WHOLE
            expected = weights[:, head]
            near((maps[at + head] / 255.0) ** 2, expected, 5e-3)
            near(found, -np.sort(-expected, axis=1)[:, : links.shape[1]])
            near(np.take_along_axis(expected, links.astype(np.int64), axis=1)[found > 0], found[found > 0])
            assert (links <= np.arange(n)[:, None])[found > 0].all()
        at += heads


def test_the_experts_of_each_token(known: tuple[str, Stages, Trace]) -> None:
    name, stages, record = known
    assert bool(record.experts) == (name in ("mixtral", "gpt_oss", "qwen2_moe"))
    for experts in record.experts:
        router = stages["ffn_router", experts.layer]
        used = experts.chosen.shape[1]
        best = np.argsort(-router, axis=1, kind="stable")[:, :used]
        assert experts.total == router.shape[1]
        assert (best == experts.chosen).mean() > 0.95
        p = np.take_along_axis(equations.softmax(router), experts.chosen.astype(np.int64), axis=1)
        if name != "qwen2_moe":
            p /= p.sum(axis=1, keepdims=True)
        near(experts.weights, p)


@pytest.mark.parametrize("name", ["mamba2", "nemotron_h", "qwen3_next"])
def test_layers_without_attention_have_no_heads_and_no_scores(
    name: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    target, dump = tmp_path / "model.bin", tmp_path / "dump"
    export(folder(name), target, probe_source=None)
    with llamac.load(target, threads=1) as model:
        ids, layers = list(range(3, 15)), model.file.layers
        record = trace(model, ids, dump=dump)
        attending = {i for i, layer in enumerate(layers) if layer["mixer"].startswith("attention")}
        assert most_held(model) == 16384
        if not attending:
            with pytest.raises(ArgumentError, match="the model has no stage 'scores'"):
                trace(model, ids, dump=dump, stages=["scores"])
    assert len(attending) < len(layers)
    attention = record.attention
    assert {i for i, heads in enumerate(attention.heads) if heads} == attending
    assert len(attention.maps()) == len(attention.targets) == len(attention.weights) == sum(attention.heads)
    assert (attention.targets <= np.arange(12)[:, None])[attention.weights > 0].all()
    found = set(read_safetensors(dump))
    for stage in ("q", "k", "v", "cache_k", "cache_v", "scores"):
        assert {i for i in range(len(layers)) if f"{stage}.{i}" in found} == attending
    assert {i for i in range(len(layers)) if f"ffn_router.{i}" in found} == {each.layer for each in record.experts}


def test_maps_of_long_texts_have_blocks(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = some_ids(45)
    with llamac.load(tiny_llama, threads=1) as model:
        exact = trace(model, ids, lens=0).attention
        heads = sum(exact.heads)
        monkeypatch.setattr("llamac.trace.record.ATTENTION_BYTES", heads * 12 * 12)
        coarse = trace(model, ids, lens=0).attention
    assert (exact.block, coarse.block) == (1, 4)
    assert coarse.targets.shape == (heads, 45, 1)
    assert (coarse.targets == exact.targets[:, :, :1]).all()
    assert (coarse.weights == exact.weights[:, :, :1]).all()
    w = (exact.maps() / 255.0) ** 2
    blocks = np.arange(0, 45, 4)
    sums = np.add.reduceat(np.add.reduceat(w, blocks, axis=2), blocks, axis=1)
    near((coarse.maps() / 255.0) ** 2, sums / np.diff([*blocks, 45])[:, None], 2e-2)


def test_texts_that_cannot_be_traced_are_refused(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with llamac.load(tiny_llama, threads=1) as model:
        with pytest.raises(ArgumentError, match="there is nothing to trace"):
            trace(model, [])
        with pytest.raises(ArgumentError, match="the text has the token id 99999, expected 0 to"):
            trace(model, [1, 99999])
        with pytest.raises(ContextFullError, match="the text has 601 tokens, but the context holds 600"):
            trace(model, [1] * 601)
        with pytest.raises(ContextFullError, match="the text has 5 tokens, but the context holds 4"):
            trace(model, [1] * 5, context=4)
        with pytest.raises(ArgumentError, match="there is no stage 'attention'; the stages are embedding"):
            trace(model, [1], stages=["attention"])
        with pytest.raises(ArgumentError, match="lens is -1"):
            trace(model, [1], lens=-1)
        monkeypatch.setattr("llamac.trace.record.MAX_TOKENS", 3)
        with pytest.raises(ArgumentError, match="the text has 4 tokens, but a trace of this model holds at most 3"):
            trace(model, [1] * 4)


def test_layers_that_read_the_ids_need_them(folder: Callable[[str], Path], tmp_path: Path) -> None:
    target = tmp_path / "model.bin"
    export(folder("gemma4_text"), target, probe_source=None)
    with llamac.load(target, threads=1) as model:
        ids = [3, 4, 5]
        with model.session(context=3) as session:
            inputs = session.observe(ids, ["embedding"])["embedding", 0]
        expected = trace(model, ids, lens=0).predictions.logprob
        assert (trace(model, ids, inputs=inputs, lens=0).predictions.logprob[:-1] == expected[:-1]).all()
        with pytest.raises(ArgumentError, match="the layers of this model read the token ids, too: give `ids`"):
            trace(model, None, inputs=inputs)


def test_models_that_predict_no_tokens_are_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "encoder.bin", encoder(bert_config()))
    with (
        llamac.load(path, threads=1) as model,
        pytest.raises(UnsupportedError, match=r"the model is an encoder: .*`Session.observe` returns its stages"),
    ):
        trace(model, [1, 2])


def test_a_trace_of_many_heads_holds_fewer_tokens(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with llamac.load(tiny_llama, threads=1) as model:
        heads = model.config["n_layers"] * model.config["n_heads"]
        assert most_held(model) == 16384
        monkeypatch.setattr("llamac.trace.record.LINKED_TOKENS", 5000 * heads + 1)
        assert most_held(model) == 5000
        monkeypatch.setattr("llamac.trace.record.LINKED_TOKENS", 3000 * heads)
        assert most_held(model) == 4096
        assert most_tokens(model, None) == model.config["context"]
