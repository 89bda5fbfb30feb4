"""`llamac explain`: what it prints, at any width, in a pipe and on a terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from builders import byte_ids, script_checkpoint, write_model
from commands import Command

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that continues a prompt of n tokens with the alphabet; with a chat template."""
    made = script_checkpoint(byte_ids(ALPHABET))
    made.chat_template = "{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}"
    return write_model(tmp_path / "model.bin", made, generation={"temperature": 0})


def test_everything_is_named(model: Path, llamac_command: Command) -> None:
    result = llamac_command("explain", model, "-i", "xyz\x1b", "--stop", "g")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[:3] == ["prompt", "| xyz\\x1b", "tokens"]
    assert "\x1b" not in result.out
    assert re.search(r"^ +\d+ +\d+  'x' +78$", result.out, re.MULTILINE)
    for name in ("BOS", "context", "cut", "cached", "text", "ended by  the stop string 'g'", "new"):
        assert any(line.startswith(name) for line in lines), name


@pytest.mark.parametrize("columns", [30, 40, 100])
def test_no_line_is_wider_than_the_terminal(
    columns: int, model: Path, llamac_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    result = llamac_command(
        "explain", model, "-i", "a word and another" * 3, "--after", "a word", "--stop", "never ever"
    )
    assert result.code == 0
    assert max(map(len, result.out.splitlines())) <= columns
    assert "cached" in result.out


def test_only_a_terminal_gets_colors(model: Path, llamac_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("explain", model, "-i", "xyz", "--after", "xy", "--no-generate")
    plain = llamac_command(*command).out
    assert "\x1b[" not in plain
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    colored = llamac_command(*command).out
    assert "\x1b[32m" in colored
    assert re.sub(r"\x1b\[\d*m", "", colored) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert llamac_command(*command).out == plain


def test_json_has_every_fact(model: Path, llamac_command: Command) -> None:
    facts = json.loads(llamac_command("explain", model, "-i", "xy", "-n", "3", "--json").out)
    assert facts["prompt"] == "xy"
    assert [bytes(token["bytes"]) for token in facts["tokens"]][-2:] == [b"x", b"y"]
    assert facts["result"]["finish_reason"] == "length"
    assert len(facts["result"]["tokens"]) == 3
    facts = json.loads(llamac_command("explain", model, "-i", "xy", "--no-generate", "--json").out)
    assert facts["result"] is None


def test_conversations(model: Path, tmp_path: Path, llamac_command: Command) -> None:
    result = llamac_command("explain", model, "--chat", "--system", "be", "-i", "xy", "--no-generate")
    assert "| system: beuser: xy" in result.out
    assert "the chat template decides" in result.out
    path = tmp_path / "messages.json"
    messages = [{"role": "user", "content": "zz"}]
    for document in (messages, {"format": "llamac-chat", "messages": messages}):
        path.write_text(json.dumps(document))
        assert "| user: zz" in llamac_command("explain", model, "--messages", path, "--no-generate").out
    for wrong in ("{", "[]", "[1]", "{}"):
        path.write_text(wrong)
        llamac_command("explain", model, "--messages", path).refuses_with("messages.json")
    llamac_command("explain", model, "--messages", path, "-i", "x").refuses_with("--messages is a whole conversation")
    llamac_command("explain", model, "--system", "x", "-i", "x").refuses_with("--system needs --chat")
    llamac_command("explain", model, "-f", path, "-i", "x").refuses_with("not allowed with argument -i/--prompt")


def test_a_prompt_that_does_not_fit_is_shown_and_refused(model: Path, llamac_command: Command) -> None:
    result = llamac_command("explain", model, "-i", "x" * 20, "--context", "8")
    assert result.code == 1
    assert result.out.count("'x'") == 20
    assert "refused" in result.out
    cut = llamac_command(
        "explain", model, "-i", "x" * 20, "--context", "8", "--context-overflow", "truncate_middle", "-n", "2"
    )
    assert cut.code == 0
    assert re.search(r"^cut +\d+ of \d+ tokens, numbers", cut.out, re.MULTILINE)
    assert "'x'  cut" in cut.out


def test_what_a_shift_keeps_is_shown(tiny_llama: Path, llamac_command: Command) -> None:
    options = ("--context", 8, "--context-overflow", "shift", "--context-keep", 2)
    assert (
        "the first 2 tokens, when the full context is shifted"
        in llamac_command("explain", tiny_llama, "-i", "x", *options).out
    )
