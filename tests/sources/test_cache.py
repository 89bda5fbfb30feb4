"""The cache of converted models: when a source is converted, when it is not, and what a failure leaves behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vocab_samples import tokenizer_json, write_json

import llamac
from builders import write_llama2c_v0
from commands import Command
from golden.cases import CASES
from golden.tiny_checkpoints import write_checkpoint
from llamac.errors import ArgumentError, ArgumentTypeError, ExportError, TokenizerError, UnsupportedError
from llamac.export.flat import write
from llamac.format.detect import files_of
from llamac.sources import cache as cache_module
from llamac.sources import digests as digests_module
from llamac.sources.cache import Cache
from llamac.sources.loading import open_model
from opened_sources import IDS, flip, logits, models_in, phases, start
from processes import TIMEOUT, UNCOUNTED, output_of, run_python

LLAMA = CASES["llama"].config


# ---- converting once


def as_llama2c(tmp_path: Path) -> Path:
    return write_llama2c_v0(tmp_path / "small.bin")


def as_folder(tmp_path: Path) -> Path:
    return write_json(write_checkpoint(tmp_path / "hf", LLAMA), tokenizer=tokenizer_json())


def as_weights(tmp_path: Path) -> Path:
    return as_folder(tmp_path) / "model.safetensors"


@pytest.mark.parametrize("make", [as_llama2c, as_folder, as_weights])
def test_a_source_is_converted_once_and_exactly(
    make: Callable[[Path], Path], cache_folder: Path, tmp_path: Path
) -> None:
    source = make(tmp_path)
    llamac.export.export(source, tmp_path / "exported", probe_source=None)
    expected = logits(tmp_path / "exported")
    assert phases(source) >= {"reading", "writing"}
    assert phases(source) == set()
    assert logits(source) == expected
    (model,) = models_in(cache_folder)
    assert model.read_bytes() == (tmp_path / "exported").read_bytes()


def test_a_moved_or_copied_source_is_not_converted_again(
    checkpoint_folder: Path, cache_folder: Path, tmp_path: Path
) -> None:
    phases(checkpoint_folder)
    checkpoint_folder.rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", tmp_path / "copied")
    for name in ("moved", "copied"):
        assert phases(tmp_path / name) == {"reading"}
    assert len(models_in(cache_folder)) == 1


def test_each_dtype_is_cached_separately(checkpoint_folder: Path, cache_folder: Path) -> None:
    for dtype in ("bf16", "q8"):
        with llamac.load(checkpoint_folder, dtype=dtype) as model:
            assert {t.dtype for t in model.file.tensors if len(t.shape) == 2} == {dtype}
    assert phases(checkpoint_folder, dtype="q8") == set()
    assert len(models_in(cache_folder)) == 2


def test_a_flat_file_is_converted_only_to_another_dtype(tiny_llama: Path, cache_folder: Path) -> None:
    assert phases(tiny_llama) == phases(tiny_llama, dtype="f32") == set()
    assert not cache_folder.exists()
    with llamac.load(tiny_llama, dtype="q8") as model:
        assert model.metadata["dtype"] == "q8"
    assert phases(tiny_llama, dtype="q8") == set()
    assert len(models_in(cache_folder)) == 1


@pytest.mark.parametrize("name", cache_module.VERSIONS)
def test_another_version_converts_again(
    name: str, checkpoint_folder: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases(checkpoint_folder)
    monkeypatch.setitem(cache_module.VERSIONS, name, "another")
    assert phases(checkpoint_folder) == {"writing"}
    assert phases(checkpoint_folder) == set()
    assert len(models_in(cache_folder)) == 2


def test_cache_dir_names_the_folder(checkpoint_folder: Path, cache_folder: Path, tmp_path: Path) -> None:
    phases(checkpoint_folder, cache_dir=tmp_path / "other")
    assert phases(checkpoint_folder, cache_dir=str(tmp_path / "other")) == set()
    assert not cache_folder.exists()
    with pytest.raises(ArgumentTypeError, match="cache_dir must be a folder, None or False, not int"):
        llamac.load(checkpoint_folder, cache_dir=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_float_dtypes_are_preserved(dtype: str, source: Path, cache_folder: Path, tmp_path: Path) -> None:
    llamac.export.export(source, tmp_path / "hf", to="hf", dtype=dtype)
    with llamac.load(tmp_path / "hf") as model:
        assert {t.dtype for t in model.file.tensors if len(t.shape) == 2} == {dtype}


def test_a_mixture_is_converted_matrix_by_matrix(tiny_llama: Path, cache_folder: Path, tmp_path: Path) -> None:
    made = {"q8": "layers.0.*", "f16": "layers.1.attn_q.weight"}
    pairs = [(pattern, dtype) for dtype, pattern in made.items()]
    llamac.export.export(tiny_llama, tmp_path / "mixed", dtype="bf16", dtype_map=pairs, probe_source=None)
    llamac.export.export(tmp_path / "mixed", tmp_path / "again", dtype="auto", probe_source=None)
    with llamac.load(tmp_path / "mixed") as one, llamac.load(tmp_path / "again") as other:
        assert [(t.name, t.dtype) for t in one.file.tensors] == [(t.name, t.dtype) for t in other.file.tensors]


def test_a_tokenizer_can_replace_a_damaged_one(checkpoint_folder: Path, cache_folder: Path, tmp_path: Path) -> None:
    own = checkpoint_folder / "tokenizer.json"
    own.rename(tmp_path / "good.json")
    own.write_text("{")
    with pytest.raises(TokenizerError):
        llamac.load(checkpoint_folder)
    for _ in range(2):
        with llamac.load(checkpoint_folder, tokenizer=tmp_path / "good.json") as model:
            assert model.detokenize(model.tokenize("ab")) == "ab"
    assert len(models_in(cache_folder)) == 1
    (checkpoint_folder / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(UnsupportedError):
        llamac.load(checkpoint_folder, tokenizer=tmp_path / "good.json")


# ---- a source that changes


def test_a_change_is_found_even_if_the_time_is_set_back(checkpoint_folder: Path, cache_folder: Path) -> None:
    before = logits(checkpoint_folder)
    weights = checkpoint_folder / "model.safetensors"
    times = weights.stat().st_atime_ns, weights.stat().st_mtime_ns
    data = bytearray(weights.read_bytes())
    data[-4000:] = bytes(4000)
    with open(weights, "r+b") as file:  # the same inode, size and time
        file.write(data)
    os.utime(weights, ns=times)
    assert logits(checkpoint_folder) != before
    assert len(models_in(cache_folder)) == 2


def test_a_recently_written_file_is_read_again(
    checkpoint_folder: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could change again within one tick of the file system's clock."""
    monkeypatch.setattr(digests_module, "SETTLED_NS", 3600 * 10**9)
    phases(checkpoint_folder)
    assert phases(checkpoint_folder) == {"reading"}


