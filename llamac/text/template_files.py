"""Reads chat templates from chat_template.jinja, additional_chat_templates/, tokenizer_config.json and GGUF files.

A flat file has the default template in its own section. Its metadata has the others, and the strings of the special
tokens that templates use.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamac.errors import ExportError
from llamac.format.gguf_metadata import Value, read_metadata
from llamac.format.model_folders import TEMPLATES, check_links
from llamac.format.small_files import read_small
from llamac.format.strict_json import read_object
from llamac.text.chat import DEFAULT, ChatTemplate
from llamac.text.vocabulary.added import NAMES as TOKEN_NAMES

MAX_TEMPLATE_BYTES = 1 << 22  # the largest known templates have about 20,000
FILE, FOLDER = "chat_template.jinja", TEMPLATES
CONFIG, MAP = "tokenizer_config.json", "special_tokens_map.json"
GGUF_KEY = "tokenizer.chat_template"
# GGUF's names for roles of tokens, where they differ from those in templates.
GGUF_TOKENS = {"unk": "unknown", "sep": "seperator", "pad": "padding"}  # sic
# The special tokens that a tokenizer class assumes if its files do not name them.
_END = "<|endoftext|>"
CLASS_TOKENS = {
    "GPT2Tokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END},
    "Qwen2Tokenizer": {"eos_token": _END, "unk_token": _END, "pad_token": _END},
    "GPTNeoXTokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END, "pad_token": "<|padding|>"},
    "GemmaTokenizer": {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
}
# Keys in the metadata of a flat file.
OTHERS, TOKENS = "chat_templates", "special_tokens"


def read_templates(path: Path) -> ChatTemplate | None:
    """Read the chat templates of a model.

    Args:
        path: A Hugging Face directory, a template or tokenizer_config.json in it, or a GGUF file.

    Returns:
        The templates, or None if there are none.

    Raises:
        OSError: If a file cannot be read.
        ExportError: If a template cannot be read, or a link leaves the directory.
        ModelError: If a GGUF file is damaged.
    """
    if path.is_dir():
        return from_folder(path, [])
    check_links(path.parent, {CONFIG, MAP} - {path.name})
    with open(path, "rb") as file:
        head = file.read(4)
    if head == b"GGUF":
        return from_gguf(read_metadata(path).values)
    if path.suffix == ".json":
        return _make(_config_templates(path, []), _special_tokens(path.parent))
    return _make({DEFAULT: _read_text(path)}, _special_tokens(path.parent))


def from_folder(folder: Path, warnings: list[str]) -> ChatTemplate | None:
    """Read the templates of a Hugging Face directory. Separate files take precedence over tokenizer_config.json.

    Args:
        folder: The directory.
        warnings: Gets a message if the user has to choose a template.

    Returns:
        The templates, or None if there are none.

    Raises:
        ExportError: If a template cannot be read, or a link leaves the directory.
    """
    check_links(folder)
    texts = {path.stem: _read_text(path) for path in sorted((folder / FOLDER).glob("*.jinja"))}
    if (folder / FILE).is_file():
        texts[DEFAULT] = _read_text(folder / FILE)
    if not texts and (folder / CONFIG).is_file():
        texts = _config_templates(folder / CONFIG, warnings)
    return _make(texts, _special_tokens(folder))


def from_gguf(values: Mapping[str, Value]) -> ChatTemplate | None:
    """Read the templates in a GGUF file's metadata.

    Args:
        values: The metadata, by key.

    Returns:
        The templates, or None if there are none.

    Raises:
        ExportError: If a template is not a string.
    """
    texts: dict[str, str] = {}
    for key, value in values.items():
        name = DEFAULT if key == GGUF_KEY else key.removeprefix(f"{GGUF_KEY}.")
        if name != key:
            if not isinstance(value, str):
                raise ExportError(f"{key!r} is not a string")
            texts[name] = value
    return _make(texts, _gguf_tokens(values))


def _make(texts: dict[str, str], tokens: dict[str, str]) -> ChatTemplate | None:
    return ChatTemplate(texts, tokens) if texts else None


def _read_text(path: Path) -> str:
    """A template file's text, with line feeds as line ends."""
    try:
        return read_small(path, MAX_TEMPLATE_BYTES).decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        raise ExportError(f"{path} is not UTF-8") from None


def _config_templates(path: Path, warnings: list[str]) -> dict[str, str]:
    """The templates in a tokenizer_config.json: one string, or several with names as a list or an object."""
    given: Any = read_object(path).get("chat_template")
    if given is None:
        return {}
    if isinstance(given, dict):
        given = [{"name": name, "template": text} for name, text in given.items()]
    named = [{"name": DEFAULT, "template": given}] if isinstance(given, str) else given
    texts: dict[str, str] = {}
    for entry in named if isinstance(named, list) else (None,):
        name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            raise ExportError(f"{path.name}: chat_template is neither a string nor a list of named strings")
        texts[name] = text
    for text in (*texts, *texts.values()):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ExportError(f"{path.name}: chat_template contains a lone surrogate") from None
    if DEFAULT not in texts:
        warnings.append(f"none of the chat templates ({', '.join(texts)}) is named 'default': choose one by name")
    return texts


def _special_tokens(folder: Path) -> dict[str, str]:
    """The strings of the special tokens that the files of a directory name, by name."""
    config = read_object(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if "added_tokens_decoder" not in config and (folder / MAP).is_file():
        config = {**config, **read_object(folder / MAP)}
    texts: dict[str, str] = {}
    extra = config.get("extra_special_tokens")  # an object of the model's own names
    kind = str(config.get("tokenizer_class")).removesuffix("Fast")
    named = {name: config[name] for name in TOKEN_NAMES if name in config}
    for name, value in {**CLASS_TOKENS.get(kind, {}), **(extra if isinstance(extra, dict) else {}), **named}.items():
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            texts[name] = text
    return texts


def _gguf_tokens(values: Mapping[str, Value]) -> dict[str, str]:
    """The strings of the special tokens that GGUF metadata names, by the names that templates use."""
    tokens = values.get("tokenizer.ggml.tokens")
    texts: dict[str, str] = {}
    for name in TOKEN_NAMES:
        role = name.removesuffix("_token")
        token = values.get(f"tokenizer.ggml.{GGUF_TOKENS.get(role, role)}_token_id")
        if isinstance(tokens, list) and type(token) is int and 0 <= token < len(tokens):
            text = tokens[token]
            if isinstance(text, str):
                texts[name] = text
    return texts


def to_metadata(templates: ChatTemplate | None) -> dict[str, Any]:
    """The metadata entries of a flat file for templates other than the default one and for special tokens."""
    if templates is None:
        return {}
    others = {name: text for name, text in templates.templates.items() if name != DEFAULT}
    return {key: value for key, value in ((OTHERS, others), (TOKENS, templates.special_tokens)) if value}


def default_text(templates: ChatTemplate | None) -> str:
    """The content of a flat file's template section: the default template, or an empty string."""
    return "" if templates is None else templates.templates.get(DEFAULT, "")
