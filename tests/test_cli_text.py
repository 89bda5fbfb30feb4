"""What reaches a terminal: text of strangers is escaped there, JSON is UTF-8, bars keep to their line."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from builders import byte_ids, checkpoint, llama_config, script_checkpoint, write_model
from commands import GREEDY, Command
from golden.cases import CASES
from golden.tiny_checkpoints import write_checkpoint
from llamac import models
from llamac.cli.progress import progress_bars
from llamac.cli.text import safe_error, safe_line, safe_text
from llamac.export.convert import export

HOSTILE = "a\x1b[2J\x07\n\x9b31m\u202eb\u2028c\ud800d\udcffe\tf"


def test_what_commands_a_terminal_is_escaped() -> None:
    assert safe_line(HOSTILE) == r"a\x1b[2J\x07\n\x9b31m\u202eb\u2028c\ud800d\xffe\tf"
    assert safe_text("a\x1b[2J\r\n\tb") == "a\\x1b[2J\\r\n\tb"
    assert safe_error("wrong:\n  one\n  t\nwo\x1b") == "wrong:\n  one\n  t\\nwo\\x1b"
    harmless = "Zoë, 猫, 🙂‍↔️, \u00ad, e\u0301, \u200f, \ufeff"
    assert safe_line(harmless) == safe_text(harmless) == harmless


def test_names_in_files_are_shown_escaped(llamac_command: Command, llama2c: Path, tmp_path: Path) -> None:
    out = tmp_path / "o\x1bu\nt\udcff.bin"
    done = llamac_command("export", llama2c, out, "--name", HOSTILE)
    assert (done.code, done.err, done.out.count("\n")) == (0, "", 1)
    assert r"o\x1bu\nt\xff.bin: " in done.out
    text = llamac_command("inspect", out).out
    assert r"name        a\x1b[2J\x07\n\x9b31m\u202eb\u2028c?d?e\tf (llama)" in text
    assert r"o\x1bu\nt\xff.bin, " in text
    assert llamac_command("check", out).out.isascii()
    (tmp_path / "x\x1b\n.bin").write_bytes(b"no model, but something else")
    llamac_command("inspect", tmp_path / "x\x1b\n.bin").fails_with(r"x\x1b\n.bin: ")
    llamac_command("run", tmp_path / "y\x1b\n.bin").fails_with(r"y\x1b\n.bin: No such file")


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_json_is_utf_8_whatever_the_names_are(
    llamac_command: Command, llama2c: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    out = tmp_path / "Zoë\udcff.bin"
    assert llamac_command("export", llama2c, out, "--name", "Zoë\x1b\udc80").code == 0
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding, errors="surrogateescape"))
    llamac_command("inspect", out, "--json")
    sys.stdout.flush()
    facts = json.loads(raw.getvalue().decode("utf-8"))
    assert facts["metadata"]["name"] == "Zoë\x1b?"
    assert facts["file"].endswith("Zoë?.bin")


def test_generated_text_is_escaped_on_terminals_only(
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


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_a_bar_keeps_to_one_line(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    with progress_bars() as progress:
        progress("reference logits", 0, 23)
        progress("writing", 1_234_567, 12_345_678_901)
    shown = terminal.getvalue()
    assert "wr" in shown
    assert shown.count("\n") == 1  # at the end, where the bar is wiped out


# ---- what inspect tells


def test_inspect_tells_rope_tokenizer_and_probes(llamac_command: Command, tmp_path: Path) -> None:
    def facts_of(path: object) -> tuple[dict[str, object], str]:
        return json.loads(llamac_command("inspect", path, "--json").out), llamac_command("inspect", path).out

    facts, text = facts_of("stories")
    assert facts["rope"] == [{"kind": "default", "dim": 32, "original_context": 0, "attention_factor": 1.0}]
    assert facts["probes"] == {"source": "llamac-numpy"}
    assert "rope        default scaling; one table; 32 dimensions, factor 1\n" in text
    assert "probes      reference by llamac-numpy\n" in text
    assert "tokenizer   spm, " in text
    facts, text = facts_of("stories-gpt2")
    assert facts["rope"] == []
    assert "rope" not in text
    assert "tokenizer   bpe, " in text

    for name, kind in (
        ("llama-longrope", "longrope"),
        ("llama-linear", "linear"),
        ("llama-rope_parameters", "default"),
    ):
        write_checkpoint(tmp_path / name, CASES[name].config)
        export(tmp_path / name, tmp_path / f"{name}.bin", probe_source=None)
        facts, text = facts_of(tmp_path / f"{name}.bin")
        assert f"rope        {kind} scaling; " in text
        assert ("a short table up to 16 positions, a long one beyond" in text) == (kind == "longrope")
        assert (facts["probes"], facts["tokenizer"]) == (None, None)
        assert "probes      none\n" in text
        assert "tokenizer   none; " in text
    facts, text = facts_of(write_model(tmp_path / "plain.bin", checkpoint(llama_config())))
    assert "rope        unknown scaling; one table; 8 dimensions, factor 1\n" in text


def test_inspect_shows_models_whose_tokenizer_is_none(llamac_command: Command, tmp_path: Path) -> None:
    for data in (b"{", b"[]", b'{"decoder": 5}', b'{"decoder": {"type": "Sequence", "decoders": 3}}', b"\xff"):
        made = checkpoint(llama_config())
        assert made.tokenizer is not None
        made.tokenizer = (data, *made.tokenizer[1:])
        path = write_model(tmp_path / "odd.bin", made)
        assert "tokenizer   unknown, " in llamac_command("inspect", path).out


def test_check_tells_who_made_the_reference(llamac_command: Command) -> None:
    assert llamac_command("check", "stories").out.endswith(" of the largest logit, reference by llamac-numpy\n")


def test_tensors_need_a_model(llamac_command: Command) -> None:
    llamac_command("inspect", "--tensors").fails_with("--tensors", "llamac inspect stories --tensors")
    assert "layers.1.attn_q.weight" in llamac_command("inspect", "stories", "--tensors").out


def test_the_built_in_models_have_names(llamac_command: Command) -> None:
    for name in models.NAMES:
        by_name = llamac_command("run", name, "-i", "Once", *GREEDY, "-n", 12, "-q")
        assert by_name.code == 0
        assert by_name == llamac_command("run", models.path(name), "-i", "Once", *GREEDY, "-n", 12, "-q")
        assert llamac_command("check", name).code == 0
    llamac_command("run", "stories-llama").fails_with("stories-llama: No such file or directory")
