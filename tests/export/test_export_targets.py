"""Targets of an export: free space, existing files, folders, links, permissions; complete or absent."""

from __future__ import annotations

import io
import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest
from typing_extensions import Buffer

import llamac
from llamac.errors import ArgumentError, ExportError
from llamac.export.convert import export
from llamac.export.flat.stream import BLOCK_BYTES, DataStream
from llamac.export.targets import atomic_folder


def test_free_space_is_checked_first(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    targets = {"llamac": "out.bin", "hf": "out", "llama2c": "out.bin"}
    for to, name in targets.items():
        with pytest.raises(ExportError, match=r"1\.0 kB free, .* are needed"):
            export(source, tmp_path / name, to=to)
    assert list(tmp_path.iterdir()) == []


def test_free_space_is_that_of_a_links_target(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "file").symlink_to(Path("far") / "out.bin")
    (tmp_path / "folder").symlink_to("far")
    asked: list[Path] = []
    usage = shutil.disk_usage(tmp_path)

    def almost_full(path: Path) -> object:
        asked.append(path)
        return usage._replace(free=1000)

    monkeypatch.setattr(shutil, "disk_usage", almost_full)
    for to, name in (("llamac", "file"), ("llama2c", "file"), ("hf", "folder")):
        with pytest.raises(ExportError, match=r"the disk of .*far has 1\.0 kB free"):
            export(source, tmp_path / name, to=to)
    assert set(asked) == {tmp_path / "far"}


def test_a_dangling_link_into_a_missing_folder_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(Path("nowhere") / "out")
    for to in ("llamac", "llama2c", "hf"):
        with pytest.raises(ExportError, match=r"link is a link to .*out, but the folder .*nowhere does not exist"):
            export(source, tmp_path / "link", to=to)


def test_a_failure_in_the_probe_pass_keeps_the_old_file(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llamac.export import probes

    def fail(*args: object, **kwargs: object) -> None:
        raise ExportError("the engine is broken")

    (tmp_path / "out.bin").write_bytes(b"old")
    monkeypatch.setattr(probes, "measure", fail)
    with pytest.raises(ExportError, match="broken"):
        export(source, tmp_path / "out.bin", overwrite=True)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_existing_targets_are_kept_without_overwrite(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.bin"
    out.write_bytes(b"old")
    for to in ("llamac", "llama2c", "hf"):
        with pytest.raises(ExportError, match=r"out\.bin exists"):
            export(source, out, to=to)
    assert out.read_bytes() == b"old"
    export(source, out, overwrite=True)
    with llamac.load(out) as model:
        assert model.config["dim"] == 48
    export(out, out, dtype="bf16", overwrite=True)  # source and target can be the same file
    with llamac.load(out) as model:
        assert model.metadata["dtype"] == "bf16"


@pytest.mark.parametrize("to", ["hf", "llama2c"])
@pytest.mark.parametrize("given", ["llamac", "transformers", None])
def test_probe_source_is_refused_for_formats_without_probes(
    to: str, given: str | None, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(ArgumentError, match=f"probe_source is for flat files only: to='{to}' writes no probes"):
        export(source, tmp_path / "out", to=to, probe_source=given)
    assert list(tmp_path.iterdir()) == []


def test_overwrite_is_refused_for_directories(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"overwrite \(--force\) replaces files only: to='hf' needs a directory"):
        export(source, tmp_path / "out", to="hf", overwrite=True)
    assert list(tmp_path.iterdir()) == []


def test_folders_are_never_replaced(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for to in ("llamac", "llama2c"):
        with pytest.raises(ExportError, match="is a directory"):
            export(source, folder, to=to, overwrite=True)
    (folder / "precious").touch()
    with pytest.raises(ExportError, match="not an empty directory"):
        export(source, folder, to="hf")
    (folder / "precious").unlink()
    export(source, folder, to="hf")
    assert (folder / "model.safetensors").is_file()
    with pytest.raises(ExportError, match=r"the folder .*nowhere does not exist"):
        export(source, tmp_path / "nowhere" / "out.bin")


def test_an_empty_folder_is_filled_not_replaced(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be a mount point, or a shell's working directory, which cannot be replaced."""
    (tmp_path / "far").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("far")
    for here, out in ((tmp_path, Path("link")), (tmp_path / "far", Path("."))):
        before = (tmp_path / "far").stat()
        monkeypatch.chdir(here)
        export(source, out, to="hf")
        after = (tmp_path / "far").stat()
        assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
        assert (tmp_path / "link").is_symlink()
        names = {path.name for path in (tmp_path / "far").iterdir()}
        assert {"config.json", "model.safetensors"} < names
        assert not any(name.endswith(".partial") for name in names)
        for name in names:
            (tmp_path / "far" / name).unlink()


def test_a_folder_that_cannot_be_filled_stays_empty(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    rename = os.rename

    def breaking(path: Path, target: Path) -> None:
        if target.name == "model.safetensors":
            raise PermissionError(13, "Permission denied", str(path))
        rename(path, target)

    monkeypatch.setattr(os, "rename", breaking)
    with pytest.raises(PermissionError) as caught:
        export(source, folder, to="hf")
    assert caught.value.filename == str(folder)
    assert list(folder.iterdir()) == []


def test_folders_that_were_moved_are_removed_when_a_move_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def breaking(path: Path, target: Path) -> None:
        if target.name == "second":
            raise PermissionError(13, "Permission denied", str(path))
        rename(path, target)

    def fill() -> None:
        with atomic_folder(tmp_path) as folder:
            (folder / "first").mkdir()
            (folder / "first" / "file").touch()
            (folder / "second").touch()

    monkeypatch.setattr(os, "rename", breaking)
    with pytest.raises(PermissionError, match="Permission denied"):
        fill()
    assert list(tmp_path.iterdir()) == []


def test_system_errors_name_the_target(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path), None, str(target))

    monkeypatch.setattr(os, "replace", broken)
    for to in ("llamac", "hf"):
        with pytest.raises(PermissionError) as caught:
            export(source, tmp_path / "out", to=to)
        assert caught.value.filename == str(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_new_files_have_default_permissions(source: Path, tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    export(source, tmp_path / "out.bin", probe_source=None)
    assert (tmp_path / "out.bin").stat().st_mode == (tmp_path / "plain").stat().st_mode
    (tmp_path / "folder").mkdir()
    export(source, tmp_path / "out", to="hf")
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "folder").stat().st_mode


def test_a_replaced_file_keeps_its_permissions(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.bin"
    out.touch()
    for mode in (0o600, 0o664):
        out.chmod(mode)
        export(source, out, probe_source=None, overwrite=True)
        assert stat.S_IMODE(out.stat().st_mode) == mode


@pytest.mark.parametrize("to", ["llamac", "llama2c"])
def test_only_regular_files_are_replaced(source: Path, tmp_path: Path, to: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    for target in (tmp_path / "pipe", Path("/dev/null")):
        for overwrite in (False, True):
            with pytest.raises(ExportError, match=f"{target.name} is not a regular file"):
                export(source, target, to=to, overwrite=overwrite)
    assert (tmp_path / "pipe").is_fifo()
    assert Path("/dev/null").is_char_device()


def test_a_symbolic_link_stays_a_link(source: Path, tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to(Path("far") / "model.bin")
    export(source, tmp_path / "link", probe_source=None)  # the link's target does not exist yet
    first = (tmp_path / "far" / "model.bin").read_bytes()
    with pytest.raises(ExportError, match="link exists"):
        export(source, tmp_path / "link", probe_source=None)
    export(source, tmp_path / "link", name="other", probe_source=None, overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert first != (tmp_path / "far" / "model.bin").read_bytes()
    assert [path.name for path in (tmp_path / "far").iterdir()] == ["model.bin"]


# ---- blocks


class Disk(io.BytesIO):
    """Records the offset and length of each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[tuple[int, int]] = []

    def write(self, data: Buffer) -> int:
        self.writes.append((self.tell(), len(memoryview(data))))
        return super().write(data)


def test_data_is_written_in_whole_blocks() -> None:
    """The page cache keeps aligned blocks as they were written, and maps each at once."""
    numbers = np.random.default_rng(1)
    pieces = [numbers.bytes(size) for size in (1, BLOCK_BYTES - 3, 5, 3 * BLOCK_BYTES, 70_000, 1)]
    disk = Disk()
    stream = DataStream(disk, 1_000)
    for piece in pieces:
        stream.skip_to(stream.offset + 17)
        stream.write(piece)
    stream.flush()
    assert disk.getvalue() == bytes(1_000) + b"".join(bytes(17) + piece for piece in pieces)
    first, *whole, last = disk.writes
    assert sum(first) == BLOCK_BYTES
    assert len(whole) == 3
    assert all(at % BLOCK_BYTES == 0 and size == BLOCK_BYTES for at, size in whole)
    assert last[0] % BLOCK_BYTES == 0
