"""Every example of the documentation runs."""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_samples import PREFIX, small_adapter

import llamac
from builders import checkpoint, llama_config, write_model
from commands import Command
from documents import DOCUMENTS, ROOT, blocks, documented_metadata, text_of
from llamac import models

TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{{ '\\n' }}{% endfor %}"


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model with a chat template, as a GGUF file."""
    folder = tmp_path_factory.mktemp("chat")
    llamac.export.export("stories", folder / "model", to="hf")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    llamac.export.export(folder / "model", folder / "model.gguf", to="gguf")
    return folder / "model.gguf"


def write_example_files(path: Path, folder: Path, chat_model: Path | None = None) -> None:
    """Write the files that a document's examples read: model.bin, the built-in model, and for some pages others."""
    shutil.copy(models.path(), folder / "model.bin")
    if chat_model is not None and "model.gguf" in path.read_text("utf-8"):
        shutil.copy(chat_model, folder / "model.gguf")
    if path.name not in ("adapters.md", "coming-from.md"):
        return
    (folder / "path" / "to").mkdir(parents=True)
    llamac.export.export("stories", folder / "path" / "to" / "checkpoint", to="hf")
    numbers = np.random.default_rng(1)
    for name in ("style", "facts", "my-adapter"):
        factors = {
            f"{PREFIX}model.layers.0.mlp.down_proj.lora_{factor}.weight": numbers.standard_normal(shape, np.float32)
            for factor, shape in (("A", (2, 512)), ("B", (256, 2)))
        }
        small_adapter(folder / name, tensors=factors)


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if blocks(path)], ids=lambda path: path.name)
def test_examples_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chat_model: Path) -> None:
    monkeypatch.chdir(tmp_path)
    write_example_files(path, tmp_path, chat_model)
    run_examples(path)


def run_examples(path: Path) -> None:
    """Run a document's examples in order, in one namespace."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(path):
        if block.reason is None:
            # the empty lines give tracebacks the document's line numbers
            exec(compile("\n" * block.line + block.code, str(path), "exec", dont_inherit=True), namespace)


def test_documented_adapter_commands_apply_the_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llamac_command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    write_example_files(ROOT / "docs" / "adapters.md", tmp_path)
    greedy = ("-t", "0", "-n", "20")
    outputs = {llamac_command("run", "model.bin", "-i", "Once", *greedy).out}
    commands = re.findall(r"^    llamac (.*?)(?:   .*)?$", text_of("adapters.md"), re.MULTILINE)
    for command in commands:
        is_run = command.startswith("run")
        done = llamac_command(*shlex.split(command), *(greedy if is_run else ()))
        assert done.code == 0, done.err
        outputs.add(done.out if is_run else "")
    assert len(outputs) == 1 + len(commands)  # each adapter changes the text
    with llamac.load("merged.bin") as model:
        assert model.metadata["adapters"] == [{"name": "my-adapter", "strength": 1.0}]
        assert set(model.metadata) <= documented_metadata()


def test_the_examples_in_python_md_run_on_a_model_without_bos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = checkpoint(llama_config())
    assert made.tokenizer is not None
    data, special, spm = made.tokenizer
    made.tokenizer = (data, replace(special, bos_id=None, add_bos=False), spm)
    path = write_model(tmp_path / "no-bos.bin", made)
    load = llamac.load
    monkeypatch.setattr(llamac, "load", lambda name, **options: load(name if name == "helper" else path, **options))
    monkeypatch.chdir(tmp_path)
    write_example_files(ROOT / "docs" / "python.md", tmp_path)
    run_examples(ROOT / "docs" / "python.md")


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if blocks(path)], ids=lambda path: path.name)
def test_examples_that_are_not_run_are_python(path: Path) -> None:
    for block in blocks(path):
        if block.reason is not None:
            compile("\n" * block.line + block.code, str(path), "exec", dont_inherit=True)


def test_the_documented_pipe_is_a_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llamac_command: Command, chat_model: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    write_example_files(ROOT / "docs" / "chat.md", tmp_path, chat_model)
    (pipe,) = re.findall(r"^    printf '(.*)' \| llamac (.*)$", text_of("chat.md"), re.MULTILINE)
    text = pipe[0].replace("\\n", "\n")
    done = llamac_command(*shlex.split(pipe[1]), stdin=text.encode())
    assert done.code == 0, done.err
    assert done.out.endswith("\n")
    assert len(done.out.split()) > 20  # two answers
