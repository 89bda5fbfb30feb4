"""`llamac chat` through a pipe and on a pseudo-terminal: turns, commands, files, interruptions, Markdown."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import llamac
from builders import byte_ids, script_checkpoint, write_model
from commands import Command
from llamac.cli.chat_input import read_message
from llamac.cli.chat_screen import Block, MarkdownScreen, Screen, split_blocks
from llamac.tools.message import Delta, ToolCallDelta
from processes import heed_signals
from terminals import Person, screen_of

ALPHABET = "abcdefghijklmnopqrstuvwxyz" * 2
JOINED = "{% for message in messages %}{{ message.content }}{% endfor %}"
EMPTY = "{# the prompt is BOS #}"
SMALL = ("-n", "3")
EDITOR = "\x1b[?2004h"  # prompt_toolkit writes it when it begins to read


def chat_model(path: Path, script: str = ALPHABET, template: str = JOINED) -> Path:
    """A model that predicts the n-th character of the script after n tokens."""
    made = script_checkpoint(byte_ids(script), context=64)
    made.chat_template = template
    return write_model(path, made, generation={"temperature": 0})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return chat_model(tmp_path / "model.bin")


def answers(path: Path, messages: list[str], system: str = "") -> list[str]:
    """What the model answers to each message of a conversation."""
    chat = [{"role": "system", "content": system}] if system else []
    found = []
    with llamac.load(path) as opened:
        for message in messages:
            chat.append({"role": "user", "content": message})
            found.append(opened.chat(chat, max_tokens=3).text)
            chat.append({"role": "assistant", "content": found[-1]})
    return found


def lines(*texts: str) -> bytes:
    return "".join(text + "\n" for text in texts).encode()


# ---- a pipe


def test_each_line_of_a_pipe_is_a_message(llamac_command: Command, model: Path) -> None:
    done = llamac_command("chat", model, *SMALL, stdin=lines("x", "", "yy", "/exit", "z"))
    assert done.code == 0
    assert done.out.splitlines() == answers(model, ["x", "yy"])


def test_the_second_turn_computes_only_what_is_new(llamac_command: Command, model: Path) -> None:
    done = llamac_command("chat", model, *SMALL, stdin=lines("x", "/stats", "y", "/stats"))
    cached = [int(number) for number in re.findall(r"^(\d+) tokens were reused", done.err, re.MULTILINE)]
    assert cached[0] == 0
    assert cached[1] >= 3


def test_a_message_can_have_several_lines(llamac_command: Command, model: Path) -> None:
    done = llamac_command("chat", model, *SMALL, stdin=lines("a\\", "b", '"""', "c", "", "d", '"""'))
    assert done.out.splitlines() == answers(model, ["a\nb", "c\n\nd"])
    left = iter(["a\\"])

    def line(prompt: str) -> str:
        for text in left:
            return text
        raise EOFError

    assert read_message(line) == "a"


def test_the_last_line_needs_no_line_feed(llamac_command: Command, model: Path) -> None:
    assert llamac_command("chat", model, *SMALL, stdin=b"x").out.splitlines() == answers(model, ["x"])


def test_an_error_ends_a_pipe(llamac_command: Command, model: Path) -> None:
    llamac_command("chat", model, stdin=lines("x" * 99, "y")).fails_with("context")
    llamac_command("chat", model, stdin=lines("/lod x")).refuses_with("no command /lod; did you mean /load?")
    llamac_command("chat", model, stdin=lines("/set temperature hot")).refuses_with(
        "/set temperature: temperature is 'hot'"
    )
    llamac_command("chat", model, stdin=lines("/set heat 1")).refuses_with("no setting 'heat'")
    llamac_command("chat", model, stdin=lines("/set heat")).refuses_with("needs a name and a value")
    llamac_command("chat", model, stdin=lines("/SET")).refuses_with("no command /SET; did you mean /set?")
    llamac_command("chat", model, stdin=lines("/reset now")).refuses_with("/reset takes no argument")
    llamac_command("chat", model, stdin=lines("/exit now")).refuses_with("/exit takes no argument")
    llamac_command("chat", model, stdin=b"a\xff\n").fails_with("a message is not UTF-8 text: byte 1 is 0xff")
    llamac_command("chat", model, stdin=lines("/save")).refuses_with("/save needs the name of a file")
    llamac_command("chat", model, stdin=lines("/stats")).refuses_with("no answer yet")
    llamac_command("chat", model, stdin=lines("/regenerate")).refuses_with("no answer to replace")


def test_a_model_without_a_template_is_refused_with_advice(llamac_command: Command, tiny_llama: Path) -> None:
    llamac_command("chat", tiny_llama, stdin=b"").refuses_with(
        "has no chat template", "llamac chat model.gguf", "none for the built-in helper"
    )


# ---- commands


def test_the_system_message_can_be_set_and_shown(llamac_command: Command, model: Path) -> None:
    expected = answers(model, ["x"], "ss")
    assert llamac_command("chat", model, *SMALL, "--system", "ss", stdin=b"x").out.splitlines() == expected
    done = llamac_command("chat", model, *SMALL, stdin=lines("/system", "/system s", "/system ss", "/system", "x"))
    assert done.out.splitlines() == expected
    assert done.err.splitlines()[:2] == ["llamac: there is no system message", "ss"]


def test_an_empty_system_message_is_replaced(llamac_command: Command, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    path.write_text(json.dumps({"format": "llamac-chat", "messages": [{"role": "system", "content": ""}]}))
    done = llamac_command("chat", model, *SMALL, "--load", path, stdin=lines("/system ss", f"/save {path}"))
    assert (done.code, done.err) == (0, "")
    assert json.loads(path.read_text())["messages"] == [{"role": "system", "content": "ss"}]


def test_reset_keeps_the_system_message(llamac_command: Command, model: Path) -> None:
    done = llamac_command("chat", model, *SMALL, "--system", "ss", stdin=lines("x", "y", "/reset", "x"))
    assert done.out.splitlines() == [*answers(model, ["x", "y"], "ss"), *answers(model, ["x"], "ss")]


def test_regenerate_replaces_the_answer(llamac_command: Command, model: Path) -> None:
    done = llamac_command("chat", model, *SMALL, stdin=lines("x", "/regenerate", "y"))
    first, second = answers(model, ["x", "y"])
    assert done.out.splitlines() == [first, first, second]


def test_settings_are_changed_and_shown(llamac_command: Command, model: Path) -> None:
    typed = lines("/set max-tokens 2", "/set stop d", "/set", "x", "/set max_tokens default", "/set stop none", "/set")
    done = llamac_command("chat", model, "--seed", 5, stdin=typed)
    assert len(done.out.strip()) == 2
    shown = [line for line in done.err.splitlines() if not line.startswith("llamac: ")]
    assert shown == ["max_tokens 2", "temperature 0.0", "seed 5", "stop 'd'", "temperature 0.0", "seed 5"]


def test_a_saved_conversation_continues(llamac_command: Command, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    assert llamac_command("chat", model, *SMALL, stdin=lines("x", f"/save {path}")).code == 0
    messages = json.loads(path.read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    expected = answers(model, ["x", "y"])[1:]
    assert llamac_command("chat", model, *SMALL, stdin=lines(f"/load {path}", "y")).out.splitlines() == expected
    done = llamac_command("chat", model, *SMALL, "--load", path, stdin=lines("y", f"/save {path}"))
    assert done.out.splitlines() == expected
    assert len(json.loads(path.read_text())["messages"]) == 4
    other = llamac_command("chat", model, *SMALL, "--load", path, "--system", "be", stdin=lines(f"/save {path}"))
    assert (other.code, other.err) == (0, "")
    assert json.loads(path.read_text())["messages"][0] == {"role": "system", "content": "be"}
    assert [entry.name for entry in tmp_path.iterdir() if "tmp" in entry.name] == []


@pytest.mark.parametrize(
    "text", ["notes", "{}", '{"format": "llamac-chat", "messages": [1]}', '{"format": "llamac-chat", "messages": [{}]}']
)
def test_other_files_are_neither_loaded_nor_replaced(
    llamac_command: Command, model: Path, tmp_path: Path, text: str
) -> None:
    path = tmp_path / "notes.json"
    path.write_text(text)
    for command in ("/load", "/save"):
        llamac_command("chat", model, *SMALL, stdin=lines(f"{command} {path}")).fails_with("notes.json")
        assert path.read_text() == text


def test_help_lists_the_commands_and_two_slashes_begin_a_message(
    llamac_command: Command, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    done = llamac_command("chat", model, *SMALL, stdin=lines("/help", "//x"))
    assert all(f"/{name}" in done.err for name in ("system", "reset", "regenerate", "set", "stats", "save", "load"))
    assert "\n    show the system message,\n    or replace it\n" in done.err
    assert "\nmessage with /, type //.\n" in done.err
    assert done.out.splitlines() == answers(model, ["/x"])


# ---- reasoning


def test_reasoning_is_hidden_in_a_pipe_unless_asked_for(llamac_command: Command, tmp_path: Path) -> None:
    model = chat_model(tmp_path / "model.bin", "<think>\nhm\n</think>\n\nyes", EMPTY)
    path = tmp_path / "saved.json"
    done = llamac_command("chat", model, "-n", 24, stdin=lines("x", f"/save {path}"))
    assert done.out == "yes\n"
    assert json.loads(path.read_text())["messages"][1] == {
        "role": "assistant",
        "content": "yes",
        "reasoning_content": "hm",
    }
    assert llamac_command("chat", model, "-n", 24, "--reasoning", "show", stdin=b"x").out == "hm\n\nyes\n"


# ---- Markdown


def test_markdown_is_cut_between_blocks() -> None:
    assert split_blocks("a\n\nb") == ("a\n\n", "b")
    assert split_blocks("a\n") == ("", "a\n")
    assert split_blocks("```\na\n\nb") == ("", "```\na\n\nb")
    assert split_blocks("a\n\n```\nb\n\nc\n```\n\nd") == ("a\n\n```\nb\n\nc\n```\n\n", "d")


# ---- a terminal


def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves(model: Path, people: list[Person]) -> None:
    people.append(person := Person(model, "--plain", "-n", 40, slow=True))
    person.wait_for(person.prompt)
    person.type("x\n")
    person.wait_for("def")
    person.type("\x03")
    assert "uvwx" not in person.wait_for("llamac: stopped")
    person.wait_for(person.prompt)
    person.type("\x03")
    person.wait_for("Ctrl-D or /exit leaves")
    person.type("/nothing\n")
    person.wait_for("there is no command /nothing")
    person.type("x\udcffy\n")  # a byte that is never in UTF-8
    person.wait_for("error: a message is not UTF-8 text: byte 1 is 0xff")
    person.type("/set max_tokens 2\ny\n")
    person.wait_for("was cut at 2 tokens")
    assert person.leave() == 0


def test_ctrl_c_just_before_the_wait_for_a_line_is_not_lost() -> None:
    """interrupt_main() notes a signal without interrupting a system call, as one does that arrives before the call."""
    program = """if True:
        import _thread, threading
        from llamac.cli.chat_input import typed_line
        threading.Timer(0.3, _thread.interrupt_main).start()
        try:
            typed_line("> ")
        except KeyboardInterrupt:
            print("interrupted")
    """
    master, slave = pty.openpty()  # both ends: only then does input() use readline
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, preexec_fn=heed_signals)
    os.close(slave)
    try:
        assert process.wait(60) == 0
        assert b"interrupted" in os.read(master, 4096)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_an_answer_on_a_terminal_cannot_move_the_cursor(tmp_path: Path, people: list[Person]) -> None:
    people.append(person := Person(chat_model(tmp_path / "m.bin", "a\x1b[2Jb", EMPTY), "--plain", "-n", 6))
    person.wait_for(person.prompt)
    person.type("x\n")
    assert "a\\x1b[2Jb" in person.wait_for("was cut")
    assert person.leave() == 0


def test_reasoning_on_a_terminal_is_dim(tmp_path: Path, people: list[Person]) -> None:
    people.append(person := Person(chat_model(tmp_path / "m.bin", "<think>h</think>yes", EMPTY), "--plain", "-n", 19))
    person.wait_for(person.prompt)
    person.type("x\n")
    assert "\x1b[2mh\x1b[0m\r\n\r\nyes" in person.wait_for("was cut")
    assert person.leave() == 0


@pytest.mark.skipif(not importlib.util.find_spec("prompt_toolkit"), reason="needs the extra chat")
def test_ctrl_c_leaves_each_line_of_markdown_once(tmp_path: Path, people: list[Person]) -> None:
    """The first line is as long as the screen is wide, so an echoed ^C would begin another line."""
    pytest.importorskip("rich")
    text = "a" * 35 + " bcd\nefghijkl mnopqrst uvwx"
    path = chat_model(tmp_path / "m.bin", text, EMPTY)
    people.append(person := Person(path, "-n", len(text), slow=True, prompt=EDITOR))
    person.wait_for(person.prompt)
    person.type("x\r")
    person.wait_for("efgh")
    person.type("\x03")
    person.wait_for("llamac: stopped")
    assert "^C" not in person.shown
    lines = screen_of(person.shown)
    assert sum("a" * 35 in line for line in lines) == 1
    assert sum("efgh" in line for line in lines) == 1
    assert person.leave() == 0


@pytest.mark.parametrize("write", range(12))
def test_ctrl_c_while_a_block_is_drawn_leaves_each_line_once(write: int) -> None:
    console = pytest.importorskip("rich.console")
    shown = InterruptedFile(write)
    block = Block(console.Console(file=shown, force_terminal=True, width=40, highlight=False))
    pieces = ["one two\n", "three\n\nfour", " five\n", "six\n\n", "seven"]
    added = ""
    with contextlib.suppress(KeyboardInterrupt):
        for piece in pieces:
            added += piece
            block.add(piece)
        block.end()
    shown.presses = False
    block.end()
    words = " ".join(screen_of(shown.getvalue().replace("\n", "\r\n"))).split()
    assert words == added.split()


def test_markdown_keeps_the_ends_of_lines() -> None:
    console = pytest.importorskip("rich.console")
    shown = io.StringIO()
    block = Block(console.Console(file=shown, force_terminal=True, width=40, highlight=False))
    block.add("Colors:\n• *red*\n• blue\n\n> sun\n> moon\n")
    block.end()
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in screen_of(shown.getvalue().replace("\n", "\r\n"))]
    assert [line.strip(" ▌") for line in lines if line] == ["Colors:", "• red", "• blue", "sun", "moon"]


class InterruptedFile(io.StringIO):
    """A file at one of whose writes somebody presses Ctrl-C."""

    def __init__(self, write: int) -> None:
        super().__init__()
        self._left = write
        self.presses = True

    def write(self, text: str) -> int:
        self._left -= 1
        if self._left == -1 and self.presses:
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


@pytest.mark.parametrize(("reasons", "thought"), [(True, ["hm"]), (False, [])])
def test_each_part_of_an_answer_begins_a_line(
    reasons: bool, thought: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Markdown, and as plain text: reasoning, then text, then calls, whose arguments are one line."""
    pytest.importorskip("rich")
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # no terminal
    answer = [
        *(Delta(reasoning="h"), Delta(reasoning="m"), Delta(content="yes")),
        *(Delta(tool_call=ToolCallDelta(0, "a", "f", '{"a":')), Delta(tool_call=ToolCallDelta(0, arguments=" 1}"))),
        Delta(tool_call=ToolCallDelta(1, "b", "g", "{}")),
    ]
    for screen in (Screen(reasons), MarkdownScreen(reasons)):
        screen.show(answer)
        shown = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line]
        assert shown == [*thought, "yes", 'call f {"a": 1}', "call g {}"]


