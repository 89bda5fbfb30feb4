"""Models on the Hugging Face Hub: names, which files, transfers that break, and errors, with the real client against a
server on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from vocab_samples import tokenizer_json, write_json

import llamac
from commands import Command
from golden.cases import CASES
from golden.tiny_checkpoints import tensors, write_checkpoint
from hub_server import Hub, commit_of, serving
from llamac.errors import ArgumentError, HubError, UnsupportedError
from llamac.export import export, hub
from processes import TIMEOUT, output_of
from torch_samples import write_torch

client = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed (extra: test)")
import huggingface_hub.constants as constants  # noqa: E402

LLAMA = CASES["llama"].config
IDS = [1, 5, 9]
LOGITS = """
    import llamac
    with llamac.load("hf:org/name") as model:
        print(model.logits([1, 5, 9]).tobytes().hex(), end="")
"""
NEEDED = ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory."""
    return write_json(write_checkpoint(tmp_path_factory.mktemp("source") / "hf", LLAMA), tokenizer=tokenizer_json())


@pytest.fixture
def server(folder: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the model org/name, and the client of this process with an empty cache of its own."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    others = dict.fromkeys(("README.md", "pytorch_model.bin", "model.onnx", "flax_model.msgpack"), b"no model")
    with serving(Hub({"org/name": {**files, **others}})) as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        template = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(hub, "PAUSE_S", 0.0)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield found


@pytest.fixture
def expected(folder: Path, tmp_path: Path) -> bytes:
    """The logits of the model on the hub."""
    export(folder, tmp_path / "expected.bin", probe_source=None)
    return logits(tmp_path / "expected.bin")


def logits(source: str | Path, **settings: Any) -> bytes:
    with llamac.load(source, **settings) as model:
        return model.logits(IDS).tobytes()


def blobs(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "hub" / "models--org--name" / "blobs").iterdir())


# ---- names


@pytest.mark.parametrize(
    ("text", "wanted"),
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
def test_names(text: str, wanted: tuple[Any, ...]) -> None:
    assert tuple(hub.parse(text)) == wanted


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
def test_names_that_are_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_client", lambda: pytest.fail("the client was asked"))
    with pytest.raises(ArgumentError, match=r"expected hf:ORG/NAME\[@REVISION\]|only a GGUF file can be named"):
        llamac.load(text)


def test_without_the_client_it_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'llamac\[hub\]'"):
        llamac.load("hf:org/name")


def test_a_client_that_is_too_old_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    oldest = ".".join(map(str, hub.OLDEST_CLIENT))
    assert f'hub = ["huggingface_hub>={oldest}"]' in asked
    for version in ("0.34.4", "1.2.9", "1.2.0rc1"):
        monkeypatch.setattr(client, "__version__", version)
        with pytest.raises(UnsupportedError, match=rf"huggingface_hub {version} is too old.*{oldest} or newer: pip"):
            llamac.load("hf:org/name")


# ---- which files

PARTS = [f"big-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
GGUFS = ["a-Q4_K_M.gguf", "a-Q4_K_S.gguf", "sub/a.q6_k.gguf", *PARTS, "mmproj-f16.gguf", "README.md"]
FULL = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json"]


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
        ("hf:o/n/big-Q8_0.gguf", PARTS),  # as it is called where all models are told
        ("hf:o/n/sub/a.q6_k.gguf", ["sub/a.q6_k.gguf"]),
    ],
)
def test_a_gguf_file_is_chosen(name: str, files: list[str]) -> None:
    assert chosen(name, GGUFS) == files


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("hf:o/n", GGUFS, "several models.*a-Q4_K_M.gguf, a-Q4_K_S.gguf, big-Q8_0.gguf, sub/a.q6_k.gguf"),
        ("hf:o/n:Q4_K", GGUFS, "no GGUF file for 'Q4_K'; there are a-Q4_K_M.gguf, "),
        ("hf:o/n:a", GGUFS, "3 GGUF files for 'a'; there are a-Q4_K_M.gguf, a-Q4_K_S.gguf, sub/a.q6_k.gguf$"),
        ("hf:o/n/b.gguf", GGUFS, "has no file b.gguf; there are a-Q4_K_M.gguf, "),
        ("hf:o/n", ["README.md", "x.onnx"], "holds no model: .*; there are README.md, x.onnx"),
        ("hf:o/n", [], "holds no model: .*there is no file"),
        ("hf:o/n", ["model.safetensors"], "holds no model"),
        ("hf:o/n", ["config.json", "pytorch_model.bin", "other.safetensors"], "holds no model"),
        ("hf:o/n", ["config.json", "model.safetensors.index.json"], "names files that are not there: x.safetensors"),
    ],
)
def test_what_cannot_be_chosen_is_told(name: str, files: list[str], message: str) -> None:
    with pytest.raises(HubError, match=message):
        chosen(name, files, {"w": "x.safetensors"})


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"weight_map": 1}', b'{"weight_map": {"a": ["b"]}}', b"[" * 9999]
)
def test_an_index_of_nonsense_is_told(content: bytes) -> None:
    with pytest.raises(HubError, match="is no index of weights"):
        hub.choose(hub.parse("hf:o/n"), ["config.json", "model.safetensors.index.json"], lambda name: content)


