"""llamac's commands as processes: entry points, broken pipes, full disks, closed streams, encodings."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import llamac
from commands import GREEDY, Command
from llamac import models
from processes import TIMEOUT


def process(*arguments: object, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run `python -m llamac` in a process."""
    return subprocess.run(
        [sys.executable, "-m", "llamac", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        env={**os.environ, **environment},
        timeout=TIMEOUT,
    )


def writing_to(out: int, *arguments: object, **environment: str) -> tuple[int, bytes]:
    """Run a process whose output goes to a file descriptor; return its exit code and stderr."""
    command = [sys.executable, "-m", "llamac", *map(str, arguments)]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.PIPE,
        env={**buffered, **environment},
        timeout=TIMEOUT,
    )
    return done.returncode, done.stderr


def damaged(path: Path, out: Path) -> Path:
    """Write a copy of a model with one bit changed in its tokenizer."""
    with llamac.load(path) as model:
        section = model.file.sections["tokenizer"]
    data = bytearray(path.read_bytes())
    data[section.offset + section.bytes // 2] ^= 4
    out.write_bytes(data)
    return out


# ---- entry points


def test_sources_without_the_compiled_core_are_an_import_error(tmp_path: Path) -> None:
    """After `pip install .`, Python run next to the checkout finds the sources first."""
    shutil.copytree(Path(llamac.__file__).parent, tmp_path / "llamac", ignore=shutil.ignore_patterns("*.so"))
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import llamac; llamac.load"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ModuleNotFoundError: {tmp_path / 'llamac'} has llamac's sources")
    assert done.stderr.splitlines()[-1].endswith("`pip install -e .`")