def test_a_tokenizer_beside_a_file_is_part_of_the_source(cache_folder: Path, tmp_path: Path) -> None:
    source = write_llama2c_v0(tmp_path / "small.bin")
    with llamac.load(source) as model:
        before = model.tokenizer.token_bytes(280)
    tokenizer = tmp_path / "tokenizer.bin"
    tokenizer.write_bytes(tokenizer.read_bytes().replace(b"ab", b"zz"))
    found = {before}
    with llamac.load(source) as model:
        found |= {model.tokenizer.token_bytes(token) for token in range(model.n_token_ids)}
        assert b"zz" in found
    tokenizer.unlink()
    with pytest.warns(UserWarning, match="no tokenizer was found"), llamac.load(source) as model:
        assert not model.has_tokenizer


def test_a_change_during_the_conversion_is_an_error(checkpoint_folder: Path, cache_folder: Path) -> None:
    def change(phase: str, done: int, total: int) -> None:
        if phase == "writing" and done == total:
            (checkpoint_folder / "config.json").write_text((checkpoint_folder / "config.json").read_text() + " ")

    with pytest.raises(ExportError, match="changed while it was converted"):
        llamac.load(checkpoint_folder, progress=change)
    assert list((cache_folder / "models").iterdir()) == []
    logits(checkpoint_folder)


# ---- damaged cache files


