"""Encoders on an emulated device: the bits of the CPU, whatever the kind and length of texts."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llamac
from builders import (
    Floats,
    bert_config,
    checkpoint,
    encoder,
    llama_config,
    some_ids,
    windowed_encoder_config,
    write_model,
)
from llamac.arguments import KVDtype
from llamac.engine.rows import STAGES, Rows, appended_rows
from llamac.engine.scoring.pooled import NO_LOGITS, OUTPUT_NORM, POOLINGS
from llamac.errors import UnsupportedError
from llamac.export.checkpoint import ModelConfig

LONG = (300, 1, 70, 257)  # on the CPU, more rows than one chunk has


def sandwich_config() -> ModelConfig:
    """An encoder like EmbeddingGemma: norms of heads, and around each branch; a scaled embedding."""
    start = llama_config(dim=40, n_heads=4, n_kv_heads=1)
    first = replace(start.layers[0], placement="sandwich", window=33)
    scales = {"embedding_scale": 6.5, "residual_scale": 0.7}
    config = replace(start, layers=(first, replace(first, window=0)), **scales)  # type: ignore[arg-type]
    return replace(config, qk_norm="head", two_sided=1, tied_output=True)


KINDS: dict[str, tuple[ModelConfig, str, KVDtype | None]] = {
    "bert": (bert_config(), "q8", None),
    "windows": (windowed_encoder_config(), "f32", "q8"),
    "biased distances": (bert_config(bias_distance=37), "f32", None),
    "sandwich": (sandwich_config(), "bf16", "f16"),
}


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LLAMAC_CACHE", str(kernel_cache.parent))
    return str(request.config.getoption("device"))


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[llamac.Model]:
    config, dtype, kv_dtype = KINDS[request.param]
    with llamac.load(write_model(tmp_path / "m.bin", encoder(config), dtype), kv_dtype=kv_dtype) as model:
        yield model


def rows_of(lengths: tuple[int, ...], *, mixed: bool = False) -> Rows:
    """The rows of texts. mixed: those of texts alternate."""
    rows = [appended_rows(array("i", some_ids(n)), i, 0, "all") for i, n in enumerate(lengths)]
    if mixed:
        by_position = sorted(np.concatenate(rows).reshape(-1, 4).tolist(), key=lambda row: row[2])
        return array("i", np.array(by_position, np.int32).reshape(-1).tolist())
    return array("i", np.concatenate(rows).tolist())


def outputs(session: llamac.Session, rows: Rows, types: bool = False) -> Floats:
    """The output norms of all rows. types: the tokens' types are 0 and 1."""
    count = len(rows) // 4
    found = np.empty((count, session.model.config["dim"]), np.float32)
    own = array("i", [i % 2 for i in range(count)]) if types and session.model.config["n_types"] else None
    observations: list[tuple[int, int, Any]] = [(OUTPUT_NORM, 0, found.reshape(-1))]
    session._core.eval_rows(rows, NO_LOGITS, observations, session._prepare, None, own)
    for sequence in set(rows[1::4]):
        session.truncate(0, sequence=sequence)
    return found


def same(found: Floats, expected: Floats) -> bool:
    return bool(np.isfinite(expected).all()) and found.tobytes() == expected.tobytes()


def captured(model: llamac.Model) -> int:
    """The number of captured graphs."""
    assert model._device is not None
    return sum(len(graph._captured) for graph in model._device._graphs.values())


def test_texts_have_the_bits_of_the_cpu(model: llamac.Model, device: str) -> None:
    """Texts of several chunks, and short ones, which replay a captured graph."""
    with model.session(sequences=4) as cpu, model.session(sequences=4, device=device) as session:
        for rows in (rows_of(LONG), rows_of((40, 30, 2), mixed=True), *[rows_of((9, 40, 2))] * 3):
            assert same(outputs(session, rows, types=True), outputs(cpu, rows, types=True))
        assert captured(model) == 1


