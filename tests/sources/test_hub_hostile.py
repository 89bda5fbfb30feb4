"""A hostile server in place of the hub: it must not choose file names, fill the disk, or cause raw exceptions."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commands import Command
from hub_server import Hub, commit_of
from llamac.errors import HubError
from llamac.format import private_files
from llamac.sources import hub_download
from opened_sources import logits

pytest.importorskip("huggingface_hub", reason="huggingface_hub comes with tokenizers")

ESCAPES = ("../../../../evil", "../../evil", "..", "x/../../../../evil")
NOT_HASHES = (*ESCAPES, "main", "", "a" * 39, "A" * 40, "a" * 41, f"{'a' * 40}/x", "a" * 64 + "/../../evil")


@pytest.fixture(autouse=True)
def nothing_escapes(tmp_path: Path, hub_cache: Path, cache_folder: Path) -> Iterator[None]:
    """No test may create anything outside the two caches."""
    yield
    assert set(tmp_path.iterdir()) <= {hub_cache, cache_folder}
    assert not list(tmp_path.rglob("*evil*"))
    assert not Path("/tmp/llamac-evil").exists()


# ---- file names


@pytest.mark.parametrize("sha", [*NOT_HASHES, "/tmp/llamac-evil", None, 5, [], f"{'a' * 40}\n"])
def test_the_commit_in_the_listing_must_be_a_hash(sha: object, server: Hub, hub_cache: Path) -> None:
    server.info["sha"] = sha
    with pytest.raises(HubError, match=r"does not answer like the Hugging Face Hub: .* is not the hash of revision"):
        logits("hf:org/name")
    assert not hub_cache.exists()


def test_the_commit_in_the_listing_must_be_the_requested_one(server: Hub) -> None:
    commit = server.commit("org/name")
    server.info["sha"] = commit_of("another")
    with pytest.raises(HubError, match=f"is not the hash of revision '{commit}'"):
        logits(f"hf:org/name@{commit}")


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("value", [ESCAPES[0], "/tmp/llamac-evil", "a" * 39, f"{'a' * 64}/../../evil"])
@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("config.json", "X-Repo-Commit"),
        ("config.json", "ETag"),
        ("config.json", "X-Linked-ETag"),
        ("model.safetensors", "X-Repo-Commit"),
        ("model.safetensors", "X-Linked-ETag"),
    ],
)
def test_headers_that_name_files_must_be_hashes(
    name: str, header: str, value: str, first: int, server: Hub, expected: bytes, hub_cache: Path
) -> None:
    """The server may answer llamac and the client differently. Each sends one request."""
    server.headers = lambda file, count: {header: value} if file == name and count >= first else {}
    if first < 2:
        with pytest.raises(HubError):
            logits("hf:org/name")
    else:
        assert logits("hf:org/name") == expected
    assert all(path.resolve().is_relative_to(hub_cache) for path in hub_cache.rglob("*"))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_of_another_commit_is_refused(name: str, server: Hub) -> None:
    server.headers = lambda file, count: {"X-Repo-Commit": commit_of("another")} if file == name else {}
    with pytest.raises(HubError, match=f"the commit of {name} is '{commit_of('another')}', not "):
        logits("hf:org/name")


def test_xet_cannot_be_offered_after_the_first_answer(server: Hub) -> None:
    xet = {"X-Xet-Hash": "a" * 64, "X-Xet-Refresh-Route": "http://127.0.0.1:9"}
    server.headers = lambda file, count: xet if count == 1 else {}
    with pytest.raises(HubError, match="changed while it was downloaded"):
        logits("hf:org/name")


@pytest.mark.parametrize("first", [0, 1])
def test_a_missing_file_cannot_name_a_folder(first: int, server: Hub) -> None:
    """The client records a missing file under the name of the commit."""
    server.info["siblings"] = [{"rfilename": "config.json", "size": 9}, {"rfilename": "model.safetensors", "size": 9}]
    config = server.repos["org/name"].pop("config.json")
    server.headers = lambda file, count: {"X-Repo-Commit": ESCAPES[0]} if count >= first else {}
    with pytest.raises(HubError):
        logits("hf:org/name")
    server.repos["org/name"]["config.json"] = config


# ---- sizes


def endless(sent: list[int], stop: int = 1 << 29) -> Iterator[bytes]:
    """Far more bytes than announced, but not enough to do harm if nothing stops them."""
    while sum(sent) < stop:
        sent.append(1 << 20)
        yield bytes(1 << 20)


def test_a_small_file_cannot_exceed_its_announced_size(server: Hub, hub_cache: Path) -> None:
    sent: list[int] = []
    server.bodies["config.json"] = lambda: endless(sent)
    with pytest.raises(HubError, match=r"config\.json is longer than the announced \d+ bytes"):
        logits("hf:org/name")
    assert sum(sent) < 1 << 26
    assert max((path.stat().st_size for path in hub_cache.rglob("*") if path.is_file()), default=0) < 1 << 20


def test_a_large_file_cannot_exceed_its_announced_size(server: Hub, hub_cache: Path) -> None:
    sent: list[int] = []
    server.bodies["model.safetensors"] = lambda: endless(sent)
    with pytest.raises(HubError, match=r"model\.safetensors is longer than the announced \d+ bytes"):
        logits("hf:org/name")
    assert sum(sent) < 1 << 26
    assert not list(hub_cache.rglob("*.incomplete"))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("size", [-1, "100", 1.5, True, [1], 2**70])
def test_announced_sizes_must_be_integers(name: str, size: object, server: Hub) -> None:
    server.info["siblings"] = [
        {"rfilename": file, "size": size if file == name else len(data)}
        for file, data in server.repos["org/name"].items()
    ]
    with pytest.raises(HubError, match=r"the size of |two sizes for |needs .* GB more|at most 268435456 are read"):
        logits("hf:org/name")


@pytest.mark.parametrize("size", ["0", "100", "2900000000", "x", "-5"])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_announced_sizes_must_agree(name: str, first: int, size: str, server: Hub) -> None:
    header = "Content-Length" if name == "config.json" else "X-Linked-Size"
    server.headers = lambda file, count: {header: size} if file == name and count >= first else {}
    with pytest.raises(HubError):
        logits("hf:org/name")


def test_weights_need_an_announced_size(server: Hub) -> None:
    server.info["siblings"] = [{"rfilename": file} for file in server.repos["org/name"]]
    server.headers = lambda file, count: {"X-Linked-Size": "unknown"} if file == "model.safetensors" else {}
    with pytest.raises(HubError, match=r"does not announce the size of model\.safetensors"):
        logits("hf:org/name")


def test_files_that_are_no_weights_have_a_limit(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_download, "MAX_CONFIGURATION_BYTES", 100)
    with pytest.raises(HubError, match=r"hf:org/name: .*\.json has \d+ bytes, at most 100 are read"):
        logits("hf:org/name")


def test_a_file_larger_than_the_free_space_is_not_requested(server: Hub) -> None:
    size = 10**17
    server.info["siblings"] = [
        {"rfilename": file, "size": size if file == "model.safetensors" else len(data)}
        for file, data in server.repos["org/name"].items()
    ]
    server.headers = lambda file, count: {"X-Linked-Size": str(size)} if file == "model.safetensors" else {}
    with pytest.raises(HubError, match=r"model\.safetensors needs 100000000\.0 GB more, the disk of"):
        logits("hf:org/name")
    assert "model.safetensors" not in server.requested("GET")


# ---- malformed answers


@pytest.mark.parametrize(
    "info",
    [
        {"lastModified": "yesterday"},
        {"siblings": 5},
        {"siblings": [5]},
        {"siblings": [{"name": "config.json"}]},
        {"siblings": [{"rfilename": 5}]},
        {"siblings": [{"rfilename": None}]},
        {"siblings": [{"rfilename": ["config.json"]}]},
        {"siblings": [{"rfilename": "config.json", "lfs": 5}]},
    ],
    ids=str,
)
def test_a_malformed_listing_is_a_hub_error(info: dict[str, Any], server: Hub, llamac_command: Command) -> None:
    server.info = info
    with pytest.raises(HubError):
        logits("hf:org/name")
    llamac_command("inspect", "hf:org/name").fails_with("hf:org/name")


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"[]", b"5", b"[" * 100_000, b"\xff"],
    ids=["empty", "html", "list", "number", "deep nesting", "not UTF-8"],
)
def test_a_listing_that_is_not_json_is_a_hub_error(body: bytes, server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hub_server.json.dumps", lambda _: body.decode("latin-1"))
    monkeypatch.setattr(Hub, "commit", lambda hub, repo: commit_of(repo))
    with pytest.raises(HubError):
        logits("hf:org/name")


@pytest.mark.parametrize(
    "headers",
    [
        {"Location": "http://[bad"},
        {"Location": "ftp://example.invalid/x"},
        {"Location": "http://user:pass@:99999/"},
        {"Location": ""},
        {"Link": "<<>>;;rel"},
        {"RateLimit": "x;y", "Retry-After": "never"},
    ],
    ids=str,
)
def test_malformed_headers_raise_no_other_error(headers: dict[str, str], server: Hub, expected: bytes) -> None:
    server.headers = lambda file, count: headers if file == "model.safetensors" else {}
    with contextlib.suppress(HubError):
        assert logits("hf:org/name") == expected


def test_a_server_that_resends_one_byte_forever_is_an_error(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_download, "ATTEMPTS", 3)
    server.breaks, server.ignores_ranges = [1] * 1000, True
    with pytest.raises(HubError, match="the download was interrupted"):
        logits("hf:org/name")
    assert len(server.breaks) > 900


# ---- the client's cache, in a folder that others can write to


def interrupted_download(server: Hub, hub_cache: Path) -> Path:
    server.breaks = [100_000] + [0] * 100
    with pytest.raises(HubError, match="the download was interrupted"):
        logits("hf:org/name")
    server.breaks.clear()
    (partial,) = hub_cache.rglob("*.incomplete")
    return partial


def test_a_download_that_waits_for_space_keeps_what_it_has(
    server: Hub, expected: bytes, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = interrupted_download(server, hub_cache)
    begun = partial.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1))
        with pytest.raises(HubError, match=r"model\.safetensors needs .* more, the disk of"):
            logits("hf:org/name")
    assert partial.read_bytes() == begun
    assert logits("hf:org/name") == expected


@pytest.mark.parametrize(
    "plant",
    [Path.symlink_to, Path.hardlink_to, lambda path, _: os.mkfifo(path)],
    ids=["symbolic link", "hard link", "pipe"],
)
def test_a_link_in_place_of_a_partial_download_is_not_written_through(
    plant: Callable[[Path, Path], None], server: Hub, expected: bytes, hub_cache: Path
) -> None:
    partial, victim = interrupted_download(server, hub_cache), hub_cache / "victim"
    victim.write_bytes(b"private")
    partial.unlink()
    plant(partial, victim)
    assert logits("hf:org/name") == expected
    assert victim.read_bytes() == b"private"


def test_names_of_partial_downloads_are_unpredictable(server: Hub, hub_cache: Path) -> None:
    names = set()
    for _ in range(2):
        partial = interrupted_download(server, hub_cache)
        names.add(partial.name)
        partial.unlink()
    assert len(names) == 2


def test_a_tampered_partial_download_is_detected(server: Hub, expected: bytes, hub_cache: Path) -> None:
    partial = interrupted_download(server, hub_cache)
    partial.write_bytes(bytes(partial.stat().st_size))
    with pytest.raises(HubError, match=r"checksum mismatch in model\.safetensors"):
        logits("hf:org/name")
    assert logits("hf:org/name") == expected


def test_a_partial_download_longer_than_the_file_starts_over(server: Hub, expected: bytes, hub_cache: Path) -> None:
    partial = interrupted_download(server, hub_cache)
    partial.write_bytes(bytes(len(server.repos["org/name"]["model.safetensors"]) + 1))
    assert logits("hf:org/name") == expected


def test_a_link_in_place_of_a_lock_is_not_followed(server: Hub, hub_cache: Path) -> None:
    interrupted_download(server, hub_cache)
    (lock,) = hub_cache.rglob("*.llamac.lock")
    lock.unlink()
    lock.symlink_to(hub_cache / "evil-target")
    with pytest.raises(HubError, match=r"client's cache|interrupted"):
        logits("hf:org/name")
    assert not (hub_cache / "evil-target").exists()
    lock.unlink()


def test_a_pipe_in_place_of_a_ref_does_not_block(server: Hub, expected: bytes, hub_cache: Path) -> None:
    assert logits("hf:org/name") == expected
    ref = hub_cache / "models--org--name" / "refs" / "main"
    ref.unlink()
    os.mkfifo(ref)
    server.status = 503
    with pytest.raises(HubError, match="revision 'main' is not in"):
        logits("hf:org/name")


def test_a_ref_that_is_not_a_hash_is_not_followed(server: Hub, expected: bytes, hub_cache: Path) -> None:
    assert logits("hf:org/name") == expected
    folder = hub_cache / "models--org--name"
    shutil.copytree(folder / "snapshots" / server.commit("org/name"), folder / "planted")
    server.status = 503
    assert logits("hf:org/name") == expected
    for target in ("../planted", str(folder / "planted")):
        (folder / "refs" / "main").write_text(target)
        with pytest.raises(HubError, match="revision 'main' is not in"):
            logits("hf:org/name")


# ---- without locks


def test_two_downloads_without_locks_do_not_share_a_file(
    server: Hub, expected: bytes, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_files, "try_lock", lambda descriptor: None)
    data, both = server.repos["org/name"]["model.safetensors"], threading.Barrier(2, timeout=60)

    def body() -> Iterator[bytes]:
        for start in range(0, len(data), 50_000):
            both.wait()  # the two connections send their pieces alternately
            yield data[start : start + 50_000]

    server.bodies["model.safetensors"] = body
    with ThreadPoolExecutor(2) as pool:
        found = [done.result() for done in [pool.submit(logits, "hf:org/name", cache_dir=False) for _ in range(2)]]
    assert found == [expected] * 2
    assert not list(hub_cache.rglob("*.incomplete"))


def test_a_download_without_locks_leaves_no_partial_file(
    server: Hub, expected: bytes, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_files, "try_lock", lambda descriptor: None)
    server.breaks = [100_000] + [0] * 100
    with pytest.raises(HubError, match="the download was interrupted"):
        logits("hf:org/name")
    assert not list(hub_cache.rglob("*.incomplete"))
    server.breaks.clear()
    server.requests.clear()
    assert logits("hf:org/name") == expected
    assert server.ranges() == []
