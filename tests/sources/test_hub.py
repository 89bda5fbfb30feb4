"""Models on the Hugging Face Hub: names, choice of files, downloads and errors, with the real client."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import llamac
from commands import Command
from golden.cases import CASES
from golden.tiny_checkpoints import tensors
from hub_server import Hub, commit_of
from llamac.errors import ArgumentError, HubError, UnsupportedError
from llamac.export.hf.named_scales import HF_QUANT_CONFIG
from llamac.sources import hub, hub_client, hub_download
from opened_sources import logits
from processes import TIMEOUT, output_of
from torch_samples import write_torch

client = pytest.importorskip("huggingface_hub", reason="huggingface_hub comes with tokenizers")
import huggingface_hub.constants as constants  # noqa: E402

LLAMA = CASES["llama"].config
IDS = [1, 5, 9]
LOGITS = """
    import llamac
    with llamac.load("hf:org/name") as model:
        print(model.logits([1, 5, 9]).tobytes().hex(), end="")
"""
NEEDED = ["config.json", "model.safetensors", "tokenizer.json"]


def blobs(hub_cache: Path) -> list[Path]:
    """The files in the client's cache, without lock files."""
    folder = hub_cache / "models--org--name" / "blobs"
    return sorted(path for path in folder.iterdir() if path.suffix != ".lock")


# ---- names


@pytest.mark.parametrize(
    ("text", "expected_parts"),
    [
        ("hf:org/name", ("org/name", "main", None, None)),
        ("hf:Org-1/na_me.2@v1.0", ("Org-1/na_me.2", "v1.0", None, None)),
        ("hf:_org/_name_", ("_org/_name_", "main", None, None)),
        ("hf:org/name@refs/pr/1", ("org/name", "refs/pr/1", None, None)),
        ("hf:org/name:Q4_K_M", ("org/name", "main", None, "Q4_K_M")),
        ("hf:org/name:q8_0@main", ("org/name", "main", None, "q8_0")),
        ("hf:org/name/a b/model.gguf", ("org/name", "main", "a b/model.gguf", None)),
        ("hf:org/name/model.gguf@0123", ("org/name", "0123", "model.gguf", None)),
    ],
)
def test_hub_names_are_parsed(text: str, expected_parts: tuple[Any, ...]) -> None:
    assert tuple(hub.parse(text)) == expected_parts


@pytest.mark.parametrize(
    "text",
    [
        *("hf:", "hf:name", "hf:/name", "hf:org/", "hf://org/name", "hf:org//name", "hf: org/name", "hf:org/name@"),
        *("hf:org/name:", "hf:../name", "hf:org/..", "hf:org/na..me", "hf:.org/name", "hf:org/name.", "hf:org/-name"),
        "hf:org/name-",
        *("hf:org/na--me", "hf:org/name@../../x", "hf:org/name@a//b", "hf:org/name/../x.gguf", "hf:org/name//x.gguf"),
        *("hf:org/name/config.json", "hf:org/name/model.safetensors", "hf:org/name/x.gguf:Q4", "hf:org/name@a:b"),
        *("hf:org\\name", "hf:org/name@/x", "hf:org/name@x/", "hf:org/n\nme", "hf:örg/name", f"hf:org/{'n' * 200}"),
    ],
)
def test_malformed_hub_names_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_client, "load_client", lambda: pytest.fail("the client was called"))
    with pytest.raises(ArgumentError, match=r"expected hf:ORG/NAME\[@REVISION\]|only a GGUF file can be selected"):
        llamac.load(text)


def test_a_missing_client_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnsupportedError, match="need huggingface_hub: pip install huggingface_hub"):
        llamac.load("hf:org/name")


def test_an_old_client_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    oldest = ".".join(map(str, hub_client.OLDEST_CLIENT))
    for version in ("0.34.4", "1.2.9", "1.2.0rc1"):
        monkeypatch.setattr(client, "__version__", version)
        with pytest.raises(UnsupportedError, match=rf"huggingface_hub {version} is too old.*{oldest} or newer: pip"):
            llamac.load("hf:org/name")


