"""The command line: usage and help, what is no model, inspect and check, processes of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llamac
from commands import GREEDY, Command, Result
from llamac import models
from processes import TIMEOUT

COMMANDS = ("run", "inspect", "check", "bench", "export", "cache")


def with_buffers() -> dict[str, str]:
    """The environment for a process whose output is held back until it is flushed, as it usually is."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def process(*arguments: object, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Runs `python -m llamac` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "llamac", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        env={**os.environ, **environment},
        timeout=TIMEOUT,
    )


# ---- usage and help


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("fly",),
        ("run", "m", "--wings"),
        ("run", "m", "-t", "warm"),
        ("run", "m", "-n", "1.5"),
        ("run", "m", "-n"),
        ("run", "m", "--kv", "q8"),
        ("run", "m", "second"),
        ("run", "m", "--no-cache", "--cache-dir", "d"),
        ("inspect", "m", "second"),
        ("check", "--deep"),
        ("export",),
        ("export", "one"),
        ("export", "one", "two", "--dtype", "q5"),
        ("export", "one", "two", "--to", "onnx"),
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_2_and_shows_the_usage(llamac_command: Command, arguments: tuple[str, ...]) -> None:
    done = llamac_command(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("usage: llamac")
    assert "error: " in done.err


def test_version(llamac_command: Command) -> None:
    assert llamac_command("--version") == Result(0, f"llamac {llamac.__version__}\n", "")


@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_the_terminal(
    llamac_command: Command, monkeypatch: pytest.MonkeyPatch, command: str, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    done = llamac_command(command, "--help")
    assert (done.code, done.err) == (0, "")
    prose = done.out.split("examples:")[0].split("\n\n", 1)[1]  # behind the usage, whose parts are not broken
    assert max(map(len, prose.splitlines())) <= columns
    assert "==SUPPRESS==" not in done.out
    assert "None" not in done.out
    assert "[]" not in done.out


def test_help_names_every_option_and_command(llamac_command: Command) -> None:
    everything = llamac_command("--help").out
    assert all(f"\n    {command} " in everything for command in COMMANDS)
    options = ["-i", "-f", "-n", "-t", "-p", "-s", "-z", "--top-k", "--min-p", "--stop", "--no-echo", "-q"]
    options += ["--threads", "--kv", "--isa"]
    text = llamac_command("run", "--help").out
    assert all(re.search(rf"^  {option}[ ,\n]", text, re.MULTILINE) for option in options)
    assert "(default: 256)" in text
    assert "(default: 0.9)" in text


# ---- files that are none


@pytest.mark.parametrize("command", ["run", "inspect", "check"])
@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (None, ["model.bin: No such file or directory"]),
        (b"", ["model.bin", "empty"]),
        (b"GGUF" + bytes(100), ["model.bin", "GGUF"]),
        (b"PK\3\4" + bytes(100), ["model.bin holds weights only", "config.json"]),
        (b'\x30\0\0\0\0\0\0\0{"' + b" " * 100, ["model.bin", "Hugging Face directory"]),
        (b"version https://git-lfs.github.com/spec/v1", ["model.bin", "git lfs pull"]),
        (b"Once upon a time there was a text.", ["model.bin", "not a llamac file"]),
        (b"\x89llamac\n" + bytes(1000), ["model.bin"]),
    ],
    ids=["missing", "empty", "gguf", "zip", "safetensors", "pointer", "text", "zeros"],
)
def test_other_files_are_told_in_one_line(
    llamac_command: Command, tmp_path: Path, command: str, content: bytes | None, parts: list[str]
) -> None:
    path = tmp_path / "model.bin"
    if content is not None:
        path.write_bytes(content)
    llamac_command(command, path, *(("-i", "a") if command == "run" else ())).fails_with(*parts)


@pytest.mark.parametrize("command", ["run", "inspect", "check"])
def test_directories_and_damaged_files_are_told_in_one_line(
    llamac_command: Command, tiny_llama: Path, tmp_path: Path, command: str
) -> None:
    options = ("-i", "a") if command == "run" else ()
    llamac_command(command, tmp_path, *options).fails_with("is no Hugging Face directory", "no config.json")
    data = bytearray(tiny_llama.read_bytes())
    (tmp_path / "short.bin").write_bytes(data[:-1])
    llamac_command(command, tmp_path / "short.bin", *options).fails_with("short.bin")
    data[40] ^= 1
    (tmp_path / "flipped.bin").write_bytes(data)
    llamac_command(command, tmp_path / "flipped.bin", *options).fails_with("flipped.bin", "header")


