"""Receipts: everything that determines a result, as JSON, so that anyone can reproduce it. Schema: docs/receipts.md."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamac import __version__
from llamac.arguments import KV_DTYPES, NUMERICS, StrPath, wrong_type
from llamac.engine.identity import Identity
from llamac.engine.sampling.params import ResolvedParams
from llamac.errors import ArgumentError
from llamac.format.private_files import replacing
from llamac.format.strict_json import MAX_VALUES, parse_object

if TYPE_CHECKING:
    from llamac.engine.generation.output import FinishReason

VERSION = 1  # version of the schema
MAX_BYTES = 1 << 26
REPORTS = ("receipt", "speculation")  # parameters that do not affect the tokens


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """Everything that determines a result. The kernel set and the number of threads are not included, because they do
    not affect the result.

    Attributes:
        llamac: The version of llamac.
        model: The hashes of the model's parts.
        context: Positions of the sequence, which select the RoPE table of models that have two.
        kv_dtype: Number format of the KV cache.
        numerics: How products round their inputs: "exact" or "fast".
        settings: Every sampling parameter in effect, including the seed.
        prompt: The token ids of the prompt.
        tokens: The token ids of the result.
        text: The text of the result.
        finish_reason: Why the result ended.
        stopped_by: The stop token's id or the stop string, else None.
        rank: The result's rank among the sequences of a beam search, from 0; 0 without one.
        chat: The conversation behind the prompt: "messages", "tools" and "template_options"; None without one, or if it
            cannot be represented in JSON.
    """

    llamac: str
    model: Identity
    context: int
    kv_dtype: str
    numerics: str
    settings: Mapping[str, Any]
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stopped_by: int | str | None
    rank: int = 0
    chat: Mapping[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the receipt as a dict for JSON, as docs/receipts.md specifies."""
        model = {field.name: getattr(self.model, field.name) for field in fields(Identity)}
        return {
            "llamac_receipt": VERSION,
            "llamac": self.llamac,
            "model": {**model, "stop_ids": list(self.model.stop_ids)},
            "context": self.context,
            "kv_dtype": self.kv_dtype,
            "numerics": self.numerics,
            "settings": dict(self.settings),
            "prompt": list(self.prompt),
            **({} if self.chat is None else {"chat": dict(self.chat)}),
            "result": {
                "tokens": list(self.tokens),
                "text": self.text,
                "finish_reason": self.finish_reason,
                "stopped_by": self.stopped_by,
                **({"rank": self.rank} if self.rank else {}),
            },
        }

    def to_json(self) -> str:
        """Return the receipt as a line of ASCII JSON."""
        return json.dumps(self.as_dict())

    def save(self, path: StrPath) -> None:
        """Write the receipt to a file, and replace an existing one. It is complete or not there at all."""
        is_special = os.path.exists(path) and not os.path.isfile(path)  # a device or a pipe
        with open(path, "wb") if is_special else replacing(Path(path)) as file:
            file.write(f"{self.to_json()}\n".encode("ascii"))


def make_receipt(
    identity: Identity,
    params: ResolvedParams,
    prompt: Sequence[int],
    context: int,
    kv_dtype: str,
    numerics: str,
    result: tuple[Sequence[int], str, FinishReason, int | str | None],
) -> Receipt:
    """Create the receipt of a result. result: tokens, text, finish reason, and what stopped it."""
    tokens, text, finish_reason, stopped_by = result
    return Receipt(
        llamac=__version__,
        model=identity,
        context=context,
        kv_dtype=kv_dtype,
        numerics=numerics,
        settings={field.name: _plain(getattr(params, field.name)) for field in _recorded(params)},
        prompt=tuple(prompt),
        tokens=tuple(tokens),
        text=text,
        finish_reason=finish_reason,
        stopped_by=stopped_by,
    )