@pytest.mark.skipif(not importlib.util.find_spec("prompt_toolkit"), reason="needs the extra chat")
def test_the_editor_reads_lines_and_rich_shows_markdown(tmp_path: Path, people: list[Person]) -> None:
    pytest.importorskip("rich")
    people.append(person := Person(chat_model(tmp_path / "m.bin", "**bold**\n\nnext", EMPTY), "-n", 14, prompt=EDITOR))
    person.wait_for(person.prompt)
    person.type("x\x1b\ry\r")
    shown = person.wait_for("was cut")
    assert "\x1b[1mbold\x1b[0m" in shown
    assert "next" in shown
    person.wait_for(person.prompt)
    person.type("\x03")
    person.wait_for("Ctrl-D or /exit leaves")
    person.wait_for(person.prompt)
    person.type("/sys\t")
    person.wait_for("tem")
    person.type("\r")
    person.wait_for("there is no system message")
    assert person.leave() == 0


def test_errors_of_the_system_name_the_file_first(tmp_path: Path, people: list[Person]) -> None:
    people.append(person := Person(chat_model(tmp_path / "m.bin", "abc", EMPTY), "--plain", "-n", 3))
    person.wait_for(person.prompt)
    person.type("/load no.json\n")
    assert "llamac: error: no.json: No such file" in person.wait_for("directory")
    assert person.leave() == 0


def test_an_empty_file_is_replaced(llamac_command: Command, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    path.touch()
    assert llamac_command("chat", model, *SMALL, stdin=lines("x", f"/save {path}")).code == 0
    assert len(json.loads(path.read_text())["messages"]) == 2
