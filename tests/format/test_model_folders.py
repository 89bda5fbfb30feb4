"""Links that leave a model directory are errors, because an export could copy private files into a model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import llamac
from commands import Command
from llamac.errors import ExportError
from llamac.export import export
from llamac.export.hf.model import read
from llamac.export.lora import read_adapter
from llamac.format.detect import Source
from llamac.format.model_folders import check_links
from llamac.text.chat import ChatTemplate
from llamac.text.tokenizer import Tokenizer
from llamac.text.vocabulary.load import load_vocabulary

SECRET = "{{ 'the private key' }}"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    return path


def replace_with_link(path: Path, target: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize(
    "name",
    [
        "chat_template.jinja",
        "additional_chat_templates/tool.jinja",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
        "merges.txt",
        "shard without a suffix",
    ],
)
def test_a_link_out_of_a_model_directory_is_an_error(
    name: str, checkpoint_folder: Path, secret: Path, cache_folder: Path, tmp_path: Path, llamac_command: Command
) -> None:
    replace_with_link(checkpoint_folder / name, secret)
    out = tmp_path / "out.bin"
    calls: list[Callable[[], object]] = [
        lambda: llamac.load(checkpoint_folder),
        lambda: llamac.load(checkpoint_folder / "model.safetensors"),
        lambda: export(checkpoint_folder, out),
        lambda: export(Source(checkpoint_folder), out),
        lambda: read(checkpoint_folder, []),
        lambda: load_vocabulary(checkpoint_folder),
        lambda: Tokenizer.from_file(checkpoint_folder),
        lambda: ChatTemplate.from_file(checkpoint_folder),
    ]
    for call in calls:
        with pytest.raises(ExportError, match=r"is a link to .*secret, outside of the directory; replace it by a copy"):
            call()
    llamac_command("inspect", checkpoint_folder).fails_with(name, "is a link to")
    assert not out.exists()
    assert not cache_folder.exists()


def test_a_link_to_a_folder_of_templates_is_an_error(checkpoint_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "x.jinja").write_text(SECRET)
    (checkpoint_folder / "additional_chat_templates").symlink_to(tmp_path / "private")
    with pytest.raises(ExportError, match=r"x\.jinja is a link to"):
        export(checkpoint_folder, tmp_path / "out.bin")


def test_a_link_beside_a_tokenizer_file_is_an_error(checkpoint_folder: Path, secret: Path) -> None:
    replace_with_link(checkpoint_folder / "tokenizer_config.json", secret)
    for call in (Tokenizer.from_file, lambda path: ChatTemplate.from_file(path.with_name("chat_template.jinja"))):
        with pytest.raises(ExportError, match="is a link to"):
            call(checkpoint_folder / "tokenizer.json")


def test_a_link_out_of_an_adapter_directory_is_an_error(tmp_path: Path, secret: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").symlink_to(secret)
    with pytest.raises(ExportError, match="is a link to"):
        read_adapter(tmp_path / "adapter", "llama", None)  # type: ignore[arg-type]  # not used before the error


def test_links_inside_a_directory_and_links_given_as_paths_are_followed(
    checkpoint_folder: Path, tmp_path: Path
) -> None:
    (checkpoint_folder / "weights").mkdir()
    shutil.move(checkpoint_folder / "model.safetensors", checkpoint_folder / "weights" / "x")
    (checkpoint_folder / "model.safetensors").symlink_to("weights/x")
    (checkpoint_folder / "dangling.json").symlink_to(tmp_path / "absent")
    link = tmp_path / "link"
    link.symlink_to(checkpoint_folder)
    export(link, tmp_path / "out.bin", probe_source=None)
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.symlink_to(checkpoint_folder / "tokenizer.json")
    assert Tokenizer.from_file(tokenizer).n_ids
    flat = tmp_path / "linked.bin"
    flat.symlink_to(tmp_path / "out.bin")
    llamac.load(flat).close()


def as_hub_cache(folder: Path, cache: Path, shared: bool) -> Path:
    """Copy a directory into the layout of the hub client's cache; return the snapshot."""
    repo = cache / "models--org--name"
    snapshot = repo / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        blob = repo / "blobs" / str(number)
        if shared:
            (cache / "blobs" / "00").mkdir(parents=True, exist_ok=True)
            shutil.copy(path, cache / "blobs" / "00" / str(number))
            blob.symlink_to(f"../../blobs/00/{number}")
        else:
            shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    return snapshot


@pytest.mark.parametrize("shared", [True, False])
def test_links_of_the_hub_cache_are_followed(
    shared: bool, checkpoint_folder: Path, tmp_path: Path, secret: Path
) -> None:
    snapshot = as_hub_cache(checkpoint_folder, tmp_path / "hub", shared)
    export(snapshot, tmp_path / "out.bin", probe_source=None)
    config = json.loads((snapshot / "config.json").read_text())
    assert config["model_type"] == "llama"
    blob = snapshot.parents[1] / "blobs" / "0"
    replace_with_link(blob, secret)
    with pytest.raises(ExportError, match="is a link to"):
        check_links(snapshot)
    (snapshot / "README.md").symlink_to(secret)
    with pytest.raises(ExportError, match="is a link to"):
        check_links(snapshot, ["README.md"])


def test_a_folder_named_snapshots_is_not_the_hub_cache(checkpoint_folder: Path, secret: Path) -> None:
    """The name alone does not allow links to a neighbor named `blobs`."""
    snapshots = checkpoint_folder.parent / "other" / "snapshots"
    snapshots.mkdir(parents=True)
    moved = checkpoint_folder.rename(snapshots / "x")
    (snapshots.parent / "blobs").mkdir()
    (snapshots.parent / "blobs" / "private").write_text(SECRET)
    (moved / "chat_template.jinja").symlink_to("../../blobs/private")
    with pytest.raises(ExportError, match="is a link to"):
        check_links(moved)
