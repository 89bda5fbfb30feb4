"""Model sources: how their kinds are recognized, which files belong to them, and the commands that take them."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vocab_samples import tokenizer_json, write_json

import llamac
from builders import write_llama2c_v0
from commands import GREEDY, Command
from golden.cases import CASES
from golden.tiny_checkpoints import tensors, write_checkpoint
from llamac.errors import ExportError
from llamac.export import export
from llamac.format.detect import files_of, is_foreign
from llamac.sources.cache import Cache
from llamac.sources.names import resolve
from processes import TIMEOUT, output_of
from torch_samples import write_torch

LLAMA = CASES["llama"].config

# ---- recognizing sources


def test_sources_are_recognized_by_their_content(tmp_path: Path, tiny_llama: Path, checkpoint_folder: Path) -> None:
    for number, head in enumerate((b"GGUF", b"24ka", b"PK\3\4", b"\x80\4", b"\x10" + bytes(7) + b'{"')):
        (tmp_path / str(number)).write_bytes(head + bytes(300))
        assert is_foreign(tmp_path / str(number))
    assert is_foreign(checkpoint_folder)
    assert is_foreign(checkpoint_folder / "config.json")
    assert is_foreign(write_llama2c_v0(tmp_path / "small.bin"))
    (tmp_path / "text").write_text("Once upon a time there was a text.")
    (tmp_path / "empty.safetensors").touch()
    os.mkfifo(tmp_path / "pipe")
    for path in (tiny_llama, *(tmp_path / name for name in ("text", "empty.safetensors", "pipe", "absent"))):
        assert not is_foreign(path)
    with pytest.raises(ExportError, match=r"pass the directory, .*hf$"):
        llamac.load(checkpoint_folder / "config.json")


def test_all_parts_of_a_gguf_file_belong_together(tmp_path: Path) -> None:
    names = [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for name in (*names, "m-00001-of-00002.gguf", "n-00001-of-00003.gguf", "tok.bin"):
        (tmp_path / name).write_bytes(b"GGUF")
    for name in names:
        assert files_of(tmp_path / name) == {f"part {n}": tmp_path / names[n - 1] for n in (1, 2, 3)}
    (tmp_path / "whole.gguf").write_bytes(b"GGUF")
    assert files_of(tmp_path / "whole.gguf") == {"": tmp_path / "whole.gguf"}


def test_a_folder_with_one_gguf_model_denotes_it(tmp_path: Path) -> None:
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-m.gguf", "README.md"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert resolve(tmp_path).path == tmp_path / "m-00001-of-00002.gguf"
    (tmp_path / "n.gguf").touch()
    with pytest.raises(ExportError, match=r"name one of them: m-00001-of-00002\.gguf, n\.gguf$"):
        resolve(tmp_path)
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").touch()
    assert resolve(tmp_path).path == tmp_path


def test_a_config_without_weights_does_not_hide_the_gguf_model(tmp_path: Path) -> None:
    """Repositories of GGUF files can have one."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert resolve(tmp_path).path == tmp_path
    (tmp_path / "m.Q4_K_M.gguf").write_bytes(b"GGUF")
    assert resolve(tmp_path).path == tmp_path / "m.Q4_K_M.gguf"
    assert resolve(tmp_path / "config.json").path == tmp_path / "config.json"
    (tmp_path / "pytorch_model.bin.index.json").touch()
    assert resolve(tmp_path).path == tmp_path


def test_a_whole_gguf_file_and_splits_of_the_same_name_are_different_models(tmp_path: Path) -> None:
    splits = [f"m-0000{number}-of-0000{n}.gguf" for n in (2, 3) for number in range(1, n + 1)]
    for name in ("m.gguf", *splits):
        (tmp_path / name).write_bytes(b"GGUF")
    names = r"name one of them: m-00001-of-00002\.gguf, m-00001-of-00003\.gguf, m\.gguf$"
    with pytest.raises(ExportError, match=names):
        resolve(tmp_path)
    assert resolve(tmp_path / "m.gguf").path == tmp_path / "m.gguf"


@pytest.mark.parametrize(("name", "meant"), [("n_ctx", "context"), ("treads", "threads")])
def test_an_unknown_argument_is_refused_with_a_hint(name: str, meant: str) -> None:
    options: dict[str, Any] = {name: 5}
    with pytest.raises(TypeError, match=f"unexpected argument '{name}'; did you mean '{meant}'"):
        llamac.load("stories", **options)


