"""The command line: every command and option, prompts from everywhere, exit codes, and errors of one line."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vocab_samples import llama2c_file

import llamac
from builders import byte_ids, script_checkpoint, some_ids, write_model
from llamac import models
from llamac.cli import run_command
from processes import TIMEOUT

GREEDY = ("-t", "0")
COMMANDS = ("run", "inspect", "check", "export")


@dataclasses.dataclass(frozen=True)
class Result:
    """What a command did."""

    code: int | str | None
    out: str
    err: str

    def fails_with(self, *parts: str, code: int = 1) -> None:
        """It failed with one line that holds these parts, and printed nothing else."""
        assert (self.code, self.out) == (code, "")
        assert re.fullmatch(r"llamac: error: [^\n]+\n", self.err)
        for part in parts:
            assert part in self.err


Command = Callable[..., Result]


class Terminal(io.TextIOWrapper):
    """An input without end that a person might type into."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def llamac_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command in this process. stdin: the bytes of a pipe; without it a terminal."""

    def run(*arguments: object, stdin: bytes | None = None) -> Result:
        source = Terminal(io.BytesIO(b"typed")) if stdin is None else io.TextIOWrapper(io.BytesIO(stdin))
        monkeypatch.setattr(sys, "stdin", source)
        capsys.readouterr()
        try:
            code: int | str | None = run_command([str(argument) for argument in arguments])
        except SystemExit as end:  # argparse ends by itself
            code = end.code
        return Result(code, *capsys.readouterr())

    return run


