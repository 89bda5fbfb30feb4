"""`llamac run`: prompts from everywhere, every option, the line of figures, and values that are refused."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from vocab_samples import llama2c_file

import llamac
from commands import GREEDY, Command, Result
from llamac.cli import run
from llamac.errors import ContextFullError
from openmp import up_to


def continuation(path: Path, prompt: str, steps: int) -> str:
    with llamac.load(path) as model:
        return model.generate(prompt, max_tokens=steps - len(model.tokenize(prompt)) + 1).text


# ---- prompts and echo


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


def test_prompts_without_end_are_not_read_to_the_end(llamac_command: Command, script: Path, tmp_path: Path) -> None:
    """A token has at most 6 bytes here, so the limit is that of what is read without asking: 1 MiB."""

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
        pytest.raises(ContextFullError, match="more than 1048576 bytes: no prompt so long"),
    ):
        run._read(io.BufferedReader(Endless()), "it", model, 64)
    llamac_command("run", script, "-f", "/dev/zero").fails_with("/dev/zero has more than 1048576 bytes", "64 positions")
    llamac_command("run", script, stdin=b"a" * (1 << 20) + b"b").fails_with("standard input has more than")
    (tmp_path / "whole.txt").write_text("a" * (1 << 20))
    llamac_command("run", script, "-f", tmp_path / "whole.txt").fails_with("tokens, but -n allows 64 positions")


def test_a_long_prompt_is_read_as_far_as_the_context_can_hold_it(script: Path) -> None:
    with llamac.load(script) as model:
        longest = max(len(model.tokenizer.token_bytes(token)) for token in range(model.tokenizer.n_ids))
        context = (1 << 20) // longest + 1000
        data = b"a" * (context * longest)
        assert run._read(io.BytesIO(data), "it", model, context) == data
        with pytest.raises(ContextFullError, match=f"it has more than {len(data)} bytes"):
            run._read(io.BytesIO(data + b"a"), "it", model, context)


# ---- options


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


def test_the_context_is_what_n_allows_or_what_was_asked_for(
    llamac_command: Command, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    original = llamac.Session.prefill

    def prefill(session: llamac.Session, tokens: Any) -> None:
        seen.append(session.context)
        original(session, tokens)

    monkeypatch.setattr(llamac.Session, "prefill", prefill)
    for options in (("-n", 20), ("-n", 0), ("-n", 5000), ("-n", 20, "--context", 50), ("-n", 0, "--context", 50)):
        assert llamac_command("run", tiny_llama, "-i", "hello", *GREEDY, *options).code == 0
    assert seen == [20, 600, 600, 50, 50]
    run = ("run", tiny_llama, "-i", "hello", *GREEDY)
    assert "decode 48 tokens" in llamac_command(*run, "-n", 0, "--context", 50).err
    llamac_command(*run, "--context", 2).fails_with("the prompt has 3 tokens", "of a context of 2")
    llamac_command(*run, "--context", 601, "-n", 9).fails_with("context is 601, expected 1 to 600")
    llamac_command(*run, "--context", 0).fails_with("context is 0, expected 1 to 600")


def test_a_prompt_is_tokenized_once(llamac_command: Command, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    original = llamac.Tokenizer.encode

    def encode(tokenizer: llamac.Tokenizer, text: str, **options: Any) -> list[int]:
        texts.append(text)
        return original(tokenizer, text, **options)

    monkeypatch.setattr(llamac.Tokenizer, "encode", encode)
    assert llamac_command("run", tiny_llama, "-i", "hello", "-n", 9).code == 0
    assert texts == ["hello"]


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
        assert text("-t", 0, "--threads", up_to(2), "--isa", "scalar") == expected()


def test_the_kv_option_reaches_the_session(
    llamac_command: Command, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    original = llamac.Session.prefill

    def prefill(session: llamac.Session, tokens: Any) -> None:
        seen.append((session.kv, session.threads, session.isa))
        original(session, tokens)

    monkeypatch.setattr(llamac.Session, "prefill", prefill)
    llamac_command("run", tiny_llama, "-i", "a", "-n", 9, "--kv", "f16", "--threads", up_to(2), "--isa", "scalar")
    llamac_command("run", tiny_llama, "-i", "a", "-n", 9, "--kv", "f32", "--threads", 1)
    assert seen[0] == ("f16", up_to(2), "scalar")
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


# ---- the line of figures

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