def test_only_what_is_needed_is_chosen() -> None:
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
    assert chosen("hf:o/n", ["config.json", "model.safetensors", "x.gguf"])[-1] == "model.safetensors"
    assert chosen("hf:o/n", ["config.json", "x.gguf"]) == ["x.gguf"]


# ---- bringing it


def test_a_model_comes_from_the_hub(server: Hub, expected: bytes, place: Path) -> None:
    phases: list[str] = []
    with llamac.load("hf:org/name", progress=lambda phase, done, total: phases.append(phase)) as model:
        assert model.logits(IDS).tobytes() == expected
        assert model.name == "org/name"
    assert sorted(set(server.asked("GET"))) == NEEDED
    assert phases[0] == "downloading"
    assert "writing" in phases
    server.requests.clear()
    phases.clear()
    assert logits("hf:org/name") == expected
    assert server.asked("GET") == []
    note = json.loads(next((place / "models").glob("*.json")).read_text())
    assert note["source"] == "hf:org/name"


def test_what_moves_on_is_brought_anew(server: Hub, expected: bytes) -> None:
    assert logits("hf:org/name") == expected
    before = server.commit("org/name")
    config = json.loads(server.repos["org/name"]["config.json"])
    server.repos["org/name"]["config.json"] = json.dumps({**config, "rope_theta": 77.0}).encode()
    assert logits("hf:org/name") != expected
    assert server.asked("GET").count("model.safetensors") == 2  # by the hub, and by its store, once each
    assert before != server.commit("org/name")
    server.status = 503
    assert logits(f"hf:org/name@{before}") == expected


@pytest.mark.parametrize("revision", ["v1.0", "refs/pr/1"])
def test_revisions(revision: str, server: Hub, expected: bytes) -> None:
    assert logits(f"hf:org/name@{revision}") == expected
    server.status = 503
    assert logits(f"hf:org/name@{revision}") == expected
    with pytest.raises(HubError, match=r"cannot be reached.*revision 'main' is not in"):
        logits("hf:org/name")


def test_shards(server: Hub, folder: Path, expected: bytes) -> None:
    files = server.repos["org/name"]
    data = files.pop("model.safetensors")
    files["model-00001-of-00001.safetensors"] = data
    index = {"weight_map": dict.fromkeys(tensors(LLAMA), "model-00001-of-00001.safetensors")}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    assert logits("hf:org/name") == expected


def test_pickles_come_only_where_there_is_nothing_else(server: Hub, expected: bytes, tmp_path: Path) -> None:
    files = server.repos["org/name"]
    del files["model.safetensors"]
    write_torch(tmp_path / "x.bin", tensors(LLAMA))
    files["pytorch_model.bin"] = (tmp_path / "x.bin").read_bytes()
    assert logits("hf:org/name") == expected
    files["adapter.safetensors"] = b"x"
    with pytest.raises(HubError, match="holds no model"):
        logits("hf:org/name")


@pytest.mark.parametrize("name", ["../../../evil.gguf", "/tmp/evil.gguf", "a/../../evil.gguf", "a\\..\\evil.gguf"])
def test_names_that_lead_out_of_the_cache_are_not_asked_for(name: str, server: Hub, tmp_path: Path) -> None:
    server.repos["org/name"] = {name: b"GGUF"}
    with pytest.raises(HubError, match="holds no model"):
        logits("hf:org/name")
    assert not any("/resolve/" in path for _, path, _ in server.requests)
    assert not list(tmp_path.rglob("evil*"))


