"""`llamac embed` and `llamac rerank`: what they print and write, what they read, and what they refuse."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tqdm.utils import disp_len

import llamac
from builders import bert_config, encoder, write_model
from commands import Command
from processes import TIMEOUT

TEXTS = ["a small dog", "a little dog\x1b", "stock prices of the longest kind that there is"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """An encoder whose embeddings differ in length."""
    made = encoder(bert_config())
    return write_model(tmp_path / "bert.bin", made, pooling="cls", normalizes=False, similarity="dot")


@pytest.fixture
def scorer(tmp_path: Path) -> Path:
    """A cross-encoder."""
    config = bert_config(scores_pairs=1, pooled_dim=(40, 1), pooled_activation=("tanh", "sigmoid"))
    return write_model(tmp_path / "scores.bin", encoder(config), pooling="cls")


@pytest.fixture
def vectors(model: Path) -> NDArray[np.float32]:
    with llamac.load(model) as opened:
        return opened.embed(TEXTS)


def test_embeddings_are_those_of_the_library(
    model: Path, vectors: NDArray[np.float32], tmp_path: Path, llamac_command: Command
) -> None:
    found = llamac_command("embed", model, *TEXTS, "--json")
    assert (found.code, found.err) == (0, "")
    assert llamac_command("embed", model, TEXTS[0], "--json", "-q", *TEXTS[1:]).out == found.out
    lines = [json.loads(line) for line in found.out.splitlines()]
    assert [(line["index"], line["text"]) for line in lines] == list(enumerate(TEXTS))
    np.testing.assert_array_equal(np.array([line["embedding"] for line in lines], np.float32), vectors)
    piped = llamac_command("embed", model, "--json", stdin="\n".join([*TEXTS, ""]).encode())
    assert piped.out == found.out
    (tmp_path / "texts").write_bytes("\r\n".join(TEXTS).encode())
    out = tmp_path / "out.npy"
    assert llamac_command("embed", model, "-f", tmp_path / "texts", "--npy", out).out == ""
    np.testing.assert_array_equal(np.load(out), vectors)
    llamac_command("embed", model, "-f", tmp_path / "texts", "--npy", out).fails_with(f"{out} exists", "--force")
    assert llamac_command("embed", model, "a", "--npy", out, "--force", "--dimensions", "8").code == 0
    assert np.load(out).shape == (1, 8)
    assert json.loads(llamac_command("embed", model, TEXTS[0]).out)["index"] == 0


def test_operands_can_follow_options_and_begin_with_a_dash(model: Path, llamac_command: Command) -> None:
    for words in (["--json", "-1", "- a", "-"], ["a", "--json", "--", "-b", "--json=x y"], ["--json", "--", "-a"]):
        found = llamac_command("embed", model, *words)
        expected = [word for word in words[: words.index("--") if "--" in words else None] if word != "--json"]
        expected += words[words.index("--") + 1 :] if "--" in words else []
        assert [json.loads(line)["text"] for line in found.out.splitlines()] == expected, found.err
    assert "unknown option --prmpt; did" in llamac_command("embed", model, "a", "--prmpt=search query: ").err
    assert llamac_command("embed", model, "a", "--prompt=search query: ").code == 0
    marked = llamac_command("embed", model, "--json", stdin="\ufeffa\r\n".encode())
    assert json.loads(marked.out)["text"] == "a"


def test_vectors_on_standard_output_are_a_numpy_file(
    model: Path, vectors: NDArray[np.float32], llamac_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-m", "llamac", "embed", str(model), *TEXTS, "--npy", "-"]
    written = subprocess.run(command, capture_output=True, check=True, timeout=TIMEOUT)  # a pipe
    np.testing.assert_array_equal(np.load(io.BytesIO(written.stdout)), vectors)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    llamac_command("embed", model, "a", "--npy", "-").refuses_with("--npy - writes bytes", "redirect it")


@pytest.mark.parametrize("text", ["熊猫" * 6, "熊猫" * 20, "panda" * 8])
def test_texts_in_tables_are_cut_at_the_columns_that_they_take(
    model: Path, scorer: Path, text: str, llamac_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    for command in (["embed", model], ["rerank", scorer, "a query"]):
        lines = llamac_command(*command, text, "short").out.splitlines()
        (line,) = (line for line in lines if text[:2] in line)
        assert line.endswith("...")
        assert disp_len(line) in (23, 24)
        monkeypatch.setenv("COLUMNS", str(10 + 80))
        assert text in llamac_command(*command, text, "short").out
        monkeypatch.setenv("COLUMNS", "24")


@pytest.mark.parametrize("columns", [20, 40, 100])
def test_similarities_fit_the_terminal(
    model: Path,
    vectors: NDArray[np.float32],
    columns: int,
    llamac_command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = llamac_command("embed", model, *TEXTS).out.splitlines()
    assert max(map(len, lines)) <= columns
    assert lines[:2] == ["1  a small dog", "2  a little dog\\x1b"]
    assert lines[2][: columns - 3] == f"3  {TEXTS[2]}"[: columns - 3]
    rows = [line.split() for line in lines[3:] if line.startswith(("1 ", "2 ", "3 "))]
    numbers = {str(n): [float(x) for row in rows if row[0] == str(n) for x in row[1:]] for n in (1, 2, 3)}
    lengths = np.linalg.norm(vectors, axis=1)
    assert abs(lengths - 1).min() > 0.01
    np.testing.assert_allclose(list(numbers.values()), vectors @ vectors.T / np.outer(lengths, lengths), atol=0.0006)


def test_documents_are_ranked(scorer: Path, llamac_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    with llamac.load(scorer) as opened:
        expected = [(one.index, one.score, one.document) for one in opened.rerank("a query", TEXTS)]
    found = llamac_command("rerank", scorer, "a query", *TEXTS, "--json").out.splitlines()
    assert [tuple(json.loads(line).values()) for line in found] == expected
    monkeypatch.setenv("COLUMNS", "24")
    lines = llamac_command("rerank", scorer, "a query", stdin="\n".join(TEXTS).encode()).out.splitlines()
    assert [float(line[:8]) for line in lines] == pytest.approx([score for _, score, _ in expected], abs=1e-4)
    assert max(map(len, lines)) == 24


def test_what_cannot_be_embedded_is_named(model: Path, scorer: Path, tmp_path: Path, llamac_command: Command) -> None:
    llamac_command("embed", model).refuses_with("there are no texts: write them after the model")
    llamac_command("embed", model, stdin=b"").refuses_with("standard input is empty, expected texts")
    llamac_command("embed", model, stdin=b"a\n\nb\n").refuses_with("standard input: line 2 is empty")
    llamac_command("embed", model, "a", "-f", "x").refuses_with("-f x has the texts")
    llamac_command("embed", model, "a", "--force").refuses_with("--force needs --npy")
    llamac_command("embed", model, *["a"] * 31).refuses_with("there are 31 texts, at most 30 fit a table")
    llamac_command("embed", model, "a", "--prompt-name", "query").refuses_with("--prompt-name")
    llamac_command("embed", model, "a", "--dimensions", "41").refuses_with("--dimensions is 41")
    assert "required: MODEL\n" in llamac_command("embed").err
    assert "required: QUERY\n" in llamac_command("rerank", scorer).err
    llamac_command("rerank", scorer, "\udcff", "a").fails_with("the query is not UTF-8")
    llamac_command("embed", scorer, "a").fails_with("scores pairs")
    llamac_command("rerank", model, "a", "b").fails_with("does not score pairs")
    llamac_command("embed", tmp_path / "missing", "a").fails_with("missing")
    assert "unknown option --jsn; did you mean --json?" in llamac_command("embed", model, "--jsn", "a").err
