"""Chat templates where models keep them: chat_template.jinja, additional_chat_templates/, tokenizer_config.json, GGUF.

A flat file holds the default template in its section, the others and the texts of special tokens in its metadata.
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

MAX_TEMPLATE_BYTES = 1 << 22  # the largest known ones have some 20,000
FILE, FOLDER = "chat_template.jinja", TEMPLATES
CONFIG, MAP = "tokenizer_config.json", "special_tokens_map.json"
GGUF_KEY = "tokenizer.chat_template"
# How GGUF names the tokens that templates know by other names.
GGUF_TOKENS = {"unk": "unknown", "sep": "seperator", "pad": "padding"}
# What a tokenizer's class takes for tokens that its files leave out.
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
# What the metadata of a flat file call them.
OTHERS, TOKENS = "chat_templates", "special_tokens"


def read_templates(path: Path) -> ChatTemplate | None:
    """The templates at `path`: a directory, one of its files, or a GGUF file; None where there are none."""
    if path.is_dir():
        return from_folder(path, [])
    check_links(path.parent, {CONFIG, MAP} - {path.name})
    with open(path, "rb") as file:
        head = file.read(4)
    if head == b"GGUF":
        return from_gguf(read_metadata(path).values)
    if path.suffix == ".json":
        return _made(_of_config(path, []), _tokens(path.parent))
    return _made({DEFAULT: _text(path)}, _tokens(path.parent))


def from_folder(folder: Path, warnings: list[str]) -> ChatTemplate | None:
    """The templates of a Hugging Face directory. Files of their own come before tokenizer_config.json."""
    check_links(folder)
    texts = {path.stem: _text(path) for path in sorted((folder / FOLDER).glob("*.jinja"))}
    if (folder / FILE).is_file():
        texts[DEFAULT] = _text(folder / FILE)
    if not texts and (folder / CONFIG).is_file():
        texts = _of_config(folder / CONFIG, warnings)
    return _made(texts, _tokens(folder))


def from_gguf(values: Mapping[str, Value]) -> ChatTemplate | None:
    """The templates of a GGUF file's metadata."""
    texts: dict[str, str] = {}
    for key, value in values.items():
        name = DEFAULT if key == GGUF_KEY else key.removeprefix(f"{GGUF_KEY}.")
        if name != key:
            if not isinstance(value, str):
                raise ExportError(f"{key!r} is no text")
            texts[name] = value
    return _made(texts, _gguf_tokens(values))


def _made(texts: dict[str, str], tokens: dict[str, str]) -> ChatTemplate | None:
    return ChatTemplate(texts, tokens) if texts else None


def _text(path: Path) -> str:
    try:
        return read_small(path, MAX_TEMPLATE_BYTES).decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        raise ExportError(f"{path} is not UTF-8") from None


def _of_config(path: Path, warnings: list[str]) -> dict[str, str]:
    """The templates of a tokenizer_config.json: a text, or texts with names, as a list or an object."""
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
            raise ExportError(f"{path.name}: chat_template is neither a text nor a list of named texts")
        texts[name] = text
    for text in (*texts, *texts.values()):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ExportError(f"{path.name}: chat_template holds a lone surrogate, which is no character") from None
    if DEFAULT not in texts:
        warnings.append(f"none of the chat templates ({', '.join(texts)}) is named 'default': one has to be chosen")
    return texts


def _tokens(folder: Path) -> dict[str, str]:
    """The texts of the special tokens that the files of a directory name."""
    config = read_object(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if "added_tokens_decoder" not in config and (folder / MAP).is_file():
        config = {**config, **read_object(folder / MAP)}
    texts: dict[str, str] = {}
    own = config.get("extra_special_tokens")  # an object gives names to tokens of the model's own
    kind = str(config.get("tokenizer_class")).removesuffix("Fast")
    named = {name: config[name] for name in TOKEN_NAMES if name in config}
    for name, value in {**CLASS_TOKENS.get(kind, {}), **(own if isinstance(own, dict) else {}), **named}.items():
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            texts[name] = text
    return texts


def _gguf_tokens(values: Mapping[str, Value]) -> dict[str, str]:
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
    """What a flat file's metadata hold of templates, beside the default one."""
    if templates is None:
        return {}
    others = {name: text for name, text in templates.templates.items() if name != DEFAULT}
    return {key: value for key, value in ((OTHERS, others), (TOKENS, templates.special_tokens)) if value}


def default_text(templates: ChatTemplate | None) -> str:
    """The template of a flat file's section: the default one, or none."""
    return "" if templates is None else templates.templates.get(DEFAULT, "")