# ---- choice of files

PARTS = [f"big-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
GGUFS = ["a-Q4_K_M.gguf", "a-Q4_K_S.gguf", "sub/a.q6_k.gguf", *PARTS, "mmproj-f16.gguf", "README.md"]
FULL = [
    *("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json"),
    HF_QUANT_CONFIG,
]


def chosen(name: str, files: list[str], index: dict[str, str] | None = None) -> list[str]:
    return hub.choose(hub.parse(name), files, lambda _: json.dumps({"weight_map": index}).encode())


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("hf:o/n:Q4_K_M", ["a-Q4_K_M.gguf"]),
        ("hf:o/n:q4_k_s", ["a-Q4_K_S.gguf"]),
        ("hf:o/n:Q6_K", ["sub/a.q6_k.gguf"]),
        ("hf:o/n:Q8_0", PARTS),
        (f"hf:o/n/{PARTS[1]}", PARTS),
        ("hf:o/n/big-Q8_0.gguf", PARTS),  # the name without the part numbers
        ("hf:o/n/sub/a.q6_k.gguf", ["sub/a.q6_k.gguf"]),
    ],
)
def test_a_gguf_file_is_chosen_by_type_or_name(name: str, files: list[str]) -> None:
    assert chosen(name, GGUFS) == files


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("hf:o/n/big-Q8_0.gguf", ["big-Q8_0.gguf"]),
        (f"hf:o/n/{PARTS[0]}", PARTS),
        ("hf:o/n/big-Q8_0-00002-of-00003.gguf", ["big-Q8_0-00002-of-00003.gguf"]),
    ],
)
def test_an_exact_name_selects_among_gguf_models_of_the_same_name(name: str, files: list[str]) -> None:
    names = [*GGUFS, "big-Q8_0.gguf", "big-Q8_0-00002-of-00003.gguf"]
    assert chosen(name, names) == files
    several = f"3 GGUF files for 'Q8_0'; it has {PARTS[0]}, big-Q8_0-00002-of-00003.gguf, big-Q8_0.gguf$"
    with pytest.raises(HubError, match=several):
        chosen("hf:o/n:Q8_0", names)


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("hf:o/n", GGUFS, "several models.*a-Q4_K_M.gguf, a-Q4_K_S.gguf, big-Q8_0.gguf, sub/a.q6_k.gguf"),
        ("hf:o/n:Q4_K", GGUFS, "no GGUF file for 'Q4_K'; it has a-Q4_K_M.gguf, "),
        ("hf:o/n:a", GGUFS, "3 GGUF files for 'a'; it has a-Q4_K_M.gguf, a-Q4_K_S.gguf, sub/a.q6_k.gguf$"),
        ("hf:o/n/b.gguf", GGUFS, "has no file b.gguf; it has a-Q4_K_M.gguf, "),
        ("hf:o/n", ["README.md", "x.onnx"], "has no model: .*; it has README.md, x.onnx"),
        ("hf:o/n", [], "has no model: .*it has no such file"),
        ("hf:o/n", ["model.safetensors"], "has no model"),
        (
            "hf:o/n",
            ["config.json", "pytorch_model.bin", "other.safetensors"],
            r"has no model: pytorch_model\.bin is not read beside safetensors files \(other\.safetensors\)",
        ),
        ("hf:o/n", ["config.json", "model.safetensors.index.json"], "names missing files: x.safetensors"),
    ],
)
def test_an_ambiguous_or_empty_choice_is_an_error(name: str, files: list[str], message: str) -> None:
    with pytest.raises(HubError, match=message):
        chosen(name, files, {"w": "x.safetensors"})


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"weight_map": 1}', b'{"weight_map": {"a": ["b"]}}', b"[" * 9999]
)
def test_a_broken_index_is_an_error(content: bytes) -> None:
    with pytest.raises(HubError, match="is not an index of weights"):
        hub.choose(hub.parse("hf:o/n"), ["config.json", "model.safetensors.index.json"], lambda name: content)


