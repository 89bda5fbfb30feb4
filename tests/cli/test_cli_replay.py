"""`llamac replay`, and the receipts that `run`, `batch` and `chat` write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from builders import byte_ids, script_checkpoint, write_model
from commands import Command

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that continues a prompt of n tokens with the alphabet; with a chat template."""
    made = script_checkpoint(byte_ids(ALPHABET))
    made.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return write_model(tmp_path / "model.bin", made, generation={"temperature": 0})


@pytest.fixture
def receipt(model: Path, tmp_path: Path, llamac_command: Command) -> Path:
    path = tmp_path / "receipt.json"
    assert llamac_command("run", model, "-i", "x", "-n", "5", "-q", "--receipt", path).code == 0
    return path


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    return path


def test_a_receipt_is_repeated(receipt: Path, model: Path, llamac_command: Command) -> None:
    for arguments in ((receipt,), (receipt, model), (receipt, model, "--isa", "scalar", "--threads", "2")):
        result = llamac_command("replay", *arguments)
        assert (result.code, result.err) == (0, "")
        assert result.out == "identical  5 tokens, the text and the reason for the end (length)\n"


def test_what_differs_is_named_and_the_exit_code_is_1(receipt: Path, llamac_command: Command) -> None:
    changed(receipt, lambda found: found["result"]["tokens"].__setitem__(3, 3))
    result = llamac_command("replay", receipt)
    assert result.code == 1
    assert "changed    the tokens differ from number 3 on" in result.out
    assert result.out.endswith("DIFFERENT  3 of 5 tokens were repeated\n")
    facts = json.loads(llamac_command("replay", receipt, "--json").out)
    assert (facts["identical"], facts["position"], len(facts["changes"])) == (False, 3, 1)


def test_a_text_that_differs_is_a_difference(receipt: Path, llamac_command: Command) -> None:
    changed(receipt, lambda found: found["result"].update(text="\x1b[2J"))
    result = llamac_command("replay", receipt)
    assert result.code == 1
    assert "\x1b" not in result.out
    assert result.out.endswith("DIFFERENT  5 of 5 tokens were repeated\n")


def test_receipts_come_from_standard_input(receipt: Path, llamac_command: Command) -> None:
    assert llamac_command("replay", "-", stdin=receipt.read_bytes()).code == 0


def test_a_damaged_receipt_is_a_usage_error(receipt: Path, llamac_command: Command) -> None:
    changed(receipt, lambda found: found.pop("prompt"))
    llamac_command("replay", receipt).refuses_with("receipt.json has no field prompt")


def test_a_receipt_with_adapters_needs_the_model(receipt: Path, llamac_command: Command) -> None:
    changed(receipt, lambda found: found["model"].update(adapters="0" * 64))
    llamac_command("replay", receipt).refuses_with("LoRA adapters")


def test_batch_adds_receipts_to_results(model: Path, tmp_path: Path, llamac_command: Command) -> None:
    body = {"prompt": "x", "max_tokens": 3}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    for out, options in (("with.jsonl", ["--receipts"]), ("without.jsonl", [])):
        assert llamac_command("batch", tmp_path / "in.jsonl", tmp_path / out, "-m", model, "-q", *options).code == 0
    body = json.loads((tmp_path / "with.jsonl").read_text())["response"]["body"]
    (tmp_path / "receipt.json").write_text(json.dumps(body["receipt"]))
    assert llamac_command("replay", tmp_path / "receipt.json").code == 0
    assert "receipt" not in json.loads((tmp_path / "without.jsonl").read_text())["response"]["body"]


@pytest.mark.parametrize("other", [["--kv-dtype", "f32"], ["--context", "20"]], ids=["kv dtype", "context"])
def test_batch_does_not_mix_results_of_different_settings(
    other: list[str], model: Path, tmp_path: Path, llamac_command: Command
) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 3}}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    command = ["batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl", "-m", model, "-q", "--kv-dtype", "f16"]
    assert llamac_command(*command).code == 0
    assert llamac_command(*command).code == 0
    llamac_command(*command, *other).refuses_with("was computed with another model or version")


def test_chat_writes_the_receipt_of_an_answer(model: Path, tmp_path: Path, llamac_command: Command) -> None:
    path = tmp_path / "receipt.json"
    assert llamac_command("chat", model, "-n", "3", stdin=f"xy\nz\n/receipt {path}\n".encode()).code == 0
    assert llamac_command("replay", path).code == 0
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    assert llamac_command("chat", model, "-n", "3", stdin=f"x\n/receipt {notes}\n".encode()).code == 2
    assert notes.read_text() == "mine"


@pytest.mark.parametrize("name", ["notes.txt", "model.bin", "missing/receipt.json", "."])
def test_run_replaces_only_receipts(name: str, model: Path, tmp_path: Path, llamac_command: Command) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    expected = {".": "is a directory", "missing/receipt.json": "missing does not exist"}
    result = llamac_command("run", tmp_path / "no.bin", "-i", "x", "--receipt", tmp_path / name)  # before it loads
    result.refuses_with(expected.get(name, f"{name} exists and is not a receipt: choose another name"))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_run_replaces_receipts_and_empty_files(model: Path, tmp_path: Path, llamac_command: Command) -> None:
    path = tmp_path / "receipt.json"
    path.touch()
    for count in (5, 3):
        assert llamac_command("run", model, "-i", "x", "-n", count, "-q", "--receipt", path).code == 0
        assert len(json.loads(path.read_text())["result"]["tokens"]) == count
    assert {found.name for found in tmp_path.iterdir()} == {"model.bin", "receipt.json"}
