"""`llamac batch`: results and errors per line, continuation after a kill, and files that it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from builders import byte_ids, script_checkpoint, write_model
from commands import Command
from llamac.engine.batching.engine import Engine
from llamac.exit_codes import INTERRUPTED, OK
from llamac.openai import batch_files
from processes import TIMEOUT, heed_signals

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that continues a prompt of n tokens with the alphabet, from its n-th letter on; with a template."""
    made = script_checkpoint(byte_ids(ALPHABET))
    made.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return write_model(tmp_path / "model.bin", made, generation={"temperature": 0})


def completion(custom_id: object, **body: Any) -> dict[str, Any]:
    body = {"prompt": "x", "max_tokens": 4, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def write_lines(path: Path, lines: list[Any]) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts))
    return path


def results(path: Path) -> dict[str, dict[str, Any]]:
    """The results by custom_id. Checks that no line is doubled."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line for line in lines}


def texts(path: Path) -> dict[str, str]:
    found = results(path)
    return {name: found[name]["response"]["body"]["choices"][0]["text"] for name in sorted(found)}


def some_lines(n: int) -> list[dict[str, Any]]:
    return [completion(f"id-{i:03}", prompt="x" * (i % 9 + 1), max_tokens=i % 5 + 1) for i in range(n)]


# ---- results


def test_each_line_gets_a_result_in_the_format_of_the_api(llamac_command: Command, model: Path, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "xy"}], "max_tokens": 3, "model": "gpt-9", "seed": 5}
    lines = [
        completion("first", prompt=[5, 6], max_tokens=4),
        {"custom_id": "second", "method": "POST", "url": "/v1/chat/completions", "body": chat},
    ]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    done = llamac_command("batch", source, output, "-m", model)
    assert (done.code, done.out, done.err) == (0, "", "llamac: 2 of 2 lines\n")
    found = results(output)
    first, second = found["first"]["response"], found["second"]["response"]
    assert (first["status_code"], found["first"]["error"]) == (200, None)
    assert first["request_id"].startswith("req_")
    body = first["body"]
    assert (body["object"], body["model"], body["id"][:5]) == ("text_completion", "tiny", "cmpl-")
    assert body["choices"] == [{"index": 0, "text": "bcde", "logprobs": None, "finish_reason": "length"}]
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    body = second["body"]
    assert (body["object"], body["seed"]) == ("chat.completion", 5)
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert len(body["choices"][0]["message"]["content"]) == 3


def test_a_result_names_the_parameters_without_effect(llamac_command: Command, model: Path, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "xy"}], "max_tokens": 1, "reasoning_effort": "low", "store": False}
    lines = [
        {"custom_id": "named", "method": "POST", "url": "/v1/chat/completions", "body": {**chat, "user": "someone"}},
        completion("all honored"),
    ]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert llamac_command("batch", source, output, "-m", model).code == 0
    found = results(output)
    assert set(found["named"]["response"]["no_effect"]) == {"store", "user", "reasoning_effort"}
    assert "no_effect" not in found["all honored"]["response"]


def test_finish_reasons_are_those_of_the_api(llamac_command: Command, model: Path, tmp_path: Path) -> None:
    lines = [completion("stop", stop="d"), completion("length"), completion("context", max_tokens=500)]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert llamac_command("batch", source, output, "-m", model).code == 0
    reasons = {name: line["response"]["body"]["choices"][0]["finish_reason"] for name, line in results(output).items()}
    assert reasons == {"stop": "stop", "length": "length", "context": "length"}


def test_a_full_context_follows_the_request_then_the_option(
    llamac_command: Command, model: Path, tmp_path: Path
) -> None:
    lines = [
        completion("cut", prompt="x" * 90),
        completion("own", prompt="x" * 90, context_overflow="error"),
        completion("other", prompt="x" * 90, context_keep=50),
        completion("fits", prompt="x"),
        completion("wrong", context_overflow="drop"),
    ]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    llamac_command("batch", source, output, "-m", model, "--context-overflow", "truncate_middle")
    bodies = {name: line["response"]["body"] for name, line in results(output).items()}
    for name in ("cut", "other"):
        assert (bodies[name]["usage"]["prompt_tokens"], bodies[name]["usage"]["truncated_tokens"]) == (61, 31)
    assert bodies["own"]["error"]["code"] == "context_length_exceeded"
    assert "truncated_tokens" not in bodies["fits"]["usage"]
    assert bodies["wrong"]["error"]["param"] == "context_overflow"


def test_drafts_and_prefixes_on_disk_change_no_text(
    llamac_command: Command, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft model, prompt lookup or neither, and prefixes of an earlier run."""
    closed: list[tuple[bool, bool]] = []
    before = Engine.close

    def close(engine: Engine) -> None:
        if not engine.closed:
            closed.append((engine._session._draft_model is not None, engine.stats().prefix.disk_hits > 0))
        before(engine)

    monkeypatch.setattr(Engine, "close", close)
    lines = [completion(f"id-{i}", prompt="x" * (70 + i), max_tokens=20, temperature=0.5, seed=i) for i in range(5)]
    source, prefixes = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "prefixes"
    choices: list[list[Any]] = [["--no-speculation"], ["--draft", tiny_llama], ["--prefix-dir", prefixes]]
    found = []
    for n, chosen in enumerate(choices * 2):
        output = tmp_path / f"out{n}.jsonl"
        assert llamac_command("batch", source, output, "-m", tiny_llama, "--max-sequences", 2, *chosen).code == 0
        found.append(texts(output))
    assert all(other == found[0] for other in found)
    assert [is_drafting for is_drafting, _ in closed] == [False, True, False] * 2
    assert [has_read for _, has_read in closed] == [False] * 5 + [True]
    assert any(prefixes.rglob("*"))