def test_a_gated_model_needs_the_token_and_the_store_never_sees_it(
    server: Hub, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.gated.add("org/name")
    with pytest.raises(
        HubError, match=r"hf:org/name is gated: accept its conditions at http.*/org/name and .*HF_TOKEN"
    ):
        logits("hf:org/name")
    monkeypatch.setenv("HF_TOKEN", server.token)
    assert logits("hf:org/name") == expected
    assert server.tokens == {None}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf:org/other", "hf:org/other: there is no such repository .*or it is private"),
        ("hf:org/name@nothing", "hf:org/name has no revision 'nothing'"),
        (f"hf:org/name@{commit_of('x')}", "hf:org/name has no revision '"),
        ("hf:org/name:Q4_0", "hf:org/name has no GGUF file for 'Q4_0'; there is no file$"),
    ],
)
def test_what_the_hub_has_not(name: str, message: str, server: Hub, llamac_command: Command) -> None:
    with pytest.raises(HubError, match=message):
        logits(name)
    done = llamac_command("run", name, "-i", "a")
    done.fails_with("hf:org/")
    assert re.search(message, done.err)


@pytest.mark.parametrize("status", [401, 403])
def test_a_token_that_the_hub_does_not_take_is_told(status: int, server: Hub) -> None:
    server.status = status
    with pytest.raises(HubError, match=rf"hf:org/name: .*{status} .*does the hub know your token \(HF_TOKEN"):
        logits("hf:org/name")


def test_a_mirror_may_tell_less(server: Hub, expected: bytes) -> None:
    server.tells_half = True
    assert logits("hf:org/name") == expected
    assert sorted(set(server.asked("GET"))) == NEEDED


def test_export_and_inspect_take_it_too(server: Hub, expected: bytes, llamac_command: Command, tmp_path: Path) -> None:
    assert llamac_command("export", "hf:org/name", tmp_path / "out.bin").code == 0
    with llamac.load(tmp_path / "out.bin") as model:
        assert (model.logits(IDS).tobytes(), model.name) == (expected, "org/name")
    facts = json.loads(llamac_command("inspect", "hf:org/name", "--json").out)
    assert (facts["name"], facts["format"]) == ("org/name", "huggingface")


# ---- transfers that break


@pytest.mark.parametrize("breaks", [[0], [100_000], [1, 70_000, 0, 0, 200_000]])
def test_a_transfer_that_breaks_goes_on(breaks: list[int], server: Hub, expected: bytes) -> None:
    server.broken = list(breaks)
    assert logits("hf:org/name") == expected
    begun = [int(re.sub(r"\D", "", wanted)) for wanted in server.ranges()]
    assert begun == sorted(begun)
    assert (max(begun) if begun else 0) == sum(breaks)


def test_a_server_that_begins_anew_is_followed(server: Hub, expected: bytes) -> None:
    server.broken, server.ignores_ranges = [100_000], True
    assert logits("hf:org/name") == expected


