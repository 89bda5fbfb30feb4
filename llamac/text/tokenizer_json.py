"""Reads a tokenizer.json, and refuses those at which the library `tokenizers` would panic.

A panic prints on stderr and raises an exception that no `except Exception` catches. Known causes are therefore found
before the library gets the document; any other panic becomes a TokenizerError.
"""

from __future__ import annotations

import binascii
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from llamac.errors import TokenizerError, UnsupportedError
from llamac.format.strict_json import parse_object
from llamac.text.regex_cost import can_match_nothing

MAX_FILE_BYTES = 1 << 27  # the largest known tokenizer.json has 35 MB
MAX_VALUES = 1 << 23  # in it: a merge has 3
MAX_TOKENS = 1 << 20  # XLM-V has 901,629
MAX_MERGES = 1 << 21  # Gemma 3 has 514,906
MAX_ADDED_TOKENS = 1 << 17  # Llasa has 65,800
MAX_ADDED_CHARACTERS = 1 << 21  # of all added tokens together


# Packages and parts of llamac whose exceptions `library_errors` converts.
_LIBRARIES = ("tokenizers", "sentencepiece")
_OUR_PARTS = ("text", "format", "interrupt")


def parse_document(data: bytes, name: str) -> dict[str, Any]:
    """The JSON object of a tokenizer's file. TokenizerError with `name` if it is not one."""
    return parse_object(data, name, error=TokenizerError, max_bytes=MAX_FILE_BYTES, max_values=MAX_VALUES)


def steps(node: Any) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, without the sequences that contain them."""
    if isinstance(node, dict) and node.get("type") == "Sequence":
        for name in ("normalizers", "pretokenizers"):
            inner = node.get(name)
            for step in inner if isinstance(inner, list) else ():
                yield from steps(step)
    elif isinstance(node, dict):
        yield node


def check_structure(document: dict[str, Any]) -> None:
    """TokenizerError if the library would panic at a tokenizer.json."""
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
    """TokenizerError if a vocabulary is larger than any known one."""
    for count, limit, what in ((tokens, MAX_TOKENS, "tokens"), (merges, MAX_MERGES, "merges")):
        if count > limit:
            raise TokenizerError(f"the vocabulary has {count} {what}, the limit is {limit}")


def check_added(contents: Collection[str]) -> None:
    """TokenizerError if there are more added tokens, or longer ones, than in any known tokenizer."""
    if len(contents) > MAX_ADDED_TOKENS:
        raise TokenizerError(f"there are {len(contents)} added tokens, the limit is {MAX_ADDED_TOKENS}")
    if sum(map(len, contents)) > MAX_ADDED_CHARACTERS:
        raise TokenizerError(f"the added tokens have more than {MAX_ADDED_CHARACTERS} characters")


def _problem(step: dict[str, Any]) -> str:
    """What is wrong with a step that the library itself does not report; empty if nothing."""
    kind = step.get("type")
    if kind == "Prepend" and step.get("prepend") == "":
        return "prepends an empty string"
    if kind == "FixedLength" and step.get("length") == 0:
        return "cuts a text into pieces of no length"
    if kind == "Replace":
        pattern = step.get("pattern")
        regex = pattern.get("Regex") if isinstance(pattern, dict) else None
        if pattern == {"String": ""} or (isinstance(regex, str) and can_match_nothing(regex)):
            return "replaces empty strings"
    if kind == "Precompiled":
        return charsmap_problem(step.get("precompiled_charsmap"))
    return ""


def charsmap_problem(text: Any) -> str:
    """What is wrong with a table of replacements: the 32-bit units of a trie (a double array), then strings."""
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
        return "has a precompiled_charsmap of a wrong size"
    for index, unit in enumerate(struct.unpack_from(f"<{count}I", data, 4)):
        if unit >> 31:  # a leaf: where its string begins
            start = unit & 0x7FFFFFFF
            if start >= len(strings) or (start and strings[start - 1]):
                return "has a precompiled_charsmap that does not point to its strings"
        elif (index ^ (unit >> 10) << ((unit & 1 << 9) >> 6)) | 0xFF >= count:
            return "has a precompiled_charsmap that points beyond its units"
    return ""


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turns an exception of the library, a panic included, into a TokenizerError that begins with `what`.

    An exception that a signal handler raises during the call passes through unchanged.
    """
    try:
        yield
    except UnsupportedError as error:
        raise UnsupportedError(f"{what}: {error}") from None
    except Exception as error:  # the library raises Exception itself, ValueError, RuntimeError and others
        if not _raised_in_library(error):
            raise
        raise TokenizerError(f"{what}: {_line(error)}") from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{what}: the library tokenizers failed: {_line(error)}") from None


def _raised_in_library(error: BaseException) -> bool:
    """Whether an exception comes from our code or the native code that it called.

    Native code has no frames, so that the innermost frame is the caller's. A signal handler has a frame of its own.
    """
    trace, module = error.__traceback__, ""
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__name__", "")
        trace = trace.tb_next
    return module.split(".")[0] in _LIBRARIES or (module.startswith("llamac.") and module.split(".")[1] in _OUR_PARTS)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