def test_pipes_are_read_and_written(llamac_command: Command, model: Path) -> None:
    lines = "".join(json.dumps(line) + "\n" for line in some_lines(3))
    done = llamac_command("batch", "-", "-", "-m", model, "-q", stdin=f"\n{lines}".encode())
    assert (done.code, done.err) == (0, "")
    written = [json.loads(line) for line in done.out.splitlines()]
    assert sorted(line["custom_id"] for line in written) == ["id-000", "id-001", "id-002"]


def test_a_pipe_is_written_only_while_it_has_a_reader(tmp_path: Path) -> None:
    path, opened = tmp_path / "pipe", []
    os.mkfifo(path)
    with batch_files.Input(str(write_lines(tmp_path / "in.jsonl", some_lines(1)))) as source:
        thread = threading.Thread(target=lambda: opened.append(batch_files.Output(str(path), source, "")), daemon=True)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()  # it waits for a reader, like other programs
        with open(path, "rb") as reader:
            thread.join(TIMEOUT)
            [output] = opened
            output.append({"id": 1})
            assert reader.readline() == b'{"id": 1}\n'
    with output, pytest.raises(BrokenPipeError):
        output.append({"id": 2})


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("number", [None, signal.SIGINT, signal.SIGTERM])
def test_a_batch_ends_with_its_reader_or_a_signal(
    model: Path, tmp_path: Path, is_named: bool, number: signal.Signals | None
) -> None:
    """The result does not fit into the pipe, so the command waits for its reader."""
    source = write_lines(tmp_path / "in.jsonl", [completion("x" * 300_000)])
    process = subprocess.Popen(
        [sys.executable, "-m", "llamac", "batch", source, "/dev/stdout" if is_named else "-", "-m", model],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        preexec_fn=heed_signals,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.read(10) == b'{"id": "ba'
            if number is None:
                process.stdout.close()
            else:
                process.send_signal(number)
            code = process.wait(TIMEOUT)
        finally:
            process.kill()
        assert process.stderr is not None
        error = process.stderr.read().decode()
    if number is None:
        assert (code, error) == (OK, "")
    else:
        assert code == (INTERRUPTED if number == signal.SIGINT else -number)
        assert error == "llamac: stopped after 0 of 1 line\n"


# ---- errors of lines


def test_errors_are_results_and_the_exit_code_says_so(llamac_command: Command, model: Path, tmp_path: Path) -> None:
    bad: dict[str, Any] = {
        "url": {**completion("url"), "url": "/v1/embeddings"},
        "method": {**completion("method"), "method": "GET"},
        "field": {**completion("field"), "extra": 1},
        "body": {**completion("body"), "body": []},
        "no body": {"custom_id": "no body", "url": "/v1/completions"},
        "long": completion("long", prompt="x" * 500),
        "id": completion("id", prompt=[10**6]),
        "value": completion("value", temperature=-1),
        "surrogate": completion("surrogate", prompt="\ud800"),
        "best": completion("best", n=3, best_of=2),
        "stream": completion("stream", stream=True),
        "prompts": completion("prompts", prompt=["a", "b"]),
    }
    lines = ["{oops", *bad.values(), completion(5), completion("good"), '"text"']
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    done = llamac_command("batch", source, output, "-m", model)
    assert (done.code, done.err) == (1, "llamac: 16 of 16 lines, 15 with errors\n")
    found = [json.loads(line) for line in output.read_text().splitlines()]
    codes = {}
    for line in found:
        response = line["response"]
        if response["status_code"] != 200:
            assert set(response["body"]["error"]) == {"message", "type", "param", "code"}
            codes[line["custom_id"] or int(line["id"].split("_")[2])] = response["body"]["error"]["code"]
    assert codes == {
        1: "invalid_json_line",
        "url": "invalid_url",
        "method": "invalid_method",
        "field": "unknown_parameter",
        "body": "invalid_type",
        "no body": "missing_required_parameter",
        "long": "context_length_exceeded",
        "id": "invalid_value",
        "value": "invalid_value",
        "surrogate": "invalid_value",
        "best": "invalid_value",
        "stream": "unsupported_parameter",
        "prompts": "unsupported_value",
        14: "invalid_type",
        16: "invalid_json_line",
    }
    again = llamac_command("batch", source, output, "-m", model)
    assert (again.code, again.err) == (1, done.err)
    assert [json.loads(line) for line in output.read_text().splitlines()] == found


def test_a_request_that_needs_too_much_memory_is_an_error_of_its_line(
    llamac_command: Command, tiny_llama: Path, tmp_path: Path
) -> None:
    lines = [completion("small"), completion("large", prompt="x y z " * 60)]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert llamac_command("batch", source, output, "-m", tiny_llama, "--kv-tokens", 64).code == 1
    assert {name: line["response"]["status_code"] for name, line in results(output).items()} == {
        "small": 200,
        "large": 503,
    }


# ---- continuation


def test_lines_wait_for_room_in_the_queue(
    llamac_command: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the candidates of a line takes a place of the engine's queue."""
    monkeypatch.setattr("llamac.cli.batch.Engine", partial(Engine, max_queue=2))
    lines = [completion(str(i), n=3, max_tokens=1) for i in range(6)]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    done = llamac_command("batch", source, output, "-m", model, "--max-sequences", 2)
    assert (done.code, done.err) == (0, "llamac: 6 of 6 lines\n")
    assert texts(output) == dict.fromkeys("012345", "c")


def test_a_batch_continues_after_a_kill_at_any_byte(llamac_command: Command, model: Path, tmp_path: Path) -> None:
    source, output = write_lines(tmp_path / "in.jsonl", some_lines(6)), tmp_path / "out.jsonl"
    assert llamac_command("batch", source, output, "-m", model).code == 0
    whole, expected = output.read_bytes(), texts(output)
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in (0, 1, 10, 25, ends[0] - 1, ends[0], ends[0] + 1, ends[3] + 30, ends[5] - 1):
        output.write_bytes(whole[:cut])
        done = llamac_command("batch", source, output, "-m", model)
        assert (done.code, done.err) == (0, "llamac: 6 of 6 lines\n")
        assert texts(output) == expected
        kept = max([0, *(end for end in ends if end <= cut)])
        assert output.read_bytes()[:kept] == whole[:kept]


def test_results_that_another_program_has_rewritten_are_continued(
    llamac_command: Command, finished: tuple[Path, Path], model: Path
) -> None:
    """Without spaces and without a last line feed, as json.dumps and a join may write them."""
    source, output = finished
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    kept = "\n".join(json.dumps(line, separators=(",", ":")) for line in lines[:2])
    output.write_text(kept)
    assert llamac_command("batch", source, output, "-m", model).err == "llamac: 3 of 3 lines\n"
    assert output.read_text().startswith(kept + "\n{")
    assert set(results(output)) == {"id-000", "id-001", "id-002"}


@pytest.mark.parametrize("part", [b"", b'{"id": "batch_'])
def test_zeros_after_a_power_loss_are_dropped(
    llamac_command: Command, finished: tuple[Path, Path], model: Path, part: bytes
) -> None:
    source, output = finished
    whole = output.read_bytes()
    output.write_bytes(whole + part + bytes(5000))
    assert llamac_command("batch", source, output, "-m", model).code == 0
    assert output.read_bytes() == whole


def test_a_killed_batch_continues(llamac_command: Command, model: Path, tmp_path: Path) -> None:
    source, output = write_lines(tmp_path / "in.jsonl", some_lines(300)), tmp_path / "out.jsonl"
    program = "import llamac.openai.batch_files as f, llamac.cli as c; f.SYNC_INTERVAL = 0.0; c.main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "batch", source, output, "-m", model, "--max-sequences", "2"],
        stderr=subprocess.DEVNULL,
        preexec_fn=heed_signals,
    )
    limit = time.monotonic() + TIMEOUT
    while not (output.exists() and output.stat().st_size) and time.monotonic() < limit:
        time.sleep(0.001)
    process.kill()
    assert process.wait(TIMEOUT) == -signal.SIGKILL
    assert output.stat().st_size > 0
    assert llamac_command("batch", source, output, "-m", model).code == 0
    assert len(texts(output)) == 300


def test_ctrl_c_keeps_the_results_and_says_how_to_continue(
    llamac_command: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = write_lines(tmp_path / "in.jsonl", some_lines(9)), tmp_path / "out.jsonl"
    original, calls = batch_files.Output.append, 0

    def append(self: batch_files.Output, result: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        original(self, result)

    with monkeypatch.context() as patch:
        patch.setattr(batch_files.Output, "append", append)
        done = llamac_command("batch", source, output, "-m", model)
    assert (done.code, done.out) == (130, "")
    assert done.err == "llamac: stopped after 3 of 9 lines; run the command again to continue\n"
    assert len(texts(output)) == 3
    assert llamac_command("batch", source, output, "-m", model, "-q").err == ""
    assert len(texts(output)) == 9


def test_lines_can_be_added_to_the_input(llamac_command: Command, model: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    for n in (3, 5):
        assert llamac_command("batch", write_lines(source, some_lines(n)), output, "-m", model).code == 0
        assert len(texts(output)) == n


def test_an_engine_that_stops_ends_the_batch(
    llamac_command: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = write_lines(tmp_path / "in.jsonl", some_lines(3)), tmp_path / "out.jsonl"

    def fail(self: Engine) -> bool:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Engine, "_wait_for_work", fail)
    done = llamac_command("batch", source, output, "-m", model)
    assert done.code == 1
    assert "stopped after 0 of 3 lines" in done.err
    assert "the engine has stopped: a bug" in done.err
    assert output.read_bytes() == b""


# ---- the guide


def test_the_commands_of_the_guide_run(
    llamac_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "batch.md").read_text("utf-8")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text(text.split("```json\n")[1].split("```")[0])
    commands = re.findall(r"^    llamac (batch in.jsonl out.jsonl)$", text, re.MULTILINE)
    assert commands
    for command in commands:
        assert llamac_command(*command.split()).code == 0
    shown = json.loads(text.split("```json\n")[2].split("```")[0])

    def shape(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: shape(item) for name, item in value.items()}
        return [shape(item) for item in value] if isinstance(value, list) else type(value)

    found = results(tmp_path / "out.jsonl")
    assert shape(found["a"]) == shape(shown)
    assert found["a"]["response"]["body"]["choices"] == shown["response"]["body"]["choices"]


# ---- files that do not fit


@pytest.fixture
def finished(llamac_command: Command, model: Path, tmp_path: Path) -> tuple[Path, Path]:
    """An input of three lines and its output."""
    source, output = write_lines(tmp_path / "in.jsonl", some_lines(3)), tmp_path / "out.jsonl"
    assert llamac_command("batch", source, output, "-m", model).code == 0
    return source, output


def refusal(command: Command, source: object, output: Path, model: Path) -> str:
    before = output.read_bytes() if output.exists() else None
    done = command("batch", source, output, "-m", model)
    assert (done.code, done.out) == (2, "")
    assert (output.read_bytes() if output.exists() else None) == before
    return done.err


def test_duplicate_custom_ids_are_refused(llamac_command: Command, model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [completion("a"), "", completion("b"), completion("a")])
    error = refusal(llamac_command, source, tmp_path / "out.jsonl", model)
    assert "lines 1 and 4 have the same custom_id 'a'" in error


@pytest.mark.parametrize(
    "text", ["notes", "notes\n", "\0\0", "[]\n", '{"id": "x"}\n', '{"id": "batch_req_1_0"}\n', '{"id": 1']
)
def test_a_foreign_output_is_refused(llamac_command: Command, model: Path, tmp_path: Path, text: str) -> None:
    source, output = write_lines(tmp_path / "in.jsonl", some_lines(1)), tmp_path / "out.jsonl"
    output.write_text(text)
    error = refusal(llamac_command, source, output, model)
    assert "line 1 is not a result of `llamac batch`: choose another output, or remove this file" in error


@pytest.mark.parametrize("text", ["notes", '{"id": 1}', "[]\n"])
def test_a_foreign_line_after_results_is_refused(
    llamac_command: Command, model: Path, finished: tuple[Path, Path], text: str
) -> None:
    source, output = finished
    output.write_text(output.read_text() + text)
    error = refusal(llamac_command, source, output, model)
    assert "line 4 is not a result of `llamac batch`: choose another output, or remove this line" in error


def test_a_changed_input_is_refused(llamac_command: Command, model: Path, finished: tuple[Path, Path]) -> None:
    source, output = finished
    lines = some_lines(3)
    number = 1 + [json.loads(line)["custom_id"] for line in output.read_text().splitlines()].index("id-001")
    lines[1]["body"]["max_tokens"] = 9
    error = refusal(llamac_command, write_lines(source, lines), output, model)
    assert f"in.jsonl: line 2 has changed since its result was written to line {number} of " in error
    error = refusal(llamac_command, write_lines(source, lines[:1]), output, model)
    assert "is gone since" in error


def test_results_of_another_model_are_refused(
    llamac_command: Command, tiny_llama: Path, finished: tuple[Path, Path]
) -> None:
    assert "line 1 was computed with another model" in refusal(llamac_command, *finished, tiny_llama)


def test_a_repeated_result_is_refused(llamac_command: Command, model: Path, finished: tuple[Path, Path]) -> None:
    source, output = finished
    lines = output.read_text().splitlines()
    output.write_text("\n".join([*lines, lines[0]]) + "\n")
    assert "line 4 repeats the result of line" in refusal(llamac_command, source, output, model)


def test_an_output_that_is_being_written_is_refused(
    llamac_command: Command, model: Path, finished: tuple[Path, Path]
) -> None:
    import fcntl

    source, output = finished
    with open(output, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "is being written by another process" in refusal(llamac_command, source, output, model)


def test_an_input_that_changes_is_noticed(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", some_lines(300))
    with batch_files.Input(str(path)) as source:
        assert source.read(source.lines[2])["custom_id"] == "id-002"
        source.read(source.lines[-1])
        path.write_bytes(path.read_bytes().replace(b"id-002", b"id-00z"))
        with pytest.raises(batch_files.InputChangedError, match="line 3 has changed while the batch was running"):
            source.read(source.lines[2])


def test_an_input_that_changes_ends_the_batch(
    llamac_command: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = write_lines(tmp_path / "in.jsonl", some_lines(3)), tmp_path / "out.jsonl"

    def read(self: batch_files.Input, line: batch_files.Line) -> dict[str, Any]:
        raise batch_files.InputChangedError("changed")

    monkeypatch.setattr(batch_files.Input, "read", read)
    done = llamac_command("batch", source, output, "-m", model, "-q")
    assert (done.code, done.err) == (2, "llamac: error: changed\n")
    assert output.read_bytes() == b""


def test_the_same_file_twice_and_missing_files_are_errors(llamac_command: Command, model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", some_lines(1))
    assert "is both IN and OUT" in refusal(llamac_command, source, source, model)
    llamac_command("batch", tmp_path / "none", tmp_path / "out", "-m", model).fails_with("none", "No such file")
    assert "not a regular file" in refusal(llamac_command, os.devnull, tmp_path / "out", model)
