"""Reading the head of a GGUF file: in several steps, truncated at any point, and with hostile counts."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vocab_samples import gguf_file, gguf_value

from llamac._core import read_strings
from llamac.errors import ModelError
from llamac.format import gguf_metadata
from llamac.format.gguf_metadata import MAX_ARRAYS, parse_metadata, read_head, read_metadata
from processes import TIMEOUT

ENTRIES: list[tuple[str, Any]] = [
    ("strings", ("[", "s", ["a", "", "long " * 50])),
    ("number", 7),
    ("numbers", ("[", "I", list(range(100)))),
    ("string", "x" * 300),
]


def write_gguf(path: Path) -> Path:
    path.write_bytes(gguf_file(ENTRIES))
    return path


@pytest.mark.parametrize("count", [24, 64, 100, 1 << 24])
def test_a_long_head_is_read_in_several_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    expected = parse_metadata(path.read_bytes())
    monkeypatch.setattr(gguf_metadata, "FIRST_READ_BYTES", count)
    assert read_metadata(path).values == expected.values
    assert read_head(path)[0].end == expected.end


@pytest.mark.parametrize("count", [24, 64])
def test_truncation_is_detected_in_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    data = gguf_file(ENTRIES)
    monkeypatch.setattr(gguf_metadata, "FIRST_READ_BYTES", count)
    for size in range(5, len(data), 13):
        (tmp_path / "m.gguf").write_bytes(data[:size])
        with pytest.raises(ModelError, match=r"truncated|do not fit"):
            read_metadata(tmp_path / "m.gguf")


def test_a_file_truncated_while_it_is_read_does_not_kill_the_process(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_file([("strings", ("[", "s", ["x" * 1000] * 100))]))
    program = """
        import os, sys
        from llamac.errors import ModelError
        from llamac.format import gguf_metadata
        path = sys.argv[1]
        header = gguf_metadata._Reader._header
        def truncating(reader):
            os.truncate(path, 0)
            return header(reader)
        gguf_metadata._Reader._header = truncating
        try:
            print(len(gguf_metadata.read_metadata(path).values["strings"]))
        except ModelError as error:
            print(error)
    """
    code = "\n".join(line[8:] for line in program.splitlines())
    command = [sys.executable, "-c", code, os.fspath(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_file_that_shrinks_between_two_steps_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    size = path.stat().st_size
    reader = gguf_metadata._Reader

    def shrinking(data: bytes, total: int, name: str) -> gguf_metadata._Reader:
        os.truncate(path, min(100, size))
        return reader(data, total, name)

    monkeypatch.setattr(gguf_metadata, "FIRST_READ_BYTES", 64)
    monkeypatch.setattr(gguf_metadata, "_Reader", shrinking)
    with pytest.raises(ModelError, match="truncated"):
        read_metadata(path)


def nested_arrays(count: int) -> bytes:
    """A GGUF file with one array of `count` empty arrays."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + gguf_value("a")[1]
    return head + struct.pack("<IIQ", 9, 9, count) + struct.pack("<IQ", 4, 0) * count


def test_the_number_of_arrays_is_limited() -> None:
    assert parse_metadata(nested_arrays(MAX_ARRAYS - 1)).values == {"a": [[]] * (MAX_ARRAYS - 1)}
    with pytest.raises(ModelError, match=f"an array of {MAX_ARRAYS} arrays, expected at most {MAX_ARRAYS}"):
        parse_metadata(nested_arrays(MAX_ARRAYS))


def test_arrays_of_all_levels_count_towards_the_limit() -> None:
    half = struct.pack("<IQ", 9, MAX_ARRAYS // 2) + struct.pack("<IQ", 4, 0) * (MAX_ARRAYS // 2)
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + gguf_value("a")[1]
    with pytest.raises(ModelError, match="expected at most"):
        parse_metadata(head + struct.pack("<IIQ", 9, 9, 2) + half + half)


def test_long_arrays_of_strings_are_read_by_several_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C can interrupt only between calls of the core."""
    counts: list[int] = []

    def counted(data: bytes, at: int, count: int) -> Any:
        counts.append(count)
        return read_strings(data, at, count)

    monkeypatch.setattr(gguf_metadata, "read_strings", counted)
    monkeypatch.setattr(gguf_metadata, "STRINGS", 7)
    texts = [f"text {i}" for i in range(23)]
    (tmp_path / "a.gguf").write_bytes(gguf_file([("texts", ("[", "s", texts))]))
    assert read_metadata(tmp_path / "a.gguf").values["texts"] == texts
    assert counts == [7, 7, 7, 2]
