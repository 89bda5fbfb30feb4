"""The MTP layer in the core: hidden states, the definition of the layer, and sessions of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mtp_models import attention_model, hidden_of, latent_model, mtp_logits, mtp_model, mtp_reference
from numpy.typing import NDArray
from recurrent_models import DELTA, config

import llamac
from builders import checkpoint, some_ids, write_model
from llamac import _core
from llamac.engine.rows import appended_rows, as_ids, draft_rows
from llamac.errors import ArgumentError, ModelError

IDS = some_ids(300)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("mtp") / "model.bin", mtp_model())


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[llamac.Model]:
    with llamac.load(path) as model:
        yield model


@pytest.fixture(scope="module")
def hidden(model: llamac.Model) -> NDArray[np.float32]:
    return hidden_of(model, IDS)


def test_hidden_states_are_those_of_the_final_norm(model: llamac.Model, hidden: NDArray[np.float32]) -> None:
    with model.session() as session:
        observed = session.observe(IDS, ["output_norm"])["output_norm", 0]
    assert hidden.tobytes() == observed.tobytes()


@pytest.mark.parametrize("n", [1, 5, 258, 300])
def test_the_last_hidden_states_are_enough(model: llamac.Model, hidden: NDArray[np.float32], n: int) -> None:
    assert hidden_of(model, IDS, n).tobytes() == hidden[-n:].tobytes()


def test_hidden_states_have_the_same_bits_on_threads_and_in_drafts(
    model: llamac.Model, hidden: NDArray[np.float32]
) -> None:
    assert hidden_of(model, IDS, threads=3).tobytes() == hidden.tobytes()
    found = np.empty((9, model.config["dim"]), np.float32)
    with model.session() as session:
        session.prefill(IDS[:100])
        session._core.eval_drafts(draft_rows(IDS[100:109], range(-1, 8), 0), hidden=found.data)
    assert found.tobytes() == hidden[100:109].tobytes()


@pytest.mark.parametrize("made", [mtp_model, attention_model, latent_model])
def test_the_layer_computes_its_definition(made: Any, tmp_path: Path) -> None:
    source = made()
    with llamac.load(write_model(tmp_path / "model.bin", source)) as model:
        hidden = hidden_of(model, IDS[:70])
        states, logits = mtp_logits(model, IDS[1:71], hidden, [70])
    expected_states, expected_logits = mtp_reference(source, IDS[1:71], hidden.astype(np.float64))
    np.testing.assert_allclose(states, expected_states, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(logits, expected_logits, rtol=2e-4, atol=1e-4)


def test_the_layer_has_the_same_bits_on_threads_and_in_pieces(model: llamac.Model, hidden: NDArray[np.float32]) -> None:
    expected = mtp_logits(model, IDS[1:], hidden[:-1], [299])
    for pieces, threads in (([299], 3), ([1] * 5 + [3, 20, 271], 1), ([256, 43], 2)):
        found = mtp_logits(model, IDS[1:], hidden[:-1], pieces, threads=threads)
        assert [part.tobytes() for part in found] == [part.tobytes() for part in expected]


@pytest.mark.parametrize("made", [mtp_model, latent_model])
def test_a_quantized_layer_has_the_same_bits_on_threads_and_in_pieces(made: Any, tmp_path: Path) -> None:
    with llamac.load(write_model(tmp_path / "model.bin", made(), "q4")) as model:
        hidden = hidden_of(model, IDS[:40])
        expected = mtp_logits(model, IDS[1:41], hidden, [40])
        for pieces, threads in (([40], 2), ([1] * 10 + [30], 1)):
            found = mtp_logits(model, IDS[1:41], hidden, pieces, threads=threads)
            assert [part.tobytes() for part in found] == [part.tobytes() for part in expected]


def test_the_layer_leaves_the_logits_of_the_model_alone(model: llamac.Model, tmp_path: Path) -> None:
    with llamac.load(write_model(tmp_path / "model.bin", mtp_model().without_mtp())) as plain:
        with plain.session() as other, model.session() as session:
            assert session.eval(IDS).tobytes() == other.eval(IDS).tobytes()
        assert not plain.file.mtp_layers
        assert len(plain.file.layers) == len(model.file.layers) == 3
        with pytest.raises(ArgumentError, match="the model has no MTP layer"):
            _core.Session(plain._core, mtp=True)
    assert len(model.file.mtp_layers) == 1


def test_rows_without_hidden_states_are_refused(model: llamac.Model, hidden: NDArray[np.float32]) -> None:
    core = _core.Session(model._core, mtp=True)
    with pytest.raises(ArgumentError, match="whose rows need hidden states"):
        core.eval_rows(appended_rows(as_ids(IDS[:3]), 0, 0, "last"))
    core.close()


def test_an_mtp_layer_must_be_attention(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.bin", checkpoint(replace(config(), mtp=DELTA)))
    with pytest.raises(ModelError, match=r"layer 3: the MTP layer has mixer 2"):
        llamac.load(path)
