"""`--tools` of `llamac run` and `llamac chat`: calls are shown, results are typed, and files are checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from builders import byte_ids, checkpoint, llama_config, script_checkpoint, write_model
from commands import Command
from llamac.cli.tools import OneLine
from terminals import Person

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
SHORT = '<tool_call>{"name":"f"}</tool_call>'
TWO = '<tool_call>[{"name":"f"},{"name":"g"}]</tool_call>'
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does it.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
    for name in ("f", "g")
]
EMPTY = "{# the prompt is BOS; tools and tool_calls are known: <tool_call> #}"
EOS = 2


def lines(*texts: str) -> bytes:
    return "".join(text + "\n" for text in texts).encode()


def answering(path: Path, answer: str) -> Path:
    """A model that gives the same answer to every message."""
    made = script_checkpoint([*byte_ids(answer), EOS], stop_ids=[EOS], context=128)
    made.chat_template = EMPTY
    return write_model(path, made, generation={"temperature": 0})


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(TOOLS))
    return path


# ---- files


@pytest.mark.parametrize("command", [("run", "--chat", "-i", "x"), ("chat",)])
def test_other_files_than_tools_are_refused(llamac_command: Command, tmp_path: Path, command: tuple[str, ...]) -> None:
    model = answering(tmp_path / "model.bin", "yes")
    path = tmp_path / "wrong.json"
    double = [TOOLS[0], TOOLS[0]]
    cases = {
        '{"tools"': "wrong.json is not JSON: Expecting",
        "{}": "wrong.json has no tools: expected a list of tools in OpenAI's form",
        "[]": "wrong.json has no tools",
        '["f"]': "wrong.json has no tools",
        "[{}]": "wrong.json: tools[0] has no name",
        '[{"name": "a b"}]': "wrong.json: tools[0] has the name 'a b'",
        json.dumps(double): "wrong.json: tools has two tools named 'f'",
        '[{"name": "a", "parameters": []}]': "wrong.json: tools[0]['function']['parameters'] must be a JSON schema",
        '[{"name": "a", "description": 1}]': "wrong.json: tools[0]['function']['description'] must be a str",
        "\xe9": "wrong.json is not UTF-8",
    }
    for text, message in cases.items():
        path.write_bytes(text.encode("latin-1"))
        llamac_command(*command, model, "--tools", path, stdin=b"").refuses_with(message)
    llamac_command(*command, model, "--tools", tmp_path / "none.json", stdin=b"").fails_with("none.json")
    path.write_text(json.dumps(TOOLS))
    llamac_command(*command, model, "--tools", path, "--tool-choice", "h", stdin=b"").refuses_with(
        "--tool-choice is 'h', expected one of auto, none, required, f, g"
    )
    llamac_command(*command, model, "--tool-choice", "f", stdin=b"").refuses_with("--tool-choice needs --tools")


def test_run_needs_chat_for_tools(llamac_command: Command, tools: Path) -> None:
    llamac_command("run", "-i", "x", "--tools", tools).refuses_with("--tools needs --chat")


# ---- run


def test_run_shows_content_and_calls(llamac_command: Command, tmp_path: Path, tools: Path) -> None:
    model = answering(tmp_path / "model.bin", f"<think>h</think>I{SHORT}")
    run = ("run", model, "--chat", "-i", "x")
    assert llamac_command(*run, "--tools", tools).out == "I\ncall f {}\n"
    assert SHORT in llamac_command(*run).out  # without tools, the text is what the model wrote
    several = llamac_command(*run, "--tools", tools, "--candidates", 2)
    assert several.out.count("I\ncall f {}\n") == 2


def test_run_hides_reasoning_in_a_pipe(llamac_command: Command, tmp_path: Path) -> None:
    model = answering(tmp_path / "model.bin", "<think>h</think>yes")
    run = ("run", model, "--chat", "-i", "x")
    for several in ((), ("--candidates", 1, "--beams", 2)):
        assert llamac_command(*run, *several).out == "yes\n"
        assert llamac_command(*run, *several, "--reasoning", "hide").out == "yes\n"
        assert llamac_command(*run, *several, "--reasoning", "show").out == "h\n\nyes\n"
    cut = llamac_command(*run, "-n", 8)
    assert cut.out == "\n"
    assert "llamac: note: the answer has only reasoning: --reasoning show prints it\n" in cut.err
    assert llamac_command(*run, "-n", 8, "-q").err == ""
    llamac_command("run", model, "-i", "x", "--reasoning", "show").refuses_with("--reasoning needs --chat")


def test_run_shows_reasoning_on_a_terminal(
    llamac_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = answering(tmp_path / "model.bin", "<think>h</think>yes")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert llamac_command("run", model, "--chat", "-i", "x").out == "h\n\nyes\n"


def test_a_call_is_shown_in_a_line() -> None:
    text = '{\n  "a": "b  \\"\\n c",\n\t"d":  [1,\n 2]\n}'
    expected = '{ "a": "b  \\"\\n c", "d": [1, 2] }'
    assert OneLine().push(text) == expected
    line = OneLine()
    assert "".join(map(line.push, text)) == expected


def test_run_says_what_is_wrong_with_a_call(llamac_command: Command, tmp_path: Path, tools: Path) -> None:
    model = answering(tmp_path / "model.bin", CALL)
    done = llamac_command("run", model, "--chat", "-i", "x", "--tools", tools, "-n", 44)
    assert done.out == 'call f {"a": \n'
    assert "llamac: note: the call of f cannot be used: the call is incomplete: the text ends inside it" in done.err


def test_run_forces_a_call(llamac_command: Command, tmp_path: Path, tools: Path) -> None:
    made = checkpoint(llama_config())
    made.chat_template = EMPTY
    model = write_model(tmp_path / "model.bin", made)
    done = llamac_command("run", model, "--chat", "-i", "x", "--tools", tools, "--tool-choice", "g", "-n", 90, "-s", 1)
    name, _, arguments = done.out.removeprefix("call ").partition(" ")
    assert name == "g"
    assert isinstance(json.loads(arguments)["a"], int)


# ---- chat


def test_results_continue_a_conversation_in_a_pipe(llamac_command: Command, tmp_path: Path, tools: Path) -> None:
    model, saved = answering(tmp_path / "model.bin", TWO), tmp_path / "saved.json"
    typed = lines("x", "/result one", "/result", f"/save {saved}", "y", f"/save {saved}")
    done = llamac_command("chat", model, "--tools", tools, stdin=typed)
    assert done.out == "call f {}\ncall g {}\n" * 3
    document = json.loads(saved.read_text())
    assert document["tools"] == TOOLS
    messages = document["messages"]
    assert [message["role"] for message in messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]
    ids = [call["id"] for call in messages[1]["tool_calls"]]
    assert [message["tool_call_id"] for message in messages[2:4]] == ids
    assert [message["content"] for message in messages[2:4]] == ["one", "error: there is no result"]
    again = llamac_command("chat", model, "--load", saved, stdin=lines("/result x"))
    again.refuses_with("the last answer has no calls")  # another process requested them
    assert llamac_command("chat", model, "--load", saved, stdin=b"z").out == "call f {}\ncall g {}\n"


@pytest.mark.parametrize(
    "calls", [5, {}, [1], [{}], [{"function": {}}], [{"id": "a", "function": {"name": "f", "arguments": {}}}]]
)
def test_saved_calls_are_checked(llamac_command: Command, tmp_path: Path, calls: object) -> None:
    model, path = answering(tmp_path / "model.bin", "yes"), tmp_path / "saved.json"
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    path.write_text(json.dumps({"format": "llamac-chat", "messages": [message]}))
    llamac_command("chat", model, "--load", path, stdin=b"").fails_with("saved.json: messages[0] is not")


def test_a_person_types_results_or_skips_them(tmp_path: Path, tools: Path, people: list[Person]) -> None:
    model = answering(tmp_path / "model.bin", CALL)
    people.append(person := Person(model, "--plain", "--tools", tools))
    person.wait_for(person.prompt)
    person.type("x\n")
    person.wait_for('call f {"a": 1}\r\n')
    person.wait_for("type the result of each call")
    person.wait_for("f> ")
    person.type("rain\n")
    person.wait_for('call f {"a": 1}\r\n')  # the answer from the result, which is the same
    person.wait_for("f> ")
    person.type("\n")
    person.wait_for("no results: the conversation continues")
    person.wait_for("> ")
    person.type("y\n")
    person.wait_for("f> ")
    person.type("\x03")
    person.wait_for("no results")
    assert person.leave() == 0


def test_a_chat_can_be_guided(llamac_command: Command, tmp_path: Path, tools: Path) -> None:
    made = checkpoint(llama_config())
    made.chat_template = EMPTY
    model = write_model(tmp_path / "model.bin", made)
    done = llamac_command("chat", model, "--choice", "yes", "--choice", "no", "-s", 1, stdin=lines("x", "y", "/set"))
    assert set(done.out.splitlines()) <= {"yes", "no"}
    assert len(done.out.splitlines()) == 2
    assert "guide llamac.Choice" in done.err
    off = llamac_command("chat", model, "--regex", "[ab]{3}", "-n", 3, stdin=lines("/set guide none", "/set"))
    assert "guide" not in off.err
    llamac_command("chat", model, stdin=lines("/set guide x")).refuses_with("a guide is an option of the command")
