"""`llamac cache`: the cache's folder, its entries, and what it deletes."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest

import llamac
from commands import Command, Result
from llamac.arguments import DType
from llamac.cli import make_parser
from llamac.format.cache_folder import default_folder
from llamac.format.private_files import locked, open_regular
from llamac.sizes import size_text
from llamac.sources import cache as cache_module
from llamac.sources.cache import Cache

IDS = [1, 5, 9]


# ---- the folder


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"LLAMAC_CACHE": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
        ({"LLAMAC_CACHE": "~/b"}, "/home/me/b"),
        ({"LLAMAC_CACHE": "", "XDG_CACHE_HOME": "/x"}, "/x/llamac"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/llamac"),
        ({}, "/home/me/.cache/llamac"),
    ],
)
def test_the_default_folder_follows_the_environment(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for name in ("LLAMAC_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert default_folder() == Path(expected)


def test_the_folder_is_private_and_tagged_for_backups(tiny_llama: Path, cache_folder: Path) -> None:
    llamac.load(tiny_llama, dtype="q8").close()
    assert (cache_folder / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55\n")
    assert cache_folder.stat().st_mode & 0o777 == 0o700


# ---- prune


@pytest.fixture
def filled(cache_folder: Path, tiny_llama: Path) -> Cache:
    """Three models: one in bf16 used 3 days ago, one in f16 used yesterday, one in q8 used now."""
    ages: tuple[tuple[DType, int], ...] = (("bf16", 3), ("f16", 1), ("q8", 0))
    for dtype, days in ages:
        llamac.load(tiny_llama, dtype=dtype).close()
        newest = max((cache_folder / "models").glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        when = time.time() - 86400 * days - 60 * (3 - days)
        os.utime(newest, (when, when))
    return Cache(cache_folder)


def dtypes(cache: Cache) -> list[str]:
    return [entry.dtype for entry in cache.entries()]


def test_entries_have_the_source_and_the_size(filled: Cache, tiny_llama: Path) -> None:
    assert dtypes(filled) == ["q8", "f16", "bf16"]
    for entry in filled.entries():
        assert entry.source == str(tiny_llama)
        assert entry.bytes == filled.path(entry.key).stat().st_size > 10_000
        assert entry.problem is None


def test_opening_counts_as_use(filled: Cache, tiny_llama: Path) -> None:
    llamac.load(tiny_llama, dtype="bf16").close()
    assert dtypes(filled)[0] == "bf16"


def test_pruning_by_age_and_size(filled: Cache) -> None:
    assert filled.prune() == []
    assert [gone.reason for gone in filled.prune(older_than=2 * 86400, dry_run=True)] == ["not used for 3.0 days"]
    assert len(dtypes(filled)) == 3
    filled.prune(older_than=2 * 86400)
    assert dtypes(filled) == ["q8", "f16"]
    sizes = [entry.bytes for entry in filled.entries()]
    assert filled.prune(max_bytes=sum(sizes)) == []
    assert [gone.bytes for gone in filled.prune(max_bytes=sum(sizes) - 1)] == [sizes[1]]
    assert dtypes(filled) == ["q8"]
    assert [gone.reason for gone in filled.prune(max_bytes=sizes[0] - 1, dry_run=True)] == ["the cache is too large"]
    filled.prune(everything=True)
    assert dtypes(filled) == []
    assert [path.name for path in filled.folder.rglob("*") if path.is_file()] == ["CACHEDIR.TAG"]


def test_an_open_model_can_be_pruned(filled: Cache, tiny_llama: Path) -> None:
    with llamac.load(tiny_llama, dtype="q8") as model:
        before = model.logits(IDS).tobytes()
        filled.prune(everything=True)
        assert model.logits(IDS).tobytes() == before
    with llamac.load(tiny_llama, dtype="q8") as model:
        assert model.logits(IDS).tobytes() == before
    assert dtypes(filled) == ["q8"]


def test_pruning_leaves_other_files_alone(filled: Cache, tmp_path: Path) -> None:
    ours = {path for path in filled.folder.rglob("*") if path.is_file()}
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text("{}")
    others = [
        filled.folder / "letter.txt",
        filled.folder / "models" / "model.bin",
        filled.folder / "models" / f"{'A' * 64}.bin",
        filled.folder / "models" / f"{'e' * 64}.bin",
        filled.folder / "models" / f"{'f' * 64}.json",
        filled.folder / "models" / f"{'d' * 64}.bin.old",
        filled.folder / "sources" / "note.json",
        filled.folder / "sources" / f"{'f' * 64}.json",
        filled.folder / "locks" / "mine.lock",
    ]
    for path in others:
        path.write_text('{"id": "mine"}')
    (filled.folder / "models" / f"{'c' * 64}.json").symlink_to(elsewhere)
    (filled.folder / "models" / f"{'b' * 64}.json").mkdir()
    filled.prune(everything=True, older_than=0, max_bytes=0)
    assert all(path.read_text() == '{"id": "mine"}' for path in others)
    assert elsewhere.exists()
    assert (filled.folder / "models" / f"{'b' * 64}.json").is_dir()
    assert not [path for path in ours if path.exists() and path.name != "CACHEDIR.TAG"]


def test_pruning_deletes_unusable_files(filled: Cache, tmp_path: Path) -> None:
    newest = filled.entries()[0]
    note = filled.folder / "models" / f"{newest.key}.json"
    note.write_text(note.read_text().replace('"llamac": "', '"llamac": "0.0.'))
    (filled.folder / "models" / f".{'a' * 64}.{'0' * 16}.{'1' * 16}.partial").write_bytes(bytes(10))
    (filled.folder / "models" / f".{filled.entries()[1].key}.{'0' * 16}.{'1' * 16}.partial").write_bytes(bytes(10))
    gone_note = filled.folder / "sources" / f"{'a' * 64}.json"
    gone_note.write_text(json.dumps({"path": str(tmp_path / "gone"), "files": {}}))
    gone = filled.prune()
    assert sorted(removal.reason for removal in gone) == [
        "interrupted",
        "interrupted",
        "made by another version of llamac",
        "the source is missing",
    ]
    assert f"checksums of {tmp_path / 'gone'}" in [removal.what for removal in gone]
    assert dtypes(filled) == ["f16", "bf16"]
    assert not filled.path(newest.key).exists()


@pytest.mark.parametrize("content", [b"", bytes(100), None], ids=["empty", "zeros", "missing"])
def test_a_model_without_a_readable_note_is_listed_and_deleted(
    llamac_command: Command, filled: Cache, content: bytes | None
) -> None:
    """A power loss can leave an empty note."""
    for entry in filled.entries()[:2]:
        note = filled.folder / "models" / f"{entry.key}.json"
        note.unlink()
        if content is not None:
            note.write_bytes(content)
    one, other = (entry for entry in filled.entries() if entry.problem == "its note is damaged")
    assert llamac_command("cache", "list").out.count("  unknown  (its note is damaged)\n") == 2
    assert llamac_command("cache", "rm", one.id).code == 0
    assert [(gone.reason, gone.bytes) for gone in filled.prune()] == [(other.problem, other.bytes)]
    assert dtypes(filled) == ["bf16"]
    assert len(list((filled.folder / "models").iterdir())) == 2


@pytest.mark.parametrize("kind", [errno.EACCES, errno.EIO, errno.EMFILE])
def test_a_model_whose_note_cannot_be_read_is_kept(kind: int, filled: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    key = filled.entries()[0].key
    old = filled.folder / "models" / f".{key}.{'0' * 16}.{'1' * 16}.partial"
    old.touch()
    os.utime(old, (0, 0))

    def refuse(path: Path) -> int:
        if path.name == f"{key}.json":
            raise OSError(kind, os.strerror(kind), str(path))
        return open_regular(path)

    with monkeypatch.context() as patch:
        patch.setattr("llamac.sources.cache.open_regular", refuse)
        assert dtypes(filled) == ["f16", "bf16"]
        with filled.converting("b" * 64):
            assert not old.exists()
        assert filled.prune() == []
    assert dtypes(filled) == ["q8", "f16", "bf16"]
    assert filled.path(key).exists()


def test_a_running_conversion_is_not_pruned(filled: Cache) -> None:
    oldest = filled.entries()[-1]
    with filled.converting(oldest.key):
        partial = filled.folder / "models" / f".{oldest.key}.{'0' * 16}.{'1' * 16}.partial"
        partial.touch()
        filled.prune(everything=True)
        assert partial.exists()
        assert dtypes(filled) == ["bf16"]


def test_a_model_is_locked_while_it_is_pruned(filled: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def remove(cache: Cache, key: str) -> None:
        with pytest.raises(BlockingIOError), locked(cache.folder / "locks" / f"{key}.lock", wait=False):
            pass
        tried.append(key)

    monkeypatch.setattr(Cache, "_remove_model", remove)
    keys = {entry.key for entry in filled.entries()}
    filled.prune(everything=True)
    assert set(tried) == keys


@pytest.mark.parametrize("kind", [errno.EACCES, errno.EROFS])
def test_a_read_only_cache_is_listed_but_not_pruned(
    kind: int, filled: Cache, llamac_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (filled.folder / "locks").mkdir(exist_ok=True)
    (filled.folder / "locks" / f"{filled.entries()[0].key}.lock").touch()

    def refuse(path: Path, **_: object) -> None:
        raise OSError(kind, os.strerror(kind), str(path))

    monkeypatch.setattr(cache_module, "locked", refuse)
    llamac_command("cache", "prune", "--all").fails_with(".lock", os.strerror(kind))
    assert len(filled.entries()) == 3


def test_a_missing_cache_has_no_entries(tmp_path: Path) -> None:
    nothing = Cache(tmp_path / "nothing")
    assert (nothing.entries(), nothing.prune(everything=True)) == ([], [])
    assert not (tmp_path / "nothing").exists()


# ---- list, path, prune


def test_path_prints_the_folder(llamac_command: Command, cache_folder: Path, tmp_path: Path) -> None:
    assert llamac_command("cache", "path").out == f"{cache_folder}\n"
    assert llamac_command("cache", "path", "--cache-dir", tmp_path / "x").out == f"{tmp_path / 'x'}\n"
    assert json.loads(llamac_command("cache", "path", "--json").out) == {"path": str(cache_folder)}
    assert not cache_folder.exists()


def test_list_of_an_empty_cache_prints_a_total_of_0(llamac_command: Command, cache_folder: Path) -> None:
    assert llamac_command("cache", "list") == Result(0, "0 models, 0 B\n", "")


def test_list_in_a_pipe_does_not_truncate_lines(
    llamac_command: Command, filled: Cache, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = llamac_command("cache", "list").out.splitlines()
    assert [line.split()[2] for line in lines[:-1]] == ["q8", "f16", "bf16"]
    assert all(line.endswith(f"  {tiny_llama}") for line in lines[:-1])
    assert [line.split("  ")[-2].strip() for line in lines[:-1]] == ["3 min ago", "1 d ago", "3 d ago"]
    total = sum(entry.bytes for entry in filled.entries())
    assert lines[-1] == f"3 models, {total / 1e3:.1f} kB"


@pytest.mark.parametrize("columns", [20, 40, 71, 72, 80, 200])
def test_list_fits_the_terminal(
    llamac_command: Command, filled: Cache, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = llamac_command("cache", "list").out.splitlines()
    assert max(map(len, lines)) <= columns
    assert len(lines) == (4 if columns >= 72 else 7)
    assert "llama.bin" in lines[0]


def test_list_as_json_has_every_model(llamac_command: Command, filled: Cache, tiny_llama: Path) -> None:
    facts = json.loads(llamac_command("cache", "list", "--json").out)
    assert facts["path"] == str(filled.folder)
    assert [(model["dtype"], model["source"]) for model in facts["models"]] == [
        (dtype, str(tiny_llama)) for dtype in ("q8", "f16", "bf16")
    ]
    assert facts["bytes"] == sum(Path(model["file"]).stat().st_size for model in facts["models"])


def test_control_characters_in_names_are_escaped(
    llamac_command: Command, cache_folder: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    source = tmp_path / "a\x1b[2Jb\n.bin"
    source.write_bytes(tiny_llama.read_bytes())
    llamac.load(source, dtype="q8").close()
    shown = llamac_command("cache", "list").out
    assert "a\\x1b[2Jb\\n.bin" in shown
    assert shown.count("\n") == 2


def test_prune_shows_what_it_deletes(llamac_command: Command, filled: Cache) -> None:
    tried = llamac_command("cache", "prune", "--older-than", "2d", "--dry-run")
    assert re.fullmatch(r"\S+llama\.bin \(not used for 3\.0 days, [\d.]+ kB\)\nwould free [\d.]+ kB\n", tried.out)
    assert len(filled.entries()) == 3
    assert "\nfreed " in llamac_command("cache", "prune", "--older-than", "2d").out
    assert len(filled.entries()) == 2
    assert llamac_command("cache", "prune", "--max-size", "1G").out == "freed 0 B\n"
    facts = json.loads(llamac_command("cache", "prune", "--max-size", "0", "--json").out)
    assert [gone["reason"] for gone in facts["removed"]] == ["the cache is too large"] * 2
    assert filled.entries() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "required: list|rm|prune|path"),
        (("fly",), "invalid choice"),
        (("prune", "--older-than", "30"), "'30' is not a duration such as 30d"),
        (("prune", "--older-than", "d"), "'d' is not a duration"),
        (("prune", "--older-than", "nand"), "'nand' is not a duration"),
        (("prune", "--older-than", "-1d"), "'-1d' is not a duration|expected one argument"),
        (("prune", "--max-size", "20X"), "'20X' is not a size such as 20G"),
        (("prune", "--max-size", "G"), "'G' is not a size"),
        (("prune", "--max-size", "infG"), "'infG' is not a size"),
    ],
)
def test_wrong_usage_is_an_error(llamac_command: Command, arguments: tuple[str, ...], message: str) -> None:
    done = llamac_command("cache", *arguments)
    assert (done.code, done.out) == (2, "")
    assert re.search(message.replace("|rm|prune|", r"\|rm\|prune\|"), done.err)


def test_list_refuses_options_of_prune(llamac_command: Command, filled: Cache) -> None:
    llamac_command("cache", "list", "--all").refuses_with("--all: for `llamac cache prune` only")
    assert len(filled.entries()) == 3


# ---- rm


def ids(cache: Cache) -> dict[str, str]:
    """Map each model's dtype to its id."""
    return {entry.dtype: entry.id for entry in cache.entries()}


