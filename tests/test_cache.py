"""The cache of converted models: when a source is converted, when not, and what is left when something goes wrong."""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vocab_samples import tokenizer_json, write_json

import llamac
from builders import write_llama2c_v0
from commands import Command
from golden.cases import CASES
from golden.tiny_checkpoints import write_checkpoint
from llamac import cache as cache_module
from llamac.cache import Cache
from llamac.errors import ArgumentError, ArgumentTypeError, ExportError, TokenizerError, UnsupportedError
from llamac.export import convert
from llamac.export.checkpoint import LazyTensor
from llamac.export.quantize import nearest_dtypes
from llamac.sources import files_of, open_model
from opened_sources import IDS, flip, logits, models_in, phases, start
from processes import TIMEOUT, output_of, run_python

LLAMA = CASES["llama"].config


# ---- once


def as_llama2c(tmp_path: Path) -> Path:
    return write_llama2c_v0(tmp_path / "small.bin")


def as_folder(tmp_path: Path) -> Path:
    return write_json(write_checkpoint(tmp_path / "hf", LLAMA), tokenizer=tokenizer_json())


def as_weights(tmp_path: Path) -> Path:
    return as_folder(tmp_path) / "model.safetensors"


@pytest.mark.parametrize("make", [as_llama2c, as_folder, as_weights])
def test_a_source_is_converted_once_and_exactly(make: Callable[[Path], Path], place: Path, tmp_path: Path) -> None:
    source = make(tmp_path)
    llamac.export.export(source, tmp_path / "exported", probe_source=None)
    expected = logits(tmp_path / "exported")
    assert phases(source) >= {"reading", "writing"}
    assert phases(source) == set()
    assert logits(source) == expected
    (model,) = models_in(place)
    assert model.read_bytes() == (tmp_path / "exported").read_bytes()


def test_a_moved_source_is_known_by_its_content(checkpoint_folder: Path, place: Path, tmp_path: Path) -> None:
    phases(checkpoint_folder)
    checkpoint_folder.rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", tmp_path / "copied")
    for name in ("moved", "copied"):
        assert phases(tmp_path / name) == {"reading"}
    assert len(models_in(place)) == 1


def test_each_dtype_is_a_model_of_its_own(checkpoint_folder: Path, place: Path) -> None:
    for dtype in ("bf16", "q8"):
        with llamac.load(checkpoint_folder, dtype=dtype) as model:
            assert {t.dtype for t in model.file.tensors if len(t.shape) == 2} == {dtype}
    assert phases(checkpoint_folder, dtype="q8") == set()
    assert len(models_in(place)) == 2


def test_a_flat_file_is_converted_only_to_another_dtype(tiny_llama: Path, place: Path) -> None:
    assert phases(tiny_llama) == phases(tiny_llama, dtype="f32") == set()
    assert not place.exists()
    with llamac.load(tiny_llama, dtype="q8") as model:
        assert model.metadata["dtype"] == "q8"
    assert phases(tiny_llama, dtype="q8") == set()
    assert len(models_in(place)) == 1


def test_a_folder_may_be_given(checkpoint_folder: Path, place: Path, tmp_path: Path) -> None:
    phases(checkpoint_folder, cache=tmp_path / "other")
    assert phases(checkpoint_folder, cache=str(tmp_path / "other")) == set()
    assert not place.exists()
    with pytest.raises(ArgumentTypeError, match="cache must be True, False or a folder, not int"):
        llamac.load(checkpoint_folder, cache=3)  # type: ignore[arg-type]  # what is tested


def test_probes_are_made_where_they_are_needed(checkpoint_folder: Path, place: Path) -> None:
    def opened(probes: bool) -> tuple[bool, set[str]]:
        found: set[str] = set()
        tell = lambda phase, done, total: found.add(phase)  # noqa: E731
        file = open_model(checkpoint_folder, probes=probes, progress=tell, warn=print)
        has_some = file.sections["probes"].bytes > 0
        file.close()
        return has_some, found

    assert opened(False)[0] is False
    has_some, done = opened(True)
    assert has_some
    assert "reference logits" in done
    assert opened(True) == (True, set())
    shutil.rmtree(place)
    opened(True)
    assert opened(False) == (True, set())  # one with probes will do


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_floats_stay_what_they_are(dtype: str, source: Path, place: Path, tmp_path: Path) -> None:
    llamac.export.export(source, tmp_path / "hf", to="hf", dtype=dtype)
    with llamac.load(tmp_path / "hf") as model:
        assert {t.dtype for t in model.file.tensors if len(t.shape) == 2} == {dtype}


