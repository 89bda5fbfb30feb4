"""What quantization costs: the measures against NumPy, texts and windows, errors of the comparison."""

from __future__ import annotations

import math
import re
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

import llamac
from builders import checkpoint, llama_config, some_ids, write_model
from llamac.errors import ExportError, ModelError
from llamac.export.convert import export
from llamac.export.quality import measures
from llamac.export.quality.measures import Reference
from llamac.export.texts import built_in_text, windows
from llamac.sizes import size_text

WINDOWS = [some_ids(70, 1), some_ids(33, 2), some_ids(2, 3)]


@pytest.fixture(scope="module")
def quantized(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quality") / "q4.bin"
    export(source, out, dtype="q4", pure=True, probe_source=None)
    return out


def test_the_measures_are_those_of_numpy(source: Path, quantized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "COMPARED_NUMBERS", 5 * 284)  # several steps for each evaluated part
    with llamac.load(source, kv_dtype="f32") as one, llamac.load(quantized, kv_dtype="f32") as two:
        n_ids = one.n_token_ids
        with Reference(one, WINDOWS) as reference:
            found = reference.compare(two)
            again = reference.compare(two)
            itself = reference.compare(one)
        divergences, same, losses = [], [], []
        for ids in WINDOWS:
            p, q = (
                np.exp(rows - rows.max(axis=1, keepdims=True))
                for rows in (model.logits(ids)[:, :n_ids].astype(np.float64) for model in (one, two))
            )
            p, q = p / p.sum(axis=1, keepdims=True), q / q.sum(axis=1, keepdims=True)
            divergences += list((p * np.log(p / q)).sum(axis=1))
            same += list(p.argmax(axis=1) == q.argmax(axis=1))
            losses += [(-math.log(p[i, token]), -math.log(q[i, token])) for i, token in enumerate(ids[1:])]
    assert found == again
    assert found.positions == sum(map(len, WINDOWS)) == 105
    assert found.kl_mean == pytest.approx(np.mean(divergences), rel=1e-6)
    assert found.kl_high == pytest.approx(sorted(divergences)[103], rel=1e-6)  # the 104th of 105 covers 99%
    assert found.kl_max == pytest.approx(max(divergences), rel=1e-6)
    assert found.same_top == pytest.approx(np.mean(same))
    assert 0 < found.same_top < 1
    means = np.mean(losses, axis=0)
    assert (found.base_perplexity, found.perplexity) == pytest.approx(tuple(np.exp(means)), rel=1e-6)
    assert (itself.kl_mean, itself.kl_max, itself.same_top) == (0, 0, 1)
    assert itself.perplexity == found.base_perplexity


def test_progress_counts_the_tokens_of_the_base_and_of_the_model(source: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    with llamac.load(source) as model, Reference(model, WINDOWS, lambda *call: calls.append(call)) as reference:
        reference.compare(model, lambda *call: calls.append(call))
    steps = [0, 64, 70, 103, 105]
    assert calls == [(phase, done, 105) for phase in ("evaluating the base", "evaluating") for done in steps]


def test_a_full_disk_of_temporary_files_is_named(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with llamac.load(source) as model:
        needed = size_text(105 * 284 * 4)
        with monkeypatch.context() as patch:
            usage = shutil.disk_usage(tmp_path)
            patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
            start = f"the disk of {tmp_path} has 1.0 kB free, but {needed} are needed"
            message = f"{start}; use fewer tokens, or set TMPDIR"
            with pytest.raises(ExportError, match=re.escape(message)):
                Reference(model, WINDOWS)
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: open("/dev/full", "w+b"))  # noqa: SIM115
        with pytest.raises(OSError, match="No space left on device") as error:
            Reference(model, WINDOWS)
    assert error.value.filename == str(tmp_path)


def test_damaged_weights_are_refused(source: Path, tmp_path: Path) -> None:
    config = llama_config()
    norm = np.full(config.dim, 3e38, np.float32)
    damaged = write_model(tmp_path / "damaged.bin", checkpoint(config, {"output_norm.weight": norm}))
    with llamac.load(source) as one, llamac.load(damaged) as two, Reference(one, WINDOWS) as reference:
        with pytest.raises(ModelError, match=r"damaged\.bin: a logit is not finite"):
            reference.compare(two)
        with pytest.raises(ModelError, match="not finite"):
            Reference(two, WINDOWS)


# ---- texts


def letters(text: str) -> list[int]:
    return [ord(char) for char in text]


@pytest.mark.parametrize(
    ("text", "tokens", "length", "expected"),
    [
        ("abcdefgh", 8, 4, ["^abc", "^def"]),
        ("abcdefgh", 100, 4, ["^abc", "^def", "^gh"]),
        ("abcdefg", 100, 4, ["^abc", "^def", "^g"]),
        ("abcdef", 3, 100, ["^ab"]),
        ("abc", 100, 100, ["^abc"]),
        ("", 8, 4, []),
    ],
)
def test_windows_begin_with_the_start_and_continue_the_text(
    text: str, tokens: int, length: int, expected: list[str]
) -> None:
    assert windows(letters, letters("^"), text, tokens, length) == [letters(window) for window in expected]


def test_a_window_without_a_start_has_two_tokens() -> None:
    assert windows(letters, [], "abcde", 100, 2) == [letters("ab"), letters("cd")]


def test_the_built_in_text_is_long_enough_for_the_default() -> None:
    text = built_in_text()
    assert len(text.split()) > 2000
    assert max(len(line) for line in text.splitlines()) > 300  # a line is a paragraph
