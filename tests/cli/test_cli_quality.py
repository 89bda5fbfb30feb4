"""`llamac quality`: the report, its width, JSON, texts, errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import llamac
from builders import checkpoint, llama_config, write_model
from commands import Command
from llamac.export.convert import export
from llamac.export.quality import measures


@pytest.fixture(scope="module")
def quantized(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quality") / "q4.bin"
    export(source, out, dtype="q4", probe_source=None)
    return out


SHORT = ("--tokens", 24, "--window", 12)


def test_the_report_fits_a_narrow_terminal(
    llamac_command: Command, source: Path, quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(quantized.parent)
    done = llamac_command("quality", quantized.name, "--against", source, *SHORT)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert all(len(line) <= 40 for line in lines if str(source) not in line)
    assert lines[3] == "            24 tokens in 2 windows"
    assert [line.split(" ")[0] for line in lines if line and line[0] != " "] == [
        *("base", "text", "model", "size", "perplexity", "divergence", "best")
    ]


def test_the_json_has_a_row_for_each_model(llamac_command: Command, source: Path, quantized: Path) -> None:
    done = llamac_command("quality", quantized, source, "--against", source, *SHORT, "--json")
    facts = json.loads(done.out)
    assert facts["text"] == {"source": "built-in", "tokens": 24, "windows": 2}
    first, second = facts["models"]
    assert (first["model"], second["model"]) == (str(quantized), str(source))
    assert first["bits_per_weight"] < 10 < second["bits_per_weight"] == facts["base"]["bits_per_weight"]
    assert first["kl_max"] >= first["kl_high"] >= first["kl_mean"] > 0
    assert (second["kl_max"], second["same_top"], second["positions"]) == (0, 1, 24)
    assert second["perplexity"] == first["base_perplexity"] != first["perplexity"]
    with llamac.load(quantized) as model:
        assert first["bytes"] == model.weight_bytes


def test_texts_decide_the_result_and_generated_ones_are_always_the_same(
    llamac_command: Command, source: Path, quantized: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The end of the world. " * 3)

    def measured(*options: object) -> dict[str, object]:
        done = llamac_command("quality", quantized, "--against", source, "--json", *options)
        assert (done.code, done.err) == (0, "")
        facts: dict[str, object] = json.loads(done.out)
        return facts

    own, generated = measured("--text", text), measured("--generate", 20, "--window", 10)
    assert own["text"] == {"source": str(text), "tokens": 47, "windows": 1}
    assert generated["text"] == {"source": "generated", "tokens": 20, "windows": 2}
    assert generated == measured("--generate", 20, "--window", 10)
    assert measured("--generate", 25, "--window", 10)["text"] == {"source": "generated", "tokens": 25, "windows": 3}
    assert len({json.dumps(found["models"]) for found in (own, generated, measured(*SHORT))}) == 3


def test_wrong_arguments_are_refused(llamac_command: Command, source: Path, tmp_path: Path) -> None:
    against = ("--against", source)
    llamac_command("quality", source, *against, "--tokens", 1).refuses_with("--tokens is 1, expected at least 2")
    llamac_command("quality", source, *against, "--window", 0).refuses_with("--window is 0")
    llamac_command("quality", source, *against, "--generate", -1).refuses_with("--generate is -1")
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    llamac_command("quality", source, *against, "--text", empty).refuses_with("--text: ", "fewer than 2 tokens")
    llamac_command("quality", source, *against, "--text", tmp_path / "none").fails_with("No such file")
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe")
    llamac_command("quality", source, *against, "--text", binary).fails_with("binary.txt is not UTF-8", "0xff")
    llamac_command("quality", source, *against, "--generate", 9, "--tokens", 9).refuses_with("--tokens", "--generate")
    llamac_command("quality", source, *against, "--cost-tokens", 9).refuses_with("--cost-tokens needs --layers")
    llamac_command("quality", *against).refuses_with("name a MODEL, or number formats with --dtypes")
    both = llamac_command("quality", source, *against, "--text", empty, "--generate", 9)
    assert (both.code, "not allowed with" in both.err) == (2, True)
    missing = llamac_command("quality", source)
    assert (missing.code, "--against" in missing.err) == (2, True)


def test_models_with_another_vocabulary_are_refused(llamac_command: Command, source: Path, tmp_path: Path) -> None:
    made = checkpoint(llama_config())
    made.config = replace(made.config, n_token_ids=283)
    other = write_model(tmp_path / "other.bin", made)
    llamac_command("quality", other, "--against", source).refuses_with(
        f"{other} has 283 tokens, but {source} has 284", "same vocabulary"
    )


def test_what_cannot_be_reported_is_refused_before_anything_is_evaluated(
    llamac_command: Command, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(measures, "_logits")
    against = (source, "--against", source)
    llamac_command("quality", *against, "--plot", tmp_path / "no" / "x.svg").refuses_with("--plot", "folder")
    llamac_command("quality", *against, "--plot", tmp_path).refuses_with("--plot", "is a directory")
    model = tmp_path / "model.bin"
    model.write_bytes(b"precious")
    llamac_command("quality", *against, "--plot", model).refuses_with("--plot", "does not hold SVG")
    assert model.read_bytes() == b"precious"
    other = write_model(tmp_path / "other.bin", checkpoint(llama_config(ffn=80)))
    for option in ("--layers", "--tensors"):
        done = llamac_command("quality", other, "--against", source, option)
        done.refuses_with("in the base, but (", "costs need a model that was made from the base")


def test_a_picture_that_cannot_be_drawn_does_not_lose_the_report(
    llamac_command: Command, source: Path, tmp_path: Path
) -> None:
    done = llamac_command("quality", source, "--against", source, *SHORT, "--plot", tmp_path / "x.svg")
    assert (done.code, "best token" in done.out, "no model differs" in done.err) == (2, True, True)


def test_a_single_window_is_not_several(llamac_command: Command, source: Path) -> None:
    done = llamac_command("quality", source, "--against", source, "--tokens", 9)
    assert "\n            9 tokens in 1 window\n" in done.out
