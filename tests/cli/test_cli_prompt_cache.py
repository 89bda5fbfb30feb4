"""--prompt-cache keeps what was computed for a prompt."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from test_cli_chat import chat_model

import llamac
from builders import script_checkpoint, write_model
from commands import Command

PROMPT = "a prompt that is somewhat longer than the others"


def test_run_continues_a_prompt(llamac_command: Command, tiny_llama: Path, tmp_path: Path) -> None:
    def run(prompt: str, *options: object) -> tuple[str, str]:
        result = llamac_command("run", tiny_llama, "-i", prompt, "-n", "4", "-t", "0", *options)
        assert result.code == 0, result.err
        return result.out, result.err

    cache = tmp_path / "prompt.session"
    with llamac.load(tiny_llama) as model:
        count, longer = (len(model.tokenize(prompt)) for prompt in (PROMPT, PROMPT + " and more"))
    for prompt, line in (
        (PROMPT, f"prompt cache: 0 of {count} tokens"),
        (PROMPT, f"prompt cache: {count - 1} of {count} tokens"),
        (PROMPT + " and more", f"prompt cache: {count} of {longer} tokens"),
        (PROMPT + " and more", f"prompt cache: {longer - 1} of {longer} tokens"),
    ):
        expected, _ = run(prompt)
        found, figures = run(prompt, "--prompt-cache", cache)
        assert found == expected
        assert line in figures
    _, figures = run(PROMPT, "--prompt-cache", cache, "-q")
    assert "prompt cache" not in figures


def test_chat_continues_a_conversation(llamac_command: Command, tmp_path: Path) -> None:
    model, cache, saved = chat_model(tmp_path / "model.bin"), tmp_path / "a.session", tmp_path / "a.json"
    options = ("-n", "3", "--prompt-cache", cache)
    first = llamac_command("chat", model, *options, stdin=f"hello\n/save {saved}\n".encode())
    assert first.code == 0, first.err
    plain = llamac_command("chat", model, "-n", "3", "--load", saved, stdin=b"more\n/stats\n")
    again = llamac_command("chat", model, *options, "--load", saved, stdin=b"more\n/stats\n")
    assert (plain.code, again.code) == (0, 0), again.err
    assert again.out == plain.out
    assert "0 tokens were reused" in plain.err
    assert "0 tokens were reused" not in again.err.replace("10 tokens", "ten tokens")


def test_a_file_of_something_else_is_refused_and_kept(
    llamac_command: Command, tiny_llama: Path, tiny_gpt2: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "prompt.session"
    cache.write_bytes(b"notes")
    result = llamac_command("run", tiny_llama, "-i", PROMPT, "--prompt-cache", cache)
    assert result.code == 1
    assert "is not a session file" in result.err
    assert cache.read_bytes() == b"notes"
    cache.unlink()
    assert llamac_command("run", tiny_llama, "-i", PROMPT, "-n", "2", "--prompt-cache", cache).code == 0
    before = cache.read_bytes()
    result = llamac_command("run", tiny_gpt2, "-i", PROMPT, "-n", "2", "--prompt-cache", cache)
    assert result.code == 1
    assert "belongs to another session: model is" in result.err
    assert cache.read_bytes() == before


def test_an_answer_without_text_leaves_the_prompt(llamac_command: Command, tmp_path: Path) -> None:
    stop, prompt, cache = 7, "abc", tmp_path / "prompt.session"
    model = write_model(tmp_path / "silent.bin", script_checkpoint([stop] * 20, stop_ids=[stop]))
    for cached in (0, 4):
        result = llamac_command("run", model, "-i", prompt, "-t", "0", "--prompt-cache", cache)
        assert (result.code, result.out) == (0, "abc\n"), result.err
        assert f"prompt cache: {cached} of 5 tokens" in result.err
        assert cache.exists()


def test_several_candidates_have_no_prompt_cache(llamac_command: Command, tiny_llama: Path, tmp_path: Path) -> None:
    result = llamac_command("run", tiny_llama, "-i", PROMPT, "--candidates", "2", "--prompt-cache", tmp_path / "a")
    assert result.code == 2
    assert "--prompt-cache keeps one text" in result.err


@pytest.mark.parametrize("command", ["run", "chat"])
def test_an_unusable_path_is_refused_before_the_model_is_loaded(
    llamac_command: Command, tmp_path: Path, command: str
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for cache, expected in (
        (tmp_path / "no" / "such", "such, but the folder .*no does not exist"),
        (pipe, "pipe, which is not a regular file"),
        (tmp_path, "which is not a regular file"),
    ):
        result = llamac_command(command, tmp_path / "no_model.bin", "--prompt-cache", cache, stdin=b"hello\n")
        assert result.code == 2
        assert re.search(f"--prompt-cache is .*{expected}", " ".join(result.err.split())), result.err
