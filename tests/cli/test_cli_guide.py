"""`llamac run --json-schema`, `--regex`, `--choice`, `--grammar`; `response_format` in `llamac batch`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from commands import Command

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
GBNF = 'root ::= "<" [a-c]+ ">"\n'
RUN = ("run", "-i", "Once", "--no-echo", "-q", "-n", "30", "-s", "1")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "grammar.gbnf").write_text(GBNF)
    (tmp_path / "wrong.json").write_text('{"items": {"not": {}}}')
    (tmp_path / "latin1.lark").write_bytes(b'start: "\xe9"')
    return tmp_path


def test_every_option_guides_the_text(llamac_command: Command, files: Path) -> None:
    for schema in (files / "schema.json", " " + json.dumps(SCHEMA)):
        done = llamac_command(*RUN, "--json-schema", schema)
        assert list(json.loads(done.out)) == ["n"]
    assert re.fullmatch(r"[ab]{5}\n", llamac_command(*RUN, "--regex", "[ab]{5}").out)
    assert llamac_command(*RUN, "--choice", "yes", "--choice", "no").out in ("yes\n", "no\n")
    assert re.fullmatch(r"<[a-c]+>\n", llamac_command(*RUN, "--grammar", files / "grammar.gbnf").out)


def test_wrong_guides_are_errors_that_name_the_file(llamac_command: Command, files: Path) -> None:
    done = llamac_command(*RUN, "--json-schema", files / "wrong.json")
    done.refuses_with(f"{files / 'wrong.json'}: the JSON schema cannot be used, at /items: 'not' is not supported")
    llamac_command(*RUN, "--json-schema", "{").refuses_with("the JSON schema is not JSON: Expecting property name")
    llamac_command(*RUN, "--grammar", files / "latin1.lark").refuses_with("latin1.lark is not UTF-8 text")
    llamac_command(*RUN, "--grammar", files / "nowhere.lark").fails_with("nowhere.lark: No such file")
    llamac_command(*RUN, "--grammar", files).fails_with("Is a directory")
    llamac_command(*RUN, "--regex", "[").refuses_with('the regular expression cannot be used: "[": unclosed')
    done = llamac_command(*RUN, "--regex", "a", "--choice", "a")
    assert done.code == 2
    assert "argument --choice: not allowed with argument --regex" in done.err


def test_without_the_library_the_error_has_the_command(
    llamac_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    llamac_command(*RUN, "--regex", "a").fails_with('pip install "llamac[guided]"')
    assert llamac_command(*RUN).code == 0


def test_batches_have_response_formats(llamac_command: Command, tmp_path: Path) -> None:
    def line(name: str, schema: object) -> str:
        described = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        body = {"prompt": "Once", "seed": 1, "max_tokens": 40, "response_format": described}
        return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}) + "\n"

    (tmp_path / "in.jsonl").write_text(line("right", SCHEMA) + line("wrong", {"not": {}}))
    assert llamac_command("batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl", "-m", "stories").code == 1
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    results = {entry["custom_id"]: entry for entry in map(json.loads, lines)}
    text = results["right"]["response"]["body"]["choices"][0]["text"]
    assert list(json.loads(text)) == ["n"]
    error = results["wrong"]["response"]["body"]["error"]
    assert (error["param"], error["code"]) == ("response_format", "invalid_value")