def test_only_needed_files_are_chosen() -> None:
    others = ["README.md", "model.onnx", "pytorch_model.bin", "consolidated.safetensors", "original/params.json"]
    templates = ["additional_chat_templates/tool.jinja", "chat_template.jinja"]
    files = [*FULL, *templates, *others, "model.safetensors"]
    assert sorted(chosen("hf:o/n", files)) == sorted([*FULL, *templates, "model.safetensors"])
    shards = {"a": "s-2.safetensors", "b": "s-1.safetensors", "c": "s-2.safetensors"}
    files = [*FULL, *others, "model.safetensors.index.json", *shards.values()]
    assert chosen("hf:o/n", files, shards)[-3:] == [
        "model.safetensors.index.json",
        "s-1.safetensors",
        "s-2.safetensors",
    ]
    assert chosen("hf:o/n", ["config.json", "pytorch_model.bin"]) == ["config.json", "pytorch_model.bin"]
    others = ["adapter_model.safetensors", "2_Dense/model.safetensors", "onnx/x.safetensors"]
    assert chosen("hf:o/n", ["config.json", "pytorch_model.bin", *others])[-1] == "pytorch_model.bin"
    assert chosen("hf:o/n", ["config.json", "model.safetensors", "x.gguf"])[-1] == "model.safetensors"
    assert chosen("hf:o/n", ["config.json", "x.gguf"]) == ["x.gguf"]


# ---- downloads


def test_a_model_is_downloaded_once(server: Hub, expected: bytes, cache_folder: Path) -> None:
    phases: list[str] = []
    with llamac.load("hf:org/name", progress=lambda phase, done, total: phases.append(phase)) as model:
        assert model.logits(IDS).tobytes() == expected
        assert model.name == "org/name"
    assert sorted(set(server.requested("GET"))) == NEEDED
    assert phases[0] == "downloading"
    assert "writing" in phases
    server.requests.clear()
    phases.clear()
    assert logits("hf:org/name") == expected
    assert server.requested("GET") == []
    note = json.loads(next((cache_folder / "models").glob("*.json")).read_text())
    assert note["source"] == "hf:org/name"


def test_a_branch_that_moved_is_downloaded_again(server: Hub, expected: bytes) -> None:
    assert logits("hf:org/name") == expected
    before = server.commit("org/name")
    config = json.loads(server.repos["org/name"]["config.json"])
    server.repos["org/name"]["config.json"] = json.dumps({**config, "rope_theta": 77.0}).encode()
    assert logits("hf:org/name") != expected
    assert server.requested("GET").count("model.safetensors") == 2  # one request to the hub, one to its store
    assert before != server.commit("org/name")
    server.status = 503
    assert logits(f"hf:org/name@{before}") == expected


@pytest.mark.parametrize("revision", ["v1.0", "refs/pr/1"])
def test_tags_and_other_refs_are_revisions(revision: str, server: Hub, expected: bytes) -> None:
    assert logits(f"hf:org/name@{revision}") == expected
    server.status = 503
    assert logits(f"hf:org/name@{revision}") == expected
    with pytest.raises(HubError, match=r"cannot be reached.*revision 'main' is not in"):
        logits("hf:org/name")


def test_sharded_weights_are_downloaded(server: Hub, expected: bytes) -> None:
    files = server.repos["org/name"]
    data = files.pop("model.safetensors")
    files["model-00001-of-00001.safetensors"] = data
    index = {"weight_map": dict.fromkeys(tensors(LLAMA), "model-00001-of-00001.safetensors")}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    assert logits("hf:org/name") == expected


