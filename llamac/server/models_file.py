"""The models of a folder, and the file `models.toml` in it with their names and settings."""

from __future__ import annotations

import difflib
import os
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llamac import models
from llamac.arguments import DEFAULT_SEQUENCES, KV_DTYPES, NUMERICS, KVDtype, Numerics, parse_adapters
from llamac.engine.sampling.params import SamplingParams
from llamac.errors import ArgumentError

FILE = "models.toml"
MAX_FILE_BYTES = 1 << 20
ENDINGS = (".bin", ".gguf")
NOT_MODELS = ("tokenizer.bin",)  # llama2.c's tokenizer file
MAX_NAME = 200  # maximum length of a name in characters


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Settings of a served model.

    Attributes:
        context: Positions per request; None: the model's own value.
        max_sequences: Maximum number of requests that are computed at a time.
        max_queue: Maximum number of waiting requests.
        kv_dtype: Number format of the KV cache; None: llamac's default.
        numerics: How products round their inputs.
        kv_tokens: Capacity of the KV cache in positions.
        threads: Number of threads; None: llamac's default.
        idle_seconds: Seconds without a request after which the model is closed; 0: never.
        pinned: Whether the model is opened at startup and never closed.
        tokenizer: A tokenizer to use instead of the model's.
        chat_template: A file with a chat template to use instead of the model's.
        draft_model: A smaller model with the same vocabulary, or the model's assistant or EAGLE-3 head.
        adapters: LoRA adapters to apply, with their strengths.
        sampling: Default sampling parameters of requests. They override the model's recommendations.
    """

    context: int | None = None
    max_sequences: int = DEFAULT_SEQUENCES
    max_queue: int = 256
    kv_dtype: KVDtype | None = None
    numerics: Numerics = "exact"
    kv_tokens: int | None = None
    threads: int | None = None
    idle_seconds: float = 0
    pinned: bool = False
    tokenizer: Path | None = None
    chat_template: Path | None = None
    draft_model: Path | None = None
    adapters: tuple[tuple[Path, float], ...] = ()
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009  immutable


@dataclass(frozen=True)
class ServedModel:
    """A model of a folder.

    Attributes:
        names: Its names. Answers use the first.
        path: Its file or directory.
        settings: Its settings.
    """

    names: tuple[str, ...]
    path: Path
    settings: ModelSettings


def read_models(
    folder: Path, defaults: ModelSettings, on_warning: Callable[[str], object]
) -> tuple[list[ServedModel], str | None]:
    """Return the models of a folder, and the name of the default model.

    Each model file and Hugging Face directory is served under its own name, unless `models.toml` names it.

    Args:
        folder: The folder.
        defaults: Settings that `models.toml` can override per model.
        on_warning: Called with a sentence for each file that is not served, or that cannot be read now.

    Raises:
        ArgumentError: If the folder has no models, or its `models.toml` is invalid. The message gives the position.
        OSError: If the folder or the file cannot be read.
    """
    paths = _model_paths(folder, on_warning)
    files = {_name_of(path): path for path in paths}
    file = folder / FILE
    document = _document(file) if os.path.lexists(file) else {}
    top = _Table(file, "", document, ("default", "models"))
    listed = _Table(file, "models", top.get("models", dict, {}), None)
    found = []
    named: set[Path] = set()
    for name in listed.values:
        model = _model(folder, name, _Table(file, f"models.{name}", listed.get(name, dict, {}), MODEL), files, defaults)
        named.add(model.path)
        found.append(model)
    for path in paths:
        name = _name_of(path)
        if path in named:
            continue
        if path == files[name]:
            found.append(ServedModel((name,), path, defaults))
        else:
            on_warning(f"{path} is not served: {files[name].name} has the same name; name both in {FILE}")
    if not found:
        raise ArgumentError(f"{folder} has no models: expected files {' or '.join(f'*{end}' for end in ENDINGS)}")
    return found, top.get("default", str, None)


def _model_paths(folder: Path, on_warning: Callable[[str], object]) -> list[Path]:
    """Return the model files and directories of a folder, including files that cannot be read now."""
    found = []
    for path in sorted(folder.iterdir()):
        is_directory = os.path.isdir(path)
        file = path / "config.json" if is_directory else path
        try:
            is_model = is_directory or (path.suffix in ENDINGS and path.name not in NOT_MODELS)
            if stat.S_ISREG(os.stat(file).st_mode) and is_model:
                found.append(path)
                open(file, "rb").close()
        except FileNotFoundError:
            if path.is_symlink() and not is_directory:
                on_warning(f"{_absence(path)}: it is not served")
        except OSError as error:
            on_warning(f"{path} cannot be read: {error.strerror}")
    return found


def _absence(path: Path) -> str:
    if path.is_symlink():
        return f"{path} is a symbolic link to {os.readlink(path)}, which does not exist"
    return f"{path} does not exist"


def _name_of(path: Path) -> str:
    return path.name if path.is_dir() else path.stem


MODEL = (
    *("file", "aliases", "context", "max_sequences", "max_queue", "kv_dtype", "kv_tokens", "threads", "idle_seconds"),
    *("numerics", "pinned", "tokenizer", "chat_template", "draft_model", "adapters", "sampling"),
)


def _model(folder: Path, name: str, table: _Table, files: Mapping[str, Path], defaults: ModelSettings) -> ServedModel:
    """Return the model of a table `[models.NAME]`."""
    given = table.get("file", str, None)
    path = table.path(folder, "file", given) if given is not None else files.get(name)
    if path is None:
        raise table.error("file", f"{folder} has no model {name!r}: name its file with `file`")
    names = (name, *table.strings("aliases"))
    for each in names:
        if not each or not each.isprintable() or len(each) > MAX_NAME:
            raise table.error("aliases", f"{each!r} is not a name: expected 1 to {MAX_NAME} printable characters")
    given_settings: dict[str, Any] = {}
    for key, least in (("context", 1), ("max_sequences", 1), ("max_queue", 1), ("kv_tokens", 1), ("threads", 1)):
        if key in table.values:
            given_settings[key] = table.number(key, int, least)
    if "idle_seconds" in table.values:
        given_settings["idle_seconds"] = table.number("idle_seconds", float, 0)
    if "pinned" in table.values:
        given_settings["pinned"] = table.get("pinned", bool, False)
    for key, known in (("kv_dtype", KV_DTYPES), ("numerics", NUMERICS)):
        if key in table.values:
            name_given = table.get(key, str, "")
            if name_given not in known:
                raise table.error(key, f"{name_given!r}, expected {' or '.join(known)}")
            given_settings[key] = name_given
    for key in ("tokenizer", "chat_template", "draft_model"):
        if key in table.values:
            given_settings[key] = table.path(folder, key, table.get(key, str, "")).absolute()
    if "adapters" in table.values:
        found = []
        for text in table.strings("adapters"):
            [(relative, strength)] = parse_adapters([text])
            found.append((table.path(folder, "adapters", str(relative)).absolute(), strength))
        given_settings["adapters"] = tuple(found)
    if "sampling" in table.values:
        given_settings["sampling"] = table.sampling("sampling")
    return ServedModel(names, path, replace(defaults, **given_settings))


class _Table:
    """A table of the file. Errors name the table and the key."""

    def __init__(self, file: Path, place: str, values: Mapping[str, Any], known: Sequence[str] | None) -> None:
        """Check that all keys are known.

        Args:
            file: The file.
            place: The table's name in the file.
            values: The table's content.
            known: The valid keys; None: any.
        """
        self.values = values
        self._file = file
        self._place = place
        for key in values:
            if known is not None and key not in known:
                raise self.error(key, f"there is no such key{nearest(key, known)}")

    def error(self, key: str, message: str) -> ArgumentError:
        place = f"{self._place}.{key}" if self._place else key
        return ArgumentError(f"{self._file}: {place}: {message}")

    def get(self, key: str, kind: type, default: Any) -> Any:
        value = self.values.get(key, default)
        if value is not default and not isinstance(value, kind):
            raise self.error(key, f"{value!r} is not {KINDS[kind]}")
        return value

    def number(self, key: str, kind: type, least: int) -> Any:
        value = self.values[key]
        is_number = isinstance(value, int | kind) and isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not value >= least:
            raise self.error(key, f"{value!r}, expected {KINDS[kind]} of at least {least}")
        return value

    def strings(self, key: str) -> list[str]:
        values = self.get(key, list, [])
        if not all(isinstance(value, str) for value in values):
            raise self.error(key, f"{values!r}, expected an array of strings")
        return list(values)

    def path(self, folder: Path, key: str, text: str) -> Path:
        """Return a local file or directory. The server never downloads models."""
        if text in models.NAMES and not (folder / text).exists():
            return models.path(text)
        if text.startswith(("hf:", "http:", "https:")):
            raise self.error(key, f"{text!r} is not on this machine: convert it with `llamac export` first")
        found = folder / text
        if not text or not found.exists():
            raise self.error(key, _absence(found))
        return found

    def sampling(self, key: str) -> SamplingParams:
        given = self.get(key, dict, {})
        try:
            return SamplingParams().updated(given)
        except ArgumentError as error:
            known = SamplingParams.__dataclass_fields__
            wrong = next((name for name in given if name not in known), None)
            if wrong is not None:
                raise self.error(f"{key}.{wrong}", f"there is no such key{nearest(wrong, tuple(known))}") from None
            raise self.error(key, str(error)) from None


KINDS = {
    bool: "true or false",
    dict: "a table",
    float: "a number",
    int: "an integer",
    list: "an array",
    str: "a string",
}


def nearest(word: str, known: Sequence[str]) -> str:
    """Return a hint for an unknown word."""
    found = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {found[0]!r}?" if found else f", expected one of {', '.join(known)}"


def _document(file: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    with open(file, "rb") as opened:
        data = opened.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ArgumentError(f"{file} has more than {MAX_FILE_BYTES} bytes")
    try:
        document: dict[str, Any] = tomllib.loads(data.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{file}: this is not TOML: {error}") from None
    return document
