"""`llamac trace`: the files that it writes, what it reads, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import llamac
from builders import byte_ids, script_checkpoint, write_model
from commands import Command
from golden.tiny_checkpoints import write_safetensors
from llamac.export.hf.safetensors_file import header_bytes, read_safetensors

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that continues a prompt of n tokens with the alphabet; with a chat template."""
    made = script_checkpoint(byte_ids(ALPHABET))
    made.chat_template = "{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}"
    return write_model(tmp_path / "model.bin", made, generation={"temperature": 0})


def tensors(path: Path) -> dict[str, NDArray[Any]]:
    """The tensors of a dump."""
    return {
        name: np.fromfile(path, {"f32": "<f4", "i32": "<i4"}[tensor.dtype], offset=tensor.offset)[
            : int(np.prod(tensor.shape))
        ].reshape(tensor.shape)
        for name, tensor in read_safetensors(path).items()
    }


def test_a_dump_has_every_stage(tiny_llama: Path, tmp_path: Path, llamac_command: Command) -> None:
    out = tmp_path / "trace.safetensors"
    result = llamac_command("trace", tiny_llama, "-i", "a text", "--dump", out, "--lens", "0")
    assert (result.code, result.out) == (0, "")
    found = tensors(out)
    with llamac.load(tiny_llama) as opened:
        ids = opened.tokenize("a text")
        assert found.pop("ids").tolist() == ids
        with opened.session(context=len(ids)) as session:
            expected = session.observe(ids, llamac.STAGES)
    assert f"{out}: the stages of {len(ids)} tokens" in result.err
    present = {key: rows for key, rows in expected.items() if rows.size}
    assert found.keys() == {f"{name}.{layer}" for name, layer in present}
    for (name, layer), rows in present.items():
        assert found[f"{name}.{layer}"].tobytes() == rows.tobytes()


def test_a_dump_is_an_input(model: Path, tmp_path: Path, llamac_command: Command) -> None:
    first, second, third = (tmp_path / f"{i}.safetensors" for i in range(3))
    only = ("--stage", "logits", "--stage", "block", "-q")
    assert llamac_command("trace", model, "-i", "xyz", "-n", "3", "--dump", first, *only).code == 0
    assert llamac_command("trace", model, "--inputs", first, "--dump", second, *only).code == 0
    assert first.read_bytes() == second.read_bytes()
    found = tensors(first)
    assert set(found) == {"ids", "logits.0", "block.0", "block.1"}
    assert found["ids"].tolist()[-3:] == byte_ids(ALPHABET)[4:7]  # BOS and "xyz", with a space, come before
    np.save(tmp_path / "ids.npy", found["ids"].astype(np.int64)[None])
    assert llamac_command("trace", model, "--inputs", tmp_path / "ids.npy", "--dump", third, *only).code == 0
    assert first.read_bytes() == third.read_bytes()


def test_embeddings_are_inputs(tiny_llama: Path, tmp_path: Path, llamac_command: Command) -> None:
    known, unknown, again = (tmp_path / f"{name}.safetensors" for name in ("known", "unknown", "again"))
    stages = ("--stage", "embedding", "--stage", "block", "--stage", "logits", "-q")
    assert llamac_command("trace", tiny_llama, "-i", "a text", "--dump", known, *stages).code == 0
    expected = tensors(known)
    np.save(tmp_path / "embeddings.npy", expected["embedding.0"])
    page = tmp_path / "trace.html"
    command = ("trace", tiny_llama, "--inputs", tmp_path / "embeddings.npy", "--dump", unknown, "-o", page, *stages)
    assert llamac_command(*command).code == 0
    found = tensors(unknown)
    assert set(found.pop("ids")) == {-1}
    assert {name: rows.tobytes() for name, rows in found.items()} == {
        name: rows.tobytes() for name, rows in expected.items() if name != "ids"
    }
    assert llamac_command("trace", tiny_llama, "--inputs", unknown, "--dump", again, *stages).code == 0
    assert again.read_bytes() == unknown.read_bytes()
    # also with ids: they are the text, and the embeddings are the input
    both = (
        header_bytes([("ids", "I32", (2,)), ("embeddings", "F32", (2, expected["embedding.0"].shape[1]))], {})
        + np.array([3, 4], "<i4").tobytes()
        + expected["embedding.0"][:2].tobytes()
    )
    (tmp_path / "both.safetensors").write_bytes(both)
    inputs = ("--inputs", tmp_path / "both.safetensors")
    assert llamac_command("trace", tiny_llama, *inputs, "--dump", again, "--force", *stages).code == 0
    assert tensors(again)["ids"].tolist() == [3, 4]
    assert (tensors(again)["embedding.0"] == expected["embedding.0"][:2]).all()


