"""`llamac run`: options, output during generation, the statistics line, and the hint at --chat."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from vocab_samples import llama2c_file

import llamac
from builders import byte_ids, checkpoint, llama_config, script_checkpoint, write_model
from commands import GREEDY, Command, Result
from llamac.cli import run
from llamac.engine.sampling.sampler import Sampler
from openmp import up_to

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def continuation(path: Path, prompt: str, n: int) -> str:
    with llamac.load(path) as model:
        return model.generate(prompt, max_tokens=n, temperature=0).text


def tokens_of(path: Path, text: str) -> int:
    with llamac.load(path) as model:
        return len(model.tokenize(text))


# ---- output


def test_the_prompt_is_echoed_before_its_continuation(llamac_command: Command, tiny_llama: Path) -> None:
    expected = continuation(tiny_llama, "hello", 30)
    done = llamac_command("run", tiny_llama, "-i", "hello", *GREEDY, "-n", 30, "-q")
    assert done == Result(0, f"hello{expected}\n", "")
    done = llamac_command("run", tiny_llama, "-i", "hello", *GREEDY, "-n", 30, "-q", "--no-echo")
    assert done.out == f"{expected}\n"


def test_an_empty_continuation_still_echoes_the_prompt(llamac_command: Command, script: Path) -> None:
    done = llamac_command("run", script, "-i", "hello", *GREEDY, "--stop", "c", "-q")
    assert done == Result(0, "hello\n", "")


@pytest.mark.parametrize("pieces", [0, 2])
def test_an_interruption_ends_the_current_line(
    llamac_command: Command, script: Path, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    original = Sampler.draw
    calls = 0

    def draw(sampler: Sampler, *arguments: Any) -> int:
        nonlocal calls
        calls += 1
        if calls > pieces:
            raise KeyboardInterrupt
        return original(sampler, *arguments)

    monkeypatch.setattr(Sampler, "draw", draw)
    done = llamac_command("run", script, "-i", "h", *GREEDY)
    assert done == Result(130, "hbc\n" if pieces else "", "")


# ---- length


def test_n_counts_new_tokens_only(llamac_command: Command, script: Path) -> None:
    used = tokens_of(script, "hello")
    options = ("run", script, *GREEDY, "-q", "--no-echo", "-i", "hello")
    for n in (1, 2, 20):
        assert llamac_command(*options, "-n", n).out == ALPHABET[used - 1 :][:n] + "\n"
        assert llamac_command(*options, "--max-tokens", n).out == ALPHABET[used - 1 :][:n] + "\n"


def test_n_is_256_by_default_and_0_fills_the_context(llamac_command: Command, tiny_llama: Path) -> None:
    for options, n in (((), 256), (("-n", 0), 600), (("-n", 5000), 600)):
        assert f"decode {n} tokens" in llamac_command("run", tiny_llama, *GREEDY, "--no-echo", *options).err


def test_a_prompt_longer_than_the_default_n_gets_n_new_tokens(llamac_command: Command, tiny_llama: Path) -> None:
    text = "x" * 300
    used = tokens_of(tiny_llama, text)
    assert 256 < used < 600 - 256
    done = llamac_command("run", tiny_llama, "-i", text, *GREEDY)
    assert done.code == 0
    assert f"prompt {used} tokens" in done.err
    assert "decode 256 tokens" in done.err


def test_a_long_prompt_is_continued_to_the_end_of_the_context(llamac_command: Command, script: Path) -> None:
    text = "x" * 54
    used = tokens_of(script, text)
    done = llamac_command("run", script, "-i", text, *GREEDY)
    assert done.code == 0
    assert f"decode {64 - used + 1} tokens" in done.err
    assert "| context |" in done.err


def test_a_prompt_longer_than_the_context_is_an_error(llamac_command: Command, script: Path) -> None:
    for n in (0, 1, 256):
        llamac_command("run", script, "-i", "x" * 200, "-n", n).fails_with("tokens", "context", "64")
    llamac_command("run", script, "-i", "hello", "--context", 2).fails_with("3 tokens", "2")


def test_the_session_has_the_needed_or_the_given_context(
    llamac_command: Command, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    original = llamac.Session.prefill

    def prefill(session: llamac.Session, *arguments: Any, **options: Any) -> None:
        seen.append(session.context)
        original(session, *arguments, **options)

    monkeypatch.setattr(llamac.Session, "prefill", prefill)
    for options in (("-n", 18), ("-n", 0), ("-n", 5000), ("-n", 18, "--context", 50), ("-n", 0, "--context", 50)):
        assert llamac_command("run", tiny_llama, "-i", "hello", *GREEDY, *options).code == 0
    assert seen == [20, 600, 600, 50, 50]
    run = ("run", tiny_llama, "-i", "hello", *GREEDY)
    assert "decode 48 tokens" in llamac_command(*run, "-n", 0, "--context", 50).err
    llamac_command(*run, "--context", 601, "-n", 9).refuses_with("--context is 601, expected 1 to 600")
    llamac_command(*run, "--context", 0).refuses_with("--context is 0, expected 1 to 600")


# ---- options


def test_sampling_options_reach_the_sampler(llamac_command: Command, tiny_llama: Path) -> None:
    def text(*options: object) -> str:
        done = llamac_command("run", tiny_llama, "-i", "he", "-n", 40, "--no-echo", "-q", *options)
        assert (done.code, done.err) == (0, "")
        return done.out[:-1]

    with llamac.load(tiny_llama) as model:

        def expected(**settings: Any) -> str:
            return model.generate("he", max_tokens=40, **settings).text

        assert text("-s", 5) == expected(temperature=1.0, top_p=1.0, seed=5)  # the model recommends no settings
        assert text("--seed", 5) == text("-s", 5) != text("-s", 6)
        assert text("-s", 5, "-t", 2.5, "-p", 0.5) == expected(temperature=2.5, top_p=0.5, seed=5)
        assert text("--seed", 5, "--temperature", 2.5, "--top-p", 0.5) == expected(temperature=2.5, top_p=0.5, seed=5)
        assert text("-s", 5, "-t", 3, "--top-k", 7) == expected(temperature=3.0, top_k=7, seed=5)
        assert text("-s", 5, "-t", 3, "--min-p", 0.3) == expected(temperature=3.0, min_p=0.3, seed=5)
        assert text("-t", 0, "-s", 1) == expected(temperature=0) == text("-t", 0, "-s", 2)
        assert text("-t", 0, "--threads", up_to(2), "--isa", "scalar") == expected(temperature=0)


def test_machine_options_reach_the_session(
    llamac_command: Command, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    original = llamac.Session.prefill

    def prefill(session: llamac.Session, *arguments: Any, **options: Any) -> None:
        seen.append((session.kv_dtype, session.threads, session.isa, session.numerics))
        original(session, *arguments, **options)

    monkeypatch.setattr(llamac.Session, "prefill", prefill)
    llamac_command("run", tiny_llama, "-i", "a", "-n", 9, "--kv-dtype", "f16", "--threads", up_to(2), "--isa", "scalar")
    llamac_command("run", tiny_llama, "-i", "a", "-n", 9, "--kv-dtype", "q8", "--threads", 1, "--numerics", "fast")
    assert seen[0] == ("f16", up_to(2), "scalar", "exact")
    assert (*seen[1][:2], seen[1][3]) == ("q8", 1, "fast")


def test_stop_strings_end_the_output(llamac_command: Command, script: Path) -> None:
    options = ("run", script, *GREEDY, "--no-echo", "-n", 20)
    assert llamac_command(*options, "--stop", "fg", "--stop", "klm").out == "abcde\n"
    assert llamac_command(*options, "--stop", "zzz", "--stop", "klm").out == "abcdefghij\n"
    llamac_command(*options, "--stop", "").refuses_with("stop is")


def test_the_tokenizer_option_replaces_the_tokenizer(llamac_command: Command, script: Path, tmp_path: Path) -> None:
    (tmp_path / "bytes.bin").write_bytes(llama2c_file(["zz"]))
    options = ("run", script, "-i", "hello", *GREEDY, "--no-echo", "-n", 4, "-q")
    assert llamac_command(*options).out == "cdef\n"  # BOS, " hell", "o"
    assert llamac_command(*options, "-z", tmp_path / "bytes.bin").out == "ghij\n"  # BOS and six bytes
    assert llamac_command(*options, "--tokenizer", tmp_path / "bytes.bin").out == "ghij\n"
    llamac_command(*options, "-z", tmp_path / "absent").fails_with("absent")
    (tmp_path / "large.bin").write_bytes(llama2c_file([f"word{number}" for number in range(60)]))
    llamac_command(*options, "-z", tmp_path / "large.bin").refuses_with("do not belong together", "301")
    (tmp_path / "broken.bin").write_bytes(llama2c_file()[:-3])
    llamac_command(*options, "-z", tmp_path / "broken.bin").fails_with("truncated")


def test_a_model_is_refused_as_a_tokenizer(llamac_command: Command, script: Path) -> None:
    done = llamac_command("run", script, "-z", script)
    done.fails_with(f"{script} is a model file, not a tokenizer", "tokenizer.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-t", "-1"), "temperature is -1"),
        (("-t", "nan"), "temperature is nan"),
        (("-p", "0"), "--top-p is 0"),
        (("-p", "1.5"), "--top-p is 1.5"),
        (("--top-k", "-1"), "--top-k is -1"),
        (("--min-p", "2"), "--min-p is 2"),
        (("-s", "-1"), "seed is -1"),
        (("-s", str(2**64)), "seed is 18446744073709551616"),
        (("--threads", "0"), "--threads is 0, expected 1 to 1024"),
        (("--isa", "sse9"), "--isa is 'sse9'; this build has"),
        (("--system", "Be brief."), "--system needs --chat"),
        (("--dry-allowed-length", 3), "--dry-allowed-length needs --dry-multiplier"),
        (("--mirostat-eta", 1), "--mirostat-eta needs --mirostat-tau"),
        (("--chat",), "the model has no chat template: run it without --chat"),
    ],
    ids=str,
)
def test_values_out_of_range_exit_2(llamac_command: Command, script: Path, options: Any, message: str) -> None:
    llamac_command("run", script, "-i", "a", "-q", "--no-echo", *options).refuses_with(message)


def test_sampling_values_are_checked_before_the_model_is_opened(llamac_command: Command, tmp_path: Path) -> None:
    llamac_command("run", tmp_path / "absent.gguf", "-t", "-1").refuses_with("--temperature is -1")


# ---- the statistics line

FIGURES = (
    r"prompt 2 tokens, [\d.]+ tok/s \| decode 9 tokens, [\d.]+ tok/s \| first token after \d+ ms \| length \| seed 7\n"
)


def test_the_time_to_the_first_token_has_no_wait_for_a_pipe(
    llamac_command: Command, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, waited = time.perf_counter, 0

    def wait(*_: object) -> str:
        nonlocal waited
        waited += 1000
        return "h"

    monkeypatch.setattr(time, "perf_counter", lambda: clock() + waited)
    monkeypatch.setattr(run, "read_prompt", wait)
    found = re.search(r"first token after (\d+) ms", llamac_command("run", script, "-n", 9).err)
    assert found is not None
    assert int(found[1]) < 1_000_000


def test_statistics_are_one_line_on_stderr(llamac_command: Command, script: Path) -> None:
    assert re.fullmatch(FIGURES, llamac_command("run", script, "-i", "h", "-n", 9, "-s", 7).err)
    assert llamac_command("run", script, "-i", "h", "-n", 9, "--quiet").err == ""
    short = llamac_command("run", script, "-i", "", "-n", 1).err
    assert "prompt 1 token, " in short
    assert "| decode 1 token, - |" in short


def test_the_printed_seed_reproduces_the_run(llamac_command: Command, tiny_llama: Path) -> None:
    first = llamac_command("run", tiny_llama, "-i", "he", "-n", 30)
    seed = first.err.split("seed ")[1].strip()
    assert llamac_command("run", tiny_llama, "-i", "he", "-n", 30, "-s", seed).out == first.out


def test_statistics_include_the_finish_reason(llamac_command: Command, script: Path, tmp_path: Path) -> None:
    run = ("run", script, *GREEDY)
    assert "| length |" in llamac_command(*run, "-n", 5).err
    assert "| context |" in llamac_command(*run, "-n", 0).err
    assert "| stop string 'fg' |" in llamac_command(*run, "--stop", "fg").err
    stops = write_model(tmp_path / "stops.bin", script_checkpoint([*byte_ids("abc"), 2], stop_ids=[2]))
    done = llamac_command("run", stops, *GREEDY)
    assert done.out == "abc\n"
    assert "| stop token </s> |" in done.err


def test_statistics_without_a_tokenizer_show_the_stop_tokens_id(llamac_command: Command, script: Path) -> None:
    from llamac.cli.run import figures
    from llamac.engine.generation.output import Completion, Timings, Usage

    with llamac.load(script) as model:
        model_without: Any = type("Model", (), {"has_tokenizer": False})()
        result = Completion("", [], "stop", 2, 1, Usage(1, 0), Timings(1.0, 1.0))
        assert "| stop token 2 |" in figures(model_without, result, 1.0)
        assert "| stop token " in figures(model, result, 1.0)


# ---- a full context


def test_what_was_dropped_is_reported(llamac_command: Command, tiny_llama: Path) -> None:
    run = ("run", tiny_llama, "-i", "hello world " * 40, *GREEDY, "--context", 64, "-n")
    refused = llamac_command(*run, 9)
    assert refused.code == 1
    assert "but the context holds 64, and --max-tokens is 9: shorten it" in refused.err
    assert "--context-overflow" in refused.err
    cut = llamac_command(*run, 9, "--context-overflow", "truncate_middle", "--context-keep", 3)
    count = tokens_of(tiny_llama, "hello world " * 40)
    assert f"prompt 56 tokens ({count - 56} cut), " in cut.err
    shifted = llamac_command(*run, 50, "--context-overflow", "shift", "-q")
    assert (shifted.code, shifted.err) == (0, "")


def test_dropped_positions_are_reported(tiny_llama: Path) -> None:
    from llamac.cli.run import figures
    from llamac.engine.generation.output import Completion, Timings, Usage

    with llamac.load(tiny_llama) as model:
        result = Completion("", [], "length", None, 1, Usage(9, 100, shifted_tokens=30), Timings(1.0, 1.0))
        assert "| decode 100 tokens (30 dropped), 99.0 tok/s |" in figures(model, result, 1.0)


# ---- the hint at --chat


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    made = checkpoint(llama_config())
    made.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return write_model(tmp_path / "chat.bin", made)


def test_a_plain_prompt_to_a_chat_model_gets_a_hint_on_a_terminal(
    llamac_command: Command, chat_model: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ("run", chat_model, "-i", "hello", *GREEDY, "-n", 3)
    llamac_command("run", chat_model, "--chat", "-i", "").refuses_with("--chat needs a message: give it with -i")
    assert "hint" not in llamac_command(*run).err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    hint, figures = llamac_command(*run).err.splitlines()
    assert hint == "llamac: hint: this is a chat model; --chat puts the prompt into its chat template"
    assert figures.startswith("prompt ")
    assert "hint" not in llamac_command(*run, "--chat").err
    assert llamac_command(*run, "-q").err == ""
    assert "hint" not in llamac_command("run", tiny_llama, "-i", "hello", *GREEDY, "-n", 3).err


# ---- conversions


def test_a_conversion_is_announced_once(llamac_command: Command, llama2c: Path, cache_folder: Path) -> None:
    run = ("run", llama2c, "-i", "a", *GREEDY, "-n", 3)
    notice, figures = llamac_command(*run).err.splitlines()
    assert notice == f"llamac: converting {llama2c} once; keeping the result in {cache_folder}"
    assert figures.startswith("prompt ")
    assert llamac_command(*run).err.startswith("prompt ")  # from the cache
    assert llamac_command(*run, "--no-cache").err.startswith(f"llamac: converting {llama2c} to a temporary file\n")


def test_quiet_conversions_are_announced_only_on_terminals(
    llamac_command: Command, llama2c: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ("run", llama2c, "-i", "a", *GREEDY, "-n", 3, "-q", "--no-cache")
    assert llamac_command(*run).err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("llamac.cli.loading.BAR_DELAY", 0.0)
    shown = llamac_command(*run).err
    assert shown.startswith(f"llamac: converting {llama2c} to a temporary file\n")
    assert "writing: " in shown
    assert shown.endswith("\r")  # the bar was wiped


def test_the_conversion_of_a_refused_source_is_not_announced(
    llamac_command: Command, tmp_path: Path, cache_folder: Path
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    llamac_command("run", tmp_path / "model.gguf").fails_with("model.gguf")


# ---- more about sampling


def test_options_of_sampling_are_parameters(llamac_command: Command, tiny_llama: Path) -> None:
    prompt, common = "hello", {"max_tokens": 30, "seed": 5}
    cases: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        (("--repetition-penalty", 1.5, "--presence-penalty", 1), {"repetition_penalty": 1.5, "presence_penalty": 1}),
        (("--dry-multiplier", 2, "--dry-allowed-length", 1), {"dry_multiplier": 2, "dry_allowed_length": 1}),
        (("--typical-p", 0.5, "--frequency-penalty", 0.5), {"typical_p": 0.5, "frequency_penalty": 0.5}),
        (("--xtc-probability", 1, "--xtc-threshold", 0.01), {"xtc_probability": 1, "xtc_threshold": 0.01}),
        (("--mirostat-tau", 2, "--mirostat-eta", 0.5), {"mirostat_tau": 2, "mirostat_eta": 0.5}),
        (("--logit-bias", "70=20", "--logit-bias", "71=-inf"), {"logit_bias": {70: 20.0, 71: float("-inf")}}),
        (("--ban", "e", "--ban", "a", "--ignore-eos"), {"banned_strings": ["e", "a"], "ignore_eos": True}),
        (("--min-tokens", 20, "--stop-token", 70), {"min_tokens": 20, "stop_token_ids": [70]}),
    ]
    with llamac.load(tiny_llama) as model:
        for options, settings in cases:
            expected = model.generate(prompt, **{**common, **settings}).text
            done = llamac_command("run", tiny_llama, "-i", prompt, "-n", 30, "-s", 5, "-q", "--no-echo", *options)
            assert done == Result(0, f"{expected}\n", "")


def test_logprobs_are_printed_for_each_token(llamac_command: Command, script: Path) -> None:
    done = llamac_command("run", script, "-i", "h", *GREEDY, "-n", 2, "--logprobs", 1, "-q")
    assert done.out == "hbc\n"
    lines = done.err.splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r" +-?0\.\d{3} 'b'  \| -?0\.\d{3} 'b'", lines[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--logit-bias", "5"), "'5' is not a token id and a number"),
        (("--typical-p", "2"), "--typical-p is 2"),
        (("--logprobs", "-1"), "--logprobs is -1"),
    ],
)
def test_wrong_values_of_sampling_are_errors(
    llamac_command: Command, script: Path, options: tuple[str, ...], message: str
) -> None:
    done = llamac_command("run", script, *options)
    assert done.code == 2
    assert message in done.err


# ---- several candidates


def test_candidates_are_printed_one_after_another(llamac_command: Command, tiny_llama: Path) -> None:
    options: Any = {"max_tokens": 6, "seed": 4, "temperature": 1.5}
    with llamac.load(tiny_llama) as model:
        texts = [choice.text for choice in model.generate("hello", n=2, **options).choices]
        best = model.generate("hello", best_of=3, **options).text
        beams = model.generate("hello", beam_width=3, max_tokens=6).text
    arguments = ["run", tiny_llama, "-i", "hello", "-n", 6, "--seed", 4, "--temperature", 1.5]
    done = llamac_command(*arguments, "--candidates", 2)
    assert done.out == f"--- 1 of 2\nhello{texts[0]}\n--- 2 of 2\nhello{texts[1]}\n"
    assert re.search(r"\| 2 candidates, \d+ tokens in [\d.]+ s \| seed 4\n", done.err)
    assert llamac_command(*arguments, "--best-of", 3, "-q", "--no-echo") == Result(0, f"{best}\n", "")
    found = llamac_command("run", tiny_llama, "-i", "hello", "-n", 6, "--beams", 3, "-q", "--no-echo")
    assert found == Result(0, f"{beams}\n", "")
    refused = llamac_command(*arguments, "--candidates", 4, "--best-of", 3)
    assert (refused.code, refused.out) == (2, "")
    assert "--candidates is 4, expected at most --best-of, which is 3" in refused.err
    for without in ((), ("--beams", 1)):
        llamac_command(*arguments, "--length-penalty", 2, *without).refuses_with("--length-penalty needs --beams")