def chat_of(chat: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Convert a conversation to JSON types; None if it cannot be represented."""
    try:
        found: Mapping[str, Any] | None = json.loads(json.dumps(chat))
    except (TypeError, ValueError, RecursionError):
        return None
    return found


def _recorded(params: ResolvedParams) -> list[Any]:
    return [field for field in fields(params) if field.name not in REPORTS]


def _plain(value: Any) -> Any:
    """Convert a parameter to JSON types. Infinities become strings, and functions their names."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    grammar = getattr(value, "grammar", None)
    if isinstance(grammar, str):
        closings = getattr(value, "closings", ())
        return {"grammar": grammar, **({"closings": [list(ids) for ids in closings]} if closings else {})}
    return {"python": getattr(value, "__qualname__", type(value).__qualname__)}


# ---- reading


def read_receipt(source: Receipt | Mapping[str, Any] | str | os.PathLike[str]) -> Receipt:
    """Read a receipt.

    Args:
        source: A receipt, the dict that `as_dict` returns, or the path of a JSON file.

    Raises:
        ArgumentError: If it is not a receipt, or has a newer schema. The message names the field.
        OSError: If the file cannot be read.
    """
    if isinstance(source, Receipt):
        return source
    if isinstance(source, Mapping):
        return parse_receipt(source, "the receipt")
    if not isinstance(source, str | os.PathLike):
        raise wrong_type("receipt", source, "a Receipt, a dict or a path")
    with open(source, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    return parse_text(data, os.fspath(source))


def check_target(path: str) -> None:
    """Check that a command can write a receipt to a path. It replaces only receipts and empty files.

    Raises:
        ArgumentError: If the file exists and is something else, or its folder does not exist.
    """
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):
        raise ArgumentError(f"the folder {folder} does not exist")
    if os.path.isdir(path):
        raise ArgumentError(f"{path} is a directory, expected the name of a file")
    if os.path.isfile(path) and os.path.getsize(path):
        try:
            read_receipt(path)
        except ArgumentError:
            raise ArgumentError(f"{path} exists and is not a receipt: choose another name") from None


def parse_text(data: bytes, name: str) -> Receipt:
    """Parse the JSON of a receipt. `name` identifies it in errors."""
    found = parse_object(data, name, error=ArgumentError, max_bytes=MAX_BYTES, max_values=4 * MAX_VALUES)
    return parse_receipt(found, name)


def parse_receipt(found: Mapping[str, Any], name: str) -> Receipt:
    """Check the object of a receipt."""
    if "llamac_receipt" not in found:
        raise ArgumentError(f"{name} is not a receipt of llamac: it has no field llamac_receipt")
    if found["llamac_receipt"] != VERSION:
        raise ArgumentError(
            f"{name} is a receipt of version {found['llamac_receipt']!r}, this llamac reads version {VERSION}"
        )
    top = _Fields(found, name)
    model, result = (
        _Fields(top.get("model", dict), f"{name}: model"),
        _Fields(top.get("result", dict), f"{name}: result"),
    )
    stops = model.ids("stop_ids")
    texts = {key: model.get(key, str) for key in ("name", "source", "file", "weights")}
    optional = {key: model.get(key, str, type(None)) for key in ("tokenizer", "template", "adapters")}
    for field, known in (("kv_dtype", KV_DTYPES), ("numerics", NUMERICS)):
        if top.get(field, str) not in known:
            raise ArgumentError(f"{name}: {field} is {found[field]!r}, expected one of {', '.join(known)}")
    return Receipt(
        llamac=top.get("llamac", str),
        model=Identity(**texts, **optional, stop_ids=stops, numerics=model.get("numerics", int)),
        context=top.get("context", int),
        kv_dtype=found["kv_dtype"],
        numerics=found["numerics"],
        settings=top.get("settings", dict),
        prompt=top.ids("prompt"),
        tokens=result.ids("tokens"),
        text=result.get("text", str),
        finish_reason=result.get("finish_reason", str),
        stopped_by=result.get("stopped_by", int, str, type(None)),
        rank=result.get("rank", int) if "rank" in found["result"] else 0,
        chat=_chat(top, f"{name}: chat") if "chat" in found else None,
    )


def _chat(top: _Fields, name: str) -> Mapping[str, Any]:
    """Check a conversation."""
    chat = _Fields(top.get("chat", dict), name)
    messages, tools = chat.get("messages", list), chat.get("tools", list, type(None))
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ArgumentError(f"{name}: messages[{index}] is of the type {type(message).__name__}, expected object")
    options = chat.get("template_options", dict)
    named = {"tool_format": chat.get("tool_format", str)} if "tool_format" in top.get("chat", dict) else {}
    return {"messages": messages, "tools": tools, "template_options": options, **named}


class _Fields:
    """Checked access to the fields of an object."""

    def __init__(self, found: Mapping[str, Any], name: str) -> None:
        self._found, self._name = found, name

    def get(self, field: str, *types: type) -> Any:
        """Return the value of a field, which must have one of these types."""
        if field not in self._found:
            raise ArgumentError(f"{self._name} has no field {field}")
        value = self._found[field]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            expected = " or ".join({"NoneType": "null", "dict": "object"}.get(t.__name__, t.__name__) for t in types)
            raise ArgumentError(f"{self._name}: {field} is of the type {type(value).__name__}, expected {expected}")
        return value

    def ids(self, field: str) -> tuple[int, ...]:
        """Return a list of token ids."""
        values = self.get(field, list)
        if not all(isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31 for value in values):
            raise ArgumentError(f"{self._name}: {field} must contain only token ids")
        return tuple(values)
