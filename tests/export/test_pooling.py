"""The pooling of embedding models: read from Hugging Face directories and GGUF files, stored, and written back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf_samples import write_gguf

from golden.cases import CASES
from golden.tiny_checkpoints import tensors
from llamac import ExportError
from llamac.export.convert import export
from llamac.format.flatfile import FlatFile
from llamac.format.gguf_metadata import read_metadata

LLAMA = CASES["llama"].config


def stored(source: Path, tmp_path: Path) -> tuple[Any, list[str]]:
    """Return metadata["pooling"] of the exported file, and the export's warnings about it."""
    report = export(source, tmp_path / "out.bin", probe_source=None, overwrite=True)
    return FlatFile(tmp_path / "out.bin").metadata.get("pooling"), [w for w in report.warnings if "tokenizer" not in w]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "cls+mean"),
        ({"pooling_mode": "mean", "include_prompt": True}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["weightedmean", "max", "mean_sqrt_len_tokens"]}, "weightedmean+max+mean_sqrt_len"),
        ({}, "mean"),
    ],
)
def test_pooling_of_sentence_transformers(
    checkpoint_folder: Path, tmp_path: Path, values: dict[str, Any], expected: str | None
) -> None:
    (checkpoint_folder / "1_Pooling").mkdir()
    (checkpoint_folder / "1_Pooling" / "config.json").write_text(json.dumps(values))
    assert stored(checkpoint_folder, tmp_path) == (expected, [])


def test_a_damaged_file_is_a_warning(checkpoint_folder: Path, tmp_path: Path) -> None:
    (checkpoint_folder / "1_Pooling").mkdir()
    (checkpoint_folder / "1_Pooling" / "config.json").write_text("{")
    found, [warning] = stored(checkpoint_folder, tmp_path)
    assert found is None
    assert "1_Pooling/config.json" in warning
    assert "does not say how to pool" in warning


def test_a_link_out_of_the_directory_is_refused(checkpoint_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    (checkpoint_folder / "1_Pooling").mkdir()
    (checkpoint_folder / "1_Pooling" / "config.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(ExportError, match="is a link to"):
        stored(checkpoint_folder, tmp_path)


@pytest.mark.parametrize(("kind", "expected"), [(0, None), (1, "mean"), (2, "cls"), (3, "last"), (4, None)])
def test_pooling_of_gguf_files_is_read_and_written_back(tmp_path: Path, kind: int, expected: str | None) -> None:
    path = write_gguf(tmp_path / "m.gguf", LLAMA, tensors(LLAMA), more={"llama.pooling_type": kind})
    assert stored(path, tmp_path) == (expected, [])
    export(tmp_path / "out.bin", tmp_path / "back.gguf", to="gguf")
    assert read_metadata(tmp_path / "back.gguf").values.get("llama.pooling_type") == (kind if expected else None)