def process(*arguments: object, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Runs `python -m llamac` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "llamac", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        env={**os.environ, **environment},
        timeout=TIMEOUT,
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A model that continues any prompt of n tokens with the alphabet from its n-th letter on."""
    return write_model(tmp_path / "script.bin", script_checkpoint(byte_ids("abcdefghijklmnopqrstuvwxyz")))


def continuation(path: Path, prompt: str, steps: int) -> str:
    with llamac.load(path) as model:
        return model.generate(prompt, max_tokens=steps - len(model.tokenize(prompt)) + 1).text


# ---- run: prompts and echo


def test_run_echoes_the_prompt_and_streams_its_continuation(llamac_command: Command, tiny_llama: Path) -> None:
    done = llamac_command("run", tiny_llama, "-i", "hello", *GREEDY, "-n", 30, "-q")
    assert done == Result(0, f"hello{continuation(tiny_llama, 'hello', 30)}\n", "")
    done = llamac_command("run", tiny_llama, "-i", "hello", *GREEDY, "-n", 30, "-q", "--no-echo")
    assert done.out == continuation(tiny_llama, "hello", 30) + "\n"


def test_the_prompt_comes_from_an_option_a_file_or_a_pipe(
    llamac_command: Command, script: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text("hello\n")
    expected = "hello" + continuation(script, "hello", 10) + "\n"
    options = ("run", script, *GREEDY, "-n", 10, "-q")
    assert llamac_command(*options, "-i", "hello").out == expected
    assert llamac_command(*options, "-i", "hello", stdin=b"never read").out == expected
    assert llamac_command(*options, "-f", tmp_path / "prompt.txt").out == expected
    assert llamac_command(*options, "-f", "-", stdin=b"hello\n").out == expected
    assert llamac_command(*options, stdin=b"hello").out == expected
    assert llamac_command(*options, stdin=b"hello\n\n").out == "hello\n" + continuation(script, "hello\n", 10) + "\n"


def test_without_a_prompt_the_text_begins_at_bos(llamac_command: Command, script: Path) -> None:
    for stdin in (None, b""):  # a terminal is not waited for
        assert llamac_command("run", script, *GREEDY, "-n", 5, "-q", stdin=stdin).out == "abcde\n"
    assert llamac_command("run", script, "-i", "", *GREEDY, "-n", 5, "-q").out == "abcde\n"


def test_prompts_that_cannot_be_read(llamac_command: Command, script: Path, tmp_path: Path) -> None:
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    llamac_command("run", script, "-f", tmp_path / "latin1.txt").fails_with("latin1.txt", "byte 3 is 0xe9")
    llamac_command("run", script, stdin=b"\xff").fails_with("standard input is not UTF-8", "byte 0 is 0xff")
    llamac_command("run", script, "-f", tmp_path / "absent").fails_with("absent: No such file or directory")
    llamac_command("run", script, "-f", tmp_path).fails_with("Is a directory")
    llamac_command("run", script, "-i", "\udcff").fails_with("surrogate")
    both = llamac_command("run", script, "-i", "a", "-f", "b")
    assert (both.code, "not allowed with argument" in both.err) == (2, True)


# ---- run: options


def test_n_counts_positions_with_the_prompts(llamac_command: Command, script: Path) -> None:
    with llamac.load(script) as model:
        used = len(model.tokenize("hello"))
    options = ("run", script, *GREEDY, "-q", "--no-echo")
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    for steps in (used, used + 1, 20):
        assert llamac_command(*options, "-i", "hello", "-n", steps).out == alphabet[used - 1 : steps] + "\n"
    llamac_command(*options, "-i", "hello", "-n", used - 1).fails_with(
        f"{used} tokens, but -n allows {used - 1} positions"
    )
    llamac_command(*options, "-i", "x" * 200, "-n", 0).fails_with("-n allows 64 positions (of a context of 64)")
    llamac_command(*options, "-n", -1).fails_with("-n is -1, expected 0")


def test_n_is_256_by_default_and_0_is_the_whole_context(llamac_command: Command, tiny_llama: Path) -> None:
    for options, steps in (((), 256), (("-n", 0), 600), (("-n", 5000), 600)):
        done = llamac_command("run", tiny_llama, *GREEDY, "--no-echo", *options)
        assert f"decode {steps} tokens" in done.err


def test_sampling_options_reach_the_sampler(llamac_command: Command, tiny_llama: Path) -> None:
    def text(*options: object) -> str:
        done = llamac_command("run", tiny_llama, "-i", "he", "-n", 40, "--no-echo", "-q", *options)
        assert (done.code, done.err) == (0, "")
        return done.out[:-1]

    with llamac.load(tiny_llama) as model:
        new = 40 - len(model.tokenize("he")) + 1

        def expected(**settings: Any) -> str:
            return model.generate("he", max_tokens=new, **settings).text

        assert text("-s", 5) == expected(temperature=1.0, top_p=0.9, seed=5)  # llama2.c's defaults
        assert text("-s", 5, "-t", 2.5, "-p", 0.5) == expected(temperature=2.5, top_p=0.5, seed=5)
        assert text("-s", 5, "-t", 3, "-p", 1, "--top-k", 7) == expected(temperature=3.0, top_k=7, seed=5)
        assert text("-s", 5, "-t", 3, "-p", 1, "--min-p", 0.3) == expected(temperature=3.0, min_p=0.3, seed=5)
        assert text("-t", 0, "-s", 1) == expected() == text("-t", 0, "-s", 2)
        assert text("-s", 5) != text("-s", 6)
        assert text("-t", 0, "--threads", 2, "--isa", "scalar") == expected()


def test_the_kv_option_reaches_the_session(
    llamac_command: Command, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    original = llamac.Session.prefill

    def prefill(session: llamac.Session, tokens: Any) -> None:
        seen.append((session.kv, session.threads, session.isa))
        original(session, tokens)

    monkeypatch.setattr(llamac.Session, "prefill", prefill)
    llamac_command("run", tiny_llama, "-i", "a", "-n", 9, "--kv", "f16", "--threads", 2, "--isa", "scalar")
    llamac_command("run", tiny_llama, "-i", "a", "-n", 9, "--kv", "f32", "--threads", 1)
    assert seen[0] == ("f16", 2, "scalar")
    assert seen[1][:2] == ("f32", 1)


def test_stop_texts_end_the_output(llamac_command: Command, script: Path) -> None:
    options = ("run", script, *GREEDY, "--no-echo", "-n", 20)
    done = llamac_command(*options, "--stop", "fg", "--stop", "klm")
    assert done.out == "abcde\n"
    assert "| stop 'fg' |" in done.err
    assert llamac_command(*options, "--stop", "zzz", "--stop", "klm").out == "abcdefghij\n"
    llamac_command(*options, "--stop", "").fails_with("stop is")


def test_another_tokenizer_may_be_given(llamac_command: Command, script: Path, tmp_path: Path) -> None:
    (tmp_path / "bytes.bin").write_bytes(llama2c_file(["zz"]))
    options = ("run", script, "-i", "hello", *GREEDY, "--no-echo", "-n", 10, "-q")
    assert llamac_command(*options).out == "cdefghij\n"  # BOS, " hell", "o"
    assert llamac_command(*options, "-z", tmp_path / "bytes.bin").out == "ghij\n"  # BOS and six bytes
    llamac_command(*options, "-z", tmp_path / "absent").fails_with("absent")
    (tmp_path / "large.bin").write_bytes(llama2c_file([f"word{number}" for number in range(60)]))
    llamac_command(*options, "-z", tmp_path / "large.bin").fails_with("do not belong together", "301")
    (tmp_path / "broken.bin").write_bytes(llama2c_file()[:-3])
    llamac_command(*options, "-z", tmp_path / "broken.bin").fails_with("truncated")


# ---- run: the line of figures

FIGURES = (
    r"prompt 2 tokens, [\d.]+ tok/s \| decode 9 tokens, [\d.]+ tok/s \| first token after \d+ ms \| length \| seed 7\n"
)


def test_figures_are_one_line_on_stderr(llamac_command: Command, script: Path) -> None:
    assert re.fullmatch(FIGURES, llamac_command("run", script, "-i", "h", "-n", 10, "-s", 7).err)
    assert llamac_command("run", script, "-i", "h", "-n", 10, "--quiet").err == ""
    short = llamac_command("run", script, "-i", "", "-n", 1).err
    assert "prompt 1 tokens, " in short
    assert "| decode 1 tokens, - |" in short


def test_the_seed_that_is_told_repeats_the_run(llamac_command: Command, tiny_llama: Path) -> None:
    first = llamac_command("run", tiny_llama, "-i", "he", "-n", 30)
    seed = first.err.split("seed ")[1].strip()
    assert llamac_command("run", tiny_llama, "-i", "he", "-n", 30, "-s", seed).out == first.out


def test_the_end_of_the_context_is_told(llamac_command: Command, tiny_llama: Path) -> None:
    assert "| length |" in llamac_command("run", tiny_llama, *GREEDY, "-n", 20).err
    assert re.search(r"\| (length|context) \|", llamac_command("run", tiny_llama, *GREEDY, "-n", 0).err)


# ---- values that are refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-t", "-1"), "temperature is -1"),
        (("-t", "nan"), "temperature is nan"),
        (("-p", "0"), "top_p is 0"),
        (("-p", "1.5"), "top_p is 1.5"),
        (("--top-k", "-1"), "top_k is -1"),
        (("--min-p", "2"), "min_p is 2"),
        (("-s", "-1"), "seed is -1"),
        (("-s", str(2**64)), "seed is 18446744073709551616"),
        (("--threads", "0"), "threads is 0, expected 1 to 1024"),
        (("--isa", "sse9"), "isa is 'sse9'; this build has"),
    ],
    ids=str,
)
def test_values_out_of_range_are_errors(llamac_command: Command, script: Path, options: Any, message: str) -> None:
    llamac_command("run", script, "-i", "a", "-q", "--no-echo", *options).fails_with(message)


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
        ("inspect", "m", "second"),
        ("check", "--deep"),
        ("export",),
        ("export", "one"),
        ("export", "one", "two", "--dtype", "q4"),
        ("export", "one", "two", "--to", "gguf"),
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_2_and_shows_the_usage(llamac_command: Command, arguments: tuple[str, ...]) -> None:
    done = llamac_command(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("usage: llamac")
    assert "error: " in done.err


# ---- files that are none


@pytest.mark.parametrize("command", ["run", "inspect", "check"])
@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (None, ["model.bin: No such file or directory"]),
        (b"", ["model.bin", "empty"]),
        (b"GGUF" + bytes(100), ["model.bin", "GGUF", "llamac export"]),
        (b"PK\3\4" + bytes(100), ["model.bin", "ZIP", "llamac export"]),
        (b"\x30\0\0\0\0\0\0\0{" + b" " * 100, ["model.bin", "llamac"]),
        (b"Once upon a time there was a text.", ["model.bin", "not a llamac file"]),
        (b"\x89llamac\n" + bytes(1000), ["model.bin"]),
    ],
    ids=["missing", "empty", "gguf", "zip", "safetensors", "text", "zeros"],
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
    llamac_command(command, tmp_path, *options).fails_with("is a directory", "llamac export")
    data = bytearray(tiny_llama.read_bytes())
    (tmp_path / "short.bin").write_bytes(data[:-1])
    llamac_command(command, tmp_path / "short.bin", *options).fails_with("short.bin")
    data[40] ^= 1
    (tmp_path / "flipped.bin").write_bytes(data)
    llamac_command(command, tmp_path / "flipped.bin", *options).fails_with("flipped.bin", "header")


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
    *("config", "layers", "tokenizer", "chat_template", "probes", "tensors"),
}
MACHINE_KEYS = {
    *("llamac", "python", "processor", "isa", "isas", "threads", "threads_reason", "usable_cpus", "cgroup_quota"),
    *("physical_cores", "openmp", "tiny_model_bytes"),
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
    assert (facts["chat_template"], facts["probes"]) == (False, False)


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
    facts = json.loads(llamac_command("inspect", "--json").out)
    assert set(facts) == MACHINE_KEYS
    assert facts["llamac"] == llamac.__version__
    assert facts["threads_reason"] in llamac_command("inspect").out
    monkeypatch.setenv("LLAMAC_ISA", "scalar")
    assert json.loads(llamac_command("inspect", "--json").out)["isa"] == "scalar"
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


# ---- export


def write_llama2c(path: Path) -> Path:
    """A random llama2.c checkpoint of version 0 with tied weights, and its tokenizer beside it."""
    dim, hidden, layers, heads, kv_heads, vocab, context = 48, 64, 2, 6, 3, 284, 64
    kv_dim = dim // heads * kv_heads
    layer = 2 * dim + 2 * dim * dim + 2 * kv_dim * dim + 3 * dim * hidden
    count = vocab * dim + layers * layer + dim + context * dim // heads
    header = np.array([dim, hidden, layers, heads, kv_heads, vocab, context], np.int32)
    weights = np.random.RandomState(3).standard_normal(count).astype(np.float32) * 0.3
    path.write_bytes(header.tobytes() + weights.tobytes())
    (path.parent / "tokenizer.bin").write_bytes(llama2c_file([f"a{char}" for char in "bcdefghijklm"]))
    return path


@pytest.fixture
def llama2c(tmp_path: Path) -> Path:
    return write_llama2c(tmp_path / "small.bin")


def test_export_run_check_and_back(llamac_command: Command, llama2c: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.bin"
    done = llamac_command("export", llama2c, out)
    assert (done.code, done.err) == (0, "")
    assert re.fullmatch(
        rf"{re.escape(str(out))}: [\d.]+ MB, f32, 3\d\.\d\d bits per weight, tokenizer tokenizer\.bin\n", done.out
    )
    assert llamac_command("run", out, "-i", "ab", *GREEDY, "-n", 20, "-q").code == 0
    checked = llamac_command("check", out, "--data")
    assert checked.code == 0
    assert "probes     identical: 4 probes" in checked.out
    assert json.loads(llamac_command("inspect", out, "--json").out)["probes"] is True
    done = llamac_command("export", out, tmp_path / "back.bin", "--to", "llama2c")
    assert (done.code, done.err) == (0, "")
    again = tmp_path / "again.bin"
    tokenizer = ("--tokenizer", llama2c.parent / "tokenizer.bin")
    assert llamac_command("export", tmp_path / "back.bin", again, "--name", "small", *tokenizer).code == 0
    with llamac.load(out) as one, llamac.load(again) as other:
        assert one.logits(some_ids(20)).tobytes() == other.logits(some_ids(20)).tobytes()


def test_export_options(llamac_command: Command, llama2c: Path, tmp_path: Path) -> None:
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


def test_exports_that_cannot_be(llamac_command: Command, llama2c: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.bin"
    llamac_command("export", tmp_path / "absent", out).fails_with("absent does not exist")
    llamac_command("export", llama2c, tmp_path / "no" / "out.bin").fails_with("does not exist")
    llamac_command("export", llama2c, out, "--tokenizer", tmp_path / "none").fails_with("none does not exist")
    llamac_command("export", llama2c, out, "--probe-source", "transformers").fails_with("Hugging Face directory")
    (tmp_path / "text.txt").write_text("no checkpoint at all, but a text that is long enough")
    llamac_command("export", tmp_path / "text.txt", out).fails_with("text.txt")
    llama2c.write_bytes(llama2c.read_bytes()[:-4])
    llamac_command("export", llama2c, out).fails_with("damaged or incomplete")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.bin", "text.txt", "tokenizer.bin"]


# ---- processes of their own


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


def test_help_of_llamac_export_has_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from llamac.cli import export_main

    monkeypatch.setattr(sys, "argv", ["llamac-export", "--help"])
    with pytest.raises(SystemExit) as end:
        export_main()
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: llamac-export [-h]")


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


def test_a_broken_pipe_ends_quietly(tiny_llama: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # whoever writes finds nobody
    for arguments in (["run", tiny_llama, "-i", "a", "-q"], ["inspect", tiny_llama], ["check", tiny_llama]):
        command = [sys.executable, "-m", "llamac", *map(str, arguments)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.PIPE, timeout=TIMEOUT)
        assert (done.returncode, done.stderr) == (1, b"")
    os.close(writer)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_in_one_line(tiny_llama: Path) -> None:
    with open("/dev/full", "wb") as full:
        for arguments in (["run", tiny_llama, "-i", "a", "-q"], ["inspect", tiny_llama]):
            command = [sys.executable, "-m", "llamac", *map(str, arguments)]
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, timeout=TIMEOUT
            )
            assert (done.returncode, done.stderr) == (1, b"llamac: error: No space left on device\n")


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