def test_a_page_and_a_dump_are_written_together(model: Path, tmp_path: Path, llamac_command: Command) -> None:
    page, dump = tmp_path / "trace.html", tmp_path / "trace.safetensors"
    result = llamac_command("trace", model, "-i", "xyz", "-o", page, "--dump", dump, "--stage", "block")
    assert (result.code, result.out) == (0, "")
    lines = [f"{page}: a page about 5 tokens", f"{dump}: the stages of 5 tokens"]
    assert [line for line in result.err.splitlines() if "tracing" not in line] == lines
    assert page.read_text("utf-8").startswith("<!doctype html>")
    llamac_command("trace", model, "-i", "x", "-o", page).fails_with(f"{page} exists", "--force")


def test_run_writes_the_page_of_its_text(model: Path, tmp_path: Path, llamac_command: Command) -> None:
    by_run, by_trace = tmp_path / "run.html", tmp_path / "trace.html"
    chat = ("--chat", "-i", "hi")
    plain = llamac_command("run", model, *chat, "-n", 4, "-q")
    found = llamac_command("run", model, *chat, "-n", 4, "-q", "--trace", by_run)
    assert (found.code, found.out) == (0, plain.out)
    assert llamac_command("trace", model, *chat, "-n", 4, "-q", "-o", by_trace).code == 0
    pages = [page.read_text("utf-8").split('id="data-costs"')[0] for page in (by_run, by_trace)]
    one, other = (re.sub(r'"seconds":[^}]*', "", page) for page in pages)
    assert one == other
    llamac_command("run", model, "-i", "x", "--trace", by_run).fails_with(f"{by_run} exists: choose another name\n")
    llamac_command("run", model, "-i", "x", "-n", 2, "--candidates", 2, "--trace", tmp_path / "no").refuses_with(
        "--trace is about one text"
    )


def test_a_continuation_is_greedy_and_ends_with_the_context(tmp_path: Path, llamac_command: Command) -> None:
    made = script_checkpoint(byte_ids("aaaaaaaaaaaa"), second=byte_ids("b")[0])
    path, out = write_model(tmp_path / "model.bin", made, generation={"repetition_penalty": 1e6}), tmp_path / "out"
    command = ("trace", path, "-i", "x", "--dump", out, "--stage", "logits", "--force")
    for options, count in (((), 4), (("--context", 5), 2)):  # the context has room for two tokens after the text
        assert llamac_command(*command, "-n", 4, *options).code == 0
        assert tensors(out)["ids"].tolist()[3:] == byte_ids("a" * count)


def test_run_shows_the_tokens_that_fit(model: Path, tiny_llama: Path, tmp_path: Path, llamac_command: Command) -> None:
    page = tmp_path / "trace.html"
    options = ("-i", "x", "--context", 8, "-q", "--trace")
    result = llamac_command("run", model, *options, page)  # the last token is drawn when the context is full
    assert (result.code, result.err) == (
        0,
        f"llamac: note: {page} shows the first 8 of 9 tokens: the context holds no more\n",
    )
    assert "<title>tiny: 8 tokens</title>" in page.read_text("utf-8")
    more = ("--context-overflow", "shift", "--ignore-eos", "-n", 20)
    shifted = llamac_command("run", tiny_llama, *options, tmp_path / "shifted.html", *more)
    assert shifted.code == 0
    assert "shows the first 8 of 23 tokens" in shifted.err


def test_a_message_goes_through_the_chat_template(model: Path, tmp_path: Path, llamac_command: Command) -> None:
    out = tmp_path / "out"
    chat = ("--chat", "--system", "S", "-i", "hi")
    assert llamac_command("trace", model, *chat, "--dump", out, "--stage", "logits").code == 0
    with llamac.load(model) as opened:
        assert opened.detokenize(tensors(out)["ids"].tolist()) == "system: Suser: hi"


def test_files_that_exist_are_kept(model: Path, tmp_path: Path, llamac_command: Command) -> None:
    out = tmp_path / "out"
    out.write_text("precious")
    command = ("trace", model, "-i", "x", "--dump", out)
    llamac_command(*command).fails_with(f"{out} exists: choose another name, or allow overwriting (--force)")
    assert out.read_text() == "precious"
    assert llamac_command(*command, "--force", "--stage", "q").code == 0
    assert set(tensors(out)) == {"ids", "q.0", "q.1"}
    missing = tmp_path / "no" / "out"
    llamac_command("trace", model, "-i", "x", "--dump", missing).fails_with(
        f"the folder {missing.parent} does not exist"
    )


def test_outputs_of_a_run_with_the_same_name_are_refused(model: Path, tmp_path: Path, llamac_command: Command) -> None:
    (tmp_path / "no").mkdir()
    out, same = tmp_path / "out", tmp_path / "no" / ".." / "out"
    for one, other in (("--trace", "--receipt"), ("--trace", "--prompt-cache"), ("--receipt", "--prompt-cache")):
        done = llamac_command("run", model, "-i", "x", one, out, other, same)
        done.refuses_with(f"{one} and {other} name the same file")
    assert not out.exists()


