"""`llamac export`: round trips, options, the last line, progress on a terminal, Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import llamac
from builders import checkpoint, llama_config, some_ids, write_model
from commands import GREEDY, Command
from processes import TIMEOUT, heed_signals


def test_dtype_map_and_pure_choose_the_dtypes(llamac_command: Command, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.bin"
    options = ("--pure", "--dtype-map", "*.attn_k.weight=q8,output.weight=bf16", "--threads", 2)
    done = llamac_command("export", source, out, "--dtype", "q4", *options)
    assert (done.code, done.err) == (0, "")
    assert ", q4, " in done.out
    tensors = json.loads(llamac_command("inspect", out, "--json").out)["tensors"]
    kinds = {tensor["name"].split(".")[-2]: tensor["dtype"] for tensor in tensors if len(tensor["shape"]) == 2}
    expected = dict.fromkeys(
        ("attn_q", "attn_v", "attn_out", "ffn_gate", "ffn_up", "ffn_down", "token_embedding"), "q4"
    )
    assert kinds == {**expected, "attn_k": "q8", "output": "bf16"}
    checked = llamac_command("check", out)
    assert checked.code == 0
    assert re.search(r"probes     identical: .*\n           quantized: [\d.e-]+ nats", checked.out)
    assert llamac_command("run", out, "-i", "ab", *GREEDY, "-n", 5, "-q").code == 0
    wrong = llamac_command("export", source, out, "--force", "--dtype", "q4", "--dtype-map", "x")
    assert (wrong.code, "--dtype-map: 'x' is not PATTERN=DTYPE" in wrong.err) == (2, True)


def test_an_exported_model_runs_checks_and_converts_back(
    llamac_command: Command, llama2c: Path, tmp_path: Path
) -> None:
    out = tmp_path / "model.bin"
    done = llamac_command("export", llama2c, out)
    assert (done.code, done.err) == (0, "")
    assert re.fullmatch(
        rf"{re.escape(str(out))}: [\d.]+ [kM]B, f32, 3\d\.\d\d bits per weight, tokenizer tokenizer\.bin\n", done.out
    )
    assert llamac_command("run", out, "-i", "ab", *GREEDY, "-n", 20, "-q").code == 0
    checked = llamac_command("check", out, "--data")
    assert checked.code == 0
    assert "probes     identical: 4 probes" in checked.out
    assert json.loads(llamac_command("inspect", out, "--json").out)["probes"] == {"source": "llamac-numpy"}
    done = llamac_command("export", out, tmp_path / "back.bin", "--to", "llama2c")
    assert (done.code, done.err) == (0, "")
    again = tmp_path / "again.bin"
    tokenizer = ("--tokenizer", llama2c.parent / "tokenizer.bin")
    assert llamac_command("export", tmp_path / "back.bin", again, "--name", "small", *tokenizer).code == 0
    with llamac.load(out) as one, llamac.load(again) as other:
        assert one.logits(some_ids(20)).tobytes() == other.logits(some_ids(20)).tobytes()


def test_export_options_take_effect(llamac_command: Command, llama2c: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.bin"
    assert "bf16, 16." in llamac_command("export", llama2c, out, "--dtype", "bf16", "--name", "Tiny").out
    facts = json.loads(llamac_command("inspect", out, "--json").out)
    assert facts["metadata"]["name"] == "Tiny"
    assert {tensor["dtype"] for tensor in facts["tensors"]} == {"f32", "bf16"}
    llamac_command("export", llama2c, out).fails_with("model.bin exists")
    assert llamac_command("export", llama2c, out, "--force", "--dtype", "f16").code == 0
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "tokenizer.bin").rename(tmp_path / "elsewhere" / "tok.bin")
    bare = llamac_command("export", llama2c, out, "--force")
    assert bare.code == 0
    assert re.fullmatch(r"llamac: warning: no tokenizer was found[^\n]+\n", bare.err)
    given = llamac_command("export", llama2c, out, "--force", "--tokenizer", tmp_path / "elsewhere" / "tok.bin")
    assert (given.code, given.err) == (0, "")
    to_hf = llamac_command("export", out, tmp_path / "hf", "--to", "hf")
    assert (to_hf.code, to_hf.err) == (0, "")
    assert (tmp_path / "hf" / "config.json").is_file()


def test_impossible_exports_are_errors_and_leave_no_files(
    llamac_command: Command, llama2c: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.bin"
    llamac_command("export", tmp_path / "absent", out).fails_with("absent: No such file")
    llamac_command("export", llama2c, tmp_path / "no" / "out.bin").fails_with("does not exist")
    llamac_command("export", llama2c, out, "--tokenizer", tmp_path / "none").fails_with("none does not exist")
    llamac_command("export", llama2c, out, "--probe-source", "transformers").fails_with("Hugging Face directory")
    (tmp_path / "text.txt").write_text("this is not a checkpoint, but it is as long as a header")
    llamac_command("export", tmp_path / "text.txt", out).fails_with("text.txt")
    llama2c.write_bytes(llama2c.read_bytes()[:-4])
    llamac_command("export", llama2c, out).fails_with("damaged or incomplete")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.bin", "text.txt", "tokenizer.bin"]


def start(*arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "llamac", "export", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed_signals)


def test_a_terminal_shows_every_phase(source: Path, tmp_path: Path) -> None:
    reader, writer = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "llamac", "export", str(source), str(tmp_path / "a.bin")],
        stdout=subprocess.PIPE,
        stderr=writer,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
        timeout=TIMEOUT,
    )
    os.close(writer)
    shown = b""
    with contextlib.suppress(OSError):  # end of file: the other side of the terminal is closed
        while data := os.read(reader, 4096):
            shown += data
    os.close(reader)
    text = shown.decode()
    assert re.search(r"verifying: .* [\d.]+k?B/[\d.]+kB ", text)
    assert re.search(r"reference logits: .* \d/3 ", text)  # two layers and the output matrix
    assert re.search(r"writing: .* [\d.]+k?B/[\d.]+kB ", text)
    assert re.search(r"engine logits: .* \d/8 ", text)  # four probes, two KV cache formats
    assert "\n" not in text
    assert done.stdout.decode().startswith(f"{tmp_path / 'a.bin'}: ")


def test_a_short_export_reports_no_progress_to_a_pipe(source: Path, tmp_path: Path) -> None:
    with start(source, tmp_path / "b.bin") as process:
        _, errors = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, errors) == (0, b"")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGHUP, -signal.SIGHUP)]
)
def test_an_export_ended_by_a_signal_leaves_no_files(number: int, code: int, tmp_path: Path) -> None:
    source = write_model(tmp_path / "model.bin", checkpoint(llama_config(dim=384, ffn=1024, n_layers=6)))
    (tmp_path / "out").mkdir()
    with start(source, tmp_path / "out" / "out.bin") as process:
        deadline = time.monotonic() + TIMEOUT
        while not any((tmp_path / "out").iterdir()):
            assert process.poll() is None, "the export ended before it could be interrupted"
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.send_signal(number)
        out, errors = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, out, errors) == (code, b"", b"")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ((), r"out: [\d.]+ [kM]B, f32, 3\d\.\d\d bits per weight, tokenizer unknown\n"),
        (("--dtype", "bf16"), r"out: [\d.]+ [kM]B, bf16, 1\d\.\d\d bits per weight, tokenizer unknown\n"),
        (("--to", "hf"), r"out: [\d.]+ [kM]B, f32, tokenizer unknown\n"),
        (("--to", "llama2c"), r"out: [\d.]+ [kM]B, f32, tokenizer unknown, as tokenizer\.bin next to it\n"),
    ],
)
def test_the_last_line_describes_the_written_files(
    llamac_command: Command, source: Path, tmp_path: Path, options: tuple[str, ...], line: str
) -> None:
    done = llamac_command("export", source, tmp_path / "out", *options)
    assert (done.code, done.err) == (0, "")
    assert re.fullmatch(re.escape(f"{tmp_path}/") + line, done.out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--to", "hf", "--name", "x"), "name is stored in flat files and GGUF files only"),
        (("--to", "llama2c", "--name", "x"), "name is stored in flat files and GGUF files only"),
        (("--to", "llama2c", "--dtype", "bf16"), "always f32"),
        (("--to", "hf", "--probe-source", "llamac"), "--probe-source is for flat files only"),
        (("--to", "hf", "--force"), "overwrite (--force) replaces files only"),
    ],
)
def test_options_without_effect_are_refused(
    llamac_command: Command, source: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    llamac_command("export", source, tmp_path / "out", *options).refuses_with(message)
    assert list(tmp_path.iterdir()) == []
