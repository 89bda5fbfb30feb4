"""Recommended sampling settings: read from Hugging Face directories and GGUF files, stored, and written back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf_samples import write_gguf
from vocab_samples import tokenizer_json, write_json

from golden.cases import CASES
from golden.tiny_checkpoints import tensors, write_checkpoint
from llamac.export import generation_config
from llamac.export.convert import export
from llamac.export.flat.model import read as read_flat
from llamac.export.flat.plan import make_plan
from llamac.export.flat.stream import write_file
from llamac.format.flatfile import FlatFile
from llamac.format.gguf_metadata import read_metadata

LLAMA = CASES["llama"].config
SETTINGS = {"temperature": 0.6, "top_k": 40, "top_p": 0.9, "min_p": 0.05}


def folder_with(tmp_path: Path, values: dict[str, Any] | str) -> Path:
    """A Hugging Face directory with this generation_config.json."""
    folder = write_json(write_checkpoint(tmp_path / "hf", LLAMA), tokenizer=tokenizer_json())
    text = values if isinstance(values, str) else json.dumps(values)
    (folder / "generation_config.json").write_text(text)
    return folder


def gguf_with(tmp_path: Path, values: dict[str, Any]) -> Path:
    """A GGUF file with these settings under general.sampling."""
    more = {f"general.sampling.{key}": value for key, value in values.items()}
    return write_gguf(tmp_path / "m.gguf", LLAMA, tensors(LLAMA), more=more)


def stored(source: Path, tmp_path: Path) -> tuple[Any, list[str]]:
    """Return metadata["generation"] of the exported file, and the export's warnings about it."""
    report = export(source, tmp_path / "out.bin", probe_source=None, overwrite=True)
    file = FlatFile(tmp_path / "out.bin")
    warnings = [line for line in report.warnings if "tokenizer" not in line]
    return file.metadata.get("generation"), warnings


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"do_sample": True, **SETTINGS}, SETTINGS),
        (SETTINGS, SETTINGS),
        ({"do_sample": None, "temperature": 1, "top_p": None}, {"temperature": 1.0}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": True}, None),
        ({"do_sample": False, "repetition_penalty": 1.05}, {"temperature": 0.0, "repetition_penalty": 1.05}),
        ({"repetition_penalty": 1.1, "typical_p": 0.9}, {"repetition_penalty": 1.1, "typical_p": 0.9}),
        ({"repetition_penalty": 1.0, "typical_p": 1}, None),
        ({"temperature": 0, "top_k": 0}, {"temperature": 0.0, "top_k": 0}),
        ({"eos_token_id": 2, "max_length": 4096, "transformers_version": "4.40.0"}, None),
    ],
    ids=str,
)
def test_the_settings_of_a_hugging_face_directory_are_stored(
    values: dict[str, Any], expected: dict[str, float] | None, tmp_path: Path
) -> None:
    assert stored(folder_with(tmp_path, values), tmp_path) == (expected, [])


def test_a_directory_without_the_file_has_no_settings(checkpoint_folder: Path, tmp_path: Path) -> None:
    assert stored(checkpoint_folder, tmp_path) == (None, [])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"temp": 0.6, "top_k": 40, "top_p": 0.9, "min_p": 0.05}, SETTINGS),
        ({"temp": 0.0}, {"temperature": 0.0}),
        (
            {"penalty_repeat": 1.5, "xtc_probability": 0.5, "xtc_threshold": 0.1},
            {"repetition_penalty": 1.5, "xtc_probability": 0.5, "xtc_threshold": 0.1},
        ),
        ({"penalty_repeat": 1.0, "penalty_last_n": 64, "mirostat": 0, "mirostat_tau": 5.0}, None),
        ({}, None),
    ],
    ids=str,
)
def test_the_settings_of_a_gguf_file_are_stored(
    values: dict[str, Any], expected: dict[str, float] | None, tmp_path: Path
) -> None:
    assert stored(gguf_with(tmp_path, values), tmp_path) == (expected, [])


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("temperature", -1, "temperature is -1"),
        ("temperature", 1e300, "temperature is inf"),
        ("temperature", 10**400, "too large"),
        ("temperature", 1e-300, "too small"),
        ("temperature", "hot", "temperature must be a number, not str"),
        ("temperature", True, "temperature must be a number, not bool"),
        ("top_k", 2.5, "top_k must be an integer, not float"),
        ("top_k", -1, "top_k is -1"),
        ("top_k", 1 << 40, "top_k is 1099511627776"),
        ("top_p", 0, "top_p is 0"),
        ("top_p", 1.5, "top_p is 1.5"),
        ("min_p", [0.1], "min_p must be a number, not list"),
        ("repetition_penalty", -1, "repetition_penalty is -1"),
    ],
)
def test_a_wrong_value_is_ignored_with_a_warning(name: str, value: Any, reason: str, tmp_path: Path) -> None:
    values = {**SETTINGS, name: value}
    found, (warning,) = stored(folder_with(tmp_path, values), tmp_path)
    assert found == {key: setting for key, setting in SETTINGS.items() if key != name}
    assert warning.startswith("generation_config.json: ")
    assert warning.endswith("; it is ignored")
    assert reason in warning