def test_wrong_usage_is_refused(model: Path, tiny_llama: Path, tmp_path: Path, llamac_command: Command) -> None:
    dump = ("--dump", tmp_path / "out")
    llamac_command("trace", model, "-i", "x").refuses_with("nothing to write: name a page with -o", "--dump")
    llamac_command("trace", model, "-i", "x", "-o", "a", "--dump", "a").refuses_with("name the same file")
    same = (tmp_path / "same", tmp_path / "no" / ".." / "same")
    (tmp_path / "no").mkdir()
    llamac_command("trace", model, "-i", "x", "-o", same[0], "--dump", same[1]).refuses_with("name the same file")
    llamac_command("trace", model, "-i", "x", "-o", "a", "--stage", "q").refuses_with("--stage needs --dump")
    llamac_command("trace", model, *dump).refuses_with("there is no text: give it with -i")
    llamac_command("trace", model, "-i", "x", "--inputs", "y", *dump).refuses_with("--inputs is the whole text")
    llamac_command("trace", model, "-i", "x", "--system", "y", *dump).refuses_with("--system needs --chat")
    llamac_command("trace", model, "-i", "x", "-f", "y", *dump).refuses_with("not allowed with argument -i/--prompt")
    llamac_command("trace", tiny_llama, "-i", "x", "--chat", *dump).refuses_with("the model has no chat template")
    llamac_command("trace", model, "-i", "x", "-n", "-1", *dump).refuses_with("--max-tokens is -1")
    llamac_command("trace", model, "-i", "x", "--lens", "-1", *dump).refuses_with("--lens is -1")
    llamac_command("trace", model, "-i", "x", "--stage", "attention", *dump).refuses_with("no stage 'attention'")
    llamac_command("trace", model, "-i", "x", "--stage", "ffn_router", *dump).refuses_with(
        "the model has no stage 'ffn_router'"
    )
    llamac_command("trace", model, "-i", "x" * 99, *dump).fails_with("tokens, but the context holds 64: shorten it")
    assert not (tmp_path / "out").exists()


def test_inputs_that_are_no_ids_are_refused(model: Path, tmp_path: Path, llamac_command: Command) -> None:
    def refused(path: Path, part: str) -> None:
        llamac_command("trace", model, "--inputs", path, "--dump", tmp_path / "out").refuses_with(part)

    path = tmp_path / "inputs.npy"
    for array, part in (
        (np.zeros((3, 9), np.float32), "inputs has shape (3, 9), expected (3, 64)"),
        (np.full((3, 64), np.nan, np.float32), "embeddings that are not finite"),
        (np.zeros(64, np.float32), "expected floats of shape (n, dim)"),
        (np.zeros((0, 64), np.float32), "there is nothing to trace"),
        (np.zeros((3, 4), np.int32), "expected integers of shape (n)"),
        (np.array([1, -1]), "holds numbers from -1 to 1, expected token ids"),
        (np.array([], np.int32), "there is nothing to trace"),
        (np.full((3, 64), 1e300), "embeddings that are not finite"),
        (np.array([1, 1 << 20]), "the token id 1048576, expected 0 to"),
        (np.array(["x"], object), "not a .npy file that NumPy can read"),
    ):
        np.save(path, array)
        refused(path, part)
    np.save(path, np.array([], np.int32))
    more = ("-n", "2", "--dump", tmp_path / "out")
    llamac_command("trace", model, "--inputs", path, *more).refuses_with("there is nothing to trace")
    for header in ("{" * 9, "{'descr': ('<i4',), 'fortran_order': False, 'shape': (1,)}"):  # damaged files
        path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode())
        refused(path, "not a .npy file that NumPy can read")
    other = tmp_path / "other.safetensors"
    only = ("--stage", "logits")
    assert llamac_command("trace", model, "-i", "x", "--dump", other, *only).code == 0
    other.write_bytes(other.read_bytes().replace(b'"ids"', b'"idx"'))
    refused(other, "has none of the tensors ids, input_ids, embeddings, inputs_embeds, embedding.0")
    for name, floats, part in (
        ("ids", np.zeros(3, np.float32), "the ids have the dtype f32, expected i32"),
        ("embeddings", np.zeros(64, np.float32), "the embeddings have the dtype f32 and the shape (64,)"),
    ):
        write_safetensors(other, {name: floats})
        refused(other, part)
    np.save(path, np.zeros((3, 64), np.float32))
    llamac_command("trace", model, "--inputs", path, *more).refuses_with("--max-tokens continues a text")
    llamac_command("trace", model, "--inputs", tmp_path / "none", "--dump", tmp_path / "out").fails_with("No such file")