def test_quantized_numbers_go_to_the_nearest_dtype() -> None:
    def tensor(dtype: str, rows: int = 16) -> LazyTensor:
        return LazyTensor((rows, 32), dtype, lambda first, last: np.zeros((last - first, 32), np.float32))

    nearest = {
        **dict.fromkeys(("q4_0", "q4_k", "q3_k", "q2_k", "iq4_nl", "iq2_xxs", "tq1_0", "mxfp4", "q4"), "q4"),
        **dict.fromkeys(("q8_0", "q5_0", "q5_1", "q6_k", "q8_k", "unheard-of", "q8"), "q8"),
        **{name: name for name in ("f32", "f16", "bf16", "q4s")},
    }
    for stored, expected in nearest.items():
        assert nearest_dtypes({"x": tensor(stored)}) == (expected, [])
    vector = LazyTensor((8,), "f32", lambda first, last: np.zeros(last - first, np.float32))
    mixed = {"a": tensor("q6_k"), "b": tensor("q4_k", 48), "c": tensor("f32"), "d": vector}
    assert nearest_dtypes(mixed) == ("q4", [("a", "q8"), ("c", "f32")])


def test_a_mixture_is_converted_matrix_by_matrix(tiny_llama: Path, place: Path, tmp_path: Path) -> None:
    made = {"q8": "layers.0.*", "f16": "layers.1.attn_q.weight"}
    pairs = [(pattern, dtype) for dtype, pattern in made.items()]
    llamac.export.export(tiny_llama, tmp_path / "mixed", dtype="bf16", dtype_map=pairs, probe_source=None)
    llamac.export.export(tmp_path / "mixed", tmp_path / "again", dtype="auto", probe_source=None)
    with llamac.load(tmp_path / "mixed") as one, llamac.load(tmp_path / "again") as other:
        assert [(t.name, t.dtype) for t in one.file.tensors] == [(t.name, t.dtype) for t in other.file.tensors]