@pytest.mark.parametrize("command", ["run", "inspect", "check"])
def test_pipes_and_devices_are_told_in_one_line(llamac_command: Command, tmp_path: Path, command: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    llamac_command(command, tmp_path / "pipe").fails_with("pipe is not a regular file")
    llamac_command(command, "/dev/zero").fails_with("/dev/zero is not a regular file")


# ---- inspect

FILE_KEYS = {
    *(
        "file",
        "file_bytes",
        "format_version",
        "numerics",
        "id",
        "metadata",
        "parameters",
        "bits_per_weight",
        "sections",
    ),
    *("config", "layers", "rope", "tokenizer", "chat_template", "probes", "tensors"),
}
MACHINE_KEYS = {
    *("llamac", "python", "processor", "isa", "isa_reason", "isas", "threads", "threads_reason", "usable_cpus"),
    *("cgroup_quota", "physical_cores", "openmp", "tiny_model_bytes"),
}


def test_inspect_json_is_whole(llamac_command: Command, tiny_gpt2: Path) -> None:
    done = llamac_command("inspect", tiny_gpt2, "--json")
    assert (done.code, done.err) == (0, "")
    facts = json.loads(done.out)
    assert set(facts) == FILE_KEYS
    with llamac.load(tiny_gpt2) as model:
        assert facts["id"] == model.file.id
        assert facts["file_bytes"] == tiny_gpt2.stat().st_size
        tensors = model.file.tensors
        assert [tensor["name"] for tensor in facts["tensors"]] == [tensor.name for tensor in tensors]
        assert facts["parameters"] == sum(int(np.prod(tensor.shape)) for tensor in tensors)
        assert facts["bits_per_weight"] == round(8 * model.weight_bytes / facts["parameters"], 3)
    assert facts["config"]["dim"] == 40
    assert [layer["ffn_dim"] for layer in facts["layers"]] == [70, 70]
    assert facts["tokenizer"]["ids"] == 284
    assert (facts["chat_template"], facts["probes"]) == (False, None)


def test_inspect_tells_a_person_what_matters(llamac_command: Command, tiny_llama: Path) -> None:
    text = llamac_command("inspect", tiny_llama).out
    for part in (
        "2 layers of 48, 6 heads (2 KV) of 8",
        "FFN gated 76",
        "context     600 positions",
        "301 (284 with a token)",
    ):
        assert part in text
    assert "layers.*.attn_q.weight" in text
    assert "layers.1.attn_q.weight" not in text
    assert "layers.1.attn_q.weight" in llamac_command("inspect", tiny_llama, "--tensors").out


def test_inspect_without_a_model_describes_the_machine(
    llamac_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LLAMAC_ISA", raising=False)
    facts = json.loads(llamac_command("inspect", "--json").out)
    assert set(facts) == MACHINE_KEYS
    assert facts["llamac"] == llamac.__version__
    text = llamac_command("inspect").out
    assert facts["threads_reason"] in text
    assert f"{facts['isa']}: {facts['isa_reason']}" in text
    assert facts["isa_reason"] == "the best that this processor runs"
    monkeypatch.setenv("LLAMAC_ISA", "scalar")
    facts = json.loads(llamac_command("inspect", "--json").out)
    assert (facts["isa"], facts["isa_reason"]) == ("scalar", "LLAMAC_ISA asks for it")
    monkeypatch.setenv("LLAMAC_ISA", "sse9")
    llamac_command("inspect").fails_with("LLAMAC_ISA is 'sse9'")


# ---- check


def flipped(path: Path, section: str, out: Path, tensor: str | None = None) -> Path:
    """A copy with one bit changed in a section, or in a tensor."""
    with llamac.load(path) as model:
        place: Any = model.file.sections[section]
        if tensor is not None:
            place = next(record for record in model.file.tensors if record.name == tensor)
    data = bytearray(path.read_bytes())
    data[place.offset + place.bytes // 2] ^= 4
    out.write_bytes(data)
    return out


def test_check_of_a_good_file(llamac_command: Command, tiny_llama: Path) -> None:
    done = llamac_command("check", tiny_llama, "--data")
    assert (done.code, done.err) == (0, "")
    assert [line.split()[:2] for line in done.out.splitlines()] == [
        ["structure", "ok:"],
        ["texts", "ok:"],
        ["data", "ok:"],
        ["probes", "none:"],
    ]


def test_check_names_a_damaged_tensor(llamac_command: Command, tiny_llama: Path, tmp_path: Path) -> None:
    path = flipped(tiny_llama, "data", tmp_path / "damaged.bin", "layers.1.ffn_up.weight")
    done = llamac_command("check", path, "--data")
    assert (done.code, done.err) == (1, "")
    damaged = [line for line in done.out.splitlines() if "DAMAGED" in line]
    assert len(damaged) == 1
    assert "tensor layers.1.ffn_up.weight: its SHA-256 does not match" in damaged[0]


def test_check_names_a_damaged_text(llamac_command: Command, tiny_llama: Path, tmp_path: Path) -> None:
    done = llamac_command("check", flipped(tiny_llama, "tokenizer", tmp_path / "damaged.bin"))
    assert done.code == 1
    assert re.fullmatch(r"llamac: error: .*damaged\.bin: section tokenizer: [^\n]*SHA-256[^\n]*\n", done.err)


# ---- processes of their own


def test_sources_that_were_not_built_are_told(tmp_path: Path) -> None:
    """What `pip install .` leaves in the folder in which it was called, where Python looks first."""
    (tmp_path / "llamac").mkdir()
    for place in Path(llamac.__file__).parent.glob("*.py"):
        shutil.copy(place, tmp_path / "llamac")
    program = [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import llamac"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ModuleNotFoundError: {tmp_path / 'llamac'} holds llamac's sources")
    assert done.stderr.splitlines()[-1].endswith("`pip install -e .`")


def test_python_m_llamac_and_the_installed_commands(script: Path, llama2c: Path, tmp_path: Path) -> None:
    expected = b"abcde\n"
    assert process("run", script, *GREEDY, "-n", 5, "-q").stdout == expected
    folder = Path(sys.executable).parent
    for name, arguments in (
        ("llamac", ["run", script, *GREEDY, "-n", "5", "-q"]),
        ("llamac-export", [llama2c, tmp_path / "m.bin"]),
    ):
        if not (folder / name).exists():
            pytest.skip(f"{name} is not installed beside {sys.executable}")
        done = subprocess.run(
            [folder / name, *arguments], stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout == expected or done.stdout.startswith(bytes(tmp_path / "m.bin"))


def test_help_and_version_of_llamac_export_have_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from llamac.cli import export_main

    for option, answer in (
        ("--help", "usage: llamac-export [-h]"),
        ("--version", f"llamac-export {llamac.__version__}\n"),
    ):
        monkeypatch.setattr(sys, "argv", ["llamac-export", option])
        with pytest.raises(SystemExit) as end:
            export_main()
        assert end.value.code == 0
        assert capsys.readouterr().out.startswith(answer)


def writing_to(out: int, *arguments: object) -> tuple[int, bytes]:
    """(the exit code, stderr) of a process whose output goes there."""
    command = [sys.executable, "-m", "llamac", *map(str, arguments)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.PIPE, env=with_buffers(), timeout=TIMEOUT
    )
    return done.returncode, done.stderr


def test_a_broken_pipe_ends_quietly(tiny_llama: Path, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # whoever writes finds nobody
    for arguments in (["run", tiny_llama, "-i", "a", "-q"], ["inspect", tiny_llama], ["check", tiny_llama]):
        assert writing_to(writer, *arguments) == (1, b"")
    assert writing_to(writer, "--help") == (0, b"")
    # an error that comes when something has been printed already
    damaged = flipped(tiny_llama, "tokenizer", tmp_path / "damaged.bin")
    code, complaint = writing_to(writer, "check", damaged)
    assert code == 1
    assert re.fullmatch(rb"llamac: error: .*section tokenizer: [^\n]*SHA-256[^\n]*\n", complaint)
    os.close(writer)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_in_one_line(tiny_llama: Path, tmp_path: Path) -> None:
    told = (1, b"llamac: error: No space left on device\n")
    with open("/dev/full", "wb") as full:
        assert writing_to(full.fileno(), "run", tiny_llama, "-i", "a", "-q") == told
        assert writing_to(full.fileno(), "inspect", tiny_llama) == told
        assert writing_to(full.fileno(), "check", tiny_llama) == told
        quick = ("--prompt", "1", "--decode", "0", "--rounds", "1", "--threads", "1")
        assert writing_to(full.fileno(), "bench", tiny_llama, *quick) == told
        assert writing_to(full.fileno(), "export", tiny_llama, tmp_path / "out.bin", "--no-tokenizer") == told


def test_text_that_is_none_is_told_in_one_line(llamac_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it comes from."""
    monkeypatch.setattr("llamac.cli.check.check", lambda options: "\ud800".encode())
    llamac_command("check").fails_with("surrogates not allowed")


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
def test_closed_streams_do_no_harm(script: Path) -> None:
    run = f"'{sys.executable}' -m llamac run '{script}' -t 0 -n 5"
    for shell, out in (
        (f"{run} -q <&-", b"abcde\n"),
        (f"{run} -q >&- </dev/null", b""),
        (f"{run} 2>&- </dev/null", b"abcde\n"),
    ):
        done = subprocess.run(["bash", "-c", shell], capture_output=True, timeout=TIMEOUT)
        assert (done.returncode, done.stdout, done.stderr) == (0, out, b"")


def test_a_terminal_without_the_characters_gets_question_marks(script: Path) -> None:
    done = process("run", script, "-i", "é", *GREEDY, "-n", 5, "-q", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"?")
    done = process("run", script, "-i", "é", *GREEDY, "-n", 5, "-q", PYTHONIOENCODING="utf-8")
    assert done.stdout.startswith("é".encode())


def test_output_appears_as_it_is_made(big_llama: Path) -> None:
    """Pieces are not held back in a buffer when the output is a pipe."""
    command = [sys.executable, "-m", "llamac", "run", str(big_llama), "-i", "hello", "-n", "0", "--no-echo", "-t", "0"]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as program:
        assert program.stdout is not None
        assert len(program.stdout.read(3)) == 3
        assert program.poll() is None  # there are thousands of tokens to come
        program.kill()


# ---- the built-in model


def test_without_a_model_the_built_in_one_runs(llamac_command: Command) -> None:
    options = ("-i", "Once upon a time", *GREEDY, "-n", 30, "-q")
    done = llamac_command("run", *options)
    assert done.code == 0, done.err
    assert done == llamac_command("run", models.path("stories"), *options)
    assert llamac_command("check").code == 0