def test_python_m_llamac_and_the_installed_commands_run(script: Path, llama2c: Path, tmp_path: Path) -> None:
    expected = b"abcde\n"
    assert process("run", script, *GREEDY, "-n", 5, "-q").stdout == expected
    folder = Path(sys.executable).parent
    for name, arguments in (
        ("llamac", ["run", script, *GREEDY, "-n", "5", "-q"]),
        ("llamac-export", [llama2c, tmp_path / "m.bin"]),
    ):
        if not (folder / name).exists():
            pytest.skip(f"{name} is not installed next to {sys.executable}")
        done = subprocess.run(
            [folder / name, *arguments], stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout == expected or done.stdout.startswith(bytes(tmp_path / "m.bin"))


def test_run_without_a_model_uses_the_built_in_one(llamac_command: Command) -> None:
    options = ("-i", "Once upon a time", *GREEDY, "-n", 30, "-q")
    done = llamac_command("run", *options)
    assert done.code == 0, done.err
    assert done == llamac_command("run", models.path("stories"), *options)
    assert llamac_command("check").code == 0


# ---- broken pipes, full disks


def test_a_broken_pipe_is_not_an_error(tiny_llama: Path, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    for arguments in (["run", tiny_llama, "-i", "a", "-q"], ["inspect", tiny_llama], ["check", tiny_llama], ["--help"]):
        assert writing_to(writer, *arguments) == (0, b"")
    # an error after some output
    code, complaint = writing_to(writer, "check", damaged(tiny_llama, tmp_path / "damaged.bin"))
    assert code == 1
    assert re.fullmatch(rb"llamac: error: .*section tokenizer: [^\n]*SHA-256[^\n]*\n", complaint)
    os.close(writer)


def test_a_pipeline_with_head_succeeds(script: Path) -> None:
    command = f"set -o pipefail; '{sys.executable}' -m llamac inspect '{script}' --tensors | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=TIMEOUT)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"name ")


def test_a_broken_pipe_does_not_hide_damage(tiny_llama: Path, tmp_path: Path) -> None:
    """`llamac check` knows its result before anyone reads its output."""
    with llamac.load(tiny_llama) as model:
        record = next(record for record in model.file.tensors if record.name == "layers.1.ffn_up.weight")
    data = bytearray(tiny_llama.read_bytes())
    data[record.offset + record.bytes // 2] ^= 4
    (tmp_path / "damaged.bin").write_bytes(data)
    reader, writer = os.pipe()
    os.close(reader)
    assert writing_to(writer, "check", "--data", tmp_path / "damaged.bin") == (1, b"")
    os.close(writer)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version"], ["run", "--help"]])
def test_help_on_a_full_disk_is_an_error(arguments: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        expected = (1, b"llamac: error: standard output: No space left on device\n")
        assert writing_to(full.fileno(), *arguments) == expected


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_of_one_line(tiny_llama: Path, tmp_path: Path) -> None:
    expected = (1, b"llamac: error: standard output: No space left on device\n")
    quick = ("--prompt", "1", "--decode", "0", "--rounds", "1", "--threads", "1")
    with open("/dev/full", "wb") as full:
        assert writing_to(full.fileno(), "run", tiny_llama, "-i", "a", "-q") == expected
        assert writing_to(full.fileno(), "inspect", tiny_llama) == expected
        assert writing_to(full.fileno(), "check", tiny_llama) == expected
        assert writing_to(full.fileno(), "bench", tiny_llama, *quick) == expected
        assert writing_to(full.fileno(), "export", tiny_llama, tmp_path / "out.bin", "--no-tokenizer") == expected


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_named_whatever_buffers_the_output(tiny_llama: Path) -> None:
    expected = (1, b"llamac: error: standard output: No space left on device\n")
    with open("/dev/full", "wb") as full:
        assert writing_to(full.fileno(), "inspect", "helper", "--json") == expected  # more than a buffer
        for arguments in (("run", tiny_llama, "-i", "a", "-q"), ("inspect", tiny_llama)):
            assert writing_to(full.fileno(), *arguments, PYTHONUNBUFFERED="1") == expected
        assert writing_to(full.fileno(), "embed", tiny_llama, "a", "--npy", "-", PYTHONUNBUFFERED="1") == expected


# ---- streams


def test_what_a_program_prints_before_a_command_comes_first(tiny_llama: Path) -> None:
    code = "import sys; from llamac.cli import main; print('before'); main()"
    arguments = [sys.executable, "-c", code, "inspect", str(tiny_llama)]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    found = subprocess.run(arguments, capture_output=True, timeout=TIMEOUT, check=True, env=environment)
    first, *rest = found.stdout.decode().splitlines()
    assert (first, len(rest) > 3) == ("before", True)


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
def test_closed_standard_streams_are_tolerated(script: Path) -> None:
    run = f"'{sys.executable}' -m llamac run '{script}' -t 0 -n 5"
    for shell, out in (
        (f"{run} -q <&-", b"abcde\n"),
        (f"{run} -q >&- </dev/null", b""),
        (f"{run} 2>&- </dev/null", b"abcde\n"),
    ):
        done = subprocess.run(["bash", "-c", shell], capture_output=True, timeout=TIMEOUT)
        assert (done.returncode, done.stdout, done.stderr) == (0, out, b"")


def test_characters_unknown_to_the_terminal_become_question_marks(script: Path) -> None:
    done = process("run", script, "-i", "é", *GREEDY, "-n", 5, "-q", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"?")
    done = process("run", script, "-i", "é", *GREEDY, "-n", 5, "-q", PYTHONIOENCODING="utf-8")
    assert done.stdout.startswith("é".encode())


def test_unexpected_encoding_errors_are_errors_of_one_line(
    llamac_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamac.cli.check.run", lambda options: "\ud800".encode())
    llamac_command("check").fails_with("surrogates not allowed")


def test_output_to_a_pipe_is_not_buffered(big_llama: Path) -> None:
    command = [sys.executable, "-m", "llamac", "run", str(big_llama), "-i", "hello", "-n", "0", "--no-echo", "-t", "0"]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as program:
        assert program.stdout is not None
        assert len(program.stdout.read(3)) == 3
        assert program.poll() is None  # thousands of tokens remain
        program.kill()
