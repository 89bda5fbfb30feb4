"""Arguments of wrong types or out of range are refused by name, in every function that takes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llamac
from commands import Command
from llamac.arguments import adapters, file_path
from llamac.errors import ArgumentError, ArgumentTypeError, ContextFullError
from llamac.export.convert import export
from llamac.sources.names import resolve
from llamac.text.tokenizer import Tokenizer

CALLS: dict[str, tuple[str, Callable[[Any, Any], object]]] = {
    "tokenize": ("text must be a str, not int", lambda model, _: model.tokenize(5)),
    "encode": ("text must be a str, not bytes", lambda model, _: model.tokenizer.encode(b"a")),
    "decode": ("ids must be token ids, not int", lambda model, _: model.tokenizer.decode(5)),
    "decode a str": ("a token id must be an integer, not str", lambda model, _: model.tokenizer.decode("ab")),
    "id_of": ("token_text must be a str, not int", lambda model, _: model.tokenizer.id_of(5)),
    "token_bytes": ("a token id must be an integer, not str", lambda model, _: model.tokenizer.token_bytes("a")),
    "from_file": ("path must be a str or an os.PathLike, not int", lambda *_: Tokenizer.from_file(5)),  # type: ignore[arg-type]
    "from_json": ("special must be SpecialTokens, not dict", lambda *_: Tokenizer.from_json("{}", {})),  # type: ignore[arg-type]
    "load": ("tokenizer must be a str or an os.PathLike, not int", lambda *_: llamac.load("stories", tokenizer=5)),  # type: ignore[arg-type]
    "load dtype": ("dtype must be a str, not int", lambda *_: llamac.load("stories", dtype=8)),  # type: ignore[arg-type]
    "step": ("token must be an integer, not str", lambda model, _: model.session().step("a")),
    "prefill": ("token ids must be 32-bit integers", lambda model, _: model.session().prefill(["a"])),
    "result": ("timeout must be a number, not str", lambda model, _: result(model, "x")),
    "prefix_dir": ("prefix_dir must be a str or an os.PathLike", lambda model, _: llamac.Engine(model, prefix_dir=5)),  # type: ignore[arg-type]
    "updated": ("overrides must be a dict, not int", lambda *_: llamac.SamplingParams().updated(5)),  # type: ignore[arg-type]
    "template_options": (
        "a name of template_options must be a str, not int",
        lambda model, _: model.chat([{"role": "user", "content": "a"}], template_options={5: 1}),
    ),
    "export threads": ("threads must be an integer, not str", lambda *_: exported(threads="2")),
    "export tokenizer": ("tokenizer must be a str or an os.PathLike, not bool", lambda *_: exported(tokenizer=True)),
    "export map": ("dtype_map is 'a=q8', expected 'auto' or pairs", lambda *_: exported(dtype="q4", dtype_map="a=q8")),
    "export maps": ("dtype_map is .*, expected 'auto' or pairs", lambda *_: exported(dtype="q4", dtype_map=[("a", 8)])),
    "export name": ("name must be a string, not int", lambda *_: exported(name=5)),
    "export dtype": ("dtype must be a string, not list", lambda *_: exported(dtype=["q8"])),
    "export source": ("source must be a str or an os.PathLike, not None", lambda *_: export(None, "out.bin")),  # type: ignore[arg-type]
    "export out": ("out must be a str or an os.PathLike, not int", lambda *_: export("stories", 5)),  # type: ignore[arg-type]
    "calibrate": ("calibrate must be a str or an os.PathLike, not int", lambda *_: exported(dtype="q4", calibrate=5)),
}


def result(model: llamac.Model, timeout: Any) -> object:
    with llamac.Engine(model) as engine:
        return engine.submit("he", max_tokens=1).result(timeout)


def exported(**arguments: Any) -> object:
    return export("stories", "never.bin", **arguments)


@pytest.mark.parametrize("call", CALLS)
def test_arguments_of_wrong_types_are_refused_by_name(tiny_llama: Path, call: str) -> None:
    message, make = CALLS[call]
    with llamac.load(tiny_llama) as model, pytest.raises(ArgumentTypeError, match=message):
        make(model, None)
    assert not Path("never.bin").exists()


def test_numbers_out_of_range_are_not_type_errors(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model, model.session() as session:
        with pytest.raises(ArgumentError, match="timeout is nan, expected a number of seconds"):
            result(model, float("nan"))
        with pytest.raises(ArgumentError, match=r"token is 1099511627776, which is out of range") as error:
            session.step(2**40)
        assert not isinstance(error.value, TypeError)
        with pytest.raises(ArgumentError, match="no tokens to eval"):
            session.prefill([])
        session.prefill([1, 2])
        session.step(int(np.int64(3)))
        assert session.length() == 3


def test_the_context_is_checked_before_memory_is_allocated(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with llamac.load(tiny_llama) as model, model.session(context=10) as session:
        session.eval([1, 2, 3])
        monkeypatch.setattr(np, "empty", None)
        for use in (
            lambda: session.eval([1] * 8, logits="all"),
            lambda: session.observe([1] * 8, ["q"]),
            lambda: session.prefill([1] * 8),
        ):
            with pytest.raises(
                ContextFullError, match="8 tokens do not fit: 3 of the context's 10 positions are taken"
            ):
                use()
        with pytest.raises(ContextFullError, match="601 tokens do not fit: 0 of the context's 600"):
            model.logits([1] * 601)
        assert session.length() == 3


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("export", "", "out.bin"), "path"),
        (("export", "stories", ""), "out"),
        (("export", "stories", "out.bin", "--tokenizer", ""), "tokenizer"),
        (("export", "stories", "out.bin", "--dtype", "q4", "--calibrate", ""), "calibrate"),
        (("run", "-z", "", "-i", "a"), "tokenizer"),
        (("inspect", ""), "path"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_empty_file_names_are_refused(llamac_command: Command, arguments: tuple[str, ...], name: str) -> None:
    llamac_command(*arguments).refuses_with(f"{name} is '', which is not a file name")


class Named:
    """An os.PathLike that is not a Path and whose str() is not its path."""

    def __init__(self, path: object) -> None:
        self.path = str(path)

    def __fspath__(self) -> str:
        return self.path


def test_any_path_like_object_is_accepted_as_a_path(
    checkpoint_folder: Path, cache_folder: Path, tmp_path: Path
) -> None:
    tokenizer, out = checkpoint_folder / "tokenizer.json", tmp_path / "out.bin"
    export(Named(checkpoint_folder), Named(out), tokenizer=Named(tokenizer), probe_source=None)
    for source in (checkpoint_folder, out):
        with llamac.load(Named(source), tokenizer=Named(tokenizer), cache_dir=Named(tmp_path / "c")) as model:
            assert model.has_tokenizer
    assert resolve(Named("stories")).path == llamac.models.path("stories")
    assert adapters([(Named("a"), 0.5), Named("b")]) == [(Path("a"), 0.5), (Path("b"), 1.0)]
    assert adapters(Named("c")) == [(Path("c"), 1.0)]


@pytest.mark.parametrize("value", [b"model.bin", 5, None, Named])
def test_objects_that_are_not_paths_are_refused_by_name(value: object) -> None:
    with pytest.raises(ArgumentTypeError, match=r"out must be a str or an os\.PathLike, not "):
        file_path(value, "out")


def test_a_built_in_model_can_be_exported(llamac_command: Command, tmp_path: Path) -> None:
    done = llamac_command("export", "stories-gpt2", tmp_path / "out.bin", "--probe-source", "llamac")
    assert (done.code, done.err) == (0, "")
    with llamac.load("stories-gpt2") as source, llamac.load(tmp_path / "out.bin") as model:
        assert model.config == source.config
