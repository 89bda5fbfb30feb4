"""Fixtures for tests of models on the Hugging Face Hub: the real client talks to a local server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vocab_samples import tokenizer_json, write_json

from golden.cases import CASES
from golden.tiny_checkpoints import write_checkpoint
from hub_server import Hub, serving
from llamac.export import export
from llamac.sources import hub_download
from opened_sources import logits


@pytest.fixture(scope="session")
def hub_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of the model org/name: a Hugging Face directory, and some files that no import needs."""
    folder = write_checkpoint(tmp_path_factory.mktemp("source") / "hf", CASES["llama"].config)
    write_json(folder, tokenizer=tokenizer_json())
    others = dict.fromkeys(("README.md", "pytorch_model.bin", "model.onnx", "flax_model.msgpack"), b"not a model")
    return {path.name: path.read_bytes() for path in folder.iterdir()} | others


@pytest.fixture
def server(
    hub_files: dict[str, bytes], cache_folder: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hub]:
    """A local hub that has the model org/name; the client of this process uses it."""
    from huggingface_hub import constants

    with serving(Hub({"org/name": dict(hub_files)})) as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        template = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub_cache))
        monkeypatch.setattr(hub_download, "PAUSE_S", 0.0)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield found


@pytest.fixture
def hub_cache(tmp_path: Path) -> Path:
    """The client's cache folder; empty."""
    return tmp_path / "hub"


@pytest.fixture(scope="session")
def expected(hub_files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The logits of the model org/name."""
    folder = tmp_path_factory.mktemp("expected")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_bytes(hub_files[name])
    export(folder, folder / "model.bin", probe_source=None)
    return logits(folder / "model.bin")
