"""Encoders: attention to both sides over several chunks, the same bits in any batch, types, refused calls."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import llamac
from builders import Floats, bert_config, encoder, windowed_encoder_config, write_model
from llamac import ArgumentError, ContextFullError, UnsupportedError
from llamac.engine.rows import appended_rows
from llamac.engine.scoring.cancellation import Cancellation
from llamac.engine.scoring.pooled import NO_LOGITS, OUTPUT_NORM, Tokens, pooled_outputs
from llamac.export import reference
from llamac.export.checkpoint import Checkpoint, ModelConfig
from llamac.progress import silent

LENGTHS = (300, 1, 255, 2, 257)
WINDOW = 20
FARTHEST = 37  # distance with a bias of its own


def biased_config() -> ModelConfig:
    """An encoder like MPNet, whose scores have a bias for each distance."""
    return bert_config(bias_distance=FARTHEST)


@pytest.fixture(params=[bert_config, windowed_encoder_config, biased_config])
def made(request: pytest.FixtureRequest) -> Checkpoint:
    return encoder(request.param())


@pytest.fixture
def path(made: Checkpoint, tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.bin", made, pooling="mean")


@pytest.fixture
def bert(tmp_path: Path) -> Iterator[llamac.Model]:
    with llamac.load(write_model(tmp_path / "bert.bin", encoder(bert_config()), pooling="cls")) as model:
        yield model


@pytest.fixture
def cross_encoder(tmp_path: Path) -> Iterator[llamac.Model]:
    config = bert_config(scores_pairs=1, pooled_dim=(40, 1), pooled_activation=("tanh", "sigmoid"))
    with llamac.load(write_model(tmp_path / "scores.bin", encoder(config), pooling="cls")) as model:
        yield model


def texts() -> list[list[int]]:
    draw = np.random.RandomState(5)
    return [draw.randint(0, 300, length).tolist() for length in LENGTHS]


def run(session: llamac.Session, ids: list[list[int]]) -> list[Floats]:
    """The output norms of all positions of texts that are computed together."""
    rows = array("i")
    for sequence, tokens in enumerate(ids):
        rows += appended_rows(array("i", tokens), sequence, 0, "all")
    found = np.empty((len(rows) // 4, session.model.config["dim"]), np.float32)
    session._run(rows, NO_LOGITS, [(OUTPUT_NORM, 0, found.reshape(-1))])
    return np.split(found, np.cumsum([len(tokens) for tokens in ids])[:-1])


def outputs(model: llamac.Model, ids: list[list[int]], **options: object) -> list[Floats]:
    with model.session(sequences=len(ids), **options) as session:  # type: ignore[arg-type]
        return run(session, ids)


def test_all_lengths_match_the_float64_forward_pass(made: Checkpoint, path: Path) -> None:
    expected: list[reference.Array] = []
    reference.forward(
        made,
        texts(),
        observe=lambda stage, layer, values: expected.append(values) if stage == "output_norm" else None,
    )
    with llamac.load(path) as model:
        found = np.concatenate(outputs(model, texts()))
    np.testing.assert_allclose(found, expected[0], atol=1e-4 * np.abs(expected[0]).max())


def test_other_texts_threads_and_kernel_sets_change_no_bit(path: Path) -> None:
    with llamac.load(path) as model:
        together = outputs(model, texts(), threads=1)
        for ids, found in zip(texts(), together, strict=True):
            assert outputs(model, [ids], threads=1)[0].tobytes() == found.tobytes()
        for threads in (2, 3):
            for one, other in zip(together, outputs(model, texts(), threads=threads), strict=True):
                assert one.tobytes() == other.tobytes()
        for isa, runs in llamac._core.isas():
            if runs:
                assert outputs(model, texts()[3:], isa=isa)[1].tobytes() == together[4].tobytes()


def test_rows_of_sequences_can_alternate(path: Path) -> None:
    ids = texts()[0]
    with llamac.load(path) as model, model.session(sequences=2) as session:
        rows = array("i")
        for position, token in enumerate(ids):
            for sequence in (0, 1):
                rows.extend((token, sequence, position, 1))
        found = np.empty((2 * len(ids), model.config["dim"]), np.float32)
        session._run(rows, NO_LOGITS, [(OUTPUT_NORM, 0, found.reshape(-1))])
        for sequence in (0, 1):
            assert found[sequence::2].tobytes() == outputs(model, [ids])[0].tobytes()


def test_observers_change_no_bit_of_long_texts(path: Path) -> None:
    ids = texts()[0]
    with llamac.load(path) as model, model.session() as session:
        plain = outputs(model, [ids])[0]
        stages = [name for name in llamac.STAGES if name not in ("logits", "scores")]
        buffers = {
            (stage, layer): np.zeros((len(ids), session._core.stage_width(llamac.STAGES.index(stage))[0]), np.float32)
            for stage in stages
            for layer in range(session._layers_of(stage))
        }
        observations = [(llamac.STAGES.index(stage), layer, x.reshape(-1)) for (stage, layer), x in buffers.items()]
        session._run(appended_rows(array("i", ids), 0, 0, "all"), NO_LOGITS, observations)
        assert buffers["output_norm", 0].tobytes() == plain.tobytes()
        for layer in range(model.config["n_layers"]):
            assert buffers["k", layer].tobytes() == buffers["cache_k", layer].tobytes()


def test_every_token_sees_all_others(bert: llamac.Model) -> None:
    ids = texts()[0]
    changed = [*ids[:-1], ids[-1] + 1]
    first, second = (outputs(bert, [tokens])[0] for tokens in (ids, changed))
    assert (first != second).any(axis=1).all()


def test_a_window_ends_on_both_sides(tmp_path: Path) -> None:
    config = windowed_encoder_config(WINDOW)
    config = replace(config, layers=tuple(replace(layer, window=WINDOW) for layer in config.layers))
    with llamac.load(write_model(tmp_path / "windows.bin", encoder(config))) as model:
        ids = texts()[0]
        changed = [*ids[:150], ids[150] + 1, *ids[151:]]
        differs = (outputs(model, [ids])[0] != outputs(model, [changed])[0]).any(axis=1)
    near, far = WINDOW - 1, 3 * (WINDOW - 1)  # of one layer, and of three
    assert differs[150 - near : 150 + near + 1].all()
    assert (differs[: 150 - near].any(), differs[150 + near + 1 :].any()) == (True, True)
    assert not differs[: 150 - far].any()
    assert not differs[150 + far + 1 :].any()


def test_types_are_part_of_the_embedding(bert: llamac.Model) -> None:
    ids = array("i", texts()[1] + texts()[2][:9])
    types = array("i", [0] * 4 + [1] * 6)
    plain, typed = (
        pooled_outputs(bert, [Tokens(ids, own)], "mean", "embedding", silent, Cancellation()) for own in (None, types)
    )
    assert np.abs(plain - typed).max() > 0.01
    with pytest.raises(ArgumentError, match=r"row 4: type is 2, expected 0 to 1"):
        pooled_outputs(
            bert, [Tokens(ids, array("i", [2 * kind for kind in types]))], "mean", "embedding", silent, Cancellation()
        )


def test_embed_pools_as_the_file_says(bert: llamac.Model) -> None:
    ids = bert.tokenizer.encode("hello world", add_special=True)
    assert (ids[0], ids[-1]) == (1, 2)
    every = outputs(bert, [ids])[0]
    assert np.array_equal(bert.embed("hello world", normalize=False), every[0])
    assert np.array_equal(bert.embed("hello world", normalize=False, pooling="last"), every[-1])
    mean = bert.embed("hello world", normalize=False, pooling="mean")
    np.testing.assert_allclose(mean, every.astype(np.float64).mean(axis=0), rtol=1e-6)
    with pytest.raises(UnsupportedError, match="embeds texts and does not score pairs"):
        bert.rerank("a", ["b"])


def test_embeddings_of_many_texts_have_the_same_bits(path: Path) -> None:
    words = ["a", "hello world " * 30, "The end", *(f"text {i}" for i in range(70))]
    with llamac.load(path) as model:
        together = model.embed(words)
        for i in (0, 1, 2, 40, 72):
            assert np.array_equal(together[i], model.embed(words[i]))


def test_a_cross_encoder_scores_pairs(cross_encoder: llamac.Model) -> None:
    documents = ["The end of the world.", "hello", "The end of the world.", ""]
    found = cross_encoder.rerank("When does it end?", documents)
    assert [ranked.score for ranked in found] == sorted((ranked.score for ranked in found), reverse=True)
    encode = cross_encoder.tokenizer.encode
    for ranked in found:
        assert ranked.document == documents[ranked.index]
        head = [1, *encode("When does it end?"), 2]
        tail = [*encode(ranked.document), 2]
        tokens = Tokens(array("i", head + tail), array("i", [0] * len(head) + [1] * len(tail)))
        [[score]] = pooled_outputs(cross_encoder, [tokens], "cls", "scoring", silent, Cancellation())
        assert ranked.score == score
        assert 0 < score < 1
    assert [ranked.index for ranked in found if ranked.index in (0, 2)] == [0, 2]
    with pytest.raises(ArgumentError, match="task is for models with a chat template"):
        cross_encoder.rerank("a", ["b"], task="c")
    with pytest.raises(UnsupportedError, match="use rerank"):
        cross_encoder.embed("a")
    with pytest.raises(ContextFullError, match=r"documents\[1\] does not fit the context"):
        cross_encoder.rerank("a", ["b", "x" * 700])


def test_the_dense_layers_are_computed_in_order(cross_encoder: llamac.Model) -> None:
    ids = [1, 5, 2]
    first = outputs(cross_encoder, [ids])[0][0].astype(np.float64)
    file = cross_encoder.file
    hidden = np.tanh(file.tensor("pooled.0.weight") @ first + file.tensor("pooled.0.bias"))
    logit = file.tensor("pooled.1.weight") @ hidden + file.tensor("pooled.1.bias")
    [[score]] = pooled_outputs(cross_encoder, [Tokens(array("i", ids))], "cls", "scoring", silent, Cancellation())
    assert score == pytest.approx(1 / (1 + np.exp(-logit[0])), abs=1e-6)


@pytest.mark.parametrize("call", ["generate", "stream", "score", "perplexity", "logits", "session", "chat", "step"])
def test_calls_that_need_a_next_token_name_embed_and_rerank(bert: llamac.Model, call: str) -> None:
    calls: dict[str, Callable[[], object]] = {
        "generate": lambda: bert.generate("hello"),
        "stream": lambda: bert.stream("hello"),
        "score": lambda: bert.score("hello", ["world"]),
        "perplexity": lambda: bert.perplexity("hello world"),
        "logits": lambda: bert.logits([5]),
        "session": lambda: bert.session().generate("hello"),
        "chat": lambda: bert.chat([{"role": "user", "content": "hello"}]),
        "step": lambda: bert.session().step(5),
    }
    with pytest.raises(UnsupportedError, match=r"encoder.*: (it only embeds texts \(embed\)|use embed .*)$"):
        calls[call]()


def test_an_encoder_drafts_nothing(bert: llamac.Model, tiny_llama: Path) -> None:
    with (
        llamac.load(tiny_llama) as model,
        pytest.raises(UnsupportedError, match="the draft model is an encoder, which generates no text"),
    ):
        model.session(draft_model=bert)


def test_an_engine_refuses_requests_and_lives_on(bert: llamac.Model) -> None:
    with llamac.Engine(bert) as engine:
        for _ in range(2):
            with pytest.raises(UnsupportedError, match=r"encoder.*: (it only embeds texts \(embed\)|use embed .*)$"):
                engine.submit("hello")


def test_sequences_are_computed_as_a_whole(bert: llamac.Model) -> None:
    with bert.session() as session:
        run(session, [[5, 6]])
        assert session.length() == 2
        with pytest.raises(ArgumentError, match="sequence 0 has 2 positions, but an encoder computes whole sequences"):
            run_more(session)
        with pytest.raises(UnsupportedError, match="cannot shift: this model is an encoder"):
            session.shift(0, 1)
        with pytest.raises(UnsupportedError, match="cannot compute drafts: the model is an encoder"):
            session.eval_drafts([5], [-1])
        session.truncate(0)
        assert run(session, [[5, 6]])[0].tobytes() == outputs(bert, [[5, 6]])[0].tobytes()


def run_more(session: llamac.Session) -> None:
    session._run(appended_rows(array("i", [7]), 0, 2, None), NO_LOGITS)


def test_a_cancelled_long_text_leaves_nothing(bert: llamac.Model) -> None:
    cancel = Cancellation()
    cancel.cancel()
    with pytest.raises(llamac.CancelledError):
        bert.embed([texts()[0]], cancel=cancel)
    assert bert.kv_bytes == 0


def test_keys_and_values_are_kept_in_f32(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.bin", encoder(bert_config()), "bf16")
    with llamac.load(path) as model, model.session() as session:
        assert session.kv_dtype == "f32"
