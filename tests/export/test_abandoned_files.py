"""Files left behind by killed exports, and files planted where an export writes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llamac.export import targets
from llamac.export.convert import export
from llamac.format import private_files
from processes import TIMEOUT

# Runs an export that kills its own process in a given phase.
KILLED = """
import os, signal, sys
from llamac.export import export
source, out, to, phase, dtype = sys.argv[1:]
def kill(now, done, total):
    if now == phase and done > 0:
        os.kill(os.getpid(), signal.SIGKILL)
options = {"dtype": dtype, "calibrate": "self"} if dtype else {}
export(source, out, to=to, progress=kill, **options)
"""


def kill_export(source: Path, out: Path, to: str, phase: str, dtype: str = "") -> None:
    command = [sys.executable, "-c", KILLED, str(source), str(out), to, phase, dtype]
    assert subprocess.run(command, timeout=TIMEOUT).returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("to", "phase", "dtype"),
    [
        ("llamac", "writing", ""),
        ("llamac", "engine logits", ""),
        ("llamac", "generating text", "q4"),
        ("hf", "writing", ""),
        ("llama2c", "writing", ""),
        ("gguf", "writing", ""),
    ],
)
def test_the_next_export_removes_the_files_of_a_killed_one(
    to: str, phase: str, dtype: str, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    kill_export(source, out, to, phase, dtype)
    assert any(path.name.endswith(".partial") for path in tmp_path.iterdir())
    export(source, out, to=to)
    assert not any(path.name.endswith(".partial") for path in tmp_path.iterdir())
    assert out.exists()


def test_an_empty_folder_can_be_used_again_after_a_killed_export(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    kill_export(source, tmp_path / "out", "hf", "writing")
    assert [path.suffix for path in (tmp_path / "out").iterdir()] == [".partial"]
    export(source, tmp_path / "out", to="hf")
    assert (tmp_path / "out" / "config.json").is_file()
    assert not any(path.suffix == ".partial" for path in (tmp_path / "out").iterdir())


def test_files_of_a_running_export_are_not_removed(tmp_path: Path) -> None:
    target = tmp_path / "out.bin"
    with targets.atomic_file(target) as file, targets.scratch_folder(target) as folder:
        targets.remove_abandoned(target)
        assert Path(file.name).exists()
        assert folder.is_dir()
        file.write(b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["out.bin"]


def test_only_leftovers_of_the_same_target_are_removed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("kept")
    kept = {"other.bin", ".out.bin.partial", ".out.bin.0123abcd.partial.bak", ".other.bin.0123abcd.partial"}
    for name in kept:
        (tmp_path / name).touch()
    (tmp_path / ".out.bin.00000000.partial").symlink_to("elsewhere")
    os.mkfifo(tmp_path / ".out.bin.11111111.partial")
    (tmp_path / ".out.bin.22222222.partial").touch()
    (tmp_path / ".out.bin.33333333.partial").mkdir()
    (tmp_path / ".out.bin.33333333.partial" / "config.json").touch()
    targets.remove_abandoned(tmp_path / "out.bin")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == kept | {"elsewhere", ".out.bin.00000000.partial", ".out.bin.11111111.partial"}


def test_leftovers_of_other_users_are_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".out.bin.22222222.partial").touch()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    targets.remove_abandoned(tmp_path / "out.bin")
    assert (tmp_path / ".out.bin.22222222.partial").exists()


def test_exports_without_locks_work_and_remove_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_files, "try_lock", lambda descriptor: None)
    (tmp_path / ".out.bin.22222222.partial").touch()
    export(source, tmp_path / "out.bin", probe_source=None)
    assert {path.name for path in tmp_path.iterdir()} == {"out.bin", ".out.bin.22222222.partial"}


# ---- planted files


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    (tmp_path / "victim").write_text("precious")
    return tmp_path / "victim"


@pytest.mark.parametrize("kind", ["symlink", "hard link", "dangling link", "fifo"])
def test_a_planted_partial_file_is_replaced_not_followed(kind: str, victim: Path, source: Path, tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    if kind == "symlink":
        partial.symlink_to(victim)
    elif kind == "hard link":
        os.link(victim, partial)
    elif kind == "dangling link":
        partial.symlink_to(tmp_path / "new")
    else:
        os.mkfifo(partial)
    export(source, tmp_path / "out.bin", probe_source=None, partial=partial)
    assert victim.read_text() == "precious"
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "out.bin").is_file()
    assert not (tmp_path / "out.bin").is_symlink()
    assert not partial.exists()


def test_a_partial_file_of_another_user_is_replaced(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = tmp_path / "out.partial"
    partial.write_bytes(b"x" * 100)
    with open(partial, "rb") as held:  # so that the new file cannot reuse the inode
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        export(source, tmp_path / "out.bin", probe_source=None, partial=partial)
        assert not os.path.samestat(os.stat(tmp_path / "out.bin"), os.fstat(held.fileno()))