def test_a_missing_path_that_looks_like_a_built_in_model_gets_advice() -> None:
    for name, near in (("storys", "stories"), ("help", "helper")):
        with pytest.raises(FileNotFoundError, match=f"; did you mean the built-in model {near}\\?"):
            llamac.load(name)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("org/name", "hf:org/name"),
        ("HuggingFaceTB/SmolLM2-135M", "hf:HuggingFaceTB/SmolLM2-135M"),
        ("https://huggingface.co/org/name", "hf:org/name"),
        ("https://hf.co/org/na.me/tree/main", "hf:org/na.me"),
        ("folder/name", None),  # folder/ exists
        ("name", None),
        ("/org/name", None),
        ("a/b/c", None),
    ],
)
def test_a_missing_path_that_looks_like_a_hub_model_gets_advice(
    name: str, advice: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llamac_command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileNotFoundError):
        llamac.load(name)
    with pytest.raises(ExportError):
        export(name, tmp_path / "out.bin")
    for command in (("run", name), ("inspect", name), ("export", name, "out.bin")):
        done = llamac_command(*command)
        done.fails_with(f"{Path(name)}: No such file or directory")
        advised = re.search(r"; a model on the Hugging Face Hub is named (\S+)$", done.err.strip())
        assert (advised and advised[1]) == advice


READS = """
import sys
opened, folder = set(), sys.argv[1]
def record(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(folder):
        opened.add(arguments[0])
sys.addaudithook(record)
from pathlib import Path
from typing import Any
from llamac.export import export
from llamac.format.detect import files_of
known = {str(path) for path in files_of(Path(folder)).values()}
opened.clear()
export(folder, sys.argv[2], probe_source=None)
print(len(opened), sorted(opened - known))
"""


@pytest.mark.parametrize("kind", ["whole", "shards", "odd shards", "pickle", "vocabulary"])
def test_every_file_that_an_import_reads_is_in_the_key(kind: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "hf", LLAMA)
    write_json(source, tokenizer=tokenizer_json(), tokenizer_config={}, generation_config={}, special_tokens_map={})
    (source / "chat_template.jinja").write_text("{{ messages }}")
    if kind == "shards":
        (source / "model.safetensors").rename(source / "part-1.safetensors")
        index = {"weight_map": dict.fromkeys(tensors(LLAMA), "part-1.safetensors")}
        (source / "model.safetensors.index.json").write_text(json.dumps(index))
    elif kind == "odd shards":
        (source / "model.safetensors").rename(source / "pärt")
        text = json.dumps({"weight_map": dict.fromkeys(tensors(LLAMA), "pärt")})
        assert "\\u00e4" in text
        (source / "model.safetensors.index.json").write_text(text)
    elif kind == "pickle":
        (source / "model.safetensors").unlink()
        write_torch(source / "pytorch_model.bin", tensors(LLAMA))
    elif kind == "vocabulary":
        model = tokenizer_json()["model"]
        (source / "tokenizer.json").unlink()
        (source / "vocab.json").write_text(json.dumps(model["vocab"]))
        merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
        (source / "merges.txt").write_text("\n".join(merges))
    count, missed = output_of(READS, source, tmp_path / "out.bin").split(" ", 1)
    assert int(count) >= 5
    assert missed.strip() == "[]"


def test_gguf_files_in_a_directory_are_not_part_of_its_model(tmp_path: Path) -> None:
    """A GGUF file can be very large, so it is read for its tokenizer only if there is no other tokenizer."""
    source = write_checkpoint(tmp_path / "hf", LLAMA)
    for name in ("a.gguf", "b.gguf"):
        (source / name).write_bytes(b"GGUF")
    assert set(files_of(source)) == {"config.json", "model.safetensors", "a.gguf"}
    (source / "vocab.json").touch()
    assert "a.gguf" in files_of(source)
    for name in ("tokenizer.json", "tokenizer.model", "tokenizer.bin", "merges.txt"):
        (source / name).touch()
        assert "a.gguf" not in files_of(source)
        if name != "merges.txt":
            (source / name).unlink()


# ---- the commands


def test_run_check_and_bench_accept_any_source(
    llamac_command: Command, checkpoint_folder: Path, cache_folder: Path
) -> None:
    first = llamac_command("run", checkpoint_folder, "-i", "ab", "-n", "8", *GREEDY, "-q")
    assert (first.code, first.err) == (0, "")
    assert llamac_command("run", checkpoint_folder, "-i", "ab", "-n", "8", *GREEDY, "-q") == first
    assert len(Cache(cache_folder).entries()) == 1
    checked = llamac_command("check", checkpoint_folder)
    assert checked.code == 0
    assert [line.split()[:2] for line in checked.out.splitlines()] == [
        ["structure", "ok:"],
        ["texts", "ok:"],
        ["data", "ok:"],  # without probes, every checksum is verified
        ["probes", "none:"],
    ]
    assert len(Cache(cache_folder).entries()) == 1
    measured = llamac_command(
        "bench", checkpoint_folder, "--no-cache", "--rounds", "1", "--prompt", "4", "--decode", "1"
    )
    assert measured.code == 0
    assert len(Cache(cache_folder).entries()) == 1