def test_texts_may_have_more_rows_than_a_chunk(
    model: llamac.Model, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamac.gpu.device_model.CHUNK_ROWS", (256,))
    rows = rows_of((30, 300, 225, 31))  # three chunks
    with model.session(sequences=4) as cpu, model.session(sequences=4, device=device) as session:
        assert same(outputs(session, rows), outputs(cpu, rows))


def test_texts_that_are_too_long_are_refused(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamac.gpu.device_model.LONGEST_TEXT", 40)
    path = write_model(tmp_path / "m.bin", encoder(bert_config()))
    with llamac.load(path, device=device) as model:
        for _ in range(2):
            with pytest.raises(UnsupportedError, match="a text has 60 tokens, and a GPU computes texts of at most 40"):
                model.embed([[5] * 60])
        assert model.embed([[5] * 40]).shape == (1, 40)


def test_observed_stages_have_the_bits_of_the_cpu(model: llamac.Model, device: str) -> None:
    ids = array("i", some_ids(50))
    with model.session(context=70) as cpu, model.session(context=70, device=device) as session:
        found: list[dict[tuple[str, int], Floats]] = []
        for each in (cpu, session):
            buffers = {
                (stage, layer): np.empty((50, each._core.stage_width(STAGES.index(stage))[0]), np.float32)
                for stage in STAGES
                if stage != "logits"
                for layer in range(each._layers_of(stage))
            }
            observations = [(STAGES.index(stage), layer, x.reshape(-1)) for (stage, layer), x in buffers.items()]
            each._run(appended_rows(ids, 0, 0, "all"), NO_LOGITS, observations)
            found.append(buffers)
    for key, values in found[0].items():
        np.testing.assert_array_equal(found[1][key].view(np.uint32), values.view(np.uint32), str(key))


@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_embeddings_are_those_of_the_cpu(tmp_path: Path, device: str, pooling: str) -> None:
    path = write_model(tmp_path / "m.bin", encoder(bert_config()), pooling=pooling)
    texts = ["hello world", "The end " * 40, *(f"text {i}" for i in range(20))]
    with llamac.load(path) as model, llamac.load(path, device=device) as on_device:
        assert same(on_device.embed(texts), model.embed(texts))
        assert same(on_device.embed(texts[1]), model.embed(texts[1]))


def test_pairs_are_scored_as_on_the_cpu(tmp_path: Path, device: str) -> None:
    """The second text of a pair has another type."""
    config = bert_config(scores_pairs=1, pooled_dim=(40, 1), pooled_activation=("tanh", "sigmoid"))
    path = write_model(tmp_path / "m.bin", encoder(config), "q8", pooling="cls")
    documents = ["The end of the world.", "hello", "The end of the world. " * 9, ""]
    with llamac.load(path) as model, llamac.load(path, device=device) as on_device:
        assert on_device.rerank("When does it end?", documents) == model.rerank("When does it end?", documents)


def test_decoders_score_pairs_as_on_the_cpu(tmp_path: Path, device: str) -> None:
    config = replace(llama_config(), tied_output=True, scores_pairs=1, pooled_dim=(1,), pooled_activation=("sigmoid",))
    path = write_model(tmp_path / "m.bin", checkpoint(config), "q8", pooling="last")
    documents = ["The end of the world.", "hello", "The end of the world. " * 9, ""]
    with llamac.load(path) as model, llamac.load(path, device=device) as on_device:
        expected = model.rerank("When does it end?", documents)
        assert on_device.rerank("When does it end?", documents) == expected
        assert len({found.score for found in expected}) == len(documents)


def test_embeddings_of_decoders_are_those_of_the_cpu(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk may want no output norm. The last one, of 47 rows, replays a captured graph."""
    monkeypatch.setattr("llamac.gpu.device_model.CHUNK_ROWS", (256,))
    path = write_model(tmp_path / "m.bin", checkpoint(llama_config()))
    texts = [[3, 9, 4], some_ids(300)]
    with llamac.load(path) as model, llamac.load(path, device=device) as on_device:
        for pooling in POOLINGS:
            expected = model.embed(texts, pooling=pooling)
            for _ in range(2):
                assert same(on_device.embed(texts, pooling=pooling), expected)
        assert captured(on_device) > 0
