"""The prompt of `llamac run`: from options, files and pipes, alone and together."""

from __future__ import annotations

import io
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import llamac
from commands import GREEDY, Command
from llamac.cli import prompt
from llamac.errors import ContextFullError
from processes import run_python


def continuation(path: Path, text: str, n: int) -> str:
    with llamac.load(path) as model:
        return model.generate(text, max_tokens=n, temperature=0).text


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Replace standard input by a file descriptor, which is closed after the test."""
    opened = []

    def use(descriptor: int) -> None:
        opened.append(open(descriptor))  # noqa: SIM115
        monkeypatch.setattr(sys, "stdin", opened[-1])

    yield use
    for file in opened:
        file.close()


def run_in_process(path: Path, *options: object) -> int:
    from llamac.cli import run_command

    return run_command(["run", str(path), *GREEDY, "-n", "5", "-q", *map(str, options)])


# ---- one source


def test_the_prompt_comes_from_an_option_a_file_or_a_pipe(
    llamac_command: Command, script: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text("hello\n")
    expected = "hello" + continuation(script, "hello", 8) + "\n"
    options = ("run", script, *GREEDY, "-n", 8, "-q")
    assert llamac_command(*options, "-i", "hello").out == expected
    assert llamac_command(*options, "--prompt", "hello").out == expected
    assert llamac_command(*options, "-f", tmp_path / "prompt.txt").out == expected
    assert llamac_command(*options, "--file", tmp_path / "prompt.txt").out == expected
    assert llamac_command(*options, "-f", "-", stdin=b"hello\n").out == expected
    assert llamac_command(*options, stdin=b"hello").out == expected
    assert llamac_command(*options, stdin=b"hello\n\n").out == "hello\n" + continuation(script, "hello\n", 8) + "\n"


def test_text_without_a_prompt_begins_at_bos(llamac_command: Command, script: Path) -> None:
    for stdin in (None, b""):  # None is a terminal, which is not read
        assert llamac_command("run", script, *GREEDY, "-n", 5, "-q", stdin=stdin).out == "abcde\n"
    assert llamac_command("run", script, "-i", "", *GREEDY, "-n", 5, "-q").out == "abcde\n"


def test_unreadable_prompts_are_errors(llamac_command: Command, script: Path, tmp_path: Path) -> None:
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    llamac_command("run", script, "-f", tmp_path / "latin1.txt").fails_with("latin1.txt", "byte 3 is 0xe9")
    llamac_command("run", script, stdin=b"\xff").fails_with("standard input is not UTF-8", "byte 0 is 0xff")
    llamac_command("run", script, "-f", tmp_path / "absent").fails_with("absent: No such file or directory")
    llamac_command("run", script, "-f", tmp_path).fails_with("Is a directory")
    llamac_command("run", script, "-i", "a\udcff").fails_with("-i is not UTF-8", "byte 1 is 0xff")
    llamac_command("run", script, "-i", "a", "-f", "b").refuses_with("-f/--file: not allowed with argument -i/--prompt")


# ---- -i and a pipe


def test_a_pipe_is_appended_to_the_prompt_after_a_blank_line(llamac_command: Command, script: Path) -> None:
    options = ("run", script, *GREEDY, "-n", 4, "-q")
    joined = "sum up:\n\nsome text"
    expected = joined + continuation(script, joined, 4) + "\n"
    assert llamac_command(*options, "-i", "sum up:", stdin=b"some text\n").out == expected
    assert llamac_command(*options, "-i", "sum up:", "-f", "-", stdin=b"some text\n").out == expected


def test_an_empty_prompt_or_pipe_adds_nothing(llamac_command: Command, script: Path) -> None:
    options = ("run", script, *GREEDY, "-n", 8, "-q")
    alone = "hello" + continuation(script, "hello", 8) + "\n"
    assert llamac_command(*options, "-i", "hello", stdin=b"").out == alone
    assert llamac_command(*options, "-i", "hello").out == alone  # standard input is a terminal
    assert llamac_command(*options, "-i", "", stdin=b"hello").out == alone


def test_a_pipe_is_read_to_its_end(
    script: Path, stdin: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    stdin(reader)

    def write_slowly() -> None:
        with open(writer, "wb", buffering=0) as pipe:
            for part in (b"one ", b"two ", b"three"):
                pipe.write(part)

    thread = threading.Thread(target=write_slowly)
    thread.start()
    assert run_in_process(script, "-i", "count") == 0
    thread.join()
    assert capsys.readouterr().out.startswith("count\n\none two three")


def test_a_file_as_standard_input_is_read(
    script: Path, stdin: Callable[[int], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("from a file\n")
    stdin(os.open(tmp_path / "text", os.O_RDONLY))
    assert run_in_process(script, "-i", "hello") == 0
    assert capsys.readouterr().out.startswith("hello\n\nfrom a file")


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_an_idle_pipe_is_ignored_with_a_warning(
    script: Path,
    stdin: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """A program can inherit a pipe to which nobody writes and which nobody closes."""
    monkeypatch.setattr(prompt, "PIPE_WAIT", 0.05)
    if kind == "pipe":
        reader, writer = os.pipe()
    else:
        reader, writer = (side.detach() for side in socket.socketpair())
    stdin(reader)
    assert run_in_process(script, "-i", "hello") == 0
    out, err = capsys.readouterr()
    assert out == "hello" + continuation(script, "hello", 5) + "\n"
    assert err.startswith("llamac: warning: ignored standard input, a pipe that sent nothing for 0.05 s; `-f -` waits")
    os.close(writer)


@pytest.mark.parametrize("device", ["/dev/null", "/dev/zero"])
def test_devices_are_not_appended_to_a_prompt(
    script: Path, stdin: Callable[[int], None], capsys: pytest.CaptureFixture[str], device: str
) -> None:
    stdin(os.open(device, os.O_RDONLY))
    assert run_in_process(script, "-i", "hello") == 0
    assert capsys.readouterr() == ("hello" + continuation(script, "hello", 5) + "\n", "")


def test_a_closed_standard_input_is_ignored(script: Path) -> None:
    program = """
        import os, sys
        os.close(0)
        sys.stdin = None
        from llamac.cli import run_command
        run_command(["run", sys.argv[1], "-i", "", "-t", "0", "-n", "5", "-q"])
    """
    assert run_python(program, script).stdout == "abcde\n"


# ---- length


def test_an_endless_prompt_is_read_up_to_a_limit(llamac_command: Command, script: Path, tmp_path: Path) -> None:
    """A token of this model has at most 6 bytes, so PROMPT_BYTES is the limit."""

    class Endless(io.RawIOBase):
        read_bytes = 0

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            self.read_bytes += len(buffer)
            assert self.read_bytes < 3 << 20
            buffer[:] = b"a" * len(buffer)
            return len(buffer)

    with (
        llamac.load(script) as model,
        pytest.raises(ContextFullError, match="more than 1048576 bytes: no prompt of this length"),
    ):
        prompt._read(io.BufferedReader(Endless()), "it", model, 64)
    llamac_command("run", script, "-f", "/dev/zero").fails_with("/dev/zero has more than 1048576 bytes", "64 positions")
    llamac_command("run", script, stdin=b"a" * (1 << 20) + b"b").fails_with("standard input has more than")


def test_the_limit_of_a_prompt_grows_with_the_context(script: Path) -> None:
    with llamac.load(script) as model:
        longest = max(len(model.tokenizer.token_bytes(token)) for token in range(model.tokenizer.n_ids))
        context = (1 << 20) // longest + 1000
        data = b"a" * (context * longest)
        assert prompt._read(io.BytesIO(data), "it", model, context) == data
        with pytest.raises(ContextFullError, match=f"it has more than {len(data)} bytes"):
            prompt._read(io.BytesIO(data + b"a"), "it", model, context)


def test_a_prompt_is_tokenized_once(llamac_command: Command, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    original = llamac.Tokenizer.encode

    def encode(tokenizer: llamac.Tokenizer, text: str, **options: Any) -> list[int]:
        texts.append(text)
        return original(tokenizer, text, **options)

    monkeypatch.setattr(llamac.Tokenizer, "encode", encode)
    assert llamac_command("run", tiny_llama, "-i", "hello", "-n", 9).code == 0
    assert texts == ["hello"]
