"""`llamac export` as a person meets it: the bar on a terminal, silence in a pipe, Ctrl-C, options, its last line."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from builders import checkpoint, llama_config, write_model
from llamac.cli import run_command
from processes import heed_ctrl_c

TIMEOUT = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that all targets can hold: as many tokens as logits."""
    config = llama_config()
    n_ids = checkpoint(config).config.n_token_ids
    return write_model(tmp_path_factory.mktemp("model") / "tiny.bin", checkpoint(replace(config, vocab_size=n_ids)))


def start(*arguments: object, stderr: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "llamac", "export", *map(str, arguments)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, env=environment, preexec_fn=heed_ctrl_c)


def test_a_terminal_shows_bytes_and_a_pipe_nothing(model: Path, tmp_path: Path) -> None:
    reader, writer = pty.openpty()
    with start(model, tmp_path / "a.bin", stderr=writer) as process:
        os.close(writer)
        shown = b""
        while True:
            try:
                shown += os.read(reader, 4096)
            except OSError:  # how a terminal whose other side is closed tells its end
                break
        assert process.stdout is not None
        out = process.stdout.read().decode()
    os.close(reader)
    assert process.returncode == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "exporting" in text
    (unit,) = {unit for _, unit in re.findall(r"(\d+)(?:\.\d)?/[\d.]+ (\w+)", text)}
    assert unit == "kB"
    assert out.startswith(f"{tmp_path / 'a.bin'}: ")
    with start(model, tmp_path / "b.bin", stderr=subprocess.PIPE) as process:
        _, errors = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, errors) == (0, b"")


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model.bin", checkpoint(llama_config(dim=384, ffn=1024, n_layers=6)))
    (tmp_path / "out").mkdir()
    with start(source, tmp_path / "out" / "out.bin", stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + TIMEOUT
        while not any((tmp_path / "out").iterdir()):
            assert process.poll() is None, "it ended before it could be interrupted"
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, out, errors) == (130, b"", b"")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ((), r"out: [\d.]+ MB, f32, 3\d\.\d\d bits per weight, tokenizer unknown\n"),
        (("--dtype", "bf16"), r"out: [\d.]+ MB, bf16, 1\d\.\d\d bits per weight, tokenizer unknown\n"),
        (("--to", "hf"), r"out: [\d.]+ MB, f32, tokenizer unknown\n"),
        (("--to", "llama2c"), r"out: [\d.]+ MB, f32, tokenizer unknown, as tokenizer\.bin beside it\n"),
    ],
)
def test_the_last_line_tells_what_was_written(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], line: str
) -> None:
    assert run_command(["export", str(model), str(tmp_path / "out"), *options]) == 0
    out, errors = capsys.readouterr()
    assert re.fullmatch(re.escape(f"{tmp_path}/") + line, out)
    assert errors == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--to", "hf", "--name", "x"), "name is stored in flat files only"),
        (("--to", "llama2c", "--name", "x"), "name is stored in flat files only"),
        (("--to", "llama2c", "--dtype", "bf16"), "always f32"),
        (("--to", "hf", "--probe-source", "llamac"), "probe_source is for flat files only"),
        (("--to", "hf", "--force"), "overwrite (--force) replaces files only"),
    ],
)
def test_options_without_effect_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    assert run_command(["export", str(model), str(tmp_path / "out"), *options]) == 1
    out, errors = capsys.readouterr()
    assert out == ""
    assert message in errors
    assert errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
