"""Reads chat templates from the files of Hugging Face directories (see `from_folder`) and from GGUF files.

A flat file has the default template in its own section. Its metadata has the others, and the strings of the special
tokens that templates use.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from llamac.errors import ExportError
from llamac.format.gguf_metadata import Value, read_metadata
from llamac.format.model_folders import TEMPLATES, check_links
from llamac.format.small_files import read_small
from llamac.format.strict_json import read_object
from llamac.text.vocabulary.added import NAMES as TOKEN_NAMES

DEFAULT = "default"  # the name of the default template
MAX_TEMPLATE_BYTES = 1 << 22  # the largest known templates have about 20,000
FILE, FOLDER = "chat_template.jinja", TEMPLATES
CONFIG, MAP = "tokenizer_config.json", "special_tokens_map.json"
PROCESSOR = "chat_template.json"  # of models with images, written by older processors of transformers
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
OTHERS, TOKENS, RESPONSE = "chat_templates", "special_tokens", "response_template"


def texts_of(metadata: Mapping[str, Any], key: str) -> dict[str, str]:
    """The strings of an entry of a flat file's metadata, by name. Other programs write metadata, too."""
    entries = metadata.get(key)
    return {name: text for name, text in entries.items() if isinstance(text, str)} if isinstance(entries, dict) else {}


class TemplateTexts(NamedTuple):
    """A model's chat templates and the special tokens that they can name.

    Attributes:
        templates: The code of each template, by name.
        special_tokens: The strings of special tokens, by name ("bos_token").
        response: The checkpoint's description of its answers, transformers' `response_template`, or None.
    """

    templates: dict[str, str]
    special_tokens: dict[str, str]
    response: Any = None

    def default(self) -> str:
        """The content of a flat file's template section: the default template, or an empty string."""
        return self.templates.get(DEFAULT, "")

    def metadata(self) -> dict[str, Any]:
        """A flat file's metadata entries for the other templates and, if there are templates, for special tokens."""
        others = {name: text for name, text in self.templates.items() if name != DEFAULT}
        tokens = self.special_tokens if self.templates else {}
        found = ((OTHERS, others), (TOKENS, tokens), (RESPONSE, self.response if self.templates else None))
        return {key: value for key, value in found if value}


def read_templates(path: Path) -> TemplateTexts:
    """Read the chat templates of a model.

    Args:
        path: A Hugging Face directory, a template or tokenizer_config.json in it, or a GGUF file.

    Returns:
        The templates, without any if there are none.

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
        return TemplateTexts(_config_templates(path, []), _special_tokens(path.parent))
    return TemplateTexts({DEFAULT: read_text(path)}, _special_tokens(path.parent))


def from_folder(folder: Path, warnings: list[str]) -> TemplateTexts:
    """Read the templates of a Hugging Face directory.

    They are in chat_template.jinja and additional_chat_templates/, else in tokenizer_config.json, else in
    chat_template.json.

    Args:
        folder: The directory.
        warnings: Gets a message if the user has to choose a template.

    Returns:
        The templates, without any if there are none.

    Raises:
        ExportError: If a template cannot be read, or a link leaves the directory.
    """
    check_links(folder)
    texts = {path.stem: read_text(path) for path in sorted((folder / FOLDER).glob("*.jinja"))}
    if (folder / FILE).is_file():
        texts[DEFAULT] = read_text(folder / FILE)
    for name in (CONFIG, PROCESSOR):
        if not texts and (folder / name).is_file():
            texts = _config_templates(folder / name, warnings)
    config = read_object(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    response = config.get(RESPONSE)
    return TemplateTexts(texts, _special_tokens(folder), response if isinstance(response, dict) else None)


def from_gguf(values: Mapping[str, Value]) -> TemplateTexts:
    """Read the templates in a GGUF file's metadata.

    Args:
        values: The metadata, by key.

    Returns:
        The templates, without any if there are none.

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
    return TemplateTexts(texts, _gguf_tokens(values))


def read_text(path: Path) -> str:
    """A template file's text, with line feeds as line ends.

    Raises:
        ExportError: If it is too large, no regular file, or not UTF-8.
        OSError: If it cannot be read.
    """
    try:
        return read_small(path, MAX_TEMPLATE_BYTES).decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        raise ExportError(f"{path} is not UTF-8") from None


def _config_templates(path: Path, warnings: list[str]) -> dict[str, str]:
    """The templates in a JSON file: one string, or several with names as a list or an object."""
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
