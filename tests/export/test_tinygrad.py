"""tinygrad as the witness of `llamac check --against`: it agrees with transformers and with the engine."""

from __future__ import annotations

import functools
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llamac
from commands import Command
from golden.make_captures import FOLDER, NAMES, question_of
from golden.parity_table import make_folder
from llamac.errors import ExportError, UnsupportedError
from llamac.export.parity.capture import read_capture
from llamac.export.parity.question import make_question
from llamac.export.parity.report import check_parity
from llamac.export.parity.tinygrad_run import run_tinygrad


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The Hugging Face directory of a case."""
    root = tmp_path_factory.mktemp("models")
    return functools.cache(lambda name: make_folder(root, name))


@pytest.fixture
def tinygrad(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The library, with a cache of kernels of its own."""
    if shutil.which("clang") is None:
        pytest.skip("tinygrad needs clang")
    monkeypatch.setenv("PYTHON", "python3")  # which tinygrad expects to be a number
    monkeypatch.setenv("CACHEDB", str(tmp_path_factory.getbasetemp() / "tinygrad.db"))
    return pytest.importorskip("tinygrad")


def damaged(source: Path, target: Path, **changes: object) -> Path:
    """A copy of a checkpoint with other settings."""
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


@pytest.mark.parametrize("name", NAMES)
def test_two_implementations_compute_the_same(tinygrad: Any, folder: Callable[[str], Path], name: str) -> None:
    stored = read_capture(FOLDER / f"{name}.safetensors")
    assert stored.source.startswith("transformers ")
    found = run_tinygrad(folder(name), question_of(name))
    assert found.source.startswith("tinygrad ")
    assert found.stages.keys() == stored.stages.keys()
    for key, rows in stored.stages.items():
        assert found.stages[key].shape == rows.shape
        np.testing.assert_allclose(found.stages[key], rows, rtol=0, atol=1e-5 * np.abs(rows).max(), err_msg=str(key))
    assert {way: one.ids for way, one in found.chosen.items()} == {way: one.ids for way, one in stored.chosen.items()}


def test_the_engine_agrees_with_llama_3_s_frequencies(
    tinygrad: Any, model_file: Callable[[str], Path], folder: Callable[[str], Path]
) -> None:
    with llamac.load(model_file("llama-llama3"), kv_dtype="f32", threads=1) as model:
        report = check_parity(model, run_tinygrad(folder("llama-llama3"), make_question(model)))
    assert report.is_within, report.first


def test_the_command_names_the_witness_and_a_planted_fault(
    tinygrad: Any,
    llamac_command: Command,
    model_file: Callable[[str], Path],
    folder: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    name = "llama-tie_word_embeddings"
    options = ("--witness", "tinygrad", "--tokens", "12")
    done = llamac_command("check", model_file(name), "--against", folder(name), *options, "--json")
    facts = json.loads(done.out)
    assert (done.code, facts["reference"].split()[0]) == (0, "tinygrad"), done.err
    other = damaged(folder(name), tmp_path / "other", rms_norm_eps=0.01)
    done = llamac_command("check", model_file(name), "--against", other, *options)
    assert done.code == 1
    assert "cause: norm_eps is" in done.out


def test_what_tinygrad_does_not_compute_is_refused(tinygrad: Any, tmp_path: Path) -> None:
    source, question = make_folder(tmp_path, "llama"), question_of("llama")
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"model_type": "gemma"}, "has only gpt2 and llama"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
    )
    for number, (changes, words) in enumerate(refused):
        with pytest.raises(UnsupportedError, match=words):
            run_tinygrad(damaged(source, tmp_path / str(number), rope_parameters=None, **changes), question)
    data = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(data.replace(b"model.norm.weight", b"model.nurm.weight"))
    with pytest.raises(ExportError, match=r"no tensor model\.norm\.weight"):
        run_tinygrad(source, question)
    (source / "model.safetensors").unlink()
    with pytest.raises(ExportError, match=r"has no \*\.safetensors"):
        run_tinygrad(source, question)


def test_a_missing_library_is_named(
    llamac_command: Command,
    model_file: Callable[[str], Path],
    folder: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tinygrad", None)
    done = llamac_command("check", model_file("llama"), "--against", folder("llama"), "--witness", "tinygrad")
    done.fails_with("needs the package tinygrad", "pip install tinygrad")
    done = llamac_command("check", model_file("llama"), "--witness", "tinygrad")
    assert (done.code, done.out) == (2, "")
    assert "--witness needs --against" in done.err