@pytest.mark.parametrize(
    "damage",
    [
        lambda model, note: flip(model, 20),
        lambda model, note: flip(model, model.stat().st_size - 1),
        lambda model, note: flip(model, model.stat().st_size // 2),
        lambda model, note: os.truncate(model, model.stat().st_size - 64),
        lambda model, note: os.truncate(model, 0),
        lambda model, note: model.unlink(),
        lambda model, note: note.unlink(),
        lambda model, note: note.write_bytes(b"\xff[["),
        lambda model, note: note.write_text("[]"),
        lambda model, note: note.write_text(note.read_text().replace('"id": "', '"id": "0')),
        lambda model, note: shutil.copy(llamac.models.path(), model),
    ],
    ids=[
        "flipped byte in the head",
        "flipped last byte",
        "flipped byte in the middle",
        "truncated model",
        "empty model",
        "missing model",
        "missing note",
        "note that is not JSON",
        "note without an object",
        "note of another model",
        "another model",
    ],
)
def test_a_damaged_conversion_is_made_again(
    damage: Callable[[Path, Path], object], checkpoint_folder: Path, cache_folder: Path
) -> None:
    expected = logits(checkpoint_folder)
    (model,) = models_in(cache_folder)
    whole = model.read_bytes()
    damage(model, model.with_suffix(".json"))
    assert phases(checkpoint_folder) == {"writing"}
    assert logits(checkpoint_folder) == expected
    assert model.read_bytes() == whole
    assert phases(checkpoint_folder) == set()


def make_folder(path: Path) -> None:
    path.mkdir()
    (path / "x").write_text("x")


@pytest.mark.parametrize(
    "make",
    [make_folder, lambda path: path.symlink_to(path), lambda path: path.symlink_to("/no")],
    ids=["folder", "link to itself", "dangling link"],
)
@pytest.mark.parametrize("kind", ["models/*.bin", "models/*.json", "locks/*.lock"])
def test_folders_and_links_are_left_alone(
    kind: str, make: Callable[[Path], None], checkpoint_folder: Path, cache_folder: Path
) -> None:
    """The cache creates neither folders nor links under the names of its files: it warns and converts without them."""
    expected = logits(checkpoint_folder)
    (damaged,) = cache_folder.glob(kind)
    damaged.unlink()
    make(damaged)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the cache folder .* cannot be written")
        assert logits(checkpoint_folder) == expected
    is_folder = damaged.is_dir()
    Cache(cache_folder).entries()
    Cache(cache_folder).prune(everything=True)
    assert damaged.is_dir() == is_folder


def test_a_conversion_with_a_changed_time_is_verified_and_reused(checkpoint_folder: Path, cache_folder: Path) -> None:
    phases(checkpoint_folder)
    (model,) = models_in(cache_folder)
    os.utime(model, (1, 1))
    inode = model.stat().st_ino
    assert phases(checkpoint_folder) == set()
    assert model.stat().st_ino == inode
    assert json.loads(model.with_suffix(".json").read_text())["stamp"] == [model.stat().st_size, 10**9]


def test_malformed_notes_are_ignored(checkpoint_folder: Path, cache_folder: Path) -> None:
    expected = logits(checkpoint_folder)
    (note,) = (cache_folder / "sources").iterdir()
    known = json.loads(note.read_text())
    malformed: list[Any] = [
        [],
        {"files": []},
        {"files": {name: [1, 2, 3] for name in known["files"]}},
        {"files": {"x": None}},
    ]
    for content in malformed:
        note.write_text(json.dumps(content))
        assert logits(checkpoint_folder) == expected
    assert len(models_in(cache_folder)) == 1


# ---- several processes and threads


def test_one_process_converts_while_another_waits(checkpoint_folder: Path, cache_folder: Path) -> None:
    digests = Cache(cache_folder).digests(checkpoint_folder, files_of(checkpoint_folder))
    key = cache_module.key_of(digests, "auto", True)
    with Cache(cache_folder).converting(key):
        both = [start(checkpoint_folder) for _ in range(2)]
        for process in both:
            assert process.stdout is not None
            line = ""
            while line != "waiting for another process\n":
                line = process.stdout.readline()
                assert line, "the process ended without waiting"
    outputs = [process.communicate(timeout=TIMEOUT)[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(lines.count("writing") for lines in outputs) == [0, 1]
    expected = logits(checkpoint_folder).hex()
    assert [lines[-1] for lines in outputs] == [f"logits {expected}"] * 2
    assert len(models_in(cache_folder)) == 1


def test_threads_of_a_process_convert_once(checkpoint_folder: Path, cache_folder: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        found = [done.result() for done in [pool.submit(phases, checkpoint_folder) for _ in range(4)]]
    assert sum("writing" in done for done in found) == 1
    assert len(models_in(cache_folder)) == 1


# ---- no cache, read-only caches, full disks


def test_a_load_without_a_cache_leaves_no_files(
    checkpoint_folder: Path, cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    expected = logits(checkpoint_folder)
    shutil.rmtree(cache_folder)
    with llamac.load(checkpoint_folder, cache_dir=False) as model:
        assert list((tmp_path / "temporary").iterdir()) == []  # the file is deleted while it is open
        assert model.logits(IDS).tobytes() == expected
        assert model.file.path == checkpoint_folder
    assert not cache_folder.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_conversion_without_a_cache_that_is_killed_leaves_no_files(
    checkpoint_folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "temporary").mkdir()
    program = """
        import os, signal, sys
        import llamac
        signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore SIGINT in background jobs
        def kill(phase, done, total):
            if phase == "writing" and done:
                os.kill(os.getpid(), int(sys.argv[2]))
        llamac.load(sys.argv[1], cache_dir=False, progress=kill)
    """
    done = run_python(program, checkpoint_folder, int(number), TMPDIR=str(tmp_path / "temporary"))
    assert done.returncode == -number
    assert list((tmp_path / "temporary").iterdir()) == []


def test_an_unwritable_cache_is_not_used(
    checkpoint_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLAMAC_CACHE", str(tmp_path / "file" / "cache"))
    expected = logits(checkpoint_folder, cache_dir=False)
    with pytest.warns(UserWarning, match=r"file/cache cannot be written \(Not a directory\)"):
        assert logits(checkpoint_folder) == expected


def test_a_missing_home_folder_is_reported(
    checkpoint_folder: Path, llamac_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(_: object) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.setattr("pwd.getpwnam", nobody)
    for name in ("HOME", "XDG_CACHE_HOME", "LLAMAC_CACHE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ArgumentError, match=r"the cache folder ~/\.cache/llamac has no home folder"):
        llamac.load(checkpoint_folder)
    logits(checkpoint_folder, cache_dir=False)
    monkeypatch.setenv("LLAMAC_CACHE", "~nobody/x")
    llamac_command("cache", "list").refuses_with("~nobody/x", "set LLAMAC_CACHE to another folder")


def test_a_file_in_place_of_the_cache_folder_is_reported(
    checkpoint_folder: Path, tmp_path: Path, llamac_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLAMAC_CACHE", str(tmp_path / "file"))
    llamac_command("cache", "list").fails_with("file", "Not a directory")
    llamac_command("cache", "prune", "--all").fails_with("file", "Not a directory")
    with pytest.warns(UserWarning, match=r"file cannot be written \(Not a directory\)"):
        logits(checkpoint_folder)


def test_a_read_only_cache_is_used(
    checkpoint_folder: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits(checkpoint_folder)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(cache_folder))

    for name in ("_make_folders", "converting"):
        monkeypatch.setattr(Cache, name, refuse)
    monkeypatch.setattr("os.utime", refuse)
    assert phases(checkpoint_folder) == set()
    assert logits(checkpoint_folder) == expected


def test_a_full_disk_is_reported_with_advice(
    checkpoint_folder: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(ExportError, match=r"has 1\.0 kB free.*`llamac cache prune`, or set LLAMAC_CACHE"):
            llamac.load(checkpoint_folder)
        with pytest.raises(ExportError, match=r"has 1\.0 kB free.*set TMPDIR to another folder"):
            llamac.load(checkpoint_folder, cache_dir=False)
    assert list((cache_folder / "models").iterdir()) == []


@pytest.mark.parametrize("kind", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize(("module", "name"), [(write, "write_file"), (cache_module, "_write_note")])
def test_a_disk_that_becomes_full_is_reported_with_advice(
    kind: int, module: Any, name: str, checkpoint_folder: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: object, **__: object) -> None:
        raise OSError(kind, os.strerror(kind))

    monkeypatch.setattr(module, name, fill)
    with pytest.raises(ExportError, match=r"is too full for the conversion of .*hf .*`llamac cache prune`"):
        llamac.load(checkpoint_folder)
    assert list((cache_folder / "models").iterdir()) == []


@pytest.mark.parametrize("to", ["llamac", "hf", "llama2c", "gguf"])
def test_the_error_at_a_file_size_limit_names_the_target(to: str, source: Path, tmp_path: Path) -> None:
    code = """
        import resource, sys
        from llamac.cli import run_command
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        sys.exit(run_command(["export", *sys.argv[1:]]))
    """
    done = run_python(code, source, tmp_path / "out", "--to", to, **UNCOUNTED)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"llamac: error: {tmp_path / 'out'}: File too large\n"
    assert list(tmp_path.iterdir()) == []


def test_a_failed_conversion_leaves_no_files(cache_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ExportError, match=r"it has no config\.json"):
        llamac.load(tmp_path / "empty")
    assert Cache(cache_folder).entries() == []
    assert list((cache_folder / "models").iterdir()) == []


# ---- imports


def test_opening_a_flat_file_does_not_import_the_cache(tiny_llama: Path) -> None:
    code = """
        import sys
        import llamac
        llamac.load(sys.argv[1]).close()
        llamac.load("stories").close()
        unwanted = ("llamac.sources.cache", "llamac.sources.conversions", "llamac.export.convert",
                    "numpy", "huggingface_hub", "tqdm", "tempfile")
        print([name for name in sys.modules if name.startswith(unwanted)])
    """
    assert output_of(code, tiny_llama) == "[]\n"


@pytest.mark.parametrize("make", [as_llama2c, as_folder])
def test_opening_a_cached_conversion_does_not_import_the_exporter(
    make: Callable[[Path], Path], cache_folder: Path, tmp_path: Path
) -> None:
    source = make(tmp_path)
    phases(source)
    code = """
        import sys
        import llamac
        llamac.load(sys.argv[1]).close()
        print([name for name in sys.modules if name.startswith(("llamac.export.convert", "numpy", "huggingface_hub"))])
    """
    assert output_of(code, source) == "[]\n"


def test_warnings_of_a_conversion_point_to_the_caller(tmp_path: Path, cache_folder: Path) -> None:
    source = write_checkpoint(tmp_path / "hf", LLAMA)
    with pytest.warns(UserWarning, match="has no tokenizer") as found:
        llamac.load(source).close()
    assert [Path(warning.filename) for warning in found] == [Path(__file__)]
    llamac.load(source).close()  # a cached conversion does not warn again


def test_a_conversion_is_announced_once(checkpoint_folder: Path, cache_folder: Path) -> None:
    def opened(**options: Any) -> list[str]:
        lines: list[str] = []
        open_model(checkpoint_folder, on_warning=print, on_conversion=lines.append, **options).close()
        return lines

    assert opened(cache_dir=False) == [f"converting {checkpoint_folder} to a temporary file"]
    assert opened() == [f"converting {checkpoint_folder} once; keeping the result in {cache_folder}"]
    assert opened() == []
    assert opened(dtype="q8") == [f"converting {checkpoint_folder} once; keeping the result in {cache_folder}"]


@pytest.mark.parametrize("cache", ["writable", "unwritable", "none"])
def test_a_damaged_tokenizer_that_is_replaced_repeats_no_message(
    checkpoint_folder: Path, cache_folder: Path, tmp_path: Path, cache: str
) -> None:
    """The conversion is tried with the tokenizer first, then without it."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    (checkpoint_folder / "tokenizer.json").write_text("{}")
    (tmp_path / "file").touch()
    folder: Any = {"writable": cache_folder, "unwritable": tmp_path / "file" / "cache", "none": False}[cache]
    warnings: list[str] = []
    notices: list[str] = []
    open_model(
        checkpoint_folder,
        tokenizer=tmp_path / "tokenizer.json",
        cache_dir=folder,
        on_warning=warnings.append,
        on_conversion=notices.append,
    ).close()
    assert len(notices) == 1
    assert len(warnings) == (1 if cache == "unwritable" else 0)