def test_cache_options_of_the_commands_take_effect(
    llamac_command: Command,
    checkpoint_folder: Path,
    cache_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = ("run", checkpoint_folder, "-i", "ab", "-n", "8", *GREEDY, "-q")
    whole = llamac_command(*run, "--no-cache")
    assert not cache_folder.exists()
    assert llamac_command(*run, "--cache-dir", tmp_path / "other") == whole
    assert (len(Cache(tmp_path / "other").entries()), cache_folder.exists()) == (1, False)
    assert llamac_command(*run, "--dtype", "q8").code == 0
    assert [entry.dtype for entry in Cache(cache_folder).entries()] == ["q8"]
    (checkpoint_folder / "tokenizer.json").unlink()
    bare = llamac_command("check", checkpoint_folder)
    notice, warning = bare.err.splitlines()
    assert notice == f"llamac: converting {checkpoint_folder} once; keeping the result in {cache_folder}"
    assert re.fullmatch(r"llamac: warning: [^\n]*has no tokenizer[^\n]*", warning)


def test_inspect_converts_nothing(
    llamac_command: Command, checkpoint_folder: Path, cache_folder: Path, tmp_path: Path
) -> None:
    for source, kind in ((checkpoint_folder, "huggingface"), (write_llama2c_v0(tmp_path / "small.bin"), "llama2c")):
        facts = json.loads(llamac_command("inspect", source, "--json").out)
        with llamac.load(source, cache_dir=False) as model:
            assert facts["parameters"] == sum(int(np.prod(tensor.shape)) for tensor in model.file.tensors)
            assert (facts["name"], facts["architecture"]) == (model.name, "llama")
            assert facts["tokenizer"]["ids"] == model.n_token_ids
            assert {t["name"] for t in facts["tensors"]} == {t.name for t in model.file.tensors}
            assert facts["config"]["dim"] == model.config["dim"]
        assert (facts["format"], facts["dtypes"]) == (kind, {"f32": facts["parameters"]})
        text = llamac_command("inspect", source).out
        assert f"; {kind}, not converted\n" in text
        assert "runs as f32" in text
        assert "layers.1.attn_q.weight" in llamac_command("inspect", source, "--tensors").out
    assert not cache_folder.exists()


def test_inspect_shows_the_conversions_in_the_cache(
    llamac_command: Command, checkpoint_folder: Path, cache_folder: Path, tmp_path: Path
) -> None:
    def conversions(*options: object) -> list[dict[str, object]]:
        found = json.loads(llamac_command("inspect", checkpoint_folder, "--json", *options).out)["conversions"]
        assert isinstance(found, list)
        return found

    assert conversions() == []
    run = ("run", checkpoint_folder, "-i", "ab", "-n", "2", *GREEDY, "-q")
    assert llamac_command(*run).code == 0
    assert llamac_command(*run, "--dtype", "q8").code == 0
    assert {entry["dtype"] for entry in conversions()} == {"f32", "q8"}
    text = llamac_command("inspect", checkpoint_folder).out
    assert "; huggingface, converted\n" in text
    for entry in conversions():
        assert Path(str(entry["file"])).stat().st_size == entry["bytes"]
        assert f"cached      {entry['file']}, " in text
        assert f"; {entry['dtype']}\n" in text
    assert conversions("--cache-dir", tmp_path / "other") == []
    (checkpoint_folder / "config.json").write_text((checkpoint_folder / "config.json").read_text() + "\n")
    assert conversions() == []  # the source has changed


def test_a_terminal_shows_progress_of_the_first_conversion_only(checkpoint_folder: Path, cache_folder: Path) -> None:
    program = "from llamac.cli import loading; loading.BAR_DELAY = {}; from llamac import __main__; __main__.main()"

    def shown(delay: float) -> str:
        reader, writer = pty.openpty()
        run = ["run", str(checkpoint_folder), "-i", "a", "-n", "4", "-q"]
        command = [sys.executable, "-c", program.format(delay), *run]
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "40"}
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=writer, env=environment, timeout=TIMEOUT)
        os.close(writer)
        assert done.returncode == 0
        text = b""
        with contextlib.suppress(OSError):  # end of file: the other side of the terminal is closed
            while data := os.read(reader, 4096):
                text += data
        os.close(reader)
        return text.decode()

    announcement = f"llamac: converting {checkpoint_folder} once; keeping the result in {cache_folder}\r\n"
    first = shown(0)
    before, line, after = first.partition(announcement)  # no bar shares its line, which the terminal wraps
    assert line
    assert before.endswith("\r")
    assert "writing" in after
    assert max(map(len, (before + after).split("\r"))) < 40
    again = shown(0)  # reads a source again that is so new
    assert "writing" not in again
    assert "converting" not in again
    shutil.rmtree(cache_folder)
    assert shown(60) == announcement


def test_progress_bars_are_not_imported_without_a_conversion(tiny_llama: Path, tmp_path: Path) -> None:
    """Importing tqdm takes longer than opening a model."""
    code = """
        import sys
        from llamac.cli import run_command
        sys.stderr.isatty = lambda: True
        run_command(["run", sys.argv[1], "-i", "a", "-n", "8", "-q"])
        print("tqdm" in sys.modules)
    """
    assert output_of(code, tiny_llama).endswith("False\n")