def test_a_wrong_value_of_a_gguf_file_is_ignored_with_a_warning(tmp_path: Path) -> None:
    found, (warning,) = stored(gguf_with(tmp_path, {"temp": -1.0, "top_k": 5}), tmp_path)
    assert found == {"top_k": 5}
    assert warning.startswith("general.sampling.temperature is -1")


def test_do_sample_of_another_type_is_ignored_with_a_warning(tmp_path: Path) -> None:
    found, warnings = stored(folder_with(tmp_path, {"do_sample": "no", "top_k": 3}), tmp_path)
    assert found == {"top_k": 3}
    assert warnings == ["generation_config.json: do_sample is 'no', expected true or false; it is ignored"]


@pytest.mark.parametrize("text", ["{", "[]", '{"top_k": 1, "top_k": 2}', '{"temperature": NaN}'])
def test_a_damaged_file_is_ignored_with_a_warning(text: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, text)
    report = export(folder, tmp_path / "out.bin", tokenizer=False, probe_source=None)
    assert "generation" not in FlatFile(tmp_path / "out.bin").metadata
    (warning,) = [line for line in report.warnings if "generation_config.json" in line]
    assert warning.endswith("; its sampling settings are ignored")


def test_unsupported_settings_are_named_in_a_warning(tmp_path: Path) -> None:
    values = {"top_k": 3, "guidance_scale": 1.1, "no_repeat_ngram_size": 0, "typical_p": 1.0, "novel_sampler": 0.5}
    found, warnings = stored(folder_with(tmp_path, values), tmp_path)
    assert found == {"top_k": 3}
    assert warnings == [
        "generation_config.json: ignored settings, which this version does not have: guidance_scale = 1.1,"
        " novel_sampler = 0.5"
    ]
    values = {"penalty_last_n": 64, "mirostat": 2, "mirostat_tau": 0.5}
    found, warnings = stored(gguf_with(tmp_path, values), tmp_path)
    assert found is None
    (warning,) = warnings
    assert warning.endswith("which this version does not have: mirostat = 2")


def test_every_setting_of_transformers_is_known() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: parity)")
    known = {*generation_config.HF_NAMES, *generation_config.HF_NEUTRAL, *generation_config.HF_HARMLESS, "do_sample"}
    assert set(vars(transformers.GenerationConfig())) - known == set()


# ---- writing


def flat_with(tmp_path: Path, source: Path, settings: Any) -> Path:
    """Write the flat file `source` with these settings as metadata["generation"]; None removes the key."""
    made = read_flat(source)
    metadata = {**made.metadata, "dtype": "f32"} | ({} if settings is None else {"generation": settings})
    assert made.tokenizer is not None
    data, _, spm = made.tokenizer
    sections = {"metadata": json.dumps(metadata).encode(), "tokenizer": data, "spm": spm or b""}
    with open(tmp_path / "flat.bin", "w+b") as file:
        write_file(file, make_plan(made, "f32", sections))
    return tmp_path / "flat.bin"


@pytest.mark.parametrize(
    ("settings", "hf", "gguf"),
    [
        (
            SETTINGS,
            {"do_sample": True, **SETTINGS},
            {"temp": pytest.approx(0.6), "top_k": 40, "top_p": pytest.approx(0.9), "min_p": pytest.approx(0.05)},
        ),
        ({"temperature": 0.0}, {"do_sample": False}, {"temp": 0.0}),
        ({"repetition_penalty": 1.5}, {"do_sample": True, "repetition_penalty": 1.5}, {"penalty_repeat": 1.5}),
        (None, {}, {}),
    ],
    ids=["sampling", "greedy", "penalty", "none"],
)
def test_the_settings_are_written_back(
    settings: Any, hf: dict[str, Any], gguf: dict[str, Any], source: Path, tmp_path: Path
) -> None:
    flat = flat_with(tmp_path, source, settings)
    export(flat, tmp_path / "hf", to="hf")
    written = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert {key: value for key, value in written.items() if not key.endswith("_token_id")} == hf
    export(flat, tmp_path / "m.gguf", to="gguf", tokenizer=False)
    prefix = "general.sampling."
    values = {k.removeprefix(prefix): v for k, v in read_metadata(tmp_path / "m.gguf").values.items() if prefix in k}
    assert values == gguf
    for path in (tmp_path / "hf", tmp_path / "m.gguf"):
        assert stored(path, tmp_path) == (settings, [])


def test_transformers_reads_the_written_settings(source: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: parity)")
    for number, settings in enumerate((SETTINGS, {"temperature": 0.0})):
        folder = tmp_path / str(number)
        folder.mkdir()
        export(flat_with(folder, source, settings), folder / "hf", to="hf")
        config = transformers.GenerationConfig.from_pretrained(folder / "hf")
        config.validate(strict=True)
        assert config.do_sample is (settings is SETTINGS)
        assert config.temperature == (0.6 if settings is SETTINGS else None)


def test_an_export_of_a_flat_file_keeps_the_settings(source: Path, tmp_path: Path) -> None:
    flat = flat_with(tmp_path, source, SETTINGS)
    assert stored(flat, tmp_path) == (SETTINGS, [])


@pytest.mark.parametrize("settings", [5, [], {"temperature": "hot"}, {"unknown": 1}, {"top_k": -5}], ids=str)
def test_wrong_settings_in_a_flat_file_are_dropped(settings: Any, source: Path, tmp_path: Path) -> None:
    assert stored(flat_with(tmp_path, source, settings), tmp_path) == (None, [])
