"""Strings from files: escaped in JSON and on terminals."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from builders import byte_ids, script_checkpoint, write_model
from commands import GREEDY, Command
from llamac.cli.text import safe_error, safe_line, safe_text

HOSTILE = "a\x1b[2J\x07\n\x9b31m\u202eb\u2028c\ud800d\udcffe\tf"


def test_control_characters_are_escaped() -> None:
    assert safe_line(HOSTILE) == r"a\x1b[2J\x07\n\x9b31m\u202eb\u2028c\ud800d\xffe\tf"
    assert safe_text("a\x1b[2J\r\n\tb") == "a\\x1b[2J\\r\n\tb"
    assert safe_error("wrong:\n  one\n  t\nwo\x1b") == "wrong:\n  one\n  t\\nwo\\x1b"
    harmless = "Zoë, 猫, 🙂‍↔️, \u00ad, e\u0301, \u200f, \ufeff"
    assert safe_line(harmless) == safe_text(harmless) == harmless


def test_names_from_files_are_escaped(llamac_command: Command, llama2c: Path, tmp_path: Path) -> None:
    out = tmp_path / "o\x1bu\nt\udcff.bin"
    done = llamac_command("export", llama2c, out, "--name", HOSTILE)
    assert (done.code, done.err, done.out.count("\n")) == (0, "", 1)
    assert r"o\x1bu\nt\xff.bin: " in done.out
    text = llamac_command("inspect", out).out
    assert r"name        a\x1b[2J\x07\n\x9b31m\u202eb\u2028c?d?e\tf (llama)" in text
    assert r"o\x1bu\nt\xff.bin, " in text
    assert llamac_command("check", out).out.isascii()
    (tmp_path / "x\x1b\n.bin").write_bytes(b"not a model, but something else")
    llamac_command("inspect", tmp_path / "x\x1b\n.bin").fails_with(r"x\x1b\n.bin: ")
    llamac_command("run", tmp_path / "y\x1b\n.bin").fails_with(r"y\x1b\n.bin: No such file")


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii", "utf-16"])
def test_json_is_always_ascii(
    llamac_command: Command, llama2c: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    out = tmp_path / "Zoë\udcff.bin"
    name = "Zoë\x1b\x7f\x9b\u202e\u2066\u200f\u2028\U0001f642"
    assert llamac_command("export", llama2c, out, "--name", f"{name}\udc80").code == 0
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding, errors="surrogateescape"))
    llamac_command("inspect", out, "--json")
    sys.stdout.flush()
    text = raw.getvalue().decode(encoding)
    assert text.isascii()
    assert text.replace("\n", "").isprintable()
    facts = json.loads(text)
    assert facts["metadata"]["name"] == f"{name}?"
    assert facts["file"].endswith("Zoë?.bin")


def test_every_command_with_json_escapes_names(
    llamac_command: Command, llama2c: Path, cache_folder: Path, tmp_path: Path
) -> None:
    source = llama2c.rename(tmp_path / "\u202ename\x9b.bin")
    quick = ("--prompt", "1", "--decode", "0", "--rounds", "1", "--threads", "1")
    for command in (("bench", source, *quick, "--json", "-"), ("cache", "list"), ("cache", "prune", "--all")):
        done = llamac_command(*command, *(["--json"] if command[0] == "cache" else []))
        assert done.code == 0, done.err
        assert done.out.isascii()
        assert done.out.replace("\n", "").isprintable()
        assert "\u202ename\x9b" in json.dumps(json.loads(done.out), ensure_ascii=False)
    llamac_command("bench", source, *quick, "--json", tmp_path / "speed.json")
    assert (tmp_path / "speed.json").read_text("ascii").replace("\n", "").isprintable()


def test_generated_text_is_escaped_only_on_terminals(
    llamac_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = write_model(tmp_path / "script.bin", script_checkpoint(byte_ids("a\x1b[2J\nb\té")))
    run = ("run", script, *GREEDY, "-n", 10, "-q", "-f", tmp_path / "prompt.txt")
    (tmp_path / "prompt.txt").write_text("")
    assert llamac_command(*run).out == "a\x1b[2J\nb\té\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert llamac_command(*run).out == "a\\x1b[2J\nb\té\n"
    (tmp_path / "prompt.txt").write_text("\x1b")
    assert llamac_command(*run).out.startswith("\\x1b")
