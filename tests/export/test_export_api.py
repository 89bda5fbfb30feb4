"""`llamac.export.export` as callers use it: through the package, with names, paths and progress bars."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import llamac
from llamac.errors import ArgumentError, ArgumentTypeError, ExportError
from llamac.export.convert import export
from processes import TIMEOUT


def run_code(code: str, *arguments: object) -> str:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT).stdout


def test_export_is_callable_after_importing_llamac(source: Path, tmp_path: Path) -> None:
    code = """
        import sys
        import llamac
        report = llamac.export.export(sys.argv[1], sys.argv[2], dtype="f16", probe_source=None)
        print(type(report) is llamac.export.Report, report.dtype)
    """
    assert run_code(code, source, tmp_path / "out.bin") == "True f16\n"


def test_importing_llamac_export_does_not_import_numpy() -> None:
    assert run_code("import sys, llamac; llamac.export; print('numpy' in sys.modules)") == "False\n"


def test_only_public_names_are_listed_and_found() -> None:
    assert set(llamac.export.__all__) == {"Report", "export"}
    with pytest.raises(AttributeError, match=r"module 'llamac.export' has no attribute 'nothing'"):
        llamac.export.nothing  # noqa: B018


def test_built_in_models_are_sources(tmp_path: Path) -> None:
    report = export("stories", tmp_path / "out.bin", dtype="q8", probe_source=None)
    assert (report.source["format"], report.dtype, report.dim) == ("huggingface", "q8", 256)


def test_any_path_like_object_is_accepted(source: Path, tmp_path: Path) -> None:
    class Place(os.PathLike[str]):
        def __init__(self, path: Path) -> None:
            self.path = path

        def __fspath__(self) -> str:
            return str(self.path)

    partial = Place(tmp_path / "partial")
    export(Place(source), Place(tmp_path / "out.bin"), partial=partial, probe_source=None)
    assert [path.name for path in tmp_path.iterdir()] == ["out.bin"]


def test_an_unresolved_hub_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"which export does not download: pass llamac\.resolve\('hf:org/name'\)"):
        export("hf:org/name", tmp_path / "out.bin")


def test_a_resolved_source_is_accepted(source: Path, tmp_path: Path) -> None:
    found = llamac.resolve(source)
    export(found, tmp_path / "out.bin", probe_source=None)
    export(found._replace(name="given"), tmp_path / "named.bin", probe_source=None)
    with llamac.load(tmp_path / "named.bin") as model:
        assert model.name == "given"


def test_a_missing_source_is_an_export_error(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"absent: No such file or directory"):
        export(tmp_path / "absent", tmp_path / "out.bin")


def test_progress_true_shows_bars(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    export(source, tmp_path / "out.bin", progress=True)
    assert "writing" in terminal.getvalue()
    shown = len(terminal.getvalue())
    export(source, tmp_path / "silent.bin", progress=False)
    export(source, tmp_path / "default.bin")
    assert len(terminal.getvalue()) == shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"progress": 3}, "progress must be True, False, None or a function"),
        ({"to": "pickle"}, "to is 'pickle', expected one of llamac, hf, llama2c, gguf"),
        ({"dtype": 8}, "dtype must be a string, not int"),
        ({"to": "hf", "dtype": "auto"}, "dtype 'auto' is for flat files and GGUF files only, not with to='hf'"),
        ({"bits_text": "text"}, "bits_text is for "),
        ({"threads": 0}, "threads is 0, expected at least 1"),
        ({"dtype_map": [("a", 1)]}, "dtype_map is"),
        ({"lora": 3}, "lora must be a path, a pair of a path and a strength, or a list of these"),
        ({"lora": "x", "probe_source": "transformers"}, "without the adapters in lora"),
    ],
)
def test_wrong_arguments_leave_no_files(options: dict[str, Any], message: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=message) as caught:
        export(source, tmp_path / "out.bin", **options)
    assert isinstance(caught.value, ArgumentTypeError) == (" must be " in message or "dtype_map" in message)
    assert list(tmp_path.iterdir()) == []
