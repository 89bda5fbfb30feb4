"""Parses a tokenizer.json, and rejects documents that would make the library `tokenizers` panic.

A panic prints to stderr and raises an exception that `except Exception` does not catch. So known causes are detected
before the library gets the document. Any other panic becomes a TokenizerError.
"""

from __future__ import annotations

import binascii
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from llamac.errors import OutOfMemoryError, TokenizerError, UnsupportedError
from llamac.format.strict_json import parse_object
from llamac.text.packed import document_of, is_packed

MAX_FILE_BYTES = 1 << 27  # the largest known tokenizer.json has 35 MB
MAX_VALUES = 1 << 23  # JSON values in a file; a merge has 3
MAX_TOKENS = 1 << 20  # XLM-V has 901,629
MAX_MERGES = 1 << 21  # Gemma 3 has 514,906
MAX_ADDED_TOKENS = 1 << 17  # Llasa has 65,800
MAX_ADDED_CHARACTERS = 1 << 21  # of all added tokens together

# Packages, and subpackages of llamac, whose exceptions `library_errors` converts.
_LIBRARIES = ("tokenizers", "sentencepiece")
_OUR_PARTS = ("text", "format", "interrupt", "_core")


def parse_document(data: bytes, name: str) -> dict[str, Any]:
    """Parse the JSON object in a tokenizer's file.

    Args:
        data: The file's content, or a tokenizer in packed form (packed.py).
        name: The document's name in error messages.

    Raises:
        TokenizerError: If it is not valid JSON, not an object, or too large.
    """
    if is_packed(data):
        return document_of(data)
    return parse_object(data, name, error=TokenizerError, max_bytes=MAX_FILE_BYTES, max_values=MAX_VALUES)


def steps(node: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer, without the sequences that contain them."""
    if isinstance(node, dict) and node.get("type") == "Sequence":
        for name in ("normalizers", "pretokenizers"):
            inner = node.get(name)
            for step in inner if isinstance(inner, list) else ():
                yield from steps(step)
    elif isinstance(node, dict):
        yield node


def check_structure(document: dict[str, Any]) -> None:
    """Check a tokenizer.json for known causes of panics in the library.

    Raises:
        TokenizerError: If it has one.
    """
    model = document.get("model")
    if not isinstance(model, dict):
        raise TokenizerError("it has no model")
    check_counts(len(model.get("vocab") or ()), len(model.get("merges") or ()))
    check_added([str(entry.get("content")) for entry in document.get("added_tokens") or []])
    if model.get("continuing_subword_prefix") and model.get("type", "BPE") == "BPE":
        raise TokenizerError("the model's continuing_subword_prefix is not supported")
    for step in (*steps(document.get("normalizer")), *steps(document.get("pre_tokenizer"))):
        problem = _problem(step)
        if problem:
            raise TokenizerError(f"the step {step.get('type')} {problem}")


def check_counts(tokens: int, merges: int = 0) -> None:
    """Check that a vocabulary is not larger than any known one.

    Args:
        tokens: The number of tokens.
        merges: The number of merges.

    Raises:
        TokenizerError: If it is.
    """
    for count, limit, what in ((tokens, MAX_TOKENS, "tokens"), (merges, MAX_MERGES, "merges")):
        if count > limit:
            raise TokenizerError(f"the vocabulary has {count} {what}, the limit is {limit}")


def check_added(contents: Collection[str]) -> None:
    """Check that there are not more or longer added tokens than in any known tokenizer.

    Args:
        contents: The strings of the added tokens.

    Raises:
        TokenizerError: If there are.
    """
    if len(contents) > MAX_ADDED_TOKENS:
        raise TokenizerError(f"there are {len(contents)} added tokens, the limit is {MAX_ADDED_TOKENS}")
    if sum(map(len, contents)) > MAX_ADDED_CHARACTERS:
        raise TokenizerError(f"the added tokens have more than {MAX_ADDED_CHARACTERS} characters")


def _problem(step: dict[str, Any]) -> str:
    """The problem of a step that the library itself does not report; empty if there is none."""
    kind = step.get("type")
    if kind == "Prepend" and step.get("prepend") == "":
        return "prepends an empty string"
    if kind == "FixedLength" and step.get("length") == 0:
        return "splits text into pieces of length 0"
    if kind == "Replace":
        pattern = step.get("pattern")
        regex = pattern.get("Regex") if isinstance(pattern, dict) else None
        if pattern == {"String": ""} or (isinstance(regex, str) and _can_match_nothing(regex)):
            return "replaces empty strings"
    if kind == "Precompiled":
        return charsmap_problem(step.get("precompiled_charsmap"))
    return ""


def _can_match_nothing(regex: str) -> bool:
    from llamac.text.regex_cost import can_match_nothing  # many tokenizers have no expressions

    return can_match_nothing(regex)


def charsmap_problem(text: Any) -> str:
    """Check SentencePiece's table of character replacements: 32-bit units of a double-array trie, then strings.

    Args:
        text: The table in base64.

    Returns:
        The problem; empty if there is none.
    """
    if not isinstance(text, str):
        return "has no precompiled_charsmap"
    try:
        data = binascii.a2b_base64(text)
        (size,) = struct.unpack_from("<I", data)
        strings = data[4 + size :]
        strings.decode()
    except (ValueError, struct.error):
        return "has a damaged precompiled_charsmap"
    if binascii.b2a_base64(data, newline=False).decode() != text:
        return "has a damaged precompiled_charsmap"
    count = size // 4
    if size % 4 or not 0 < count <= (len(data) - 4) // 4 or strings[-1:] != b"\0":
        return "has a precompiled_charsmap of the wrong size"
    for index, unit in enumerate(struct.unpack_from(f"<{count}I", data, 4)):
        if unit >> 31:  # a leaf, with the start of its string
            start = unit & 0x7FFFFFFF
            if start >= len(strings) or (start and strings[start - 1]):
                return "has a precompiled_charsmap that does not point to its strings"
        elif (index ^ (unit >> 10) << ((unit & 1 << 9) >> 6)) | 0xFF >= count:
            return "has a precompiled_charsmap that points beyond its units"
    return ""


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Convert exceptions of the library, including panics, to a TokenizerError.

    An exception that a signal handler raises during the call passes through unchanged.

    Args:
        what: Begins the error message.
    """
    try:
        yield
    except (UnsupportedError, OutOfMemoryError) as error:
        raise type(error)(f"{what}: {error}") from None
    except Exception as error:  # the library raises Exception itself, ValueError, RuntimeError and others
        if not _raised_in_library(error):
            raise
        if isinstance(error, MemoryError):
            raise OutOfMemoryError(f"{what}: there is not enough memory") from None
        raise TokenizerError(f"{what}: {_line(error)}") from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{what}: the library tokenizers failed: {_line(error)}") from None


def _raised_in_library(error: BaseException) -> bool:
    """Whether an exception comes from llamac's code or native code that it called, and not from a signal handler.

    Native code has no frames, so the innermost frame is its caller's. A signal handler has its own frame.
    """
    trace, module = error.__traceback__, ""
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__name__", "")
        trace = trace.tb_next
    return module.split(".")[0] in _LIBRARIES or (module.startswith("llamac.") and module.split(".")[1] in _OUR_PARTS)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