def test_pickles_are_downloaded_only_without_alternative(server: Hub, expected: bytes, tmp_path: Path) -> None:
    files = server.repos["org/name"]
    del files["model.safetensors"]
    write_torch(tmp_path / "x.bin", tensors(LLAMA))
    files["pytorch_model.bin"] = (tmp_path / "x.bin").read_bytes()
    assert logits("hf:org/name") == expected
    files["adapter.safetensors"] = b"x"
    with pytest.raises(HubError, match="has no model"):
        logits("hf:org/name")


@pytest.mark.parametrize("name", ["../../../evil.gguf", "/tmp/evil.gguf", "a/../../evil.gguf", "a\\..\\evil.gguf"])
def test_file_names_that_leave_the_cache_are_never_requested(name: str, server: Hub, tmp_path: Path) -> None:
    server.repos["org/name"] = {name: b"GGUF"}
    with pytest.raises(HubError, match="has no model"):
        logits("hf:org/name")
    assert not any("/resolve/" in path for _, path, _ in server.requests)
    assert not list(tmp_path.rglob("evil*"))


def test_a_gated_model_needs_a_token_which_the_store_never_receives(
    server: Hub, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.gated.add("org/name")
    with pytest.raises(
        HubError, match=r"hf:org/name is gated: accept its conditions at http.*/org/name and set HF_TOKEN"
    ):
        logits("hf:org/name")
    monkeypatch.setenv("HF_TOKEN", server.token)
    assert logits("hf:org/name") == expected
    assert server.tokens == {None}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf:org/other", "hf:org/other does not exist at .*or it is private"),
        ("hf:org/name@nothing", "hf:org/name has no revision 'nothing'"),
        (f"hf:org/name@{commit_of('x')}", "hf:org/name has no revision '"),
        ("hf:org/name:Q4_0", "hf:org/name has no GGUF file for 'Q4_0'; it has no such file$"),
    ],
)
def test_missing_repositories_and_revisions_are_reported(
    name: str, message: str, server: Hub, llamac_command: Command
) -> None:
    with pytest.raises(HubError, match=message):
        logits(name)
    done = llamac_command("run", name, "-i", "a")
    done.fails_with("hf:org/")
    assert re.search(message, done.err)


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_token_is_reported(status: int, server: Hub) -> None:
    server.status = status
    with pytest.raises(HubError, match=rf"hf:org/name: .*{status} .*check your token \(HF_TOKEN"):
        logits("hf:org/name")