def test_a_server_that_sends_nothing_is_given_up(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.broken, server.ignores_ranges = [100_000] + [0] * 100, True
    monkeypatch.setattr(hub, "ATTEMPTS", 2)
    with pytest.raises(HubError, match="was broken off"):
        logits("hf:org/name")


def test_of_two_that_want_it_one_downloads(server: Hub, expected: bytes) -> None:
    with ThreadPoolExecutor(2) as pool:
        found = [done.result() for done in [pool.submit(logits, "hf:org/name") for _ in range(2)]]
    assert found == [expected] * 2
    assert [path for how, path, _ in server.requests if how == "GET" and path.startswith("/store/")] == [
        "/store/org/name/model.safetensors"
    ]


def test_a_transfer_that_always_breaks_is_given_up_and_goes_on_later(server: Hub, expected: bytes) -> None:
    server.broken = [100_000] + [0] * 100
    with pytest.raises(HubError, match=r"the download was broken off \(.+\): run this again, it goes on from there"):
        logits("hf:org/name")
    server.broken.clear()
    server.requests.clear()
    assert logits("hf:org/name") == expected
    assert set(server.ranges()) == {"bytes=100000-"}


def environment(server: Hub, tmp_path: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_DISABLE_TELEMETRY": "1"}


KILLED = """
import os, signal, sys
import llamac
def tell(phase, done, total):
    if phase == "downloading" and done > 100000:
        os.kill(os.getpid(), signal.SIGKILL)
llamac.load("hf:org/name", progress=tell)
"""


def test_a_killed_download_goes_on(server: Hub, expected: bytes, tmp_path: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED], env={**os.environ, **environment(server, tmp_path)}, timeout=TIMEOUT
    )
    assert killed.returncode == -signal.SIGKILL
    (partial,) = (path for path in blobs(tmp_path) if path.name.endswith(".llamac.incomplete"))
    size = partial.stat().st_size
    assert size > 60_000
    server.requests.clear()
    assert logits("hf:org/name") == expected
    assert set(server.ranges()) == {f"bytes={size}-"}
    assert not [path for path in blobs(tmp_path) if path.name.endswith("incomplete")]


@pytest.mark.parametrize("tells", [True, False])
def test_what_comes_damaged_is_refused_and_removed(
    tells: bool, server: Hub, expected: bytes, tmp_path: Path, place: Path
) -> None:
    server.tells_checksums = tells
    server.damaged.add("model.safetensors")
    for _ in range(2):
        with pytest.raises(HubError, match=r"model\.safetensors came damaged: its SHA-256 is not the hub's"):
            logits("hf:org/name")
        assert not [path for path in blobs(tmp_path) if path.stat().st_size > 100_000]
    assert not (place / "models").exists()
    server.damaged.clear()
    assert logits("hf:org/name") == expected


def test_damage_in_the_clients_cache_is_found(server: Hub, expected: bytes, tmp_path: Path) -> None:
    assert logits("hf:org/name") == expected
    (blob,) = (path for path in blobs(tmp_path) if path.stat().st_size > 100_000)
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    for status in (0, 503):
        server.status = status
        with pytest.raises(HubError, match=rf"came damaged.*delete {blob}"):
            logits("hf:org/name")


# ---- without the hub


def offline(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def gone(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")


def out_of_order(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.status = 500


@pytest.mark.parametrize("how", [offline, gone, out_of_order])
def test_what_is_here_needs_no_hub(
    how: Callable[[Hub, pytest.MonkeyPatch], None],
    server: Hub,
    expected: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert logits("hf:org/name") == expected
    how(server, monkeypatch)
    assert logits("hf:org/name") == expected
    assert logits(f"hf:org/name@{server.commit('org/name')}", cache=False) == expected
    with pytest.raises(
        HubError, match=r"hf:org/other: the hub cannot be reached \(.+\), and revision 'main' is not in"
    ):
        logits("hf:org/other")
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / server.commit("org/name")
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(HubError, match=r"cannot be reached \(.+\), and its copy in .* is not whole: .*holds no model"):
        logits("hf:org/name")


def test_what_another_program_has_left_out_is_brought(server: Hub, expected: bytes, tmp_path: Path) -> None:
    assert logits("hf:org/name") == expected
    commit = server.commit("org/name")
    for name in ("hf:org/name", f"hf:org/name@{commit}"):
        (tmp_path / "hub" / "models--org--name" / "snapshots" / commit / "tokenizer.json").unlink()
        with llamac.load(name, cache=False) as model:
            assert model.has_tokenizer


def test_the_environment_is_the_clients(server: Hub, expected: bytes, tmp_path: Path) -> None:
    known = environment(server, tmp_path)
    assert output_of(LOGITS, **known) == expected.hex()
    server.requests.clear()
    assert output_of(LOGITS, **known, HF_HUB_OFFLINE="1") == expected.hex()
    assert server.requests == []


def test_what_comes_in_chunks_is_left_to_the_client(
    server: Hub, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's own protocol is the client's; without what speaks it the file comes as any other."""
    server.has_xet = True
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    assert logits("hf:org/name") == expected
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    downloads = hub._Downloads(client, hub.parse("hf:org/name"), hub._listed(client, hub.parse("hf:org/name")), print)
    monkeypatch.setattr(hub, "find_spec", lambda name: object())
    assert downloads._bring_large("model.safetensors", downloads._bar()) is False


def test_where_the_hubs_own_protocol_fails_http_does(server: Hub, expected: bytes, tmp_path: Path) -> None:
    """As behind a firewall that lets through what comes from the hub's own host."""
    pytest.importorskip("hf_xet")
    server.has_xet = True
    assert output_of(LOGITS, **environment(server, tmp_path), HF_XET_CLIENT_RETRY_MAX_ATTEMPTS="1") == expected.hex()
    assert any("/xet-read-token/" in path for _, path, _ in server.requests)