def test_another_tokenizer_may_be_given(checkpoint_folder: Path, place: Path, tmp_path: Path) -> None:
    own = checkpoint_folder / "tokenizer.json"
    own.rename(tmp_path / "good.json")
    own.write_text("{")
    with pytest.raises(TokenizerError):
        llamac.load(checkpoint_folder)
    for _ in range(2):
        with llamac.load(checkpoint_folder, tokenizer=tmp_path / "good.json") as model:
            assert model.detokenize(model.tokenize("ab")) == "ab"
    assert len(models_in(place)) == 1
    (checkpoint_folder / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(UnsupportedError):
        llamac.load(checkpoint_folder, tokenizer=tmp_path / "good.json")


# ---- a source that changes


def test_a_change_is_seen_whatever_its_time_says(checkpoint_folder: Path, place: Path) -> None:
    before = logits(checkpoint_folder)
    weights = checkpoint_folder / "model.safetensors"
    times = weights.stat().st_atime_ns, weights.stat().st_mtime_ns
    data = bytearray(weights.read_bytes())
    data[-4000:] = bytes(4000)
    with open(weights, "r+b") as file:  # the same inode, size and time
        file.write(data)
    os.utime(weights, ns=times)
    assert logits(checkpoint_folder) != before
    assert len(models_in(place)) == 2


def test_a_file_just_written_is_read_again(
    checkpoint_folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may change once more within one tick of the disk's clock."""
    monkeypatch.setattr(cache_module, "SETTLED_NS", 3600 * 10**9)
    phases(checkpoint_folder)
    assert phases(checkpoint_folder) == {"reading"}


def test_a_tokenizer_beside_a_file_belongs_to_it(place: Path, tmp_path: Path) -> None:
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


def test_a_change_on_the_way_is_an_error(checkpoint_folder: Path, place: Path) -> None:
    def change(phase: str, done: int, total: int) -> None:
        if phase == "writing" and done == total:
            (checkpoint_folder / "config.json").write_text((checkpoint_folder / "config.json").read_text() + " ")

    with pytest.raises(ExportError, match="has changed while it was converted"):
        llamac.load(checkpoint_folder, progress=change)
    assert list((place / "models").iterdir()) == []
    logits(checkpoint_folder)


# ---- damage


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
)
def test_a_damaged_model_is_made_again(
    damage: Callable[[Path, Path], object], checkpoint_folder: Path, place: Path
) -> None:
    expected = logits(checkpoint_folder)
    (model,) = models_in(place)
    whole = model.read_bytes()
    damage(model, model.with_suffix(".json"))
    assert phases(checkpoint_folder) == {"writing"}
    assert logits(checkpoint_folder) == expected
    assert model.read_bytes() == whole
    assert phases(checkpoint_folder) == set()


def folder_in(place: Path) -> None:
    place.mkdir()
    (place / "x").write_text("x")


@pytest.mark.parametrize(
    "make", [folder_in, lambda place: place.symlink_to(place), lambda place: place.symlink_to("/no")]
)
@pytest.mark.parametrize("kind", ["models/*.bin", "models/*.json", "locks/*.lock"])
def test_what_is_no_file_is_left_alone(
    kind: str, make: Callable[[Path], None], checkpoint_folder: Path, place: Path
) -> None:
    """A folder or a link in the place of a file is nothing that this cache has made: it is told, and done without."""
    expected = logits(checkpoint_folder)
    (damaged,) = place.glob(kind)
    damaged.unlink()
    make(damaged)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the cache folder .* cannot be written")
        assert logits(checkpoint_folder) == expected
    is_folder = damaged.is_dir()
    Cache(place).entries()
    Cache(place).prune(everything=True)
    assert damaged.is_dir() == is_folder


def test_a_model_that_was_only_copied_is_kept(checkpoint_folder: Path, place: Path) -> None:
    phases(checkpoint_folder)
    (model,) = models_in(place)
    os.utime(model, (1, 1))
    inode = model.stat().st_ino
    assert phases(checkpoint_folder) == set()
    assert model.stat().st_ino == inode
    assert json.loads(model.with_suffix(".json").read_text())["stamp"] == [model.stat().st_size, 10**9]


def test_notes_of_nonsense_are_not_believed(checkpoint_folder: Path, place: Path) -> None:
    expected = logits(checkpoint_folder)
    (note,) = (place / "sources").iterdir()
    known = json.loads(note.read_text())
    wrongs: list[Any] = [
        [],
        {"files": []},
        {"files": {name: [1, 2, 3] for name in known["files"]}},
        {"files": {"x": None}},
    ]
    for wrong in wrongs:
        note.write_text(json.dumps(wrong))
        assert logits(checkpoint_folder) == expected
    assert len(models_in(place)) == 1


# ---- several processes


def test_of_two_processes_one_converts_and_the_other_waits(checkpoint_folder: Path, place: Path) -> None:
    digests = Cache(place).digests(checkpoint_folder, files_of(checkpoint_folder))
    key = cache_module.key_of(digests, "auto", True, False)
    with Cache(place).writing(key):
        both = [start(checkpoint_folder) for _ in range(2)]
        for process in both:
            assert process.stdout is not None
            line = ""
            while line != "waiting for another process\n":
                line = process.stdout.readline()
                assert line, "it ended without waiting"
    told = [process.communicate(timeout=TIMEOUT)[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(lines.count("writing") for lines in told) == [0, 1]
    expected = logits(checkpoint_folder).hex()
    assert [lines[-1] for lines in told] == [f"logits {expected}"] * 2
    assert len(models_in(place)) == 1


def test_threads_of_a_process_convert_once(checkpoint_folder: Path, place: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        found = [done.result() for done in [pool.submit(phases, checkpoint_folder) for _ in range(4)]]
    assert sum("writing" in done for done in found) == 1
    assert len(models_in(place)) == 1


# ---- no cache, no room


def test_without_a_cache_nothing_stays(
    checkpoint_folder: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    expected = logits(checkpoint_folder)
    shutil.rmtree(place)
    with llamac.load(checkpoint_folder, cache=False) as model:
        assert list((tmp_path / "temporary").iterdir()) == []  # the file has no name any more
        assert model.logits(IDS).tobytes() == expected
        assert model.file.path == checkpoint_folder
    assert not place.exists()


def test_a_cache_that_cannot_be_written_is_done_without(
    checkpoint_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLAMAC_CACHE", str(tmp_path / "file" / "cache"))
    expected = logits(checkpoint_folder, cache=False)
    with pytest.warns(UserWarning, match=r"file/cache cannot be written \(Not a directory\)"):
        assert logits(checkpoint_folder) == expected


def test_a_home_that_there_is_not_is_told(
    checkpoint_folder: Path, llamac_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(_: object) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.setattr("pwd.getpwnam", nobody)
    for name in ("HOME", "XDG_CACHE_HOME", "LLAMAC_CACHE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ArgumentError, match=r"the cache would be ~/\.cache/llamac, but there is no such home folder"):
        llamac.load(checkpoint_folder)
    logits(checkpoint_folder, cache=False)
    monkeypatch.setenv("LLAMAC_CACHE", "~nobody/x")
    llamac_command("cache", "list").fails_with("~nobody/x", "LLAMAC_CACHE names another folder, --no-cache")


def test_a_file_is_no_cache(
    checkpoint_folder: Path, tmp_path: Path, llamac_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLAMAC_CACHE", str(tmp_path / "file"))
    llamac_command("cache", "list").fails_with("file", "Not a directory")
    llamac_command("cache", "prune", "--all").fails_with("file", "Not a directory")
    with pytest.warns(UserWarning, match=r"file cannot be written \(Not a directory\)"):
        logits(checkpoint_folder)


def test_a_cache_that_can_only_be_read_is_used(
    checkpoint_folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits(checkpoint_folder)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(place))

    for name in ("_make_folders", "writing"):
        monkeypatch.setattr(Cache, name, refuse)
    monkeypatch.setattr("os.utime", refuse)
    assert logits(checkpoint_folder) == expected


def test_a_full_disk_is_told_with_what_to_do(
    checkpoint_folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(ExportError, match=r"has 0\.0 MB free.*`llamac cache prune` makes room, LLAMAC_CACHE"):
            llamac.load(checkpoint_folder)
        with pytest.raises(ExportError, match=r"has 0\.0 MB free.*TMPDIR names another folder"):
            llamac.load(checkpoint_folder, cache=False)
    assert list((place / "models").iterdir()) == []


@pytest.mark.parametrize("kind", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize(("module", "name"), [(convert, "write"), (cache_module, "_write_note")])
def test_a_disk_that_becomes_full_is_told_with_what_to_do(
    kind: int, module: Any, name: str, checkpoint_folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: object, **__: object) -> None:
        raise OSError(kind, os.strerror(kind))

    monkeypatch.setattr(module, name, fill)
    with pytest.raises(ExportError, match=r"has no room for what .*hf is converted to.*`llamac cache prune`"):
        llamac.load(checkpoint_folder)
    assert list((place / "models").iterdir()) == []


@pytest.mark.parametrize("to", ["llamac", "hf", "llama2c", "gguf"])
def test_a_limit_of_a_files_size_is_told_with_its_name(to: str, source: Path, tmp_path: Path) -> None:
    code = """
        import resource, sys
        from llamac.cli import run_command
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        sys.exit(run_command(["export", *sys.argv[1:]]))
    """
    done = run_python(code, source, tmp_path / "out", "--to", to)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"llamac: error: {tmp_path / 'out'}: File too large\n"
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_converted_leaves_nothing(place: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ExportError, match=r"there is no config\.json in it"):
        llamac.load(tmp_path / "empty")
    assert Cache(place).entries() == []
    assert list((place / "models").iterdir()) == []


# ---- what it costs


def test_opening_a_flat_file_needs_none_of_this(tiny_llama: Path) -> None:
    code = """
        import sys
        import llamac
        llamac.load(sys.argv[1]).close()
        llamac.load().close()
        print([name for name in sys.modules if name.startswith(("llamac.cache", "llamac.conversions", "llamac.export",
               "numpy", "huggingface_hub", "rich", "tempfile"))])
    """
    assert output_of(code, tiny_llama) == "[]\n"


@pytest.mark.parametrize("make", [as_llama2c, as_folder])
def test_opening_a_kept_model_needs_no_exporter(make: Callable[[Path], Path], place: Path, tmp_path: Path) -> None:
    source = make(tmp_path)
    phases(source)
    code = """
        import sys
        import llamac
        llamac.load(sys.argv[1]).close()
        print([name for name in sys.modules if name.startswith(("llamac.export.convert", "numpy", "huggingface_hub"))])
    """
    assert output_of(code, source) == "[]\n"


def test_conversions_are_told_of_by_warnings(tmp_path: Path, place: Path) -> None:
    source = write_checkpoint(tmp_path / "hf", LLAMA)
    with pytest.warns(UserWarning, match="holds no tokenizer") as told:
        llamac.load(source).close()
    assert [Path(warning.filename) for warning in told] == [Path(__file__)]
    llamac.load(source).close()  # what is known does not warn again