def test_a_full_disk_of_the_clients_cache_is_named(
    server: Hub, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", full)
    with pytest.raises(HubError, match=f"{hub_cache}, the client's cache: No space left on device"):
        logits("hf:org/name")


def test_a_mirror_without_checksums_works(server: Hub, expected: bytes) -> None:
    server.has_incomplete_checksums = True
    assert logits("hf:org/name") == expected
    assert sorted(set(server.requested("GET"))) == NEEDED


def test_export_and_inspect_take_hub_names(
    server: Hub, expected: bytes, llamac_command: Command, tmp_path: Path
) -> None:
    assert llamac_command("export", "hf:org/name", tmp_path / "out.bin").code == 0
    with llamac.load(tmp_path / "out.bin") as model:
        assert (model.logits(IDS).tobytes(), model.name) == (expected, "org/name")
    facts = json.loads(llamac_command("inspect", "hf:org/name", "--json").out)
    assert (facts["name"], facts["format"]) == ("org/name", "huggingface")


# ---- interrupted downloads


@pytest.mark.parametrize("breaks", [[0], [100_000], [1, 70_000, 0, 0, 200_000]], ids=str)
def test_an_interrupted_download_is_resumed(breaks: list[int], server: Hub, expected: bytes) -> None:
    server.breaks = list(breaks)
    assert logits("hf:org/name") == expected
    begun = [int(re.sub(r"\D", "", requested_range)) for requested_range in server.ranges()]
    assert begun == sorted(begun)
    assert (max(begun) if begun else 0) == sum(breaks)


def test_a_download_from_a_server_without_ranges_starts_over(server: Hub, expected: bytes) -> None:
    server.breaks, server.ignores_ranges = [100_000], True
    assert logits("hf:org/name") == expected


def test_a_server_that_sends_another_range_is_an_error(server: Hub, expected: bytes) -> None:
    server.breaks, server.range_shift = [100_000], 1
    with pytest.raises(HubError, match="the hub sent another range than requested"):
        logits("hf:org/name")
    server.range_shift = 0
    assert logits("hf:org/name") == expected


def test_a_server_that_stops_sending_is_an_error(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.breaks, server.ignores_ranges = [100_000] + [0] * 100, True
    monkeypatch.setattr(hub_download, "ATTEMPTS", 2)
    with pytest.raises(HubError, match="was interrupted"):
        logits("hf:org/name")


def test_two_threads_download_once(server: Hub, expected: bytes) -> None:
    with ThreadPoolExecutor(2) as pool:
        found = [done.result() for done in [pool.submit(logits, "hf:org/name") for _ in range(2)]]
    assert found == [expected] * 2
    assert [path for how, path, _ in server.requests if how == "GET" and path.startswith("/store/")] == [
        "/store/org/name/model.safetensors"
    ]


def test_a_failed_download_is_resumed_by_the_next_load(server: Hub, expected: bytes) -> None:
    server.breaks = [100_000] + [0] * 100
    with pytest.raises(HubError, match=r"the download was interrupted \(.+\); run this again to resume it"):
        logits("hf:org/name")
    server.breaks.clear()
    server.requests.clear()
    assert logits("hf:org/name") == expected
    assert set(server.ranges()) == {"bytes=100000-"}


def environment(server: Hub, hub_cache: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(hub_cache), "HF_HUB_DISABLE_TELEMETRY": "1"}


KILLED = """
import os, signal, sys
import llamac
def report(phase, done, total):
    if phase == "downloading" and done > 100000:
        os.kill(os.getpid(), signal.SIGKILL)
llamac.load("hf:org/name", progress=report)
"""


def test_a_killed_download_is_resumed(server: Hub, expected: bytes, hub_cache: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED], env={**os.environ, **environment(server, hub_cache)}, timeout=TIMEOUT
    )
    assert killed.returncode == -signal.SIGKILL
    (partial,) = (path for path in blobs(hub_cache) if path.name.endswith(".llamac.incomplete"))
    size = partial.stat().st_size
    assert size > 60_000
    server.requests.clear()
    assert logits("hf:org/name") == expected
    assert set(server.ranges()) == {f"bytes={size}-"}
    assert not [path for path in blobs(hub_cache) if path.name.endswith("incomplete")]


@pytest.mark.parametrize("has_checksums", [True, False], ids=["with checksums", "without checksums"])
def test_a_damaged_download_is_refused_and_deleted(
    has_checksums: bool, server: Hub, expected: bytes, hub_cache: Path, cache_folder: Path
) -> None:
    server.has_checksums = has_checksums
    server.damaged.add("model.safetensors")
    for _ in range(2):
        with pytest.raises(HubError, match=r"checksum mismatch in model\.safetensors; run this again"):
            logits("hf:org/name")
        assert not [path for path in blobs(hub_cache) if path.stat().st_size > 100_000]
    assert not (cache_folder / "models").exists()
    server.damaged.clear()
    assert logits("hf:org/name") == expected


def test_a_damaged_download_by_xet_is_refused_and_deleted(
    server: Hub, expected: bytes, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("hf_xet")
    sent = [server.repos["org/name"]["model.safetensors"]]
    sent.append(sent[0][:-1] + bytes([sent[0][-1] ^ 1]))

    def get(*, incomplete_path: Path, **_: object) -> None:
        incomplete_path.write_bytes(sent.pop())

    server.has_xet = True
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    monkeypatch.setattr("huggingface_hub.file_download.xet_get", get)
    with pytest.raises(HubError, match=r"checksum mismatch in model\.safetensors; run this again"):
        logits("hf:org/name")
    assert not [path for path in hub_cache.rglob("*") if path.is_file() and path.stat().st_size > 100_000]
    assert logits("hf:org/name") == expected
    assert sent == []


def test_damage_in_the_clients_cache_is_detected(server: Hub, expected: bytes, hub_cache: Path) -> None:
    assert logits("hf:org/name") == expected
    (blob,) = (path for path in blobs(hub_cache) if path.stat().st_size > 100_000)
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    for status in (0, 503):
        server.status = status
        with pytest.raises(HubError, match=rf"checksum mismatch.*delete {blob} and run this again"):
            logits("hf:org/name")


# ---- without the hub


def offline(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def unreachable(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")


def failing(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.status = 500


@pytest.mark.parametrize("how", [offline, unreachable, failing])
def test_a_downloaded_model_works_without_the_hub(
    how: Callable[[Hub, pytest.MonkeyPatch], None],
    server: Hub,
    expected: bytes,
    hub_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert logits("hf:org/name") == expected
    how(server, monkeypatch)
    assert logits("hf:org/name") == expected
    assert logits(f"hf:org/name@{server.commit('org/name')}", cache_dir=False) == expected
    with pytest.raises(
        HubError, match=r"hf:org/other: the hub cannot be reached \(.+\), and revision 'main' is not in"
    ):
        logits("hf:org/other")
    snapshot = hub_cache / "models--org--name" / "snapshots" / server.commit("org/name")
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(HubError, match=r"cannot be reached \(.+\), and the copy in .* is incomplete: .*has no model"):
        logits("hf:org/name")


def test_files_missing_from_the_clients_cache_are_downloaded(server: Hub, expected: bytes, hub_cache: Path) -> None:
    assert logits("hf:org/name") == expected
    commit = server.commit("org/name")
    for name in ("hf:org/name", f"hf:org/name@{commit}"):
        (hub_cache / "models--org--name" / "snapshots" / commit / "tokenizer.json").unlink()
        with llamac.load(name, cache_dir=False) as model:
            assert model.has_tokenizer


def test_the_clients_environment_variables_work(server: Hub, expected: bytes, hub_cache: Path) -> None:
    known = environment(server, hub_cache)
    assert output_of(LOGITS, **known) == expected.hex()
    server.requests.clear()
    assert output_of(LOGITS, **known, HF_HUB_OFFLINE="1") == expected.hex()
    assert server.requests == []


@pytest.mark.parametrize("is_disabled", [True, False], ids=["xet disabled", "xet enabled"])
def test_files_served_by_xet_are_downloaded_by_the_client(
    is_disabled: bool, server: Hub, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    download = hub_download.Downloads._download_blob

    def note(downloads: hub_download.Downloads, name: str, *others: Any) -> None:
        names.append(name)
        download(downloads, name, *others)

    def no_xet(*_: object, **__: object) -> None:
        raise RuntimeError("the protocol failed")

    server.has_xet = True
    monkeypatch.setattr(hub_download.Downloads, "_download_blob", note)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", is_disabled)
    monkeypatch.setattr("huggingface_hub.file_download.xet_get", no_xet)
    assert logits("hf:org/name") == expected
    assert names == ["model.safetensors"]
    xet_requests = [path for _, path, _ in server.requests if "xet" in path]
    assert xet_requests == []


def test_http_is_used_where_xet_fails(server: Hub, expected: bytes, hub_cache: Path) -> None:
    """For example, a firewall may allow only the hub's main host."""
    pytest.importorskip("hf_xet")
    server.has_xet = True
    assert output_of(LOGITS, **environment(server, hub_cache), HF_XET_CLIENT_RETRY_MAX_ATTEMPTS="1") == expected.hex()
    assert any("/xet-read-token/" in path for _, path, _ in server.requests)