def test_rm_deletes_the_model_with_an_id(llamac_command: Command, filled: Cache, tiny_llama: Path) -> None:
    entry = filled.entries()[1]
    done = llamac_command("cache", "rm", entry.id)
    assert done.out == f"{tiny_llama} ({size_text(entry.bytes)})\nfreed {size_text(entry.bytes)}\n"
    assert dtypes(filled) == ["q8", "bf16"]
    facts = json.loads(llamac_command("cache", "rm", filled.entries()[0].key, "--json").out)
    assert [removed["what"] for removed in facts["removed"]] == [str(tiny_llama)]
    assert dtypes(filled) == ["bf16"]
    assert llamac_command("cache", "rm", filled.path(filled.entries()[0].key)).code == 0
    assert dtypes(filled) == []


def test_rm_accepts_a_source_a_path_or_a_unique_prefix(
    llamac_command: Command, cache_folder: Path, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(cache_folder)
    names = ["one.bin", "other.bin"]
    monkeypatch.chdir(tmp_path)

    def fill() -> list[str]:
        cache.prune(everything=True)
        dtypes: tuple[DType, ...] = ("q8", "f16")
        for name, dtype in zip(names, dtypes, strict=True):
            shutil.copy(tiny_llama, tmp_path / name)
            llamac.load(tmp_path / name, dtype=dtype).close()
        return [str(tmp_path / name) for name in names]

    for name in ("one.bin", "./one.bin", str(tmp_path / "one.bin"), str(tmp_path / "on")):
        sources = fill()
        assert llamac_command("cache", "rm", name).code == 0
        assert [entry.source for entry in cache.entries()] == sources[1:]


def test_rm_lists_the_candidates_of_an_ambiguous_name(llamac_command: Command, filled: Cache, tiny_llama: Path) -> None:
    for name in (tiny_llama, str(tiny_llama)[:-3]):
        done = llamac_command("cache", "rm", name)
        done.refuses_with(f"3 models match {str(name)!r}; expected one of ")
        for dtype, number in ids(filled).items():
            assert f"{number} ({dtype}, {tiny_llama})" in done.err
    llamac_command("cache", "rm", "absent").refuses_with("no model matches 'absent'; expected one of ")
    llamac_command("cache", "rm", "").refuses_with("no model matches ''")
    known = ids(filled)["q8"]
    llamac_command("cache", "rm", known, "absent").refuses_with("no model matches 'absent'")  # deletes neither
    assert len(dtypes(filled)) == 3
    assert llamac_command("cache", "rm", *ids(filled).values(), known).code == 0
    llamac_command("cache", "rm", "absent").refuses_with("no model matches 'absent'; the cache is empty")


def test_rm_does_not_delete_a_model_that_is_being_converted(llamac_command: Command, filled: Cache) -> None:
    entry = filled.entries()[0]
    with filled.converting(entry.key):
        llamac_command("cache", "rm", entry.id).fails_with("is being converted; wait for that process")
    assert len(dtypes(filled)) == 3


def test_only_rm_takes_names(llamac_command: Command, filled: Cache) -> None:
    llamac_command("cache", "rm").refuses_with("`llamac cache rm` needs the NAME of a model")
    for action in ("list", "path", "prune"):
        llamac_command("cache", action, "x").refuses_with(f"`llamac cache {action}` takes no NAME")


def test_list_shows_conversions_of_one_source_by_id(
    llamac_command: Command, cache_folder: Path, checkpoint_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source can be converted to the same dtype twice: by default, and because the user named the dtype."""
    monkeypatch.delenv("COLUMNS", raising=False)
    llamac.load(checkpoint_folder).close()
    llamac.load(checkpoint_folder, dtype="f32").close()
    first, second, total = llamac_command("cache", "list").out.splitlines()
    assert total.startswith("2 models")
    assert first != second
    assert {line.split()[3] for line in (first, second)} == {entry.id for entry in Cache(cache_folder).entries()}


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("20G", 20 * 10**9), ("1.5gb", 1500000000), ("2KiB", 2048), ("7B", 7), ("3Mi", 3 << 20)],
)
def test_max_size_accepts_units(text: str, count: int) -> None:
    assert make_parser().parse_args(["cache", "prune", "--max-size", text]).max_size == count


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("5m", 300), ("12h", 43200), ("0.5d", 43200), ("2W", 1209600)]
)
def test_older_than_accepts_units(text: str, seconds: float) -> None:
    assert make_parser().parse_args(["cache", "prune", "--older-than", text]).older_than == seconds
