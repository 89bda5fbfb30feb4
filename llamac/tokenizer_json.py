"""What the library `tokenizers` does not check in a tokenizer.json, but panics at.

A panic prints a text on stderr and raises what no `except Exception` sees. So such a tokenizer.json is refused before
the library gets it; a panic that was not foreseen becomes an error of ours.
"""

from __future__ import annotations

import binascii
import json
import re
import secrets
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from llamac.errors import TokenizerError

try:
    from re import _parser  # type: ignore[attr-defined]
except ImportError:  # Python 3.10
    import sre_parse as _parser

# Without one of these nothing below can be wrong, and the text, which may have 35 MB, need not be parsed here.
_RISKY = re.compile(
    rb'"(?:Precompiled|FixedLength)"|"continuing_subword_prefix"\s*:\s*"|"(?:prepend|String)"\s*:\s*""|\\u00'
)


def check_structure(data: bytes) -> None:
    """TokenizerError where the library would panic at the tokenizer.json `data`. What is no JSON is left to it."""
    if not _RISKY.search(data) and not (b'"Replace"' in data and b'"Regex"' in data):
        return
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(document, dict):
        return
    model = document.get("model")
    if not isinstance(model, dict):
        return
    if model.get("continuing_subword_prefix") and model.get("type", "BPE") == "BPE":
        raise TokenizerError("the model's continuing_subword_prefix is not supported")
    try:
        for step in (*_steps(document.get("normalizer")), *_steps(document.get("pre_tokenizer"))):
            problem = _problem(step)
            if problem:
                raise TokenizerError(f"the step {step.get('type')} {problem}")
    except RecursionError:
        raise TokenizerError("the steps are nested too deeply") from None


def _steps(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
        for inner in (*_list(node.get("normalizers")), *_list(node.get("pretokenizers"))):
            yield from _steps(inner)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _problem(step: dict[str, Any]) -> str:
    """What is wrong with a step; empty if nothing that the library would not see itself."""
    kind = step.get("type")
    if kind == "Prepend" and step.get("prepend") == "":
        return "puts nothing in front of a text"
    if kind == "FixedLength" and step.get("length") == 0:
        return "cuts a text into pieces of no length"
    if kind == "Replace":
        pattern = step.get("pattern")
        if pattern == {"String": ""} or (isinstance(pattern, dict) and _matches_nothing(pattern.get("Regex"))):
            return "replaces empty strings"
    if kind == "Precompiled":
        return charsmap_problem(step.get("precompiled_charsmap"))
    return ""


def _matches_nothing(regex: Any) -> bool:
    """Whether a regular expression can match an empty string, as far as Python's parser knows it.

    It is not tried out: Python's engine may take years for the expression of a stranger.
    """
    if not isinstance(regex, str):
        return False
    try:
        shortest: int = _parser.parse(regex).getwidth()[0]
    except (re.error, RecursionError, OverflowError):
        return False
    return shortest == 0


def charsmap_problem(text: Any) -> str:
    """What is wrong with a table of replacements: the 32-bit units of a trie (a double array), then texts."""
    if not isinstance(text, str):
        return "has no precompiled_charsmap"
    try:
        data = binascii.a2b_base64(text)
        (size,) = struct.unpack_from("<I", data)
        texts = data[4 + size :]
        texts.decode()
    except (ValueError, struct.error):
        return "has a damaged precompiled_charsmap"
    if binascii.b2a_base64(data, newline=False).decode() != text:
        return "has a damaged precompiled_charsmap"
    count = size // 4
    if size % 4 or not 0 < count <= (len(data) - 4) // 4 or texts[-1:] != b"\0":
        return "has a precompiled_charsmap of a wrong size"
    for index, unit in enumerate(struct.unpack_from(f"<{count}I", data, 4)):
        if unit >> 31:  # a leaf: where its text begins
            start = unit & 0x7FFFFFFF
            if start >= len(texts) or (start and texts[start - 1]):
                return "has a precompiled_charsmap that does not point to its texts"
        elif (index ^ (unit >> 10) << ((unit & 1 << 9) >> 6)) | 0xFF >= count:
            return "has a precompiled_charsmap that points behind its units"
    return ""


def without_names(data: bytes, special: Collection[int]) -> bytes:
    """The tokenizer.json `data` in which no text can be one of the tokens `special`.

    The library does not look for them when it is told not to, but a model that finds its pieces by their texts still
    does. There they get names that nobody can write."""
    if not re.search(rb'"type"\s*:\s*"(?:Unigram|WordLevel|WordPiece)"', data):
        return data
    document = json.loads(data)
    model = document["model"]
    secret = secrets.token_hex(16)
    vocab = model["vocab"]
    if isinstance(vocab, list):
        names = {vocab[index][0] for index in special if index < len(vocab)}
        model["vocab"] = [[secret + text if text in names else text, score] for text, score in vocab]
    else:
        names = {text for text, index in vocab.items() if index in special}
        model["vocab"] = {secret + text if text in names else text: index for text, index in vocab.items()}
    if model.get("unk_token") in names:
        model["unk_token"] = secret + model["unk_token"]
    for entry in document["added_tokens"]:
        if entry["content"] in names:
            entry["content"] = secret + entry["content"]
    return json.dumps(document, ensure_ascii=False).encode()


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """What the library raises, a panic included, as a TokenizerError that says what could not be done."""
    try:
        yield
    except Exception as error:  # the library raises plain Exception and ValueError
        raise TokenizerError(f"{what}: {_line(error)}") from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{what}: the library tokenizers failed: {_line(error)}") from None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
