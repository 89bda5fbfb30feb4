"""Models as values: what cannot be changed, reprs, pickling by path, and the arguments of load."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

import llamac
from builders import checkpoint, gpt2_config, llama_config, write_model
from llamac.engine.model import Model
from llamac.errors import ArgumentTypeError, ClosedError, ModelError
from llamac.format.flatfile import FlatFile


@pytest.fixture
def model(tiny_llama: Path) -> Iterator[llamac.Model]:
    with llamac.load(tiny_llama) as opened:
        yield opened


# ---- facts that cannot be changed


def test_the_config_cannot_be_changed(model: llamac.Model) -> None:
    expected = model.logits([1, 2, 3]).tobytes()
    config = cast("Any", model.config)
    with pytest.raises(TypeError):
        config["n_layers"] = 1000
    with pytest.raises(TypeError):
        config["stop_ids"][0] = 5
    with pytest.raises(AttributeError):
        config.clear()
    with pytest.raises(AttributeError):
        cast("Any", model).config = {}
    model.file.config["head_dim"] = 10**6  # the file's own copy
    model.file.config["context"] = 10**6
    assert model.config["head_dim"] == 8
    with model.session() as session:
        assert session.context == 600
    assert model.logits([1, 2, 3]).tobytes() == expected
    assert json.loads(json.dumps(dict(model.config)))["n_layers"] == 2


def test_changing_the_metadata_has_no_effect(model: llamac.Model) -> None:
    model.metadata["name"] = "other"
    model.metadata["source"]["format"] = "other"
    assert (model.name, model.metadata["source"]["format"]) == ("tiny", "test")


@pytest.mark.parametrize("name", ["file", "special", "n_token_ids", "weight_bytes", "tokenizer", "name", "closed"])
def test_attributes_cannot_be_replaced(model: llamac.Model, name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(model, name, None)


def test_models_and_sessions_cannot_be_constructed_from_paths(tiny_llama: Path) -> None:
    with pytest.raises(ArgumentTypeError, match=r"open models with llamac\.load\(path\)"):
        llamac.Model(tiny_llama)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match=r"open one with llamac\.load\(path\)"):
        llamac.Session(tiny_llama)  # type: ignore[arg-type]


def test_a_session_can_be_made_from_a_model(model: llamac.Model) -> None:
    session = llamac.Session(model, context=20, threads=1)
    assert (session.context, session.model) == (20, model)
    model.close()
    assert session.closed


# ---- reprs


def test_reprs_describe_models_and_sessions(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.bin", checkpoint(gpt2_config()), "bf16")
    model = llamac.load(path, threads=1, isa="scalar")
    session = model.session(context=30, kv_dtype="f16")
    session.eval([1, 2, 3])
    assert repr(session) == "<llamac.Session: 3 of 30 positions, KV cache f16, 1 thread, scalar>"
    numbers = sum(t.shape[0] * (t.shape[1] if len(t.shape) == 2 else 1) for t in model.file.tensors)
    assert model.n_parameters == numbers
    assert repr(model) == f"<llamac.Model {str(path)!r}: llama, {numbers / 1000:.3g}K parameters, bf16>"
    model.close()
    assert repr(session) == "<llamac.Session: closed>"
    assert repr(model) == f"<llamac.Model {str(path)!r}: llama, {numbers / 1000:.3g}K parameters, bf16, closed>"


# ---- pickling


def test_a_model_pickles_by_path(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_llama.parent)
    with llamac.load(tiny_llama.name, context=50, kv_dtype="f16", threads=1, isa="scalar") as model:
        data = pickle.dumps(model)
        assert len(data) < 1000
        monkeypatch.chdir(tmp_path)  # a relative path still denotes the same file
        with pickle.loads(data) as again, again.session() as session:
            assert again.file.path == tiny_llama
            assert (session.context, session.kv_dtype, session.threads, session.isa) == (50, "f16", 1, "scalar")
            assert again.logits([1, 2, 3]).tobytes() == model.logits([1, 2, 3]).tobytes()
        with copy.deepcopy(model) as again:
            assert again.file.id == model.file.id


def test_a_built_in_model_pickles_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with llamac.load("stories") as model, pickle.loads(pickle.dumps(model)) as again:
        assert again.file.path == model.file.path


def test_a_converted_model_pickles_by_its_source(checkpoint_folder: Path, cache_folder: Path) -> None:
    model = llamac.load(checkpoint_folder, dtype="q8", tokenizer=checkpoint_folder)
    with model, pickle.loads(pickle.dumps(model)) as again:
        assert (again.metadata["dtype"], again.file.path) == ("q8", model.file.path)
        assert again.n_token_ids == model.n_token_ids
    with llamac.load(checkpoint_folder, cache_dir=False) as model, pickle.loads(pickle.dumps(model)) as again:
        assert again.file.id == model.file.id


def test_a_pickled_model_whose_file_has_changed_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.bin", checkpoint(llama_config()))
    with llamac.load(path) as model:
        data = pickle.dumps(model)
    write_model(tmp_path / "other.bin", checkpoint(llama_config(n_layers=1)))
    os.replace(tmp_path / "other.bin", path)
    with pytest.raises(ModelError, match=r"m\.bin has changed since the model was pickled"):
        pickle.loads(data)


def test_models_not_opened_by_load_cannot_be_pickled(tiny_llama: Path) -> None:
    with Model(FlatFile(tiny_llama)) as model, pytest.raises(TypeError, match=r"only models that llamac\.load opened"):
        pickle.dumps(model)
    with pytest.raises(ClosedError, match="the model is closed"):
        pickle.dumps(model)


def first_tokens(model: llamac.Model) -> list[int]:
    with model:
        return model.generate([1, 2, 3], max_tokens=5, temperature=0).tokens


def test_a_model_can_be_sent_to_a_spawned_process(model: llamac.Model) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(first_tokens, (model,)) == model.generate([1, 2, 3], max_tokens=5, temperature=0).tokens


# ---- load


def test_load_needs_a_path() -> None:
    load = cast("Any", llamac.load)
    uses: list[Callable[[], object]] = [load, partial(load, None), partial(load, path=None), partial(load, threads=1)]
    for use in uses:
        with pytest.raises(ArgumentTypeError, match=r"load needs a model: .* such as 'stories'") as error:
            use()
        assert isinstance(error.value, TypeError)
    with llamac.load(path="stories") as model:
        assert model.name == "stories"


def test_load_accepts_any_path_object(tiny_llama: Path) -> None:
    class Named:
        def __fspath__(self) -> str:
            return str(tiny_llama)

    with llamac.load(Named()) as model:
        assert model.file.path == tiny_llama


def test_load_shows_progress_only_if_requested(
    checkpoint_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    llamac.load(checkpoint_folder, cache_dir=False, progress=lambda phase, done, total: found.append(phase)).close()
    assert "writing" in found
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for progress in (True, False, None):
        llamac.load(checkpoint_folder, cache_dir=False, progress=progress).close()
        out, err = capsys.readouterr()
        assert (out, "writing: " in err) == ("", progress is True)
    with pytest.raises(ArgumentTypeError, match="progress must be"):
        llamac.load(checkpoint_folder, progress=5)  # type: ignore[arg-type]
