"""A flat file that changes on disk while it is open gives errors or wrong numbers, never a crash."""

from __future__ import annotations

import hashlib
import shutil
import textwrap
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import llamac
from builders import checkpoint, llama_config, write_model
from llamac.format.flatfile import FlatFile
from openmp import up_to
from processes import output_of

# Opens a model and computes; then change(file, model) writes to the file, and the program computes again.
CHANGED = """
    import random, sys, llamac
    from llamac.format import flatfile
    path, threads = sys.argv[1], int(sys.argv[2])
    def logits(model):
        with model.session(threads=threads) as session:
            return session.eval(list(range(100)), logits="all").tobytes()
    model = llamac.load(path)
    data_start = model.file.sections["data"].offset
    before = logits(model)
    old = model.session(threads=threads)
    old.eval([1, 2, 3])
    with open(path, "r+b") as file:
        change(file, model)
    print(logits(model) == before)
    old.step(5)
    try:
        print(len(model.generate([1, 2], max_tokens=5).tokens))
    except llamac.ModelError as error:
        print("ModelError:", error)
"""


@pytest.fixture
def copied(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(tiny_llama, tmp_path / "model.bin"))


def run_with_change(path: Path, change: str) -> list[str]:
    """Run CHANGED. Returns whether the logits are equal after the change, and the result of a generation."""
    return output_of(textwrap.dedent(change) + textwrap.dedent(CHANGED), path, up_to(2)).splitlines()


@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x41])
def test_a_changed_structure_has_no_effect_on_an_open_model(copied: Path, byte: int) -> None:
    change = f"""
    def change(file, model):
        file.write(bytes([{byte}]) * data_start)
    """
    same, error = run_with_change(copied, change)
    assert same == "True"
    assert "section tokenizer: its SHA-256 does not match" in error


@pytest.mark.parametrize(
    ("record", "field", "value"),
    [
        ("config", "head_dim", 4096),
        ("config", "n_kv_heads", 4096),
        ("config", "vocab_size", 1 << 24),
        ("config", "context", 1 << 24),
        ("config", "rope_dim", 4096),
        ("layers", "rope", 3),
        ("layers", "window", 1 << 24),
        ("layers", "ffn", 3),
        ("layers", "n_experts_used", 4096),
        ("tensors", "offset", 1 << 50),
    ],
)
def test_a_changed_field_has_no_effect_on_an_open_model(copied: Path, record: str, field: str, value: int) -> None:
    change = f"""
    def change(file, model):
        (at,) = [f.offset for f in flatfile.FIELDS["{record.rstrip("s")}"] if f.name == "{field}"]
        file.seek(model.file.sections["{record}"].offset + at)
        file.write(({value}).to_bytes({8 if field == "offset" else 4}, "little"))
    """
    assert run_with_change(copied, change) == ["True", "5"]


def test_changed_weights_change_logits_and_do_not_crash(copied: Path) -> None:
    change = """
    def change(file, model):
        file.seek(data_start)
        file.write(random.Random(1).randbytes(len(model.file.buffer) - data_start))
    """
    assert run_with_change(copied, change)[0] == "False"


def test_records_are_read_only_once(copied: Path) -> None:
    with closing(FlatFile(copied)) as file:
        before = (file.config, file.layers, file.tensors, file.tensor("output_norm.weight").tobytes())
        with open(copied, "r+b") as other:
            other.write(bytes(file.sections["metadata"].offset))
        assert (file.config, file.layers, file.tensors, file.tensor("output_norm.weight").tobytes()) == before


def test_a_changed_text_section_is_an_error(copied: Path) -> None:
    with closing(FlatFile(copied)) as file:
        section = file.sections["tokenizer"]
        with open(copied, "r+b") as other:
            other.seek(section.offset)
            other.write(b"x")
        with pytest.raises(llamac.ModelError, match=r"section tokenizer: .* damaged"):
            file.section("tokenizer")


# ---- truncation


def test_every_use_of_a_truncated_file_is_an_error(copied: Path) -> None:
    program = """
        import os, sys, llamac
        model = llamac.load(sys.argv[1])
        session = model.session()
        session.eval([1, 2, 3])
        size = os.path.getsize(sys.argv[1])
        os.truncate(sys.argv[1], 4096)
        calls = {
            "eval": lambda: session.eval([4]), "step": lambda: session.step(4), "generate": lambda: model.generate([1]),
            "logits": lambda: model.logits([1]), "tensor": lambda: model.file.tensor("output_norm.weight"),
            "verify": lambda: list(model.file.verify_data()), "text": lambda: model.file.text("tokenizer"),
        }
        for name, call in calls.items():
            try:
                call()
            except llamac.ModelError as error:
                print(name, f"4096 of its {size} bytes are left" in str(error))
        model.close()
    """
    names = ("eval", "step", "generate", "logits", "tensor", "verify", "text")
    assert output_of(program, copied).splitlines() == [f"{name} True" for name in names]


# ---- closing while another thread reads


def test_closing_a_model_during_verify_data_raises_busy_error(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llamac.load(copied)
    session = model.session()
    errors: list[BaseException] = []

    def close() -> None:
        try:
            model.close()
        except BaseException as error:
            errors.append(error)

    sha256 = hashlib.sha256

    class ClosingHash:
        """SHA-256 during whose first update another thread closes the model."""

        def __init__(self) -> None:
            self._digest = sha256()

        def update(self, data: Any) -> None:
            if not errors:
                thread = threading.Thread(target=close)
                thread.start()
                thread.join()
            self._digest.update(data)

        def digest(self) -> bytes:
            return self._digest.digest()

    with monkeypatch.context() as patch:
        patch.setattr("llamac.format.flatfile.hashlib.sha256", ClosingHash)
        found = [problem for _, problem in model.file.verify_data()]
    assert [type(error) for error in errors] == [llamac.BusyError]
    assert "close the file after verify_data has ended" in str(errors[0])
    assert not any(found)
    session.eval([1])  # nothing was closed
    model.close()
    assert model.closed
    assert session.closed


def test_verify_data_ends_if_the_model_is_closed_between_tensors(copied: Path) -> None:
    model = llamac.load(copied)
    verifying = model.file.verify_data()
    next(verifying)
    model.close()
    with pytest.raises(llamac.ClosedError):
        next(verifying)


def test_closing_a_file_with_a_memoryview_raises_busy_error(tmp_path: Path) -> None:
    file = FlatFile(write_model(tmp_path / "model.bin", checkpoint(llama_config())))
    with memoryview(file.buffer), pytest.raises(llamac.BusyError, match="memoryview"):
        file.close()
    file.close()
